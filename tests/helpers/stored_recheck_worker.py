"""Under torchrun: something moves on one rank only, for tests/hooks/test_stored_recheck_ddp.py."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import stored_runs as runs
import torch
from processes import hand_back
from stored_ddp_worker import TwoParts, two_optimizers
from stored_runs import SGD, At, Net, log_text, overrider, seeded, state_of, stored_runner
from torch import nn

FOLDER = sys.argv[1] if len(sys.argv) > 1 else ""
DRIFTS = {
    drift.__name__: drift
    for drift in (
        runs.move_dtype,
        runs.move_dtype_with_states,
        runs.replace_parameter,
        runs.replace_parameter_everywhere,
        runs.delete_forward,
        runs.move_buffers,
    )
}
PATTERNS = ("norm", "bn", "head")


def trained(
    drift: Callable[[Any, Any], None] | None = None,
    on_drift: str = "restore",
    build: Callable[[], nn.Module] = Net,
    patterns: Sequence[str] = PATTERNS,
    when: int = 4,
    optimizers: Callable[[Any], Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Train with ``drift`` on rank 1 alone."""
    model = seeded(build)
    ours = overrider(
        patterns, override_parameters=True, override_buffers=True, check_interval=2, on_drift=on_drift
    )
    if optimizers is not None:
        kwargs["optim_wrapper"] = optimizers(model)
    disturber = [At(when, drift, rank=1)] if drift is not None else []
    runner = stored_runner(FOLDER, model, [ours, *disturber], **kwargs)
    result: dict[str, Any] = {}
    try:
        runner.train()
    finally:
        result["iteration"] = runner.iter
        result["log"] = log_text(runner)[-3000:]
        LAST.update(result)
    state = state_of(runner)
    state["optimizer"] = {k: v for k, v in state["optimizer"].items() if not k.startswith("not in")}
    return {"state": state, **result}


LAST: dict[str, Any] = {}


def raising(drift: Callable[[Any, Any], None]) -> dict[str, Any]:
    try:
        trained(drift, on_drift="raise")
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "iteration": LAST["iteration"] + 1}
    return {"error": None}


def move_first_norm(model: nn.Module, runner: Any) -> None:
    model.one.module[1].float()


class Other(Net):
    """On rank 1 a layer has another name."""

    def __init__(self) -> None:
        super().__init__()
        if torch.distributed.get_rank() == 1:
            self.other = self.head
            del self.head


class ScriptedOnOneRank(Net):
    def __init__(self) -> None:
        super().__init__()
        if torch.distributed.get_rank() == 1:
            self.head = torch.jit.script(self.head)


def start(build: Callable[[], nn.Module], patterns: Sequence[str], **kwargs: Any) -> dict[str, Any]:
    """A start that fails on rank 1; nothing may stay behind on rank 0."""
    model = seeded(build)
    runner = stored_runner(FOLDER, model, [overrider(patterns, override_parameters=True, **kwargs)])
    runner.train()
    return {"error": None}


VARIANTS: dict[str, dict[str, Any]] = {
    "find_unused": {
        "build": functools.partial(Net, unused=True),
        "wrapper": {"find_unused_parameters": True},
    },
    "static_graph": {"wrapper": {"static_graph": True}},
    "bucket_view": {"wrapper": {"gradient_as_bucket_view": True}},
    "accumulation": {"accumulate": 3},  # 4 is in the midst of it
    "sgd": {"optimizer": SGD},
    "compile": {"cfg": {"compile": {"backend": "eager"}}, "patterns": ("norm", "head")},
    "own_wrapper": {"wrapper": {"type": "CompressingDDP", "own_argument": "kept"}},
    "separate": {
        "build": TwoParts,
        "patterns": ("one.1", "two.1", "two.2"),
        "wrapper": {"type": "MMSeparateDistributedDataParallel"},
        "optimizers": two_optimizers,
        "drift": move_first_norm,
    },
}

if __name__ == "__main__":
    scenarios: dict[str, Callable[[], Any]] = {"quiet": trained}
    for name, drift in DRIFTS.items():
        scenarios[f"restore_{name}"] = functools.partial(trained, drift)
        scenarios[f"raise_{name}"] = functools.partial(raising, drift)
    for name, kwargs in VARIANTS.items():
        scenarios[f"{name}_quiet"] = functools.partial(trained, **{**kwargs, "drift": None})
        scenarios[f"{name}_restore"] = functools.partial(trained, **{"drift": runs.move_dtype, **kwargs})
    scenarios["warn"] = functools.partial(trained, runs.delete_forward, "warn", when=6)
    scenarios["start_other_names"] = functools.partial(start, Other, ("norm", "head"), strict=True)
    scenarios["start_scripted"] = functools.partial(start, ScriptedOnOneRank, ("head",))
    scenarios["after_the_errors"] = trained
    hand_back(scenarios)
