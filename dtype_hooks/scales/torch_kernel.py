"""The statistics of one chunk in torch operations, on any device, without synchronising it."""

from __future__ import annotations

import torch
from torch import Tensor

from dtype_hooks.scales.encodings import Encoding

CHUNK = 1 << 22
"""Elements looked at in one go: few enough that temporaries stay below some 200 MB, many enough that starting the
kernels costs nothing beside running them."""


def tally(chunk: Tensor, encoding: Encoding, bounds: Tensor, only_std: bool) -> Tensor:
    """Counts and moments of a chunk.

    Args:
        chunk: Elements in ``encoding.dtype``, any shape, at least one.
        encoding: The encoding of the dtype.
        bounds: ``encoding.bounds`` as a tensor in ``encoding.integer`` on the chunk's device.
        only_std: Whether to leave out amax and amin.

    Returns:
        Float64 (float32 on MPS, which has nothing better), shape (len(bounds) + 4,), or + 2 for ``only_std``: how many
        elements are at or below each bound; mean and standard deviation (divisor n) of the finite elements; amax
        (0 if no element is finite) and smallest nonzero magnitude (infinite or NaN if there is none).
    """
    chunk = chunk.resolve_neg().reshape(-1)
    codes = chunk.view(encoding.integer) & encoding.mask
    finite = codes <= encoding.finite
    counts = (codes <= bounds[:, None]).sum(1)
    amax = torch.where(finite, codes, 0).amax().view(chunk.dtype)
    work = torch.float32 if chunk.device.type == "mps" else torch.float64
    moments = _moments(torch.where(finite, chunk, 0).to(work), finite, counts[0], amax.to(work))
    parts = [counts.to(work), *moments]
    if not only_std:
        amin = torch.where(codes == 0, encoding.mask, codes).amin().view(chunk.dtype)
        parts += [amax.to(work), amin.to(work)]
    return torch.cat([part.reshape(-1) for part in parts])


def _moments(values: Tensor, finite: Tensor, count: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (divisor n), of values scaled so that squares neither overflow nor underflow."""
    exponent = torch.frexp(amax).exponent.to(amax.dtype)
    values = _times_power_of_two(values, -exponent)
    mean = values.sum() / count
    deviation = torch.linalg.vector_norm(torch.where(finite, values - mean, 0)) / count.sqrt()
    return _times_power_of_two(mean, exponent), _times_power_of_two(deviation, exponent)


def _times_power_of_two(values: Tensor, exponent: Tensor) -> Tensor:
    # in two steps, since the power itself can be out of range; torch.ldexp takes it in float32 in some versions
    half = (exponent / 2).floor()
    return values * torch.exp2(half) * torch.exp2(exponent - half)
