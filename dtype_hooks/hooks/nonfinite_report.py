"""What is said, once, when a step makes NaN or Inf, and the file that holds the steps before it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmengine.dist import get_world_size, is_main_process
from mmengine.runner import Runner

from dtype_hooks.errors import NonFiniteError
from dtype_hooks.hooks.ranks import gather_from_ranks
from dtype_hooks.scales.nonfinite import CAUSES, Finding
from dtype_hooks.scales.record import number

Row = dict[str, Any]


class NonFiniteReport:
    """Reports findings; each is told once.

    Attributes:
        frames: The rows of the last recorded steps, of rank 0.
    """

    def __init__(self, frames: int, what: str) -> None:
        """Report by a warning (``what="warn"``), or by an error to raise (``"raise"``)."""
        self.frames: deque[list[Row]] = deque(maxlen=frames)
        self._raises = what == "raise"
        self._told: set[tuple[str, str]] = set()

    def tell(self, runner: Runner, finding: Finding | str | None, how: str) -> NonFiniteError | None:
        """Report what this rank has found, or nothing; a collective.

        Args:
            runner: For its logger and its iteration.
            finding: The first tensor that is not finite; a sentence where that did not show.
            how: ``"recorded"``, or ``"run again, recorded"``.
        """
        found = gather_from_ranks([] if finding is None else [finding])
        if not found:
            return None
        rank, first = min(found, key=lambda each: (_order(each[1]), each[0]))
        key = ("", first.partition(";")[0]) if isinstance(first, str) else first.key
        if key in self._told and not self._raises:
            return None
        self._told.add(key)
        alike = [other for other, each in found if _order(each) == _order(first)]
        text = f"ScaleTracker at iteration {runner.iter + 1} ({how}){_where(rank, first, alike)}: {first}"
        if isinstance(first, Finding):
            text += _tables(first)
        text += self._save(runner)
        if self._raises:
            return NonFiniteError(f"{text}\nTraining stops: on_nonfinite='raise'.")
        runner.logger.warning(text)
        return None

    def _save(self, runner: Runner) -> str:
        if not is_main_process() or not self.frames:
            return ""
        path = Path(runner.log_dir) / f"nonfinite_{runner.iter + 1}.jsonl"
        try:
            with path.open("w", encoding="utf-8") as file:
                for rows in self.frames:
                    file.writelines(f"{json.dumps(row, allow_nan=False)}\n" for row in rows)
        except OSError as error:
            return f"\nThe last recorded steps cannot be written to {path} ({error})."
        many = f"{len(self.frames)} recorded steps" if len(self.frames) > 1 else "recorded step"
        return f"\nThe last {many}: {path}"


def _order(finding: Finding | str) -> tuple[int, bool]:
    return (len(CAUSES), False) if isinstance(finding, str) else finding.order


def _where(rank: int, finding: Finding | str, ranks: Sequence[int]) -> str:
    """On which ranks; a parameter's gradient that all have was averaged over them."""
    world = get_world_size()
    if world == 1:
        return ""
    averaged = isinstance(finding, Finding) and finding.cause == "backward" and finding.kind == "parameter"
    if len(ranks) == world and (averaged or isinstance(finding, str)):
        return ", on all ranks, whose gradients are averaged"
    if len(ranks) == world:
        return f", on all {world} ranks"
    others = [other for other in ranks if other != rank]
    return f", rank {rank}" + (f" (and {', '.join(map(str, others))})" if others else "")


def _tables(finding: Finding) -> str:
    parts = (("from", finding.inputs), ("before it", finding.before))
    return "".join(f"\n  {title}:\n{_lines(rows)}" for title, rows in parts if rows)


def _lines(rows: Sequence[Row]) -> str:
    table = [
        (row["name"], row["dtype"], f"std {number(row['std'])}", f"amax {number(row['amax'])}", _bad(row))
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "    " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )


def _bad(row: Row) -> str:
    return ", ".join(
        f"{row[kind]} {label}" for kind, label in (("nans", "NaN"), ("infs", "Inf")) if row[kind]
    )
