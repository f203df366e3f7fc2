"""AutocastHook: mixed precision on any device as one dict."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.optim import AmpOptimWrapper, ApexOptimWrapper, OptimWrapperDict
from mmengine.runner import Runner
from torch import nn

from dtype_hooks.core.autocast import NARROW, check_autocast, device_type_of, device_type_of_parameters
from dtype_hooks.core.autocast_method import Phase
from dtype_hooks.core.data_parallel import renew_reducers
from dtype_hooks.core.dtypes import DTYPES, dtype_name, resolve_dtype
from dtype_hooks.core.loss_scaling import LossScale
from dtype_hooks.core.nodes import (
    ROOT,
    Node,
    Regions,
    cast_nodes,
    check_castable,
    never_called_nodes,
    resolve_nodes,
    tensors_of,
)
from dtype_hooks.core.selection import Selection, SelectionResult
from dtype_hooks.core.storage import claims_on, tensor_names
from dtype_hooks.core.validation import as_bool, as_interval
from dtype_hooks.errors import ConfigError
from dtype_hooks.hooks.loss_scaling import LossScaling
from dtype_hooks.hooks.optimizers import mend_optimizer_states
from dtype_hooks.hooks.predictions import CastPredictions
from dtype_hooks.hooks.ranks import any_rank, gather_from_ranks, raise_together
from dtype_hooks.hooks.registry import register_hook
from dtype_hooks.hooks.runner import bare_model, check_storable, is_compiled
from dtype_hooks.node_dtype import reset_implicit_downcasts, resolve_model_dtype
from dtype_hooks.report.nodes import nodes_line, nodes_table

PHASES = ("train", "val", "test")


@register_hook
class AutocastHook(Hook):
    """Run the model's forward, loss included, in mixed precision: a ``torch.autocast`` region on any device.

    Each forward of the bare model gets a fresh region; the backward and the optimizer run outside. Parameters stay in
    float32 (master weights) unless ``cast_nodes``. Submodules may have a dtype of their own or stay out: see
    :mod:`dtype_hooks.node_dtype` for what a model can define, and ``exclude``.

    Where a node runs in float16, ``torch.amp.GradScaler`` scales the losses of every optim wrapper: ``backward``, ``step``
    and the states of each go through one scaler, whose scale is updated once an iteration. Steps on gradients that are not
    finite are left out and logged with the parameters' names; the LR schedule goes on, as it does with AmpOptimWrapper.
    Train steps must use ``optim_wrapper.update_params``, or its ``backward`` and ``step``: past these is an error. Between
    the two, gradients carry the scale.

    **Changes the numbers of training**: yes, that is its purpose; ``enabled=False`` changes nothing at all.

    **Stages**: resolves every node and installs in ``before_run``; ``before_train``, ``before_val`` and ``before_test`` install
    as well where that has not happened, and say which phase it is. ``after_train_iter`` updates the loss scale, and checks every
    ``check_interval`` iterations that the regions are in place and puts them back. Regions and scaler stay after training.

    **With DtypeOverrider**, in either order: the override wins inside its modules.

    **State in checkpoints**: the loss scaler's, in the optimizer's state under ``loss_scaler``, as AmpOptimWrapper has it.

    **Logged keys**: ``grad_scale``, the loss scale after the iteration, and ``skipped_steps``, how many optimizer steps were
    left out so far; the last value, not a mean. With ``fused=True`` optimizers both are one iteration late, so that nothing
    waits for the device.

    Args:
        device_type: ``"cpu"``, ``"cuda"``...; an index is stripped. None takes that of the parameters.
        dtype: ``"bfloat16"`` or ``"float16"``: the config's word on the model-wide dtype. None asks the config's top-level
            ``autocast_dtype``, then the model's ``get_autocast_dtype()``, and else takes the device's default.
        enabled: False installs nothing.
        cache_enabled: Whether casts of weights are kept for the length of a forward; None leaves torch's setting. Set
            False under CUDA-graph capture.
        phases: In which of ``train``, ``val`` and ``test`` regions are opened; in the others the model runs as without us.
        patterns: Regexes on dotted names: regions on these submodules alone, none on the model. What they return is narrow;
            where a module in full precision follows, ``exclude`` it, which casts its arguments.
        class_patterns: The same on class names.
        exclude: Regexes on dotted names of submodules that stay out: autocast is off inside, and arguments in bfloat16 or
            float16 come in the dtype that their parameters are stored in.
        output_dtype: What predictions are cast to (in val and test, and for ``mode="predict"``); None leaves them. bfloat16
            predictions break ``.numpy()`` in many metrics.
        cast_nodes: Also store each node's parameters and floating buffers in its dtype.
        loss_scale: ``"auto"`` is dynamic where a node runs in float16 in training, and none otherwise; ``"dynamic"``; a
            positive number, which stays; a dict of GradScaler's ``init_scale`` (65536), ``growth_factor`` (2),
            ``backoff_factor`` (0.5) and ``growth_interval`` (2000, in iterations); None for no scaling. After resuming,
            a number and those factors that are given hold, the rest is the checkpoint's.
        max_consecutive_skips: In iterations: after so many in a row with a skipped step training stops; 0 is never.
        check_interval: In iterations: how often the regions are looked for and put back; 0 is never.
        verbose: Log a table of the nodes.

    Raises:
        ConfigError: When built, for an argument that cannot be used; at the start, for a device or dtype without autocast, a
            contradiction with the model, or a second owner of autocast or of a loss scaler.
        LossScaleError: At the start, for trained parameters stored in float16 where losses are scaled; in training, for a
            backward or an optimizer's step past the optim wrapper, and after ``max_consecutive_skips``.

    Example:
        >>> hook = dict(type="AutocastHook", dtype="bfloat16", output_dtype="float32", verbose=True)
    """

    # As DtypeOverrider: before EMAHook (NORMAL) copies the model in its before_run.
    priority = "ABOVE_NORMAL"

    def __init__(
        self,
        device_type: str | None = None,
        dtype: str | torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        phases: Sequence[str] = PHASES,
        patterns: str | Sequence[str] | None = None,
        class_patterns: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        output_dtype: str | torch.dtype | None = None,
        check_interval: int = 10,
        verbose: bool = False,
        cast_nodes: bool = False,
        loss_scale: str | float | Mapping[str, Any] | None = "auto",
        max_consecutive_skips: int = 50,
    ) -> None:
        where = "AutocastHook"
        self.enabled = as_bool(enabled, f"{where}.enabled")
        self.device_type = (
            device_type_of(device_type, f"{where}.device_type")
            if self.enabled and device_type is not None
            else None
        )
        self.dtype = None if dtype is None else _as_autocast_dtype(dtype, self.enabled)
        self.cache_enabled = (
            None if cache_enabled is None else as_bool(cache_enabled, f"{where}.cache_enabled")
        )
        self.phases = _as_phases(phases)
        self.selection = Selection.make(patterns, class_patterns, exclude, where=where)
        self.output_dtype = (
            None if output_dtype is None else resolve_dtype(output_dtype, f"{where}.output_dtype")
        )
        self.check_interval = as_interval(check_interval, f"{where}.check_interval")
        self.verbose = as_bool(verbose, f"{where}.verbose")
        self.cast_nodes = as_bool(cast_nodes, f"{where}.cast_nodes")
        if self.output_dtype is not None and not self.selection.is_empty:
            raise ConfigError(
                f"{where}.output_dtype: got patterns as well, so that the model itself has no region; expected one of the "
                "two. Leave output_dtype out."
            )
        self.loss_scaling = LossScaling(
            LossScale.make(loss_scale, f"{where}.loss_scale"),
            as_interval(max_consecutive_skips, f"{where}.max_consecutive_skips"),
        )
        self.regions: Regions | None = None
        self._modules: list[nn.Module] = []
        self._phase = Phase()
        self._first_iteration_done = False

    def before_run(self, runner: Runner) -> None:
        """Resolve the nodes and install, before anything copies, wraps or compiles the model."""
        reset_implicit_downcasts()
        self._install(runner)
        self._scale_losses(runner)

    def before_train(self, runner: Runner) -> None:
        """Install, if ``before_run`` has not, and look at parameters stored since; the phase is training."""
        self._install(runner)
        self._scale_losses(runner)
        self._enter("train")

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Keep the loss scaler's state where it comes too early."""
        self.loss_scaling.keep_loaded(runner, checkpoint)

    def before_val(self, runner: Runner) -> None:
        """Install, if nothing before has; the phase is validation."""
        self._install(runner)
        self._enter("val")

    def after_val(self, runner: Runner) -> None:
        """Back in training, where a validation came in between."""
        self._enter("train")

    def before_test(self, runner: Runner) -> None:
        """Install, if nothing before has; the phase is testing."""
        self._install(runner)
        self._enter("test")

    def after_test(self, runner: Runner) -> None:
        """Back to training's setting."""
        self._enter("train")

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Update the loss scale; every ``check_interval`` iterations put back regions that are gone."""
        self.loss_scaling.after_iteration(runner)
        self._report_first_iteration(runner)
        if self.check_interval and self.every_n_train_iters(runner, self.check_interval):
            self._put_back(runner)

    def after_train(self, runner: Runner) -> None:
        """Say which of the last steps were skipped."""
        self.loss_scaling.after_training(runner)

    def after_val_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """After the first iteration of a run without training, say if no region was entered."""
        self._report_first_iteration(runner)

    def after_test_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """After the first iteration of a run without training, say if no region was entered."""
        self._report_first_iteration(runner)

    def remove(self) -> None:
        """Take the regions off the model and the loss scaler off the optim wrapper."""
        self.loss_scaling.remove()
        if self.regions is not None:
            self.regions.remove()
        self.regions = None

    def _enter(self, phase: str) -> None:
        self._phase.on = phase in self.phases
        self._phase.predicts = phase != "train"

    def _install(self, runner: Runner) -> None:
        if not self.enabled:
            return
        model = bare_model(runner)
        modules = list(model.modules())
        if self.regions is not None and self.regions.model is model and self._modules == modules:
            self._put_back(runner)
            return
        self.remove()
        self._modules = modules
        error, chosen = None, None
        try:
            _check_owners(runner)
            self.regions, chosen = self._plan(model, runner)
        except Exception as caught:  # raised again, on all ranks
            error = caught
        raise_together(error)
        if self.regions is not None and chosen is not None:
            self._put_in(runner, self.regions)
            self._report(runner, self.regions, chosen)
            if self.cast_nodes:
                self._store(runner, self.regions)

    def _scale_losses(self, runner: Runner) -> None:
        if self.regions is None:
            return
        dtypes = [node.dtype for node in self.regions.nodes] if "train" in self.phases else []
        hooks = (hook for hook in runner.hooks if isinstance(hook, AutocastHook) and hook is not self)
        self.loss_scaling.install(runner, dtypes, [hook.loss_scaling for hook in hooks])

    def _plan(self, model: nn.Module, runner: Runner) -> tuple[Regions, SelectionResult]:
        """Resolve the nodes and check all that can be wrong, without touching the model."""
        device_type = self._device_type(model)
        dtype, source = self._model_dtype(model, runner, device_type)
        nodes, chosen = resolve_nodes(model, dtype, source, self.selection)
        for node in nodes:
            if node.dtype is not None:
                check_autocast(device_type, node.dtype, _where(node))
        if self.cast_nodes:
            check_storable(runner, "AutocastHook.cast_nodes")
            check_castable(nodes, "AutocastHook.cast_nodes")
        regions = Regions(model, nodes, self._phase, device_type, self.cache_enabled)
        regions.check(self._others(runner), "AutocastHook")
        return regions, chosen

    def _others(self, runner: Runner) -> list[Regions]:
        """The regions of the run's other entries."""
        hooks = (hook for hook in runner.hooks if isinstance(hook, AutocastHook) and hook is not self)
        return [hook.regions for hook in hooks if hook.regions is not None]

    def _put_in(self, runner: Runner, regions: Regions) -> None:
        regions.install(self._others(runner))
        if self.output_dtype is not None:
            for method in regions.methods:
                if method.module is regions.model:
                    method.cast_output = CastPredictions(self.output_dtype)

    def _device_type(self, model: nn.Module) -> str:
        at = device_type_of_parameters(model)
        if at is not None and self.device_type is not None and at != self.device_type:
            raise ConfigError(
                f"AutocastHook.device_type: got {self.device_type!r} for a model on {at!r}; expected the model's device, or "
                "autocast would do nothing. Leave device_type out."
            )
        return self.device_type or at or "cpu"

    def _model_dtype(
        self, model: nn.Module, runner: Runner, device_type: str
    ) -> tuple[torch.dtype | None, str]:
        """The model-wide dtype and where it comes from."""
        config = {} if self.dtype is None else {"autocast_dtype": self.dtype}
        if not config and "autocast_dtype" in runner.cfg:
            config = {"autocast_dtype": runner.cfg["autocast_dtype"]}
        dtype = resolve_model_dtype(model, config)
        if config:
            return dtype, "config"
        if callable(getattr(model, "get_autocast_dtype", None)):
            return dtype, "model"
        return torch.get_autocast_dtype(device_type), "device default"

    def _store(self, runner: Runner, regions: Regions) -> None:
        changed = cast_nodes(regions.nodes)
        runner.logger.info(
            f"AutocastHook: {len(changed)} parameters and buffers stored in their node's dtype"
        )
        if any_rank(bool(changed)):
            renew_reducers(runner.model)
            mend_optimizer_states(runner)

    def _put_back(self, runner: Runner) -> None:
        if self.regions is None or not any_rank(bool(self.regions.missing())):
            return
        gone = gather_from_ranks([method.node for method in self.regions.missing()])
        self._put_in(runner, self.regions)
        names = list(dict.fromkeys(name for _, name in gone))
        runner.logger.warning(
            f"AutocastHook at iteration {runner.iter + 1}: {len(names)} regions were gone and are back: "
            f"{', '.join(map(repr, names[:8]))}"
        )

    def _report(self, runner: Runner, regions: Regions, chosen: SelectionResult) -> None:
        nodes = regions.nodes
        messages = chosen.dead_messages("AutocastHook")
        if not self.cast_nodes:
            messages += _narrow_by_hand(regions)
        messages += [
            f"AutocastHook: {name!r} is never called, its parent reads its weights: no region there. Name the parent."
            for name in never_called_nodes(regions.model, nodes)
        ]
        if not any(node.dtype is not None for node in nodes):
            messages.append(
                "AutocastHook: no node autocasts: the model's get_autocast_dtype() returns None, autocast_dtype is null, or "
                "patterns match nothing. Name a dtype, or set enabled=False."
            )
        for message in messages:
            runner.logger.warning(message)
        for message in _hints(runner, nodes, self.output_dtype, self.phases):
            runner.logger.warning(message)
        runner.logger.info(nodes_line(nodes, regions.device_type, self.phases))
        if self.verbose:
            runner.logger.info("\n" + nodes_table(nodes))

    def _report_first_iteration(self, runner: Runner) -> None:
        """Say so where nothing calls the forward of any node: some models override train_step and call their parts."""
        if self._first_iteration_done or self.regions is None:
            return
        self._first_iteration_done = True
        methods = [method for method in self.regions.methods if method.dtype is not None]
        if methods and not any(method.called for method in methods) and not is_compiled(runner):
            runner.logger.warning(
                f"AutocastHook: no forward of {', '.join(repr(m.node) for m in methods[:8])} was called in the first "
                "iteration, so nothing was autocast. Name the modules that the model calls in patterns."
            )


def _hints(
    runner: Runner, nodes: Sequence[Node], output_dtype: torch.dtype | None, phases: Sequence[str]
) -> list[str]:
    """What will surprise in this run, each with what to do."""
    dtypes = {node.dtype for node in nodes}
    hints = []
    predicts = ("val" in phases and runner.cfg.get("val_cfg")) or (
        "test" in phases and runner.cfg.get("test_cfg")
    )
    if torch.bfloat16 in dtypes and output_dtype is None and predicts:
        hints.append(
            "AutocastHook: predictions may come out in bfloat16, which breaks .numpy() in metrics. "
            "Set output_dtype='float32' if yours use it."
        )
    return hints


def _where(node: Node) -> str:
    return "AutocastHook" if node.name == ROOT else f"AutocastHook ({node.name})"


def _as_autocast_dtype(value: str | torch.dtype, enabled: bool) -> torch.dtype:
    where = "AutocastHook.dtype"
    try:
        dtype = resolve_dtype(value, where)
    except ConfigError:
        names = [name for name, dtype in DTYPES.items() if dtype in NARROW]
        near = difflib.get_close_matches(str(value).removesuffix("-mixed"), names, n=1, cutoff=0.5)
        advice = f"Did you mean {near[0]!r}?" if near else "Write dtype='bfloat16'."
        raise ConfigError(
            f"{where}: got {value!r}; expected one of {', '.join(map(repr, names))}. {advice}"
        ) from None
    if enabled and dtype not in NARROW:
        raise ConfigError(
            f"{where}: got {dtype_name(dtype)!r}; expected a dtype narrower than float32. Set enabled=False for full precision."
        )
    return dtype


def _as_phases(value: Sequence[str]) -> tuple[str, ...]:
    phases = (value,) if isinstance(value, str) else value
    if not isinstance(phases, (list, tuple)) or not phases or not all(phase in PHASES for phase in phases):
        raise ConfigError(
            f"AutocastHook.phases: got {value!r}; expected some of {', '.join(map(repr, PHASES))}. Write ['train', 'val', 'test']."
        )
    return tuple(dict.fromkeys(phases))


def _check_owners(runner: Runner) -> None:
    """Refuse a second owner of autocast: its scaler or its region would act twice.

    Raises:
        ConfigError: For AmpOptimWrapper, ApexOptimWrapper and DeepSpeed's strategy.
    """
    wrapper = getattr(runner, "optim_wrapper", None)
    wrappers = list(wrapper.values()) if isinstance(wrapper, OptimWrapperDict) else [wrapper]
    owners = [
        type(each).__name__ for each in wrappers if isinstance(each, (AmpOptimWrapper, ApexOptimWrapper))
    ]
    strategy = type(getattr(runner, "strategy", None)).__name__
    if "DeepSpeed" in strategy:
        owners.append(strategy)
    if owners:
        raise ConfigError(
            f"AutocastHook: got {owners[0]}, which opens autocast as well; expected one owner. "
            "Set optim_wrapper=dict(type='OptimWrapper', ...), or drop AutocastHook."
        )


def _narrow_by_hand(regions: Regions) -> list[str]:
    """One sentence where parameters of autocast nodes were cast by ``model.half()`` or ``.bfloat16()``, by no rule of ours."""
    names = tensor_names(regions.model)
    narrow = [
        names[id(tensor)][0]
        for node in regions.nodes
        if node.dtype is not None
        for tensor in tensors_of(node, regions.nodes)
        if isinstance(tensor, nn.Parameter) and tensor.dtype in NARROW and not claims_on(tensor)
    ]
    if not narrow:
        return []
    return [
        f"AutocastHook: {len(narrow)} parameters ({narrow[0]!r}, ...) are stored in 16 bits already; autocast expects float32 "
        "ones and the optimizer rounds its steps. Leave out model.half() or .bfloat16()."
    ]
