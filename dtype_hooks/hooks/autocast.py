"""AutocastHook: mixed precision on any device as one dict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.optim import AmpOptimWrapper, ApexOptimWrapper, OptimWrapperDict
from mmengine.runner import Runner
from torch import nn

from dtype_hooks.core.autocast import check_autocast, device_type_of, device_type_of_parameters
from dtype_hooks.core.autocast_method import Phase
from dtype_hooks.core.data_parallel import renew_reducers
from dtype_hooks.core.dtypes import dtype_name, resolve_dtype
from dtype_hooks.core.nodes import Node, Regions, cast_nodes, resolve_nodes
from dtype_hooks.core.selection import Selection, SelectionResult
from dtype_hooks.core.storage import claims_on
from dtype_hooks.core.validation import as_bool, as_interval
from dtype_hooks.errors import ConfigError
from dtype_hooks.hooks.optimizers import mend_optimizer_states
from dtype_hooks.hooks.predictions import CastPredictions
from dtype_hooks.hooks.ranks import any_rank, raise_together
from dtype_hooks.hooks.registry import register_hook
from dtype_hooks.hooks.runner import bare_model, check_storable
from dtype_hooks.node_dtype import reset_implicit_downcasts, resolve_model_dtype, warn_implicit_downcast
from dtype_hooks.report.nodes import nodes_line, nodes_table

PHASES = ("train", "val", "test")


@register_hook
class AutocastHook(Hook):
    """Run the model's forward, loss included, in mixed precision: a ``torch.autocast`` region on any device.

    Each forward of the bare model gets a fresh region; the backward and the optimizer run outside. Parameters stay in
    float32 (master weights) unless ``cast_nodes``. Submodules may have a dtype of their own or stay out: see
    :mod:`dtype_hooks.node_dtype` for what a model can define, and ``exclude``.

    **Changes the numbers of training**: yes, that is its purpose; ``enabled=False`` changes nothing at all.

    **Stages**: resolves every node and installs in ``before_run``; ``before_train``, ``before_val`` and ``before_test`` install
    as well where that has not happened, and say which phase it is. ``after_train_iter`` checks every ``check_interval``
    iterations that the regions are in place and puts them back. Regions stay after training.

    **With DtypeOverrider**, in either order: the override wins inside its modules.

    **State in checkpoints**: none. **Logged keys**: none.

    Args:
        device_type: ``"cpu"``, ``"cuda"``...; an index is stripped. None takes that of the parameters.
        dtype: ``"bfloat16"`` or ``"float16"``: the config's word on the model-wide dtype. None asks the config's top-level
            ``autocast_dtype``, then the model's ``get_autocast_dtype()``, and else takes the device's default.
        enabled: False installs nothing.
        cache_enabled: Whether casts of weights are kept for the length of a forward; None leaves torch's setting. Set
            False under CUDA-graph capture.
        phases: In which of ``train``, ``val`` and ``test`` regions are opened.
        patterns: Regexes on dotted names: regions on these submodules alone, none on the model.
        class_patterns: The same on class names.
        exclude: Regexes on dotted names of submodules that stay out: autocast is off inside, and floating arguments come in
            the dtype that their parameters are stored in.
        output_dtype: What predictions are cast to (in val and test, and for ``mode="predict"``); None leaves them. bfloat16
            predictions break ``.numpy()`` in many metrics.
        cast_nodes: Also store each node's parameters and floating buffers in its dtype.
        check_interval: In iterations; 0 is never.
        verbose: Log a table of the nodes.

    Raises:
        ConfigError: When built, for an argument that cannot be used; at the start, for a device or dtype without autocast, a
            contradiction with the model, or a second owner of autocast.

    Example:
        >>> hook = dict(type="AutocastHook", dtype="bfloat16", verbose=True)
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
    ) -> None:
        where = "AutocastHook"
        self.enabled = as_bool(enabled, f"{where}.enabled")
        self.device_type = (
            None if device_type is None else device_type_of(device_type, f"{where}.device_type")
        )
        self.dtype = None if dtype is None else _as_autocast_dtype(dtype)
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
        self.regions: Regions | None = None
        self._model: nn.Module | None = None
        self._phase = Phase()

    def before_run(self, runner: Runner) -> None:
        """Resolve the nodes and install, before anything copies, wraps or compiles the model."""
        reset_implicit_downcasts()
        self._install(runner)

    def before_train(self, runner: Runner) -> None:
        """Install, if ``before_run`` has not; the phase is training."""
        self._install(runner)
        self._enter("train")

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
        """Put back regions that are gone, every ``check_interval`` iterations."""
        if self.check_interval and self.every_n_train_iters(runner, self.check_interval):
            self._put_back(runner)

    def remove(self) -> None:
        """Take the regions off the model."""
        if self.regions is not None:
            self.regions.remove()
        self.regions = self._model = None

    def _enter(self, phase: str) -> None:
        self._phase.on = phase in self.phases
        self._phase.predicts = phase != "train"

    def _install(self, runner: Runner) -> None:
        if not self.enabled:
            return
        model = bare_model(runner)
        if self._model is model:
            self._put_back(runner)
            return
        self.remove()
        error: Exception | None = None
        try:
            _check_owners(runner)
            self._install_on(model, runner)
        except Exception as caught:  # raised again, on all ranks
            error = caught
        raise_together(error)

    def _install_on(self, model: nn.Module, runner: Runner) -> None:
        device_type = self._device_type(model)
        dtype, source = self._model_dtype(model, runner, device_type)
        nodes, chosen = resolve_nodes(model, dtype, source, self.selection)
        for node in nodes:
            if node.dtype is not None:
                check_autocast(device_type, node.dtype, f"AutocastHook ({node.name})")
        if self.cast_nodes:
            check_storable(runner)
        regions = Regions(nodes, self._phase)
        regions.install(device_type, self.cache_enabled, "AutocastHook")
        self.regions, self._model = regions, model
        self._cast_predictions(model)
        self._report(runner, model, device_type, chosen)
        if self.cast_nodes:
            self._store(runner, nodes, model)

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

    def _cast_predictions(self, model: nn.Module) -> None:
        """Let the model's own region, or a stand-in without one, cast what it predicts."""
        if self.output_dtype is None or self.regions is None:
            return
        root = next((method for method in self.regions.methods if method.module is model), None)
        if root is None:
            raise ConfigError(
                "AutocastHook.output_dtype: got patterns as well, so that the model itself has no region; expected one of the "
                "two. Leave output_dtype out."
            )
        root.cast_output = CastPredictions(self.output_dtype)

    def _store(self, runner: Runner, nodes: list[Node], model: nn.Module) -> None:
        changed = cast_nodes(nodes, model)
        for node, tensor in changed:
            warn_implicit_downcast(f"cast_nodes ({node})", torch.float32, tensor.dtype)
        runner.logger.info(
            f"AutocastHook: {len(changed)} parameters and buffers stored in their node's dtype"
        )
        if any_rank(bool(changed)):
            renew_reducers(runner.model)
            mend_optimizer_states(runner)

    def _put_back(self, runner: Runner) -> None:
        if self.regions is None or not any_rank(bool(self.regions.missing())):
            return
        names = [method.node for method in self.regions.missing()]
        self.regions.install(self._device_type(bare_model(runner)), self.cache_enabled, "AutocastHook")
        self._cast_predictions(bare_model(runner))
        runner.logger.warning(
            f"AutocastHook at iteration {runner.iter + 1}: regions were gone and are back: {names[:8]}"
        )

    def _report(self, runner: Runner, model: nn.Module, device_type: str, chosen: SelectionResult) -> None:
        nodes = self.regions.nodes if self.regions is not None else []
        for message in (*chosen.dead_messages("AutocastHook"), *_narrow_by_hand(model)):
            runner.logger.warning(message)
        if not any(node.dtype is not None for node in nodes):
            runner.logger.warning(
                "AutocastHook: no node autocasts: the model's get_autocast_dtype() returns None, autocast_dtype is null, or "
                "patterns match nothing. Name a dtype, or set enabled=False."
            )
        runner.logger.info(nodes_line(nodes, device_type, self.phases))
        if self.verbose:
            runner.logger.info("\n" + nodes_table(nodes))


def _as_autocast_dtype(value: str | torch.dtype) -> torch.dtype:
    where = "AutocastHook.dtype"
    if isinstance(value, bool) or not isinstance(value, (str, torch.dtype)):
        raise ConfigError(
            f"{where}: got {value!r}; expected 'bfloat16' or 'float16'. Write dtype='bfloat16'."
        )
    if (isinstance(value, str) and value.endswith(("-mixed", "-true"))) or value in ("16", "32"):
        raise ConfigError(
            f"{where}: got {value!r}; expected 'bfloat16' or 'float16' (bf16, fp16, half). Write dtype='bfloat16'."
        )
    dtype = resolve_dtype(value, where)
    if dtype in (torch.float32, torch.float64):
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


def _narrow_by_hand(model: nn.Module) -> list[str]:
    """One sentence where parameters were cast by ``model.half()`` or ``.bfloat16()``, not by a rule of ours."""
    narrow = [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dtype in (torch.float16, torch.bfloat16) and not claims_on(parameter)
    ]
    if not narrow:
        return []
    return [
        f"AutocastHook: {len(narrow)} parameters ({narrow[0]!r}, ...) are stored in 16 bits already; autocast expects float32 "
        "ones and the optimizer rounds its steps. Leave out model.half() or .bfloat16()."
    ]
