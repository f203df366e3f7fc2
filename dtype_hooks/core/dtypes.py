"""Names of the dtypes that a module can be asked to compute in."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

import torch

from dtype_hooks.errors import ConfigError

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "bfloat16": torch.bfloat16,
        "bf16": torch.bfloat16,
        "float16": torch.float16,
        "fp16": torch.float16,
        "half": torch.float16,
        "float32": torch.float32,
        "fp32": torch.float32,
        "float": torch.float32,
        "single": torch.float32,
        "float64": torch.float64,
        "fp64": torch.float64,
        "double": torch.float64,
    }
)
"""Every accepted name and the :class:`torch.dtype` that it means; ``"torch.<name>"`` serves as well.

The four dtypes are those in which torch's kernels compute on their own; the 8-bit floats are storage formats.
"""


def resolve_dtype(value: str | torch.dtype, where: str = "dtype") -> torch.dtype:
    """Turn a dtype's name into the :class:`torch.dtype`.

    Args:
        value: A name of :data:`DTYPES`, with or without ``torch.`` before it (a dumped config holds
            ``"torch.float32"``), or one of the four dtypes themselves.
        where: What the caller calls the argument; begins the error message.

    Raises:
        ConfigError: For anything else.

    Example:
        >>> resolve_dtype("bf16")
        torch.bfloat16
        >>> resolve_dtype("torch.float32") is resolve_dtype(torch.float32)
        True
    """
    if isinstance(value, torch.dtype):
        if value in DTYPES.values():
            return value
    elif isinstance(value, str):
        found = DTYPES.get(value.removeprefix("torch."))
        if found is not None:
            return found
    raise ConfigError(f"{where}: got {value!r}; expected one of {_canonical_names()}.{_advice(value)}")


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name without ``torch.``: ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def _canonical_names() -> str:
    return ", ".join(sorted({dtype_name(dtype) for dtype in DTYPES.values()}))


def _advice(value: object) -> str:
    near = difflib.get_close_matches(str(value).removeprefix("torch."), DTYPES, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else " Name one of them, such as 'float32'."
