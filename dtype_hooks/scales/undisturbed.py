"""Computing beside what a model computes, without being seen by it or changed by its state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def undisturbed(tensor: torch.Tensor) -> Iterator[None]:
    """No gradients, no modes of anybody, no autocast on the tensor's device."""
    device_type = tensor.device.type
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.no_grad())
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if torch.is_autocast_enabled(device_type):
            stack.callback(torch.set_autocast_enabled, device_type, True)
            torch.set_autocast_enabled(device_type, False)
        yield
