"""The dtype that a module's own parameters and buffers are stored in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from dtype_hooks.core.dtypes import dtype_name
from dtype_hooks.core.naming import named_bare_modules
from dtype_hooks.core.selection import Selected
from dtype_hooks.errors import OverrideError, SelectionError

CLAIMS = "_dtype_hooks_stored_by"
"""Where a module notes who stores its parameters in which dtype: ``{owner: (label, dtype)}``, plain values."""


@dataclass(frozen=True)
class Stored:
    """A parameter or buffer that a rule stores in its dtype.

    Attributes:
        names: Every dotted name of the tensor in the model, more than one when it is tied.
        module: The module that owns it.
        held: The module's ``_parameters`` or ``_buffers``.
        key: Its name in ``held``.
        tensor: The parameter or buffer itself; its identity is kept.
        dtype: What it is stored in.
        original: What it was stored in before.
    """

    names: tuple[str, ...]
    module: nn.Module = field(repr=False)
    held: dict[str, Any] = field(repr=False)
    key: str
    tensor: Tensor = field(repr=False)
    dtype: torch.dtype
    original: torch.dtype

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, not a buffer."""
        return isinstance(self.tensor, nn.Parameter)


def own_tensors(
    module: nn.Module, parameters: bool, buffers: bool
) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """``(dict that holds it, name, tensor)`` of the module's own floating parameters, buffers or both.

    Those of a parametrization (``torch.nn.utils.parametrizations``) count as the module's own: they took the place of
    its parameters.
    """
    owners = [module]
    if is_parametrized(module):
        owners += module.get_submodule("parametrizations").children()
    for owner in owners:
        for wanted, held in ((parameters, owner._parameters), (buffers, owner._buffers)):
            for key, tensor in held.items():
                if wanted and tensor is not None and tensor.is_floating_point():
                    yield held, key, tensor


def tensor_names(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """Every dotted name of every parameter and buffer of the bare model, by ``id``."""
    names: dict[int, list[str]] = {}
    for path, module in named_bare_modules(model):
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is not None:
                    names.setdefault(id(tensor), []).append(f"{path}.{key}" if path else key)
    return {key: tuple(value) for key, value in names.items()}


def plan_storage(
    model: nn.Module, selected: Iterable[Selected], dtype: torch.dtype, parameters: bool, buffers: bool
) -> list[Stored]:
    """What would be stored in ``dtype``, each tensor once, without touching anything."""
    names = tensor_names(model)
    plan: dict[int, Stored] = {}
    for item in selected:
        for held, key, tensor in own_tensors(item.module, parameters, buffers):
            known_as = names.get(id(tensor), (f"{item.names[0]}.{key}",))
            plan.setdefault(
                id(tensor), Stored(known_as, item.module, held, key, tensor, dtype, original=tensor.dtype)
            )
    return list(plan.values())


def check_storage(model: nn.Module, plan: list[Stored], owner: str, where: str) -> None:
    """Refuse what cannot be stored in the dtype, before anything is changed.

    Raises:
        OverrideError: Lazy parameters; float64 on a device without it.
        SelectionError: A tensor that another rule stores in another dtype.
    """
    claimed = _claimed_dtypes(model, owner)
    for stored in plan:
        if is_lazy(stored.tensor):
            raise OverrideError(
                f"{where}: got {stored.names[0]!r}, a parameter without a shape yet; expected an initialised one. "
                "Run one forward of the lazy module first."
            )
        other = claimed.get(id(stored.tensor))
        if other is not None and other[1] is not stored.dtype:
            raise SelectionError(
                f"{where}: {other[0]!r} ({dtype_name(other[1])}) and this rule ({dtype_name(stored.dtype)}) both store "
                f"{' = '.join(stored.names)!r}. Narrow one of them."
            )


def change_dtype(tensor: Tensor, dtype: torch.dtype) -> None:
    """Store a parameter or buffer in ``dtype``, its identity kept; a gradient in another dtype is dropped."""
    tensor.data = tensor.data.to(dtype)
    if tensor.grad is not None and tensor.grad.dtype is not dtype:
        tensor.grad = None


def flatten_rnns(modules: Iterable[nn.Module]) -> None:
    """Let recurrent modules find their re-typed weights in one chunk of memory again (cuDNN warns otherwise)."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def claim_storage(module: nn.Module, owner: str, label: str, dtype: torch.dtype) -> None:
    """Note on the module that ``owner`` stores its tensors in ``dtype``."""
    module.__dict__.setdefault(CLAIMS, {})[owner] = (label, dtype)


def release_storage(module: nn.Module, owner: str) -> bool:
    """Take the note off again; returns whether nobody else stores the module's tensors."""
    claims = module.__dict__.get(CLAIMS, {})
    claims.pop(owner, None)
    if not claims:
        module.__dict__.pop(CLAIMS, None)
    return not claims


def _claimed_dtypes(model: nn.Module, besides: str) -> dict[int, tuple[str, torch.dtype]]:
    """``{id(tensor): (label, dtype)}`` of what rules other than ``besides`` store."""
    found: dict[int, tuple[str, torch.dtype]] = {}
    for _, module in named_bare_modules(model):
        for owner, claim in module.__dict__.get(CLAIMS, {}).items():
            if owner != besides:
                for _, _, tensor in own_tensors(module, parameters=True, buffers=True):
                    found[id(tensor)] = claim
    return found
