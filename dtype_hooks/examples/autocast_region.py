"""The autocast region that the example models put around their forward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from dtype_hooks.core.dtypes import resolve_dtype
from dtype_hooks.errors import ConfigError


def parse_autocast_dtype(value: str | torch.dtype | None, where: str) -> torch.dtype | None:
    """Turn the ``autocast_dtype`` argument of a model into a dtype.

    Args:
        value: A dtype's name as :func:`dtype_hooks.resolve_dtype` knows them, or a dtype; ``None`` for no autocast.
        where: What the error message names, such as ``"CharGPT.autocast_dtype"``.

    Raises:
        ConfigError: ``value`` means neither bfloat16 nor float16, autocast's dtypes, nor ``None``.
    """
    if value is None:
        return None
    dtype = resolve_dtype(value, where)
    if dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            f"{where}: got {value!r}; expected bfloat16, float16 or None; pass None for no autocast"
        )
    return dtype


def autocast_region(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """A fresh ``torch.autocast`` for one forward pass, or a context that does nothing.

    Args:
        device: Where the inputs live; its type chooses the autocast.
        dtype: The dtype of autocast's eligible ops (matrix products, convolutions); ``None`` for no region at
            all, which leaves an autocast of the caller's in force.
    """
    if dtype is None:
        return nullcontext()
    # A new object each time: re-entering one torch.autocast instance leaves autocast on afterwards.
    return torch.autocast(device.type, dtype)
