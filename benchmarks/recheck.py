"""Cost of the re-check that finds nothing, as a ratio to one forward of what it watches, in one run.

    python benchmarks/recheck.py

500 tiny LayerNorms, overridden, with their 1,000 parameters stored in bf16: ``Watch.is_unchanged()``, which a training
calls every ``check_interval`` iterations, against one forward of the 500 (without overrides, which would make the forward
dearer and the ratio smaller). One thread; the two take turns, round by round; CPU time of the thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dtype_hooks import override_dtype
from dtype_hooks.core.drift import Watch

LIMIT = 0.03


def ratios(rounds: int, number: int, modules: int = 500) -> list[float]:
    """Ratios look / forward, one a round."""
    plain = nn.ModuleList(nn.LayerNorm(8) for _ in range(modules)).bfloat16()
    model = nn.ModuleList(nn.LayerNorm(8) for _ in range(modules))
    handle = override_dtype(model, ["."], dtype="bfloat16", override_parameters=True)
    watch = Watch(handle)
    x = torch.randn(2, 8, dtype=torch.bfloat16)

    def forward() -> list[Tensor]:
        return [module(x) for module in plain]

    assert len(handle.stored) == 2 * modules
    assert watch.is_unchanged()
    found = []
    for _ in range(rounds):
        one = timeit.timeit(forward, timer=time.thread_time, number=number)
        look = timeit.timeit(watch.is_unchanged, timer=time.thread_time, number=number)
        found.append(look / one)
    model[modules // 2].weight.data = model[modules // 2].weight.data.float()
    assert not watch.is_unchanged()
    return found


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--number", type=int, default=20, help="calls a round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("look / one forward", "median", "min", "max", "at most", title=f"torch {torch.__version__}")
    found = ratios(args.rounds, args.number)
    table.add_row(
        "500 LayerNorms, 1,000 stored parameters",
        *(f"{f(found):.4f}" for f in (statistics.median, min, max)),
        f"{LIMIT}",
    )
    Console().print(table)


if __name__ == "__main__":
    main()
