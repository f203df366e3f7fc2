"""Autocast regions: torch's semantics, safe where one instance is entered twice, and what a device can autocast to."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from dtype_hooks.core.dtypes import dtype_name
from dtype_hooks.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])

NARROW = (torch.bfloat16, torch.float16)
"""What torch.autocast casts to."""


class Region:
    """What :func:`autocast` returns: a context manager and a decorator.

    Each entry opens a ``torch.autocast`` of its own. One ``torch.autocast`` keeps a single saved state, so that
    entering it twice, or recursion in a function that it decorates, leaves autocast on afterwards (torch 2.13).
    """

    def __init__(
        self, device_type: str, dtype: torch.dtype | None, enabled: bool, cache_enabled: bool | None
    ) -> None:
        self._open = functools.partial(torch.autocast, device_type, dtype, enabled, cache_enabled)
        self._entered = threading.local()  # the open regions of each thread
        self._open()  # torch's own errors and warnings about the arguments come here, where they are written

    def __enter__(self) -> Region:
        region = self._open()
        region.__enter__()
        self._stack.append(region)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.pop().__exit__(*error)

    def __call__(self, function: Function) -> Function:
        """Run every call of ``function`` in a region of its own."""

        @functools.wraps(function)
        def autocasting(*args: Any, **kwargs: Any) -> Any:
            with self._open():
                return function(*args, **kwargs)

        return autocasting  # type: ignore[return-value]

    def __reduce__(self) -> tuple:
        """Copied and pickled with the module that holds it, as torch's: what is open stays here."""
        return (Region, self._open.args)

    @property
    def _stack(self) -> list[Any]:
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        return self._entered.stack


def autocast(
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> Any:
    """A region in which ops run in an op-specific dtype: ``torch.autocast``, as a context manager or decorator.

    Wrap the forward pass and the loss, not the backward: backward ops run in the dtype of their forward ops. Regions nest,
    ``enabled=False`` inside gives control back, and the state is per thread. Only floating tensors up to float32 are
    cast; models and inputs are not to be cast by hand. Unlike ``torch.autocast``, one instance may be entered again
    while it is open, and a decorated function may call itself. Traces under ``torch.compile`` without a graph break
    where it is called inside the compiled function.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ``"xpu"``, ``"mps"``...
        dtype: None is the device's default, ``torch.get_autocast_dtype``: float16 on CUDA, bfloat16 on CPU.
        enabled: Whether autocast is on inside.
        cache_enabled: Whether casts of weights are kept for the length of the outermost region; None leaves it as it is.

    Example:
        >>> with autocast("cpu", torch.bfloat16):
        ...     y = torch.ones(2, 2) @ torch.ones(2, 2)
        >>> y.dtype
        torch.bfloat16
    """
    if torch.compiler.is_compiling():
        return _traced_region(device_type, dtype, enabled, cache_enabled)
    return Region(device_type, dtype, enabled, cache_enabled)


@contextmanager
def _traced_region(
    device_type: str, dtype: torch.dtype | None, enabled: bool, cache_enabled: bool | None
) -> Iterator[None]:
    """The same as a generator, which dynamo can trace; it cannot trace a class that enters ``torch.autocast``."""
    with torch.autocast(device_type, dtype, enabled, cache_enabled):
        yield


def device_type_of(device: str, where: str) -> str:
    """``"cuda:0"`` -> ``"cuda"``.

    Raises:
        ConfigError: For a name that torch does not know.
    """
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError):
        raise ConfigError(
            f"{where}: got {device!r}; expected a device type of torch, such as 'cpu', 'cuda', 'xpu' or 'mps'. "
            "Leave it out to take the parameters' device."
        ) from None


def device_type_of_parameters(model: nn.Module) -> str | None:
    """The device type of the first parameter or buffer, or None where there is none."""
    for tensors in (model.parameters(), model.buffers()):
        for tensor in tensors:
            return tensor.device.type
    return None


def check_autocast(device_type: str, dtype: torch.dtype, where: str) -> None:
    """Refuse what torch would only warn of, and then go on in float32.

    Raises:
        ConfigError: For a device without autocast or that is not there, or a dtype that it cannot autocast to.
    """
    if not is_present(device_type):
        raise ConfigError(
            f"{where}.device_type: got {device_type!r}, for which torch {torch.__version__} has no autocast or finds no device "
            "here; expected a device that is present. Set enabled=False there."
        )
    if dtype not in NARROW or not _autocasts(device_type, dtype):
        raise ConfigError(
            f"{where}.dtype: got {dtype_name(dtype)!r} on {device_type!r}; expected a dtype that it can autocast to: "
            "bfloat16, or float16. Set enabled=False to stay in float32, or disable_autocast = True on one module."
        )


def is_present(device_type: str) -> bool:
    """Whether torch knows autocast for the device type and finds such a device.

    torch.autocast itself opens regions for xpu, mps, mtia and hpu on machines without them (torch 2.13).
    """
    try:
        if not torch.amp.is_autocast_available(device_type):
            return False
        torch.empty(0, device=device_type)
    except (
        RuntimeError,
        AssertionError,
        ImportError,
    ):  # meta; a build, a machine, an installation without it
        return False
    return True


def _autocasts(device_type: str, dtype: torch.dtype) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            region: Any = torch.autocast(device_type, dtype)
    except RuntimeError:  # a GPU without bfloat16
        return False
    return getattr(region, "_enabled", True)
