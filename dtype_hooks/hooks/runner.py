"""What the hooks need of mmengine's runner."""

from __future__ import annotations

from typing import Any

from mmengine.model import is_model_wrapper
from mmengine.runner import Runner
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtype_hooks.core.compiling import has_compiled_parts
from dtype_hooks.core.data_parallel import sharded_by
from dtype_hooks.core.naming import bare_module
from dtype_hooks.errors import OverrideError


def bare_model(runner: Runner) -> nn.Module:
    """The user's model, without DDP, FSDP, ``torch.compile`` or a wrapper registered in mmengine around it."""
    model: Any = bare_module(runner.model)
    while is_model_wrapper(model):
        inner = getattr(model, "module", None)
        if (
            inner is None
        ):  # MMDeepSpeedEngineWrapper keeps the engine under .model, and that the model under .module
            inner = model.model
        model = bare_module(inner)
    return model


def is_compiled(runner: Runner) -> bool:
    """Whether calls may run as compiled code: ``compile`` in the config, or ``torch.compile`` in the model."""
    return bool(runner.cfg.get("compile")) or has_compiled_parts(runner.model)


def check_storable(runner: Runner, where: str) -> None:
    """Refuse stored casts under wrappers that keep parameters in buffers of their own.

    Raises:
        OverrideError: For FSDP, DeepSpeed and every wrapper but DDP.
    """
    outermost: Any = bare_module(runner.model)
    keeper = sharded_by(runner.model)
    if keeper is None and is_model_wrapper(outermost) and not isinstance(outermost, DistributedDataParallel):
        keeper = type(outermost).__name__
    if keeper is not None:
        raise OverrideError(
            f"{where}: got a model wrapped by {keeper}, which keeps parameters of one dtype in "
            "buffers of its own; expected DDP or no wrapper. Cast the modules before they are wrapped, or leave "
            f"{where.rpartition('.')[2]} out: computing in the dtype needs no stored cast."
        )
