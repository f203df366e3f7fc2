"""The scales of a traced module's tensors: an ``fx.Interpreter`` that records standard deviations as it runs."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakTensorKeyDictionary

FUNCTION_PLACEHOLDER = "function_placeholder__"


@dataclass
class ScalePair:
    """Standard deviations of one value: of the tensor, and of its gradient.

    ``str()`` gives three significant digits: ``(-> 0.123, <- 1.23e+06)``, with ``n/a`` for None.

    Attributes:
        forward: Of the value in the forward pass; NaN where it has fewer than two elements (``torch.std`` is unbiased).
        backward: Of the gradient summed over all uses of the value; None until a backward pass reaches it.
    """

    forward: float | None = None
    backward: float | None = None

    def __str__(self) -> str:
        return f"(-> {_digits(self.forward)}, <- {_digits(self.backward)})"


def _digits(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3}"


class ScaleTrackingInterpreter(fx.Interpreter):
    """Runs a traced module and records the scale of every floating tensor, forward and backward.

    The results are those of ``fx.Interpreter``, values are freed after their last use as there, and every method may
    be overridden as there. Costs one device synchronisation for each tensor and each gradient.

    What is recorded, under the node's name: any result that is one floating tensor (float8 is widened to float32, a
    sparse tensor is seen with its zeros). Left out: integers, complex and nested tensors, tuples (their elements are
    nodes of their own). A tensor of the meta device has the pair ``(None, None)``. The gradient is that of the value as
    it was when its node had run; where a later op changes a value in place, the changed value is another node's. A view
    (or a placeholder) that a later op changes in place shows only the gradient of its uses before the change. A
    backward pass that is run again overwrites the figures of the first.

    Args:
        module: The traced module, for instance from ``torch.fx.symbolic_trace``.

    Attributes:
        scales: Node name -> :class:`ScalePair`, in the order of execution. It is kept from one run to the next.

    Example:
        >>> traced = torch.fx.symbolic_trace(torch.nn.Linear(4, 1))
        >>> interpreter = ScaleTrackingInterpreter(traced)
        >>> interpreter.run(torch.ones(8, 4)).sum().backward()
        >>> print(interpreter.scales["input_1"])
        (-> 0.0, <- n/a)
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.scales: OrderedDict[str, ScalePair] = OrderedDict()
        self._followed = WeakTensorKeyDictionary()

    def run(
        self, *args: Any, initial_env: dict[fx.Node, Any] | None = None, enable_io_processing: bool = True
    ) -> Any:
        """Run the module and record.

        Args:
            args: The module's positional arguments.
            initial_env: Values of nodes that are known already; these nodes are neither run nor recorded.
            enable_io_processing: Flatten the arguments and rebuild the output as the graph's code generator says.

        Returns:
            What the module returns. Run backward from it to fill in the backward figures.
        """
        _warn_of_frozen_training(self.module, self.graph)
        return super().run(*args, initial_env=initial_env, enable_io_processing=enable_io_processing)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if not _has_scale(value):
            return value
        pair = self.scales[n.name] = ScalePair(forward=_std(value))
        if not value.requires_grad or torch.is_inference_mode_enabled():
            return value
        return self._follow(value, pair, n)

    def placeholder(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, str) and target.startswith(FUNCTION_PLACEHOLDER):
            return self.graph._tracer_extras["target_to_function"][target]  # type: ignore[index]
        return super().placeholder(target, args, kwargs)

    def _follow(self, value: Tensor, pair: ScalePair, node: fx.Node) -> Tensor:
        """The value to go on with, hooked so that its gradient lands in the pair.

        A hook on the value itself survives a later in-place change (the gradient is then that of the value before it).
        Where the value is somebody else's (an argument, a parameter) or has a node already (an op that returns its
        argument), an alias gets a gradient, and a hook, of its own. Aliases are made as a last resort: autograd drops
        a view's own node when the view is changed in place.
        """
        unchanged = self._followed.get(value) == value._version
        if value.is_leaf or unchanged or node.op in ("placeholder", "get_attr"):
            # One made under no_grad would be cut off from the graph, although it says requires_grad.
            with torch.enable_grad():
                value = torch.ops.aten.alias.default(value)
        self._followed[value] = value._version
        value.register_hook(_recorder(pair, value.numel(), bool(node.users)))
        return value


def _recorder(pair: ScalePair, numel: int, is_used: bool) -> Callable[[Tensor | None], None]:
    """A tensor hook that holds no tensor.

    Autograd calls it with None for a gradient that it leaves undefined: zeros where the value was used, nothing where it
    is an output that nobody asked for of an op with several.
    """

    def record(gradient: Tensor | None) -> None:
        if gradient is not None:
            pair.backward = _std(gradient)
        elif is_used:
            pair.backward = 0.0 if numel > 1 else math.nan

    return record


def _has_scale(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not value.is_nested


def _std(tensor: Tensor) -> float | None:
    """``torch.std`` of all elements in the tensor's own dtype; None on the meta device. Synchronises the device."""
    if tensor.is_meta:
        return None
    if tensor.numel() < 2:  # torch.std gives NaN as well, and a warning for every loss
        return math.nan
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype.itemsize == 1:  # torch has no std for float8
        tensor = tensor.float()
    return float(tensor.std())


def _warn_of_frozen_training(module: Any, graph: fx.Graph) -> None:
    """Warn once a run where the trace has frozen another ``training`` flag than the module's present one.

    ``analyse_module``'s tracer notes the flag. Of other traces it is known only from ops that say ``training=True``.
    """
    then = (graph._tracer_extras or {}).get("training")
    stale = [node.name for node in graph.nodes if _is_frozen(node) and not module.training]
    if then == module.training or (then is None and not stale):
        return
    ops = f" ({', '.join(stale)})" if stale else ""
    warnings.warn(
        f"dtype_hooks: ScaleTrackingInterpreter: got a module in {_mode(module.training)} mode whose ops{ops} were traced in "
        f"{_mode(not module.training)} mode; expected one mode, since tracing freezes self.training. Trace it again, or "
        "record without tracing: with dtype_hooks.track_scales(model) as scales: ...",
        stacklevel=3,
    )


def _mode(training: bool) -> str:
    return "training" if training else "eval"


def _is_frozen(node: fx.Node) -> bool:
    """Whether an op says ``training=True``; a batch norm without running statistics says so in either mode."""
    statistics = node.kwargs.get("running_mean", node.args[1] if len(node.args) > 1 else None)
    if node.target is torch.nn.functional.batch_norm and statistics is None:
        return False
    return node.op == "call_function" and node.kwargs.get("training") is True
