"""The statistics of a tensor in the host's memory, through numpy.

Reading numbers back costs nothing here, so only what the extremes leave open is counted. Why numpy: on integer codes its
comparisons, counts and extremes run at the speed of memory and start in half a microsecond; torch takes two to ten
times as long for the same. Without numpy :mod:`dtype_hooks.scales.torch_kernel` does the work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from dtype_hooks.scales.chunks import chunks_of, in_memory_order
from dtype_hooks.scales.encodings import Encoding

try:
    import numpy as np
except ImportError:  # torch works without numpy, and so do we
    AVAILABLE = False
else:
    AVAILABLE = hasattr(np, "from_dlpack")

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

CHUNK = 1 << 16
"""Elements looked at in one go: the few arrays of this length that are used at a time stay in the second-level cache."""

BLOCK = 2048
"""Longest dot product that is taken in one go. float32 accumulators of longer ones are off by up to 1e-5 where all
products are alike; of this length by 3e-7."""

ILL_CONDITIONED = 2.0
"""A sum of squares is replaced by one of deviations where mean^2 is above this many times the variance: rounding
errors of 3e-7 are magnified by 1 + this."""


class Memory:
    """Arrays to use again for chunks of one thread."""

    def __init__(self) -> None:
        self._whole: dict[tuple[str, torch.dtype], tuple[Tensor, Array]] = {}
        self._parts: dict[tuple[str, torch.dtype, int], tuple[Tensor, Array]] = {}
        self.ones: dict[str, Array] = {char: np.ones(BLOCK, char) for char in "fd"}

    def take(self, use: str, dtype: torch.dtype, size: int) -> tuple[Tensor, Array]:
        """``size`` elements, as a tensor and as the array of the same memory; contents are whatever was there."""
        key = use, dtype, size
        found = self._parts.get(key)
        if found is None:
            found = self._part(use, dtype, size)
        return found

    def _part(self, use: str, dtype: torch.dtype, size: int) -> tuple[Tensor, Array]:
        if (use, dtype) not in self._whole:
            self._whole[use, dtype] = _allocate(dtype)
        if len(self._parts) >= 1000:
            self._parts.clear()
        tensor, array = self._whole[use, dtype]
        found = self._parts[use, dtype, size] = tensor[:size], array[:size]
        return found


def _allocate(dtype: torch.dtype) -> tuple[Tensor, Array]:
    with torch.inference_mode(False):  # a tensor born in inference mode cannot be written to outside
        tensor = torch.empty(CHUNK, dtype=dtype, device="cpu")
        return tensor, tensor.view(_TWINS.get(dtype, dtype)).numpy()


_TWINS = {torch.float16: torch.int16, torch.bfloat16: torch.int16}
"""What numpy sees a dtype as; it lacks bfloat16, and nothing is computed in float16."""


class _Loan:
    """Lends a tensor's memory to ``numpy.from_dlpack``; ``Tensor.numpy()`` would forbid resizing its storage."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **_: object) -> object:
        return to_dlpack(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def _lend(tensor: Tensor) -> Array:
    """The elements in one dimension, without a copy; 16-bit floats as integers."""
    twin = _TWINS.get(tensor.dtype)
    return np.from_dlpack(_Loan(tensor if twin is None else tensor.view(twin))).reshape(-1)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Source:
    """A tensor in pieces.

    Attributes:
        tensor: What is looked at, in memory order.
        lent: Its memory, if its elements lie without gaps in a dtype that has an encoding.
        encoding: The encoding of the dtype it is looked at in.
        memory: Arrays to use again.
    """

    tensor: Tensor
    lent: Array | None
    encoding: Encoding
    memory: Memory

    def pieces(self) -> Iterator[tuple[Array, Array]]:
        """Chunks as their bits and as their values in float32 or float64."""
        if self.lent is None:
            yield from map(self._copied, chunks_of(self.tensor, CHUNK))
        elif self.lent.size <= CHUNK:
            yield self.lent, self._values(self.tensor, self.lent)
        else:
            for start in range(0, self.lent.size, CHUNK):
                lent = self.lent[start : start + CHUNK]
                yield lent, self._values(self.tensor, lent, start)

    def _copied(self, chunk: Tensor) -> tuple[Array, Array]:
        native, array = self.memory.take("native", self.encoding.dtype, chunk.numel())
        native.view(chunk.shape).copy_(chunk)
        return array, self._values(native, array)

    def _values(self, tensor: Tensor, array: Array, start: int | None = None) -> Array:
        if self.encoding.dtype not in _TWINS:
            return array
        values, found = self.memory.take("values", torch.float32, array.size)
        if start is not None:
            tensor = tensor.narrow(0, start, array.size)
        values.view(tensor.shape).copy_(tensor)
        return found


def _source(tensor: Tensor, encoding: Encoding, memory: Memory) -> tuple[_Source, int]:
    repeats = 1
    if tensor.numel() > CHUNK or not tensor.is_contiguous():
        tensor, repeats = in_memory_order(tensor)
    lendable = tensor.dtype is encoding.dtype and tensor.is_contiguous() and not tensor.is_neg()
    return _Source(tensor, _lend(tensor) if lendable else None, encoding, memory), repeats


def tally(tensor: Tensor, encoding: Encoding, memory: Memory, only_std: bool) -> tuple[list[float], int]:
    """Counts and moments of a tensor in the host's memory.

    Args:
        tensor: Shape (...), at least one element, detached. Dtypes without codes of their own are taken as
            ``encoding.dtype``.
        encoding: How it is looked at.
        memory: Arrays to use again.
        only_std: Whether to leave out amax and amin.

    Returns:
        A row as of :func:`dtype_hooks.scales.torch_kernel.tally`, and how often each element that the row counts stands
        in the tensor.
    """
    source, repeats = _source(tensor, encoding, memory)
    with np.errstate(
        all="ignore"
    ):  # whatever the caller does about overflows is meant for the caller's numbers
        row = _quick_std(source) if only_std else None
        return (_full(source, only_std) if row is None else row), repeats


def _quick_std(source: _Source) -> list[float] | None:
    """The row from sums and sums of squares; None where these do not do."""
    sums = _Sums(source.memory)
    for _, values in source.pieces():
        sums.add(values)
        if not sums.usable():
            return None
    return [sums.count, sums.count, sums.count, *sums.moments()]


class _Sums:
    """Sums and sums of squares of ``values * 2**-exponent - shift``, chunk by chunk."""

    __slots__ = ("count", "exponent", "memory", "shift", "squares", "total")

    def __init__(self, memory: Memory, shift: float = 0.0, exponent: int = 0) -> None:
        self.memory = memory
        self.shift, self.exponent = shift, exponent
        self.count, self.total, self.squares = 0, 0.0, 0.0

    def add(self, values: Array) -> None:
        """Take in a chunk of at most CHUNK elements, shifted and scaled already."""
        size = values.size
        ones = self.memory.ones[values.dtype.char]
        self.count += size
        if size <= BLOCK:
            self.total += float(np.dot(values, ones[:size]))
            self.squares += float(np.dot(values, values))
            return
        whole = size // BLOCK * BLOCK
        rows = values[:whole].reshape(-1, 1, BLOCK)
        self.total += float(np.matmul(rows, ones).sum(dtype=np.float64))
        self.squares += float(np.matmul(rows, rows.reshape(-1, BLOCK, 1)).sum(dtype=np.float64))
        if whole < size:
            self.count -= size - whole
            self.add(values[whole:])

    def usable(self) -> bool:
        """Whether rounding errors, overflow and underflow have left the sums right; False for NaN, too."""
        between = self.total * self.total / self.count
        within = self.squares - between
        return TOO_SMALL < self.squares < TOO_LARGE and between <= ILL_CONDITIONED * within

    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation (divisor n) of the values."""
        offset = self.total / self.count
        variance = max(self.squares / self.count - offset * offset, 0.0)
        return math.ldexp(self.shift + offset, self.exponent), math.ldexp(math.sqrt(variance), self.exponent)


TOO_SMALL, TOO_LARGE = 2.0**-80, 2.0**120
"""Sums of float32 squares outside may have lost summands to underflow, or overflow in the next chunk. Float64 is
held to the same bounds."""


def _full(source: _Source, only_std: bool) -> list[float]:
    """The row from codes, and moments as :func:`_moments` takes them."""
    counts = [0] * len(source.encoding.bounds)
    top, low = 0, source.encoding.mask
    sums = _Sums(source.memory)
    simple = True
    for bits, values in source.pieces():
        codes, lowest, highest = _codes(bits, source)
        _count(codes, lowest, highest, source, counts)
        if highest > source.encoding.finite:
            codes = codes[codes <= source.encoding.finite]
            highest, simple = int(codes.max(initial=0)), False
        if lowest == 0:
            lowest = _lowest_above_zero(codes, source)
        top, low = max(top, highest), min(low, lowest)
        if simple:
            sums.add(values)
            simple = sums.usable()
    mean, deviation = sums.moments() if simple else _moments(source, top, counts[0])
    if only_std:
        return [*counts, mean, deviation]
    return [*counts, mean, deviation, source.encoding.magnitude(top), source.encoding.magnitude(low)]


def _codes(bits: Array, source: _Source) -> tuple[Array, int, int]:
    """Codes of a chunk, the lowest and the highest."""
    _, codes = source.memory.take("codes", source.encoding.integer, bits.size)
    np.bitwise_and(bits.view(codes.dtype), source.encoding.mask, out=codes)
    return codes, int(np.minimum.reduce(codes)), int(np.maximum.reduce(codes))


def _count(codes: Array, lowest: int, highest: int, source: _Source, counts: list[int]) -> None:
    """Add how many codes are at or below each bound; looks only where the extremes leave it open."""
    for index, bound in enumerate(source.encoding.bounds):
        if bound >= highest:
            counts[index] += codes.size
        elif bound >= lowest:
            _, mask = source.memory.take("mask", torch.bool, codes.size)
            counts[index] += int(np.count_nonzero(np.less_equal(codes, bound, out=mask)))


def _lowest_above_zero(codes: Array, source: _Source) -> int:
    # Zero less one is the greatest unsigned number.
    unsigned = codes.view(f"u{codes.dtype.itemsize}")
    _, less = source.memory.take("less", source.encoding.integer, codes.size)
    below = np.subtract(unsigned, 1, out=less.view(unsigned.dtype))
    return min(int(np.minimum.reduce(below, initial=source.encoding.mask - 1)) + 1, source.encoding.mask)


def _moments(source: _Source, top: int, count: int) -> tuple[float, float]:
    """Mean and standard deviation (divisor n) of the finite values, where plain sums do not do.

    Values are scaled by a power of two if squares could leave the range, and shifted by the mean, found step by step:
    the first estimate is off by a rounding error, which counts if all values are nearly alike.
    """
    if not count or not top:
        return 0.0, 0.0
    exponent = math.frexp(source.encoding.magnitude(top))[1]
    exponent = 0 if abs(exponent) < 30 else exponent
    shift = 0.0
    for _ in range(4):
        sums = _Sums(source.memory, shift, exponent)
        for bits, values in source.pieces():
            sums.add(_moved(bits, values, sums, source))
        sums.count = count
        if sums.usable() or not sums.total:
            break
        shift = float(values.dtype.type(shift + sums.total / count))
    return sums.moments()


def _moved(bits: Array, values: Array, sums: _Sums, source: _Source) -> Array:
    """A chunk's ``values * 2**-exponent - shift``, with 0 for what is not finite."""
    dtype = torch.float64 if values.dtype.itemsize == 8 else torch.float32
    _, moved = source.memory.take("moved", dtype, values.size)
    if sums.exponent:
        values = np.ldexp(values, -sums.exponent, out=moved)
    np.subtract(values, values.dtype.type(sums.shift), out=moved)
    codes, _, highest = _codes(bits, source)
    if highest > source.encoding.finite:
        np.copyto(moved, 0, where=codes > source.encoding.finite)
    return moved
