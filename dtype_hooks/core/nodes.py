"""The nodes of a model: which submodules run in a dtype of their own, resolved once, and regions put on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dtype_hooks.core.autocast_method import AutocastMethod, Phase
from dtype_hooks.core.installed import check_overridable, has_method
from dtype_hooks.core.naming import named_bare_modules
from dtype_hooks.core.selection import Selection, SelectionResult, select
from dtype_hooks.core.stand_in import put_in, take_out, unwrap_to
from dtype_hooks.core.storage import change_dtype
from dtype_hooks.errors import SelectionError
from dtype_hooks.node_dtype import resolve_node_dtype

ROOT = "(model)"
"""The name of the root as a node."""


@dataclass(frozen=True)
class Node:
    """A submodule with a dtype of its own.

    Attributes:
        name: Its dotted name, :data:`ROOT` for the model itself.
        module: The module.
        dtype: What it autocasts in; None runs without autocast.
        source: Where that comes from: ``config``, ``model``, ``device default``, ``own override``, ``opted out``...
    """

    name: str
    module: nn.Module = field(repr=False)
    dtype: torch.dtype | None
    source: str


def resolve_nodes(
    model: nn.Module, dtype: torch.dtype | None, source: str, selection: Selection
) -> tuple[list[Node], SelectionResult]:
    """The nodes of a bare model, in its order.

    Without patterns the root is one; with patterns the chosen modules are, and the root is not. So are modules that opt
    out (``disable_autocast``), that have a ``get_autocast_dtype()`` of their own, or that ``exclude`` names, wherever
    a region is open around them or would be.

    Args:
        model: The bare model.
        dtype: The model-wide dtype, from :func:`~dtype_hooks.node_dtype.resolve_model_dtype`.
        source: Where that came from.
        selection: Which modules regions are restricted to, and which are kept out.
    """
    chosen = select(model, selection)
    taken = {id(item.module) for item in chosen.taken}
    excluded = {id(item.module) for item in chosen.excluded}
    nodes: dict[int, Node] = {}
    for name, module in named_bare_modules(model):
        if id(module) in nodes:
            continue
        is_root = not name
        node = None
        if id(module) in excluded:
            node = Node(name, module, None, "excluded")
        elif is_root:
            node = Node(ROOT, module, dtype, source) if selection.is_empty else None
        else:
            node = _submodule(name, module, dtype, source, id(module) in taken)
        if node is not None and has_method(module, "forward"):
            nodes[id(module)] = node
    return list(nodes.values()), chosen


def _submodule(
    name: str, module: nn.Module, dtype: torch.dtype | None, source: str, taken: bool
) -> Node | None:
    own = resolve_node_dtype(module, dtype)
    opted_out = getattr(module, "disable_autocast", False)
    if opted_out() if callable(opted_out) else opted_out:
        return Node(name, module, None, "opted out")
    if callable(getattr(module, "get_autocast_dtype", None)):
        return Node(name, module, own, "own override" if own is not dtype else source)
    return Node(name, module, dtype, source) if taken else None


@dataclass
class Regions:
    """Autocast regions as installed on the nodes of one model; ``remove()`` takes them off."""

    nodes: list[Node]
    phase: Phase
    methods: list[AutocastMethod] = field(default_factory=list)

    def install(self, device_type: str, cache_enabled: bool | None, where: str) -> None:
        """Put a region on every node that needs one; safe to call again, for what has gone since.

        Raises:
            SelectionError: Another entry has put a region there.
            OverrideError: A module that cannot have one.
        """
        ours = {id(method) for method in self.methods}
        for node in self.nodes:
            present = unwrap_to(AutocastMethod, node.module.__dict__.get("forward"))
            if present is not None and id(present) not in ours:
                raise SelectionError(
                    f"{where}: got {node.name!r}, which another AutocastHook autocasts already; expected one owner. "
                    "Narrow one of them with patterns or exclude."
                )
            check_overridable(node.module, "forward", f"{where}: {node.name}.forward")
        gone = {id(method) for method in self.missing()}
        kept = [method for method in self.methods if id(method) not in gone]
        have = {id(method.module) for method in kept}
        for node in self.nodes:
            if id(node.module) not in have:
                method = AutocastMethod(
                    node.module, node.name, device_type, node.dtype, cache_enabled, self.phase
                )
                put_in(method)
                kept.append(method)
        self.methods = kept

    def missing(self) -> list[AutocastMethod]:
        """The regions that are no longer in place."""
        return [
            method
            for method in self.methods
            if unwrap_to(AutocastMethod, method.module.__dict__.get("forward")) is not method
        ]

    def remove(self) -> None:
        """Put back exactly what was there."""
        for method in self.methods:
            take_out(method)
        self.methods = []


def cast_nodes(nodes: list[Node], model: nn.Module) -> list[tuple[str, Tensor]]:
    """Store each node's parameters and floating buffers in its dtype: its whole subtree but nested nodes.

    A node without a dtype keeps what it was built in. Identities are kept, as in
    :func:`~dtype_hooks.core.storage.change_dtype`; a tensor shared between nodes goes with the first.

    Returns:
        ``(name of the node, tensor)`` of what changed.
    """
    changed: list[tuple[str, Tensor]] = []
    seen: set[int] = set()
    for node in nodes:
        for tensor in tensors_of(node, nodes):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                if node.dtype is not None and tensor.is_floating_point() and tensor.dtype is not node.dtype:
                    change_dtype(tensor, node.dtype)
                    changed.append((node.name, tensor))
    return changed


def tensors_of(node: Node, nodes: list[Node]) -> Iterator[Tensor]:
    """The parameters and buffers of a node: its subtree without nested nodes."""
    others = {id(other.module) for other in nodes} - {id(node.module)}
    rest: list[Any] = [node.module]
    seen: set[int] = set()
    while rest:
        module = rest.pop()
        seen.add(id(module))
        for held in (module._parameters, module._buffers):
            yield from (tensor for tensor in held.values() if tensor is not None)
        rest.extend(c for c in module.children() if id(c) not in others and id(c) not in seen)
