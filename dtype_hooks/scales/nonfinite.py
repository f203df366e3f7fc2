"""Which function made the first NaN or Inf of a recorded step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtype_hooks.scales.record import Entry, Scales
from dtype_hooks.scales.statistics import TensorStatistics

FILLS = frozenset(
    {
        *(
            "masked_fill",
            "masked_fill_",
            "fill",
            "fill_",
            "full",
            "full_like",
            "new_full",
            "where",
            "setitem",
        ),
        *("tensor", "as_tensor", "new_tensor", "scalar_tensor", "pad", "index_fill", "index_fill_"),
        *("scatter", "scatter_", "fill_diagonal_"),
    }
)
"""Functions that write constants: an Inf from one of these was asked for, as in attention masks."""

SUMMANDS = {"add": 2, "add_": 2, "sub": 2, "sub_": 2, "baddbmm": 3}
"""Functions that a mask goes into, and of how many tensors: one that was not recorded may be a mask kept in the model."""

BEFORE = 8
"""How many tensors before it a finding shows."""

CAUSES = ("weights", "input", "forward", "backward")
"""From causes to effects."""


@dataclass(frozen=True)
class Finding:
    """The first tensor that is not finite, and what made it.

    Attributes:
        cause: ``"weights"`` or ``"input"`` when these were not finite already; ``"forward"`` or ``"backward"`` when a function
            made it from finite tensors.
        name: The tensor's name: what the function returned in the forward, or whose gradient it is in the backward.
        module: Dotted name of the module that called the function.
        op: The function; in the backward the one whose backward made the gradient, ``""`` where that was not recorded.
        nans: NaN elements.
        infs: Infinite elements.
        kind: Of the tensor, as in :class:`~dtype_hooks.scales.record.Entry`.
        inputs: Rows of what the function got: in the backward, the gradients that its backward got.
        before: Rows of what was recorded before it, in the order of execution.
        also: Names of further weights or inputs that were not finite.
        whole: Whether the whole model was recorded; else what it got may have been bad already.
    """

    cause: str
    name: str
    module: str
    op: str
    nans: int
    infs: int
    kind: str = "activation"
    inputs: list[dict[str, Any]] = field(default_factory=list)
    before: list[dict[str, Any]] = field(default_factory=list)
    also: tuple[str, ...] = ()
    whole: bool = True

    @property
    def key(self) -> tuple[str, str]:
        """What makes two findings the same: that weights are bad is one, whichever come first."""
        return self.cause, "" if self.cause == "weights" else self.name

    @property
    def order(self) -> tuple[int, bool]:
        """Causes before effects; a parameter's gradient, which is averaged over ranks, after the others."""
        return CAUSES.index(self.cause), self.kind == "parameter"

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
            return f"{what} from {self.op!r} {where} ({self.name!r}), forward, {self._from('inputs')}"
        if not self.op:
            return f"{what} in the gradient of {self.name!r}, from the backward of what uses it, which was not recorded"
        return f"{what} in the gradient of {self.name!r} from the backward of {self.op!r} {where}, {self._from('gradients')}"

    def _from(self, what: str) -> str:
        if any(row["nans"] or row["infs"] for row in self.inputs):
            return f"from {what} that hold {'NaN' if any(row['nans'] for row in self.inputs) else 'Inf'}"
        return f"from finite {what}" if self.whole else "the first that was recorded"


def _and_also(names: Sequence[str]) -> str:
    return f" (and {', '.join(map(repr, names[:5]))}{', ...' if len(names) > 5 else ''})" if names else ""


def first_nonfinite(
    scales: Scales,
    statistics: Iterable[tuple[Entry, str, TensorStatistics]] | None = None,
    backward: bool = True,
    whole: bool = True,
) -> Finding | None:
    """Find what made the first NaN or Inf of a recording; None if there is none that matters.

    Weights and inputs that are not finite come first, then the forward in order of execution, then the backward in the
    order in which gradients came. Infinities that a :data:`FILLS` function wrote, that came with what the model was called
    with or with a mask kept in it, or that need no gradient (``log(0)`` in a table of positions), and what merely carries
    them on (a mask added to scores), are legal as long as nothing makes a NaN of them and none reaches the loss; a NaN
    that a softmax makes of a row of ``-inf`` is laid to the softmax. A gradient that is no longer finite is laid to the
    function whose backward got finite ones.

    Args:
        scales: The recording.
        statistics: What ``scales.statistics()`` gave, where it has been read already.
        backward: Whether to look at gradients: those of a scaled loss overflow as a matter of routine.
        whole: Whether the whole model was recorded.
    """
    step = _Step(scales, scales.statistics() if statistics is None else statistics, whole)
    return (
        step.bad_weights() or step.bad_inputs() or step.forward() or (step.backward() if backward else None)
    )


class _Step:
    def __init__(
        self, scales: Scales, statistics: Iterable[tuple[Entry, str, TensorStatistics]], whole: bool
    ) -> None:
        self.whole = whole
        self.of = {
            (entry.order, direction): each for entry, direction, each in statistics if entry.kind != "kernel"
        }
        self.entries = [entry for entry in scales.entries if entry.kind != "kernel"]
        self.consumers: dict[int, list[Entry]] = {}
        for entry in self.entries:
            for order in set(entry.inputs):
                self.consumers.setdefault(order, []).append(entry)
        self.by_order = {entry.order: entry for entry in self.entries}

    def bad_weights(self) -> Finding | None:
        bad = [
            entry for entry in self.entries if entry.kind == "parameter" and self._is_bad(entry, "forward")
        ]
        return self._leaves("weights", bad)

    def bad_inputs(self) -> Finding | None:
        return self._leaves("input", [each for each in self.entries if _is_input(each) and self._nans(each)])

    def _leaves(self, cause: str, bad: list[Entry]) -> Finding | None:
        if not bad:
            return None
        return self._finding(cause, bad[0], bad[0], also=tuple(entry.name for entry in bad[1:]))

    def forward(self) -> Finding | None:
        legal: dict[int, Entry] = {}  # what carries an Inf, and where it came from
        for entry in self.entries:
            if not self._is_bad(entry, "forward") or entry.kind == "parameter":
                continue
            origin = self._origin(entry, legal)
            if self._nans(entry) or origin is None:
                source = next((legal[order] for order in entry.inputs if order in legal), None)
                return self._made(entry if source is None or self._is_meant(source) else source)
            if self._is_end(entry):
                return self._made(origin)
            legal[entry.order] = origin
        return None

    def _made(self, entry: Entry) -> Finding | None:
        if _is_input(entry):
            return self._leaves("input", [entry])
        return self._finding("forward", entry, entry, self._inputs(entry))

    def _origin(self, entry: Entry, legal: dict[int, Entry]) -> Entry | None:
        """Where the infinities of an entry come from, if they can be meant."""
        carried = next((legal[order] for order in entry.inputs if order in legal), None)
        if carried is not None:
            return carried
        return entry if self._is_meant(entry) or _is_input(entry) or not entry.requires_grad else None

    def _is_meant(self, entry: Entry) -> bool:
        """Whether infinities that appear here were written, or kept in the model."""
        return entry.op in FILLS or len(entry.inputs) < SUMMANDS.get(entry.op, 0)

    def _is_end(self, entry: Entry) -> bool:
        """Whether it is a loss, as far as can be told."""
        return entry.requires_grad and entry.shape.numel() == 1 and entry.order not in self.consumers

    def backward(self) -> Finding | None:
        bad = [entry for entry in self.entries if self._is_bad(entry, "backward")]
        if not bad:
            return None
        entry = min(bad, key=lambda each: each.backward_order)
        makers = [each for each in self.consumers.get(entry.order, []) if (each.order, "backward") in self.of]
        finite = [each for each in makers if not self._is_bad(each, "backward")]
        maker = next(reversed(finite or makers), None)
        return self._finding("backward", entry, maker, makers)

    def _inputs(self, entry: Entry) -> list[Entry]:
        return [self.by_order[order] for order in entry.inputs if order in self.by_order]

    def _nans(self, entry: Entry) -> int:
        statistics = self.of.get((entry.order, "forward"))
        return statistics.nans if statistics is not None else 0

    def _is_bad(self, entry: Entry, direction: str) -> bool:
        statistics = self.of.get((entry.order, direction))
        return statistics is not None and statistics.nans + statistics.infs > 0

    def _finding(
        self,
        cause: str,
        bad: Entry,
        maker: Entry | None,
        inputs: Sequence[Entry] = (),
        also: tuple[str, ...] = (),
    ) -> Finding:
        direction = "backward" if cause == "backward" else "forward"
        statistics = self.of[bad.order, direction]
        return Finding(
            cause,
            bad.name,
            "" if maker is None else maker.module,
            "" if maker is None else maker.op,
            statistics.nans,
            statistics.infs,
            bad.kind,
            list(self._rows(inputs, direction)),
            list(self._rows(self._before(bad, direction), direction)),
            also,
            self.whole,
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


def _is_input(entry: Entry) -> bool:
    return entry.kind == "activation" and entry.op == "input" and not entry.module
