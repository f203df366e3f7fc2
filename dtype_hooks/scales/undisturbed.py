"""Computing beside what a model computes, without being seen by it or changed by its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

Result = TypeVar("Result")


def are_transforms_active() -> bool:
    """Whether a ``torch.func`` transform runs in this thread: any function, ours too, then makes wrapped tensors."""
    active: bool = torch._C._are_functorch_transforms_active()
    return active


def undisturbed(tensor: torch.Tensor, compute: Callable[..., Result], *args: object) -> Result:
    """``compute(tensor, *args)`` without gradients, modes of anybody, and autocast on the tensor's device.

    Nothing is set that is so already: this runs for every tensor, and a context manager costs as much as a small kernel.
    On the CPU, where ``compute`` works on a detached tensor's memory, neither gradients nor autocast matter.
    """
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack() or not tensor.is_cpu:
        with _nothing_on(tensor.device.type):
            return compute(tensor, *args)
    return compute(tensor, *args)


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
