"""What is said, once, when a step makes NaN or Inf, and the file that holds the steps before it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmengine.dist import is_main_process
from mmengine.runner import Runner

from dtype_hooks.errors import NonFiniteError
from dtype_hooks.hooks.ranks import gather_from_ranks
from dtype_hooks.scales.nonfinite import Finding, first_nonfinite
from dtype_hooks.scales.record import Scales, number

Row = dict[str, Any]


class NonFiniteReport:
    """Reports findings; each is told once.

    Attributes:
        frames: The rows of the last recorded steps, of rank 0.
    """

    def __init__(self, frames: int) -> None:
        self.frames: deque[list[Row]] = deque(maxlen=frames)
        self._told: set[tuple[str, str]] = set()

    def after_sample(
        self, runner: Runner, scales: Scales, rows: list[Row], what: str
    ) -> NonFiniteError | None:
        """Look through a recorded step, on all ranks; a collective."""
        self.frames.append(rows)
        finding = first_nonfinite(scales)
        return self._report(runner, finding, "recorded", what)

    def after_replay(self, runner: Runner, finding: Finding | str, what: str) -> NonFiniteError | None:
        """Report what running a batch again has shown, on all ranks; a collective."""
        return self._report(runner, finding, "run again, recorded", what)

    def _report(
        self, runner: Runner, finding: Finding | str | None, how: str, what: str
    ) -> NonFiniteError | None:
        found = gather_from_ranks([] if finding is None else [finding])
        if not found:
            return None
        rank, first = min(found, key=lambda each: (_order(each[1]), each[0]))
        key = ("", first) if isinstance(first, str) else first.key
        if key in self._told and what != "raise":
            return None
        self._told.add(key)
        text = _text(runner, rank, first, how, [other for other, _ in found])
        text += self._save(runner, first)
        if what == "raise":
            return NonFiniteError(f"{text}\nTraining stops: on_nonfinite='raise'.")
        runner.logger.warning(text)
        return None

    def _save(self, runner: Runner, finding: Finding | str) -> str:
        path = Path(runner.log_dir) / f"nonfinite_{runner.iter + 1}.jsonl"
        if not is_main_process() or not self.frames:
            return ""
        try:
            with path.open("w", encoding="utf-8") as file:
                for rows in self.frames:
                    file.writelines(f"{json.dumps(row, allow_nan=False)}\n" for row in rows)
        except OSError as error:
            return f"\nThe last recorded steps cannot be written to {path} ({error})."
        return f"\nThe last {len(self.frames)} recorded steps: {path}"


def _order(finding: Finding | str) -> int:
    """Causes before effects: what was bad before the step, then the forward, then the backward."""
    return 4 if isinstance(finding, str) else ("weights", "input", "forward", "backward").index(finding.cause)


def _text(runner: Runner, rank: int, finding: Finding | str, how: str, ranks: Sequence[int]) -> str:
    on = f", rank {rank}" if max(ranks) or rank else ""
    others = f" (so on ranks {', '.join(map(str, ranks))})" if len(ranks) > 1 else ""
    head = f"ScaleTracker at iteration {runner.iter + 1} ({how}){on}: {finding}{others}"
    if isinstance(finding, str):
        return head
    parts = [head]
    if finding.inputs:
        parts.append("  from:\n" + _lines(finding.inputs))
    if finding.before:
        parts.append("  before it:\n" + _lines(finding.before))
    return "\n".join(parts)


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
