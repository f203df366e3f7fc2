"""The nodes of a model: which submodules run in a dtype of their own, resolved once, and regions put on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from dtype_hooks.core.autocast_method import AutocastMethod, Phase
from dtype_hooks.core.installed import (
    block_fast_path,
    check_overridable,
    has_method,
    layers_with_fast_path,
    read_by_parent,
)
from dtype_hooks.core.naming import bare_module, named_bare_modules
from dtype_hooks.core.selection import Selection, SelectionResult, select
from dtype_hooks.core.stand_in import put_in, take_out, unwrap_to
from dtype_hooks.core.storage import change_dtype, claims_on, flatten_rnns
from dtype_hooks.errors import OverrideError, SelectionError
from dtype_hooks.node_dtype import has_own_dtype, opts_out, resolve_node_dtype

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

    Without patterns the root is one, and with patterns each chosen module; below these, so are modules with a dtype of
    their own. Everywhere, modules are that opt out (``disable_autocast``) or that ``exclude`` names: their arguments may come
    from a region. What has no ``forward`` to put a region on (``nn.ModuleList``) hands its dtype down to its children.

    Args:
        model: The bare model.
        dtype: The model-wide dtype, from :func:`~dtype_hooks.node_dtype.resolve_model_dtype`.
        source: Where that came from.
        selection: Which modules regions are restricted to, and which are kept out.
    """
    chosen = select(model, selection)
    rules = _Rules(
        dtype,
        source,
        {id(item.module) for item in chosen.taken},
        {id(item.module) for item in chosen.excluded},
    )
    nodes: dict[int, Node] = {}
    if selection.is_empty:
        nodes[id(model)] = Node(ROOT, model, dtype, source)
    inside = {id(m) for root in ([model] if selection.is_empty else _taken(chosen)) for m in root.modules()}
    handed_down: dict[int, Node] = {}
    for name, module in named_bare_modules(model):
        if id(module) in nodes or not name:
            continue
        node = rules.node(name, module) or handed_down.get(id(module))
        if node is None or (node.dtype is not None and id(module) not in inside):
            continue
        node = replace(node, name=name, module=module)
        if has_method(module, "forward"):
            nodes[id(module)] = node
        else:
            handed_down.update((id(bare_module(child)), node) for child in module.children())
    return [node for node in nodes.values() if has_method(node.module, "forward")], chosen


def _taken(chosen: SelectionResult) -> list[nn.Module]:
    return [item.module for item in chosen.taken]


@dataclass(frozen=True)
class _Rules:
    """What makes a submodule a node, and in which dtype."""

    dtype: torch.dtype | None
    source: str
    taken: set[int]
    excluded: set[int]

    def node(self, name: str, module: nn.Module) -> Node | None:
        if id(module) in self.excluded:
            return Node(name, module, None, "excluded")
        own = resolve_node_dtype(module, self.dtype)
        if opts_out(module):
            return Node(name, module, None, "opted out")
        if has_own_dtype(module):
            return Node(name, module, own, "own override")
        return Node(name, module, own, self.source) if id(module) in self.taken else None


@dataclass
class Regions:
    """Autocast regions as installed on the nodes of one model; ``remove()`` takes them off.

    Attributes:
        model: The bare model.
        nodes: Its nodes.
        phase: What the regions look at.
        device_type: Of the regions.
        cache_enabled: Of the regions.
        methods: The regions in place, one a node.
    """

    model: nn.Module
    nodes: list[Node]
    phase: Phase
    device_type: str
    cache_enabled: bool | None
    methods: list[AutocastMethod] = field(default_factory=list)
    _hooks: list[RemovableHandle] = field(default_factory=list)

    def check(self, others: Sequence[Regions], where: str) -> None:
        """Refuse what cannot have a region, before anything is touched.

        Raises:
            SelectionError: A node that is one of another entry's too.
            OverrideError: A module that cannot have a region.
        """
        theirs = {id(module) for other in others for module in other.autocasted()}
        for node in self.nodes:
            if node.dtype is not None and any(id(m) in theirs for m in modules_of(node, self.nodes)):
                raise SelectionError(
                    f"{where}: got {node.name!r}, which another AutocastHook autocasts already; expected one owner. "
                    "Narrow one of them with patterns or exclude."
                )
            check_overridable(node.module, "forward", f"{where}: {node.name}.forward")

    def autocasted(self) -> Iterator[nn.Module]:
        """Every module that a region's dtype reaches."""
        for node in self.nodes:
            if node.dtype is not None:
                yield from modules_of(node, self.nodes)

    def install(self, others: Sequence[Regions] = ()) -> None:
        """Put a region on every node; safe to call again, for what has gone since.

        A region that an earlier run, a copy or a checkpoint has left on a node is taken over, one elsewhere taken off. What
        one entry keeps out another may autocast.
        """
        for other in others:
            other._leave_to(self)
            self._leave_to(other)
        theirs = {id(method) for other in others for method in other.methods}
        nodes = {id(node.module): node for node in self.nodes}
        for method in regions_in(self.model):
            if id(method) not in theirs and id(method.module) not in nodes:
                take_out(method)
                method.switch_off()
        self.methods = [self._install_on(node) for node in self.nodes]
        self._block_fast_paths()

    def _leave_to(self, other: Regions) -> None:
        """Forget the modules kept out here that are nodes of another entry."""
        theirs = {id(node.module) for node in other.nodes}
        self.nodes = [n for n in self.nodes if n.dtype is not None or id(n.module) not in theirs]
        ours = {id(node.module) for node in self.nodes}
        self.methods = [method for method in self.methods if id(method.module) in ours]

    def _install_on(self, node: Node) -> AutocastMethod:
        method = find_region(node.module)
        if method is None:
            method = AutocastMethod(node.module, node.name)
            put_in(method)
        method.node, method.dtype = node.name, node.dtype
        method.device_type, method.cache_enabled, method.phase = (
            self.device_type,
            self.cache_enabled,
            self.phase,
        )
        method.has_region_around = node.module is not self.model
        method.cast_output = None
        return method

    def _block_fast_paths(self) -> None:
        for hook in self._hooks:
            hook.remove()
        layers = layers_with_fast_path(self.model, (node.module for node in self.nodes))
        self._hooks = [block_fast_path(layer) for layer in layers]

    def missing(self) -> list[AutocastMethod]:
        """The regions that are no longer in place, or that another run has taken over."""
        return [
            method
            for method in self.methods
            if method.phase is not self.phase or find_region(method.module) is not method
        ]

    def remove(self) -> None:
        """Put back exactly what was there."""
        for method in self.methods:
            if method.phase is self.phase:  # not another run's by now
                take_out(method)
                method.switch_off()
        for hook in self._hooks:
            hook.remove()
        self.methods, self._hooks = [], []


def find_region(module: nn.Module) -> AutocastMethod | None:
    """The region on the module's forward, also when somebody has wrapped it since."""
    return unwrap_to(AutocastMethod, module.__dict__.get("forward"))


def regions_in(model: nn.Module) -> list[AutocastMethod]:
    """Every region in the bare model, each once."""
    found = (find_region(module) for _, module in named_bare_modules(model))
    return list({id(method): method for method in found if method is not None}.values())


def check_castable(nodes: list[Node], where: str) -> None:
    """Refuse to store in two dtypes what two nodes share, and what has no shape yet.

    Raises:
        SelectionError: A tensor that belongs to nodes with different dtypes.
        OverrideError: A lazy parameter.
    """
    first: dict[int, Node] = {}
    for node in nodes:
        for tensor in tensors_of(node, nodes):
            if is_lazy(tensor):
                raise OverrideError(
                    f"{where}: got a parameter without a shape in {node.name!r}; expected initialised ones. "
                    "Run one forward of the lazy module first."
                )
            owner = first.setdefault(id(tensor), node)
            if owner.dtype is not node.dtype and tensor.is_floating_point():
                raise SelectionError(
                    f"{where}: got a parameter that {owner.name!r} and {node.name!r} share, in two dtypes; expected one. "
                    "Give both nodes the same dtype, or leave cast_nodes out."
                )


def cast_nodes(nodes: list[Node]) -> list[tuple[str, Tensor]]:
    """Store each node's parameters and floating buffers in its dtype: its whole subtree but nested nodes.

    A node without a dtype keeps what it was built in, and so does a tensor that a rule of
    :class:`~dtype_hooks.core.override.OverrideHandle` stores. Identities are kept, as in
    :func:`~dtype_hooks.core.storage.change_dtype`.

    Returns:
        ``(name of the node, tensor)`` of what changed.
    """
    changed: dict[int, tuple[str, Tensor]] = {}
    for node in nodes:
        for tensor in tensors_of(node, nodes):
            if node.dtype is None or tensor.dtype is node.dtype or not tensor.is_floating_point():
                continue
            if not claims_on(tensor):
                change_dtype(tensor, node.dtype)
                changed[id(tensor)] = (node.name, tensor)
    if changed:
        flatten_rnns(module for node in nodes for module in modules_of(node, nodes))
    return list(changed.values())


def modules_of(node: Node, nodes: Iterable[Node]) -> Iterator[nn.Module]:
    """The modules of a node: its subtree without nested nodes."""
    others = {id(other.module) for other in nodes} - {id(node.module)}
    rest: list[nn.Module] = [node.module]
    seen = {id(node.module)}
    while rest:
        module = rest.pop()
        yield module
        for child in module.children():
            if id(child) not in others and id(child) not in seen:
                seen.add(id(child))
                rest.append(child)


def tensors_of(node: Node, nodes: Iterable[Node]) -> Iterator[Tensor]:
    """The parameters and buffers of :func:`modules_of` a node."""
    for module in modules_of(node, nodes):
        for held in (module._parameters, module._buffers):
            yield from (tensor for tensor in held.values() if tensor is not None)


def never_called_nodes(model: nn.Module, nodes: list[Node]) -> list[str]:
    """The names of nodes whose weights a parent reads without calling them: a region there is never entered."""
    ids = {id(node.module): node.name for node in nodes}
    return [
        ids[id(child)]
        for _, parent in named_bare_modules(model)
        for name, child in parent._modules.items()
        if id(child) in ids and read_by_parent(parent, name)
    ]
