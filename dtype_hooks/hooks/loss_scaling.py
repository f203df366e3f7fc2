"""Loss scaling in a run: put on the runner's optim wrappers, updated once an iteration, logged and reported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from mmengine.optim import OptimWrapperDict
from mmengine.runner import Runner
from torch import Tensor

from dtype_hooks.core.loss_scaling import LossScale, LossScaler
from dtype_hooks.core.shared_scaler import SharedScaler, Update
from dtype_hooks.core.storage import tensor_names
from dtype_hooks.errors import ConfigError, DtypeHooksError, LossScaleError
from dtype_hooks.hooks.loss_scaling_wrapper import STATE_KEY, ScaledWrapper, scaled_wrapper
from dtype_hooks.hooks.ranks import gather_from_ranks, raise_together
from dtype_hooks.hooks.runner import bare_model

WHERE = "AutocastHook.loss_scale"
NAMED_IN_A_LINE = 8
NAMED_IN_AN_ERROR = 40


class LossScaling:
    """The loss scaling of one AutocastHook.

    Attributes:
        choice: What was asked for.
        max_consecutive_skips: In iterations; 0 is never.
        shared: The scaler; None while none is in place.
    """

    def __init__(self, choice: LossScale, max_consecutive_skips: int) -> None:
        self.choice = choice
        self.max_consecutive_skips = max_consecutive_skips
        self.shared: SharedScaler | None = None
        self._loaded: dict[str, Any] | None = None
        self._logged: tuple[float, int] | None = None
        self._said: set[str] = set()

    def install(
        self, runner: Runner, dtypes: Iterable[torch.dtype | None], others: Sequence[LossScaling]
    ) -> None:
        """Put the scaler on the runner's optim wrappers, where training is to be scaled; again, nothing changes.

        Args:
            runner: With its optim wrappers built, or nothing happens.
            dtypes: What the nodes autocast to in training.
            others: Those of the run's other AutocastHooks.

        Raises:
            ConfigError: For a wrapper that has a scaler already, or two hooks that ask for different ones.
            LossScaleError: For parameters stored in float16.
        """
        wrappers = optim_wrappers(runner)
        if not wrappers or not self._wants(runner, set(dtypes)):
            return
        error: DtypeHooksError | None = None
        shares = False
        try:
            check_parameters(runner, wrappers)
            shares = self._shares(wrappers, others)
        except DtypeHooksError as caught:  # raised again, on all ranks
            error = caught
        raise_together(error)
        if not shares:
            self._put_on(runner, wrappers)
        self._report_loaded(runner)

    def remove(self) -> None:
        """Take the scaler off, putting back exactly what was there."""
        for wrapper in list(self.shared.wrappers) if self.shared is not None else []:
            wrapper.take_off()
        self.shared = None

    def keep_loaded(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Remember a scaler's state where the optim wrapper is not yet ours: FlexibleRunner loads before ``before_run``."""
        if self.shared is None:
            state = checkpoint.get("optimizer") or {}
            inside = [state, *(each for each in state.values() if isinstance(each, dict))]
            self._loaded = next((each[STATE_KEY] for each in inside if STATE_KEY in each), {})

    def after_iteration(self, runner: Runner) -> None:
        """Update the scale where a step was made; log and report; stop after too many skips.

        Raises:
            LossScaleError: After ``max_consecutive_skips`` iterations in a row with a skipped step, on all ranks.
        """
        if self.shared is not None:
            self.shared.end_iteration(runner.iter + 1)
            self._report(runner, self.shared)

    def after_training(self, runner: Runner) -> None:
        """Report what was still on its way from the device."""
        if self.shared is not None:
            self.shared.flush()
            self._report(runner, self.shared)

    def _wants(self, runner: Runner, dtypes: set[torch.dtype | None]) -> bool:
        half = torch.float16 in dtypes
        if half and self.choice.mode == "off":
            self._say(
                runner,
                "AutocastHook: float16 without loss scaling: gradients below 6e-8 become zero. Leave loss_scale=None out.",
            )
        if not half and self.choice.mode not in ("auto", "off"):
            self._say(
                runner,
                f"{WHERE}: nothing is autocast to float16 in training, so no loss is scaled. Leave loss_scale out.",
            )
        return half and self.choice.mode != "off"

    def _shares(self, wrappers: Sequence[Any], others: Sequence[LossScaling]) -> bool:
        """Whether every wrapper has its scaler from us or from another hook of the run already."""
        ours = [each for each in (self, *others) if each.shared is not None]
        found = []
        for wrapper in wrappers:
            scaled = scaled_wrapper(wrapper)
            if scaled is None and hasattr(wrapper, STATE_KEY):
                raise ConfigError(
                    f"{WHERE}: got {type(wrapper).__name__}, which has a loss_scaler of its own; expected one scaler. Set "
                    "loss_scale=None, or optim_wrapper=dict(type='OptimWrapper', ...)."
                )
            found.append(next((each for each in ours if scaled and each.shared is scaled.shared), None))
        for each in found:
            if each is not None and each.choice.arguments != self.choice.arguments:
                raise ConfigError(
                    f"{WHERE}: got {self.choice}, where another AutocastHook has {each.choice}; expected one. Give both the same."
                )
        return None not in found

    def _put_on(self, runner: Runner, wrappers: Sequence[Any]) -> None:
        ours = self.shared.wrappers if self.shared is not None else []
        for scaled in [*ours, *map(scaled_wrapper, wrappers)]:
            if scaled is not None:  # of an earlier run, or from before one of the wrappers was replaced
                scaled.take_off()
        device = next(p.device for w in wrappers for g in w.optimizer.param_groups for p in g["params"])
        if self.shared is None:
            scaler = LossScaler(device.type, self.choice.arguments)
            scaler.start(device)
            self.shared = SharedScaler(self.choice, scaler)
        for wrapper in wrappers:
            ScaledWrapper(wrapper, self.shared).put_on()
        kind = "dynamic, from" if self.choice.static is None else "static,"
        runner.logger.info(
            f"AutocastHook: loss scale on {device.type} {kind} {self.shared.scale:g}, for {len(wrappers)} optimizer"
            f"{'s' * (len(wrappers) > 1)}"
        )

    def _report_loaded(self, runner: Runner) -> None:
        if self.shared is None:
            return
        if self._loaded is not None and runner.iter > 0:  # resumed, not only the weights loaded
            self.shared.load_state_dict(self._loaded)
            self._loaded = None
        if self.shared.with_state:
            self.shared.with_state = False
            runner.logger.info(f"AutocastHook: loss scale {self.shared.scale:g}, from the checkpoint")
        if self.shared.without_state:
            self.shared.without_state = False
            runner.logger.warning(
                "AutocastHook: the checkpoint holds no loss scaler's state, so the scale starts afresh at "
                f"{self.shared.scale:g}."
            )

    def _report(self, runner: Runner, shared: SharedScaler) -> None:
        updates, shared.updates = shared.updates, []
        for update in updates:
            if update.skipped:
                self._report_skip(runner, shared, update)
        now = (shared.scale, shared.skipped_steps)
        if now != self._logged:
            self._logged = now
            runner.message_hub.update_scalar("train/grad_scale", now[0], resumed=False)
            runner.message_hub.update_scalar("train/skipped_steps", float(now[1]), resumed=False)

    def _report_skip(self, runner: Runner, shared: SharedScaler, update: Update) -> None:
        names = _names(runner, [p for step in update.skipped for p in step.non_finite()])
        names = list(dict.fromkeys(name for _, name in gather_from_ranks(names)))
        total = sum(len(step.parameters) for step in update.steps)
        runner.logger.info(
            f"AutocastHook at iteration {update.iteration}: step skipped, the gradients of {len(names)} of {total} parameters "
            f"were not finite at loss scale {update.scale:g}: {_listed(names, NAMED_IN_A_LINE)}; the scale is now "
            f"{update.next_scale:g}"
        )
        if 0 < self.max_consecutive_skips <= shared.consecutive_skips:
            raise LossScaleError(
                f"AutocastHook at iteration {update.iteration}: got {shared.consecutive_skips} iterations in a row with "
                f"non-finite gradients, at the last in {_listed(names, NAMED_IN_AN_ERROR)}; expected fewer than "
                f"max_consecutive_skips. Find where Inf or NaN arises there, at any loss scale (it is {update.scale:g})."
            )

    def _say(self, runner: Runner, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            runner.logger.warning(text)


def optim_wrappers(runner: Runner) -> list[Any]:
    """The leaves of the runner's optim wrapper; none before it is built, and in a run without training."""
    wrapper = getattr(runner, "optim_wrapper", None)
    leaves = list(wrapper.values()) if isinstance(wrapper, OptimWrapperDict) else [wrapper]
    return [each for each in leaves if isinstance(getattr(each, "optimizer", None), torch.optim.Optimizer)]


def check_parameters(runner: Runner, wrappers: Sequence[Any]) -> None:
    """Refuse trained parameters whose gradients could not be unscaled, or would be twice.

    Raises:
        LossScaleError: Naming those that are stored in float16, which torch's scaler would refuse in the first iteration, or
            that two optim wrappers hold.
    """
    held = [_held(wrapper) for wrapper in wrappers]
    half = [p for parameters in held for p in parameters.values() if p.dtype is torch.float16]
    if half:
        raise LossScaleError(
            f"{WHERE}: got {len(half)} trained parameters stored in float16 ({_listed(_names(runner, half), NAMED_IN_A_LINE)}), "
            "whose gradients cannot be unscaled; expected float32 ones. Let them only compute in float16 (no "
            "cast_nodes, no override_parameters, no model.half()), or set loss_scale=None."
        )
    twice = [p for i, one in enumerate(held) for key, p in one.items() if any(key in o for o in held[:i])]
    if twice:
        raise LossScaleError(
            f"{WHERE}: got {len(twice)} parameters ({_listed(_names(runner, twice), NAMED_IN_A_LINE)}) in two optim wrappers, each "
            "of which would unscale their gradients; expected each in one. Set loss_scale=None."
        )


def _held(wrapper: Any) -> dict[int, Tensor]:
    parameters = (p for group in wrapper.optimizer.param_groups for p in group["params"])
    return {id(p): p for p in parameters if p.requires_grad}


def _names(runner: Runner, parameters: Sequence[Tensor]) -> list[str]:
    names = tensor_names(bare_model(runner)) if parameters else {}
    return [names.get(id(p), ("(not in the model)",))[0] for p in parameters]


def _listed(names: Sequence[str], limit: int) -> str:
    text = ", ".join(map(repr, names[:limit]))
    return text + (f" and {len(names) - limit} more" if len(names) > limit else "")
