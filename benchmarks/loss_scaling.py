"""Cost of a training iteration with AutocastHook's loss scaling, as a ratio to AmpOptimWrapper's use of the scaler, in one run.

    python benchmarks/loss_scaling.py

One thread. Two optim wrappers train the same float16 network from the same weights, one scaled as AutocastHook does it, one by
the lines of AmpOptimWrapper (which itself wants a GPU); their iterations take turns, block by block, so that the machine's
drift hits both. CPU time of the thread, forward to update of the scale. The weights are compared in the end: they must be
the same, bit for bit. The last column is the noise: the median of AmpOptimWrapper's lines against themselves.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from mmengine.optim import OptimWrapper
from rich.console import Console
from rich.table import Table
from torch import nn
from turns import ratios

from dtype_hooks.core.loss_scaling import LossScale, LossScaler
from dtype_hooks.core.shared_scaler import SharedScaler
from dtype_hooks.hooks.loss_scaling_wrapper import ScaledWrapper

SCALE = {"init_scale": 1024.0}


class Amp(OptimWrapper):
    """AmpOptimWrapper's ``backward`` and ``step``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.loss_scaler = torch.amp.GradScaler("cpu", **SCALE)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Scale."""
        self.loss_scaler.scale(loss).backward(**kwargs)
        self._inner_count += 1

    def step(self, **kwargs: Any) -> None:
        """Unscale, clip, step, update."""
        if self.clip_grad_kwargs:
            self.loss_scaler.unscale_(self.optimizer)
            self._clip_grad()
        self.loss_scaler.step(self.optimizer, **kwargs)
        self.loss_scaler.update()


class Training:
    """A network and its optim wrapper."""

    def __init__(self, ours: bool, width: int, depth: int, fused: bool, clip: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        self.x = torch.randn(64, width)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused)
        options = {"clip_grad": {"max_norm": 1.0}} if clip else {}
        self.wrapper = (OptimWrapper if ours else Amp)(optimizer=optimizer, **options)
        self.end: Callable[[], Any] = lambda: None
        if ours:
            self.end = self._put_on()

    def _put_on(self) -> Callable[[], Any]:
        choice = LossScale.make(SCALE)
        scaler = LossScaler("cpu", choice.arguments)
        scaler.start(torch.device("cpu"))
        shared = SharedScaler(choice, scaler)
        ScaledWrapper(self.wrapper, shared).put_on()

        def end() -> None:
            shared.end_iteration()
            shared.updates.clear()

        return end

    def run(self, iterations: int) -> float:
        """Train and return seconds of CPU time an iteration."""
        start = time.thread_time()
        for _ in range(iterations):
            with torch.autocast("cpu", torch.float16):
                loss = self.model(self.x).float().square().mean()
            self.wrapper.update_params(loss)
            self.end()
        return (time.thread_time() - start) / iterations


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=41)
    parser.add_argument("--iterations", type=int, default=5, help="iterations a block")
    args = parser.parse_args()
    torch.set_num_threads(1)
    title = f"an iteration, AutocastHook's loss scaling / AmpOptimWrapper's, torch {torch.__version__}"
    table = Table("network, AdamW", "median", "25 %", "75 %", "noise", title=title)
    for width, depth, fused, clip in (
        (64, 50, False, False),
        (512, 8, False, False),
        (512, 8, False, True),
        (512, 8, True, False),
    ):
        one, other, same = (Training(ours, width, depth, fused, clip) for ours in (False, True, False))
        found = list(ratios(one, other, args.blocks, args.iterations))
        noise = statistics.median(
            ratios(Training(False, width, depth, fused, clip), same, args.blocks, args.iterations)
        )
        low, median, high = statistics.quantiles(found, n=4)
        name = f"{width} x {depth}{', fused' * fused}{', clipped' * clip}"
        table.add_row(name, *(f"{x:.3f}" for x in (median, low, high, noise)))
    Console().print(table)


if __name__ == "__main__":
    main()
