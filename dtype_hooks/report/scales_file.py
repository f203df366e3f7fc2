"""Finding and reading ``scales.jsonl``: what ScaleTracker and ``Scales.save`` have written, as rows.

It is JSON only: reading a file from anywhere runs nothing.
"""

from __future__ import annotations

import difflib
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dtype_hooks.core.selection import as_patterns
from dtype_hooks.core.validation import as_choice
from dtype_hooks.errors import ConfigError
from dtype_hooks.scales.record import SCHEMA

Row = dict[str, Any]

FILE_NAME = "scales.jsonl"
"""What the file is called in a run's log_dir."""

REQUIRED = ("schema", "order", "name", "module", "op", "kind", "direction")
"""Columns without which a line is no row of a scales file."""

DIRECTIONS = ("forward", "backward")
KINDS = ("activation", "parameter", "kernel")


def read_run(run_or_file: str | Path) -> list[Row]:
    """Return the rows of a run: of a file, a log_dir, or a work_dir with all the timestamps of a resumed run.

    See :func:`find_files` for what may be named, and :func:`join` for how several files become one.

    Raises:
        ConfigError: As :func:`find_files` and :func:`read_rows`.
    """
    return join(read_rows(path) for path in find_files(run_or_file))


def find_files(run_or_file: str | Path) -> list[Path]:
    """Return the scales files of a run, the oldest first.

    Args:
        run_or_file: A file; a log_dir, which holds ``scales.jsonl``; or a work_dir, whose folders are log_dirs named by
            a timestamp, of which all that hold one are taken.

    Raises:
        ConfigError: When there is none.
    """
    path = Path(run_or_file)
    if path.is_file():
        return [path]
    if (path / FILE_NAME).is_file():
        return [path / FILE_NAME]
    found = sorted(path.glob(f"*/{FILE_NAME}"))
    if not found:
        raise ConfigError(_nothing_there(path))
    return found


def read_rows(path: str | Path) -> list[Row]:
    """Read one file of JSON lines.

    A line that is cut off, as by a crash while it was written, is left out, with one warning for all such lines. An
    empty file has no rows.

    Raises:
        ConfigError: When the file begins with something else, holds JSON that is no row, or was written by a newer version.
    """
    path = Path(path)
    broken: list[int] = []
    with path.open("rb") as file:
        rows = list(_parse_lines(file, path, broken))
    if broken:
        which = f"line {broken[0]}" + (f" and {len(broken) - 1} more" if len(broken) > 1 else "")
        warnings.warn(f"{path}: {which} cut off, as by a crash while writing; left out, the others are read")
    return rows


def join(parts: Iterable[Sequence[Row]]) -> list[Row]:
    """Join the rows of several files, the oldest first, into one run's.

    A part takes over from its first iteration on: a run that went to 1,400 and was resumed at 1,000 has thrown its
    rows from there away. The same holds where the iterations of a file start again below where they were. Of rows with
    the same iteration, name and direction the last one counts.
    """
    kept: list[Row] = []
    for part in parts:
        for segment in _segments(part):
            first = iteration(segment[0])
            if kept and iteration(kept[-1]) >= first:
                kept = [row for row in kept if iteration(row) < first]
            kept += segment
    return list({(iteration(row), row["name"], row["direction"]): row for row in kept}.values())


def iteration(row: Row) -> int:
    """The iteration of a row, from 1; 0 in a single recording, which has none."""
    return row.get("iter") or 0


def iterations(rows: Iterable[Row]) -> list[int]:
    """The iterations that were sampled, in order."""
    return sorted({iteration(row) for row in rows})


def last_sample(rows: Sequence[Row]) -> list[Row]:
    """The rows of the last iteration."""
    last = max(map(iteration, rows), default=0)
    return [row for row in rows if iteration(row) == last]


def formats_of(rows: Iterable[Row]) -> list[str]:
    """The names of the number formats that the rows tell of, in the order of their columns."""
    columns = dict.fromkeys(column for keys in dict.fromkeys(map(tuple, rows)) for column in keys)
    return [column.removesuffix("_overflow") for column in columns if column.endswith("_overflow")]


def select_rows(
    rows: Iterable[Row],
    module: str | None = None,
    op: str | None = None,
    direction: str | None = None,
    kind: str | None = None,
) -> list[Row]:
    """Return the rows that match every argument given, in their order.

    Args:
        rows: Of any number of samples.
        module: A regex that is searched for in the module's dotted name.
        op: A regex that is searched for in the function's name; for a parameter that is its own (``weight``).
        direction: ``"forward"`` or ``"backward"``.
        kind: ``"activation"``, ``"parameter"`` or ``"kernel"``.

    Raises:
        ConfigError: For an argument that cannot be used.
    """
    exact = {
        "direction": direction and as_choice(direction, DIRECTIONS, "direction"),
        "kind": kind and as_choice(kind, KINDS, "kind"),
    }
    searched = {"module": _regex(module, "module"), "op": _regex(op, "op")}
    return [
        row
        for row in rows
        if all(wanted is None or row[key] == wanted for key, wanted in exact.items())
        and all(regex is None or regex.search(row[key]) for key, regex in searched.items())
    ]


def _regex(pattern: str | None, where: str) -> re.Pattern[str] | None:
    return None if pattern is None else re.compile(as_patterns(pattern, where)[0])


def _parse_lines(lines: Iterable[bytes], path: Path, broken: list[int]) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:  # JSONDecodeError, and UnicodeDecodeError of a cut character
            if number == 1:
                raise ConfigError(_no_row(path, number, "no JSON")) from error
            broken.append(number)
        else:
            yield _checked(row, path, number)


def _checked(row: Any, path: Path, number: int) -> Row:
    missing = [key for key in REQUIRED if not isinstance(row, dict) or key not in row]
    if missing:
        raise ConfigError(_no_row(path, number, f"no {', '.join(missing)}"))
    if not isinstance(row["schema"], int) or row["schema"] > SCHEMA:
        raise ConfigError(
            f"{path}: got schema {row['schema']!r} in line {number}; expected at most {SCHEMA}; "
            "it was written by a newer dtype_hooks: update this one."
        )
    return row


def _no_row(path: Path, number: int, what: str) -> str:
    return (
        f"{path}: got {what} in line {number}; expected rows that ScaleTracker or Scales.save wrote; "
        f"name a {FILE_NAME}, or the run's folder."
    )


def _segments(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Cut rows where their iteration goes down."""
    start = 0
    for at in range(1, len(rows)):
        if iteration(rows[at]) < iteration(rows[at - 1]):
            yield list(rows[start:at])
            start = at
    if rows:
        yield list(rows[start:])


def _nothing_there(path: Path) -> str:
    expected = f"expected a file of JSON lines, or a run's work_dir or log_dir with a {FILE_NAME} in it"
    if path.is_dir():
        return f"scales: got {str(path)!r}, which holds none; {expected}; train with the hook ScaleTracker."
    names = sorted(entry.name for entry in path.parent.iterdir()) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, cutoff=0.4)
    advice = f"nearest in {str(path.parent)!r}: {', '.join(map(repr, near))}" if near else "mend the path"
    return f"scales: got {str(path)!r}, which does not exist; {expected}; {advice}."
