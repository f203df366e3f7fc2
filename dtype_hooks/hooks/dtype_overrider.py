"""DtypeOverrider: chosen layers compute in a dtype, whatever autocast says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner

from dtype_hooks.core.override import OverrideHandle, OverrideRule, as_bool
from dtype_hooks.hooks.registry import register_hook
from dtype_hooks.hooks.runner import bare_model, is_compiled
from dtype_hooks.report.overrides import never_called_line, override_table, summary_line


@register_hook
class DtypeOverrider(Hook):
    """Make chosen modules compute in a dtype, regardless of autocast: :func:`dtype_hooks.override_dtype` as a hook.

    **Changes the numbers of training**: yes, in the modules that it takes; that is its purpose. A rule that asks for
    what a module does anyway (float32, no autocast, a float32 model) leaves every loss and weight bitwise as it was.

    **Stages**: installs in ``before_run``, before ``EMAHook`` copies the model, so that the copy has the overrides too,
    and before activation checkpointing and compilation, which then take the overrides in. ``before_train``,
    ``before_val`` and ``before_test`` install as well where ``before_run`` was not called or the model has been
    replaced since; what is installed already stays as it is. Overrides stay in place after training: a test mostly follows.

    **State in checkpoints**: none; ``state_dict`` keys are those of the plain model. **Logged keys**: none.

    Args:
        patterns: Regexes, ``re.search`` on the dotted name of each module of the bare model (without ``module.``
            of DDP). A bare string is one pattern. The root is never taken.
        class_patterns: Regexes, ``re.search`` on the class name. A module is taken when either kind matches.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, ``"float64"``, a short name, or a ``torch.dtype``.
        methods_to_override: Methods that are wrapped, ``["forward"]`` by default; absent ones are passed over.
        exclude: Regexes on dotted names, taken away from the match.
        cast_inputs: ``"first"`` casts the first positional tensor, ``"all"`` every floating tensor in the arguments.
        strict: A pattern that matches nothing is an error at the start instead of one warning.
        verbose: Log a table of every overridden method.

    Raises:
        ConfigError: When built, for an argument that cannot be used.
        SelectionError: At the start, when two entries claim one method in different dtypes.
        OverrideError: At the start, for a module that cannot be overridden.

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
        exclude: str | Sequence[str] | None = None,
        cast_inputs: str = "first",
        strict: bool = False,
        verbose: bool = False,
    ) -> None:
        self.rule = OverrideRule.make(
            patterns=patterns,
            class_patterns=class_patterns,
            dtype=dtype,
            methods_to_override=methods_to_override,
            exclude=exclude,
            cast_inputs=cast_inputs,
            strict=strict,
            name="DtypeOverrider",
        )
        self.verbose = as_bool(verbose, "DtypeOverrider.verbose")
        self.handle: OverrideHandle | None = None
        self._first_iteration_done = False

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

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """After the first iteration, say what the rule did not reach."""
        self._report_first_iteration(runner)

    def after_val_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """After the first iteration of a run without training, say what the rule did not reach."""
        self._report_first_iteration(runner)

    def after_test_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """After the first iteration of a run without training, say what the rule did not reach."""
        self._report_first_iteration(runner)

    def remove(self) -> None:
        """Take the overrides off the model."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    def _install(self, runner: Runner) -> None:
        model = bare_model(runner)
        if self.handle is not None and self.handle.model is model:
            self.handle.refresh()
            return
        if self.handle is not None:
            runner.logger.warning(
                "DtypeOverrider: the runner's model was replaced; the overrides move to the new one."
            )
            self.remove()
        self.handle = self.rule.install(model, warn=False)
        self._report_installed(runner, self.handle)

    def _report_installed(self, runner: Runner, handle: OverrideHandle) -> None:
        for message in handle.warnings:
            runner.logger.warning(message)
        runner.logger.info(summary_line(handle))
        if self.verbose and handle.records:
            runner.logger.info("\n" + override_table(handle))

    def _report_first_iteration(self, runner: Runner) -> None:
        if self._first_iteration_done or self.handle is None:
            return
        self._first_iteration_done = True
        for note in self.handle.notes():
            runner.logger.warning(note)
        never_called = self.handle.never_called()
        if never_called and not is_compiled(runner):
            runner.logger.warning(never_called_line(never_called, self.rule.name))
