"""What a re-check found, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from dtype_hooks.core.drift import Finding
from dtype_hooks.report.tables import MAX_ROWS, render_table

COLUMNS = ("#rank", "what", "name", "was", "now")


def drift_table(
    findings: Sequence[tuple[int, Finding]],
    title: str,
    caption: str,
    max_rows: int = MAX_ROWS,
    width: int | None = None,
) -> str:
    """One row for each ``(rank, finding)``; ``caption`` says what is done about them."""
    rows = [(rank, f.kind, f.name, f.was, f.now) for rank, f in findings]
    return render_table(title, COLUMNS, rows, max_rows, width, caption)
