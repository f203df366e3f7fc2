"""The object that stands in for a module's method and runs it in another dtype."""

from __future__ import annotations

import threading
import warnings
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dtype_hooks.errors import OverrideError

from .casting import cast_floating, map_tensors, tensors_in
from .compiling import trace_backward_without_autocast
from .dtypes import dtype_name
from .native import native_output_dtypes, stored_dtype

FIRST_CALLS = 3
"""How many eager calls are looked at for inputs that the rule does not cast."""

_autocast_outside: ContextVar[str | None] = ContextVar("dtype_hooks_autocast_outside", default=None)
"""Inside an override that has kept-out modules: the device type whose autocast it turned off, or ""."""

Slot = tuple[dict[str, Any], str, Tensor]


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


class OverriddenMethod:
    """A module's method, run in ``dtype`` with autocast off; lies in ``module.__dict__`` under the method's name.

    Refers to its module and to plain values only, so that it is pickled and deep-copied with the module. What it
    must know of the modules below (``below``, ``kept_out``, ``gate``) is set by :func:`.override.link`.
    """

    def __init__(self, module: nn.Module, name: str, previous: Any = None) -> None:
        self.module = module
        self.name = name
        self.previous = previous
        self.claims: tuple[Claim, ...] = ()
        self.dtype: torch.dtype | None = None
        self.cast_all = False
        self.fresh = FIRST_CALLS
        self.notes: dict[str, str] = {}
        self.native: dict[tuple, list[torch.dtype] | torch.dtype] = {}
        self.below: tuple[nn.Module, ...] = (module,)
        self.kept_out: tuple[OverriddenMethod, ...] = ()
        self.outside: str | None = None
        self.second_device: str | None = None
        self.gate = Gate()

    def claim(self, claims: tuple[Claim, ...]) -> None:
        """Set who holds the method; a dtype wins over being kept out."""
        self.claims = claims
        self.dtype = next((c.dtype for c in claims if c.dtype is not None), None)
        self.cast_all = any(c.cast_all for c in claims)

    @property
    def called(self) -> bool:
        """Whether an eager call has come through."""
        return self.fresh < FIRST_CALLS

    @property
    def __globals__(self) -> dict[str, Any]:
        """Empty; ``torch.jit.script`` asks for it on its way to ``__code__``, torch.fx for names to wrap."""
        return {}

    @property
    def __code__(self) -> NoReturn:
        """What ``torch.jit.script`` compiles: not to be had here, and it should say so in plain words."""
        raise OverrideError(
            f"torch.jit.script: got a {type(self.module).__name__} whose {self.name!r} is overridden; expected a module "
            "without overrides. Call remove() first, or use torch.jit.trace or torch.export."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiling = torch.compiler.is_compiling()
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
            cast = x.to(dtype)
            y = self._compute(dtype, x, (cast, *args[1:]), kwargs, compiling)
            if not compiling and changed_in_place(cast):
                y = _hand_back_in_place(x, cast, y)
        else:
            return self._call_without_float(dtype, x, args, kwargs, compiling)
        if isinstance(y, Tensor):
            return y if y.dtype is given or not y.is_floating_point() else y.to(given)
        return cast_floating(y, given)

    def _original(self, args: tuple, kwargs: dict) -> Any:
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return getattr(type(self.module), self.name)(self.module, *args, **kwargs)

    # ---- the other kinds of input

    def _call_casting_all(self, dtype: torch.dtype, args: tuple, kwargs: dict, compiling: bool) -> Any:
        tensors = list(tensors_in((args, kwargs)))
        first = next((x for x in tensors if x.is_floating_point()), None)
        if first is None:
            return self._call_without_float(dtype, tensors[0] if tensors else None, args, kwargs, compiling)
        args, kwargs = cast_floating((args, kwargs), dtype)
        return cast_floating(self._compute(dtype, first, args, kwargs, compiling), first.dtype)

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
        outside = self.outside if compiling else _autocast_outside.get()
        x = next((x for x in tensors_in((args, kwargs)) if x.is_floating_point()), None)
        if outside is None or x is None:
            return self._original(args, kwargs)
        if outside and not autocast_is_on(outside):
            torch.set_autocast_enabled(outside, True)
            try:
                y = self._original(args, kwargs)
            finally:
                torch.set_autocast_enabled(outside, False)
        else:
            y = self._original(*cast_floating((args, kwargs), stored_dtype(self.module)))
        return cast_floating(y, x.dtype)

    # ---- the region

    def _compute(self, dtype: torch.dtype, at: Tensor, args: tuple, kwargs: dict, compiling: bool) -> Any:
        """Run the original method in ``dtype``; ``at`` says on which device."""
        device = at.device.type
        if compiling:
            return self._swapped(dtype, device, self._foreign(dtype), args, kwargs, compiling)
        gate = self.gate
        if not gate.swaps and not self._foreign(dtype) and not gate.swaps:  # the flag once more: see Gate
            return self._swapped(dtype, device, [], args, kwargs, compiling)
        gate.swaps = True
        with gate.lock:
            return self._swapped(dtype, device, self._foreign(dtype), args, kwargs, compiling)

    def _foreign(self, dtype: torch.dtype) -> list[Slot]:
        """Floating parameters and buffers that are stored in another dtype."""
        return [
            (held, name, tensor)
            for module in self.below
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None and tensor.dtype is not dtype and tensor.is_floating_point()
        ]

    def _swapped(
        self, dtype: torch.dtype, device: str, slots: list[Slot], args: tuple, kwargs: dict, compiling: bool
    ) -> Any:
        if not slots:
            return self._without_autocast(device, args, kwargs, compiling)
        rnns = [(m, m._flat_weights, m._flat_weight_refs) for m in self.below if isinstance(m, nn.RNNBase)]
        casts: list[Tensor] = []
        try:
            _swap_in(slots, dtype, casts)
            return self._without_autocast(device, args, kwargs, compiling)
        finally:
            _swap_out(slots, casts, compiling)
            for rnn, flat, refs in rnns:  # its forward had collected the casts in lists of its own
                rnn._flat_weights, rnn._flat_weight_refs = flat, refs

    def _without_autocast(self, device: str, args: tuple, kwargs: dict, compiling: bool) -> Any:
        if self.second_device is not None or self.kept_out:
            return self._without_autocast_slowly(device, args, kwargs, compiling)
        if not autocast_is_on(device):
            return self._original(args, kwargs)
        if compiling and torch.compiler.is_exporting():  # a region becomes part of the graph, a raw toggle does not
            with torch.autocast(device, enabled=False):
                return self._original(args, kwargs)
        torch.set_autocast_enabled(device, False)
        try:
            return self._original(args, kwargs)
        finally:
            torch.set_autocast_enabled(device, True)

    def _without_autocast_slowly(self, device: str, args: tuple, kwargs: dict, compiling: bool) -> Any:
        devices = [d for d in (device, self.second_device) if d is not None and autocast_is_on(d)]
        outside = devices[0] if devices else ""
        before = self._tell_kept_out(outside, compiling)
        for each in devices:
            torch.set_autocast_enabled(each, False)
        try:
            return self._original(args, kwargs)
        finally:
            for each in devices:
                torch.set_autocast_enabled(each, True)
            self._untell_kept_out(before, compiling)

    def _tell_kept_out(self, outside: str, compiling: bool) -> Any:
        """Let the kept-out modules below know the autocast state outside; an outer override's word stays."""
        if compiling:
            before = [method.outside for method in self.kept_out]
            for method in self.kept_out:
                method.outside = outside or method.outside or ""
            return before
        return _autocast_outside.set(outside or _autocast_outside.get() or "")

    def _untell_kept_out(self, before: Any, compiling: bool) -> None:
        if compiling:
            for method, value in zip(self.kept_out, before, strict=True):
                method.outside = value
        else:
            _autocast_outside.reset(before)

    # ---- what the first calls show

    def _observe(self, args: tuple, kwargs: dict) -> None:
        self.fresh -= 1
        if self.dtype is None:
            return
        x = next(tensors_in((args, kwargs)), None)
        own = next(self.module.parameters(), None)
        if x is not None and own is not None and own.device.type != x.device.type:
            self.second_device = own.device.type
        if not self.cast_all:
            self._note_what_first_misses(args, kwargs)

    def _note_what_first_misses(self, args: tuple, kwargs: dict) -> None:
        where = f"{type(self.module).__name__}.{self.name} ({', '.join(c.label for c in self.claims)})"
        if not args or not isinstance(args[0], Tensor):
            what = f"a {type(args[0]).__name__}" if args else "no positional argument"
            self._note(
                "unwrapped",
                f"{where}: the first positional argument is {what}, no tensor, so this call runs without the override. "
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


def autocast_is_on(device: str) -> bool:
    """Whether autocast is on for the device type; there is none for ``meta``, where torch raises."""
    return device != "meta" and torch.is_autocast_enabled(device)


def changed_in_place(cast: Tensor) -> bool:
    """Whether a fresh cast was written to; inference tensors keep no count and answer False."""
    return not cast.is_inference() and cast._version > 0


def _hand_back_in_place(x: Tensor, cast: Tensor, y: Any) -> Any:
    """The method wrote into its input: so must we, and where it returns the input the caller gets their own."""
    x.copy_(cast)
    return map_tensors(lambda tensor: x if tensor is cast else tensor, y)


def _cast_outputs(y: Any, dtypes: list[torch.dtype] | torch.dtype) -> Any:
    if isinstance(dtypes, torch.dtype):
        return cast_floating(y, dtypes)
    if len(dtypes) != sum(tensor.is_floating_point() for tensor in tensors_in(y)):
        return y
    rest = iter(dtypes)
    return map_tensors(lambda tensor: tensor.to(next(rest)) if tensor.is_floating_point() else tensor, y)


def _swap_in(slots: list[Slot], dtype: torch.dtype, casts: list[Tensor]) -> None:
    made: dict[
        Tensor, Tensor
    ] = {}  # a tied parameter is cast once, so that its gradient is summed in ``dtype``
    for held, name, tensor in slots:
        cast = made.get(tensor)
        if cast is None:
            cast = made[tensor] = _cast_with_version(tensor, dtype)
        held[name] = cast
        casts.append(cast)


def _cast_with_version(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # an inference tensor would not tell whether it was written to
            return tensor.detach().to(dtype)
    return tensor.to(dtype)


def _swap_out(slots: list[Slot], casts: list[Tensor], compiling: bool) -> None:
    for (held, name, stored), cast in zip(slots, casts, strict=False):
        now = held.get(name)
        if now is cast:
            held[name] = stored
            if not isinstance(stored, nn.Parameter) and (compiling or changed_in_place(cast)):
                _write_back(stored, cast)
        elif isinstance(now, Tensor) and not isinstance(now, nn.Parameter) and now.is_floating_point():
            held[name] = now.to(stored.dtype)  # the method put another buffer there


def _write_back(stored: Tensor, cast: Tensor) -> None:
    """Keep what the method changed; an element that it left alone keeps every bit that it is stored with."""
    with torch.no_grad():
        unchanged = cast == stored.to(cast.dtype)
        stored.copy_(torch.where(unchanged, stored, cast.to(stored.dtype)))
