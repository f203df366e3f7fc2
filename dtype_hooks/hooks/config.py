"""What a config needs before mmengine's Runner reads it.

:func:`prepare_config` is the one function that a training script calls::

    from mmengine.config import Config
    from mmengine.runner import Runner
    from dtype_hooks import prepare_config

    runner = Runner.from_cfg(prepare_config(Config.fromfile("my_config.py")))

:func:`merge_options` is ``Config.merge_from_dict`` for keys typed by hand.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from mmengine.config import Config
from mmengine.config.lazy import LazyAttr, LazyObject
from mmengine.hooks import Hook
from mmengine.runner import FlexibleRunner, Runner

from dtype_hooks.errors import ConfigError

_LAZY = (LazyObject, LazyAttr)
ConfigT = TypeVar("ConfigT", bound=Any)


class _OldKey(NamedTuple):
    """A top-level key of mmcv's runners, which mmengine ignores without a word."""

    name: str
    replacement: str
    silenced_by: str = (
        ""  # a dotted key: where it stands, the old name is likely a variable of the config file
    )


_OLD_KEYS = (
    _OldKey("fp16", "custom_hooks = [dict(type='AutocastHook', dtype='float16')], on any device"),
    _OldKey("optimizer", "optim_wrapper = dict(optimizer=...)", "optim_wrapper"),
    _OldKey(
        "optimizer_config", "optim_wrapper = dict(clip_grad=..., accumulative_counts=...)", "optim_wrapper"
    ),
    _OldKey("lr_config", "param_scheduler = [...]", "param_scheduler"),
    _OldKey("runner", "train_cfg = dict(by_epoch=..., max_epochs=... or max_iters=...)"),
    _OldKey("total_epochs", "train_cfg = dict(by_epoch=True, max_epochs=...)", "train_cfg"),
    _OldKey("evaluation", "val_evaluator, val_dataloader, val_cfg and train_cfg = dict(val_interval=...)"),
    _OldKey("checkpoint_config", "default_hooks = dict(checkpoint=...)", "default_hooks.checkpoint"),
    _OldKey("log_config", "default_hooks = dict(logger=...) and visualizer", "default_hooks.logger"),
    _OldKey("workflow", "val_cfg and train_cfg = dict(val_interval=...)"),
)

# Top-level keys that mmengine reads besides the arguments of its runners.
_OTHER_KEYS = (
    "activation_checkpointing",
    "compile",
    "custom_imports",
    "efficient_conv_bn_eval",
    "find_unused_parameters",
    "hooks",
    "model_wrapper_cfg",
    "runner_type",
    "sync_bn",
)


def prepare_config(cfg: ConfigT) -> ConfigT:
    """Make a config one that mmengine's Runner reads as its author meant it. Changes ``cfg`` in place.

    * A top-level ``hooks = [dict(type='DtypeOverrider', ...)]``, the style of other trainers, which mmengine ignores
      without a word, is moved to the end of ``custom_hooks``. An entry that stands there already is not added again,
      so ``custom_hooks = hooks`` in a config file gives each hook once. The key ``hooks`` is removed: a second call
      does nothing, and the config that Runner writes into its work_dir trains with the same hooks, once each.
    * A hook type given as a class becomes its dotted name, since mmengine cannot write a class into that file.
    * A key of old mmcv configs that nothing reads any more (``fp16``, ``optimizer``, ``lr_config`` ...) gives one
      ``UserWarning`` that names its replacement. Keys that are usual names of variables too stay unmentioned where the
      replacement is set.

    Lists are not merged between configs: a child's ``hooks = [...]`` replaces that of its ``_base_``, and ``hooks = None``
    or ``[]`` turns it off. A ``hooks`` that is a module, a class or a function (a Python-style config may import
    one) is none of ours and stays. Importing this package has registered its hooks, so ``custom_imports`` need not name it.

    Args:
        cfg: a ``Config`` of either style, a ``ConfigDict`` or a plain dict.

    Returns:
        ``cfg`` itself.

    Raises:
        ConfigError: if ``cfg`` is no config, ``hooks`` or ``custom_hooks`` no list, or an entry of ``hooks`` neither a
            dict with a ``type`` nor a Hook.

    Example:
        >>> prepare_config(dict(hooks=[dict(type="EMAHook")]))
        {'custom_hooks': [{'type': 'EMAHook'}]}
    """
    values = _values(cfg)
    _move_hooks(cfg, values)
    for key in _OLD_KEYS:
        if _is_set(values, key.name) and not (key.silenced_by and _is_set(values, key.silenced_by)):
            warnings.warn(
                f"config: got the top-level key {key.name!r}, which mmengine does not read; use {key.replacement}",
                stacklevel=2,
            )
    return cfg


def merge_options(cfg: Config, options: Mapping[str, Any]) -> None:
    """Merge ``{'a.b': value}`` into a config, refusing keys that are surely misspelt. Changes ``cfg`` in place.

    A new key may be put anywhere. It is taken for a misspelling when the place has no ``type``, so that no
    class will ever check its arguments, and another key there is nearly the same: ``train_cfg.max_iter`` beside
    ``max_iters``, ``modle.backbone``. (Arguments of a class are checked when it is built.) A new top-level key that
    neither the config nor mmengine knows gives a warning.

    Args:
        cfg: the config, not yet prepared.
        options: dotted keys and their values; a number in a key is an index into a list.

    Raises:
        ConfigError: for such a key, a wrong index, or a key below a value that is neither a dict nor a list.
    """
    for key in options:
        _check_key(_values(cfg), key)
    try:
        cfg.merge_from_dict(dict(options))
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"--cfg-options: got {dict(options)!r}; {error.args[0]}; mend the key") from error


def _values(cfg: Any) -> dict[str, Any]:
    """The dict under a config: mmengine builds lazy objects that are read through anything but ``dict``'s own methods."""
    values = cfg._cfg_dict if isinstance(cfg, Config) else cfg
    if not isinstance(values, dict):
        raise ConfigError(
            f"prepare_config: got {cfg!r}; expected an mmengine Config or a dict; use Config.fromfile(path)"
        )
    return values


def _move_hooks(cfg: Any, values: dict[str, Any]) -> None:
    hooks = _resolved(dict.get(values, "hooks"))
    if "hooks" not in values or _is_code(hooks):
        return
    entries = [_checked_entry(index, entry) for index, entry in enumerate(_checked_list("hooks", hooks))]
    present = _checked_list("custom_hooks", _resolved(dict.get(values, "custom_hooks")))
    if entries:
        cfg["custom_hooks"] = [*present, *(entry for entry in entries if entry not in present)]
    dict.pop(values, "hooks")


def _resolved(value: Any) -> Any:
    """An imported name of a Python-style config as the object; as it is where it cannot be imported."""
    if not isinstance(value, _LAZY):
        return value
    try:
        return value.build()
    except ImportError:
        return value


def _is_code(value: Any) -> bool:
    return isinstance(value, (ModuleType, *_LAZY)) or callable(value)


def _checked_list(where: str, value: Any) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        raise ConfigError(
            f"{where}: got {value!r}; expected a list of hooks; write {where} = [dict(type='DtypeOverrider', ...)]"
        )
    return list(value)


def _checked_entry(index: int, entry: Any) -> Any:
    if isinstance(entry, Hook):
        return entry
    kind = dict.get(entry, "type") if isinstance(entry, dict) else None
    if not (isinstance(kind, (str, type, *_LAZY)) and kind != ""):
        raise ConfigError(
            f"hooks[{index}]: got {entry!r}; expected a dict with a 'type' or a Hook; "
            "write dict(type='DtypeOverrider', ...)"
        )
    if isinstance(kind, type) and "<locals>" not in kind.__qualname__:
        entry["type"] = f"{kind.__module__}.{kind.__qualname__}"
    return entry


def _is_set(values: dict[str, Any], dotted: str) -> bool:
    """Whether a dotted key holds a setting: not None, not False, not something imported."""
    value: Any = values
    for part in dotted.split("."):
        value = dict.get(value, part) if isinstance(value, dict) else None
    return value is not None and value is not False and not _is_code(value)


def _check_key(values: dict[str, Any], key: str) -> None:
    node: Any = values
    parts = key.split(".")
    for depth, part in enumerate(parts):
        where = ".".join(parts[:depth])
        if isinstance(node, (list, tuple)):
            node = _element(node, part, where, key)
        elif isinstance(node, dict) and part in node:
            node = dict.__getitem__(node, part)
        else:
            _check_new_key(node, part, where, key)
            _check_no_index(".".join(parts[: depth + 1]), parts[depth + 1 :], key)
            return


def _element(node: Any, part: str, where: str, key: str) -> Any:
    if not part.isdigit() or int(part) >= len(node):
        raise ConfigError(
            f"--cfg-options: got {key!r}; {where!r} is a list of {len(node)}; expected an index below that; mend the key"
        )
    return node[int(part)]


def _check_new_key(node: Any, part: str, where: str, key: str) -> None:
    if not isinstance(node, dict):
        raise ConfigError(
            f"--cfg-options: got {key!r}; {where!r} is {node!r}, which has no keys; expected {where}=<value>; mend the key"
        )
    known = set(dict.keys(node)) if where else {*dict.keys(node), *_top_level_keys()}
    if part in known or "type" in node:
        return
    near = nearest(part, known, cutoff=0.8)
    if near:
        raise ConfigError(f"--cfg-options: got {key!r}; expected {_dotted(where, near)}; mend the key")
    if not where:
        warnings.warn(
            f"--cfg-options: got {key!r}; neither the config nor mmengine reads {part!r}", stacklevel=4
        )


def _check_no_index(new: str, below: list[str], key: str) -> None:
    """mmengine would make a dict with the key '0' where the list is not there."""
    if any(part.isdigit() for part in below):
        raise ConfigError(
            f"--cfg-options: got {key!r}; the config has no {new!r}; expected the index of a list that it has; mend the key"
        )


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """The up to three names among ``known`` that look most like ``name`` in any case, the likest first; maybe none."""
    spellings: dict[str, list[str]] = {}
    for word in known:
        spellings.setdefault(word.lower(), []).append(word)
    close = difflib.get_close_matches(name.lower(), spellings, n=3, cutoff=cutoff)
    return [word for lower in close for word in spellings[lower]][:3]


def _dotted(where: str, names: Iterable[str]) -> str:
    return " or ".join(repr(f"{where}.{name}" if where else name) for name in names)


def _top_level_keys() -> set[str]:
    arguments = [
        *inspect.signature(Runner.__init__).parameters,
        *inspect.signature(FlexibleRunner.__init__).parameters,
    ]
    return {*arguments, *_OTHER_KEYS} - {"self", "cfg"}
