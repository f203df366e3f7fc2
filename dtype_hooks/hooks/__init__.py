"""The hooks, one registered class a file, and what they share of mmengine."""

from dtype_hooks.hooks.autocast import AutocastHook
from dtype_hooks.hooks.checkpoints import allow_mmengine_checkpoints, checkpoint_globals
from dtype_hooks.hooks.config import prepare_config
from dtype_hooks.hooks.dtype_overrider import DtypeOverrider
from dtype_hooks.hooks.launch import build_runner
from dtype_hooks.hooks.scale_tracker import ScaleTracker

__all__ = [
    "AutocastHook",
    "DtypeOverrider",
    "ScaleTracker",
    "allow_mmengine_checkpoints",
    "build_runner",
    "checkpoint_globals",
    "prepare_config",
]
