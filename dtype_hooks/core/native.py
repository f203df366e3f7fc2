"""The dtypes that a method would return if nobody overrode it."""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from .casting import map_tensors, tensors_in


def native_output_dtypes(
    module: nn.Module, name: str, args: tuple, kwargs: dict
) -> list[torch.dtype] | torch.dtype:
    """What ``module.name(*args, **kwargs)`` returns, under the autocast state of the moment and without override.

    An embedding answers with its weight's dtype. Any other module is run once as a copy without hooks, on fake
    tensors: no memory, no arithmetic, no random numbers drawn, nothing in the module changed. Where that fails (control
    flow on data, code that leaves torch) the dtype of its first floating parameter is the answer.

    Returns:
        The dtypes of the floating tensors in the output, in :func:`~.casting.tensors_in` order, or one dtype
        for all of them.
    """
    if getattr(type(module), name, None) in (nn.Embedding.forward, nn.EmbeddingBag.forward):
        return cast("Tensor", module.weight).dtype
    try:
        with _unnoticed():
            return _dtypes_of_fake_run(module, name, args, kwargs)
    except Exception:  # whatever the module's own code raises on fake tensors
        return stored_dtype(module)


def stored_dtype(module: nn.Module, default: torch.dtype | None = None) -> torch.dtype:
    """The dtype of the module's first floating parameter or buffer, else ``default``, else torch's default dtype."""
    for tensors in (module.parameters(), module.buffers()):
        for tensor in tensors:
            if tensor.is_floating_point():
                return tensor.dtype
    return default or torch.get_default_dtype()


def _dtypes_of_fake_run(module: nn.Module, name: str, args: tuple, kwargs: dict) -> list[torch.dtype]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo = {id(tensor): mode.from_tensor(tensor) for tensor in (*module.parameters(), *module.buffers())}
    twin = copy.deepcopy(module, memo)
    twin.__dict__.pop(name, None)
    for part in twin.modules():
        part._forward_pre_hooks.clear()
        part._forward_hooks.clear()
    fake: Callable[[Tensor], Tensor] = mode.from_tensor
    fake_args, fake_kwargs = map_tensors(fake, (args, kwargs))
    with mode, torch.no_grad():
        output: Any = getattr(type(twin), name)(twin, *fake_args, **fake_kwargs)
    return [tensor.dtype for tensor in tensors_in(output) if tensor.is_floating_point()]


@contextmanager
def _unnoticed() -> Iterator[None]:
    """No dispatch mode counts what runs inside, no warning is given, no random number is used up."""
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    states = random.getstate(), numpy_random and numpy_random.get_state()
    try:
        with _disable_current_modes(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(states[0])
        if numpy_random:
            numpy_random.set_state(states[1])
