"""Cost of measuring one tensor, as a ratio to one ``x.sum()`` of it, in one run.

    python benchmarks/tensor_statistics.py

``measure(all)`` is everything for the four default formats, ``measure(std)`` mean and standard deviation; ``naive`` computes
the same from torch's own functions, tensor by tensor, with an ``item()`` each. One thread, CPU time of it; the contestants
take turns, round by round.
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dtype_hooks.core.number_formats import DEFAULT_FORMATS
from dtype_hooks.scales.statistics import Workspace, gather, measure


def naive_std(x: Tensor) -> list[float]:
    """Mean and std as one writes them down."""
    x = x.detach().float()
    return [x.mean().item(), x.std().item()]


def naive_all(x: Tensor) -> list[float]:
    """Every statistic as one writes it down."""
    values = x.detach().double()
    finite = values[values.isfinite()]
    magnitude = finite.abs()
    nonzero = magnitude[magnitude > 0]
    found = [
        values.isnan().sum(),
        values.isinf().sum(),
        (magnitude == 0).sum(),
        magnitude.max(),
        nonzero.min(),
    ]
    found += [finite.mean(), finite.std(), finite.square().mean().sqrt()]
    for each in DEFAULT_FORMATS:
        found += [
            (nonzero <= each.zero_at).double().mean(),
            ((nonzero > each.zero_at) & (nonzero < each.normal_from)).double().mean(),
            (magnitude >= each.overflow_at).double().mean(),
        ]
    return [each.item() for each in found]


def contestants(x: Tensor, workspace: Workspace) -> dict[str, Callable[[], object]]:
    """What is timed, by name; the first is the unit."""
    return {
        "sum": x.sum,
        "measure(all)": lambda: measure(x, DEFAULT_FORMATS, workspace=workspace),
        "measure(std)": lambda: measure(x, DEFAULT_FORMATS, only_std=True, workspace=workspace),
        "measure(all) and gather": lambda: gather([measure(x, DEFAULT_FORMATS, workspace=workspace)]),
        "naive(all)": lambda: naive_all(x),
        "naive(std)": lambda: naive_std(x),
    }


def ratios(x: Tensor, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Per contestant one ratio to the sum a round."""
    timers = {
        name: timeit.Timer(each, timer=time.thread_time) for name, each in contestants(x, Workspace()).items()
    }
    numbers = {}
    for name, timer in timers.items():
        timer.timeit(1)
        numbers[name] = max(1, int(seconds / timer.timeit(1)))
    found: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        times = {name: timer.timeit(numbers[name]) / numbers[name] for name, timer in timers.items()}
        for name in timers:
            found[name].append(times[name] / times["sum"])
    print(f"{x.numel()} {x.dtype}: sum {times['sum'] * 1e6:.1f} us in the last round")
    return found


def tensors() -> dict[str, Tensor]:
    """What is measured, by name."""
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    return {
        "1e6 float32 N(0, 1)": x,
        "1e6 bfloat16 N(0, 1)": x.bfloat16(),
        "1e6 float32 N(0, 1e-5), half zeros": x.relu() * 1e-5,
        "1e6 bfloat16 N(0, 1e-5), half zeros": (x.relu() * 1e-5).bfloat16(),
        "256 float32": x[:256].clone(),
        "256 bfloat16": x[:256].bfloat16(),
    }


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.02, help="of each contestant in a round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("tensor", "x one x.sum()", "median", "min", "max", title=f"torch {torch.__version__}")
    for name, x in tensors().items():
        for what, found in ratios(x, args.rounds, args.seconds).items():
            table.add_row(name, what, *(f"{f(found):.2f}" for f in (statistics.median, min, max)))
        table.add_section()
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
