"""A module's code with the scale of every tensor written beside it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from dtype_hooks.core.naming import bare_module
from dtype_hooks.errors import ConfigError, TraceError
from dtype_hooks.scales.interpreter import FUNCTION_PLACEHOLDER, ScalePair, ScaleTrackingInterpreter
from dtype_hooks.scales.tracing import DEFAULT_AUTOWRAP, WITHOUT_TRACING, Snapshot, Traced, trace

try:  # an optional package, which rich brings along
    import pygments
    from pygments.formatters import TerminalFormatter
    from pygments.lexers import PythonLexer
except ImportError:
    pygments = None

_NAME_OF_UNIT_SCALING = "unit_scaling_functional_"  # written U., as that package's users know it


def analyse_module(
    module: nn.Module,
    inputs: Tensor | tuple[Any, ...],
    backward: Tensor | None = None,
    recurse_modules: bool = True,
    syntax_highlight: bool = True,
    autowrap_modules: tuple[ModuleType, ...] = DEFAULT_AUTOWRAP,
    autowrap_functions: tuple[Callable[..., Any], ...] = (),
) -> str:
    """Trace a module by torch.fx, run it forward and backward, and write the scales beside its code.

    A line of the body is ``code;  (-> f, <- b)``: the standard deviations of the value and of its gradient
    (:class:`ScalePair`). The ``def`` line ends with those of the arguments. An input that needs no gradient has ``<- n/a``.

    The module and the inputs are left as they were: ``.grad``, buffers (running statistics too) and attributes. The
    inputs are copied, so that hooks on them do not run, and those on parameters do. Random draws come from the global
    generator.

    Where tracing would change what is computed, one warning says where. A child that opens an autocast, no_grad,
    enable_grad or inference_mode region around its ops, that has hooks, or whose methods are overridden on the instance
    (by this package, for instance) is kept whole: one line, whose insides are not shown, and right figures. What the module
    itself does of this kind is left out of the figures. Children that are torch's own and cannot be traced (batch norm,
    LSTM, attention) are one line as well, without a warning. The ``training`` flags are those of the moment of the call.

    Args:
        module: Any module that torch.fx can trace; its output is one tensor. Of a wrapper (``torch.compile``, DDP) what
            it wraps.
        inputs: Its positional arguments, or the only one.
        backward: The gradient of the output, of the output's shape; needed unless the output is a single element.
        recurse_modules: Go into children; False shows each as one line.
        syntax_highlight: Colour the text for a terminal, where pygments is installed; plain text otherwise.
        autowrap_modules: Python modules whose functions stay one line. With the default also einops and
            unit_scaling.functional, where these have been imported.
        autowrap_functions: More functions that stay one line.

    Returns:
        The code, without blank lines.

    Raises:
        TraceError: The module cannot be traced, its output is not one tensor, nothing needs a gradient, or a child
            that is kept whole is checkpointed with ``use_reentrant=True``.
        ConfigError: ``module`` is no module, or ``backward`` is missing, or not of the output's shape.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
        >>> print(analyse_module(torch.nn.ReLU(), x, torch.eye(2), syntax_highlight=False))
        def forward(self, input : torch.Tensor) -> torch.Tensor:
            input_1 = input;  (-> 1.29, <- 0.577)
            relu = torch.nn.functional.relu(input_1, inplace = False);  (-> 1.29, <- 0.577)
            return relu
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"analyse_module.module: got {module!r}; expected an nn.Module. Wrap a function in a module's forward."
        )
    module = bare_module(module)
    snapshot = Snapshot(module)
    try:
        traced = trace(module, recurse_modules, autowrap_modules, autowrap_functions, snapshot)
        _warn(traced)
        scales = _record(traced.module, module, inputs if isinstance(inputs, tuple) else (inputs,), backward)
    finally:
        snapshot.restore()
    code = "\n".join(_annotated(traced.module.graph, scales))
    if syntax_highlight and pygments is not None:
        return pygments.highlight(code, PythonLexer(), TerminalFormatter())
    return code


def _warn(traced: Traced) -> None:
    kept = [f"{path!r} ({reason})" for path, reason in traced.whole.items()]
    parts = []
    if traced.dropped:
        parts.append(
            f"tracing leaves out, of the module itself: {', '.join(traced.dropped)}; the figures are without"
        )
    if kept:
        parts.append(f"kept whole, since tracing would change what they compute: {', '.join(kept)}")
    if parts:
        warnings.warn(
            f"dtype_hooks: analyse_module: {'; '.join(parts)}. To see all, {WITHOUT_TRACING}", stacklevel=3
        )


def _record(
    traced: fx.GraphModule, module: nn.Module, inputs: tuple[Any, ...], backward: Tensor | None
) -> Mapping[str, ScalePair]:
    """Run forward and backward on copies of the inputs.

    ``torch.autograd.grad`` fills no ``.grad`` and runs no post-accumulate hook, which might be an optimizer's step.
    """
    leaves = {id(tensor): tensor for tensor in _tensors_of(module) if tensor.requires_grad}

    def copy(tensor: Tensor) -> Tensor:
        fresh = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return leaves.setdefault(id(fresh), fresh) if fresh.requires_grad else fresh

    interpreter = ScaleTrackingInterpreter(traced)
    output = interpreter.run(*tree_map_only(Tensor, copy, inputs))
    _check_output(output, backward)
    try:
        torch.autograd.grad(output, list(leaves.values()), backward, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise TraceError(
            "analyse_module: got a checkpoint with use_reentrant=True, whose backward would fill in .grad; expected "
            f"use_reentrant=False. Set it, or {WITHOUT_TRACING}"
        ) from error
    return interpreter.scales


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, and tensors that are plain attributes (tracing puts constants of the forward there)."""
    yield from module.parameters()
    for child in module.modules():
        yield from (value for value in vars(child).values() if isinstance(value, Tensor))


def _check_output(output: Any, backward: Tensor | None) -> None:
    if not isinstance(output, Tensor):
        kind = type(output).__name__.removeprefix("immutable_")  # fx's own list and dict
        raise TraceError(
            f"analyse_module: got a module that returns a {kind}; expected one tensor to run backward "
            f"from. Wrap the module so that it returns one, or {WITHOUT_TRACING}"
        )
    if not output.requires_grad:
        raise TraceError(
            "analyse_module: got an output that needs no gradient; expected one that depends on a parameter or an input "
            "that does. Call requires_grad_() on an input, and leave torch.no_grad()."
        )
    if backward is None and output.numel() != 1:
        raise ConfigError(
            f"analyse_module.backward: got None for an output of shape {tuple(output.shape)}; expected its gradient, "
            f"a tensor of this shape, since only a single element has one of its own. Pass it, or {WITHOUT_TRACING}"
        )
    if backward is not None and backward.shape != output.shape:
        raise ConfigError(
            f"analyse_module.backward: got a tensor of shape {tuple(backward.shape)}; expected the output's, "
            f"{tuple(output.shape)}. Pass the gradient of the output."
        )


def _annotated(graph: fx.Graph, scales: Mapping[str, ScalePair]) -> Iterator[str]:
    """The lines of a traced module's code, with scales."""
    written = _take_string_annotations(graph)
    for line in graph.python_code("self").src.splitlines():
        if line.startswith("def "):
            yield _signature(line, graph, written, scales)
        elif _is_shown(line):
            yield _body_line(line, scales)


def _take_string_annotations(graph: fx.Graph) -> dict[fx.Node, str]:
    """Take from the graph the annotations that are strings (``from __future__ import annotations``).

    fx would write each as one identifier.
    """
    written = {node: node.type for node in graph.nodes if isinstance(node.type, str)}
    for node in written:
        node.type = None
    return written


def _is_shown(line: str) -> bool:
    """Not blank, nor how fx declares a wrapped function or names one that was passed as an argument."""
    hidden = re.match(rf"torch\.fx\.|\s+\w+ = {FUNCTION_PLACEHOLDER}", line)
    return bool(line.strip()) and not hidden


def _signature(
    line: str, graph: fx.Graph, written: Mapping[fx.Node, str], scales: Mapping[str, ScalePair]
) -> str:
    line = re.sub(rf"{FUNCTION_PLACEHOLDER}\w+(, )?", "", line).replace("(self, )", "(self)")
    for node, annotation in written.items():
        where = r"(?=:$)" if node.op == "output" else rf"(?<= {re.escape(str(node.target))})(?=[,) ])"
        text = f" -> {annotation}" if node.op == "output" else f" : {annotation}"
        line = re.sub(where, text.replace("\\", r"\\"), line, count=1)
    arguments = [node.name for node in graph.nodes if node.op == "placeholder" and node.name == node.target]
    pairs = [str(scales[name]) for name in arguments if name in scales]
    return f"{line}  {', '.join(pairs)}" if pairs else line


def _body_line(line: str, scales: Mapping[str, ScalePair]) -> str:
    """One line of the body with the scales of what it assigns, without fx's ``;  x = None`` that frees values.

    An in-place operator's line is ``x += y;  iadd = x``.
    """
    code = re.sub(r";  (\w+ = )+None$", "", line)
    assigned = re.search(r"(?:^\s+|;  )(\w+)(?: : [^=]+)? = ", code)
    code = code.replace(_NAME_OF_UNIT_SCALING, "U.")
    return f"{code};  {scales[assigned[1]]}" if assigned and assigned[1] in scales else code
