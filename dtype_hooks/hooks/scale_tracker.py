"""ScaleTracker: the scale of every tensor over a whole run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.runner import BaseLoop, EpochBasedTrainLoop, IterBasedTrainLoop, Runner

from dtype_hooks.core.number_formats import resolve_formats
from dtype_hooks.core.selection import Selection
from dtype_hooks.core.validation import as_bool, as_choice, as_interval
from dtype_hooks.errors import ConfigError, NonFiniteError
from dtype_hooks.hooks.loss_scaling import optim_wrappers
from dtype_hooks.hooks.nonfinite_report import NonFiniteReport
from dtype_hooks.hooks.nonfinite_watch import Watcher
from dtype_hooks.hooks.recorded_step import StepPatch, StepScale, unseen_scaling
from dtype_hooks.hooks.registry import register_hook
from dtype_hooks.hooks.runner import bare_model
from dtype_hooks.hooks.scale_file import ScaleFile, samples_of
from dtype_hooks.hooks.scale_rows import merge_ranks, sampled
from dtype_hooks.report.scale_plots import save_plots
from dtype_hooks.report.scales import edge_report
from dtype_hooks.report.scales_file import last_sample
from dtype_hooks.scales.nonfinite import first_nonfinite
from dtype_hooks.scales.places import Places
from dtype_hooks.scales.recorder import FORMAT_NAMES, LEVELS, Recorder

ON_NONFINITE = ("warn", "raise", "ignore")
WHERE = "ScaleTracker"
MOST_SAMPLES = 200
"""How many samples the pictures at the end are drawn from; ``tools/scales.py`` draws all."""


@register_hook
class ScaleTracker(Hook):
    """Record the scale of every intermediate tensor of a run, forward and backward, every ``interval`` iterations.

    In a recorded iteration the model's ``train_step`` runs inside :class:`~dtype_hooks.scales.recorder.Recorder` (see
    :func:`dtype_hooks.track_scales` for what is seen and how tensors are named); between them nothing of it is in place. Finite
    results of one element that need no gradient are not kept.

    **Changes the numbers of training**: no, bit for bit. A compiled model runs eagerly in recorded iterations.

    **Stages**: ``before_run`` makes sure of a summary at the end, also after Ctrl-C; ``before_train`` opens the file;
    ``before_train_iter`` and ``after_train_iter`` record; a checkpoint that is due is written before anything is raised.

    **Ranks**: activations and their gradients are merged over all ranks, by name; a gradient is that of the loss averaged
    over the ranks. Parameters and their gradients are rank 0's, read after reduction. With equal batches, and without
    BatchNorm, dropout or what else looks across samples, the rows are those of one process with all ranks' samples.

    **Loss scaling and accumulation**: ``mean``, ``std``, ``rms``, ``amax`` and ``amin`` of gradients are free of both; the
    formats' fractions are of the value as it existed, which is the reported one times ``grad_scale``. A parameter's gradient
    is the mean over the micro-batches accumulated so far; where DDP has not reduced it yet, it has no row. Several
    optim wrappers that scale differently leave gradients as they existed, with ``grad_scale`` null.

    **NaN and Inf** are laid to the function that made them of finite values, once each. Masks of ``-inf`` that a softmax
    consumes are legal, wherever they come from, and so is an Inf without a gradient that does not reach the loss. With a
    loss scale above 1 a gradient that overflows is routine: the scaler leaves that step out.

    **Entries**: one a run. The same one again does nothing; one that differs is an error, since there is one file.

    **State in checkpoints**: none; the file says what was recorded, and a resumed run goes on with it.

    **Files**, in the run's log_dir, of rank 0: ``scales.jsonl``, one row a tensor, direction and sample (columns:
    :meth:`dtype_hooks.Scales.rows`, with ``iter``, counted from 1, and ``grad_scale``); at the end pictures in ``scales/``.
    ``tools/scales.py`` reads them. **Logged** through the visualizer: ``scales/<direction>_std/<name>`` and ``..._amax/...``.

    Args:
        interval: In iterations; those are recorded whose number, counted from 1, it divides.
        begin: The first iteration that may be recorded.
        end: The last one; None is no end.
        patterns: Regexes on dotted names: only what happens inside these modules. None is everything.
        class_patterns: The same on class names.
        exclude: Regexes on dotted names of modules left out.
        level: ``"functions"``, or ``"aten"`` for the kernels below them as well.
        backward: Whether gradients are recorded.
        parameters: Whether parameters and their gradients are recorded.
        formats: Number formats whose underflow, subnormal and overflow fractions are counted.
        verbose: Log a table of the tensors closest to an edge after the first sample and at the end.
        top: How many tensors a table shows.
        plots: Draw pictures at the end.
        scalars: Send std and amax of every tensor to the visualizer.
        on_nonfinite: When a recorded step makes NaN or Inf: ``"warn"`` names what made the first, ``"raise"`` stops all ranks
            with that message, ``"ignore"`` only records.
        watch_nonfinite: Look at gradients before each step of an optimizer, and at the loss after it; where they are not
            finite run the batch again, recorded, on the bare module, on all ranks, with the weights, buffers and random
            numbers that it had, and everything put back afterwards. With ``on_nonfinite="raise"`` no optimizer steps on such
            gradients. Costs two synchronisations, one pass over the gradients and a copy of the buffers an iteration. With
            a loss scaler only the loss is looked at. State that a model keeps elsewhere than in buffers sees the batch
            twice; a model that changes its batch in place is not run again.
        frames: How many recorded steps the report of a NaN holds.

    Raises:
        ConfigError: When built, for an argument that cannot be used; at the start, for a second entry that differs.
        SelectionError: In the first recorded iteration, when ``patterns`` take no module.
        NonFiniteError: With ``on_nonfinite="raise"``.

    Example:
        >>> hook = dict(type="ScaleTracker", interval=100, on_nonfinite="raise", watch_nonfinite=True)
    """

    # After CheckpointHook (VERY_LOW): what is due is written before a NaN stops the run.
    priority = "LOWEST"

    def __init__(
        self,
        interval: int = 100,
        begin: int = 0,
        end: int | None = None,
        patterns: str | Sequence[str] | None = None,
        class_patterns: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        level: str = "functions",
        backward: bool = True,
        parameters: bool = True,
        formats: Sequence[str] = FORMAT_NAMES,
        verbose: bool = True,
        top: int = 20,
        plots: bool = True,
        scalars: bool = True,
        on_nonfinite: str = "warn",
        watch_nonfinite: bool = False,
        frames: int = 3,
    ) -> None:
        self.interval = as_interval(interval, f"{WHERE}.interval")
        self.begin = as_interval(begin, f"{WHERE}.begin")
        self.end = None if end is None else as_interval(end, f"{WHERE}.end")
        if self.end is not None and self.end < self.begin:
            raise ConfigError(
                f"{WHERE}.end: got {end!r}; expected begin={begin} or more. Leave it out for no end."
            )
        self.selection = Selection.make(patterns, class_patterns, exclude, where=WHERE)
        self.top = as_interval(top, f"{WHERE}.top")
        self.verbose = as_bool(verbose, f"{WHERE}.verbose")
        self.plots = as_bool(plots, f"{WHERE}.plots")
        self.scalars = as_bool(scalars, f"{WHERE}.scalars")
        self.on_nonfinite = as_choice(on_nonfinite, ON_NONFINITE, f"{WHERE}.on_nonfinite")
        self.watch_nonfinite = as_bool(watch_nonfinite, f"{WHERE}.watch_nonfinite")
        self.record = {
            "level": as_choice(level, LEVELS, f"{WHERE}.level"),
            "formats": resolve_formats(formats, f"{WHERE}.formats"),
            "backward": as_bool(backward, f"{WHERE}.backward"),
            "parameters": as_bool(parameters, f"{WHERE}.parameters"),
        }
        self.frames = as_interval(frames, f"{WHERE}.frames")
        self.report = NonFiniteReport(self.frames, self.on_nonfinite)
        self._places: tuple[list[Any], Places] | None = None
        self._recorder: Recorder | None = None
        self._patch: StepPatch | None = None
        self._scale: StepScale | None = None
        self._rests = False
        self._file: ScaleFile | None = None
        self._watcher: Watcher | None = None
        self._samples = 0
        self._error: NonFiniteError | None = None

    # Stages

    def before_run(self, runner: Runner) -> None:
        """Have the training loop end with a summary, whatever ends it."""
        self._rests = self._is_another(runner)
        loop = runner._train_loop
        if self._rests or not isinstance(loop, BaseLoop):
            return
        there = loop.__dict__.get("run")
        if not isinstance(there, _Run) or there.hook is not self:
            loop.run = _Run(loop, self, runner)

    def before_train(self, runner: Runner) -> None:
        """Open the file, with the earlier samples of a run that is resumed."""
        if self._rests:
            return
        self._samples = 0
        self.report = NonFiniteReport(self.frames, self.on_nonfinite)
        if is_main_process():
            ours = self._file is not None and self._file.path.parent == Path(runner.log_dir)  # train() again
            continues = bool(runner.iter) and (ours or _resumes(runner))
            self._file = ScaleFile(runner.log_dir, runner.logger.warning)
            self._file.begin(runner.iter, continues)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Put the recording around the step that comes, if its turn is now."""
        if self._rests:
            return
        self._take_off()
        if self._is_due(runner.iter + 1):
            self._begin_sample(runner)
        elif self._watches:
            self._watcher = Watcher(runner, stops=self.on_nonfinite == "raise")
            self._put_on(runner, self._watcher.step)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Write and report what was recorded; stop, if that is asked for and no checkpoint is waiting."""
        if self._recorder is not None:
            self._end_sample(runner)
        if self._watcher is not None:
            self._end_watch(runner)
        if self._error is not None and not _ends_epoch(runner, batch_idx):
            raise self._error

    def after_train_epoch(self, runner: Runner) -> None:
        """Stop where the epoch's last iteration asked for it: its checkpoint is written now."""
        if self._error is not None:
            raise self._error

    # Recording

    def _is_due(self, iteration: int) -> bool:
        if not self.interval or iteration < self.begin or (self.end is not None and iteration > self.end):
            return False
        return iteration % self.interval == 0

    def _begin_sample(self, runner: Runner) -> None:
        wrappers = optim_wrappers(runner)
        self._scale = StepScale(runner.model, wrappers)
        recorder = Recorder(self._places_of(runner), **self.record)  # type: ignore[arg-type]
        watcher = None
        if self._watches:
            explain = partial(first_nonfinite, recorder.scales, whole=self._is_whole)
            watcher = self._watcher = Watcher(runner, self.on_nonfinite == "raise", explain)

        def step(original: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
            with recorder, unseen_scaling(wrappers):
                outputs = (
                    original(*args, **kwargs) if watcher is None else watcher.step(original, args, kwargs)
                )
            self._recorder = recorder
            return outputs

        self._put_on(runner, step)

    def _end_sample(self, runner: Runner) -> None:
        recorder, scale = self._recorder, self._scale
        self._recorder = self._scale = None
        if recorder is None or scale is None:
            return
        iteration, of_gradients = runner.iter + 1, scale.read()
        read = list(recorder.scales.statistics())
        merged = merge_ranks(sampled(read, of_gradients))
        rows = [each.as_row(iteration) for each in merged]
        if is_main_process():
            self._write(runner, iteration, rows)
        self._samples += 1
        self.report.frames.append(rows)
        if self.on_nonfinite != "ignore":
            overflows = of_gradients is not None and of_gradients.loss_scale > 1  # as a matter of routine
            finding = first_nonfinite(recorder.scales, read, not overflows, self._is_whole)
            self._error = self.report.tell(runner, finding, "recorded")

    def _write(self, runner: Runner, iteration: int, rows: list[dict[str, Any]]) -> None:
        if self._file is not None:
            self._file.write(rows)
        if self.scalars:
            self._send(runner, iteration, _scalars(rows))
        if self.verbose and not self._samples:
            runner.logger.info(f"{WHERE}: iteration {iteration}\n{edge_report(rows, top=self.top)}")

    def _send(self, runner: Runner, iteration: int, scalars: dict[str, float]) -> None:
        try:
            runner.visualizer.add_scalars(scalars, step=iteration)
        except OSError as error:
            self.scalars = False
            runner.logger.warning(
                f"{WHERE}: the visualizer cannot write ({error}); training goes on, scalars are no longer sent."
            )

    def _places_of(self, runner: Runner) -> Places:
        model = bare_model(runner)
        modules = list(model.modules())
        if self._places is None or self._places[0] != modules:
            self._places = modules, Places.make(model, self.selection, WHERE)
        return self._places[1]

    @property
    def _watches(self) -> bool:
        return self.watch_nonfinite and self.on_nonfinite != "ignore"

    @property
    def _is_whole(self) -> bool:
        """Whether a record holds the whole model."""
        return self.selection.is_empty and not self.selection.exclude and bool(self.record["parameters"])

    def _end_watch(self, runner: Runner) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None and watcher.found is not None and self._error is None:
            self._error = self.report.tell(runner, watcher.found, watcher.how)

    # The patch and the end

    def _is_another(self, runner: Runner) -> bool:
        """Whether an earlier entry of the run records the same; two that record different things are an error."""
        entries = [hook for hook in runner.hooks if isinstance(hook, ScaleTracker)]
        first = entries[0] if entries else self
        if first is self:
            return False
        different = [name for name in _ARGUMENTS if getattr(first, name) != getattr(self, name)]
        if different:
            raise ConfigError(
                f"{WHERE}: got two entries that differ in {', '.join(different)}; expected one, as there is one file a run. "
                "Leave one out: patterns take several parts of a model."
            )
        runner.logger.warning(f"{WHERE}: got the same entry more than once; the first one records.")
        return True

    def _put_on(self, runner: Runner, around: Callable[..., Any]) -> None:
        self._patch = StepPatch(runner.model, around)
        self._patch.put_on()

    def _take_off(self) -> None:
        """Leave nothing of an iteration that did not come to its end."""
        if self._patch is not None:
            self._patch.take_off()
        if self._watcher is not None:
            self._watcher.close()
        self._patch = self._recorder = self._watcher = self._error = self._scale = None

    def finish(self, runner: Runner) -> None:
        """Leave nothing behind; close the file and sum up, whatever has ended the training."""
        self._take_off()
        self._places = None
        if self._file is None:
            return
        self._file.close()
        if not self._samples and self.interval and sys.exc_info()[0] is None:
            runner.logger.warning(
                f"{WHERE}: no iteration was recorded: none up to {runner.iter} is a multiple of interval={self.interval} "
                f"from begin={self.begin}{'' if self.end is None else f' to end={self.end}'}."
            )
        if self._samples and self._file.path.is_file():
            try:
                self._summarise(runner, self._file.path)
            except Exception as error:  # the training is done; a picture is not worth losing its result
                runner.logger.warning(f"{WHERE}: no summary ({type(error).__name__}: {error}).")

    def _summarise(self, runner: Runner, path: Path) -> None:
        rows = samples_of(path, MOST_SAMPLES)
        lines = [f"{WHERE}: {self._samples} samples in {path}, the last of {len(last_sample(rows))} rows"]
        if self.verbose:
            lines.append(edge_report(rows, top=self.top))
        runner.logger.info("\n".join(lines))
        if self.plots:
            runner.logger.info(f"{WHERE}: drawing pictures into {path.parent / 'scales'}")
            written = save_plots(rows, path.parent / "scales")
            runner.logger.info(f"{WHERE}: {', '.join(each.name for each in written)}")


_ARGUMENTS = (
    *("interval", "begin", "end", "selection", "record", "verbose", "top", "plots", "scalars"),
    *("on_nonfinite", "watch_nonfinite", "frames"),
)


class _Run:
    """A training loop's ``run``, for once, with the hook's summary at its end."""

    def __init__(self, loop: BaseLoop, hook: ScaleTracker, runner: Runner) -> None:
        self.loop, self.original, self.hook, self.runner = loop, loop.run, hook, runner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.loop.__dict__.pop("run", None)
        try:
            return self.original(*args, **kwargs)
        finally:
            self.hook.finish(self.runner)


def _resumes(runner: Runner) -> bool:
    """Whether the run goes on with one that lies in the same work_dir."""
    if not runner._resume:
        return False
    if runner._load_from is None:
        return True
    folders = [runner.work_dir, *(getattr(hook, "out_dir", None) for hook in runner.hooks)]
    return Path(runner._load_from).resolve().parent in [Path(each).resolve() for each in folders if each]


def _ends_epoch(runner: Runner, batch_idx: int) -> bool:
    """Whether ``after_train_epoch`` comes next, where a checkpoint may be written."""
    loop = runner.train_loop
    if isinstance(loop, EpochBasedTrainLoop):
        return batch_idx + 1 == len(loop.dataloader)
    return isinstance(loop, IterBasedTrainLoop) and runner.iter + 1 >= loop.max_iters


def _scalars(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {
        f"scales/{row['direction']}_{column}/{row['name']}": row[column]
        for row in rows
        for column in ("std", "amax")
        if row[column] is not None
    }
