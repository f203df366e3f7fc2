"""The file of a run's scales: appended sample by sample, whole after a resume."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
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

        A run that resumes gets a log_dir of its own: its beginning is the file beside it that reaches furthest towards
        ``iteration``, the newest of several.
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
        earlier = self._earlier(iteration) if continues else None
        fresh = self.path.with_suffix(".tmp")
        with fresh.open("w", encoding="utf-8") as target:
            if earlier is not None:
                target.writelines(_until(earlier, iteration))
        os.replace(fresh, self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def _earlier(self, iteration: int) -> Path | None:
        if self.path.is_file():
            return self.path
        neighbours = self.path.parent.parent.glob(f"*/{FILE_NAME}")
        return max(
            neighbours,
            key=lambda path: (min(_last_iteration(path), iteration), path.stat().st_mtime),
            default=None,
        )

    def _append(self, text: str) -> None:
        if self._file is not None:
            self._file.write(text)
            self._file.flush()

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            self._give_up()
            self._warn(
                f"ScaleTracker: {self.path} cannot be written ({error}); training goes on, scales are no longer saved."
            )

    def _give_up(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what its buffer holds cannot be written either
                file.close()


def samples_of(path: Path, most: int) -> list[dict[str, Any]]:
    """The rows of at most so many samples, evenly spread, the first and the last among them.

    A long run's file does not fit into memory as a whole.
    """
    with path.open(encoding="utf-8", errors="replace") as lines:
        iterations = sorted({iteration for line in lines if (iteration := _iteration(line)) is not None})
    chosen = (
        {iterations[round(at * (len(iterations) - 1) / max(most - 1, 1))] for at in range(most)}
        if iterations
        else set()
    )
    with path.open(encoding="utf-8", errors="replace") as lines:
        return [json.loads(line) for line in lines if _iteration(line) in chosen and line.endswith("\n")]


def _iteration(line: str) -> int | None:
    """That of a row as we write it, without reading the row."""
    found = _HEAD.match(line)
    return None if found is None else int(found[1])


_HEAD = re.compile(r'\{"schema": \d+, "iter": (\d+), ')


def _last_iteration(path: Path) -> int:
    """The iteration of the last whole row, 0 where there is none."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        lines = file.read().decode("utf-8", "replace").splitlines(keepends=True)
    whole = (_iteration(line) for line in reversed(lines) if line.endswith("\n"))
    return next((iteration for iteration in whole if iteration is not None), 0)


_TAIL = 1 << 16


def _until(path: Path, iteration: int) -> Iterator[str]:
    """The lines up to an iteration; one that was cut off by a crash is left out."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and row.get("iter", 0) <= iteration:
                yield f"{line.rstrip()}\n"  # the crash may have cut no more than the line's end
