"""The edges of floating-point formats: where a value rounds to zero, to a subnormal number, or overflows."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from dtype_hooks.core.dtypes import DTYPES, dtype_name
from dtype_hooks.errors import ConfigError


@dataclass(frozen=True)
class NumberFormat:
    """A floating-point format and what becomes of a value that is rounded to it (to nearest, ties to even).

    All bounds are magnitudes, exact as Python floats, and concern finite values.

    Attributes:
        name: The dtype's name in torch without ``torch.``, such as ``"float8_e4m3fn"``.
        zero_at: ``|x| <= zero_at`` becomes zero: half the smallest subnormal, since the tie goes to the even zero.
        normal_from: ``|x| >= normal_from`` becomes a normal number: halfway between the largest subnormal and the
            smallest normal, since the tie goes to the latter. What lies between ``zero_at`` and it becomes subnormal.
        overflow_at: Where overflow begins: half a step above ``max``.
        overflow_inclusive: Whether ``overflow_at`` itself overflows: the tie goes to the even neighbour, which
            is ``max`` in float8_e4m3fn (448, mantissa 110) and the number above it in the formats whose ``max`` has
            an odd mantissa. Overflow means beyond ``max``: to infinity, to NaN, or clamped, whatever the cast does.
        smallest_subnormal: The least positive number of the format.
        smallest_normal: The least positive number with the format's full precision.
        max: The largest finite number.
    """

    name: str
    zero_at: float
    normal_from: float
    overflow_at: float
    overflow_inclusive: bool
    smallest_subnormal: float
    smallest_normal: float
    max: float

    @property
    def dtype(self) -> torch.dtype:
        """The :class:`torch.dtype` of the format."""
        found: torch.dtype = getattr(torch, self.name)
        return found

    def overflows(self, magnitude: float) -> bool:
        """Whether a finite value of this magnitude overflows."""
        return magnitude >= self.overflow_at if self.overflow_inclusive else magnitude > self.overflow_at


def _number_format(dtype: torch.dtype) -> NumberFormat:
    # torch.finfo agrees with IEEE 754 (float16, float32), with bfloat16 as its hardware has it, and with the OCP
    # OFP8 specification (float8_e4m3fn: max 448, no Inf; float8_e5m2: max 57344).
    info = torch.finfo(dtype)
    subnormal = info.smallest_normal * info.eps
    step = 2.0 ** (math.frexp(info.max)[1] - 1) * info.eps
    return NumberFormat(
        name=dtype_name(dtype),
        zero_at=subnormal / 2,
        normal_from=info.smallest_normal - subnormal / 2,
        overflow_at=info.max + step / 2,
        overflow_inclusive=(info.max / step) % 2 == 1,
        smallest_subnormal=subnormal,
        smallest_normal=info.smallest_normal,
        max=info.max,
    )


NUMBER_FORMATS: Mapping[str, NumberFormat] = MappingProxyType(
    {
        dtype_name(dtype): _number_format(dtype)
        for dtype in (
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        )
    }
)
"""Every format that can be asked for, by the name of its dtype."""

DEFAULT_FORMATS: tuple[NumberFormat, ...] = tuple(
    NUMBER_FORMATS[name] for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
)
"""What is looked at when nothing is asked for: the two half formats and the two 8-bit ones of OCP OFP8."""


def resolve_formats(
    names: str | torch.dtype | Iterable[str | torch.dtype] | None, where: str = "formats"
) -> tuple[NumberFormat, ...]:
    """Turn names into the formats that they mean, in the order given, each once.

    Args:
        names: Names of :data:`NUMBER_FORMATS` or short names of the same dtypes (``"fp16"``, ``"bf16"``), with or
            without ``torch.``, or the dtypes themselves; one or several. None means :data:`DEFAULT_FORMATS`,
            an empty list no format at all.
        where: What the caller calls the argument; begins the error message.

    Raises:
        ConfigError: For anything else.

    Example:
        >>> [found.name for found in resolve_formats(["fp16", torch.float8_e5m2])]
        ['float16', 'float8_e5m2']
    """
    if names is None:
        return DEFAULT_FORMATS
    if isinstance(names, (str, torch.dtype)):
        names = [names]
    if not isinstance(names, Iterable):
        raise ConfigError(f"{where}: got {names!r}; expected a list of number formats. Write ['float16'].")
    return tuple(dict.fromkeys(_resolve(name, where) for name in names))


def _resolve(name: object, where: str) -> NumberFormat:
    if isinstance(name, torch.dtype):
        found = NUMBER_FORMATS.get(dtype_name(name))
    elif isinstance(name, str):
        plain = name.removeprefix("torch.")
        found = NUMBER_FORMATS.get(dtype_name(DTYPES[plain]) if plain in DTYPES else plain)
    else:
        found = None
    if found is None:
        raise ConfigError(
            f"{where}: got {name!r}; expected any of {', '.join(NUMBER_FORMATS)}.{_advice(name)}"
        )
    return found


def _advice(name: object) -> str:
    near = difflib.get_close_matches(str(name).removeprefix("torch."), NUMBER_FORMATS, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else " Name some of them, such as 'float16'."
