"""The object that stands in for a module's method and runs it in another dtype."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, is_autocast_enabled, nn, set_autocast_enabled
from torch.compiler import is_compiling
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .casting import cast_floating, map_tensors, tensors_in
from .compiling import never_compiled_alone, trace_backward_without_autocast
from .dtypes import dtype_name
from .native import native_output_dtypes, stored_dtype
from .stand_in import StandIn

FIRST_CALLS = 3
"""How many eager calls are looked at for inputs that the rule does not cast."""

CASTS: Mapping[torch.dtype, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        torch.float16: Tensor.half,
        torch.bfloat16: Tensor.bfloat16,
        torch.float32: Tensor.float,
        torch.float64: Tensor.double,
    }
)
"""The same as ``Tensor.to(dtype)``, 1 us quicker each."""

_autocast_outside: ContextVar[str | None] = ContextVar("dtype_hooks_autocast_outside", default=None)
"""Inside an override that has kept-out modules: the device type whose autocast it turned off, or ""."""

Slot = tuple[Any, str, Tensor, Tensor, bool]
"""A module's ``_parameters`` or ``_buffers``, a name in it, the tensor stored there, its cast, whether it is a buffer."""


@dataclass(frozen=True)
class Claim:
    """One rule's hold on one method.

    Attributes:
        owner: The id of the handle that put it there.
        label: The pattern that caught the module, for messages.
        dtype: What the method computes in; None keeps the module out of an overridden parent.
        cast_all: Whether every floating tensor of the arguments is cast, not only the first positional one.
        warn: Whether notes are issued as Python warnings at once (without a hook that reads them).
    """

    owner: str
    label: str
    dtype: torch.dtype | None
    cast_all: bool = False
    warn: bool = True


class Gate:
    """Serialises the calls that swap parameters, among one override and those above and below it.

    ``swaps`` is set before the first swap and never cleared: a thread that finds nothing to cast because another
    one has just swapped it in sees the flag and waits.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.swaps = False

    def __reduce__(self) -> tuple:
        return (Gate, ())  # a lock is neither copied nor pickled


@never_compiled_alone
class OverriddenMethod(StandIn):
    """A module's method, run in ``dtype`` with autocast off; lies in ``module.__dict__`` under the method's name.

    What it must know of the modules below (``below``, ``kept_out``, ``gate``) is set by :func:`.installed.link`.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module, name)
        self.claims: tuple[Claim, ...] = ()
        self.dtype: torch.dtype | None = None
        self.cast_all = False
        self.fresh = FIRST_CALLS
        self.notes: dict[str, str] = {}
        self.native: dict[tuple, list[torch.dtype] | torch.dtype] = {}
        self.below: tuple[nn.Module, ...] = (module,)
        self.rnns: tuple[nn.RNNBase, ...] = ()
        self.computed: tuple[tuple[nn.Module, str], ...] = ()
        self.ties = False
        self.kept_out: tuple[OverriddenMethod, ...] = ()
        self.outside: str | None = None
        self.outside_before: str | None = None
        self.second_device: str | None = None
        self.unusual = False
        self.gate = Gate()

    def claim(self, claims: tuple[Claim, ...]) -> None:
        """Set who holds the method; a dtype wins over being kept out."""
        self.claims = claims
        self.dtype = next((c.dtype for c in claims if c.dtype is not None), None)
        self.cast_all = any(c.cast_all for c in claims)

    def look_below(self, modules: tuple[nn.Module, ...], kept_out: tuple[OverriddenMethod, ...]) -> None:
        """Set the modules whose parameters and buffers are cast for the length of a call, and those left out of it."""
        self.kept_out = kept_out
        self.unusual = bool(kept_out or self.previous is not None or self.second_device is not None)
        tensors = [
            t for m in modules for held in (m._parameters, m._buffers) for t in held.values() if t is not None
        ]
        self.below = modules
        self.rnns = tuple(m for m in modules if isinstance(m, nn.RNNBase))
        self.computed = tuple(
            (m, hook.name)
            for m in modules
            for hook in m._forward_pre_hooks.values()
            if isinstance(hook, (WeightNorm, SpectralNorm))
        )
        self.ties = len({id(tensor) for tensor in tensors}) < len(tensors)

    @property
    def called(self) -> bool:
        """Whether an eager call has come through."""
        return self.fresh < FIRST_CALLS

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The only frame of ours in which dynamo may start a graph; see never_compiled_alone.
        return self._call(args, kwargs)

    def _call(self, args: tuple, kwargs: dict) -> Any:
        compiling = is_compiling()
        if compiling:
            if torch.compiler.is_dynamo_compiling():
                trace_backward_without_autocast()
        elif self.fresh:
            self._observe(args, kwargs)
        dtype = self.dtype
        if dtype is None:
            return self._call_kept_out(args, kwargs, compiling)
        if self.cast_all:
            return self._call_casting_all(dtype, args, kwargs, compiling)
        if not args or not isinstance(args[0], Tensor):
            return self._original(args, kwargs)
        x = args[0]
        given = x.dtype
        if given is dtype:
            y = self._compute(dtype, x, args, kwargs, compiling)
        elif x.is_floating_point():
            cast = x.to(dtype) if compiling else CASTS[dtype](x)
            if not compiling and cast.is_inference():
                cast = CastOnce(dtype)(x)
            y = self._compute(dtype, x, (cast, *args[1:]), kwargs, compiling)
            if self._returns_its_input(cast, y) if compiling else cast._version > 0:
                y = _hand_back_in_place(x, cast, y)
        else:
            return self._call_without_float(dtype, x, args, kwargs, compiling)
        if isinstance(y, Tensor):
            if y.dtype is given or not y.is_floating_point():
                return y
            return y.to(given) if compiling or given not in CASTS else CASTS[given](y)
        return cast_floating(y, given)

    def _returns_its_input(self, cast: Tensor, y: Any) -> bool:
        """Whether an in-place activation has written to its input; a compiled graph keeps no count of writes."""
        return y is cast and getattr(self.module, "inplace", False) is True

    # ---- the other kinds of input

    def _call_casting_all(self, dtype: torch.dtype, args: tuple, kwargs: dict, compiling: bool) -> Any:
        tensors = list(tensors_in((args, kwargs)))
        first = first_floating(tensors)
        if first is None:
            return self._call_without_float(dtype, tensors[0] if tensors else None, args, kwargs, compiling)
        cast = CastOnce(dtype)
        args, kwargs = map_tensors(lambda x: cast(x) if x.is_floating_point() else x, (args, kwargs))
        y = self._compute(dtype, first, args, kwargs, compiling)
        for x, ours in cast.made.items():
            if x is ours:
                continue
            if self._returns_its_input(ours, y) if compiling else ours._version > 0:
                y = _hand_back_in_place(x, ours, y)
        return cast_floating(y, first.dtype)

    def _call_without_float(
        self, dtype: torch.dtype, at: Tensor | None, args: tuple, kwargs: dict, compiling: bool
    ) -> Any:
        """No floating tensor to cast: outputs get the dtypes that the module gives without us."""
        if at is None:
            at = next(self.module.parameters(), torch.empty(0))
        native = stored_dtype(self.module) if compiling else self._native_dtypes(at, args, kwargs)
        return _cast_outputs(self._compute(dtype, at, args, kwargs, compiling), native)

    def _native_dtypes(self, at: Tensor, args: tuple, kwargs: dict) -> list[torch.dtype] | torch.dtype:
        device = at.device.type
        state = torch.get_autocast_dtype(device) if autocast_is_on(device) else None
        inputs = tuple((x.dtype, x.ndim) for x in tensors_in((args, kwargs)))
        key = (state, self.module.training, stored_dtype(self.module), inputs)
        if key not in self.native:
            self.native[key] = native_output_dtypes(self.module, self.name, args, kwargs)
        return self.native[key]

    def _call_kept_out(self, args: tuple, kwargs: dict, compiling: bool) -> Any:
        """Excluded below an override: the autocast state outside, the parameters as stored."""
        if not self.claims:
            return self._original(args, kwargs)
        outside = self.outside if compiling else self._outside()
        x = first_floating(tensors_in((args, kwargs)))
        if outside is None or x is None:
            return self._original(args, kwargs)
        args, kwargs = cast_floating((args, kwargs), stored_dtype(self.module, default=x.dtype))
        if outside and not autocast_is_on(outside):
            with torch.autocast(outside):
                y = self._original(args, kwargs)
        else:
            y = self._original(args, kwargs)
        return cast_floating(y, x.dtype)

    def _outside(self) -> str | None:
        """The autocast state outside; for a checkpoint recomputed in the backward, as it was in the forward."""
        outside = _autocast_outside.get()
        if not outside and torch._C._current_graph_task_id() != -1:
            return self.outside_before
        self.outside_before = outside
        return outside

    # ---- the region

    def _compute(self, dtype: torch.dtype, at: Tensor, args: tuple, kwargs: dict, compiling: bool) -> Any:
        """Run the original method in ``dtype``; ``at`` says on which device.

        The common case, nothing to cast and autocast on or off, is written out here: each call that it saves is
        felt in a tiny norm.
        """
        device = "cpu" if at.is_cpu else at.device.type  # three times as quick as the latter alone
        if compiling:
            return self._swapped(dtype, device, args, kwargs, compiling)
        gate = self.gate
        if gate.swaps or self._has_foreign(dtype) or gate.swaps:  # the flag a second time: see Gate
            gate.swaps = True
            with gate.lock:
                return self._swapped(dtype, device, args, kwargs, compiling)
        if self.unusual or device == "meta" or not is_autocast_enabled(device):
            return self._without_autocast(device, args, kwargs, compiling)
        try:  # before the toggle, for an interrupt between the two
            set_autocast_enabled(device, False)
            module = self.module
            return getattr(type(module), self.name)(module, *args, **kwargs)
        finally:
            set_autocast_enabled(device, True)

    def _has_foreign(self, dtype: torch.dtype) -> bool:
        """Whether a floating parameter or buffer is stored in another dtype."""
        for module in self.below:
            for tensor in module._parameters.values():
                if tensor is not None and tensor.dtype is not dtype and tensor.is_floating_point():
                    return True
            for buffer in module._buffers.values():
                if buffer is not None and buffer.dtype is not dtype and buffer.is_floating_point():
                    return True
        return False

    def _swapped(self, dtype: torch.dtype, device: str, args: tuple, kwargs: dict, compiling: bool) -> Any:
        """Run with casts in the place of what is stored in another dtype."""
        slots: list[Slot] = []
        rnns = [(m, m._flat_weights, m._flat_weight_refs) for m in self.rnns]
        cast = self._caster(dtype, compiling)
        try:
            for module in self.below:
                if parameters := module._parameters:
                    _swap_in(parameters, parameters.keys(), dtype, cast, slots)
                if buffers := module._buffers:
                    _swap_in(buffers, buffers.keys(), dtype, cast, slots, True)
            if not compiling:
                for module, name in self.computed:  # a plain attribute, set before the method is called
                    _swap_in(module.__dict__, (name,), dtype, cast, slots)
            return self._without_autocast(device, args, kwargs, compiling)
        finally:
            for held, name, stored, ours, _ in slots:
                if name in held and held[name] is ours:
                    held[name] = stored
                else:
                    _keep_replacement(held, name, stored)
            for rnn, flat, refs in rnns:  # its forward had collected the casts in lists of its own
                rnn._flat_weights, rnn._flat_weight_refs = flat, refs
            for _, _, stored, ours, is_buffer in slots:  # all are back in their places, should this raise
                # A compiled graph keeps no count, so that changes of parameters are lost there. Eagerly a parameter's
                # count tells; a buffer's may not: batch_norm writes statistics uncounted (torch 2.6 to 2.13).
                counted = compiling or ours._version > 0
                if is_buffer or (counted and not compiling):
                    _write_back(stored, ours, counted)

    def _caster(self, dtype: torch.dtype, compiling: bool) -> Callable[[Tensor], Tensor]:
        if self.ties:
            return CastOnce(dtype)
        if compiling:
            return lambda tensor: tensor.to(dtype)
        return CastOnce(dtype) if torch.is_inference_mode_enabled() else CASTS[dtype]

    def _without_autocast(self, device: str, args: tuple, kwargs: dict, compiling: bool) -> Any:
        if self.second_device is not None or self.kept_out:
            return self._without_autocast_slowly(device, args, kwargs, compiling)
        if not autocast_is_on(device):
            return self._original(args, kwargs)
        if compiling:
            # A region becomes part of the graph. A raw toggle is run while dynamo traces, and where the compiled
            # code opens an autocast region itself dynamo then fails with "Global autocast state changed".
            return self._in_regions_without_autocast([device], args, kwargs)
        try:
            set_autocast_enabled(device, False)
            return self._original(args, kwargs)
        finally:
            set_autocast_enabled(device, True)

    def _without_autocast_slowly(self, device: str, args: tuple, kwargs: dict, compiling: bool) -> Any:
        devices = [d for d in (device, self.second_device) if d is not None and autocast_is_on(d)]
        outside = devices[0] if devices else ""
        before = self._tell_kept_out(outside, compiling)
        try:
            return self._in_regions_without_autocast(devices, args, kwargs)
        finally:
            self._untell_kept_out(before, compiling)

    def _in_regions_without_autocast(self, devices: list[str], args: tuple, kwargs: dict) -> Any:
        if not devices:
            return self._original(args, kwargs)
        with torch.autocast(devices[0], enabled=False):
            return self._in_regions_without_autocast(devices[1:], args, kwargs)

    def _tell_kept_out(self, outside: str, compiling: bool) -> Any:
        """Let the kept-out modules below know the autocast state outside; an outer override's word stays.

        Those that are compiled on their own, or in a graph that starts below this call, read it from the attribute.
        """
        token = None if compiling else _autocast_outside.set(outside or _autocast_outside.get() or "")
        before = [method.outside for method in self.kept_out]
        for method in self.kept_out:
            method.outside = outside or method.outside or ""
        return before, token

    def _untell_kept_out(self, told: Any, compiling: bool) -> None:
        before, token = told
        for method, value in zip(self.kept_out, before, strict=True):
            method.outside = value
        if not compiling:
            _autocast_outside.reset(token)

    # ---- what the first calls show

    def _observe(self, args: tuple, kwargs: dict) -> None:
        self.fresh -= 1
        if self.dtype is None:
            return
        x = next(tensors_in((args, kwargs)), None)
        own = next(self.module.parameters(), None)
        if x is not None and own is not None and own.device.type != x.device.type:
            self.second_device = own.device.type
            self.unusual = True
        if not self.cast_all:
            self._note_what_first_misses(args, kwargs)

    def _note_what_first_misses(self, args: tuple, kwargs: dict) -> None:
        where = f"{type(self.module).__name__}.{self.name} ({', '.join(c.label for c in self.claims)})"
        if not args or not isinstance(args[0], Tensor):
            what = (
                f"the first positional argument is of type {type(args[0]).__name__}, no tensor"
                if args
                else "there is no positional argument"
            )
            self._note(
                "unwrapped",
                f"{where}: {what}, so this call runs without the override. "
                "Set cast_inputs='all' to cast every floating tensor in its arguments.",
            )
            return
        named = [*enumerate(args[1:], start=1), *kwargs.items()]
        for key, value in named:
            for tensor in tensors_in(value):
                if tensor.is_floating_point() and tensor.dtype is not self.dtype:
                    self._note(
                        "other_dtype",
                        f"{where}: argument {key!r} comes in as {dtype_name(tensor.dtype)} and is not cast. "
                        "Set cast_inputs='all' to cast every floating tensor in its arguments.",
                    )

    def _note(self, kind: str, text: str) -> None:
        if kind not in self.notes:
            self.notes[kind] = text
            if any(claim.warn for claim in self.claims):
                warnings.warn(f"dtype_hooks: {text}", stacklevel=2)


def first_floating(tensors: Iterable[Tensor]) -> Tensor | None:
    """The first floating tensor, or None; written out, since ``next`` with a default stops dynamo in torch 2.6."""
    for tensor in tensors:
        if tensor.is_floating_point():
            return tensor
    return None


@never_compiled_alone
def autocast_is_on(device: str) -> bool:
    """Whether autocast is on for the device type; there is none for ``meta``, where torch raises."""
    return device != "meta" and is_autocast_enabled(device)


@never_compiled_alone
def _hand_back_in_place(x: Tensor, cast: Tensor, y: Any) -> Any:
    """The method wrote into its input: so must we, and where it returns the input the caller gets their own."""
    x.copy_(cast)
    return map_tensors(lambda tensor: x if tensor is cast else tensor, y)


@never_compiled_alone
def _cast_outputs(y: Any, dtypes: list[torch.dtype] | torch.dtype) -> Any:
    if isinstance(dtypes, torch.dtype):
        return cast_floating(y, dtypes)
    if len(dtypes) != sum(tensor.is_floating_point() for tensor in tensors_in(y)):
        return y
    rest = iter(dtypes)
    return map_tensors(lambda tensor: tensor.to(next(rest)) if tensor.is_floating_point() else tensor, y)


@never_compiled_alone
class CastOnce:
    """Casts each tensor once: the gradient of a tied parameter is summed in ``dtype``, ``query is key`` stays true.

    In inference mode the casts are ordinary tensors; inference tensors keep no count of what was written to them.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.made: dict[Tensor, Tensor] = {}

    @never_compiled_alone
    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor not in self.made:
            self.made[tensor] = self._cast(tensor)
        return self.made[tensor]

    def _cast(self, tensor: Tensor) -> Tensor:
        if tensor.dtype is self.dtype or is_compiling() or not torch.is_inference_mode_enabled():
            return tensor.to(self.dtype)
        with torch.inference_mode(False):
            return tensor.detach().to(self.dtype)


@never_compiled_alone
def _swap_in(
    held: Any,
    names: Iterable[str],
    dtype: torch.dtype,
    cast: Callable[[Tensor], Tensor],
    slots: list[Slot],
    is_buffer: bool = False,
) -> None:
    for name in names:
        stored = held[name]
        if stored is not None and stored.dtype is not dtype and stored.is_floating_point():
            ours = cast(stored)
            slots.append((held, name, stored, ours, is_buffer))  # first, for an interrupt between the two
            held[name] = ours


@never_compiled_alone
def _keep_replacement(held: dict[str, Any], name: str, stored: Tensor) -> None:
    """The method itself has put something else there; a buffer goes on in its stored dtype."""
    if name not in held:
        return
    now = held[name]
    if isinstance(now, Tensor) and not isinstance(now, nn.Parameter) and now.is_floating_point():
        held[name] = now.to(stored.dtype)


@never_compiled_alone
def _write_back(stored: Tensor, cast: Tensor, counted: bool) -> None:
    """Keep what the method changed; an element that it left alone keeps every bit that it is stored with.

    Where the cast counted no change, the stored tensor does not either.
    """
    if stored.layout is not torch.strided or _is_expanded(stored):
        return
    with torch.no_grad():
        unchanged = cast == stored.to(cast.dtype)
        new = torch.where(unchanged, stored, cast.to(stored.dtype))
        if counted or stored.is_inference():
            stored.copy_(new)
        else:
            with torch.autograd._unsafe_preserve_version_counter(stored):
                stored.copy_(new)


@never_compiled_alone
def _is_expanded(tensor: Tensor) -> bool:
    """Whether several elements lie in one place, so that nothing could have written to them."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
