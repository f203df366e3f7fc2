"""The scales of every tensor that a model makes, forward and backward, seen while it runs eagerly."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dtype_hooks.core.number_formats import DEFAULT_FORMATS, NumberFormat, resolve_formats
from dtype_hooks.core.selection import Selection
from dtype_hooks.core.validation import as_bool, as_choice
from dtype_hooks.errors import ConfigError
from dtype_hooks.scales.callers import method_place
from dtype_hooks.scales.known import KnownGradient, KnownTensors
from dtype_hooks.scales.modes import FunctionMode, KernelMode, is_on, leave, take_off
from dtype_hooks.scales.module_calls import watch_calls
from dtype_hooks.scales.operations import SAME_GRADIENT, SAME_VALUES, tensors_in
from dtype_hooks.scales.places import Place, Places
from dtype_hooks.scales.recompute import (
    Call,
    Recomputes,
    Run,
    backward_node,
    in_backward,
    is_checkpoint,
    is_recomputed,
)
from dtype_hooks.scales.record import Entry, Scales
from dtype_hooks.scales.statistics import Measurement, Workspace, measure
from dtype_hooks.scales.undisturbed import can_take, is_watched, undisturbed

LEVELS = ("functions", "aten")
FORMAT_NAMES = tuple(each.name for each in DEFAULT_FORMATS)


@contextmanager
def track_scales(
    model: nn.Module,
    patterns: str | Sequence[str] | None = None,
    class_patterns: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    *,
    level: str = "functions",
    formats: Sequence[str] = FORMAT_NAMES,
    backward: bool = True,
    parameters: bool = True,
    only_std: bool = False,
) -> Iterator[Scales]:
    """Record the scale of every floating tensor that ``model`` makes in this block, and of its gradient.

    No tracing, and no change to the model: what runs in the block runs as it would without, bit for bit. Each result of
    a torch function is named after the module whose method called it (``forward`` or any other: ``self.head.loss(x)`` is the
    head's), the function, and how often that module has called it before in this block: ``blocks.0.attn:softmax``,
    ``blocks.0.attn:softmax.1``, and ``attn:chunk[2]`` for one of several results. What the model is called with is
    ``:input[0]``, ``:input[mask]``; the parameters are ``blocks.0.norm.weight``.

    **What is seen**: every function of torch and ``torch.nn.functional`` that is called with the block's thread or inside
    a module of the model in any thread; in-place functions and ``z[i] = v`` by what they leave; views; each output of a
    custom ``torch.autograd.Function``; ``nn.MultiheadAttention`` from the inside. Fused functions are one. Under both kinds
    of activation checkpointing there is one record a tensor; the recompute adds the gradients. Outside of the model's
    modules a result is recorded when it requires grad: losses, not data loading or the optimizer.

    **What is left out**: integer, bool, complex, sparse, quantized, nested, meta and fake tensors, those inside of a
    functorch transform, uninitialised memory (``torch.empty``), and what runs inside a scripted function or a C++ extension,
    of which the module's next function shows the result. Also: parameters that are made in the block (lazy modules), what
    hooks call in a backward, losses in an optimizer's closure, dataclasses that the model is called with, and what becomes
    part of a ``torch.jit.trace`` or a CUDA graph.

    **Gradients** are those that reach the tensor, summed over its uses, before a hook of yours changes them. Where the block
    runs several backward passes over one tensor, their values are pooled. A parameter's is its ``.grad`` after the block's
    last backward that changed it: reduced over ranks, summed over what was accumulated before; where a hook uses it up in the backward, as it was before
    the hook. With loss scaling they are scaled.

    Args:
        model: Any module, wrapped (DDP, ``torch.compile``) or not; names are the bare model's.
        patterns: Regexes on dotted names: only what happens inside these modules. None, with no class patterns, is everything.
        class_patterns: The same on class names.
        exclude: Regexes on dotted names of modules left out, with all that is below them.
        level: ``"aten"`` adds the kernels below the functions: casts by autocast, the insides of fused functions, and the
            backward's own (``direction == "backward"``, under the module whose forward they belong to).
        formats: Number formats whose underflow, subnormal and overflow fractions are counted.
        backward: Whether gradients are recorded.
        parameters: Whether parameters and their gradients are recorded.
        only_std: Only count, mean, std and rms: the cheapest.

    Yields:
        The record. It can be read inside the block and after it.

    Raises:
        ConfigError: For an argument that cannot be used.
        SelectionError: When ``patterns`` take no module.

    Note:
        A compiled model runs eagerly in the block (``torch.compiler.set_stance``), and is not compiled anew afterwards.

        In eval mode without gradients ``nn.TransformerEncoder`` and ``nn.MultiheadAttention`` have a fast path, which torch
        itself leaves where functions are watched: their outputs then differ in the last bits, and at padded positions, which
        the fast path fills with zeros.

        At level ``"aten"``, kernels of a backward are laid to the wrong module where several threads ran forwards.

    Example:
        >>> import torch, dtype_hooks
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
        >>> with dtype_hooks.track_scales(model) as scales:
        ...     model(torch.ones(3, 4)).square().mean().backward()
        >>> [row["name"] for row in scales.rows() if row["direction"] == "backward"][-3:]
        ['2:linear', ':square', ':mean']
    """
    where = "track_scales"
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{where}.model: got {type(model).__name__}; expected an nn.Module. Pass the model itself."
        )
    selection = Selection.make(patterns, class_patterns, exclude, where)
    recorder = Recorder(
        Places.make(model, selection, where),
        level=as_choice(level, LEVELS, f"{where}.level"),
        formats=resolve_formats(formats, f"{where}.formats"),
        backward=as_bool(backward, f"{where}.backward"),
        parameters=as_bool(parameters, f"{where}.parameters"),
        only_std=as_bool(only_std, f"{where}.only_std"),
    )
    with recorder:
        yield recorder.scales


class _Thread(threading.local):
    """Where a thread is: the module whose forward runs, and whether we are measuring."""

    place: Place | None = None
    busy = False
    recomputing = False
    again: Run | None = None  # of reentrant checkpointing
    first_runs: tuple[Run, ...] = ()
    paused: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.known = KnownGradient()


_NOWHERE = Place("", False, nn.Module())
"""Where a checkpointed function runs again that was called outside of the model: the forward did not record it."""


class Recorder:
    """One recording, from ``with`` to its end; see :func:`track_scales`.

    Attributes:
        scales: The record.
    """

    def __init__(
        self,
        places: Places,
        *,
        level: str = "functions",
        formats: tuple[NumberFormat, ...] = DEFAULT_FORMATS,
        backward: bool = True,
        parameters: bool = True,
        only_std: bool = False,
    ) -> None:
        self.scales = Scales(formats)
        self._backward, self._parameters, self._only_std = backward, parameters, only_std
        self._places, self._everything = places.of, places.everything
        self._modes: list[Any] = [FunctionMode(self)]
        if level == "aten":
            self._modes.append(KernelMode(self))
        self._thread = _Thread()
        self._lock = threading.RLock()
        self._handles: list[RemovableHandle] = []
        self._leaves: list[weakref.ref[torch.Tensor]] = []
        self._of_parameters: list[tuple[Entry, torch.Tensor]] = []
        self._calls: dict[tuple[str, str], list[Call]] = {}
        self._recomputes = Recomputes()
        self._workspace = Workspace()
        self._gradients = 0
        self._node_modules: dict[int, str] = {}
        self._known = KnownTensors()
        self._region = ExitStack()
        self._open = False

    def __enter__(self) -> Recorder:
        with ExitStack() as region:
            region.callback(self._close)
            region.enter_context(
                watch_calls(
                    self._places.values(),
                    self._call,
                    self._after_function,
                    self._recomputing,
                    self._around_backward,
                )
            )
            self._open = True
            region.callback(register_optimizer_step_post_hook(self._after_step).remove)
            if self._parameters:
                self._record_parameters()
            if self._everything:
                self._enter_modes(region)
            self._region = region.pop_all()
        return self

    def _enter_modes(self, region: ExitStack) -> None:
        """Have the modes on in this thread, save while an optimizer steps: its functions are many, and not the model's."""
        for mode in self._modes:
            mode.__enter__()
            region.callback(take_off, mode)
        region.callback(register_optimizer_step_pre_hook(self._before_step).remove)

    def _before_step(self, *_: Any) -> None:
        # one that steps inside another's step finds them off; one that failed has left them off until now
        self._thread.paused += tuple(mode for mode in reversed(self._modes) if leave(mode))

    def _after_step(self, *_: Any) -> None:
        self._known.distrust(len(self.scales))  # it may have written into ``p.data``
        paused, self._thread.paused = self._thread.paused, ()
        for mode in reversed(paused):
            mode.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._region.close()

    def _close(self) -> None:
        self._open = False
        for handle in self._handles:
            handle.remove()
        for reference in self._leaves:
            leaf = reference()
            if leaf is not None and not leaf._backward_hooks:
                leaf._backward_hooks = None
        self._handles.clear()
        self._leaves.clear()
        self._of_parameters.clear()
        self._known.clear()
        self._thread.known.clear()
        self._thread.paused = ()
        self._places = {}

    # What the modes and patches call

    def _call(self, place: Place, original: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """A module of the model is called, in any thread."""
        thread = self._thread
        outer, thread.place = thread.place, place
        try:
            if outer is not None and self._modes_are_on() and not in_backward():  # the usual way
                return original(*args, **kwargs)
            return self._first_call(place, original, args, kwargs)
        finally:
            thread.place = outer

    def _first_call(self, place: Place, original: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """A call that does not come from a module that is recorded in the same thread."""
        if not self._open:
            return original(*args, **kwargs)
        if in_backward() and not self._thread.recomputing:
            return self._recompute(original, args, kwargs)
        if not place.name:
            self._record_inputs(args, kwargs)
        if not (place.wanted or place.holds_wanted):
            return original(*args, **kwargs)
        return self._with_modes(original, args, kwargs)

    def _modes_are_on(self) -> bool:
        return all(map(is_on, self._modes))

    def _recompute(self, original: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """A module is called inside a backward: by checkpointing that is not reentrant, or a recompute written by hand."""
        if self._recomputes.start() is None or is_checkpoint(torch._C._current_autograd_node()):
            # the forward ran with gradients: its tensors have their hooks
            self._thread.busy, busy = True, self._thread.busy
            try:
                return original(*args, **kwargs)
            finally:
                self._thread.busy = busy
        self._thread.recomputing = True
        try:
            return self._with_modes(original, args, kwargs)
        finally:
            self._thread.recomputing = False

    def _with_modes(self, original: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """The call with our modes on: other threads, and the backward, begin without them."""
        missing = [mode for mode in self._modes if not is_on(mode)]
        if not missing:
            return original(*args, **kwargs)
        with ExitStack() as stack:
            for mode in missing:
                stack.enter_context(mode)
            return original(*args, **kwargs)

    def _after_function(self, cls: type, args: tuple, kwargs: dict, outputs: Any) -> None:
        if self.is_listening:
            self.saw(cls.__name__, args, kwargs, outputs, is_custom=True)

    def _recomputing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What reentrant checkpointing runs in place of ``function``: in the backward it is where it was in the forward."""
        place = self._thread.place or _NOWHERE
        first_run: Run | None = None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal first_run
            thread = self._thread
            if not self._open:
                return function(*args, **kwargs)
            before = thread.place, thread.recomputing, thread.again, thread.first_runs
            if first_run is None:
                first_run = Run()
                thread.first_runs = (*thread.first_runs, first_run)
                call = function
            else:
                thread.place, thread.recomputing, thread.again = place, True, Run(first_run.start)
                thread.first_runs = ()
                call = partial(self._with_modes_of, place, function)
            try:
                return call(*args, **kwargs)
            finally:
                thread.place, thread.recomputing, thread.again, thread.first_runs = before

        return run

    def _with_modes_of(self, place: Place, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if place.wanted or place.holds_wanted:
            return self._with_modes(function, args, kwargs)
        return function(*args, **kwargs)

    def gave_memory(self, args: tuple) -> None:
        """A function was called that lets the memory of ``args[0]`` be written to unseen."""
        if args and not self._thread.busy and self._open:
            self._known.is_raw(args[0])

    @property
    def is_listening(self) -> bool:
        """Whether what runs in this thread now is to be recorded."""
        thread = self._thread
        if thread.busy or not self._open or is_watched():
            return False
        if thread.place is None:
            return self._everything and torch.is_grad_enabled()
        return thread.place.wanted or thread.place.holds_wanted

    def _place(self) -> Place | None:
        """The module whose method calls the function that has run; None outside of all modules."""
        place = self._thread.place
        return method_place(self._places, place) if place is not None and place.has_children else place

    def saw(self, op: str, args: tuple, kwargs: dict, outputs: Any, is_custom: bool = False) -> None:
        """A function named ``op`` was called with ``args`` and ``kwargs`` and has returned ``outputs``.

        ``is_custom`` says that it is an autograd function, whose backward may write into the gradient that it gets.
        """
        if isinstance(outputs, torch.Tensor):
            tensors = [("", outputs)] if can_take(outputs) else []
        else:
            tensors = [each for each in tensors_in(outputs) if can_take(each[1])]
        if not tensors:
            return
        place = self._place()
        if place is None:
            tensors = [each for each in tensors if each[1].requires_grad]
        if tensors and (place is None or place.wanted):
            self._record("" if place is None else place.name, op, tensors, args, kwargs, is_custom)

    def _record(
        self,
        module: str,
        op: str,
        tensors: list[tuple[str, torch.Tensor]],
        args: tuple,
        kwargs: dict,
        is_custom: bool = False,
    ) -> None:
        if in_backward():
            self._record_again(module, op, tensors, is_custom)
            return
        inputs = self._known.orders(args, kwargs)
        source = args[0] if args and op in SAME_VALUES else None
        measured = [self._known.statistics(source, tensor) or self._measured(tensor) for _, tensor in tensors]
        call: Call = {}
        with self._lock:
            calls = self._calls.setdefault((module, op), [])
            for (label, tensor), each in zip(tensors, measured, strict=True):
                while label in call:  # keys that look alike: 1 and "1"
                    label += "'"
                call[label] = self._new(tensor, module, op, len(calls), label, "activation", each, inputs)
            calls.append(call)
        for (_, tensor), entry in zip(tensors, call.values(), strict=True):
            self._known.add(tensor, entry)
            if tensor.requires_grad:
                self._hook(tensor, entry, is_custom)
        self._ran(call)

    def _ran(self, call: Call) -> None:
        """A function has run, or has run again: what runs it again later has to begin with it."""
        order = next(iter(call.values())).order
        for run in self._thread.first_runs:
            run.begin(order)
        if not torch.is_grad_enabled():
            self._recomputes.mark(order)

    def _new(
        self,
        tensor: torch.Tensor,
        module: str,
        op: str,
        occurrence: int,
        output: str,
        kind: str,
        measured: Measurement | None,
        inputs: tuple[int, ...] = (),
    ) -> Entry:
        of_tensor = (tensor.dtype, tensor.shape, tensor.device, tensor.requires_grad)
        return self.scales.add(module, op, occurrence, output, kind, *of_tensor, measured, inputs)

    def _record_again(
        self, module: str, op: str, tensors: list[tuple[str, torch.Tensor]], is_custom: bool
    ) -> None:
        """A function of a recompute: its tensors' gradients belong to the records that the forward made."""
        calls = self._calls.get((module, op), [])
        again = self._thread.again
        call = (
            self._recomputes.find((module, op), calls) if again is None else again.find((module, op), calls)
        )
        if call is None:
            return
        for label, tensor in tensors:
            if label in call and tensor.requires_grad:
                self._hook(tensor, call[label], is_custom)
        self._ran(call)

    def saw_kernel(self, op: str, outputs: Any) -> None:
        """A kernel below the functions has returned ``outputs``, in the forward or in the backward."""
        if self._thread.busy or not self._open or is_watched():
            return
        backward = in_backward()
        if backward and self._thread.recomputing:  # the forward has shown it
            self._module_of_kernel()
            return
        if backward and is_recomputed():
            return
        module = self._module_of_node() if backward else self._module_of_kernel()
        if module is None:
            return
        tensors = [(label, tensor) for label, tensor in tensors_in(outputs) if can_take(tensor)]
        if tensors:
            self._record_kernel(module, op, tensors, backward)

    def _module_of_kernel(self) -> str | None:
        place = self._place()
        if place is None:
            return "" if self._everything and torch.is_grad_enabled() else None
        if not place.wanted:
            return None
        # an autograd node takes its number just before its kernel runs
        self._node_modules[torch._C._autograd._get_sequence_nr() - 1] = place.name
        return place.name

    def _module_of_node(self) -> str | None:
        return self._node_modules.get(backward_node()[1])

    def _record_kernel(
        self, module: str, op: str, tensors: list[tuple[str, torch.Tensor]], backward: bool
    ) -> None:
        measured = [self._measured(tensor) for _, tensor in tensors]
        with self._lock:
            calls = self._calls.setdefault((module, f"{op} backward" if backward else op), [])
            call: Call = {}
            calls.append(call)
            for (label, tensor), each in zip(tensors, measured, strict=True):
                entry = self._new(
                    tensor, module, op, len(calls) - 1, label, "kernel", None if backward else each
                )
                if backward:
                    entry.backward.append(each)
                call[label] = entry

    # Measuring

    def _measured(self, tensor: torch.Tensor) -> Measurement:
        thread = self._thread
        thread.busy, busy = True, thread.busy
        try:
            return undisturbed(tensor, measure, self.scales.formats, self._only_std, self._workspace)
        finally:
            thread.busy = busy

    def _hook(self, tensor: torch.Tensor, entry: Entry, is_custom: bool = False) -> None:
        """Have the gradient of ``tensor`` recorded."""
        if not self._backward:
            return
        # Asked for its function, a view whose memory was written to through another tensor is brought up to date;
        # torch (2.13) crashes when a hook is put on one that is not.
        if tensor.grad_fn is None and tensor._backward_hooks is None:
            self._leaves.append(weakref.ref(tensor))
        if is_custom:
            hook = partial(self._hand_over, entry)
        else:
            hook = partial(self._pass_on if entry.op in SAME_GRADIENT else self._gradient, entry)
        hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # saving the tensor then does not warn
        if torch._C._len_torch_function_stack():
            with torch._C.DisableTorchFunction():
                self._handles.append(tensor.register_hook(hook))
        else:
            self._handles.append(tensor.register_hook(hook))

    def _gradient(self, entry: Entry, gradient: torch.Tensor) -> None:
        if self._open and can_take(gradient):
            self._add_gradient(entry, self._thread.known.of(gradient) or self._measured(gradient))

    def _pass_on(self, entry: Entry, gradient: torch.Tensor) -> None:
        """As :meth:`_gradient`, for a function whose backward hands the gradient on to what it was called with."""
        if self._open and can_take(gradient):
            measured = self._thread.known.of(gradient) or self._measured(gradient)
            self._thread.known.set(gradient, measured)
            self._add_gradient(entry, measured)

    def _hand_over(self, entry: Entry, gradient: torch.Tensor) -> None:
        """As :meth:`_gradient`, for a function whose backward may write into the gradient, past its version."""
        self._gradient(entry, gradient)
        self._thread.known.clear()

    def _add_gradient(self, entry: Entry, measured: Measurement) -> None:
        with self._lock:
            entry.backward.append(measured)
            self._count_gradient(entry)

    def _count_gradient(self, entry: Entry) -> None:
        if entry.backward_order < 0:
            entry.backward_order = self._gradients
            self._gradients += 1

    # Inputs and parameters

    def _record_inputs(self, args: tuple, kwargs: dict) -> None:
        root = self._thread.place
        if root is None or not root.wanted or is_watched():
            return
        inputs = dict(enumerate(args)) | kwargs
        try:
            tensors = [(label, tensor) for label, tensor in tensors_in(inputs) if can_take(tensor)]
        except Exception:  # a mapping of somebody's that cannot be gone through yet
            return
        if tensors:
            self._record("", "input", tensors, (), {})

    def _record_parameters(self) -> None:
        seen: set[int] = set()
        for place in list(self._places.values()):
            if not place.wanted:
                continue
            for name, parameter in place.module._parameters.items():
                if parameter is not None and id(parameter) not in seen and can_take(parameter):
                    seen.add(id(parameter))
                    self._record_parameter(f"{place.name}.{name}".lstrip("."), parameter)

    def _record_parameter(self, name: str, parameter: torch.Tensor) -> None:
        measured = self._measured(parameter)
        module, _, last = name.rpartition(".")
        entry = self._new(parameter, module, last, 0, "", "parameter", measured)
        self._known.add(parameter, entry)
        if self._backward and parameter.requires_grad:
            self._of_parameters.append((entry, parameter))
            if parameter._post_accumulate_grad_hooks:
                self._read_first(entry, parameter)

    def _read_first(self, entry: Entry, parameter: torch.Tensor) -> None:
        """Read its gradient before the hooks that are there use it, which may let it go: an optimizer in the backward."""

        def read(of: torch.Tensor) -> None:
            if self._open:
                self._read_gradient(entry, of.grad)

        with torch._C.DisableTorchFunction():
            handle = parameter.register_post_accumulate_grad_hook(read)
        hooks = parameter._post_accumulate_grad_hooks
        first = {handle.id: hooks.pop(handle.id), **hooks}
        hooks.clear()  # torch calls them in the order of insertion, not in that of the OrderedDict
        hooks.update(first)
        self._handles.append(handle)

    @contextmanager
    def _around_backward(self) -> Iterator[None]:
        """Read the gradients that a backward changed: reduced over ranks, and summed where it comes in several parts."""
        if not self._open or in_backward():  # inside another backward
            yield
            return
        before = [_State(parameter.grad) for _, parameter in self._of_parameters]
        yield
        for (entry, parameter), state in zip(list(self._of_parameters), before, strict=False):
            gradient = parameter.grad
            if gradient is not None and not state.is_of(gradient):
                self._read_gradient(entry, gradient)

    def _read_gradient(self, entry: Entry, gradient: torch.Tensor | None) -> None:
        if can_take(gradient):
            entry.backward[:] = [self._measured(gradient)]  # type: ignore[arg-type]
            self._count_gradient(entry)


class _State:
    """Which tensor a gradient was, and in which version."""

    __slots__ = ("_gradient", "_version")

    def __init__(self, gradient: torch.Tensor | None) -> None:
        self._gradient = None if gradient is None else weakref.ref(gradient)
        self._version = None if gradient is None else gradient._version

    def is_of(self, gradient: torch.Tensor) -> bool:
        """Whether it is that tensor, unchanged."""
        return (
            self._gradient is not None and self._gradient() is gradient and gradient._version == self._version
        )
