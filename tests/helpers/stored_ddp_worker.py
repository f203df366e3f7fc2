"""Under torchrun: each scenario trained three ways (``KINDS``), for tests/hooks/test_stored_ddp.py."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel, MMDistributedDataParallel
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import MODEL_WRAPPERS
from mmengine.runner import Runner
from processes import hand_back
from stored_runs import (
    FUSED_ADAMW,
    SGD,
    CastDataInBeforeTrain,
    Net,
    digest,
    overrider,
    seeded,
    store,
    stored_runner,
    train,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn import functional as F

KINDS = ("hook", "before", "naive")
FOLDER = sys.argv[1] if len(sys.argv) > 1 else ""

TWO = ("norm", "head")
ALL = ("stem", "norm", "mid", "bn", "head")


@MODEL_WRAPPERS.register_module()
class CompressingDDP(MMDistributedDataParallel):
    """A user's own wrapper: an argument of its own, and gradients sent in float16."""

    def __init__(self, module: nn.Module, own_argument: str, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self.own_argument = own_argument
        self.calls = 0
        self.register_comm_hook(self, _counting_compress)


def _counting_compress(state, bucket):  # DDP wants no annotations, or real ones
    state.calls += 1
    return fp16_compress_hook(torch.distributed.group.WORLD, bucket)


class TwoParts(BaseModel):
    """What MMSeparateDistributedDataParallel is for: its parts train with optimizers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU())
        self.two = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))

    def train_step(self, data: Any, optim_wrapper: OptimWrapperDict) -> dict[str, Tensor]:
        data = self.data_preprocessor(data, True)
        with optim_wrapper["one"].optim_context(self), optim_wrapper["two"].optim_context(self):
            loss = F.mse_loss(self.two(self.one(data["x"])), data["y"])
        optim_wrapper["one"].zero_grad()
        optim_wrapper["two"].zero_grad()
        loss.backward()
        optim_wrapper["one"].step()
        optim_wrapper["two"].step()
        return {"loss": loss}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def two_optimizers(model: TwoParts) -> OptimWrapperDict:
    def own(part: nn.Module) -> OptimWrapper:
        return OptimWrapper(torch.optim.AdamW(part.parameters(), lr=0.01))

    return OptimWrapperDict(one=own(model.one), two=own(model.two))


class CompressedGradients(Hook):
    """Registers a comm hook on the finished wrapper, as a user's hook may, before ours has run."""

    priority = "VERY_HIGH"

    def before_run(self, runner: Runner) -> None:
        runner.model.register_comm_hook(torch.distributed.group.WORLD, fp16_compress_hook)


def three_ways(
    patterns: Sequence[str] = TWO,
    dtype: str = "bfloat16",
    buffers: bool = False,
    build: Callable[[], nn.Module] = Net,
    hooks: Sequence[Any] = (),
    more: Callable[[Any], Any] | None = None,
    optimizers: Callable[[Any], Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Train with the hook, with a model cast before it was wrapped, and with ``p.data = ...`` in before_train.

    All three compute by the same rule; only who stores the parameters differs.
    """
    results = {}
    for kind in KINDS:
        model = seeded(build)
        by_hand = (patterns, getattr(torch, dtype), buffers)
        ours = overrider(
            patterns,
            dtype,
            override_parameters=kind == "hook",
            override_buffers=buffers and kind == "hook",
            check_interval=2,
        )
        if kind == "before":
            store(model, *by_hand)
        if optimizers is not None:
            kwargs["optim_wrapper"] = optimizers(model)
        runner = stored_runner(
            FOLDER,
            model,
            [ours, *hooks, *([CastDataInBeforeTrain(*by_hand)] if kind == "naive" else [])],
            **kwargs,
        )
        results[kind] = train(runner)
        if more is not None and kind == "hook":
            results["more"] = more(runner)
    return results


def _about_the_wrapper(runner: Runner) -> dict[str, Any]:
    wrapper = runner.model
    return {"class": type(wrapper).__name__, "own": wrapper.own_argument, "calls": wrapper.calls}


def _settings(runner: Runner) -> dict[str, Any]:
    wrapper = runner.model
    return {
        "find_unused_parameters": wrapper.find_unused_parameters,
        "static_graph": wrapper.static_graph,
        "gradient_as_bucket_view": wrapper.gradient_as_bucket_view,
        "bucket_bytes_cap": wrapper.bucket_bytes_cap,
        "broadcast_buffers": wrapper.broadcast_buffers,
    }


def gradients_of_every_iteration(patterns: Sequence[str]) -> list[dict[str, str]]:
    """Digests of the gradients that this rank's optimizer steps with, iteration by iteration."""
    seen: list[dict[str, str]] = []
    model = seeded()

    def look(*_: Any) -> None:
        seen.append({name: digest(p.grad) for name, p in model.named_parameters() if p.grad is not None})

    runner = stored_runner(FOLDER, model, [overrider(patterns, override_parameters=True)], iters=2)
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    runner.optim_wrapper.optimizer.register_step_pre_hook(look)
    runner.train()
    return seen


def data_of_this_rank() -> str:
    runner = stored_runner(FOLDER, seeded(), [], iters=1)
    return digest(next(iter(runner.train_loop.dataloader))["x"])


EMA = {"type": "EMAHook", "momentum": 0.3, "update_buffers": True}

SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "find_unused": {
        "build": functools.partial(Net, unused=True),
        "wrapper": {"find_unused_parameters": True},
        "more": _settings,
    },
    "static_graph": {"wrapper": {"static_graph": True}, "more": _settings},
    "bucket_view": {
        "wrapper": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005},
        "more": _settings,
    },
    "no_broadcast": {"wrapper": {"broadcast_buffers": False}, "more": _settings},
    "accumulation": {"accumulate": 2},
    "sgd": {"optimizer": SGD},
    "fused": {"optimizer": FUSED_ADAMW},
    "compile": {"cfg": {"compile": {"backend": "aot_eager"}}},
    "own_wrapper": {
        "wrapper": {"type": "CompressingDDP", "own_argument": "kept"},
        "more": _about_the_wrapper,
    },
    "comm_hook_of_a_hook": {"hooks": [{"type": CompressedGradients}]},
    "all_parameters": {"patterns": ALL, "buffers": True},
    "norm": {"patterns": ("norm",)},
    "linear": {"patterns": ("stem", "mid")},
    "fp16": {"dtype": "float16", "optimizer": SGD},
    "fp64": {"dtype": "float64"},
    "ema": {"hooks": [EMA]},
    "checkpointing": {
        "cfg": {"activation_checkpointing": ["mid", "norm"]},
        "wrapper": {"static_graph": True},
    },
    "separate": {
        "build": TwoParts,
        "patterns": ("one.1", "two.1", "two.2"),
        "wrapper": {"type": "MMSeparateDistributedDataParallel"},
        "optimizers": two_optimizers,
    },
}

if __name__ == "__main__":
    hand_back(
        {name: functools.partial(three_ways, **kwargs) for name, kwargs in SCENARIOS.items()}
        | {
            "gradients_one": functools.partial(gradients_of_every_iteration, ("norm",)),
            "gradients_all": functools.partial(gradients_of_every_iteration, ALL),
            "data": data_of_this_rank,
        }
    )
