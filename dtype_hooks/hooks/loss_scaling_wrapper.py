"""What lets one loss scaler serve any optim wrapper: objects in the wrapper's ``__dict__`` that take its methods' place."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from mmengine.dist import all_reduce, get_world_size
from torch import Tensor
from torch.optim import Optimizer

from dtype_hooks.core.loss_scaling import (
    HostCopy,
    LossScaler,
    multiply_gradients,
    non_finite_flags,
    scales_itself,
    with_gradients,
)
from dtype_hooks.core.shared_scaler import SharedScaler, Step
from dtype_hooks.errors import LossScaleError

HELD_AS = "_dtype_hooks_loss_scaling"
"""Where a wrapper holds its :class:`ScaledWrapper`, in its ``__dict__``."""

STATE_KEY = "loss_scaler"
"""AmpOptimWrapper's key in the optimizer's state, and its attribute."""

METHODS = ("backward", "step", "zero_grad", "state_dict", "load_state_dict")


class ScaledWrapper:
    """Loss scaling put on one optim wrapper.

    Between a backward and the step all gradients of the wrapper carry the scale, those that were there before it as well.

    Attributes:
        wrapper: The optim wrapper, of any class with an ``optimizer`` and :data:`METHODS`.
        shared: The scaler.
        carries_scale: Whether the gradients that are there carry the scale.
    """

    def __init__(self, wrapper: Any, shared: SharedScaler) -> None:
        self.wrapper = wrapper
        self.shared = shared
        self.carries_scale = False
        self.methods = {name: ScaledMethod(wrapper, name) for name in METHODS}
        self._unscaled: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._handles: list[Any] = []
        self._routed: RoutedStep | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_unscaled": {}, "_handles": [], "_routed": None}

    def put_on(self) -> None:
        """Take the place of the wrapper's methods; watch for backwards and steps that go past them."""
        self.wrapper.__dict__[HELD_AS] = self
        self.wrapper.__dict__[STATE_KEY] = self.shared.scaler
        self.wrapper.__dict__.update(self.methods)
        self.shared.wrappers.append(self)
        optimizer: Optimizer = self.wrapper.optimizer
        self._handles = [optimizer.register_step_pre_hook(self._refuse_step_past_us)]
        watch = Watch(self)
        self._handles += [
            p.register_post_accumulate_grad_hook(watch)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad and p.is_leaf
        ]

    def take_off(self) -> None:
        """Put back exactly what was there. A method that somebody has wrapped since calls through to the original."""
        held = self.wrapper.__dict__
        for key in (HELD_AS, STATE_KEY):
            held.pop(key, None)
        for method in self.methods.values():
            method.take_off()
        for handle in self._handles:
            handle.remove()
        if self in self.shared.wrappers:
            self.shared.wrappers.remove(self)

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Scale the loss; the wrapper's own ``backward`` does the rest."""
        others = [w for w in self.shared.wrappers if w is not self]
        self.carry_scale()
        for each in others:
            if with_gradients(each.wrapper.optimizer):
                each.carry_scale()
        self.shared.in_backward += 1
        try:
            return self.methods["backward"].original(self.shared.scaler.scale(loss), *args, **kwargs)
        finally:
            self.shared.in_backward -= 1
            for each in others:  # this loss may have been theirs as well
                each.carries_scale = each.carries_scale or bool(with_gradients(each.wrapper.optimizer))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Unscale; then the wrapper's own ``step``, which clips, with the optimizer's step sent through the scaler."""
        scaler, optimizer = self.shared.scaler, self.wrapper.optimizer
        self._refuse_unscaled_backward()
        self.carry_scale()
        scaler.restart(optimizer)
        scaler.unscale_(optimizer)
        found = _agreed(scaler.found_inf(optimizer))
        parameters = with_gradients(optimizer)
        flags = torch.cat([non_finite_flags(parameters).to(found.device), found[None] > 0])
        with RoutedStep(optimizer, scaler) as self._routed:
            result = self.methods["step"].original(*args, **kwargs)
        late = scales_itself(optimizer)
        self._end(Step(parameters, HostCopy(flags, late), None if late else not self._routed.ran))
        return result

    def _end(self, step: Step) -> None:
        if self._routed is not None and self._routed.asked:
            self.carries_scale = False
            self.shared.add(step)
        else:  # a step of the wrapper that only accumulates
            self.shared.scaler.forget(self.wrapper.optimizer)
            multiply_gradients(with_gradients(self.wrapper.optimizer), self.shared.scaler.current)

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """What is gone, or zero, neither carries the scale nor lacks it."""
        result = self.methods["zero_grad"].original(*args, **kwargs)
        self._unscaled.clear()
        self.carries_scale = self.carries_scale and bool(with_gradients(self.wrapper.optimizer))
        return result

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The wrapper's own with the scaler's under AmpOptimWrapper's key."""
        return {**self.methods["state_dict"].original(*args, **kwargs), STATE_KEY: self.shared.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The scaler's part, then the wrapper's own."""
        self.shared.load_state_dict(state.get(STATE_KEY))
        rest = {key: value for key, value in state.items() if key != STATE_KEY}
        return self.methods["load_state_dict"].original(rest, *args, **kwargs)

    def carry_scale(self) -> None:
        """Let gradients that were left from before, or set or unscaled by hand, carry the scale as others do."""
        if self.shared.scaler.is_unscaled(self.wrapper.optimizer):  # maybe by a step that has failed
            self.shared.scaler.forget(self.wrapper.optimizer)
            self.carries_scale = False
        if not self.carries_scale:
            multiply_gradients(with_gradients(self.wrapper.optimizer), self.shared.scaler.current)
            self.carries_scale = True

    def note_gradient(self, parameter: Tensor) -> None:
        """A gradient has come; one that no backward of ours has brought is remembered."""
        if not self.shared.in_backward:
            self._unscaled[id(parameter)] = (parameter, parameter.grad)

    def _has_unscaled(self) -> int:
        """Of how many parameters the gradient is still the one that an unscaled backward has left."""
        count = sum(p.grad is not None and p.grad is gradient for p, gradient in self._unscaled.values())
        self._unscaled.clear()
        return count

    def _refuse_unscaled_backward(self) -> None:
        count = self._has_unscaled()
        if count:
            raise LossScaleError(
                f"AutocastHook.loss_scale: got gradients of {count} parameters from a backward() of unscaled losses; expected "
                "optim_wrapper.update_params(loss) or optim_wrapper.backward(loss). Call one of them in the place of "
                "loss.backward(), or set loss_scale=None."
            )

    def _refuse_step_past_us(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._routed is not None and self._routed.inside:
            return
        self._refuse_unscaled_backward()
        if self.carries_scale and with_gradients(optimizer):
            raise LossScaleError(
                "AutocastHook.loss_scale: got optimizer.step() on gradients that carry the loss scale; expected "
                "optim_wrapper.step(), which takes it off. Call that, or set loss_scale=None."
            )


class Watch:
    """On each parameter: tells a :class:`ScaledWrapper` that a gradient has come.

    Refers to it weakly: the garbage collector does not see what hooks on a tensor hold, a cycle would stay for ever.
    """

    def __init__(self, scaled: ScaledWrapper) -> None:
        self._scaled = weakref.ref(scaled)

    def __call__(self, parameter: Tensor) -> None:
        scaled = self._scaled()
        if scaled is not None:
            scaled.note_gradient(parameter)


class ScaledMethod:
    """In an optim wrapper's ``__dict__`` under a method's name; refers to the wrapper alone, so it is copied with it.

    Looks like a bound method to mmengine's param schedulers, which wrap ``step`` so that it counts.

    Attributes:
        previous: What lay there before (a param scheduler's counting ``step``), or None for the class's method.
    """

    def __init__(self, wrapper: Any, name: str) -> None:
        self.wrapper = wrapper
        self.name = name
        self.previous: Any = wrapper.__dict__.get(name)
        self.entered = False

    @property
    def __self__(self) -> Any:
        return self.wrapper

    @property
    def __func__(self) -> Callable[..., Any]:
        return _step_of_the_instance if self.name == "step" else getattr(type(self.wrapper), self.name)

    @property
    def _with_counter(self) -> bool:
        return getattr(self.previous, "_with_counter", False)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        scaled = self.wrapper.__dict__.get(HELD_AS)
        if scaled is None or self.entered:
            return self.original(*args, **kwargs)
        self.entered = True
        try:
            return getattr(scaled, self.name)(*args, **kwargs)
        finally:
            self.entered = False

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """What would run without us."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return getattr(type(self.wrapper), self.name)(self.wrapper, *args, **kwargs)

    def take_off(self) -> None:
        """Put back what lay there, unless somebody has put another thing there since."""
        held = self.wrapper.__dict__
        if held.get(self.name) is not self:
            return
        if self.previous is None:
            del held[self.name]
        else:
            held[self.name] = self.previous


def _step_of_the_instance(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """What a param scheduler binds to the wrapper, to count and then step: ours while it is on, else the class's."""
    scaled = wrapper.__dict__.get(HELD_AS)
    method = None if scaled is None else scaled.methods["step"]
    if method is None or method.entered:
        return type(wrapper).step(wrapper, *args, **kwargs)
    return method(*args, **kwargs)


class RoutedStep:
    """In the optimizer's ``step`` for the length of one ``optim_wrapper.step()``: sends it through the scaler.

    Attributes:
        asked: Whether the wrapper has called it.
        ran: Whether the scaler let the optimizer step.
        inside: Whether the scaler is at it.
    """

    def __init__(self, optimizer: Optimizer, scaler: LossScaler) -> None:
        self.asked = self.ran = self.inside = False
        self._optimizer = optimizer
        self._scaler = scaler
        self._held = optimizer.__dict__.get("step")
        self.__wrapped__ = optimizer.step  # the scaler looks at the signature

    def __enter__(self) -> RoutedStep:
        self._optimizer.__dict__["step"] = self
        return self

    def __exit__(self, *error: Any) -> None:
        self._optimizer.__dict__.pop("step")
        if self._held is not None:
            self._optimizer.__dict__["step"] = self._held

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.inside:
            self.ran = True
            return self.__wrapped__(*args, **kwargs)
        self.asked = self.inside = True
        try:
            return self._scaler.step(self._optimizer, *args, **kwargs)
        finally:
            self.inside = False


def scaled_wrapper(wrapper: Any) -> ScaledWrapper | None:
    """What was put on an optim wrapper, if anything."""
    return wrapper.__dict__.get(HELD_AS)


def _agreed(found: list[Tensor]) -> Tensor:
    """Let an Inf on one rank or device be one on all, in place; on the device."""
    if get_world_size() > 1:
        for flag in found:
            all_reduce(flag, op="max")
    return found[0] if len(found) == 1 else torch.stack([f.to(found[0].device) for f in found]).amax()
