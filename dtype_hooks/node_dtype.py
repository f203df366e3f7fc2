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
    opted_out = getattr(submodule, "disable_autocast", False)
    if opted_out() if callable(opted_out) else opted_out:
        return None
    own = _own_dtype(submodule)
    return model_dtype if own is _ABSENT or own is None else own


@contextmanager
def node_scope(node_name: str | None, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Name the node whose forward runs inside, and its resolved dtype; scopes nest, and threads have their own.

    Args:
        node_name: Dotted name, or None for a node without one.
        dtype: What :func:`resolve_node_dtype` returned for it.
    """
    token = _scope.set(_Scope(node_name, dtype))
    try:
        yield
    finally:
        _scope.reset(token)


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
    warnings.warn(
        f"{where} runs a {dtype_name(src)} input in {dtype_name(dst)}, which cannot hold all of its values.",
        stacklevel=2,
    )


def reset_implicit_downcasts() -> None:
    """Let every node and op warn once more; for the start of a run."""
    _reported.clear()


def holds(dst: torch.dtype, src: torch.dtype) -> bool:
    """Whether every finite value of the floating dtype ``src`` is one of ``dst``: precision and range, both ends.

    float16 and bfloat16 do not hold each other. A dtype that is not floating is held by everything.
    """
    if not (src.is_floating_point and dst.is_floating_point):
        return True
    wide, narrow = torch.finfo(dst), torch.finfo(src)
    return (
        wide.eps <= narrow.eps
        and wide.max >= narrow.max
        and wide.smallest_normal * wide.eps <= narrow.smallest_normal * narrow.eps
    )


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
