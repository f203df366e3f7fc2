"""Loss scaling: what is asked for, how the scale moves, and torch's GradScaler with what optim wrappers need of it."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from dtype_hooks.errors import ConfigError

FACTORS = ("growth_factor", "backoff_factor", "growth_interval")
"""How the scale moves: arguments of ``torch.amp.GradScaler`` that lie in its state as well."""

ARGUMENTS = ("init_scale", *FACTORS)
"""What a dict may hold."""


@dataclass(frozen=True)
class LossScale:
    """What the argument ``loss_scale`` asks for.

    Attributes:
        mode: ``"auto"`` (dynamic for float16, none otherwise), ``"dynamic"``, ``"static"`` or ``"off"``.
        arguments: Those of ``torch.amp.GradScaler`` that were given.
    """

    mode: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, value: str | float | Mapping[str, Any] | None, where: str = "loss_scale") -> LossScale:
        """Validate the argument.

        Args:
            value: ``"auto"``, ``"dynamic"``, a positive number (a static scale), some of :data:`ARGUMENTS`, or None.
            where: What the caller calls the argument; begins the error message.

        Raises:
            ConfigError: For anything else.
        """
        if value is None:
            return cls("off")
        if isinstance(value, str) and value in ("auto", "dynamic"):
            return cls(value)
        if isinstance(value, Mapping):
            return cls("dynamic", {key: _argument(key, each, where) for key, each in value.items()})
        if _is_scale(value):
            return cls("static", {"init_scale": float(value)})
        raise ConfigError(
            f"{where}: got {value!r}; expected 'auto', 'dynamic', a positive number that float32 can hold (static), a dict of "
            f"{', '.join(ARGUMENTS)}, or None. Leave it out for 'auto'."
        )

    @property
    def static(self) -> float | None:
        """The scale that never changes, or None."""
        return self.arguments["init_scale"] if self.mode == "static" else None

    def applied_to(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A loaded state as this run goes on with it: scale and tracker of the state, factors given here."""
        kept = {key: self.arguments[key] for key in FACTORS if key in self.arguments}
        return {**state, **kept, **({} if self.static is None else {"scale": self.static})}


def _argument(key: str, value: Any, where: str) -> Any:
    rules = {
        "init_scale": (_is_scale, "a positive number that float32 can hold"),
        "growth_factor": (lambda v: _is_number(v) and 1 < v < math.inf, "a number above 1"),
        "backoff_factor": (lambda v: _is_number(v) and 0 < v < 1, "a number between 0 and 1"),
        "growth_interval": (
            lambda v: isinstance(v, int) and _is_number(v) and v >= 1,
            "a whole number of iterations, 1 or more",
        ),
    }
    if key not in rules:
        raise ConfigError(
            f"{where}: got the key {key!r}; expected some of {', '.join(ARGUMENTS)}, the arguments of torch.amp.GradScaler. "
            "Leave it out; None turns loss scaling off."
        )
    holds, expected = rules[key]
    if not holds(value):
        raise ConfigError(
            f"{where}.{key}: got {value!r}; expected {expected}. Leave it out for torch's default."
        )
    return value if key == "growth_interval" else float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_scale(value: Any) -> bool:
    return _is_number(value) and value > 0 and 0 < ctypes.c_float(value).value < math.inf


def next_scale(
    scale: float,
    growth_tracker: int,
    found_inf: bool,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> tuple[float, int]:
    """The scale and growth tracker after an update: ``torch._amp_update_scale_`` in plain numbers.

    Knowing what the device computes, without asking it, is what lets the scale be logged without synchronising.

    Args:
        scale: A float32 value.
        growth_tracker: Updates in a row without a non-finite gradient.
        found_inf: Whether any gradient of the iteration was not finite.
        growth_factor: What the scale is multiplied by after ``growth_interval`` such updates.
        backoff_factor: What it is multiplied by where a gradient was not finite.
        growth_interval: In updates.
    """
    if found_inf:
        return ctypes.c_float(scale * backoff_factor).value, 0
    if growth_tracker + 1 < growth_interval:
        return scale, growth_tracker + 1
    grown = ctypes.c_float(scale * growth_factor).value
    return (grown if math.isfinite(grown) else scale), 0


class LossScaler(torch.amp.GradScaler):
    """Torch's scaler for several optimizers that step at any time in an iteration, or more than once.

    Args:
        device: The device type of the parameters. Torch's default, ``"cuda"``, turns itself off on other machines.
        arguments: Some of :data:`ARGUMENTS`.
    """

    def __init__(self, device: str, arguments: Mapping[str, Any]) -> None:
        super().__init__(device, **arguments)

    def start(self, device: torch.device) -> None:
        """Let the scale lie on its device now: a step without any backward before it must find it."""
        self.scale(torch.zeros((), device=device))

    @property
    def current(self) -> Tensor:
        """The scale, a float32 scalar on its device; reading it does not synchronise."""
        if self._get_scale_async() is None:  # an unpickled one
            self.start(torch.device(self._device))
        scale: Any = self._get_scale_async()
        return scale

    def restart(self, optimizer: Optimizer) -> None:
        """Let an optimizer be unscaled and stepped again before the update, which still counts what it has found.

        GradScaler refuses a second step of one iteration, which a discriminator may well make.
        """
        states: dict[int, Any] = self._per_optimizer_states
        if id(optimizer) in states:
            states[min([0, *states]) - 1] = states.pop(id(optimizer))

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether ``unscale_`` was called, and no step or :meth:`forget` since."""
        state: Any = self._per_optimizer_states.get(id(optimizer))
        return state is not None and state["stage"] is OptState.UNSCALED

    def forget(self, optimizer: Optimizer) -> None:
        """As if the optimizer had not been unscaled: it did not step after all."""
        self._per_optimizer_states.pop(id(optimizer), None)

    def found_inf(self, optimizer: Optimizer) -> list[Tensor]:
        """What :meth:`step` will decide by, after ``unscale_``: float32 scalars, one for each device, 1 for yes.

        Where no parameter has a gradient there is one as well: such a step does nothing, and GradScaler would refuse it.
        """
        found: dict[Any, Tensor] = self._found_inf_per_device(optimizer)
        if not found:
            found[self.current.device] = torch.zeros_like(self.current)
        return list(found.values())


def scales_itself(optimizer: Optimizer) -> bool:
    """Whether the optimizer decides about skipping on the device (``fused=True``), so that the scaler reads nothing."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def with_gradients(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters that have a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


@torch.no_grad()
def multiply_gradients(parameters: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a scalar on the device; exact for a power of two. Does not synchronise."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        gradient = _values(parameter.grad)
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, factor.to(device, non_blocking=True))


@torch.no_grad()
def non_finite_flags(parameters: Sequence[Tensor]) -> Tensor:
    """Which of the parameters' gradients hold an Inf or a NaN.

    Args:
        parameters: With gradients of any dtype, shape and layout; empty ones are finite, of sparse ones the
            values count.

    Returns:
        One bool for each, on the device of the first. Does not synchronise: one pass over the gradients.
    """
    if not parameters:
        return torch.zeros(0, dtype=torch.bool)
    values = [_values(p.grad) for p in parameters]
    values = [torch.view_as_real(v) if v.is_complex() else v for v in values]
    values = [v if v.numel() else v.new_zeros(1) for v in values]
    return torch.stack([~torch.isfinite(_on_one_device(scalars)) for scalars in _extremes(values)]).any(0)


def _extremes(values: list[Tensor]) -> list[Sequence[Tensor]]:
    """Scalars of each tensor that are finite where all of it is.

    On the CPU the infinity norm takes 35 times as long as minimum and maximum (torch 2.13); elsewhere it is one kernel for
    all tensors.
    """
    if all(v.device.type == "cpu" for v in values):
        return list(zip(*(torch.aminmax(v) for v in values), strict=True))
    return [torch._foreach_norm(values, math.inf)]


def _on_one_device(scalars: Sequence[Tensor]) -> Tensor:
    """Those that are not float32 become zero where finite, else NaN: a float64 would not fit."""
    device = scalars[0].device
    return torch.stack(
        [(n if n.dtype is torch.float32 else n * 0).to(device, torch.float32) for n in scalars]
    )


def _values(gradient: Any) -> Tensor:
    """The numbers of a gradient: of a sparse one its values, of a DTensor what this rank has."""
    if hasattr(gradient, "to_local"):
        gradient = gradient.to_local()
    return gradient._values() if gradient.is_sparse else gradient


class HostCopy:
    """A tensor that the host will or may read later.

    Args:
        tensor: Not changed in place by anybody afterwards.
        ahead: Let the values travel now, so that :meth:`read` will not wait for what has been computed meanwhile. On CUDA
            they go to pinned memory. On other accelerators, and without ``ahead``, reading synchronises.
    """

    def __init__(self, tensor: Tensor, ahead: bool = True) -> None:
        self._event: Any = None
        self._values = tensor
        if ahead and tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list:
        """The values."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()
