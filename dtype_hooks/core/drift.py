"""Whether overrides and stored dtypes are still what they were put in place as, and putting them back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import getitem, is_
from typing import Any

import torch
from torch import Tensor, nn

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

    Holds, for every overridden module, where it hangs, where its override lies and where its stored tensors lie, as flat
    lists of ``(dict, key, object)``, so that a look is two passes in C. It sees replaced parameters, replaced modules and
    overwritten methods by identity, and the dtypes of the stored tensors. On a finding ask :func:`findings`.
    """

    def __init__(self, handle: OverrideHandle) -> None:
        places = list(_places(handle))
        self._dicts = [place[0] for place in places]
        self._keys = [place[1] for place in places]
        self._objects = [place[2] for place in places]
        self._tensors = [stored.tensor for stored in handle.stored]
        self._dtypes = [tensor.dtype for tensor in self._tensors]

    def is_unchanged(self) -> bool:
        """Whether every object lies where it lay, and the stored tensors have the dtypes that they had."""
        try:
            if not all(map(is_, map(getitem, self._dicts, self._keys), self._objects)):
                return False
        except KeyError:
            return False
        return [tensor.dtype for tensor in self._tensors] == self._dtypes


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


def _places(handle: OverrideHandle) -> Iterator[tuple[dict[str, Any], str, Any]]:
    wanted = {id(module) for module in handle.modules} | {id(stored.module) for stored in handle.stored}
    for module in handle.model.modules():
        for name, child in module._modules.items():
            if id(child) in wanted:
                yield module._modules, name, child
    for record in handle.records:
        present = record.module.__dict__
        if record.method in present:
            yield present, record.method, present[record.method]
    for stored in handle.stored:
        if stored.key in stored.held:
            yield stored.held, stored.key, stored.held[stored.key]


def _replaced(modules: dict[str, nn.Module], names: tuple[str, ...], module: nn.Module) -> Iterator[Finding]:
    for name in names:
        now = modules.get(name)
        if now is None:
            yield Finding("gone", name, class_name(module), "no such module")
        elif now is not module:
            yield Finding("module replaced", name, class_name(module), f"another {class_name(now)}")


def _drift_of(stored: Stored) -> Iterator[Finding]:
    now = stored.held.get(stored.key)
    name, was = " = ".join(stored.names), dtype_name(stored.dtype)
    if now is None:
        yield Finding("gone", name, was, "no such tensor")
    elif now is not stored.tensor and stored.is_parameter:
        yield Finding(
            "parameter replaced", name, was, f"another {type(now).__name__}, {dtype_name(now.dtype)}"
        )
    elif now.dtype is not stored.dtype:
        yield Finding("dtype moved", name, was, dtype_name(now.dtype))


def _bring_back(stored: Stored, known: set[int]) -> bool:
    now = stored.held.get(stored.key)
    if now is None or now is stored.tensor or not stored.is_parameter:
        return False
    if id(now) in known or now.shape != stored.tensor.shape:
        return True
    with torch.no_grad():
        change_dtype(stored.tensor, stored.dtype)
        stored.tensor.copy_(now)
    stored.held[stored.key] = stored.tensor
    return True
