"""Statistics of one tensor that can be merged over chunks, micro-batches, ranks and time."""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dtype_hooks.core.number_formats import NumberFormat
from dtype_hooks.errors import ConfigError
from dtype_hooks.scales import host_kernel, torch_kernel
from dtype_hooks.scales.chunks import chunks_of, in_memory_order
from dtype_hooks.scales.encodings import INTEGERS, Encoding, encoding_of

if TYPE_CHECKING:
    from typing import TypeAlias

Row: TypeAlias = "dict[str, int | float | None]"


@dataclass(frozen=True)
class FormatFractions:
    """What would become of a tensor in a number format, each in [0, 1]; None where there is nothing to count.

    Attributes:
        underflow: Of the nonzero finite values, the fraction that would round to zero.
        subnormal: Of the nonzero finite values, the fraction that would round to a subnormal number, whose precision
            is reduced. A hardware that flushes subnormals makes zeros of these, too.
        overflow: Of the finite values, the fraction that would round beyond the largest number. Values that are
            infinite or NaN already are in neither part of the fraction.
    """

    underflow: float | None
    subnormal: float | None
    overflow: float | None


class FormatCounts(NamedTuple):
    """How many values :class:`FormatFractions` speaks of, in one format."""

    underflow: int
    subnormal: int
    overflow: int


class TensorStatistics(NamedTuple):
    """Counts and moments of a tensor's elements, or of several tensors' merged.

    ``mean``, ``deviation``, ``amax`` and ``amin`` are those of the finite elements, 0.0 or None where there are none.
    They are computed in float32 or better. A value that became zero before it was seen counts among ``zeros``: what an
    fp16 run has lost already cannot be told from true zeros.

    Attributes:
        numel: Elements.
        nans: Elements that are NaN.
        infs: Elements that are infinite.
        mean: Arithmetic mean, float64.
        deviation: Standard deviation with divisor n, float64 (``std`` is the unbiased one).
        zeros: Elements equal to zero, of either sign; None if only the std was asked for.
        amax: Largest magnitude.
        amin: Smallest nonzero magnitude.
        asked: The number formats looked at; empty if none was asked for.
        bounds: For each of them in turn, how many finite values become zero in it (zeros included), zero or
            subnormal, and do not overflow; :attr:`formats` tells them apart.
    """

    numel: int
    nans: int
    infs: int
    mean: float
    deviation: float
    zeros: int | None = None
    amax: float | None = None
    amin: float | None = None
    asked: tuple[NumberFormat, ...] = ()
    bounds: tuple[int, ...] = ()

    @property
    def formats(self) -> dict[str, FormatCounts]:
        """By format's name, how many values would not survive in it."""
        zeros, bounds = self.zeros or 0, iter(self.bounds)
        return {
            each.name: FormatCounts(flushed - zeros, subnormal - flushed, self.finite - fit)
            for each, flushed, subnormal, fit in zip(self.asked, bounds, bounds, bounds, strict=True)
        }

    @property
    def finite(self) -> int:
        """Elements that are neither infinite nor NaN."""
        return self.numel - self.nans - self.infs

    @property
    def std(self) -> float | None:
        """Unbiased standard deviation (divisor n - 1); 0 for one element, None for none."""
        n = self.finite
        return self.deviation * math.sqrt(n / max(n - 1, 1)) if n else None

    @property
    def rms(self) -> float | None:
        """Root of the mean square; None without finite elements."""
        return math.hypot(self.mean, self.deviation) if self.finite else None

    def fractions(self, name: str) -> FormatFractions:
        """What would become of the values in the format of this name; ``KeyError`` if it was not asked for."""
        return self._fractions(self.formats[name])

    def _fractions(self, counts: FormatCounts) -> FormatFractions:
        nonzero = self.finite - (self.zeros or 0)
        return FormatFractions(
            underflow=counts.underflow / nonzero if nonzero else None,
            subnormal=counts.subnormal / nonzero if nonzero else None,
            overflow=counts.overflow / self.finite if self.finite else None,
        )

    def merge(self, other: TensorStatistics) -> TensorStatistics:
        """Statistics of both tensors' elements together; counts are exact, moments combined in float64.

        The formula is Chan, Golub and LeVeque's (1979) for pairs, with standard deviations in place of variances,
        which could overflow.

        Raises:
            ConfigError: If the two were not asked for the same formats, or one for std only.
        """
        if self.asked != other.asked or self.only_std != other.only_std:
            raise ConfigError(
                f"TensorStatistics.merge: got {_asked(other)}; expected {_asked(self)}. Measure both alike."
            )
        return TensorStatistics(
            self.numel + other.numel,
            self.nans + other.nans,
            self.infs + other.infs,
            *_merged_moments(self, other),
            zeros=None if self.zeros is None or other.zeros is None else self.zeros + other.zeros,
            amax=max((x for x in (self.amax, other.amax) if x is not None), default=None),
            amin=min((x for x in (self.amin, other.amin) if x is not None), default=None),
            asked=self.asked,
            bounds=tuple(a + b for a, b in zip(self.bounds, other.bounds, strict=True)),
        )

    @property
    def only_std(self) -> bool:
        """Whether zeros, amax, amin and formats were not measured."""
        return self.zeros is None

    def scaled(self, factor: float) -> TensorStatistics:
        """Statistics of the values times a finite factor, as for gradients whose loss was scaled.

        Counts stay: they tell what was there, in the scale in which it was.
        """
        size = abs(factor)
        return self._replace(
            mean=self.mean * factor,
            deviation=self.deviation * size,
            amax=None if self.amax is None else self.amax * size,
            amin=None if self.amin is None else self.amin * size,
        )

    def as_row(self) -> Row:
        """The statistics as a flat dictionary that JSON can hold.

        Keys: ``numel``, ``zeros``, ``nans``, ``infs``, ``mean``, ``std``, ``rms``, ``amax``, ``amin``, and for each
        format asked for ``<format>_underflow``, ``<format>_subnormal`` and ``<format>_overflow``, fractions in [0, 1]
        (:class:`FormatFractions`). If only the std was asked for: ``numel``, ``nans``, ``infs``, ``mean``, ``std``,
        ``rms``. None stands for what does not exist (no finite element, no nonzero one) and for a moment that
        float64 cannot hold; there are no NaN and no infinities.
        """
        row: Row = {"numel": self.numel, "zeros": self.zeros, "nans": self.nans, "infs": self.infs}
        row["mean"] = _number(self.mean) if self.finite else None
        row["std"] = _number(self.std)
        row["rms"] = _number(self.rms)
        if self.only_std:
            del row["zeros"]
            return row
        row["amax"] = _number(self.amax)
        row["amin"] = _number(self.amin)
        for name, counts in self.formats.items():
            fractions = self._fractions(counts)
            row[f"{name}_underflow"] = fractions.underflow
            row[f"{name}_subnormal"] = fractions.subnormal
            row[f"{name}_overflow"] = fractions.overflow
        return row


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _asked(statistics: TensorStatistics) -> str:
    names = ", ".join(each.name for each in statistics.asked) or "no format"
    return "std only" if statistics.only_std else f"statistics with {names}"


def _merged_moments(a: TensorStatistics, b: TensorStatistics) -> tuple[float, float]:
    if not a.finite or not b.finite:
        return (a.mean, a.deviation) if a.finite else (b.mean, b.deviation)
    total = a.finite + b.finite
    of_a, of_b = a.finite / total, b.finite / total
    apart = (b.mean - a.mean) * math.sqrt(of_a * of_b)
    deviation = math.hypot(a.deviation * math.sqrt(of_a), b.deviation * math.sqrt(of_b), apart)
    return a.mean * of_a + b.mean * of_b, deviation


class Workspace(threading.local):
    """What measuring one tensor after the other can use again; each thread sees its own.

    Give the same workspace to every :func:`measure` of a recording and let it go afterwards.
    """

    def __init__(self) -> None:
        self._formats: tuple[NumberFormat, ...] = ()
        self._encodings: dict[tuple[torch.dtype, bool], Encoding] = {}
        self._bounds: dict[tuple[torch.dtype, bool, torch.device], Tensor] = {}
        self.memory = host_kernel.Memory() if host_kernel.AVAILABLE else None

    def encoding(self, dtype: torch.dtype, formats: tuple[NumberFormat, ...], only_std: bool) -> Encoding:
        """The encoding of a dtype with the bounds of the formats."""
        if formats is not self._formats:
            self._formats, self._encodings, self._bounds = formats, {}, {}
        key = dtype, only_std
        if key not in self._encodings:
            self._encodings[key] = encoding_of(dtype, formats, only_std)
        return self._encodings[key]

    def bounds(self, encoding: Encoding, only_std: bool, device: torch.device) -> Tensor:
        """The encoding's bounds on a device: copied there once, and without waiting for it."""
        key = encoding.dtype, only_std, device
        if key not in self._bounds:
            with torch.inference_mode(False):
                on_host = torch.tensor(encoding.bounds, dtype=encoding.integer, device="cpu")
                self._bounds[key] = on_host.to(device, non_blocking=True)
        return self._bounds[key]


class Measurement(NamedTuple):
    """What :func:`measure` found, possibly still being computed on a device; :func:`gather` reads it.

    Attributes:
        formats: The formats looked at.
        only_std: Whether only moments were asked for.
        repeats: How often each element that was looked at stands in the tensor (expanded tensors).
        rows: Counts and moments per chunk as :func:`dtype_hooks.scales.torch_kernel.tally` lays them out.
    """

    formats: tuple[NumberFormat, ...]
    only_std: bool
    repeats: int
    rows: Tensor | list[list[float]]


def can_measure(tensor: object) -> bool:
    """Whether :func:`measure` takes it.

    Taken: dense floating tensors, of every size and strides, on every device with memory: float64, float32, float16,
    bfloat16 and the 8-bit floats; empty ones too, whose row says ``numel`` 0. Of a DTensor this rank's part is measured
    (merge over the ranks; a replicated one is then counted once per rank, a partial one as the summands it is).

    Left out: what is no tensor; integer, bool, complex and quantized dtypes, floats packed two to a byte; sparse, nested
    and mkldnn layouts; tensors without data (meta, FakeTensor, parameters not yet initialised, storage that was resized
    to nothing, as FSDP does); other subclasses that redefine what operations do (``__torch_dispatch__``); tensors wrapped
    by ``torch.func`` transforms.
    """
    if not isinstance(tensor, Tensor):
        return False
    if type(tensor) in _PLAIN:
        return _has_numbers(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        return (plain or _is_dtensor(tensor)) and _has_numbers(_plain(tensor))


def _has_numbers(tensor: Tensor) -> bool:
    return (
        tensor.dtype in _MEASURABLE
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_nested
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and (tensor.data_ptr() != 0 or not tensor.numel())
    )


_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_MEASURABLE = frozenset(INTEGERS) | {getattr(torch, name) for name in _EIGHT_BITS if hasattr(torch, name)}


def _is_dtensor(tensor: Tensor) -> bool:
    # Importing torch.distributed.tensor takes a second; who has a DTensor has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def measure(
    tensor: Tensor,
    formats: tuple[NumberFormat, ...],
    only_std: bool = False,
    workspace: Workspace | None = None,
) -> Measurement:
    """Measure a tensor that :func:`can_measure` takes, as it is now.

    Reads the tensor only; leaves autograd, autocast, the random state and the tensor's storage alone. Does not
    synchronise a device: there the result is a tensor still being computed.

    Args:
        tensor: Shape (...), floating.
        formats: The number formats to count in (:func:`~dtype_hooks.core.number_formats.resolve_formats`).
        only_std: Look at mean and standard deviation only, which is cheaper.
        workspace: Memory to use again, some 2 MiB for each thread with tensors in the host's memory; a fresh one
            by default. On a device temporaries take up to 200 MB while they are computed.
    """
    workspace = Workspace() if workspace is None else workspace
    if type(tensor) not in _PLAIN:
        with torch._C.DisableTorchFunctionSubclass():
            return measure(_plain(tensor), formats, only_std, workspace)
    tensor = tensor.detach()
    dtype = tensor.dtype if tensor.dtype in INTEGERS else torch.float32
    if not tensor.numel():
        return Measurement(formats, only_std, 1, [])
    encoding = workspace.encoding(dtype, formats, only_std)
    if tensor.is_cpu and workspace.memory is not None:
        row, repeats = host_kernel.tally(tensor, encoding, workspace.memory, only_std)
        return Measurement(formats, only_std, repeats, [row])
    bounds = workspace.bounds(encoding, only_std, tensor.device)
    tensor, repeats = in_memory_order(tensor)
    chunks = chunks_of(tensor, torch_kernel.CHUNK)
    rows = [torch_kernel.tally(chunk.to(dtype), encoding, bounds, only_std) for chunk in chunks]
    return Measurement(formats, only_std, repeats, torch.stack(rows))


def _plain(tensor: Tensor) -> Tensor:
    if _is_dtensor(tensor):
        local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
        return local
    return tensor.as_subclass(Tensor)


def gather(measurements: Sequence[Measurement]) -> list[TensorStatistics]:
    """Read measurements, in their order; one transfer per device, which waits for it."""
    on_device = [found.rows for found in measurements if isinstance(found.rows, Tensor)]
    fetched = iter(_fetch(on_device) if on_device else ())
    return [
        _statistics(found, next(fetched) if isinstance(found.rows, Tensor) else found.rows)
        for found in measurements
    ]


def _fetch(tensors: list[Tensor]) -> list[list[list[float]]]:
    """The tensors' rows."""
    numbers = {}
    for device in {tensor.device for tensor in tensors}:
        here = [tensor.reshape(-1) for tensor in tensors if tensor.device == device]
        numbers[device] = iter(torch.cat(here).tolist())
    return [
        [list(islice(numbers[tensor.device], tensor.shape[1])) for _ in range(tensor.shape[0])]
        for tensor in tensors
    ]


def _statistics(measurement: Measurement, rows: list[list[float]]) -> TensorStatistics:
    if len(rows) == 1:
        return _read(measurement, rows[0])
    if not rows:
        return _read(measurement, [0] * (5 if measurement.only_std else 8 + 3 * len(measurement.formats)))
    return functools.reduce(TensorStatistics.merge, [_read(measurement, row) for row in rows])


def _read(measurement: Measurement, row: Sequence[float]) -> TensorStatistics:
    """What a row says, once for each time that the elements stand in the tensor."""
    formats, only_std, repeats, _ = measurement
    end = len(row) - (2 if only_std else 4)
    finite, not_nan, numel, *counts = [int(count) * repeats for count in row[:end]]
    mean, deviation = row[end : end + 2] if finite else (0.0, 0.0)
    basic = numel, numel - not_nan, not_nan - finite, mean, deviation
    if only_std:
        return TensorStatistics(*basic)
    zeros, *bounds = counts
    amax, amin = row[-2] if finite else None, row[-1] if finite > zeros else None
    return TensorStatistics(*basic, zeros, amax, amin, formats, tuple(bounds))
