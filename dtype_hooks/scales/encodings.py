"""Bounds on magnitudes as integers: how the statistics compare values without comparing floats.

The bits of a float without its sign, read as an integer, grow with the magnitude: zero is 0, the finite numbers follow
in order, then infinity, then the NaNs. Comparing these *codes* is exact in the tensor's own dtype, does not mind NaN, and
is not misled by flushed subnormals (``torch.set_flush_denormal``), as a comparison of floats is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtype_hooks.core.number_formats import NumberFormat

INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
"""The integer dtype of a floating dtype's codes. Other floating dtypes (8-bit ones) are measured as float32."""


@dataclass(frozen=True)
class Encoding:
    """Codes of one dtype.

    Attributes:
        dtype: The floating dtype.
        integer: The integer dtype of the same width.
        mask: All bits but the sign's.
        finite: Code of the largest finite number; ``finite + 1`` is infinity's and what is above is NaN.
        bounds: Codes; how many elements are at or below each tells all counts. The largest codes of: finite numbers,
            infinity, everything, zero; then :func:`bounds_of`. Without zero and formats if only the std is wanted.
        ladder: The formats' bounds in ascending order, each once.
        steps: Where each of the formats' bounds is in the ladder.
        digits: Bits of the mantissa that are stored.
        lowest: The smallest subnormal is two to this power.
    """

    dtype: torch.dtype
    integer: torch.dtype
    mask: int
    finite: int
    bounds: tuple[int, ...]
    ladder: tuple[int, ...]
    steps: tuple[int, ...]
    digits: int
    lowest: int

    @functools.cached_property
    def table(self) -> Any:
        """``bounds`` as a numpy array in the codes' dtype."""
        with torch.inference_mode(False):
            return torch.tensor(self.bounds, dtype=self.integer, device="cpu").numpy()

    def magnitude(self, code: int) -> float:
        """The number of a code; infinity for all that are not finite."""
        if code > self.finite:
            return math.inf
        exponent, fraction = divmod(code, 1 << self.digits)
        if exponent == 0:
            return math.ldexp(fraction, self.lowest)
        return math.ldexp(fraction + (1 << self.digits), self.lowest + exponent - 1)


def encoding_of(dtype: torch.dtype, formats: Sequence[NumberFormat], only_std: bool = False) -> Encoding:
    """The encoding of a dtype of :data:`INTEGERS`, with the bounds of the formats in it."""
    info = torch.finfo(dtype)
    mask = torch.iinfo(INTEGERS[dtype]).max
    finite = code_at_most(info.max, dtype)
    of_formats = [] if only_std else bounds_of(dtype, formats)
    ladder = sorted(set(of_formats))
    return Encoding(
        dtype=dtype,
        integer=INTEGERS[dtype],
        mask=mask,
        finite=finite,
        bounds=(finite, finite + 1, mask, *([] if only_std else [0]), *of_formats),
        ladder=tuple(ladder),
        steps=tuple(map(ladder.index, of_formats)),
        digits=1 - math.frexp(info.eps)[1],
        lowest=math.frexp(info.smallest_normal)[1] + math.frexp(info.eps)[1] - 2,
    )


def bounds_of(dtype: torch.dtype, formats: Sequence[NumberFormat]) -> list[int]:
    """Per format the largest codes of what becomes zero, of what becomes zero or subnormal, of what does not
    overflow."""
    bounds = []
    for number_format in formats:
        fits = code_below if number_format.overflow_inclusive else code_at_most
        bounds += [
            code_at_most(number_format.zero_at, dtype),
            code_below(number_format.normal_from, dtype),
            fits(number_format.overflow_at, dtype),
        ]
    return bounds


def code_at_most(magnitude: float, dtype: torch.dtype) -> int:
    """The code of the largest finite number of the dtype that is not above ``magnitude`` (positive)."""
    steps, base = _steps(min(magnitude, torch.finfo(dtype).max), dtype)
    return base + math.floor(steps)


def code_below(magnitude: float, dtype: torch.dtype) -> int:
    """The code of the largest finite number of the dtype that is below ``magnitude`` (positive)."""
    if magnitude > torch.finfo(dtype).max:
        return code_at_most(magnitude, dtype)
    steps, base = _steps(magnitude, dtype)
    return base + math.ceil(steps) - 1


def _steps(magnitude: float, dtype: torch.dtype) -> tuple[float, int]:
    # The code is the sum of the two, if the first is whole: the magnitude in steps of its binade, and the code
    # from which these steps count. Exact, and no conversion to the dtype itself: torch would flush subnormals
    # where the user asked for that.
    info = torch.finfo(dtype)
    lowest = math.frexp(info.smallest_normal)[1]
    digits = 1 - math.frexp(info.eps)[1]
    exponent = max(math.frexp(magnitude)[1], lowest)
    return math.ldexp(magnitude, digits + 1 - exponent), (exponent - lowest) << digits
