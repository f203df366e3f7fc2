"""Loading mmengine's checkpoints under torch's ``weights_only=True``.

mmengine 0.10 writes more into a checkpoint than tensors: its message hub is made of ``HistoryBuffer`` objects,
which hold numpy arrays and, through ``getattr``, their statistics functions. ``torch.load`` of torch 2.6 and
later refuses these, so that ``resume`` and ``load_from`` fail with "Weights only load failed".

Turning ``weights_only`` off would let the file run any code. This module names the few pieces that such a
checkpoint needs instead, and gives the dangerous ones in a narrow form:

``builtins.getattr``
    looks a name up among ``HistoryBuffer``'s registered statistics and nothing else.
``numpy.ndarray``
    cannot be called: ``ndarray((1,), 'O', buffer)`` makes object pointers out of a file's bytes.
``numpy.dtype``
    gives numbers, booleans, strings and times; no objects, no structures.

Everything else stays refused, ``os.system`` and ``builtins.eval`` included.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer
from mmengine.runner import CheckpointLoader

from dtype_hooks.errors import ConfigError

# numpy's kinds of elements whose bytes are only values: bool, integers, floats, complex, bytes, str, timedelta, datetime
_PLAIN_KINDS = "biufcSUmM"
_PLAIN_CODES = "?bhilqBHILQefdgFDGSUmM"
# numpy 1.x and 2.x keep it in different modules; both pickle scalars with it
_NUMPY_SCALAR: Any = np.float64(0).__reduce__()[0]
_REFUSED = re.compile(r"(?:Unsupported global: GLOBAL|unsupported GLOBAL) (\S+)")


@contextmanager
def allow_mmengine_checkpoints(extra: Iterable[Any] = ()) -> Iterator[None]:
    """Let mmengine load its own checkpoints, with ``weights_only`` left on.

    Inside the context every load that goes through mmengine's ``CheckpointLoader`` (``runner.train()``, ``val()`` and
    ``test()`` with ``resume`` or ``load_from``, ``Runner.load_checkpoint``, FlexibleRunner's, ``init_cfg`` of type
    ``Pretrained``, CheckpointHook's published weights) runs inside :func:`checkpoint_globals`. The context is meant to
    be held around a whole training, and yet torch's allow-list, which is one list for the process, is open only while
    mmengine reads a file: other ``torch.load`` calls of the training see the list they would see without us. That is
    why the loader is wrapped, rather than ``runner.load_or_resume`` (which misses the last two kinds of load) or the
    training as a whole. Leaving the context puts mmengine's loader back. It may be nested and used as a decorator.

    A checkpoint whose ``meta['config']`` is set (old mmcv wrote it) has it removed, with a warning: resuming would
    execute it as Python, whatever torch refused to unpickle.

    Args:
        extra: classes and functions, or ``(object, "module.name")`` pairs, that your checkpoints hold besides
            mmengine's own, as for ``torch.serialization.safe_globals``. Name only what you would let a file call.

    Raises:
        ConfigError: on entering, if ``extra`` holds something that is neither; on a load, if the file needs a
            global that is not allowed, or is not a checkpoint at all.

    Example:
        >>> with allow_mmengine_checkpoints():  # doctest: +SKIP
        ...     runner.train()
    """
    extra = _checked_extra(extra)
    original = CheckpointLoader.__dict__["load_checkpoint"]
    CheckpointLoader.load_checkpoint = staticmethod(_guarded(CheckpointLoader.load_checkpoint, extra))
    try:
        yield
    finally:
        CheckpointLoader.load_checkpoint = original


@contextmanager
def checkpoint_globals(extra: Iterable[Any] = ()) -> Iterator[None]:
    """Open torch's allow-list for what mmengine checkpoints hold; for a ``torch.load`` of your own.

    On leaving, torch's list is what it was: what the user had allowed before stays, the rest is gone. The
    statistics that a file brings for ``HistoryBuffer``, which keeps them on the class, are taken off again too.

    Args:
        extra: as for :func:`allow_mmengine_checkpoints`.

    Raises:
        ConfigError: if ``extra`` holds something that torch could not allow.

    Example:
        >>> with checkpoint_globals():  # doctest: +SKIP
        ...     checkpoint = torch.load("work_dirs/run/iter_100.pth")
    """
    already = torch.serialization.get_safe_globals()
    added = [item for item in (*_mmengine_globals(), *_checked_extra(extra)) if item not in already]
    statistics = _statistics()
    before = dict(statistics)
    try:
        with torch.serialization.safe_globals(added):
            yield
    finally:
        statistics.clear()
        statistics.update(before)


def _guarded(load: Callable[..., Any], extra: tuple[Any, ...]) -> Callable[..., Any]:
    """``load``, run with the allow-list open and its refusals put into words."""

    def load_checkpoint(filename: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with checkpoint_globals(extra):
                checkpoint = load(filename, *args, **kwargs)
        except OSError:
            raise
        except Exception as error:  # a file of another kind makes the unpickler fail in any way
            raise ConfigError(_refusal(filename, error)) from error
        return _without_code(filename, checkpoint)

    return load_checkpoint


def _refusal(filename: Any, error: BaseException) -> str:
    found = _REFUSED.search(str(error))
    if found is None:
        detail = f"{type(error).__name__}: {error}".split("WeightsUnpickler error:")[-1].split(
            "Check the doc"
        )[0]
        return (
            f"checkpoint: got {str(filename)!r}; expected a file written by mmengine's CheckpointHook or torch.save "
            f"that loads with weights_only=True ({' '.join(detail.split())}); give another file"
        )
    name = found.group(1)
    return (
        f"checkpoint: got {str(filename)!r}, which needs {name!r}; expected tensors and what mmengine itself saves; "
        f"if you trust the file, allow that one name: torch.serialization.add_safe_globals([{name.split('.')[-1]}]) "
        f"in a module of custom_imports, or allow_mmengine_checkpoints(extra=[...])"
    )


def _without_code(filename: Any, checkpoint: Any) -> Any:
    """Take ``meta['config']`` off: ``Runner.resume`` gives it to ``Config.fromstring``, which executes it."""
    meta = checkpoint.get("meta") if isinstance(checkpoint, dict) else None
    if isinstance(meta, dict) and meta.pop("config", None) is not None:
        warnings.warn(
            f"{filename}: meta['config'] is not read, since mmengine would execute it when resuming"
        )
    return checkpoint


def _checked_extra(extra: Iterable[Any]) -> tuple[Any, ...]:
    if isinstance(extra, str) or not isinstance(extra, Iterable):
        raise ConfigError(_not_allowable("extra", extra))
    items = tuple(extra)
    for index, item in enumerate(items):
        if not _is_allowable(item):
            raise ConfigError(_not_allowable(f"extra[{index}]", item))
    return items


def _is_allowable(item: Any) -> bool:
    if isinstance(item, tuple):
        return len(item) == 2 and callable(item[0]) and isinstance(item[1], str)
    return callable(item) and hasattr(item, "__module__") and hasattr(item, "__qualname__")


def _not_allowable(where: str, value: Any) -> str:
    return (
        f"allow_mmengine_checkpoints.{where}: got {value!r}; expected a list of classes, functions or "
        "(object, 'module.name') pairs; import the class and pass it itself"
    )


def _mmengine_globals() -> list[Any]:
    """What mmengine's checkpoints hold, each under the names by which numpy 1.x and 2.x pickle it."""
    named: list[Any] = [
        (_statistic, "builtins.getattr"),
        (_plain_dtype, "numpy.dtype"),
        (_ndarray, "numpy.ndarray"),
        (_empty_bytes, "builtins.bytes"),
        # torch asks whether the object that it builds is of an allowed class. No pickle can name this one: the
        # names in a pickle end at the end of their line.
        (np.ndarray, "numpy\nndarray"),
    ]
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        named += [(_empty_array, f"{module}._reconstruct"), (_scalar, f"{module}.scalar")]
    return [
        HistoryBuffer,
        ConfigDict,
        *named,
        *sorted({type(np.dtype(code)) for code in _PLAIN_CODES}, key=repr),
    ]


def _statistics() -> dict[str, Callable[..., Any]]:
    """HistoryBuffer's registered statistics; its four own ones only come with the first instance."""
    return HistoryBuffer()._statistics_methods


def _statistic(owner: Any, name: Any) -> Any:
    """Stand in for ``getattr`` in ``getattr(HistoryBuffer, 'mean')``."""
    if owner is not HistoryBuffer or not isinstance(name, str) or name not in _statistics():
        raise pickle.UnpicklingError(f"getattr({owner!r}, {name!r}) is no statistic of HistoryBuffer")
    return _statistics()[name]


def _plain_dtype(code: Any, align: Any = False, copy: Any = False) -> np.dtype:
    """Stand in for ``numpy.dtype``: ``('f8', False, True)`` is how numpy pickles float64."""
    dtype = np.dtype(code, False, True) if isinstance(code, str) else None
    if dtype is None or dtype.kind not in _PLAIN_KINDS:
        raise pickle.UnpicklingError(f"numpy.dtype({code!r}) is not a plain number, string or time")
    return dtype


def _ndarray(*args: Any, **kwargs: Any) -> Any:
    """Stand in for the name ``numpy.ndarray``, which a checkpoint only hands to ``_reconstruct``."""
    raise pickle.UnpicklingError("numpy.ndarray is called, which no array saved by torch.save does")


def _empty_bytes() -> bytes:
    """Stand in for ``bytes``, which pickle calls for the data of an empty array; other bytes it encodes."""
    return b""


def _empty_array(subtype: Any, shape: Any, code: Any) -> np.ndarray:
    """Stand in for numpy's ``_reconstruct``: the empty array that ``__setstate__`` then fills."""
    if subtype is not _ndarray:
        raise pickle.UnpicklingError(f"numpy's _reconstruct({subtype!r}) is not a plain array")
    return np.empty(0, np.int8)


def _scalar(dtype: Any, raw: Any = b"") -> Any:
    """Stand in for numpy's ``scalar``."""
    if not isinstance(dtype, np.dtype) or dtype.kind not in _PLAIN_KINDS or dtype.fields is not None:
        raise pickle.UnpicklingError(f"numpy's scalar({dtype!r}) is not a plain number, string or time")
    return _NUMPY_SCALAR(dtype, raw)
