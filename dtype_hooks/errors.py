"""Errors that this package raises.

::

    ValueError
    └── DtypeHooksError          everything below; catch this one
        ├── ConfigError          an argument or a config key that cannot be used
        ├── SelectionError       patterns that match nothing (``strict=True``) or claim a method twice
        ├── OverrideError        a module or method that cannot compute, or be stored, in the asked dtype
        ├── DriftError           what was put in place is no longer there (``on_drift="raise"``)
        ├── LossScaleError       gradients went past the loss scaler, or no scale makes them finite
        ├── TraceError           a module that torch.fx cannot trace, or whose output has no one gradient to start from
        ├── NonFiniteError       a recorded step made NaN or Inf (``on_nonfinite="raise"``)
        └── MissingDependencyError   an optional package is absent (also an ``ImportError``)

All derive from :class:`ValueError` because mmengine's ``Runner.call_hook`` re-raises a ``TypeError`` of a
hook without its traceback.

Every message has the form ``<where>: got <repr>; expected <set or range>; <one thing to do>``.
"""

from __future__ import annotations


class DtypeHooksError(ValueError):
    """Base class of every error raised on purpose by this package."""


class ConfigError(DtypeHooksError):
    """An argument or a config key that cannot be used."""


class SelectionError(DtypeHooksError):
    """Patterns that match nothing under ``strict=True``, or two rules that claim one method."""


class OverrideError(DtypeHooksError):
    """A module or method that cannot compute, or be stored, in the asked dtype."""


class DriftError(DtypeHooksError):
    """Overrides or stored dtypes are no longer what they were put in place as (``on_drift="raise"``)."""


class TraceError(DtypeHooksError):
    """A module that torch.fx cannot trace, or whose output is not one tensor that needs a gradient."""


class LossScaleError(DtypeHooksError):
    """Gradients that cannot be scaled, went past the loss scaler, or stay non-finite at every scale."""


class NonFiniteError(DtypeHooksError):
    """A step made NaN or Inf (``on_nonfinite="raise"``); the message names the function that did."""


class MissingDependencyError(DtypeHooksError, ImportError):
    """An optional package is absent; the message says what to install."""
