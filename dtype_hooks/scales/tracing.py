"""Tracing a module by torch.fx without changing what it computes, and saying so where that cannot be."""

from __future__ import annotations

import math
import operator
import re
import sys
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from dtype_hooks.core.stand_in import StandIn
from dtype_hooks.errors import TraceError
from dtype_hooks.scales.interpreter import FUNCTION_PLACEHOLDER

WITHOUT_TRACING = "record it without tracing: with dtype_hooks.track_scales(model) as scales: ..."

DEFAULT_AUTOWRAP: tuple[ModuleType, ...] = (math,)
# Functions that cannot be traced through (einops) or that their users want to see as one op. They are wrapped where they
# have been imported; neither package is needed.
_AUTOWRAPPED_IF_IMPORTED = ("einops", "unit_scaling.functional")

_HOOKS = {
    "_forward_pre_hooks": "forward pre-hooks",
    "_forward_hooks": "forward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
    "_backward_hooks": "backward hooks",
}
_AUTOCAST = "autocast"
_GRAD_MODE = "no_grad, enable_grad or inference_mode (or a custom autograd.Function)"
# Ops whose result may share memory with their first argument.
_VIEWS = {
    *(
        "chunk",
        "contiguous",
        "detach",
        "diagonal",
        "expand",
        "expand_as",
        "flatten",
        "getitem",
        "movedim",
        "narrow",
    ),
    *(
        "permute",
        "reshape",
        "select",
        "split",
        "squeeze",
        "swapaxes",
        "t",
        "to",
        "transpose",
        "unbind",
        "unflatten",
    ),
    *("unsqueeze", "view", "view_as"),
}
_READS = {"size", "dim", "numel", "ndimension", "stride", "is_floating_point", "is_complex", getattr}


class Traced(NamedTuple):
    """A traced module and what tracing had to do to it.

    Attributes:
        module: The traced module.
        whole: Path -> reason of the children that stayed calls, since tracing would have changed what they compute.
        dropped: What of the root itself the traced module leaves out, in words.
    """

    module: fx.GraphModule
    whole: dict[str, str]
    dropped: list[str]


class Snapshot:
    """What tracing and running may change in a module: attributes and buffers. Parameters are not written to."""

    def __init__(self, module: nn.Module) -> None:
        _refuse_lazy(module)
        self.attributes = [
            (held, dict(held))
            for child in module.modules()
            if not isinstance(child, torch.jit.ScriptModule)
            for held in (vars(child), child._parameters, child._buffers, child._modules)
        ]
        self.buffers = [(buffer, buffer.detach().clone(), buffer._version) for buffer in module.buffers()]

    def restore(self) -> None:
        """Put everything back; a buffer that nothing has written to is not touched."""
        for held, before in self.attributes:
            for name in held.keys() - before.keys():
                del held[name]
            held.update(before)
        with torch.no_grad():
            for buffer, value, version in self.buffers:
                if buffer._version != version:
                    buffer.copy_(value)


def trace(
    module: nn.Module,
    recurse_modules: bool,
    autowrap_modules: tuple[ModuleType, ...],
    autowrap_functions: tuple[Callable[..., Any], ...],
    snapshot: Snapshot,
) -> Traced:
    """Trace a module, keeping whole those children that tracing would change.

    Which children open a region (autocast, a grad mode) is only seen while tracing, so that a trace is thrown away, the
    module put back by ``snapshot``, and traced anew until every such child is a call.

    Raises:
        TraceError: torch.fx cannot trace the module.
    """
    whole: dict[str, str] = {}
    while True:
        tracer = DeepTracer(recurse_modules, autowrap_modules, autowrap_functions, whole)
        try:
            traced = fx.GraphModule(module, tracer.trace(module))
        except Exception as error:
            if not tracer.failed_in_torch():
                raise _cannot_trace(module, tracer.failed_in, error) from error
        if not tracer.to_keep_whole:
            return Traced(traced, tracer.kept_whole, _bypassed(module) + sorted(tracer.dropped))
        whole |= tracer.to_keep_whole
        snapshot.restore()


class _Proxy(fx.Proxy):
    """A proxy that notes ``x += y``, which fx records as ``x = x + y``; see ``DeepTracer._write_in_place``."""


def _noted(name: str) -> Callable[[Any, Any], Any]:
    def in_place(proxy: Any, other: Any) -> Any:
        result = getattr(operator, f"__{name}__")(proxy, other)
        proxy.tracer.in_place[result.node] = (proxy.node, getattr(operator, f"__i{name}__"))
        return result

    return in_place


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    setattr(_Proxy, f"__i{_name}__", _noted(_name))


class DeepTracer(fx.Tracer):
    """A tracer that goes into every child but those that tracing would change.

    Attributes:
        to_keep_whole: Path -> reason, of children that the next trace should keep whole.
        kept_whole: Path -> reason, of children that this trace has kept whole because it would have changed them.
        dropped: Regions that the root itself opened around an op; the traced module does not open them.
        in_place: Node of ``x += y`` -> the node of ``x``, and the operator that changes it in place.
        failed_in: Path and module in which an error came up, the innermost one.
    """

    def __init__(
        self,
        recurse_modules: bool,
        autowrap_modules: tuple[ModuleType, ...],
        autowrap_functions: tuple[Callable[..., Any], ...],
        whole: dict[str, str],
    ) -> None:
        if autowrap_modules == DEFAULT_AUTOWRAP:
            autowrap_modules += tuple(
                sys.modules[name] for name in _AUTOWRAPPED_IF_IMPORTED if name in sys.modules
            )
        super().__init__(autowrap_modules, autowrap_functions)  # type: ignore[arg-type]
        # A class that such a module has imported (Tensor, FunctionType) must stay one: isinstance asks for it.
        self._autowrap_function_ids -= {id(kind) for kind in _classes(autowrap_modules)}
        self.recurse_modules = recurse_modules
        self.to_keep_whole: dict[str, str] = {}
        self.kept_whole: dict[str, str] = {}
        self.dropped: set[str] = set()
        self.in_place: dict[fx.Node, tuple[fx.Node, Callable[[Any, Any], Any]]] = {}
        self.failed_in: tuple[str, nn.Module] | None = None
        self._whole = whole
        self._entered: list[tuple[str, dict[str, Any]]] = []
        self._functions: dict[Callable[..., Any], fx.Node] = {}
        self._targets: dict[str, Callable[..., Any]] = {}

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Trace, and leave the functions that were passed as arguments, by target, in ``graph._tracer_extras``."""
        self._entered = [("", _regions())]
        graph = super().trace(root, concrete_args)
        self._write_in_place(graph)
        extras = {"target_to_function": self._targets, "training": root.training}
        graph._tracer_extras = {**(graph._tracer_extras or {}), **extras}
        return graph

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if not self.recurse_modules or isinstance(m, torch.jit.ScriptModule):
            return True
        reason = self._whole.get(module_qualified_name, ", ".join(_bypassed(m)) or None)
        if reason:
            self.kept_whole[module_qualified_name] = reason
        return reason is not None

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        path = self.path_of_module(m)
        self._entered.append((path, _regions()))
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed_in = self.failed_in or (path, m)
            raise
        finally:
            self._entered.pop()

    def create_node(self, kind: str, target: Any, args: tuple[Any, ...], *rest: Any, **more: Any) -> fx.Node:
        if kind.startswith("call_") and not _only_reads(target, args):
            self._note_regions()
        return super().create_node(kind, target, args, *rest, **more)

    def create_arg(self, a: Any) -> Any:
        """As ``fx.Tracer`` does; a function that is passed as an argument becomes a placeholder."""
        if isinstance(a, FunctionType | BuiltinFunctionType):
            return self._functions.get(a) or self._function_placeholder(a)
        return super().create_arg(a)

    def _function_placeholder(self, function: Callable[..., Any]) -> fx.Node:
        # The first of the arguments: anywhere else a default, *args or **kwargs before it may make the code invalid.
        name = re.sub(r"\W", "", function.__name__)
        target = FUNCTION_PLACEHOLDER + name
        if target in self._targets:
            target += f"_{len(self._targets)}"
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            node = self.create_node("placeholder", target, (), {}, name)
        self._functions[function], self._targets[target] = node, function
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def _write_in_place(self, graph: fx.Graph) -> None:
        """Make ``x = x + y`` the in-place op that it was, where ``x`` or a view of it is used later and must see the change."""
        position = {node: index for index, node in enumerate(graph.nodes)}
        for node, (changed, target) in self.in_place.items():
            users = {user for alias in _aliases(changed) for user in alias.users}
            if any(position[user] > position[node] for user in users):
                node.target = target

    def _note_regions(self) -> None:
        """Note which module has opened the regions that the next op is in.

        It is the innermost one that was entered under other regions than there are now: those that it calls were
        entered under the present ones already.
        """
        now = _regions()
        for path, on_entry in reversed(self._entered):
            changed = [name for name in now if now[name] != on_entry[name]]
            if not changed:
                continue
            if path:
                self.to_keep_whole[path] = " and ".join(changed)
            else:
                self.dropped.update(changed)
            return

    def failed_in_torch(self) -> bool:
        """Whether the error came up in a child of torch's own, which may as well stay a call, as it does in fx by default."""
        path, module = self.failed_in or ("", None)
        if not path or not self.recurse_modules or path in self._whole:
            return False
        if not type(module).__module__.startswith("torch.nn."):
            return False
        self.to_keep_whole[path] = ""  # nothing to warn of
        return True


def _regions() -> dict[str, Any]:
    """The regions that an op run now would be in: what each is called, and its state."""
    # Before torch 2.7 asking for an accelerator that is not there is an error.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = {"cpu", accelerator.type if accelerator else "cpu"}
    return {
        _AUTOCAST: {
            device: torch.get_autocast_dtype(device)
            for device in devices
            if torch.is_autocast_enabled(device)
        },
        _GRAD_MODE: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    }


def _bypassed(module: nn.Module) -> list[str]:
    """What of a module torch.fx passes over, or runs once while it traces, in words."""
    found = [words for name, words in _HOOKS.items() if getattr(module, name, None)]
    if "forward" in vars(module) or any(isinstance(value, StandIn) for value in vars(module).values()):
        found.append("an overridden method")
    return found


def _only_reads(target: Any, args: tuple[Any, ...]) -> bool:
    """Whether an op is ``x.size()``, ``x.shape[0]`` or the like, which is the same in every region."""
    of_read = target is operator.getitem and isinstance(args[0], fx.Node) and args[0].target in _READS
    return target in _READS or of_read


def _aliases(node: fx.Node) -> set[fx.Node]:
    """The nodes that may share memory with a node, and itself: views of it, what it is a view of, and so on."""
    found, todo = {node}, [node]
    while todo:
        node = todo.pop()
        near = [user for user in node.users if _is_view(user)] + (
            node.all_input_nodes[:1] if _is_view(node) else []
        )
        todo += [other for other in near if other not in found]
        found.update(near)
    return found


def _is_view(node: fx.Node) -> bool:
    return (node.target if isinstance(node.target, str) else node.target.__name__) in _VIEWS


def _classes(modules: tuple[ModuleType, ...]) -> Iterator[type]:
    return (value for module in modules for value in vars(module).values() if isinstance(value, type))


def _refuse_lazy(module: nn.Module) -> None:
    """A lazy module becomes another one in its first call, which could not be undone."""
    for name, child in module.named_modules():
        if any(map(is_lazy, (*child._parameters.values(), *child._buffers.values()))):
            raise TraceError(
                f"analyse_module: got {name!r} (a {type(child).__name__}) without parameters as yet; expected a module that "
                "has run. Call it once, with inputs of the right shape."
            )


def _cannot_trace(module: nn.Module, failed_in: tuple[str, nn.Module] | None, error: Exception) -> TraceError:
    path, failed = failed_in or ("", module)
    name = f"{path!r} ({type(failed).__name__})" if path else f"a {type(failed).__name__}"
    reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].split(". ")[0].rstrip(".")
    return TraceError(
        f"analyse_module: got {name}, which torch.fx cannot trace ({reason}); expected a module that it can trace, "
        f"without control flow on values or shapes of tensors. Rather {WITHOUT_TRACING}"
    )
