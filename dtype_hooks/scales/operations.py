"""What the functions that a model calls are named, and which of them make no tensor of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F

SAME_VALUES = frozenset(
    {
        *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel"),
        *("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT", "adjoint"),
        *("squeeze", "unsqueeze", "contiguous", "detach", "clone", "data"),
        *("to", "float", "double", "type", "type_as", "cpu", "cuda", "identity"),
    }
)
"""Functions whose result has the elements of their first argument in some order, when numel and dtype agree."""

FILLED = frozenset(
    {
        *("zeros", "ones", "full"),
        *("zeros_like", "ones_like", "full_like"),
        *("new_zeros", "new_ones", "new_full"),
    }
)
"""Functions whose result may be the buffer that an extension writes into, which no version counter tells of."""

RAW = frozenset(
    {
        *(torch.Tensor.data.__get__, torch.Tensor.data.__set__),  # type: ignore[attr-defined]
        *(torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__, torch.Tensor.data_ptr),
        *(torch.Tensor.untyped_storage, torch.Tensor.storage, torch.Tensor.set_),
    }
)
"""Functions that give a tensor's memory away: what is written there since, no version counter tells of."""

SAME_GRADIENT = SAME_VALUES | {"add", "add_", "iadd", "radd"}
"""Functions whose backward may hand the gradient's own memory on to what they were called with."""

_UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_"}
)
_NO_NEW_TENSOR = frozenset(
    {"requires_grad_", "detach_", "retain_grad", "share_memory_", "grad", "_base", "_grad", "tolist"}
)
LEFT_OUT = _UNINITIALISED | _NO_NEW_TENSOR
"""Functions whose result is memory that nobody has written yet, or no new value."""

DESCENDED = F.multi_head_attention_forward
"""A function that is looked into: it hands itself over as a whole, and its softmax would not be seen."""

_SETTERS = frozenset({"__setitem__"})


def operation_name(func: Callable[..., Any]) -> str:
    """The name of a function as its caller knows it: ``softmax``, ``add``, ``T`` for the attribute, ``setitem``."""
    name = getattr(func, "__name__", None) or type(func).__name__
    if name == "__get__":
        attribute = func.__self__  # type: ignore[attr-defined]
        return getattr(attribute, "__name__", None) or type(attribute).__name__
    if name.startswith("__") and name.endswith("__"):
        return name[2:-2]
    return name


def inside_of(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func`` without its own hand-over to ``__torch_function__``.

    The copy made here finds another ``has_torch_function`` in its globals and runs its body, whose functions are seen one
    by one; torch's own module is not touched.
    """
    code_globals = {**func.__globals__, "has_torch_function": _nobody}
    inside = FunctionType(func.__code__, code_globals, func.__name__, func.__defaults__, func.__closure__)
    inside.__kwdefaults__ = func.__kwdefaults__
    return inside


def has_own_way(cls: type) -> bool:
    """Whether a tensor's class says itself what functions do, and may know one as a whole."""
    own = getattr(cls, "__torch_function__", None)
    plain = (torch.Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
    return getattr(own, "__func__", own) not in [getattr(each, "__func__", each) for each in plain]


def is_setter(func: Callable[..., Any]) -> bool:
    """Whether ``func`` returns None and writes into its first argument: ``z[i] = value``."""
    return getattr(func, "__name__", None) in _SETTERS


_SHORT = 16
"""A longer list that begins with a number is data, as ``torch.tensor`` takes it, and is not gone through."""


def tensors_in(
    value: Any, label: str = "", inside: tuple[int, ...] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(label, tensor)`` of nested tuples, lists and mappings: ``("", t)``, ``("[0]", t)``, ``("[logits]", t)``.

    ``inside`` are the ``id`` of the containers that ``value`` is in: one that holds itself is gone into once.
    """
    if isinstance(value, torch.Tensor):
        yield label, value
    elif isinstance(value, (tuple, list)):
        if id(value) not in inside and not (len(value) > _SHORT and type(value[0]) in (float, int)):
            for index, item in enumerate(value):
                yield from tensors_in(item, f"{label}[{index}]", (*inside, id(value)))
    elif isinstance(value, Mapping) and id(value) not in inside:
        for key, item in value.items():
            yield from tensors_in(item, f"{label}[{key}]", (*inside, id(value)))


def _nobody(*_: Any) -> bool:
    return False
