"""What is known of tensors already: their entry, a view's statistics, those of a gradient that is passed on."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from dtype_hooks.scales.operations import FILLED, tensors_in
from dtype_hooks.scales.record import Entry
from dtype_hooks.scales.statistics import Measurement


class KnownTensors:
    """The entries of the tensors that are alive."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[weakref.ref[torch.Tensor], int, Entry]] = {}
        self._raw: set[int] = set()
        self._since = 0

    def add(self, tensor: torch.Tensor, entry: Entry) -> None:
        """Remember that ``entry`` is of ``tensor`` as it is now."""
        version = -1 if entry.op in FILLED or tensor.is_inference() else tensor._version
        self._held[id(tensor)] = (weakref.ref(tensor), version, entry)

    def is_raw(self, tensor: Any) -> None:
        """The memory of ``tensor`` may be written from now on without its version telling."""
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            self._raw.add(_memory(tensor))

    def distrust(self, order: int) -> None:
        """What was recorded before ``order`` may have been written to without its version telling."""
        self._since = order

    def orders(self, args: tuple, kwargs: dict) -> tuple[int, ...]:
        """``order`` of the latest entry of each tensor among a function's arguments, those in containers included."""
        found = []
        for value in (*args, *kwargs.values()) if kwargs else args:
            held = self._held.get(id(value))
            if held is not None and held[0]() is value:
                found.append(held[2].order)
            elif isinstance(value, (tuple, list, dict)):
                found += self.orders(tuple(tensor for _, tensor in tensors_in(value)), {})
        return tuple(found)

    def statistics(self, source: Any, result: torch.Tensor) -> Measurement | None:
        """Those of ``source``, if it is unchanged since they were taken and ``result`` can have the same elements."""
        held: tuple[Any, int, Entry] | None = self._held.get(id(source))
        if held is None or held[0]() is not source:
            return None
        if source.is_inference() or source._version != held[1]:
            return None
        if held[2].order < self._since or (self._raw and _memory(source) in self._raw):
            return None
        same = source.numel() == result.numel() and source.dtype == result.dtype
        return held[2].forward if same else None

    def clear(self) -> None:
        """Forget all."""
        self._held.clear()
        self._raw.clear()


class KnownGradient:
    """The statistics of the gradient that was measured last: a view's backward hands the same memory on."""

    def __init__(self) -> None:
        self._key: tuple | None = None
        self._storage: Any = None
        self._measured: Measurement | None = None

    def set(self, gradient: torch.Tensor, measured: Measurement) -> None:
        """Remember ``measured`` for the whole memory of ``gradient``, as it is now."""
        self.clear()
        storage = gradient.untyped_storage()
        if gradient.is_inference() or not _is_whole(gradient, storage):
            return
        self._key = (storage._cdata, gradient.dtype, gradient._version)
        self._storage = storage._weak_ref()
        self._measured = measured

    def of(self, gradient: torch.Tensor) -> Measurement | None:
        """The statistics, if ``gradient`` is the same memory with nothing written to it since."""
        if self._storage is None or gradient.is_inference():
            return None
        storage = gradient.untyped_storage()
        same = self._key == (storage._cdata, gradient.dtype, gradient._version)
        return self._measured if same and _is_whole(gradient, storage) else None

    def clear(self) -> None:
        """Forget it; the weak reference kept its memory's address from being given to another."""
        if self._storage is not None:
            torch.UntypedStorage._free_weak_ref(self._storage)
        self._key = self._storage = self._measured = None

    def __del__(self) -> None:
        self.clear()


def _memory(tensor: torch.Tensor) -> int:
    """What names a tensor's memory while it lives."""
    with torch._C.DisableTorchFunction():
        address: int = tensor.untyped_storage()._cdata
    return address


def _is_whole(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether the tensor is each element of its memory exactly once."""
    if tensor.numel() * tensor.element_size() != storage.nbytes():
        return False
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)
