"""Which dtype each node runs in, resolved once, and warnings for ops that run in a narrower one.

A *node* is a named submodule. Its dtype is both the dtype that it autocasts in and, where a caller casts nodes, the dtype of
its parameters. ``None`` is a node that keeps the dtype it was built in and runs without autocast.

A model takes part by what it defines, all of it optional::

    class Encoder(nn.Module):
        disable_autocast = True                 # this node stays out

    class Decoder(nn.Module):
        def get_autocast_dtype(self):           # this node's own dtype, or None for the model's
            return torch.float16

    class Model(nn.Module):
        def get_autocast_dtype(self):           # of the root: the model-wide dtype; None pins "no autocast"
            return torch.bfloat16

Torch alone; mmengine's AutocastHook builds on it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn

from dtype_hooks.core.dtypes import dtype_name, resolve_dtype
from dtype_hooks.errors import ConfigError

__all__ = [
    "node_scope",
    "reset_implicit_downcasts",
    "resolve_model_dtype",
    "resolve_node_dtype",
    "warn_implicit_downcast",
]

_ABSENT = object()


class _Scope(NamedTuple):
    node: str | None
    dtype: torch.dtype | None


_scope: ContextVar[_Scope | None] = ContextVar("dtype_hooks_node_scope", default=None)

_reported: set[tuple[str | None, str]] = set()
"""The one registry of (node, op) that have been warned of; :func:`reset_implicit_downcasts` empties it at a run's start."""


def resolve_model_dtype(model: nn.Module, model_config: Any) -> torch.dtype | None:
    """The model-wide dtype.

    ``autocast_dtype`` of the config wins over ``model.get_autocast_dtype()``. An absent ``autocast_dtype`` is not the
    same as None: None says "no autocast". A model whose ``get_autocast_dtype()`` returns None has pinned its numerics, and
    a config may only agree; a model without the method has not.

    Args:
        model: The bare model.
        model_config: A mapping, or an object with attributes; None for no config.

    Returns:
        The dtype to autocast in, or None for no autocast.

    Raises:
        ConfigError: For a dtype that is none, or a config that contradicts a model with pinned numerics.
    """
    configured = _configured(model_config)
    own = _own_dtype(model)
    if configured is _ABSENT:
        return None if own is _ABSENT else own
    wanted = None if configured is None else resolve_dtype(configured, "autocast_dtype")
    if own is None and wanted is not None:
        raise ConfigError(
            f"autocast_dtype: got {dtype_name(wanted)!r} for {type(model).__name__}, whose get_autocast_dtype() returns None: "
            "its numerics are pinned; expected None. Leave autocast_dtype out."
        )
    return wanted


def resolve_node_dtype(submodule: nn.Module, model_dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype of a node.

    Args:
        submodule: The node.
        model_dtype: What :func:`resolve_model_dtype` returned.

    Returns:
        None where ``submodule.disable_autocast`` is true, else its own ``get_autocast_dtype()`` where that
        returns one, else ``model_dtype``.

    Raises:
        ConfigError: For an own dtype that is none.
    """
    if opts_out(submodule):
        return None
    own = _own_dtype(submodule)
    return model_dtype if own is _ABSENT or own is None else own


def opts_out(submodule: nn.Module) -> bool:
    """Whether ``disable_autocast`` is true: an attribute, a property or a method without arguments."""
    opted_out = getattr(submodule, "disable_autocast", False)
    return bool(opted_out() if callable(opted_out) else opted_out)


def has_own_dtype(submodule: nn.Module) -> bool:
    """Whether the module's own ``get_autocast_dtype()`` returns a dtype."""
    return _own_dtype(submodule) not in (_ABSENT, None)


@contextmanager
def node_scope(node_name: str | None, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Name the node whose forward runs inside, and its resolved dtype; scopes nest, and threads have their own.

    As ``torch.autocast``'s, the state belongs to the thread: a generator that yields inside shows its scope to whoever
    resumes it. Does nothing while dynamo traces, which cannot set a context variable: put it around the compiled call.

    Args:
        node_name: Dotted name, or None for a node without one.
        dtype: What :func:`resolve_node_dtype` returned for it.
    """
    if torch.compiler.is_compiling():
        yield
        return
    before = _scope.get()
    _scope.set(_Scope(node_name, dtype))
    try:
        yield
    finally:
        # Not by its token: a generator may be closed in another context, where reset() raises.
        _scope.set(before)


def warn_implicit_downcast(op: str, src: torch.dtype, dst: torch.dtype) -> None:
    """Say, once for each node and op, that the op is about to run a ``src`` input in a ``dst`` that cannot hold it.

    There is nothing to report where ``dst`` holds every value of ``src``, or is the node's own dtype: a custom op inside a
    compiled forward sees no autocast and gets exactly what the node asked for. Silent while dynamo traces, where a
    warning would break the graph. Outside any scope the warning names the op alone.

    Args:
        op: The op's name.
        src: Dtype of its input.
        dst: Dtype that it is about to run in.
    """
    if torch.compiler.is_compiling() or holds(dst, src):
        return
    scope = _scope.get()
    node = scope.node if scope is not None else None
    if (scope is not None and dst is scope.dtype) or (node, op) in _reported:
        return
    _reported.add((node, op))
    where = op if node is None else f"node {node!r}: {op}"
    text = (
        f"{where} runs a {dtype_name(src)} input in {dtype_name(dst)}, which cannot hold all of its values."
    )
    caller = sys._getframe(1)
    # Without the caller's registry, in which Python's default filter would find the warning of an earlier run.
    warnings.warn_explicit(text, UserWarning, caller.f_code.co_filename, caller.f_lineno)


def reset_implicit_downcasts() -> None:
    """Let every node and op warn once more; for the start of a run."""
    _reported.clear()


def holds(dst: torch.dtype, src: torch.dtype) -> bool:
    """Whether every finite value of ``src`` is one of ``dst``: precision and range, both ends.

    float16 and bfloat16 do not hold each other; bfloat16 holds int8, not int16; a complex dtype is held by one whose parts
    hold its parts; bool is held by every dtype and holds itself alone. Storage formats that torch gives no limits for (fewer
    than 8 bits) count as held.
    """
    if src is dst or src is torch.bool:
        return True
    if dst is torch.bool or (src.is_complex and not dst.is_complex):
        return False
    try:
        return _holds_reals(dst.to_real(), src.to_real())
    except (TypeError, NotImplementedError):  # of finfo and iinfo
        return True


def _holds_reals(dst: torch.dtype, src: torch.dtype) -> bool:
    if src.is_floating_point:
        return dst.is_floating_point and _holds_floats(torch.finfo(dst), torch.finfo(src))
    smallest, largest = torch.iinfo(src).min, torch.iinfo(src).max
    if dst.is_floating_point:
        wide = torch.finfo(dst)
        # Integers without gaps go up to 2/eps. The ends are 0 or powers of two, less one at the top.
        return max(largest, -smallest) <= 2 / _eps(wide) and max(largest, -smallest) <= wide.max
    return torch.iinfo(dst).min <= smallest and largest <= torch.iinfo(dst).max


def _holds_floats(wide: torch.finfo, narrow: torch.finfo) -> bool:
    return (
        _eps(wide) <= _eps(narrow)
        and wide.max >= narrow.max
        and wide.smallest_normal * _eps(wide) <= narrow.smallest_normal * _eps(narrow)
    )


def _eps(info: torch.finfo) -> float:
    """The step from 1 to the next value. torch's is half of it for float8_e5m2fnuz, which has 2 bits of mantissa (2.13)."""
    return 0.25 if info.dtype == "float8_e5m2fnuz" else info.eps


def _configured(model_config: Any) -> Any:
    if isinstance(model_config, Mapping):
        return model_config.get("autocast_dtype", _ABSENT)
    return getattr(model_config, "autocast_dtype", _ABSENT)


def _own_dtype(module: nn.Module) -> Any:
    method = getattr(module, "get_autocast_dtype", None)
    if not callable(method):
        return _ABSENT
    value = method()
    return None if value is None else resolve_dtype(value, f"{type(module).__name__}.get_autocast_dtype()")
