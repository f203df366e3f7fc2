"""What is wrong with a config, in one line, when reading it or building from it fails.

mmengine builds by ``type`` strings, deep inside ``Runner(...)`` and ``runner.train()``; its errors end a long traceback of
frames that no user has written. The functions here tell such an error, which the config has caused, from one in the
user's own code, whose traceback must be kept.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import mmengine
import torch
from mmengine.config import Config
from mmengine.config.lazy import LazyAttr, LazyObject
from mmengine.registry import OPTIMIZERS, Registry

from dtype_hooks.hooks.config import nearest

_MMENGINE = str(Path(mmengine.__file__).parent)
_LIBRARIES = (_MMENGINE, str(Path(torch.__file__).parent), "<frozen ")
_FAULTS = (AssertionError, AttributeError, ImportError, KeyError, OSError, TypeError, ValueError)
_UNEXPECTED = re.compile(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'")


def explain_build_error(error: BaseException, cfg: Any) -> str | None:
    """Say in one line what in a config has made building from it fail.

    An error is the config's if mmengine was building from the config and no code but mmengine's and torch's was running when
    it was raised, or if it is about an argument that the config gives to a class. It is the user's code's if that code was
    running: in the constructor of a model, or in a training step, even one that builds something.

    Args:
        error: what building the runner or ``runner.train()``, which builds too, has raised, with its traceback.
        cfg: the config, to name the place in it.

    Returns:
        One line, or None if the error is none of the config's, so that its traceback should be shown.

    Example:
        >>> try:
        ...     MODELS.build(dict(type="Lineer"))  # doctest: +SKIP
        ... except KeyError as error:
        ...     explain_build_error(error, {})
        "type: got 'Lineer'; expected a name in the registry mmengine::model; nearest: 'Linear'; mend the name ..."
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    builders = [index for index, frame in enumerate(frames) if _is_builder(frame)]
    entry = next((index for index, frame in enumerate(frames) if _is_of_mmengine(frame)), None)
    if not isinstance(error, _FAULTS) or not builders or any(map(_is_foreign, frames[entry : builders[0]])):
        return None
    return _explain(error, frames[builders[-1]], frames[builders[-1] + 1 :], cfg)


def explain_load_error(error: BaseException, path: Any) -> str:
    """Say in one line why a config file cannot be read, with the file and line of the config that failed.

    Args:
        error: what ``Config.fromfile(path)`` raised.
        path: the config file.

    Returns:
        One line. It names the config file of the chain of ``_base_`` that has failed, not always ``path``.
    """
    if isinstance(error, SyntaxError):
        return f"{_syntax_error_file(error) or path}:{error.lineno or '?'}: {error.msg}; mend the syntax"
    if isinstance(error, ImportError):
        return _failed_import(_root(error), path)
    place = _last_config_line(error) or path
    return f"{place}: {type(error).__name__}: {_text(error)}; mend the config there"


def _failed_import(root: BaseException, path: Any) -> str:
    name = root.name if isinstance(root, ModuleNotFoundError) else None
    remedy = f"put the folder of {name!r} on PYTHONPATH, or mend the name" if name else "mend that module"
    return f"{_last_config_line(root) or path}: {type(root).__name__}: {_text(root)}; {remedy}"


def _explain(error: BaseException, builder: FrameType, inner: list[FrameType], cfg: Any) -> str | None:
    """``builder`` is the innermost building function on the way to the error, ``inner`` what it called."""
    kind = _kind(builder)
    unexpected = _UNEXPECTED.search(str(error)) if isinstance(error, TypeError) else None
    if unexpected and _gave_argument(builder, inner, unexpected.group(1), unexpected.group(2)):
        return _unexpected_argument(builder, unexpected.group(1), unexpected.group(2), cfg)
    optimizer = _unknown_optimizer(inner)
    if optimizer is not None:
        return _unknown_type(OPTIMIZERS, optimizer, cfg)
    if any(map(_is_foreign, inner)):
        return None
    if isinstance(error, KeyError) and isinstance(kind, str) and "is not in the" in _text(error):
        return _unknown_type(builder.f_locals["registry"], kind, cfg)
    place = _place(cfg, kind) or _type_name(kind) or f"config, in {builder.f_code.co_name}"
    return f"{place}: {type(error).__name__}: {_text(error)}; mend the config there"


def _gave_argument(builder: FrameType, inner: list[FrameType], owner: str, argument: str) -> bool:
    """Whether the config gave the argument: to the class built, or to one of its bases through ``**kwargs``."""
    given = any(isinstance(value, dict) and argument in value for value in builder.f_locals.values())
    handed_up = owner in {base.__name__ for base in _bases(builder.f_locals.get("obj_cls"))}
    return given and (not inner or (handed_up and all(frame.f_code.co_name == "__init__" for frame in inner)))


def _bases(built: Any) -> tuple[Any, ...]:
    return inspect.getmro(built) if inspect.isclass(built) else ()


def _unexpected_argument(builder: FrameType, owner: str, argument: str, cfg: Any) -> str:
    kind = _kind(builder)
    # mmengine's own loops are not built by the registry but called by their names
    known = _arguments(builder.f_locals.get("obj_cls", builder.f_globals.get(owner)))
    place = _place(cfg, kind, argument)
    near = nearest(argument, known) or sorted(known)
    expected = "expected one of its arguments" + (f", as {_quoted(near)}" if near else "")
    return (
        f"{f'{place}.' if place else ''}{argument}: got an argument that {_type_name(kind) or owner} does not have; "
        f"{expected}; mend the name"
    )


def _unknown_optimizer(inner: list[FrameType]) -> str | None:
    """The optimizer's name, if mmengine has looked it up and then asked what it found, None, for its signature."""
    given = [frame.f_locals.get("optimizer_cfg") for frame in inner if _is_of_mmengine(frame)]
    names = [
        config["type"] for config in given if isinstance(config, dict) and isinstance(config.get("type"), str)
    ]
    return next((name for name in names if OPTIMIZERS.get(name) is None), None)


def _unknown_type(registry: Registry, name: str, cfg: Any) -> str:
    near = nearest(name.split(".")[-1], _registered(registry))
    hint = f"nearest: {_quoted(near)}; mend the name" if near else "mend the name"
    place = "runner_type" if registry.name == "runner" else f"{_place(cfg, name)}.type".lstrip(".")
    return (
        f"{place}: got {name!r}; expected a name in the registry "
        f"{registry.scope}::{registry.name}; {hint}, or name its module in custom_imports"
    )


def _registered(registry: Registry | None) -> Iterator[str]:
    while registry is not None:
        yield from registry.module_dict
        registry = registry.parent


def _arguments(built: Any) -> set[str]:
    """Names that a class or function takes; of a class all along its bases, which may pass ``**kwargs`` up."""
    makers = [vars(base).get("__init__") for base in _bases(built)] or [built]
    names: set[str] = set()
    for maker in makers:
        try:
            parameters = inspect.signature(maker).parameters.values()
        except (TypeError, ValueError):
            continue
        names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return names - {"self"}


def _place(cfg: Any, kind: Any, argument: str | None = None) -> str:
    """The dotted key of the first dict of that type in a config, one that has the argument; '' if there is none."""
    dicts = list(_dicts(cfg._cfg_dict if isinstance(cfg, Config) else cfg, ""))
    if argument is not None:
        dicts = [(path, node) for path, node in dicts if argument in node]
    wanted = _type_name(kind)
    same = (path for path, node in dicts if wanted and _type_name(dict.get(node, "type")) == wanted)
    # train_cfg and data loaders have no type
    untyped = (path for path, node in dicts if argument is not None and "type" not in node)
    return next(same, "") or next(untyped, "")


def _dicts(node: Any, path: str) -> Iterator[tuple[str, dict[Any, Any]]]:
    if isinstance(node, dict):
        yield path, node
        children: Iterable[tuple[Any, Any]] = dict.items(node)
    else:
        children = enumerate(node) if isinstance(node, (list, tuple)) else ()
    for key, child in children:
        yield from _dicts(child, f"{path}.{key}" if path else str(key))


def _type_name(kind: Any) -> str:
    """The bare name of a ``type``, be it a string, an imported name of a Python-style config, or a class."""
    if kind is None:
        return ""
    text = (
        str(kind) if isinstance(kind, (str, LazyObject, LazyAttr)) else getattr(kind, "__name__", str(kind))
    )
    return text.rsplit(".", 1)[-1]


def _kind(builder: FrameType) -> Any:
    return builder.f_locals.get("obj_type", builder.f_locals.get("scheduler_type"))


def _is_builder(frame: FrameType) -> bool:
    return _is_of_mmengine(frame) and frame.f_code.co_name.lstrip("_").startswith("build")


def _is_of_mmengine(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_MMENGINE)


def _is_foreign(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(_LIBRARIES)


def _text(error: BaseException) -> str:
    """The message in one line; a KeyError's without the quotes that ``str`` puts around it."""
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return " ".join(str(text).split())


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _root(error: BaseException) -> BaseException:
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _syntax_error_file(error: SyntaxError) -> str | None:
    """mmengine parses a config's text, which has no name for the parser; its own frames know the file."""
    if error.filename and Path(error.filename).is_file():
        return error.filename
    names = [frame.f_locals.get("filename") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((name for name in reversed(names) if isinstance(name, str) and Path(name).is_file()), None)


def _last_config_line(error: BaseException) -> str | None:
    """``file:line`` of the innermost code that is not a library's: the config, or what it imports."""
    lines = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(code, line) for code, line in lines if _is_config_code(code)]
    return f"{own[-1][0].co_filename}:{own[-1][1]}" if own else None


def _is_config_code(code: CodeType) -> bool:
    return code.co_name == "<module>" and not code.co_filename.startswith(_LIBRARIES)
