"""The record of one step's scales: entries in execution order, as rows, as text, and in a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dtype_hooks.core.number_formats import NumberFormat
from dtype_hooks.scales.statistics import Measurement, TensorStatistics, gather

SCHEMA = 1
"""Version of the columns of :meth:`Scales.rows`; a column that changes its meaning raises it."""


@dataclass(eq=False, slots=True)
class Entry:
    """One tensor of one step.

    Attributes:
        order: Its place in the order of execution, from 0.
        module: Dotted name of the module that called the function; ``""`` is the model itself, or outside of it.
        op: The function; a parameter's own name.
        occurrence: How often ``module`` had called ``op`` before.
        output: ``""``, or which of several results: ``"[0]"``, ``"[logits]"``.
        kind: ``"activation"``, ``"parameter"`` or ``"kernel"`` (of level ``aten``).
        dtype: The tensor's dtype.
        shape: Its shape.
        device: Its device.
        requires_grad: Whether the tensor did.
        forward: Statistics of the tensor; None for what only the backward makes.
        inputs: ``order`` of the entries that the function got, parameters among them.
        backward: Statistics of its gradient, one for each backward pass that reached it.
        backward_order: When its gradient came, counted over all gradients from 0; -1 is never.
    """

    order: int
    module: str
    op: str
    occurrence: int
    output: str
    kind: str
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device
    requires_grad: bool
    forward: Measurement | None = None
    inputs: tuple[int, ...] = ()
    backward: list[Measurement] = field(default_factory=list)
    backward_order: int = -1

    @property
    def name(self) -> str:
        """``blocks.0.attn:softmax.1[0]``; a parameter's dotted name."""
        if self.kind == "parameter":
            return f"{self.module}.{self.op}" if self.module else self.op
        count = f".{self.occurrence}" if self.occurrence else ""
        return f"{self.module}:{self.op}{count}{self.output}"

    def columns(self) -> dict[str, Any]:
        """What a row says of the tensor itself."""
        return {
            "order": self.order,
            "name": self.name,
            "module": self.module,
            "op": self.op,
            "occurrence": self.occurrence,
            "output": self.output,
            "kind": self.kind,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
            "device": str(self.device),
        }


class Scales:
    """What a recording saw; see :func:`dtype_hooks.track_scales`.

    Attributes:
        formats: The number formats that were counted.
        entries: The tensors, in order of execution.
    """

    def __init__(self, formats: tuple[NumberFormat, ...]) -> None:
        self.formats = formats
        self.entries: list[Entry] = []
        self._merged: list[tuple[Entry, str, TensorStatistics]] | None = None

    def add(self, *columns: Any) -> Entry:
        """Append an entry of these columns, in the order of :class:`Entry` after its first."""
        entry = Entry(len(self.entries), *columns)
        self.entries.append(entry)
        return entry

    def __len__(self) -> int:
        return len(self.entries)

    def statistics(self) -> Iterator[tuple[Entry, str, TensorStatistics]]:
        """Yield ``(entry, "forward" or "backward", statistics)``; one transfer from each device for all of them."""
        if self._merged is not None:
            yield from self._merged
            return
        forward = [(entry, entry.forward) for entry in self.entries if entry.forward is not None]
        backward = [(entry, each) for entry in self.entries for each in entry.backward]
        read = iter(gather([each for _, each in (*forward, *backward)]))
        of_forward = {id(entry): next(read) for entry, _ in forward}
        of_backward: dict[int, TensorStatistics] = {}
        for entry, _ in backward:
            each, merged = next(read), of_backward.get(id(entry))
            of_backward[id(entry)] = each if merged is None else merged.merge(each)
        for entry in self.entries:
            if id(entry) in of_forward:
                yield entry, "forward", of_forward[id(entry)]
            if id(entry) in of_backward:
                yield entry, "backward", of_backward[id(entry)]

    def merge(self, other: Scales) -> Scales:
        """Both records as one, by name and direction: of micro-batches, of ranks, of times. What only ``other`` has is last.

        Raises:
            ConfigError: When the two were not made with the same formats and ``only_std``.
        """
        found = {
            (entry.name, direction): (entry, direction, each) for entry, direction, each in self.statistics()
        }
        for entry, direction, each in other.statistics():
            first, _, mine = found.get((entry.name, direction), (entry, direction, None))
            found[entry.name, direction] = (first, direction, each if mine is None else mine.merge(each))
        merged = Scales(self.formats)
        merged._merged = list(found.values())
        merged.entries = list(dict.fromkeys(entry for entry, _, _ in merged._merged))
        return merged

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each tensor and direction, in order of execution; JSON can hold it.

        Columns: ``schema``; ``order``, ``name``, ``module``, ``op``, ``occurrence``, ``output``, ``kind``, ``dtype``,
        ``shape``, ``device`` as in :class:`Entry`; ``direction`` (``forward`` or ``backward``); those of
        :meth:`TensorStatistics.as_row`.
        """
        return [
            {"schema": SCHEMA, **entry.columns(), "direction": direction, **statistics.as_row()}
            for entry, direction, statistics in self.statistics()
        ]

    def save(self, path: str | Path) -> None:
        """Write :meth:`rows` as JSON lines; ``pandas.read_json(path, lines=True)`` reads them."""
        lines = (json.dumps(row, allow_nan=False) for row in self.rows())
        Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def __str__(self) -> str:
        return text_table(self.rows())


def text_table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as plain text: a line a tensor, forward and backward beside one another, in at most 100 columns."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        line = lines.setdefault(row["name"], [row["name"], row["dtype"], "", "", "", ""])
        at = 2 if row["direction"] == "forward" else 4
        line[at : at + 2] = [number(row["std"]), number(row["amax"])]
    head = ["tensor", "dtype", "-> std", "-> amax", "<- std", "<- amax"]
    return "\n".join(_aligned([head, *lines.values()])) if lines else "no tensors recorded"


def number(value: float | None) -> str:
    """Three significant digits; ``n/a`` for None."""
    return "n/a" if value is None else f"{value:.3g}"


def _aligned(table: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = [cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)]
        cells += [cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)]
        yield "  ".join(cells).rstrip()
