"""Watching every step for NaN and Inf, and running a bad batch again, recorded, before the optimizer steps."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from mmengine.runner import Runner
from torch import Tensor, nn

from dtype_hooks.core.selection import Selection
from dtype_hooks.core.storage import tensor_names
from dtype_hooks.hooks.loss_scaling import optim_wrappers
from dtype_hooks.hooks.ranks import any_rank
from dtype_hooks.hooks.runner import bare_model
from dtype_hooks.scales.nonfinite import Finding, first_nonfinite
from dtype_hooks.scales.operations import tensors_in
from dtype_hooks.scales.places import Places
from dtype_hooks.scales.recorder import Recorder
from dtype_hooks.scales.statistics import can_measure

NAMED = 8
"""How many parameters with bad gradients a sentence names."""


class RandomState:
    """The state of Python's, numpy's, and torch's random generators, on the CPU and on the model's device."""

    def __init__(self, device: torch.device) -> None:
        self._python, self._numpy, self._cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
        module: Any = getattr(torch, device.type, None)
        self._set = getattr(module, "set_rng_state", None) if device.type != "cpu" else None
        self._device = None if self._set is None else module.get_rng_state()

    def restore(self) -> None:
        """Put all of them back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._set is not None:
            self._set(self._device)


class StepState:
    """What a step changes besides weights: random generators, buffers, gradients, which mode each module is in."""

    def __init__(self, model: nn.Module, gradients: bool = False) -> None:
        parameters = list(model.parameters()) if gradients else [next(model.parameters(), None)]
        device = torch.device("cpu") if not parameters or parameters[0] is None else parameters[0].device
        self._random = RandomState(device)
        self._buffers = [
            (module._buffers, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._gradients = [(p, p.grad) for p in parameters if p is not None] if gradients else []
        self._training = [(module, module.training) for module in model.modules()] if gradients else []

    def restore(self) -> None:
        """Put back the values, and which tensor each buffer and each gradient was."""
        self._random.restore()
        with torch.no_grad():
            for held, name, buffer, value in self._buffers:
                held[name] = buffer
                buffer.copy_(value)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for module, training in self._training:
            module.training = training


class Watcher:
    """Watches one step.

    Attributes:
        found: What made the gradients or the loss non-finite, once that is known; a sentence where that did not show.
    """

    def __init__(
        self,
        runner: Runner,
        stops: bool = False,
        explain: Callable[[], Finding | None] | None = None,
    ) -> None:
        """Prepare for the step that comes.

        Args:
            runner: With the model in the state that it has before the step.
            stops: Whether optimizers are kept from stepping on bad gradients, as training stops with this step.
            explain: What finds the cause; by default the batch is run again, recorded.
        """
        self.found: Finding | str | None = None
        self._runner, self._stops, self._explain = runner, stops, explain
        self._model: Any = bare_model(runner)
        self._wrappers = optim_wrappers(runner)
        self._scaled = any(getattr(each, "loss_scaler", None) is not None for each in self._wrappers)
        self._before = StepState(self._model) if explain is None else None
        self._batch: Any = None
        self._versions: list[tuple[Tensor, int]] = []
        self._looked = False
        before_step = partial(_outside_dynamo("torch._dynamo" in sys.modules), self)
        self._handles = [
            wrapper.optimizer.register_step_pre_hook(before_step)
            for wrapper in self._wrappers
            if not self._scaled  # a gradient that overflows is routine, and the scaler leaves its step out
        ]

    @property
    def how(self) -> str:
        """How the cause was looked for."""
        return "run again, recorded" if self._explain is None else "recorded"

    def step(self, original: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """The step, watched."""
        self._batch = args[0] if args else kwargs.get("data")
        self._versions = [(t, t._version) for _, t in tensors_in(self._batch) if not t.is_inference()]
        try:
            outputs = original(*args, **kwargs)
            if not self._looked and not self._scaled:  # gradients are being accumulated
                self._check_gradients([p for p in self._model.parameters() if p.requires_grad])
            self._check(not _is_finite(_losses(outputs)), "the loss is not finite")
            return outputs
        finally:
            self.close()

    def close(self) -> None:
        """Let the optimizers alone."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._looked = True
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._check_gradients(parameters)
        for parameter in parameters if self.found is not None and self._stops else ():
            parameter.grad = None  # every optimizer leaves such a parameter alone

    def _check_gradients(self, parameters: Sequence[Tensor]) -> None:
        self._check(
            not _is_finite([p.grad for p in parameters if p.grad is not None]), "a gradient is not finite"
        )

    def _check(self, bad: bool, what: str) -> None:
        """Find the cause if it is bad on any rank. A collective, as the step itself is."""
        if self.found is not None or not any_rank(bad):
            return
        bad_gradients = self._bad_gradients()
        finding = self._explain() if self._explain is not None else self._replay()
        self.found = finding or _sentence(what, self._explain is None, bad_gradients)

    def _bad_gradients(self) -> list[str]:
        names = tensor_names(self._model)
        gradients = [(names[id(p)][0], p.grad) for p in self._model.parameters() if p.grad is not None]
        return [name for name, gradient in gradients if not _is_finite([gradient])]

    def _replay(self) -> Finding | None:
        if any(tensor._version != version for tensor, version in self._versions):
            self._say("the model changes its batch in place")
            return None
        model, wrapper = self._model, self._runner.optim_wrapper
        recorder = Recorder(Places.make(model, Selection.make(None, None, None), "ScaleTracker"), formats=())
        now = StepState(model, gradients=True)
        try:
            if self._before is not None:
                self._before.restore()
            for parameter in model.parameters():
                parameter.grad = None
            with torch.enable_grad(), nothing_steps(self._wrappers), recorder:
                model.train_step(self._batch, wrapper)
        except Exception as error:  # whatever a model does that does not bear being run twice
            self._say(f"{type(error).__name__}: {error}")
        finally:
            now.restore()
        return first_nonfinite(recorder.scales)

    def _say(self, why: str) -> None:
        self._runner.logger.warning(f"ScaleTracker: the batch could not be run again ({why}).")


@contextmanager
def nothing_steps(wrappers: Sequence[Any]) -> Iterator[None]:
    """Let optim wrappers run backward, and change nothing: no step, no counting, and all is as it was afterwards."""
    with ExitStack() as stack:
        for wrapper in wrappers:
            stack.enter_context(_attributes(wrapper.optimizer, step=_nothing))
            backward = _backward_of(wrapper)
            stack.enter_context(
                _attributes(
                    wrapper, step=_nothing, backward=backward, update_params=_update_of(wrapper, backward)
                )
            )
        yield


@contextmanager
def _attributes(owner: Any, **attributes: Any) -> Iterator[None]:
    held = owner.__dict__
    before = dict(held)
    held.update(attributes)
    try:
        yield
    finally:
        held.clear()
        held.update(before)


def _backward_of(wrapper: Any) -> Callable[..., None]:
    scaler = getattr(wrapper, "loss_scaler", None)

    def backward(loss: Tensor, **kwargs: Any) -> None:
        (loss if scaler is None else loss * scaler.get_scale()).backward(**kwargs)

    return backward


def _update_of(wrapper: Any, backward: Callable[..., None]) -> Callable[..., None]:
    def update_params(loss: Tensor, *_: Any, **__: Any) -> None:
        backward(wrapper.scale_loss(loss))

    return update_params


def _nothing(*_: Any, **__: Any) -> None:
    pass


@lru_cache
def _outside_dynamo(is_there: bool) -> Callable[..., None]:
    """Where a whole train_step is compiled dynamo must not trace our look at it; importing dynamo takes seconds."""
    function = Watcher._before_step
    return torch.compiler.disable(function) if is_there else function


def _sentence(what: str, ran_again: bool, gradients: Sequence[str]) -> str:
    text = f"{what}, and {'running the batch again' if ran_again else 'the recorded step'} did not show why"
    if gradients:
        more = f" and {len(gradients) - NAMED} more" if len(gradients) > NAMED else ""
        text += f"; gradients that are not finite: {', '.join(map(repr, gradients[:NAMED]))}{more}"
    return text


def _losses(outputs: Any) -> list[Tensor]:
    """By mmengine's rule: what has ``loss`` in its name."""
    named = outputs.items() if isinstance(outputs, dict) else ()
    with torch._C.DisableTorchFunction():  # a recording may be on
        return [
            torch.as_tensor(each)
            for name, each in named
            if "loss" in name and isinstance(each, (Tensor, float))
        ]


def _is_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all are; one pass over them, one synchronisation a device."""
    plain = [tensor.detach() for tensor in tensors if can_measure(tensor) and tensor.numel()]
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in plain:
        by_device.setdefault(tensor.device, []).append(tensor)
    return all(_all_finite(device, here) for device, here in by_device.items())


def _all_finite(device: torch.device, tensors: list[Tensor]) -> bool:
    if device.type != "cpu":  # fused
        norms = torch._foreach_norm(tensors, float("inf"))
        return bool(torch.stack([norm.float() for norm in norms]).isfinite().all())
    # A sum costs a tenth of the norm. It can pass the dtype's maximum where no element does, so a bad one is looked into.
    if torch.stack([tensor.sum(dtype=torch.float32) for tensor in tensors]).isfinite().all():
        return True
    return all(bool(_comparable(tensor).isfinite().all()) for tensor in tensors)


def _comparable(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.itemsize == 1 else tensor
