"""The file of a run's scales: appended sample by sample, whole after a resume."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from dtype_hooks.report.scales_file import FILE_NAME


class ScaleFile:
    """``scales.jsonl`` in a run's log_dir. A file system that fails stops the writing, never the training.

    Attributes:
        path: Where it lies.
    """

    def __init__(self, log_dir: str | Path, warn: Callable[[str], None]) -> None:
        self.path = Path(log_dir) / FILE_NAME
        self._warn = warn
        self._file: TextIO | None = None

    def begin(self, iteration: int, continues: bool) -> None:
        """Open it for samples after ``iteration``; of a run that ``continues``, samples up to there are taken over.

        A run that resumes gets a log_dir of its own: its beginning is the newest file beside it.
        """
        self._guarded(lambda: self._begin(iteration, continues))

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows and hand them to the operating system."""
        if self._file is not None:
            text = "".join(f"{json.dumps(row, allow_nan=False)}\n" for row in rows)
            self._guarded(lambda: self._append(text))

    def close(self) -> None:
        """Close it; again, nothing happens."""
        file, self._file = self._file, None
        if file is not None:
            self._guarded(file.close)

    def _begin(self, iteration: int, continues: bool) -> None:
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        earlier = self._earlier() if continues else None
        fresh = self.path.with_suffix(".tmp")
        with fresh.open("w", encoding="utf-8") as target:
            if earlier is not None:
                target.writelines(_until(earlier, iteration))
        os.replace(fresh, self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def _earlier(self) -> Path | None:
        if self.path.is_file():
            return self.path
        neighbours = self.path.parent.parent.glob(f"*/{FILE_NAME}")
        return max(neighbours, key=lambda path: path.stat().st_mtime, default=None)

    def _append(self, text: str) -> None:
        if self._file is not None:
            self._file.write(text)
            self._file.flush()

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            self._file = None
            self._warn(
                f"ScaleTracker: {self.path} cannot be written ({error}); training goes on, scales are no longer saved."
            )


def _until(path: Path, iteration: int) -> Iterator[str]:
    """The lines up to an iteration; one that was cut off by a crash is left out."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and row.get("iter", 0) <= iteration and line.endswith("\n"):
                yield line
