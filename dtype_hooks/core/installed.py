"""Overrides as they lie on modules: finding them, linking them with what is below, refusing what cannot be one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from dtype_hooks.core.naming import named_bare_modules
from dtype_hooks.core.overridden_method import OverriddenMethod
from dtype_hooks.core.stand_in import unwrap_to
from dtype_hooks.errors import OverrideError


def link(model: nn.Module) -> None:
    """Tell every override in ``model`` what is below it. Run after each change; cheap, and no state of its own."""
    overrides = list(overrides_in(model))
    for override in overrides:
        inside = {id(module) for module in override.module.modules()}
        lower = [o for o in overrides if id(o.module) in inside and o.module is not override.module]
        kept_out = tuple(o for o in lower if o.dtype is None) if override.dtype is not None else ()
        override.look_below(tuple(_subtree(override)), kept_out)
    _share_gates(overrides)


def overrides_in(model: nn.Module) -> Iterator[OverriddenMethod]:
    """Every override in the bare model, parents before children."""
    seen: set[int] = set()
    for _, module in named_bare_modules(model):
        if id(module) not in seen:
            seen.add(id(module))
            for value in list(module.__dict__.values()):
                found = unwrap_to(OverriddenMethod, value)
                if found is not None and found.module is module:
                    yield found


def find_override(module: nn.Module, method: str) -> OverriddenMethod | None:
    """The override of ``module.method``, also when somebody has wrapped it since (activation checkpointing)."""
    return unwrap_to(OverriddenMethod, module.__dict__.get(method))


def has_method(module: nn.Module, method: str) -> bool:
    """Whether there is something to override.

    A ModuleList has a ``forward`` that only raises; a ParametrizationList has one without arguments, which belongs to the
    module whose weight it computes.
    """
    if isinstance(module, ParametrizationList):
        return False
    if method in module.__dict__:
        return callable(module.__dict__[method])
    found = getattr(type(module), method, None)
    return callable(found) and getattr(found, "__name__", "") != "_forward_unimplemented"


def check_overridable(module: nn.Module, method: str, where: str) -> None:
    """Refuse what would not compute in the dtype, or only seem to.

    Raises:
        OverrideError: For scripted modules, static, class, generator and coroutine methods.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise OverrideError(
            f"{where}: got a scripted module; expected an eager one. Override it before torch.jit.script."
        )
    if method in module.__dict__:
        return
    found = inspect.getattr_static(type(module), method)
    kinds: tuple[tuple[str, Callable[[Any], bool]], ...] = (
        ("a static method", lambda f: isinstance(f, staticmethod)),
        ("a class method", lambda f: isinstance(f, classmethod)),
        ("a generator", inspect.isgeneratorfunction),
        ("a coroutine", inspect.iscoroutinefunction),
        ("an async generator", inspect.isasyncgenfunction),
    )
    for kind, is_kind in kinds:
        if is_kind(found):
            raise OverrideError(
                f"{where}: got {kind}; expected an ordinary method, whose body runs inside the call. Exclude the module."
            )


def check_device(module: nn.Module, dtype: torch.dtype, where: str) -> None:
    """Refuse float64 on MPS, which has none.

    Raises:
        OverrideError: For a parameter on such a device.
    """
    if dtype is torch.float64 and any(parameter.device.type == "mps" for parameter in module.parameters()):
        raise OverrideError(
            f"{where}: got float64 on an mps device; expected float32, float16 or bfloat16. Use float32."
        )


def check_shapes_known(module: nn.Module, dtype: torch.dtype, where: str) -> None:
    """Refuse lazy modules below an override that would cast them; the module itself has its shapes when it is called.

    Raises:
        OverrideError: For a parameter or buffer without shape, stored in another dtype.
    """
    for name, child in module.named_modules():
        for tensor in (*child._parameters.values(), *child._buffers.values()):
            if child is not module and is_lazy(tensor) and tensor.dtype is not dtype:
                raise OverrideError(
                    f"{where}: got {name!r} below it, a {type(child).__name__} whose shape is not known yet; expected modules "
                    "with shapes. Run the model once before."
                )


def read_by_parent(parent: nn.Module, child_name: str) -> bool:
    """Whether the parent reads the child's weights and never calls it: nn.MultiheadAttention.out_proj."""
    return isinstance(parent, nn.MultiheadAttention) and child_name == "out_proj"


def _subtree(override: OverriddenMethod) -> Iterator[nn.Module]:
    """The modules whose parameters ``override`` casts: all below but those that another dtype's override holds."""
    seen: set[int] = set()
    rest = [override.module]
    while rest:
        module = rest.pop()
        seen.add(id(module))
        yield module
        for name, child in module._modules.items():
            if child is None or id(child) in seen:
                continue
            own = find_override(child, "forward")
            if own is None or own.dtype is override.dtype or read_by_parent(module, name):
                rest.append(child)
                seen.add(id(child))


def _share_gates(overrides: list[OverriddenMethod]) -> None:
    """One gate for all overrides that reach a common module, be it one in another or two that share a child."""
    group = list(range(len(overrides)))
    first: dict[int, int] = {}  # of a module: the first override that reaches it

    def root(index: int) -> int:
        while group[index] != index:
            index = group[index]
        return index

    for index, override in enumerate(overrides):
        for module in override.module.modules():
            group[root(index)] = root(first.setdefault(id(module), index))
    for index, override in enumerate(overrides):
        override.gate = overrides[root(index)].gate


def never_called_by(model: nn.Module, module: nn.Module) -> nn.Module | None:
    """The parent that reads ``module``'s weights without calling it, if there is one."""
    for _, parent in named_bare_modules(model):
        for name, child in parent._modules.items():
            if child is module and read_by_parent(parent, name):
                return parent
    return None


def block_fast_path(layer: nn.TransformerEncoderLayer) -> RemovableHandle:
    """Make the layer call its children in eval mode too.

    Otherwise its fused kernel reads their weights and no override of a child is ever reached. An attached hook,
    whatever it does, is one of the conditions under which it takes the slow path (torch 2.6 to 2.13).
    """
    return layer.register_forward_pre_hook(_no_fast_path)


def layers_with_fast_path(
    model: nn.Module, overridden: Iterable[nn.Module]
) -> Iterator[nn.TransformerEncoderLayer]:
    """The ``nn.TransformerEncoderLayer`` that have an overridden or kept-out module below them."""
    ids = {id(module) for module in overridden}
    for _, layer in named_bare_modules(model):
        if isinstance(layer, nn.TransformerEncoderLayer) and any(
            id(module) in ids for module in layer.modules() if module is not layer
        ):
            yield layer


def _no_fast_path(module: nn.Module, args: Any) -> None:
    """A forward pre-hook that does nothing; its presence is what counts."""
