"""The statistics of a tensor in the host's memory, through numpy.

Reading numbers back costs nothing here, so only what the extremes leave open is counted. Why numpy: on integer codes its
comparisons, counts and extremes run at the speed of memory and start in half a microsecond; torch takes two to ten
times as long for the same. Without numpy :mod:`dtype_hooks.scales.torch_kernel` does the work.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
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

CHUNK = 1 << 17
"""Elements looked at in one go: what is used at a time (5 to 9 bytes an element) stays in a second-level cache of 1 MiB or
little above; half of it is 2 to 15 % slower on a processor with 2 MiB, and so is twice as much."""

BLOCK = 2048
"""Longest dot product that is taken in one go. float32 accumulators of longer ones are off by up to 1e-5 where all
products are alike; of this length by 3e-7."""

FEW = 4096
"""Most codes that are sorted to count them: sorting that many costs half of looking through them for one bound after the
other (numpy's vectorised sort)."""

ILL_CONDITIONED = 2.0
"""A sum of squares is replaced by one of deviations where mean^2 is above this many times the variance: rounding
errors of 3e-7 are magnified by 1 + this."""

SPARSE = 32
"""Where fewer than one element in this many is at or below a bound, the lower bounds are counted among those alone: picking
them out costs as much as counting one and a half times."""

SAFE_SQUARES = (2.0**-80, 2.0**120)
"""Sums of float32 squares outside may have lost summands to underflow, or overflow in the next chunk. Float64 is
held to the same bounds."""

TWINS = {torch.float16: torch.int16, torch.bfloat16: torch.int16}
"""What numpy sees a dtype as; it lacks bfloat16, and nothing is computed in float16."""


class Memory:
    """Arrays to use again for chunks, by one thread; contents are whatever was there."""

    def __init__(self) -> None:
        self._whole: dict[tuple[str, torch.dtype], tuple[Tensor, Array]] = {}
        self._parts: dict[tuple[str, torch.dtype, int], tuple[Tensor, Array]] = {}
        self.ones: dict[str, Array] = {char: np.ones(BLOCK, char) for char in "fd"}

    def take(self, use: str, dtype: torch.dtype, size: int) -> tuple[Tensor, Array]:
        """``size`` elements, as a tensor and as the array of the same memory."""
        found = self._parts.get((use, dtype, size))
        return self._part(use, dtype, size) if found is None else found

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
        return tensor, tensor.view(TWINS.get(dtype, dtype)).numpy()


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
    source = _Source(tensor, encoding, memory)
    few = source.lent is not None and source.lent.size <= FEW
    # whatever the caller wants numpy to do about overflows is meant for the caller's numbers
    with np.errstate(all="ignore"):
        row = None
        if few:
            row = _row_of_few(source, only_std)
        elif only_std:
            row = _row_of_sums(source)
        return row or _Tally(source).row(only_std), source.repeats


class _Loan:
    """Lends a tensor's memory to ``numpy.from_dlpack``; ``Tensor.numpy()`` would forbid resizing its storage."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **_: object) -> object:
        return to_dlpack(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class _Source:
    """A tensor in chunks.

    Attributes:
        tensor: What is looked at, in memory order if it is more than one chunk.
        repeats: How often each of its elements stands in the tensor asked for.
        lent: Its memory as integers, if its elements lie without gaps in a dtype that has codes.
    """

    __slots__ = ("encoding", "lent", "memory", "repeats", "tensor")

    def __init__(self, tensor: Tensor, encoding: Encoding, memory: Memory) -> None:
        self.repeats = 1
        contiguous = tensor.is_contiguous()
        if not contiguous or tensor.numel() > CHUNK:
            tensor, self.repeats = in_memory_order(tensor)
            contiguous = tensor.is_contiguous()
        self.tensor, self.encoding, self.memory = tensor, encoding, memory
        lendable = contiguous and tensor.dtype is encoding.dtype and not tensor.is_neg()
        self.lent = self._lend() if lendable else None

    def _lend(self) -> Array:
        twin = TWINS.get(self.tensor.dtype)
        loan = _Loan(self.tensor if twin is None else self.tensor.view(twin))
        return np.from_dlpack(loan).reshape(-1)  # type: ignore[arg-type]

    def chunks(self) -> Iterator[tuple[Array, Array]]:
        """Chunks as their bits (integers or the floats themselves) and as values in float32 or float64."""
        lent = self.lent
        if lent is None:
            yield from map(self._copied, chunks_of(self.tensor, CHUNK))
        elif lent.size <= CHUNK:
            yield lent, self.values(self.tensor, lent)
        else:
            for start in range(0, lent.size, CHUNK):
                bits = lent[start : start + CHUNK]
                yield bits, self.values(self.tensor, bits, start)

    def _copied(self, chunk: Tensor) -> tuple[Array, Array]:
        native, bits = self.memory.take("native", self.encoding.dtype, chunk.numel())
        native.view(chunk.shape).copy_(chunk)
        return bits, self.values(native, bits)

    def values(self, tensor: Tensor, bits: Array, start: int | None = None) -> Array:
        """The values of bits, which are those of the tensor or of its part from ``start`` on."""
        if self.encoding.dtype not in TWINS:
            return bits
        if start is not None:
            tensor = tensor.narrow(0, start, bits.size)
        values, found = self.memory.take("values", torch.float32, bits.size)
        (values if tensor.dim() == 1 else values.view(tensor.shape)).copy_(tensor)
        return found


class _Sums:
    """Sums and sums of squares of ``values * 2**-exponent - shift``, chunk by chunk."""

    __slots__ = ("count", "exponent", "ones", "shift", "squares", "total")

    def __init__(self, memory: Memory, shift: float = 0.0, exponent: int = 0) -> None:
        self.ones = memory.ones
        self.shift, self.exponent = shift, exponent
        self.count, self.total, self.squares = 0, 0.0, 0.0

    def add(self, values: Array) -> None:
        """Take in values, shifted and scaled already."""
        size = values.size
        ones = self.ones[values.dtype.char]
        self.count += size
        if size > BLOCK:
            rows = values[: size // BLOCK * BLOCK].reshape(-1, 1, BLOCK)
            self.total += math.fsum(np.matmul(rows, ones).ravel().tolist())
            self.squares += math.fsum(np.matmul(rows, rows.reshape(-1, BLOCK, 1)).ravel().tolist())
            values = values[rows.size :]
        self.total += float(np.dot(values, ones[: values.size]))
        self.squares += float(np.dot(values, values))

    def usable(self) -> bool:
        """Whether rounding errors, overflow and underflow have left the sums right; False for NaN, too."""
        low, high = SAFE_SQUARES
        between = self.total * self.total / self.count
        return low < self.squares < high and between <= ILL_CONDITIONED * (self.squares - between)

    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation (divisor n) of the values."""
        offset = self.total / self.count
        deviation = math.sqrt(max(self.squares / self.count - offset * offset, 0.0))
        if not self.exponent:
            return self.shift + offset, deviation
        return math.ldexp(self.shift + offset, self.exponent), math.ldexp(deviation, self.exponent)


def _row_of_sums(source: _Source) -> list[float] | None:
    """The row from sums and sums of squares; None where these do not do."""
    sums = _Sums(source.memory)
    for _, values in source.chunks():
        sums.add(values)
        if not sums.usable():
            return None
    return [sums.count, sums.count, sums.count, *sums.moments()]


def _row_of_few(source: _Source, only_std: bool) -> list[float] | None:
    """The row of few values in a straight line; None if plain sums do not do: if any is not finite or all are zero."""
    encoding, sums = source.encoding, _Sums(source.memory)
    bits, values = next(source.chunks())
    sums.add(values)
    if not sums.usable():
        return None
    if only_std:
        return [sums.count, sums.count, sums.count, *sums.moments()]
    codes = np.bitwise_and(bits.view(encoding.table.dtype), encoding.mask)
    codes.sort()
    counts = codes.searchsorted(encoding.table, "right").tolist()
    return [
        *counts,
        *sums.moments(),
        encoding.magnitude(int(codes[-1])),
        encoding.magnitude(int(codes[counts[3]])),
    ]


class _Tally:
    """Counts, extremes and moments of a source.

    Attributes:
        counts: How many codes are at or below each of ``encoding.bounds``.
        top, low: The highest finite code and the lowest nonzero one.
        sums: Plain sums, of use while ``plain``.
    """

    __slots__ = ("counts", "encoding", "low", "memory", "plain", "source", "sums", "top")

    def __init__(self, source: _Source) -> None:
        self.source, self.encoding, self.memory = source, source.encoding, source.memory
        self.counts: list[int] = []
        self.top, self.low = 0, self.encoding.mask
        self.sums, self.plain = _Sums(source.memory), True
        for bits, values in source.chunks():
            self._count(bits)
            if self.plain:
                self.sums.add(values)
                self.plain = self.sums.usable()

    def row(self, only_std: bool) -> list[float]:
        """The row that :func:`tally` returns."""
        moments = self.sums.moments() if self.plain else self._careful_moments()
        if only_std:
            return [*self.counts, *moments]
        magnitude = self.encoding.magnitude
        return [*self.counts, *moments, magnitude(self.top), magnitude(self.low)]

    def _count(self, bits: Array) -> None:
        _, codes = self.memory.take("codes", self.encoding.integer, bits.size)
        np.bitwise_and(bits.view(codes.dtype), self.encoding.mask, out=codes)
        look = _sort_out if codes.size <= FEW else _count_between
        counts, low, top = look(codes, self.encoding, self.memory)
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)] if self.counts else counts
        self.low, self.top = min(self.low, low), max(self.top, top)
        self.plain = self.plain and counts[0] == codes.size

    def _careful_moments(self) -> tuple[float, float]:
        """Mean and standard deviation (divisor n) of the finite values, where plain sums do not do.

        Values are scaled by a power of two if squares could leave the range, and shifted by the mean, found step by step:
        the first estimate is off by a rounding error, which counts if all values are nearly alike.
        """
        if not self.top:
            return 0.0, 0.0
        sums, shift = self.sums, 0.0
        exponent = math.frexp(self.encoding.magnitude(self.top))[1]
        if abs(exponent) <= 30:
            exponent = 0
            shift = sums.total / sums.count if sums.count and math.isfinite(sums.total) else 0.0
        for _ in range(4):
            sums = self._moved_sums(self._rounded(shift), exponent)
            if sums.usable() or not sums.total:
                break
            shift = sums.shift + sums.total / sums.count
        return sums.moments()

    def _moved_sums(self, shift: float, exponent: int) -> _Sums:
        sums = _Sums(self.memory, shift, exponent)
        for bits, values in self.source.chunks():
            sums.add(self._moved(bits, values, sums))
        sums.count = self.counts[0]
        return sums

    def _moved(self, bits: Array, values: Array, sums: _Sums) -> Array:
        """A chunk's ``values * 2**-exponent - shift``, with 0 for what is not finite."""
        _, moved = self.memory.take("moved", self._dtype(), values.size)
        if sums.exponent:
            values = np.ldexp(values, -sums.exponent, out=moved)
        np.subtract(values, sums.shift, out=moved)
        if self.counts[0] < self.counts[2]:
            codes = np.bitwise_and(bits.view(f"i{bits.dtype.itemsize}"), self.encoding.mask)
            np.copyto(moved, 0, where=codes > self.encoding.finite)
        return moved

    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.encoding.dtype is torch.float64 else torch.float32

    def _rounded(self, shift: float) -> float:
        # to what is subtracted: a Python float is rounded to the array's dtype
        return shift if self._dtype() is torch.float64 else float(np.float32(shift))


def _sort_out(codes: Array, encoding: Encoding, _: Memory) -> tuple[list[int], int, int]:
    """Counts as of ``encoding.bounds``, the lowest nonzero code and the highest finite one, of few codes."""
    codes.sort()
    counts = codes.searchsorted(encoding.table, "right").tolist()
    finite = counts[0]
    zeros = counts[3] if len(counts) > 3 else 0
    low = int(codes[zeros]) if zeros < finite else encoding.mask
    return counts, low, int(codes[finite - 1]) if finite else 0


def _count_between(codes: Array, encoding: Encoding, memory: Memory) -> tuple[list[int], int, int]:
    """The same of many codes: counts what the extremes leave open."""
    size = not_nan = codes.size
    low, top = int(np.minimum.reduce(codes)), int(np.maximum.reduce(codes))
    if top > encoding.finite:
        not_nan = _at_most(codes, encoding.finite + 1, memory)
        codes = codes[codes <= encoding.finite]
        top = int(codes.max(initial=0))
    finite, zeros, bounds = codes.size, 0, encoding.ladder
    if low == 0:
        zeros = _at_most(codes, 0, memory)
        codes = _less_one(codes)
        low = min(int(codes.min(initial=encoding.mask - 1)) + 1, encoding.mask)
    start, stop = bisect_left(bounds, low), bisect_left(bounds, top)
    between = [bound - (zeros > 0) for bound in bounds[start:stop]]
    ladder = [zeros] * start + [zeros + count for count in _at_most_each(codes, between, memory)]
    ladder += [finite] * (len(bounds) - stop)
    counts = [finite, not_nan, size, zeros, *(ladder[step] for step in encoding.steps)]
    return counts[: len(encoding.bounds)], low, top


def _less_one(codes: Array) -> Array:
    """The codes less one, unsigned, in place: zeros are then greater than all others."""
    unsigned = codes.view(f"u{codes.dtype.itemsize}")
    return np.subtract(unsigned, 1, out=unsigned)


def _at_most(codes: Array, bound: int, memory: Memory) -> int:
    _, mask = memory.take("mask", torch.bool, codes.size)
    return int(np.count_nonzero(np.less_equal(codes, bound, out=mask)))


def _at_most_each(codes: Array, bounds: list[int], memory: Memory) -> list[int]:
    """How many codes are at or below each of the ascending bounds."""
    counts: list[int] = []
    while bounds and codes.size > FEW:
        _, mask = memory.take("mask", torch.bool, codes.size)
        np.less_equal(codes, bounds.pop(), out=mask)
        counts.insert(0, int(np.count_nonzero(mask)))
        if len(bounds) > 1 and counts[0] * SPARSE < codes.size:
            codes = np.compress(mask, codes)
    if not bounds:
        return counts
    # in the codes' dtype: numpy would compare unsigned with signed integers as float64
    few: list[int] = np.sort(codes).searchsorted(np.array(bounds, codes.dtype), "right").tolist()
    return few + counts
