"""DtypeOverrider: chosen layers compute in a dtype, whatever autocast says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner

from dtype_hooks.core.data_parallel import renew_reducers
from dtype_hooks.core.drift import Finding, Watch, findings, restore
from dtype_hooks.core.override import OverrideHandle, OverrideRule
from dtype_hooks.core.validation import as_bool, as_choice, as_interval
from dtype_hooks.errors import DriftError
from dtype_hooks.hooks.optimizers import (
    checkpoint_dtypes,
    mend_optimizer_states,
    rounding_of_checkpoint,
    storage_warnings,
    trained_parameters,
)
from dtype_hooks.hooks.ranks import any_rank, gather_from_ranks, raise_together
from dtype_hooks.hooks.registry import register_hook
from dtype_hooks.hooks.runner import bare_model, check_storable, is_compiled
from dtype_hooks.report.drift import drift_table
from dtype_hooks.report.overrides import never_called_line, override_table, stored_table, summary_line

ON_DRIFT = ("restore", "warn", "raise")

DRIFT_CAPTIONS = {
    "restore": "Put back, with optimizer states and DDP. A replaced module's parameters are new to the optimizer.",
    "warn": "Left as found (on_drift='warn').",
    "raise": "Training stops (on_drift='raise').",
}


@register_hook
class DtypeOverrider(Hook):
    """Make chosen modules compute in a dtype, regardless of autocast: :func:`dtype_hooks.override_dtype` as a hook.

    With ``override_parameters`` the modules' own parameters are stored in the dtype as well.

    **Changes the numbers of training**: yes, in the modules that it takes; that is its purpose. A rule that asks for
    what a module does anyway (float32, no autocast, a float32 model) leaves every loss and weight bitwise as it was.

    **Stages**: installs in ``before_run``, before ``EMAHook`` copies the model, before weights are initialised and a
    checkpoint is loaded, and before activation checkpointing and compilation. So the initial draws, optimizer state, EMA,
    a resumed run and DDP (whose reducers are built anew) all see the stored dtype, as if the model had been cast before it
    was wrapped. ``before_train``, ``before_val`` and ``before_test`` install as well where ``before_run`` was not called or
    the model has been replaced since; what is installed already stays as it is. ``after_train_iter`` re-checks every
    ``check_interval`` iterations. Overrides stay in place after training: a test mostly follows.

    **On several processes** every rank takes the same decisions: an error on one is raised on all, and a re-check
    costs one all-reduce of one number, or more where something was found.

    **State in checkpoints**: none; ``state_dict`` keys are those of the plain model, and parameters are saved in the dtype
    that they are stored in. Checkpoints move between runs with and without the hook; loading a float32 checkpoint into
    parameters stored in bfloat16 rounds them and their optimizer states, with one warning. **Logged keys**: none.

    Args:
        patterns: Regexes, ``re.search`` on the dotted name of each module of the bare model (without ``module.``
            of DDP). A bare string is one pattern. The root is never taken.
        class_patterns: Regexes, ``re.search`` on the class name. A module is taken when either kind matches.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, ``"float64"``, a short name, or a ``torch.dtype``.
        methods_to_override: Methods that are wrapped, ``["forward"]`` by default; absent ones are passed over.
        override_parameters: Also store the matched modules' own floating parameters (not their children's) in the dtype.
            Every Parameter keeps its identity; tied ones stay tied.
        override_buffers: The same for their own floating buffers.
        exclude: Regexes on dotted names, taken away from the match.
        cast_inputs: ``"first"`` casts the first positional tensor, ``"all"`` every floating tensor in the arguments.
        strict: A pattern that matches nothing is an error at the start instead of one warning.
        verbose: Log tables of every overridden method and every stored parameter.
        check_interval: In iterations: how often overrides, modules, Parameters and stored dtypes are compared with
            what was put in place. 0 is never.
        on_drift: What is done about a difference: ``"restore"`` it (overrides, dtypes and Parameters put back, optimizer
            states and DDP made to follow), ``"warn"``, or ``"raise"``. Each difference is reported once, in a table.

    Raises:
        ConfigError: When built, for an argument that cannot be used.
        SelectionError: At the start, when two entries claim one method or parameter in different dtypes.
        OverrideError: At the start, for a module that cannot be overridden, or stored casts under FSDP or DeepSpeed.
        DriftError: In training, with ``on_drift="raise"``.

    Example:
        >>> hook = dict(type="DtypeOverrider", patterns=["norm"], dtype="float32", verbose=True)
    """

    # Before EMAHook (NORMAL), which deep-copies the model in its before_run.
    priority = "ABOVE_NORMAL"

    def __init__(
        self,
        patterns: str | Sequence[str] | None = None,
        class_patterns: str | Sequence[str] | None = None,
        dtype: str | torch.dtype = "float32",
        methods_to_override: str | Sequence[str] | None = None,
        override_parameters: bool = False,
        verbose: bool = False,
        check_interval: int = 10,
        *,
        exclude: str | Sequence[str] | None = None,
        cast_inputs: str = "first",
        strict: bool = False,
        override_buffers: bool = False,
        on_drift: str = "restore",
    ) -> None:
        self.rule = OverrideRule.make(
            patterns=patterns,
            class_patterns=class_patterns,
            dtype=dtype,
            methods_to_override=methods_to_override,
            exclude=exclude,
            cast_inputs=cast_inputs,
            strict=strict,
            override_parameters=override_parameters,
            override_buffers=override_buffers,
            name="DtypeOverrider",
        )
        self.verbose = as_bool(verbose, "DtypeOverrider.verbose")
        self.check_interval = as_interval(check_interval, "DtypeOverrider.check_interval")
        self.on_drift = as_choice(on_drift, ON_DRIFT, "DtypeOverrider.on_drift")
        self.handle: OverrideHandle | None = None
        self._watch: Watch | None = None
        self._reported: set[tuple[int, Finding]] = set()
        self._first_iteration_done = False
        self._loaded: dict[str, torch.dtype] = {}

    def before_run(self, runner: Runner) -> None:
        """Install, before anything copies, wraps or compiles the model."""
        self._install(runner)

    def before_train(self, runner: Runner) -> None:
        """Install, if ``before_run`` has not."""
        self._install(runner)

    def before_val(self, runner: Runner) -> None:
        """Install, if nothing before has."""
        self._install(runner)

    def before_test(self, runner: Runner) -> None:
        """Install, if nothing before has."""
        self._install(runner)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Re-check every ``check_interval`` iterations; after the first, say what the rule did not reach."""
        self._report_first_iteration(runner)
        if self.check_interval and self.every_n_train_iters(runner, self.check_interval):
            self._recheck(runner)

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Say so when what is loaded will be rounded to the stored dtype."""
        self._loaded = checkpoint_dtypes(checkpoint)
        if self.handle is not None:
            self._report_rounding(runner, self.handle)

    def after_val_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """After the first iteration of a run without training, say what the rule did not reach."""
        self._report_first_iteration(runner)

    def after_test_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """After the first iteration of a run without training, say what the rule did not reach."""
        self._report_first_iteration(runner)

    def remove(self) -> None:
        """Take the overrides off the model."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    def _install(self, runner: Runner) -> None:
        model = bare_model(runner)
        if self.handle is not None and self.handle.model is not model:
            runner.logger.warning(
                "DtypeOverrider: the runner's model was replaced; the overrides move to the new one."
            )
            self.remove()
        if self.handle is None:
            self.handle = OverrideHandle(self.rule, model, warn=False)
            self._together(runner, self.handle.refresh)
            self._report_installed(runner, self.handle)
        else:
            self._recheck(runner)
            if self.on_drift == "restore":
                self._together(runner, self.handle.refresh)
        self._watch = Watch(self.handle)

    def _together(self, runner: Runner, change: Callable[[], bool]) -> None:
        """Change the model on every rank or raise on every rank; then let DDP and optimizer states follow."""
        changed, error = False, None
        try:
            if self.rule.override_parameters or self.rule.override_buffers:
                check_storable(runner, "DtypeOverrider.override_parameters")
            changed = change()
        except Exception as caught:  # raised again below, on all ranks
            error = caught
        raise_together(error)
        if any_rank(changed):
            renew_reducers(runner.model)
            mend_optimizer_states(runner)

    def _recheck(self, runner: Runner) -> None:
        if self.handle is None or self._watch is None or not any_rank(not self._watch.is_unchanged()):
            return
        found = gather_from_ranks(findings(self.handle))
        self._report_drift(runner, found)
        if found and self.on_drift == "raise":
            rank, first = found[0]
            raise DriftError(
                f"DtypeOverrider at iteration {runner.iter + 1}: got {first.now} for {first.name!r} on rank {rank}; expected "
                f"{first.was} ({first.kind}, {len(found)} in all). Find what changed it, or set on_drift='restore'."
            )
        if found and self.on_drift == "restore":
            handle, trained = self.handle, trained_parameters(runner)
            self._together(runner, lambda: restore(handle, trained))
        self._watch = Watch(self.handle)

    def _report_installed(self, runner: Runner, handle: OverrideHandle) -> None:
        for message in (*handle.warnings, *storage_warnings(runner, handle.stored)):
            runner.logger.warning(message)
        self._report_rounding(runner, handle)  # FlexibleRunner has loaded a checkpoint before before_run
        runner.logger.info(summary_line(handle))
        if self.verbose and handle.records:
            runner.logger.info("\n" + override_table(handle))
        if self.verbose and handle.stored:
            runner.logger.info("\n" + stored_table(handle))

    def _report_rounding(self, runner: Runner, handle: OverrideHandle) -> None:
        message = rounding_of_checkpoint(self._loaded, handle.stored)
        self._loaded = {}
        if message is not None:
            runner.logger.warning(message)

    def _report_drift(self, runner: Runner, found: list[tuple[int, Finding]]) -> None:
        new = [each for each in found if each not in self._reported]
        self._reported.update(new)
        if new:
            title = f"DtypeOverrider at iteration {runner.iter + 1}: {len(new)} changed since they were put in place"
            runner.logger.warning("\n" + drift_table(new, title, DRIFT_CAPTIONS[self.on_drift]))

    def _report_first_iteration(self, runner: Runner) -> None:
        if self._first_iteration_done or self.handle is None:
            return
        self._first_iteration_done = True
        for note in self.handle.notes():
            runner.logger.warning(note)
        never_called = self.handle.never_called()
        if never_called and not is_compiled(runner):
            runner.logger.warning(never_called_line(never_called, self.rule.name))
