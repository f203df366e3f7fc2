"""Which records activation checkpointing makes again when it runs a part of the forward inside the backward."""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left
from operator import itemgetter
from types import FrameType

import torch
from torch.utils.checkpoint import CheckpointFunction

from dtype_hooks.scales.record import Entry

Call = dict[str, Entry]
"""The entries of one function's call, by label."""


class Run:
    """One run of a function that reentrant checkpointing runs, in the forward or again in the backward.

    Attributes:
        start: ``order`` of its first record; None while there is none.
    """

    def __init__(self, start: int | None = None) -> None:
        self.start = start
        self._counts: dict[tuple[str, str], int] = {}

    def begin(self, order: int) -> None:
        """A record was made in it."""
        if self.start is None:
            self.start = order

    def find(self, key: tuple[str, str], calls: list[Call]) -> Call | None:
        """Of the ``calls`` of a function in a module, the one that runs again now."""
        if self.start is None:
            return None
        nth = self._counts[key] = self._counts.get(key, -1) + 1
        return _nth_from(self.start, nth, calls)


class Recomputes:
    """Matches what is run again to what was recorded without gradients.

    A function that recomputes, written by hand, has its autograd node made before its forward
    runs under no_grad. In the backward that node is the current one: what it redoes begins with the first record that
    was made without gradients after the node. Within one recompute the n-th call of a function is the n-th from there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks: list[tuple[int, int]] = []
        self._counts: dict[tuple[int, int], dict[tuple[str, str], int]] = {}

    def mark(self, order: int) -> None:
        """The record ``order`` is made, or made again, without gradients after the latest autograd node."""
        number = torch._C._autograd._get_sequence_nr()
        with self._lock:
            at = bisect_left(self._marks, number, key=itemgetter(0))
            if at == len(self._marks) or self._marks[at][0] != number:
                self._marks.insert(at, (number, order))

    def start(self) -> int | None:
        """``order`` of the first record of what the autograd node that runs in this thread recomputes; None if nothing."""
        if not isinstance(torch._C._current_autograd_node(), torch.autograd.function.BackwardCFunction):
            return None
        at = bisect_left(self._marks, backward_node()[1] + 1, key=itemgetter(0))
        return self._marks[at][1] if at < len(self._marks) else None

    def find(self, key: tuple[str, str], calls: list[Call]) -> Call | None:
        """Of the ``calls`` of a function in a module, the one that runs again now."""
        start = self.start()
        if start is None:
            return None
        with self._lock:
            counts = self._counts.setdefault(backward_node(), {})
            nth = counts[key] = counts.get(key, -1) + 1
        return _nth_from(start, nth, calls)


def _nth_from(start: int, nth: int, calls: list[Call]) -> Call | None:
    first = bisect_left(calls, start, key=lambda call: next(iter(call.values())).order)
    return calls[first + nth] if first + nth < len(calls) else None


def is_checkpoint(node: object) -> bool:
    """Whether an autograd node is reentrant checkpointing's own."""
    return isinstance(node, CheckpointFunction._backward_cls)


def in_backward() -> bool:
    """Whether this thread runs inside a backward."""
    return torch._C._current_graph_task_id() != -1


_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def is_recomputed() -> bool:
    """Whether checkpointing that is not reentrant runs a part of the forward again in this thread."""
    if _top_hooks is None:  # torch 2.6 cannot be asked
        return in_backward() and _unpacks()
    hooks = _top_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def _unpacks() -> bool:
    """Whether a frame of this thread is the function by which checkpointing gets at what it has not saved."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (
            frame.f_code.co_name == "unpack_hook"
            and frame.f_globals.get("__name__") == "torch.utils.checkpoint"
        ):
            return True
        frame = frame.f_back
    return False


def backward_node() -> tuple[int, int]:
    """``(backward, number)`` of the autograd node that runs in this thread; the number is -1 outside of a backward."""
    node = torch._C._current_autograd_node()
    return torch._C._current_graph_task_id(), -1 if node is None else node._sequence_nr()
