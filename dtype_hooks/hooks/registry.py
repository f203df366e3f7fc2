"""Registration of this package's hooks in mmengine's registry."""

from __future__ import annotations

from typing import TypeVar

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from dtype_hooks.errors import ConfigError

HookClass = TypeVar("HookClass", bound=type[Hook])


def register_hook(cls: HookClass) -> HookClass:
    """Register ``cls`` under its name in mmengine's root ``HOOKS``; child scopes (mmdet's) find it there.

    Importing the module a second time (``importlib.reload``) replaces the class.

    Raises:
        ConfigError: Another module's class has the name.
    """
    taken = HOOKS.module_dict.get(cls.__name__)
    if taken is not None and taken.__module__ != cls.__module__:
        raise ConfigError(
            f"mmengine's HOOKS: got {cls.__name__!r}, a name that {taken.__module__} has registered; expected a free one. "
            f"Do not import {taken.__module__} in this run, or register its class under another name."
        )
    HOOKS.register_module(module=cls, force=True)
    return cls
