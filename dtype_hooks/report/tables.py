"""Rich tables as plain text, for consoles and log files alike."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

MAX_ROWS = 60
"""Longer tables are cut there, with a last line that counts the rest."""


def render_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    max_rows: int = MAX_ROWS,
    width: int | None = None,
    caption: str | None = None,
) -> str:
    """A table as text without colours.

    Args:
        title: Stands above it.
        columns: Headings. One that begins with ``#`` is a column of numbers, set flush right.
        rows: Cells; anything with a ``str``.
        max_rows: How many rows are shown at most.
        width: In characters; the terminal's by default, 80 where there is none.
        caption: Stands below it.
    """
    table = Table(title=title, caption=caption, box=box.ASCII2, title_justify="left", caption_justify="left")
    for column in columns:
        number = column.startswith("#")
        table.add_column(column.lstrip("#"), justify="right" if number else "left", overflow="fold")
    for row in rows[:max_rows]:
        table.add_row(*(str(cell) for cell in row))
    return _as_text(table, width) + _rest(len(rows), max_rows)


def _as_text(table: Table, width: int | None) -> str:
    out = io.StringIO()
    width = width or shutil.get_terminal_size((80, 24)).columns
    Console(file=out, width=max(width, 60), no_color=True, highlight=False, emoji=False, markup=False).print(
        table
    )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()


def _rest(total: int, shown: int) -> str:
    return f"\n... and {total - shown:,} more of {total:,}" if total > shown else ""
