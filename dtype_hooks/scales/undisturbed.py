"""Computing beside what a model computes, without being seen by it or changed by its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dtype_hooks.scales.statistics import can_measure

Result = TypeVar("Result")


def is_watched() -> bool:
    """Whether what is computed in this thread becomes part of something: a ``torch.func`` transform or ``torch.jit.trace``."""
    watched: bool = torch._C._are_functorch_transforms_active() or torch._C._is_tracing()
    return watched


def can_take(tensor: object) -> bool:
    """Whether it can be measured, and measuring it now does not become part of a CUDA graph that is being captured."""
    if not can_measure(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())  # type: ignore[attr-defined]


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
