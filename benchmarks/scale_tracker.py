"""Cost of training under ScaleTracker, as a ratio to training without it, in one run.

    python benchmarks/scale_tracker.py

One thread, CPU time of it, forward to optimizer step, hooks included. Two Runners train the same small GPT from the same
weights and take turns, block by block, so that the machine's drift hits both: blocks of one interval, of which one
iteration is recorded, and blocks without a recorded one. The weights are compared in the end: they must be the same, bit for
bit. The last row compares two runs without any difference: the noise.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
from mmengine.runner import Runner
from rich.console import Console
from rich.table import Table
from turns import begin, ratios

import dtype_hooks  # noqa: F401  registers the hooks
from dtype_hooks.examples.char_gpt import CharGPT


class Training:
    """A Runner that is driven iteration by iteration."""

    def __init__(self, name: str, hooks: list[dict]) -> None:
        torch.manual_seed(0)
        ids = torch.randint(97, (16, 65))
        self.batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
        self.runner = Runner(
            model=CharGPT(97, context=64, dim=128, num_layers=2, num_heads=4),
            work_dir=tempfile.mkdtemp(),
            train_dataloader={"dataset": [0], "batch_size": 1, "sampler": {"type": "InfiniteSampler"}},
            train_cfg={"by_epoch": False, "max_iters": 10**9},
            optim_wrapper={"type": "OptimWrapper", "optimizer": {"type": "AdamW", "lr": 1e-4}},
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
    parser.add_argument("--blocks", type=int, default=21)
    parser.add_argument("--interval", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tracker = {"type": "ScaleTracker", "verbose": False, "plots": False}
    every, never = {**tracker, "interval": args.interval}, {**tracker, "interval": 0}
    table = Table(
        "what",
        "median",
        "25 %",
        "75 %",
        title=f"iteration with ScaleTracker / without, torch {torch.__version__}",
    )
    for what, hooks in {
        f"one iteration in {args.interval} recorded": [every],
        "between recorded ones": [never],
        "watch_nonfinite": [{**never, "watch_nonfinite": True}],
        "the same twice": [],
    }.items():
        one, other = (
            Training(f"{what} a".replace(" ", "_"), []),
            Training(f"{what} b".replace(" ", "_"), hooks),
        )
        low, median, high = statistics.quantiles(ratios(one, other, args.blocks, args.interval), n=4)
        table.add_row(what, f"{median:.3f}", f"{low:.3f}", f"{high:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
