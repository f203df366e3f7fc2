"""torch's own ways to see each function (TorchFunctionMode) and each kernel (TorchDispatchMode) that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from dtype_hooks.scales.operations import (
    DESCENDED,
    LEFT_OUT,
    RAW,
    has_own_way,
    inside_of,
    is_setter,
    operation_name,
)

if TYPE_CHECKING:
    from dtype_hooks.scales.recorder import Recorder

_MAY_HOLD_TENSORS = (torch.Tensor, tuple, list, dict)


class FunctionMode(TorchFunctionMode):
    """Tells the recorder what each function returns."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is DESCENDED and not any(map(has_own_way, types)):
            with self:
                return inside_of(func)(*args, **kwargs)
        outputs = func(*args, **kwargs)
        if func in RAW:
            self._recorder.gave_memory(args)
        if isinstance(outputs, _MAY_HOLD_TENSORS):
            if type(outputs) is not torch.Size and self._recorder.is_listening:
                name = operation_name(func)
                if name not in LEFT_OUT:
                    self._recorder.saw(name, args, kwargs, outputs)
        elif outputs is None and is_setter(func) and self._recorder.is_listening:
            self._recorder.saw(operation_name(func), args, kwargs, args[0])
        return outputs


class KernelMode(TorchDispatchMode):
    """Tells the recorder what each kernel returns; views and uninitialised memory are no kernels' work."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in LEFT_OUT:
            self._recorder.saw_kernel(f"aten.{func.overloadpacket.__name__}", outputs)
        return outputs


def is_on(mode: TorchFunctionMode | TorchDispatchMode) -> bool:
    """Whether ``mode`` is on this thread's stack, as the stack is now: inside a backward it is another one."""
    at, count = _stack_of(mode)
    if count and at(count - 1) is mode:
        return True
    return any(at(index) is mode for index in range(count))


def leave(mode: TorchFunctionMode | TorchDispatchMode) -> bool:
    """Take ``mode`` off, if it is the last that was put on; return whether it was."""
    at, count = _stack_of(mode)
    if not count or at(count - 1) is not mode:
        return False
    mode.__exit__(None, None, None)
    return True


def take_off(mode: TorchFunctionMode | TorchDispatchMode) -> None:
    """Take ``mode`` off, wherever it is on this thread's stack: those that were put on since stay."""
    if not is_on(mode):
        return
    pop, push = (
        (_pop_mode, _push_mode)
        if isinstance(mode, TorchFunctionMode)
        else (_python_dispatch._pop_mode, _python_dispatch._push_mode)
    )
    above: list[Any] = []
    while not leave(mode):
        above.append(pop())
    for each in reversed(above):
        push(each)


def _stack_of(mode: TorchFunctionMode | TorchDispatchMode) -> tuple[Callable[[int], Any], int]:
    if isinstance(mode, TorchFunctionMode):
        return torch._C._get_function_stack_at, torch._C._len_torch_function_stack()
    return torch._C._get_dispatch_stack_at, torch._C._len_torch_dispatch_stack()
