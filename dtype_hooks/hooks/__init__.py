"""The hooks, one registered class a file, and what they share of mmengine."""

from dtype_hooks.hooks.dtype_overrider import DtypeOverrider

__all__ = ["DtypeOverrider"]
