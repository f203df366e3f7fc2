"""Small float16 trainings with a loss scale, and every way in which a train_step may use its optim wrappers.

Losses are large enough that neither gradients nor scaled ones reach float16's subnormals or its maximum: a power of two then
passes through the backward without changing a bit.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.optim import AmpOptimWrapper, CosineAnnealingLR, OptimWrapper, OptimWrapperDict
from mmengine.runner import Runner
from small_runs import AutocastNet, data
from torch import Tensor
from torch.nn import functional as F

from dtype_hooks import AutocastHook
from dtype_hooks.core.shared_scaler import SharedScaler

_count = itertools.count()

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.001, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}
EXACT = {"init_scale": 2.0, "growth_interval": 2}
"""Small enough that nothing overflows, and growing, also while gradients are being accumulated."""


class Net(AutocastNet):
    """stem -> norm -> relu -> head; ``update`` is its train_step, ``infinite`` names parameters that get an Inf at times."""

    def __init__(self, update: Callable[..., Any] | None = None, written: bool = False) -> None:
        super().__init__(autocast=False)
        self.update = update
        self.written = written  # autocast in the model itself
        self.infinite: dict[int, str] = {}
        self.planted = torch.inf
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.written:
            return self.compute(*args, **kwargs)
        with torch.autocast("cpu", torch.float16):
            return self.compute(*args, **kwargs)

    def compute(self, x: Tensor, y: Tensor | None = None, mode: str = "tensor") -> Any:
        out = self.predict(x)
        if mode == "tensor":
            return out
        loss = 64 * F.mse_loss(out.float(), y)
        if self.training:
            self.calls += 1
            if self.calls in self.infinite:
                loss = loss + self.planted * self.get_parameter(self.infinite[self.calls]).sum()
        return {"loss": loss} if mode == "loss" else [loss]

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        if self.update is None:
            return super().train_step(data, optim_wrapper)
        return {"loss": self.update(self, data, optim_wrapper)}

    def loss(self, batch: Any) -> Tensor:
        return self(*batch, mode="loss")["loss"]


def several_backwards(model: Net, batch: Any, w: Any) -> Tensor:
    first, second = model.loss(batch), model.loss([batch[0] * 2, batch[1]])
    w.backward(first)
    w.backward(second)
    w.step()
    w.zero_grad()
    return first


def zeroing_first_in_place(model: Net, batch: Any, w: Any) -> Tensor:
    w.zero_grad(set_to_none=False)
    loss = model.loss(batch)
    w.backward(loss=loss)
    w.step()
    return loss


def clipped_by_hand(model: Net, batch: Any, w: Any) -> Tensor:
    w.zero_grad()
    loss = model.loss(batch)
    w.backward(loss)
    if hasattr(w, "loss_scaler"):
        w.loss_scaler.unscale_(w.optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    w.step()
    return loss


def failing_steps(model: Net, batch: Any, w: Any) -> Tensor:
    """Every second step fails in the midst, and the batch is left out."""
    loss = model.loss(batch)
    w.backward(loss)
    w.clip_grad_kwargs = {"max_norm": 1e6, "no such argument": 1} if model.calls % 2 else {"max_norm": 1e6}
    with contextlib.suppress(TypeError):
        w.step()
    w.zero_grad()
    return loss


def never_zeroing(model: Net, batch: Any, w: Any) -> Tensor:
    loss = model.loss(batch)
    w.backward(loss)
    w.step()
    return loss


def gradients_by_hand(model: Net, batch: Any, w: Any) -> Tensor:
    loss = model.loss(batch)
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    w.step()
    w.zero_grad()
    return loss


def joint(model: Any, batch: Any, w: Any) -> Tensor:
    """One backward for both, each steps."""
    loss = model.loss(batch)
    w["head"].backward(loss)
    for each in w.values():
        each.step()
        each.zero_grad()
    return loss


def in_turns(model: Net, batch: Any, w: Any) -> Tensor:
    """The head steps twice an iteration, the stem every second, on gradients that both have accumulated."""
    for _ in range(2):
        loss = model.loss(batch)
        w["head"].backward(loss)
        w["head"].step()
        w["head"].zero_grad()
    if model.calls % 4 == 0:
        w["stem"].step()
        w["stem"].zero_grad()
    return loss


def own_counts(model: Net, batch: Any, w: Any) -> Tensor:
    """Leaves whose accumulative_counts differ."""
    loss = model.loss(batch)
    w["head"].update_params(loss)
    w["stem"].update_params(model.loss(batch))
    return loss


def empty_step(model: Net, batch: Any, w: Any) -> Tensor:
    """A leaf without any gradient steps first."""
    w["stem"].step()
    return joint(model, batch, w)


class OwnMethods(OptimWrapper):
    """Every method overridden, with its own clipping."""

    def update_params(self, loss: Tensor, step_kwargs: Any = None, zero_kwargs: Any = None) -> None:
        self.zero_grad()
        self.backward(self.scale_loss(loss))
        if self.should_update():
            self.step()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        super().backward(loss, **kwargs)

    def zero_grad(self, **kwargs: Any) -> None:
        super().zero_grad(**kwargs)

    def step(self, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_value_(self.optimizer.param_groups[0]["params"], 0.5)
        super().step(**kwargs)


class EverySecondStep(OptimWrapper):
    """Accumulates inside its own ``step`` and ``zero_grad``."""

    def step(self, **kwargs: Any) -> None:
        if self._inner_count % 2 == 0:
            super().step(**kwargs)

    def zero_grad(self, **kwargs: Any) -> None:
        if self._inner_count % 2 == 0:
            super().zero_grad(**kwargs)


class Amp(AmpOptimWrapper):
    """AmpOptimWrapper as it is, on the CPU: its own constructor wants a GPU, its context refuses float16 elsewhere."""

    def __init__(self, optimizer: Any, loss_scale: dict[str, Any], **kwargs: Any) -> None:
        OptimWrapper.__init__(self, optimizer, **kwargs)
        self._scale_update_param = None
        self.loss_scaler = torch.amp.GradScaler("cpu", **loss_scale)

    def optim_context(self, model: Any) -> Any:
        return OptimWrapper.optim_context(self, model)


def single(optimizer: str, cls: type = OptimWrapper, **options: Any) -> Callable[[Net], Any]:
    return lambda model: cls(optimizer=OPTIMIZERS[optimizer](model.parameters()), **options)


def two(optimizer: str, **options: dict[str, Any]) -> Callable[[Net], Any]:
    """A leaf for the stem and the norm, one for the head; ``options`` for each."""

    def build(model: Net) -> OptimWrapperDict:
        parts = {
            "stem": [*model.stem.parameters(), *model.norm.parameters()],
            "head": model.head.parameters(),
        }
        return OptimWrapperDict(
            **{
                name: OptimWrapper(OPTIMIZERS[optimizer](part), **options.get(name, {}))
                for name, part in parts.items()
            }
        )

    return build


CLIP = {"max_norm": 4.0}
COSINE = {"type": "CosineAnnealingLR", "by_epoch": False, "T_max": 8}


class LateScheduler(Hook):
    """Makes a param scheduler when the scaler is on the optim wrapper already."""

    priority = "LOWEST"

    def before_run(self, runner: Runner) -> None:
        runner.param_schedulers = [CosineAnnealingLR(runner.optim_wrapper, T_max=8, by_epoch=False)]


WAYS: dict[str, Callable[[str], dict[str, Any]]] = {
    "plain": lambda o: {"wrapper": single(o)},
    "clip": lambda o: {"wrapper": single(o, clip_grad=dict(CLIP))},
    "clip value": lambda o: {"wrapper": single(o, clip_grad={"type": "value", "clip_value": 0.5})},
    "accumulation": lambda o: {"wrapper": single(o, accumulative_counts=2)},
    "accumulation and clip": lambda o: {"wrapper": single(o, accumulative_counts=2, clip_grad=dict(CLIP))},
    "scheduler before": lambda o: {
        "wrapper": single(o, clip_grad=dict(CLIP)),
        "param_scheduler": dict(COSINE),
    },
    "scheduler after": lambda o: {"wrapper": single(o, clip_grad=dict(CLIP)), "hooks": [LateScheduler()]},
    "both schedulers": lambda o: {
        "wrapper": single(o),
        "param_scheduler": dict(COSINE),
        "hooks": [LateScheduler()],
    },
    "several backwards": lambda o: {"wrapper": single(o), "update": several_backwards},
    "zeroing first in place": lambda o: {"wrapper": single(o), "update": zeroing_first_in_place},
    "never zeroing": lambda o: {"wrapper": single(o), "update": never_zeroing},
    "clipped by hand": lambda o: {"wrapper": single(o), "update": clipped_by_hand},
    "failing steps": lambda o: {"wrapper": single(o, clip_grad=dict(CLIP)), "update": failing_steps},
    "gradients by hand": lambda o: {"wrapper": single(o), "update": gradients_by_hand},
    "own methods": lambda o: {"wrapper": single(o, OwnMethods)},
    "every second step": lambda o: {"wrapper": single(o, EverySecondStep)},
    "two leaves": lambda o: {"wrapper": two(o, head={"clip_grad": dict(CLIP)}), "update": joint},
    "two leaves in turns": lambda o: {"wrapper": two(o), "update": in_turns},
    "two leaves with own counts": lambda o: {
        "wrapper": two(o, head={"accumulative_counts": 2}, stem={"accumulative_counts": 3}),
        "update": own_counts,
    },
    "a leaf without gradients": lambda o: {"wrapper": two(o), "update": empty_step},
}


def scaled_runner(
    work_dir: Path | str,
    loss_scale: Any = "dynamic",
    wrapper: Callable[[Net], Any] = single("adamw"),  # noqa: B008
    update: Callable[..., Any] | None = None,
    hooks: Sequence[Any] = (),
    iters: int = 6,
    infinite: dict[int, str] | None = None,
    hook: dict[str, Any] | None = None,
    runner_type: type = Runner,
    seed: int = 1,
    written: bool = False,
    **kwargs: Any,
) -> Any:
    """A Runner over a seeded :class:`Net` in float16; ``infinite``: at which of its losses which gradient is Inf.

    ``written``: autocast is written into the model, and there is no hook.
    """
    torch.manual_seed(0)
    model = Net(update, written)
    model.infinite = infinite or {}
    ours = {"type": "AutocastHook", "dtype": "float16", "loss_scale": loss_scale, **(hook or {})}
    if runner_type is not Runner:
        kwargs["env_cfg"] = {}
    return runner_type(
        model=model,
        work_dir=str(work_dir),
        train_dataloader=data(rows=48, seed=seed, endless=True),
        train_cfg={"by_epoch": False, "max_iters": iters, "val_interval": 10_000},
        optim_wrapper=wrapper(model),
        custom_hooks=[*([] if written else [ours]), *hooks],
        default_hooks={"checkpoint": None, "sampler_seed": None, **kwargs.pop("default_hooks", {})},
        randomness={"seed": 0},
        experiment_name=f"scaled_run_{next(_count)}",  # names are global to the process
        **kwargs,
    )


def scaler_of(runner: Any) -> SharedScaler:
    """The scaler of the run's first AutocastHook."""
    hook = next(hook for hook in runner.hooks if isinstance(hook, AutocastHook))
    assert hook.loss_scaling.shared is not None
    return hook.loss_scaling.shared
