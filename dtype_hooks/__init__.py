"""Numerics hooks for mmengine trainers: which layer computes in which dtype, and proof that it did.

Importing this package registers its hooks in mmengine's ``HOOKS``, for use in a config::

    custom_imports = dict(imports=["dtype_hooks"])
    custom_hooks = [dict(type="DtypeOverrider", patterns=["norm"], dtype="float32", verbose=True)]

Without mmengine, or where it cannot be imported, the functions on torch alone work all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from dtype_hooks import node_dtype
from dtype_hooks.core.autocast import autocast
from dtype_hooks.core.dtypes import DTYPES, resolve_dtype
from dtype_hooks.core.override import OverrideHandle, override_dtype
from dtype_hooks.errors import (
    ConfigError,
    DriftError,
    DtypeHooksError,
    LossScaleError,
    MissingDependencyError,
    NonFiniteError,
    OverrideError,
    SelectionError,
    TraceError,
)
from dtype_hooks.scales.analysis import analyse_module
from dtype_hooks.scales.interpreter import ScalePair, ScaleTrackingInterpreter
from dtype_hooks.scales.record import Scales
from dtype_hooks.scales.recorder import track_scales
from dtype_hooks.version import __version__

if TYPE_CHECKING:
    from dtype_hooks.hooks import (
        AutocastHook,
        DtypeOverrider,
        ScaleTracker,
        allow_mmengine_checkpoints,
        build_runner,
        checkpoint_globals,
        prepare_config,
    )

__all__ = [
    "DTYPES",
    "AutocastHook",
    "ConfigError",
    "DriftError",
    "DtypeHooksError",
    "DtypeOverrider",
    "LossScaleError",
    "MissingDependencyError",
    "NonFiniteError",
    "OverrideError",
    "OverrideHandle",
    "ScalePair",
    "ScaleTracker",
    "ScaleTrackingInterpreter",
    "Scales",
    "SelectionError",
    "TraceError",
    "__version__",
    "allow_mmengine_checkpoints",
    "analyse_module",
    "autocast",
    "build_runner",
    "checkpoint_globals",
    "node_dtype",
    "override_dtype",
    "prepare_config",
    "resolve_dtype",
    "track_scales",
]

_NEEDS_MMENGINE = frozenset(
    {
        "AutocastHook",
        "DtypeOverrider",
        "ScaleTracker",
        "allow_mmengine_checkpoints",
        "build_runner",
        "checkpoint_globals",
        "prepare_config",
    }
)

try:
    import mmengine.hooks
    import mmengine.runner  # noqa: F401
except ImportError as error:  # absent, or opencv-python without libGL
    _mmengine_error: ImportError | None = error
    __all__ = [name for name in __all__ if name not in _NEEDS_MMENGINE]
else:
    _mmengine_error = None
    from dtype_hooks.hooks import (
        AutocastHook,
        DtypeOverrider,
        ScaleTracker,
        allow_mmengine_checkpoints,
        build_runner,
        checkpoint_globals,
        prepare_config,
    )


def __getattr__(name: str) -> NoReturn:
    if name in _NEEDS_MMENGINE:
        raise MissingDependencyError(
            f"dtype_hooks.{name}: got no usable mmengine ({_mmengine_error}); expected mmengine >= 0.10.7. "
            "Run: pip install 'mmengine>=0.10.7' (where libGL.so.1 is missing: apt-get install libgl1, or "
            "pip install --force-reinstall --no-deps opencv-python-headless)."
        ) from _mmengine_error
    raise AttributeError(f"module 'dtype_hooks' has no attribute {name!r}")
