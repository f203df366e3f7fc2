"""Cost of an overridden call, as a ratio to the same arithmetic written by hand, in one run.

    python benchmarks/overrides.py

One thread: a tiny LayerNorm held in float32 under bf16 autocast, against ``with torch.autocast(..., enabled=False):
y = ln(x.float()).to(x.dtype)``; and Linears stored in bf16 that compute in float32, against ``F.linear`` on casts made by
hand (no module call on that side). The two sides take turns, round by round; CPU time of the thread, so that what else
the machine does weighs little; forward only.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
import timeit
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dtype_hooks import override_dtype


def compare(
    by_hand: Callable[[], Tensor], ours: Callable[[], Tensor], rounds: int, number: int
) -> list[float]:
    """Ratios ours / by hand, one a round; the two take turns so that the machine's drift hits both."""
    assert torch.equal(by_hand(), ours())
    ratios = []
    for _ in range(rounds):
        reference = timeit.timeit(by_hand, timer=time.thread_time, number=number)
        ratios.append(timeit.timeit(ours, timer=time.thread_time, number=number) / reference)
    return ratios


def layer_norm(rounds: int, number: int) -> list[float]:
    """A LayerNorm of 64 channels on 8 rows, bf16 in and out, computing in float32 under bf16 autocast."""
    norm, model = nn.LayerNorm(64), nn.Sequential(nn.LayerNorm(64))
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    override_dtype(model, ["0"])
    overridden = model[0]

    def by_hand() -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return norm(x.float()).to(x.dtype)

    with torch.autocast("cpu", torch.bfloat16):
        return compare(by_hand, lambda: overridden(x), rounds, number)


def linear(rounds: int, number: int, size: int, rows: int) -> list[float]:
    """A square Linear stored in bf16, computing in float32 on bf16 input."""
    model = nn.Sequential(nn.Linear(size, size)).bfloat16()
    weight, bias = model[0].weight, model[0].bias
    x = torch.randn(rows, size, dtype=torch.bfloat16)
    override_dtype(model, ["0"])
    overridden = model[0]

    def by_hand() -> Tensor:
        return F.linear(x.float(), weight.float(), bias.float()).to(x.dtype)

    return compare(by_hand, lambda: overridden(x), rounds, number)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=201)
    parser.add_argument("--number", type=int, default=200, help="calls a round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(
        "overridden / by hand", "median", "min", "max", "at most", title=f"torch {torch.__version__}"
    )
    for name, measure, limit in (
        ("LayerNorm(64), 8 rows, autocast off", layer_norm, "0.95"),
        ("Linear(256), 32 rows, weight cast", functools.partial(linear, size=256, rows=32), "1.25"),
        ("Linear(64), 8 rows, weight cast", functools.partial(linear, size=64, rows=8), "-"),
    ):
        ratios = measure(args.rounds, args.number)
        table.add_row(name, *(f"{f(ratios):.3f}" for f in (statistics.median, min, max)), limit)
    Console().print(table)


if __name__ == "__main__":
    main()
