"""One training step inside a recording, and the factor that its gradients carry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from mmengine.dist import get_world_size
from mmengine.optim import OptimWrapper
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from dtype_hooks.core.naming import wrapped_child


class StepPatch:
    """Stands in for ``model.train_step`` for one call, in the model's ``__dict__``.

    It is taken off when it is called, before anything runs: nothing of it can be left, whatever happens in the step.
    """

    def __init__(self, model: nn.Module, around: Callable[[Callable[..., Any], tuple, dict], Any]) -> None:
        self.model, self.around = model, around
        self.previous: Any = model.__dict__.get("train_step")

    def put_on(self) -> None:
        """From now on the model's next ``train_step`` is ours."""
        self.model.__dict__["train_step"] = self

    def take_off(self) -> None:
        """Put back what was there, where it is still ours."""
        if self.model.__dict__.get("train_step") is not self:
            return
        if self.previous is None:
            del self.model.__dict__["train_step"]
        else:
            self.model.__dict__["train_step"] = self.previous

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.take_off()
        original: Any = self.model.train_step
        return self.around(original, args, kwargs)


@dataclass(frozen=True)
class GradientScale:
    """What the gradients of a step are multiplied with: ``gradient as it existed = gradient of the loss * factor``.

    Attributes:
        loss_scale: The loss scaler's factor, 1 without one.
        share: What the loss is multiplied with under accumulation: ``1 / accumulative_counts``.
        micro_batches: How many are summed in a parameter's ``.grad`` after the step.
        ranks: Over how many ranks the loss is averaged by DDP or FSDP.
        reduced: Whether parameters' gradients are averaged over the ranks in this step.
    """

    loss_scale: float = 1.0
    share: float = 1.0
    micro_batches: int = 1
    ranks: int = 1
    reduced: bool = True

    @property
    def of_activations(self) -> float:
        """The factor of an activation's gradient on one rank, relative to the loss averaged over all."""
        return self.loss_scale * self.share * self.ranks

    @property
    def of_parameters(self) -> float:
        """The factor of a parameter's ``.grad``, relative to the mean over micro-batches so far, and over ranks."""
        return self.loss_scale * self.share * self.micro_batches


class StepScale:
    """The factor of one step's gradients: made before it, read after it, when its backwards have been counted."""

    def __init__(self, model: nn.Module, wrappers: Sequence[Any]) -> None:
        """Look at what the step begins with. Reading a loss scaler's scale waits for the device."""
        self._ranks = get_world_size() if _averages(model) else 1
        own = [wrapper for wrapper in wrappers if isinstance(wrapper, OptimWrapper)]
        self._parts = [(wrapper, wrapper._inner_count, _has_gradients(wrapper)) for wrapper in own]
        self._before = [_of_wrapper(wrapper, self._ranks) for wrapper in own]

    def read(self) -> GradientScale | None:
        """The factor; None where several optim wrappers disagree."""
        found = {
            replace(scale, micro_batches=_micro_batches(*part))
            for scale, part in zip(self._before, self._parts, strict=True)
        } or {GradientScale(ranks=self._ranks)}
        return found.pop() if len(found) == 1 else None


@contextmanager
def unseen_scaling(wrappers: Sequence[Any]) -> Iterator[None]:
    """Keep from a recording what optim wrappers make of the loss for accumulation and loss scaling.

    Such a tensor carries another part of the factor than those before it, and is none of the model's.
    """
    with ExitStack() as stack:
        for wrapper in wrappers:
            for owner, name in ((wrapper, "scale_loss"), (getattr(wrapper, "loss_scaler", None), "scale")):
                if hasattr(owner, name):
                    stack.enter_context(_unseen(owner, name))
        yield


@contextmanager
def _unseen(owner: Any, name: str) -> Iterator[None]:
    held, method = owner.__dict__, getattr(owner, name)
    before = held.get(name)

    def quiet(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return method(*args, **kwargs)

    held[name] = quiet
    try:
        yield
    finally:
        if before is None:
            held.pop(name, None)
        else:
            held[name] = before


def _of_wrapper(wrapper: OptimWrapper, ranks: int) -> GradientScale:
    scaler = getattr(wrapper, "loss_scaler", None)
    return GradientScale(
        loss_scale=1.0 if scaler is None else float(scaler.get_scale()),
        share=_share(wrapper),
        ranks=ranks,
        reduced=ranks == 1 or wrapper.should_sync(),
    )


def _share(wrapper: OptimWrapper) -> float:
    try:
        return float(wrapper.scale_loss(1.0))  # it divides
    except AssertionError:  # counts past the end of the training, which a model that does not use it may do
        return 1.0


def _micro_batches(wrapper: OptimWrapper, count: int, had_gradients: bool) -> int:
    """How many backwards since the last step but this one; a resumed run begins without the gradients of some."""
    backwards = max(wrapper._inner_count - count, 1)
    summed = (count + backwards - 1) % wrapper._accumulative_counts + 1
    return summed if had_gradients else min(summed, backwards)


def _has_gradients(wrapper: OptimWrapper) -> bool:
    return any(p.grad is not None for group in wrapper.optimizer.param_groups for p in group["params"])


def _averages(model: nn.Module | None) -> bool:
    """Whether a wrapper averages gradients over ranks; plain models under a launcher train alone."""
    while model is not None:
        if isinstance(model, DistributedDataParallel) or type(model).__name__.startswith(
            ("FSDP", "FullyShard", "MMFully")
        ):
            return True
        model = wrapped_child(model)
    return False
