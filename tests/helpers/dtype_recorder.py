"""Which operator ran in which dtype, and in which module: read at the dispatcher, below autocast and autograd."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtype_hooks.core.naming import named_bare_modules


@dataclass(frozen=True)
class Call:
    """One operator as the kernel saw it.

    Attributes:
        op: ATen name without overload: ``"addmm"``, ``"native_layer_norm"``, ``"_to_copy"`` (a cast).
        module: Dotted name (of the bare model; a shared module's first) of the innermost module whose ``__call__``
            was running; ``""`` for the root and for what runs outside every module. A backward operator has the
            module whose forward made its autograd node, ``""`` where that is not known (sums of gradients).
        inputs: The dtypes of the floating tensors among the arguments, in order, lists included.
        outputs: The same of what it returned.
        backward: Whether it ran inside ``backward()``, recomputation of a checkpointed part included.
    """

    op: str
    module: str
    inputs: tuple[torch.dtype, ...]
    outputs: tuple[torch.dtype, ...]
    backward: bool

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Every floating dtype that went in or came out."""
        return {*self.inputs, *self.outputs}


class Calls(list[Call]):
    """The recorded calls in order of execution, with the questions that tests ask of them."""

    def of(self, op: str | None = None, module: str | None = None, backward: bool | None = None) -> Calls:
        """Those of an operator, of a module and of all below it, of the forward or the backward; None is any."""
        return Calls(
            call
            for call in self
            if (op is None or call.op == op)
            and (module is None or call.module == module or call.module.startswith(f"{module}."))
            and (backward is None or call.backward is backward)
        )

    def dtypes(self, op: str | None = None, module: str | None = None, **where: Any) -> set[torch.dtype]:
        """Every floating dtype in and out of these calls: ``calls.dtypes("addmm", "head") == {torch.float32}``.

        Raises:
            AssertionError: When there is no such call, so that a test cannot pass on nothing.
        """
        found = self.of(op, module, **where)
        assert found, (
            f"no {op or 'call'} in {module!r}; there were {sorted({(c.module, c.op) for c in self})}"
        )
        return set().union(*(call.dtypes for call in found))


@contextmanager
def record_dtypes(model: nn.Module) -> Iterator[Calls]:
    """Record every operator that runs inside ``with``, in this thread and in the backward started from it.

    ``with record_dtypes(model) as calls: model(x).sum().backward()``; then ``calls`` is a list of :class:`Call`.
    Modules are found by swapping ``nn.Module.__call__``: nothing is put on the model, so overrides, fast paths and
    hooks behave as without a recorder. A module that is reached by ``module.forward(x)``, is no part of ``model`` (a deep
    copy) or runs inside a compiled region counts as the module around it. Gradients are bitwise the same.
    """
    names: dict[int, str] = {}
    for name, module in named_bare_modules(model):
        names.setdefault(id(module), name)
    modules = threading.local()
    plain_call = nn.Module.__call__

    def call_and_tell(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stack = modules.__dict__.setdefault("stack", [])
        stack.append(names.get(id(self), stack[-1] if stack else ""))
        try:
            return plain_call(self, *args, **kwargs)
        finally:
            stack.pop()

    nn.Module.__call__ = call_and_tell
    try:
        with _Recorder(modules) as recorder:
            yield recorder.calls
    finally:
        nn.Module.__call__ = plain_call


class _Recorder(TorchDispatchMode):
    def __init__(self, modules: threading.local) -> None:
        super().__init__()
        self.calls = Calls()
        self._modules = modules
        self._module_of_node: dict[int, str] = {}  # by autograd sequence number

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        node = torch._C._current_autograd_node()
        module = self._module(node)
        out = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        self.calls.append(Call(name, module, _floating((args, kwargs)), _floating(out), node is not None))
        return out

    def _module(self, node: Any) -> str:
        stack = self._modules.__dict__.get("stack")
        if node is not None and not stack:
            return self._module_of_node.get(node._sequence_nr(), "")
        module = stack[-1] if stack else ""
        if torch.is_grad_enabled():  # its node was made just before the operator came down here
            self._module_of_node[torch._C._autograd._get_sequence_nr() - 1] = module
        return module


def _floating(value: Any) -> tuple[torch.dtype, ...]:
    return tuple(
        leaf.dtype for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    )
