"""One loss scaler for all optimizers of a run: its update once an iteration, and what the host knows of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dtype_hooks.core.loss_scaling import (
    FACTORS,
    HostCopy,
    LossScale,
    LossScaler,
    multiply_gradients,
    next_scale,
    with_gradients,
)


@dataclass
class Step:
    """One ``optim_wrapper.step()``.

    Attributes:
        parameters: Those that had a gradient.
        flags: Which of these gradients were not finite, and last whether any was on any rank.
        skipped: Whether the scaler left the optimizer's step out; None where only the device knows.
    """

    parameters: list[Tensor]
    flags: HostCopy
    skipped: bool | None

    def resolve(self) -> bool:
        """Whether it was skipped, reading the flags where that is not known on the host."""
        if self.skipped is None:
            self.skipped = bool(self.flags.read()[-1])
        return self.skipped

    def non_finite(self) -> list[Tensor]:
        """The parameters whose gradients were not finite on this rank."""
        return [p for p, flag in zip(self.parameters, self.flags.read(), strict=False) if flag]


@dataclass
class Update:
    """What one iteration's update of the scale came from.

    Attributes:
        iteration: Counted from 1; None where nobody counts.
        scale: The scale that the gradients carried.
        next_scale: That of the next iteration.
        steps: The steps of the iteration.
        skipped: Those that were skipped.
    """

    iteration: int | None
    scale: float
    next_scale: float
    steps: list[Step]
    skipped: list[Step]


@dataclass
class SharedScaler:
    """One scaler for all optim wrappers of a run, and what the host knows of it.

    Attributes:
        choice: What was asked for.
        scaler: Torch's.
        wrappers: What it serves: each has a ``carries_scale`` and a ``wrapper`` with an ``optimizer``.
        scale: The scale, as far as the host knows it: after :attr:`updates`.
        growth_tracker: The same of its growth tracker.
        skipped_steps: Steps that were left out so far.
        consecutive_skips: Iterations in a row, up to now, in which one was.
        updates: What has happened since somebody took these out.
        without_state: Whether a loaded optimizer state held no scaler's.
        with_state: Whether one did.
        driven: Whether somebody calls :meth:`end_iteration`. Copies and pickles go on by themselves, a step at a time.
    """

    choice: LossScale
    scaler: LossScaler
    wrappers: list[Any] = field(default_factory=list)
    scale: float = 0.0
    growth_tracker: int = 0
    skipped_steps: int = 0
    consecutive_skips: int = 0
    updates: list[Update] = field(default_factory=list)
    without_state: bool = False
    with_state: bool = False
    driven: bool = True
    in_backward: int = 0
    _steps: list[Step] = field(default_factory=list)
    _late: list[tuple[int | None, list[Step]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scale = self.scaler.get_scale()

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        return {**self.__dict__, "driven": False, "updates": [], "in_backward": 0}

    def add(self, step: Step) -> None:
        """Note a step of this iteration."""
        self._steps.append(step)
        if not self.driven:
            self.end_iteration()

    def end_iteration(self, iteration: int | None = None) -> None:
        """Update the scale, once, where a wrapper has stepped; nothing to do in an iteration that only accumulates.

        What only the device knows (``fused=True``) is read after the next iteration's update.
        """
        steps, self._steps = self._steps, []
        if not steps:
            return
        self._update_on_device()
        due, self._late = self._late, [(iteration, steps)]
        for each in due:
            self._count(*each)
        if all(step.skipped is not None for step in steps):
            self.flush()

    def flush(self) -> None:
        """Read what is still on its way from the device."""
        due, self._late = self._late, []
        for each in due:
            self._count(*each)

    def _update_on_device(self) -> None:
        """Gradients that somebody goes on accumulating follow the scale, or they would mix two."""
        kept = [p for w in self.wrappers if w.carries_scale for p in with_gradients(w.wrapper.optimizer)]
        before = self.scaler.current.clone() if kept else None
        self.scaler.update(self.choice.static)
        if before is not None:
            multiply_gradients(kept, self.scaler.current / before)

    def _count(self, iteration: int | None, steps: list[Step]) -> None:
        skipped = [step for step in steps if step.resolve()]
        before = self.scale
        if self.choice.static is None:
            factors = (getattr(self.scaler, f"get_{name}")() for name in FACTORS)
            self.scale, self.growth_tracker = next_scale(before, self.growth_tracker, bool(skipped), *factors)
        self.skipped_steps += len(skipped)
        self.consecutive_skips = self.consecutive_skips + 1 if skipped else 0
        self.updates.append(Update(iteration, before, self.scale, steps if skipped else [], skipped))
        if not self.driven:
            self.updates.clear()

    def state_dict(self) -> dict[str, Any]:
        """GradScaler's state, which AmpOptimWrapper reads, and the counts, which it does not mind."""
        self.flush()
        counts = {"skipped_steps": self.skipped_steps, "consecutive_skips": self.consecutive_skips}
        return {**self.scaler.state_dict(), **counts}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take over a state; None or an empty one, of a run without loss scaling, leaves the fresh scaler."""
        self.without_state, self.with_state = not state, bool(state)
        if not state:
            return
        self.flush()
        self.scaler.load_state_dict(self.choice.applied_to(state))
        self.scale, self.growth_tracker = self.scaler.get_scale(), self.scaler._get_growth_tracker()
        self.skipped_steps = state.get("skipped_steps", 0)
        self.consecutive_skips = state.get("consecutive_skips", 0)
