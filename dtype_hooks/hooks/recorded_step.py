"""One training step inside a recording, and the factor that its gradients carry."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mmengine.dist import get_world_size
from mmengine.optim import OptimWrapper
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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
        micro_batches: How many are summed in a parameter's ``.grad`` after this step.
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


def gradient_scale(model: nn.Module, wrappers: Iterable[OptimWrapper]) -> GradientScale | None:
    """The factor of the step that comes next; None where several optim wrappers disagree.

    Reading a loss scaler's scale waits for the device.
    """
    ranks = get_world_size() if _averages(model) else 1
    found = {_of_wrapper(wrapper, ranks) for wrapper in wrappers} or {GradientScale(ranks=ranks)}
    return found.pop() if len(found) == 1 else None


def _of_wrapper(wrapper: OptimWrapper, ranks: int) -> GradientScale:
    scaler = getattr(wrapper, "loss_scaler", None)
    return GradientScale(
        loss_scale=1.0 if scaler is None else float(scaler.get_scale()),
        share=float(wrapper.scale_loss(1.0)),  # it divides
        micro_batches=wrapper._inner_count % wrapper._accumulative_counts + 1,
        ranks=ranks,
        reduced=ranks == 1 or wrapper.should_sync(),
    )


def _averages(model: nn.Module | None) -> bool:
    """Whether a wrapper averages gradients over ranks; plain models under a launcher train alone."""
    while model is not None:
        if isinstance(model, DistributedDataParallel) or type(model).__name__.startswith(
            ("FSDP", "FullyShard", "MMFully")
        ):
            return True
        model = wrapped_child(model)
    return False
