"""Casting of the floating tensors inside nested arguments and outputs."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .compiling import never_compiled_alone


@never_compiled_alone
def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating tensor in it cast to ``dtype``.

    Reaches through tuples, named tuples, lists, dicts (subclasses too, such as the outputs of the transformers
    package) and dataclasses. Integer, bool and complex tensors and all other values stay the same objects; a
    container in which nothing changes is returned itself, otherwise a new one of the same type.
    """
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, value)


@never_compiled_alone
def map_tensors(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with ``fn`` applied to every tensor in it; an unchanged container is returned itself."""
    return _map(fn, value)[0]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors that :func:`map_tensors` would visit, in its order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in _fields(value).values():
            yield from tensors_in(item)


@never_compiled_alone
def _map(fn: Callable[[Tensor], Tensor], value: Any) -> tuple[Any, bool]:
    """The mapped value and whether it is another one than before: dynamo cannot ask ``is`` of containers."""
    if isinstance(value, Tensor):
        new = fn(value)
        return new, new is not value
    if isinstance(value, dict):
        return _map_dict(fn, value)
    if isinstance(value, (tuple, list)):
        return _map_sequence(fn, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(fn, value)
    return value, False


@never_compiled_alone
def _map_sequence(fn: Callable[[Tensor], Tensor], value: Any) -> tuple[Any, bool]:
    mapped = [_map(fn, item) for item in value]
    if not any(changed for _, changed in mapped):
        return value, False
    items = [new for new, _ in mapped]
    cls = type(value)
    if cls is list or cls is tuple:
        return cls(items), True
    if hasattr(cls, "_make"):  # a named tuple; its own __new__ may want other arguments
        return cls._make(items), True
    if isinstance(value, list):
        result: Any = copy.copy(value)
        result[:] = items
        return result, True
    if hasattr(cls, "n_sequence_fields"):  # torch.return_types.max and its like
        return cls(items), True
    result = tuple.__new__(cls, items)
    if hasattr(value, "__dict__"):
        result.__dict__.update(value.__dict__)
    return result, True


@never_compiled_alone
def _map_dict(fn: Callable[[Tensor], Tensor], value: dict) -> tuple[dict, bool]:
    mapped = {key: _map(fn, item) for key, item in value.items()}
    if not any(changed for _, changed in mapped.values()):
        return value, False
    return _dict_like(value, {key: new for key, (new, _) in mapped.items()}), True


@never_compiled_alone
def _dict_like(value: dict, items: dict) -> dict:
    if type(value) is dict:
        return items
    if type(value) is defaultdict:
        return defaultdict(value.default_factory, items)
    if dataclasses.is_dataclass(value):  # transformers' ModelOutput: a dict and a dataclass in one
        return type(value)(**items)
    if type(value) is OrderedDict:
        return OrderedDict(items)
    result = copy.copy(value)
    for key, item in items.items():
        result[key] = item
    return result


@never_compiled_alone
def _map_dataclass(fn: Callable[[Tensor], Tensor], value: Any) -> tuple[Any, bool]:
    mapped = {name: _map(fn, item) for name, item in _fields(value).items()}
    if not any(changed for _, changed in mapped.values()):
        return value, False
    result = copy.copy(value)
    for name, (item, _) in mapped.items():
        object.__setattr__(result, name, item)  # frozen ones too, and no __post_init__ a second time
    return result, True


@never_compiled_alone
def _fields(value: Any) -> dict[str, Any]:
    names = (field.name for field in dataclasses.fields(value))
    return {name: getattr(value, name) for name in names if hasattr(value, name)}
