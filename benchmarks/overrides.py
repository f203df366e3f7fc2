"""Cost of an overridden call, as a ratio to the same arithmetic written by hand, in one run.

    python benchmarks/overrides.py

Two cases, one thread: a tiny LayerNorm held in float32 under bf16 autocast, against ``with torch.autocast(...,
enabled=False): y = ln(x.float()).to(x.dtype)``; and a Linear stored in bf16 that computes in float32, against
``F.linear`` on casts made by hand. Each ratio is of medians over interleaved rounds, forward only.
"""

from __future__ import annotations

import argparse
import statistics
import timeit
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dtype_hooks import override_dtype


def compare(by_hand: Callable[[], Tensor], ours: Callable[[], Tensor], rounds: int, number: int) -> list[float]:
    """Ratios ours / by hand, one a round; the two take turns so that the machine's drift hits both."""
    assert torch.equal(by_hand(), ours())
    ratios = []
    for _ in range(rounds):
        reference = timeit.timeit(by_hand, number=number)
        ratios.append(timeit.timeit(ours, number=number) / reference)
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


def linear(rounds: int, number: int) -> list[float]:
    """A 64 x 64 Linear stored in bf16, computing in float32 on bf16 input of 8 rows."""
    model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    weight, bias = model[0].weight, model[0].bias
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    override_dtype(model, ["0"])
    overridden = model[0]

    def by_hand() -> Tensor:
        return F.linear(x.float(), weight.float(), bias.float()).to(x.dtype)

    return compare(by_hand, lambda: overridden(x), rounds, number)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--number", type=int, default=2000, help="calls a round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("overridden / by hand", "median", "min", "max", "at most", title=f"torch {torch.__version__}")
    for name, measure, limit in (
        ("LayerNorm(64), autocast off", layer_norm, 0.95),
        ("Linear(64, 64), parameters cast in the call", linear, 1.25),
    ):
        ratios = measure(args.rounds, args.number)
        table.add_row(name, *(f"{f(ratios):.3f}" for f in (statistics.median, min, max)), f"{limit}")
    Console().print(table)


if __name__ == "__main__":
    main()
