"""Rich tables as plain text, for consoles and log files alike."""

from __future__ import annotations

import io
import shutil
import textwrap
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

MAX_ROWS = 60
"""Longer tables are cut there, with a last line that counts the rest."""

MIN_WIDTH = 60
"""No table is squeezed into less, whatever the terminal says."""


def render_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    max_rows: int = MAX_ROWS,
    width: int | None = None,
    caption: str | None = None,
) -> str:
    """A table as text without colours.

    Where it is too wide, a column with the same value in every row becomes a line above the table, and then long
    cells are folded.

    Args:
        title: Stands above it.
        columns: Headings. One that begins with ``#`` is a column of numbers, set flush right and never folded.
        rows: Cells; anything with a ``str``.
        max_rows: How many rows are shown at most.
        width: In characters; the terminal's by default, 80 where there is none.
        caption: Stands below it.
    """
    console = _console(width)
    cells = [[str(cell) for cell in row] for row in rows]
    lines = [title]
    table = _table(columns, cells[:max_rows])
    if Measurement.get(console, console.options.update(width=10_000), table).maximum > console.width:
        constant = _constant_columns(cells)
        if constant:
            same = ", ".join(f"{columns[i].lstrip('#')} {cells[0][i]}" for i in constant)
            lines += textwrap.wrap(f"in every row: {same}", console.width, subsequent_indent="  ")
        kept = [i for i in range(len(columns)) if i not in constant]
        table = _table([columns[i] for i in kept], [[row[i] for i in kept] for row in cells[:max_rows]])
    lines.append(_as_text(console, table))
    if len(rows) > max_rows:
        lines.append(f"... and {len(rows) - max_rows:,} more of {len(rows):,}")
    if caption:
        lines.append(caption)
    return "\n".join(lines)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.ASCII2)
    for column in columns:
        number = column.startswith("#")
        justify = "right" if number else "left"
        table.add_column(column.lstrip("#"), justify=justify, overflow="fold", no_wrap=number)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    return table


def _constant_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    """The columns with one and the same value in all rows; none in a table of fewer than two rows."""
    if len(rows) < 2:
        return []
    return [i for i, column in enumerate(zip(*rows, strict=True)) if len(set(column)) == 1]


def _console(width: int | None) -> Console:
    width = max(width or shutil.get_terminal_size((80, 24)).columns, MIN_WIDTH)
    return Console(file=io.StringIO(), width=width, no_color=True, highlight=False, emoji=False, markup=False)


def _as_text(console: Console, table: Table) -> str:
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).rstrip()
