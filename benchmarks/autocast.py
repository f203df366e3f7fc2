"""Cost of a training iteration under AutocastHook, as a ratio to ``with torch.autocast`` written into the model, in one run.

    python benchmarks/autocast.py

One thread. Two Runners train the same network from the same weights, one under the hook, one with the region written
by hand; their iterations take turns, block by block, so that the machine's drift hits both. CPU time of the thread, forward
to optimizer step, hooks included: what both share is a part of the ratio, as in a real training. The weights are compared
in the end: they must be the same, bit for bit. A third row compares two runs without any difference: the noise.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from turns import begin, ratios

import dtype_hooks  # noqa: F401  registers the hooks


class Net(BaseModel):
    """A stack of Linear, LayerNorm and GELU."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(depth)
        ]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, mode: str = "tensor") -> Any:
        """The loss, whatever the mode."""
        return {"loss": F.mse_loss(self.layers(x), x)}


class InModel(Net):
    """The same with the region written by hand."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss, whatever the mode."""
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(*args, **kwargs)


class Training:
    """A Runner that is driven iteration by iteration."""

    def __init__(
        self, name: str, model: type[Net], hooks: list[dict], width: int, depth: int, rows: int
    ) -> None:
        torch.manual_seed(0)
        self.batch = {"x": torch.randn(rows, width)}
        self.runner = Runner(
            model=model(width, depth),
            work_dir=tempfile.mkdtemp(),
            train_dataloader={
                "dataset": [self.batch["x"]],
                "batch_size": 1,
                "sampler": {"type": "InfiniteSampler"},
            },
            train_cfg={"by_epoch": False, "max_iters": 10**9},
            optim_wrapper={"type": "OptimWrapper", "optimizer": {"type": "SGD", "lr": 1e-3}},
            custom_hooks=hooks,
            default_hooks={"timer": None, "logger": None, "checkpoint": None},
            experiment_name=name,
            log_level="ERROR",
        )
        begin(self.runner)
        self.model = self.runner.model

    def run(self, iterations: int) -> float:
        """Train and return seconds of CPU time an iteration."""
        start = time.thread_time()
        for _ in range(iterations):
            self.runner.train_loop.run_iter(self.batch)
        return (time.thread_time() - start) / iterations


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=61)
    parser.add_argument("--iterations", type=int, default=40, help="iterations a block")
    args = parser.parse_args()
    torch.set_num_threads(1)
    title = f"an iteration under AutocastHook / torch.autocast in the model, torch {torch.__version__}"
    table = Table("network", "median", "25 %", "75 %", "min", "max", title=title)
    hook = {"type": "AutocastHook", "dtype": "bfloat16"}
    for width, depth, rows in ((16, 2, 8), (256, 4, 64)):
        for what, model, hooks in (("hook", Net, [hook]), ("the same twice", InModel, [])):
            name = f"{width} x {depth}, {rows} rows, {what}"
            one = Training(f"{name} a".replace(" ", "_"), InModel, [], width, depth, rows)
            other = Training(f"{name} b".replace(" ", "_"), model, hooks, width, depth, rows)
            found = list(ratios(one, other, args.blocks, args.iterations))
            low, median, high = statistics.quantiles(found, n=4)
            table.add_row(name, *(f"{x:.3f}" for x in (median, low, high, min(found), max(found))))
    Console().print(table)


if __name__ == "__main__":
    main()
