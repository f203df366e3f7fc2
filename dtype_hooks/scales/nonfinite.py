"""Which function made the first NaN or Inf of a recorded step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtype_hooks.scales.record import Entry, Scales
from dtype_hooks.scales.statistics import TensorStatistics

FILLS = frozenset(
    {
        "masked_fill",
        "masked_fill_",
        "fill_",
        "full",
        "full_like",
        "new_full",
        "where",
        "setitem",
        "tensor",
        "as_tensor",
    }
)
"""Functions that write constants: an Inf from one of these was asked for, as in attention masks."""

BEFORE = 8
"""How many tensors before it a finding shows."""


@dataclass(frozen=True)
class Finding:
    """The first tensor that is not finite, and what made it.

    Attributes:
        cause: ``"weights"`` or ``"input"`` when these were not finite already; ``"forward"`` or ``"backward"`` when a function
            made it from finite tensors.
        name: The tensor's name: what the function returned in the forward, or whose gradient it is in the backward.
        module: Dotted name of the module that called the function.
        op: The function; in the backward the one whose backward made the gradient.
        nans: NaN elements.
        infs: Infinite elements.
        inputs: Rows of what the function got: in the backward, the gradients that its backward got.
        before: Rows of what was recorded before it, in the order of execution.
        also: Names of further weights or inputs that were not finite.
    """

    cause: str
    name: str
    module: str
    op: str
    nans: int
    infs: int
    inputs: list[dict[str, Any]] = field(default_factory=list)
    before: list[dict[str, Any]] = field(default_factory=list)
    also: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """What makes two findings the same."""
        return self.cause, self.name

    def __str__(self) -> str:
        what = " and ".join(
            f"{count} {kind}" for count, kind in ((self.nans, "NaN"), (self.infs, "Inf")) if count
        )
        if self.cause == "weights":
            return f"{what} in the parameter {self.name!r} before the step{_and_also(self.also)}: the weights were bad already"
        if self.cause == "input":
            return f"{what} in what the model was called with, {self.name!r}{_and_also(self.also)}: the batch was bad already"
        where = f"in module {self.module!r}" if self.module else "outside of the model's submodules"
        if self.cause == "forward":
            return f"{what} from {self.op!r} {where} ({self.name!r}), forward, from finite inputs"
        return f"{what} in the gradient of {self.name!r} from the backward of {self.op!r} {where}, from finite gradients"


def _and_also(names: Sequence[str]) -> str:
    return f" (and {', '.join(map(repr, names[:5]))}{', ...' if len(names) > 5 else ''})" if names else ""


def first_nonfinite(scales: Scales) -> Finding | None:
    """Find what made the first NaN or Inf of a recording; None if there is none that matters.

    Weights and inputs that are not finite come first, then the forward in order of execution, then the backward in the
    order in which gradients came. Infinities that a :data:`FILLS` function wrote, and what merely carries them on (a mask
    added to scores), are legal as long as nothing makes a NaN of them; a NaN that a softmax makes of a row of ``-inf`` is
    laid to the softmax. A gradient that is no longer finite is laid to the function whose backward got finite ones.
    """
    step = _Step(scales)
    return (
        step.bad_leaf("parameter", "weights")
        or step.bad_leaf("input", "input")
        or step.forward()
        or step.backward()
    )


class _Step:
    def __init__(self, scales: Scales) -> None:
        self.entries: list[Entry] = []
        self.of: dict[tuple[int, str], TensorStatistics] = {}
        for entry, direction, statistics in scales.statistics():
            if entry.kind != "kernel":
                self.of[entry.order, direction] = statistics
        self.entries = [entry for entry in scales.entries if entry.kind != "kernel"]
        self.consumers: dict[int, list[Entry]] = {}
        for entry in self.entries:
            for order in set(entry.inputs):
                self.consumers.setdefault(order, []).append(entry)
        self.by_order = {entry.order: entry for entry in self.entries}

    def bad_leaf(self, what: str, cause: str) -> Finding | None:
        bad = [entry for entry in self.entries if _is_leaf(entry, what) and self._is_bad(entry, "forward")]
        if not bad:
            return None
        return self._finding(cause, bad[0], bad[0], also=tuple(entry.name for entry in bad[1:]))

    def forward(self) -> Finding | None:
        legal: set[int] = set()
        for entry in self.entries:
            if not self._is_bad(entry, "forward") or entry.kind == "parameter":
                continue
            inputs = [self.by_order[order] for order in entry.inputs if order in self.by_order]
            if self._nans(entry) == 0 and (entry.op in FILLS or any(each.order in legal for each in inputs)):
                legal.add(entry.order)
                continue
            return self._finding("forward", entry, entry, inputs)
        return None

    def backward(self) -> Finding | None:
        bad = [entry for entry in self.entries if self._is_bad(entry, "backward")]
        for entry in sorted(bad, key=lambda each: each.backward_order):
            consumers = self.consumers.get(entry.order, [])
            makers = [each for each in consumers if (each.order, "backward") in self.of]
            finite = [each for each in makers if not self._is_bad(each, "backward")]
            maker = (finite or makers or [entry])[-1]
            return self._finding("backward", entry, maker, makers)
        return None

    def _nans(self, entry: Entry) -> int:
        return self.of[entry.order, "forward"].nans

    def _is_bad(self, entry: Entry, direction: str) -> bool:
        statistics = self.of.get((entry.order, direction))
        return statistics is not None and statistics.nans + statistics.infs > 0

    def _finding(
        self, cause: str, bad: Entry, maker: Entry, inputs: Sequence[Entry] = (), also: tuple[str, ...] = ()
    ) -> Finding:
        direction = "backward" if cause == "backward" else "forward"
        statistics = self.of[bad.order, direction]
        return Finding(
            cause,
            bad.name,
            maker.module,
            maker.op,
            statistics.nans,
            statistics.infs,
            list(self._rows(inputs, direction)),
            list(self._rows(self._before(bad, direction), direction)),
            also,
        )

    def _before(self, bad: Entry, direction: str) -> list[Entry]:
        if direction == "forward":
            run = [entry for entry in self.entries if entry.kind != "parameter"]
            at = next((index for index, entry in enumerate(run) if entry is bad), 0)
            return run[max(0, at - BEFORE) : at]
        came = [entry for entry in self.entries if 0 <= entry.backward_order < bad.backward_order]
        return sorted(came, key=lambda entry: entry.backward_order)[-BEFORE:]

    def _rows(self, entries: Sequence[Entry], direction: str) -> Iterator[dict[str, Any]]:
        for entry in entries:
            if (entry.order, direction) in self.of:
                yield {**entry.columns(), "direction": direction, **self.of[entry.order, direction].as_row()}


def _is_leaf(entry: Entry, what: str) -> bool:
    return entry.kind == "parameter" if what == "parameter" else entry.op == "input" and not entry.module
