"""Tables and pictures of the scales that a run has recorded: ``python tools/scales.py RUN_OR_FILE``.

RUN_OR_FILE is a scales.jsonl, as ScaleTracker and Scales.save write it, the folder of a run that holds one, or the
work_dir above it; of a run that was resumed all its files are read as one. They are JSON: reading one runs nothing.

    python tools/scales.py work_dirs/gpt                              # the last sample: tensors closest to an edge
    python tools/scales.py work_dirs/gpt --iter all --format float16  # each tensor at its worst in the whole run
    python tools/scales.py work_dirs/gpt --module attn --list         # all tensors of the modules named so
    python tools/scales.py work_dirs/gpt --compare work_dirs/other    # what differs from another run's last sample
    python tools/scales.py work_dirs/gpt --plots pictures             # pictures, of all samples, into a folder

What is wrong ends in one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dtype_hooks.core.selection import as_patterns, nearest
from dtype_hooks.core.validation import as_choice
from dtype_hooks.errors import ConfigError, DtypeHooksError
from dtype_hooks.report.scale_plots import save_plots
from dtype_hooks.report.scales import (
    at_iteration,
    comparison_table,
    edge_report,
    operations_table,
    scales_table,
)
from dtype_hooks.report.scales_file import (
    DIRECTIONS,
    KINDS,
    Row,
    formats_of,
    iteration,
    iterations,
    read_run,
    select_rows,
)

FILTERS = ("module", "op", "direction", "kind")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are a line, as all others here."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print below its usage."""
        raise ConfigError(f"{message}; see --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    try:
        args = make_parser().parse_args(argv)
        say(report(args))
    except DtypeHooksError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: {error.filename}: got {error.strerror!r}; expected a path to read or write; mend it",
            file=sys.stderr,
        )
        return 2
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN_OR_FILE", help="a scales.jsonl, a run's log_dir, or its work_dir")
    add("--top", type=count, default=20, metavar="N", help="tensors in each table (default: 20)")
    add("--format", nargs="+", metavar="FORMAT", help="number formats, as float16 (default: all recorded)")
    add("--iter", default="last", metavar="N|last|all", help="which sample (default: last)")
    add("--module", metavar="REGEX", help="only tensors of modules whose dotted name it is found in")
    add("--op", metavar="REGEX", help="only results of functions whose name it is found in, as softmax")
    add("--direction", choices=DIRECTIONS, help="only tensors, or only their gradients")
    add("--kind", choices=KINDS, help="only tensors of this kind")
    add("--list", action="store_true", help="all tensors in order of execution, not those closest to an edge")
    add("--ops", action="store_true", help="how often each function gave a result in each dtype")
    add("--compare", type=Path, metavar="OTHER", help="another run, called B: what differs most from it")
    add("--plots", type=Path, metavar="DIR", help="write pictures there, too")
    return parser


def count(text: str) -> int:
    """Read the argument of --top."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a whole number from 1")
    return int(text)


def report(args: argparse.Namespace) -> str:
    """Return what the command line asks for, as text; write the pictures."""
    rows = read(args.run, args)
    recorded = formats_of(rows)
    formats = [as_choice(name, recorded or ["none"], "--format") for name in args.format or recorded]
    sample = at_iter(rows, args.iter)
    if args.compare:
        text = compare(sample, args, formats)
    elif args.list:
        text = scales_table(at_iter(sample, "last"), max_rows=len(rows))
    elif args.ops:
        text = operations_table(at_iter(sample, "last"))
    else:
        text = edge_report(sample, formats, args.top)
    if args.plots:
        written = save_plots(rows, args.plots, formats, max(map(iteration, sample)))
        text += f"\n\n{args.plots}: wrote {', '.join(path.name for path in written)}"
    return text


def compare(sample: list[Row], args: argparse.Namespace, formats: Sequence[str]) -> str:
    """Compare a sample of the run with one of the other."""
    if args.iter == "all":
        raise ConfigError("--iter: got 'all'; expected one sample to --compare; write --iter last")
    other = at_iter(read(args.compare, args), args.iter)
    table = comparison_table(sample, other, formats[0] if formats else None, args.top)
    return f"A: {args.run}{at_iteration(sample)}\nB: {args.compare}{at_iteration(other)}\n{table}"


def read(run: Path, args: argparse.Namespace) -> list[Row]:
    """Read a run and keep what the filters let through, which is something."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = read_run(run)
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)
    if not rows:
        raise ConfigError(f"{run}: got no rows; expected those of a sample; wait for the run's first one")
    for key in FILTERS:
        rows = keep(rows, key, getattr(args, key))
    return rows


def keep(rows: list[Row], key: str, wanted: str | None) -> list[Row]:
    """Apply one filter, and refuse it when nothing is left."""
    if wanted is None:
        return rows
    if key in ("module", "op"):
        as_patterns(wanted, f"--{key}")
    kept = select_rows(rows, **{key: wanted})
    if not kept:
        there = sorted({row[key] for row in rows if row[key]})
        near = nearest(wanted, there) or there[:5]
        raise ConfigError(
            f"--{key}: got {wanted!r}; expected what is found in one of {len(there)} {key}s; "
            f"nearest: {', '.join(map(repr, near))}"
        )
    return kept


def at_iter(rows: list[Row], which: str) -> list[Row]:
    """Return the rows of one sample, or of ``"all"``."""
    if which == "all":
        return rows
    there = iterations(rows)
    numbers = {"last": there[-1]} | {str(number): number for number in there}
    if which not in numbers:
        raise ConfigError(
            f"--iter: got {which!r}; expected last, all, or the iteration of a sample; "
            f"there are {len(there)}: {', '.join(map(str, there[:3]))}, ... {there[-1]}"
        )
    return [row for row in rows if iteration(row) == numbers[which]]


def say(text: str) -> None:
    """Print, also into a pipe that is closed before the end, as ``| head`` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
