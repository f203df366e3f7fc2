"""Checks of arguments, each with a message that says what to write."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from dtype_hooks.errors import ConfigError


def as_bool(value: bool, where: str) -> bool:
    """Validate a flag.

    Raises:
        ConfigError: For anything but True and False.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: got {value!r}; expected True or False. Write it without quotes.")
    return value


def as_choice(value: str, choices: Sequence[str], where: str) -> str:
    """Validate a name out of a few.

    Raises:
        ConfigError: For anything else.
    """
    if not isinstance(value, str) or value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
        advice = f"Did you mean {near[0]!r}?" if near else f"The default is {choices[0]!r}."
        raise ConfigError(
            f"{where}: got {value!r}; expected one of {', '.join(map(repr, choices))}. {advice}"
        )
    return value


def as_interval(value: int, where: str) -> int:
    """Validate a number of iterations, where 0 is never.

    Raises:
        ConfigError: For anything but a whole number from 0.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(
            f"{where}: got {value!r}; expected a whole number of iterations, 0 or more. Write 0 for never."
        )
    return value
