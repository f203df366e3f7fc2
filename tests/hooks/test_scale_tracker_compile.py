"""ScaleTracker in a compiled run: sampled steps run eagerly, and nothing is compiled anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from mmengine.hooks import Hook
from stored_runs import state_of
from torch import Tensor
from torch._dynamo.backends.registry import register_backend
from torch.nn import functional as F
from tracked_runs import Losses, Plain, log_of, rows_of, tracked

COMPILED: list[int] = []


@register_backend(name="counting")
def counting(graph: Any, inputs: Any) -> Any:
    """Runs graphs as they are, and counts them."""
    COMPILED.append(len(list(graph.graph.nodes)))
    return graph.forward


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    COMPILED.clear()
    yield
    torch._dynamo.reset()


class Counts(Hook):
    """How many graphs there were after each iteration."""

    def __init__(self) -> None:
        self.after: list[int] = []

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.after.append(len(COMPILED))


def run(
    work_dir: Path, tracker: Any, target: str, build: Any = Plain, iters: int = 8
) -> tuple[Any, list[int]]:
    counts, losses = Counts(), Losses()
    cfg = {"compile": {"backend": "counting", "target": target}} if target != "train_step" else None
    cfg = {"compile": {"backend": "counting"}} if cfg is None else cfg
    if target == "forward":
        cfg = None

        class Compiled(build):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                super().__init__()
                self.forward = torch.compile(self.forward, backend="counting")

        build = Compiled
    runner = tracked(work_dir, tracker, build, [counts, losses], iters=iters, cfg=cfg)
    runner.train()
    return (runner, state_of(runner), losses.values), counts.after


@pytest.mark.parametrize("watch", [False, True])
@pytest.mark.parametrize("target", ["train_step", "forward"])
def test_sampled_steps_work_and_nothing_is_compiled_anew(target: str, watch: bool, tmp_path: Path):
    (_, state, losses), without = run(tmp_path / "without", None, target)
    torch._dynamo.reset()
    COMPILED.clear()
    tracker = {"interval": 3, "begin": 4, "watch_nonfinite": watch}
    (runner, state_with, losses_with), counts = run(tmp_path / "with", tracker, target)
    assert counts[-1] > 0
    assert counts == without
    assert state_with["parameters"] == pytest.approx(state["parameters"])
    assert losses_with == losses
    rows = rows_of(runner)
    assert {row["iter"] for row in rows} == {6}
    assert {"stem:linear", "norm:layer_norm", ":gelu", "head:linear"} <= {row["name"] for row in rows}


@pytest.mark.parametrize("target", ["train_step", "forward"])
def test_a_bad_batch_of_a_compiled_run_is_run_again_eagerly(target: str, tmp_path: Path):
    class Bad(Plain):
        def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
            h = self.stem(x)
            return {"loss": F.mse_loss(self.head(F.gelu(self.norm((h - 100).log()))), y)}

    (runner, _, _), _ = run(tmp_path, {"interval": 0, "watch_nonfinite": True}, target, Bad, 2)
    assert "(run again, recorded): 64 NaN from 'log' outside of the model's submodules" in log_of(runner)
