"""Whether overrides and stored dtypes are still what they were put in place as, and putting them back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dtype_hooks.core.dtypes import dtype_name
from dtype_hooks.core.installed import find_override
from dtype_hooks.core.naming import class_name, named_bare_modules
from dtype_hooks.core.override import OverrideHandle
from dtype_hooks.core.storage import Stored, change_dtype


@dataclass(frozen=True)
class Finding:
    """One thing that is no longer as it was put in place; plain text, so that ranks can exchange it.

    Attributes:
        kind: ``"dtype moved"``, ``"parameter replaced"``, ``"module replaced"``, ``"override gone"`` or ``"gone"``.
        name: The dotted name of the parameter, buffer, module or method.
        was: What it should be.
        now: What was found.
    """

    kind: str
    name: str
    was: str
    now: str


class Watch:
    """A quick look at whether anything may have changed since it was made.

    Holds the dicts in which overridden modules, overrides and stored tensors lie, with what lay in them, so that a look is
    a few passes in C. It sees replaced parameters, replaced modules and overwritten methods by identity, and the dtypes
    of the stored tensors. What else lies in the same dicts is looked at too. On a finding ask :func:`findings`.
    """

    def __init__(self, handle: OverrideHandle) -> None:
        wanted = {id(module) for module in handle.modules} | {id(stored.module) for stored in handle.stored}
        self._children = [
            module._modules
            for module in handle.model.modules()
            if any(id(child) in wanted for child in module._modules.values())
        ]
        self._methods: dict[str, list[dict[str, Any]]] = {}
        for record in handle.records:
            if record.method in record.module.__dict__:
                self._methods.setdefault(record.method, []).append(record.module.__dict__)
        held = {id(held): held for stored in handle.stored for held, _ in stored.places}.values()
        self._held = [each for each in held if not _has_single_elements(each)]
        self._with_single_elements = [each for each in held if _has_single_elements(each)]
        # what lies in them
        self._modules = [dict(each) for each in self._children]
        self._overrides = self._present_overrides()
        self._tensors = [dict(each) for each in self._held]
        self._single_elements = _values(self._with_single_elements)
        self._present = [t for t in (*_values(self._held), *self._single_elements) if t is not None]
        self._dtypes = [tensor.dtype for tensor in self._present]

    def is_unchanged(self) -> bool:
        """Whether every object lies where it lay, and the stored tensors have the dtypes that they had."""
        try:
            return (
                self._children == self._modules
                and self._present_overrides() == self._overrides
                and self._tensors_are_same()
                and [tensor.dtype for tensor in self._present] == self._dtypes
            )
        except KeyError:
            return False

    def _tensors_are_same(self) -> bool:
        """By identity.

        Python compares dicts by identity first, which is four times as quick as a loop over their values; only for two
        different objects it asks ``==``, and two different tensors then raise, unless they have one element.
        """
        try:
            same = self._held == self._tensors
        except RuntimeError:
            return False
        now = _values(self._with_single_elements)
        return same and len(now) == len(self._single_elements) and all(map(is_, now, self._single_elements))

    def _present_overrides(self) -> list[Any]:
        return [
            override for name, dicts in self._methods.items() for override in map(itemgetter(name), dicts)
        ]


def findings(handle: OverrideHandle) -> list[Finding]:
    """Compare the model with what ``handle`` put in place; the slow and complete look."""
    modules = dict(named_bare_modules(handle.model))
    found: list[Finding] = []
    for record in handle.records:
        name = record.names[0]
        if all(modules.get(known) is record.module for known in record.names):
            if find_override(record.module, record.method) is not record.override:
                found.append(
                    Finding("override gone", f"{name}.{record.method}", "overridden", "not overridden")
                )
        else:
            found.extend(_replaced(modules, record.names, record.module))
    present = {id(module) for module in modules.values()}
    for stored in handle.stored:
        if id(stored.module) in present:
            found.extend(_drift_of(stored))
    return list(dict.fromkeys(found))


def restore(handle: OverrideHandle, trained: Iterable[Tensor] = ()) -> bool:
    """Put overrides, stored dtypes and replaced Parameters back.

    A replaced Parameter that the optimizer does not know would never be trained, and the one that it knows is no
    longer in the model: the old one returns, with the values of the new. Where the optimizer knows the new one
    (``trained``), or its shape is another, the new one stays and is stored in the dtype.

    Args:
        handle: What is to be put back.
        trained: The parameters that the optimizer holds.

    Returns:
        Whether a parameter was re-typed or exchanged, so that optimizer state and DDP must follow.
    """
    known = {id(parameter) for parameter in trained}
    exchanged = [_bring_back(stored, known) for stored in handle.stored]
    changed = handle.refresh()
    return changed or any(exchanged)


def _values(dicts: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


def _has_single_elements(held: dict[str, Any]) -> bool:
    return any(tensor is not None and (is_lazy(tensor) or tensor.numel() <= 1) for tensor in held.values())


def _replaced(modules: dict[str, nn.Module], names: tuple[str, ...], module: nn.Module) -> Iterator[Finding]:
    for name in names:
        now = modules.get(name)
        if now is None:
            yield Finding("gone", name, class_name(module), "no such module")
        elif now is not module:
            yield Finding("module replaced", name, class_name(module), f"another {class_name(now)}")


def _drift_of(stored: Stored) -> Iterator[Finding]:
    was, now = dtype_name(stored.dtype), [held.get(key) for held, key in stored.places]
    found: dict[tuple[str, str], list[str]] = {}
    for name, tensor in zip(stored.names, now, strict=True):
        change = _change_of(stored, tensor)
        if change is not None:
            found.setdefault(change, []).append(name)
    for (kind, text), names in found.items():
        yield Finding(kind, " = ".join(names), was, text)


def _change_of(stored: Stored, now: Tensor | None) -> tuple[str, str] | None:
    if now is None:
        return "gone", "no such tensor"
    if now is not stored.tensor and stored.is_parameter:
        return "parameter replaced", f"another {type(now).__name__}, {dtype_name(now.dtype)}"
    return ("dtype moved", dtype_name(now.dtype)) if now.dtype is not stored.dtype else None


def _bring_back(stored: Stored, known: set[int]) -> bool:
    """Returns whether a Parameter had been replaced."""
    present = [(held, key, held[key]) for held, key in stored.places if held.get(key) is not None]
    others = [(held, key, tensor) for held, key, tensor in present if tensor is not stored.tensor]
    if not others or not stored.is_parameter:
        return False
    leaving = [(h, k, t) for h, k, t in others if id(t) not in known and t.shape == stored.tensor.shape]
    if leaving:
        change_dtype(stored.tensor, stored.dtype, keep_gradient=True)
        if len(others) == len(present):  # else a tie was broken, and the values of what is still there stay
            with torch.no_grad():
                stored.tensor.copy_(leaving[0][2])
    for held, key, _ in leaving:
        held[key] = stored.tensor
    return True
