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
"""Where a tensor notes who stores it: ``{owner: StorageClaim}``. On the tensor, since a tied one has several modules."""


@dataclass(frozen=True)
class StorageClaim:
    """One rule's hold on one stored tensor.

    Attributes:
        label: The rule's patterns, for messages.
        dtype: What the tensor is stored in.
        original: What it was stored in before any rule.
    """

    label: str
    dtype: torch.dtype
    original: torch.dtype


@dataclass(frozen=True)
class Stored:
    """A parameter or buffer that a rule stores in its dtype.

    Attributes:
        names: Every dotted name of the tensor in the model, more than one when it is tied.
        module: The module that owns it.
        places: Where it lies, ``(a module's _parameters or _buffers, its name there)``, in the order of ``names``.
        tensor: The parameter or buffer itself; its identity is kept.
        dtype: What it is stored in.
        original: What it was stored in before any rule.
    """

    names: tuple[str, ...]
    module: nn.Module = field(repr=False)
    places: tuple[tuple[dict[str, Any], str], ...] = field(repr=False)
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


def tensor_places(model: nn.Module) -> dict[int, list[tuple[str, dict[str, Any], str]]]:
    """``(dotted name, dict that holds it, name in it)`` of every parameter and buffer of the bare model, by ``id``."""
    places: dict[int, list[tuple[str, dict[str, Any], str]]] = {}
    for path, module in named_bare_modules(model):
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is not None:
                    name = f"{path}.{key}" if path else key
                    places.setdefault(id(tensor), []).append((name, held, key))
    return places


def tensor_names(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """Every dotted name of every parameter and buffer of the bare model, by ``id``."""
    return {key: tuple(name for name, _, _ in found) for key, found in tensor_places(model).items()}


def plan_storage(
    model: nn.Module, selected: Iterable[Selected], dtype: torch.dtype, parameters: bool, buffers: bool
) -> list[Stored]:
    """What would be stored in ``dtype``, each tensor once, without touching anything."""
    places = tensor_places(model)
    plan: dict[int, Stored] = {}
    for item in selected:
        for held, key, tensor in own_tensors(item.module, parameters, buffers):
            found = places.get(id(tensor), [(f"{item.names[0]}.{key}", held, key)])
            original = next((claim.original for claim in claims_on(tensor).values()), tensor.dtype)
            names, where = tuple(name for name, _, _ in found), tuple((held, key) for _, held, key in found)
            plan.setdefault(id(tensor), Stored(names, item.module, where, tensor, dtype, original))
    return list(plan.values())


def check_storage(plan: list[Stored], owner: str, label: str, where: str) -> None:
    """Refuse what cannot be stored in the dtype, before anything is changed.

    Raises:
        OverrideError: Lazy parameters.
        SelectionError: A tensor that another rule stores in another dtype.
    """
    for stored in plan:
        if is_lazy(stored.tensor):
            raise OverrideError(
                f"{where}: got {stored.names[0]!r}, a parameter without a shape yet; expected an initialised one. "
                "Run one forward of the lazy module first."
            )
        for other_owner, claim in claims_on(stored.tensor).items():
            if other_owner != owner and claim.dtype is not stored.dtype:
                raise SelectionError(
                    f"{where}: {claim.label} ({dtype_name(claim.dtype)}) and {label} ({dtype_name(stored.dtype)}) both "
                    f"store {' = '.join(stored.names)!r}. Narrow one of them."
                )


def change_dtype(tensor: Tensor, dtype: torch.dtype, keep_gradient: bool = False) -> None:
    """Store a parameter or buffer in ``dtype``, its identity kept; a gradient in another dtype is dropped, or cast."""
    gradient = tensor.grad
    tensor.grad = None
    tensor.data = tensor.data.to(dtype)
    if gradient is not None and (keep_gradient or gradient.dtype is dtype):
        tensor.grad = gradient.to(dtype)


def flatten_rnns(modules: Iterable[nn.Module]) -> None:
    """Let recurrent modules find their re-typed weights in one chunk of memory again (cuDNN warns otherwise)."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def claims_on(tensor: Tensor) -> dict[str, StorageClaim]:
    """Who stores the tensor; empty when no rule does."""
    return tensor.__dict__.get(CLAIMS, {})


def claim_storage(stored: Stored, owner: str, label: str) -> None:
    """Note on the tensor that ``owner`` stores it."""
    claim = StorageClaim(label, stored.dtype, stored.original)
    stored.tensor.__dict__.setdefault(CLAIMS, {})[owner] = claim


def release_storage(stored: Stored, owner: str) -> bool:
    """Take the note off again; returns whether nobody else stores the tensor."""
    claims = claims_on(stored.tensor)
    claims.pop(owner, None)
    if not claims:
        stored.tensor.__dict__.pop(CLAIMS, None)
    return not claims
