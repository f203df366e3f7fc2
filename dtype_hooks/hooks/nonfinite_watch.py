"""Watching every step for NaN and Inf, and running a bad batch again, recorded, before the optimizer steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mmengine.runner import Runner
from torch import Tensor, nn

from dtype_hooks.core.storage import tensor_names
from dtype_hooks.hooks.loss_scaling import optim_wrappers
from dtype_hooks.hooks.ranks import any_rank
from dtype_hooks.hooks.runner import bare_model
from dtype_hooks.scales.nonfinite import Finding, first_nonfinite
from dtype_hooks.scales.recorder import Recorder
from dtype_hooks.scales.statistics import can_measure


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
    """What a step changes besides weights: random generators, buffers, gradients."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        first = next(model.parameters(), None)
        self._random = RandomState(torch.device("cpu") if first is None else first.device)
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self._gradients = [(parameter, parameter.grad) for parameter in model.parameters()]

    def restore(self, gradients: bool) -> None:
        """Put back random states and buffers, and which tensor each gradient was if asked for."""
        self._random.restore()
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        for parameter, gradient in self._gradients if gradients else ():
            parameter.grad = gradient


class ReplayWrapper:
    """An optim wrapper that runs backward and changes nothing: no step, no counting, no gradients thrown away."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)

    def __getitem__(self, key: str) -> ReplayWrapper:
        return ReplayWrapper(self._wrapper[key])

    def update_params(self, loss: Tensor, *_: Any, **__: Any) -> None:
        """Backward of the loss, as accumulation and the loss scale make it."""
        self.backward(self._wrapper.scale_loss(loss))

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Backward alone, scaled as the wrapper's would be."""
        scaler = getattr(self._wrapper, "loss_scaler", None)
        (loss if scaler is None else loss * scaler.get_scale()).backward(**kwargs)

    def step(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def zero_grad(self, *_: Any, **__: Any) -> None:
        """Nothing."""


class Watcher:
    """Watches one step.

    Attributes:
        found: What made the gradients or the loss non-finite, once that is known; a sentence where running the batch again
            did not show it.
    """

    def __init__(self, runner: Runner, recorder: Recorder, data_batch: Any) -> None:
        self.found: Finding | str | None = None
        self._runner, self._recorder, self._batch = runner, recorder, data_batch
        self._model: Any = bare_model(runner)
        self._before = StepState(self._model)
        self._handles = [
            wrapper.optimizer.register_step_pre_hook(self._before_step) for wrapper in optim_wrappers(runner)
        ]

    def step(self, original: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """The step, watched."""
        try:
            outputs = original(*args, **kwargs)
            if self._looks_at_loss():
                self._check(not _is_finite(_losses(outputs)), "the loss")
            return outputs
        finally:
            self.close()

    def close(self) -> None:
        """Let the optimizers alone."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _looks_at_loss(self) -> bool:
        """With a loss scaler a gradient that overflows is routine, and its step is left out: the loss tells."""
        return any(
            getattr(wrapper, "loss_scaler", None) is not None for wrapper in optim_wrappers(self._runner)
        )

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        gradients = [
            p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        self._check(not _is_finite(gradients), "a gradient")

    def _check(self, bad: bool, what: str) -> None:
        """Run the batch again if it is bad on any rank. A collective, as the step itself is."""
        if self.found is not None or not any_rank(bad):
            return
        names = tensor_names(self._model)
        bad_gradients = [
            names[id(p)][0]
            for p in self._model.parameters()
            if p.grad is not None and not _is_finite([p.grad])
        ]
        finding = self._replay()
        listed = (
            f"; gradients that are not finite: {', '.join(map(repr, bad_gradients[:8]))}"
            if bad_gradients
            else ""
        )
        self.found = finding or f"{what} is not finite, and running the batch again did not show why{listed}"

    def _replay(self) -> Finding | None:
        now = StepState(self._model)
        try:
            self._before.restore(gradients=False)
            for parameter in self._model.parameters():
                parameter.grad = None
            with torch.enable_grad(), self._recorder:
                self._model.train_step(self._batch, ReplayWrapper(self._runner.optim_wrapper))
        except Exception as error:  # whatever the model does not bear being run twice
            self._runner.logger.warning(
                f"ScaleTracker: running the batch again failed ({type(error).__name__}: {error})."
            )
        finally:
            now.restore(gradients=True)
        return first_nonfinite(self._recorder.scales)


def _losses(outputs: Any) -> list[Tensor]:
    values = outputs.values() if isinstance(outputs, dict) else ()
    return [torch.as_tensor(value) for value in values if isinstance(value, (Tensor, float))]


def _is_finite(tensors: list[Tensor]) -> bool:
    """Whether all are; one pass in fused kernels, one synchronisation a device."""
    plain = [tensor for tensor in tensors if can_measure(tensor) and tensor.numel()]
    if not plain:
        return True
    norms = torch._foreach_norm([tensor.detach() for tensor in plain], float("inf"))
    by_device = {
        device: [norm.float() for norm in norms if norm.device == device]
        for device in {n.device for n in norms}
    }
    return all(bool(torch.stack(here).isfinite().all()) for here in by_device.values())
