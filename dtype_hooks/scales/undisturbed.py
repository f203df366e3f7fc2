"""Computing beside what a model computes, without being seen by it or changed by its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

Result = TypeVar("Result")


def undisturbed(device_type: str, compute: Callable[..., Result], *args: object) -> Result:
    """``compute(*args)`` without gradients, modes of anybody, and autocast on the device.

    Nothing is set that is so already: this runs for every tensor, and a context manager costs as much as a small kernel.
    """
    if (
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch.is_autocast_enabled(device_type)
    ):
        with _nothing_on(device_type):
            return compute(*args)
    enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        return compute(*args)
    finally:
        torch._C._set_grad_enabled(enabled)


@contextmanager
def _nothing_on(device_type: str) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.no_grad())
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if torch.is_autocast_enabled(device_type):
            stack.callback(torch.set_autocast_enabled, device_type, True)
            torch.set_autocast_enabled(device_type, False)
        yield
