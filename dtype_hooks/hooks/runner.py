"""What the hooks need of mmengine's runner."""

from __future__ import annotations

from typing import Any

from mmengine.model import is_model_wrapper
from mmengine.runner import Runner
from torch import nn

from dtype_hooks.core.compiling import has_compiled_parts
from dtype_hooks.core.naming import bare_module


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
