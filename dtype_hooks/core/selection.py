"""Which modules a rule takes: regexes on dotted names and on class names, less what is excluded."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from dtype_hooks.errors import ConfigError

from .naming import class_name, named_bare_modules


@dataclass(frozen=True)
class Selection:
    """Regexes that choose modules; build it with :meth:`make`, which validates.

    A module is taken when a regex of ``patterns`` is found (``re.search``) in one of its dotted names, or one of
    ``class_patterns`` in its class name, and none of ``exclude`` in any of its names. The root is never taken. A
    whole component of a name is said with anchors: ``(^|\\.)wo$`` takes ``wo`` and ``h.0.wo``, not
    ``word_embedding``; ``attention\\.query$`` takes exactly one.
    """

    patterns: tuple[str, ...] = ()
    class_patterns: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @classmethod
    def make(
        cls,
        patterns: str | Sequence[str] | None = None,
        class_patterns: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        where: str = "override_dtype",
    ) -> Selection:
        """Validate and store; ``None`` is no pattern, a bare string is one pattern.

        Raises:
            ConfigError: For a value that is no string or list of strings, or a regex that does not compile.
        """
        return cls(
            as_patterns(patterns, f"{where}.patterns"),
            as_patterns(class_patterns, f"{where}.class_patterns"),
            as_patterns(exclude, f"{where}.exclude"),
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is no pattern that could take anything."""
        return not (self.patterns or self.class_patterns)

    def __str__(self) -> str:
        parts = (
            ("patterns", self.patterns),
            ("class_patterns", self.class_patterns),
            ("exclude", self.exclude),
        )
        return ", ".join(f"{name}={list(value)!r}" for name, value in parts if value) or "no patterns"


@dataclass(frozen=True)
class Selected:
    """A module that a selection took, with every dotted name it has and the patterns that caught it."""

    module: nn.Module
    names: tuple[str, ...]
    caught_by: tuple[str, ...]


@dataclass
class SelectionResult:
    """What :func:`select` found.

    Attributes:
        taken: The modules taken, in order of registration.
        excluded: Modules that only ``exclude`` kept out or that it names, with all their names.
        dead: ``(kind, pattern, nearest names)`` of every pattern that was found in no name at all.
        total: How many modules there are below the root, a shared one counted once.
    """

    taken: list[Selected] = field(default_factory=list)
    excluded: list[Selected] = field(default_factory=list)
    dead: list[tuple[str, str, list[str]]] = field(default_factory=list)
    total: int = 0

    def dead_messages(self, where: str) -> list[str]:
        """One sentence for each dead pattern."""
        return [
            f"{where}.{kind}: {pattern!r} matched none of {self.total} modules; "
            f"nearest names: {', '.join(map(repr, near)) or 'none'}. Mend it or drop it."
            for kind, pattern, near in self.dead
        ]


def as_patterns(value: str | Sequence[str] | None, where: str) -> tuple[str, ...]:
    """Validate regexes: ``None`` -> ``()``, ``"a"`` -> ``("a",)``.

    Raises:
        ConfigError: For a value that is no string or list of strings, or a regex that does not compile.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{where}: got {value!r}; expected a list of regular expressions. Write ['norm'].")
    for pattern in value:
        _check_regex(pattern, where)
    return tuple(value)


def select(model: nn.Module, selection: Selection) -> SelectionResult:
    """Apply ``selection`` to the modules below the bare model.

    A module shared under several names is taken once; it is excluded when any of its names is.
    """
    names = _names_by_module(model)
    result = SelectionResult(total=len(names))
    for module, its_names in names:
        caught = tuple(_caught(selection, its_names, class_name(module)))
        out = tuple(p for p in selection.exclude if _found(p, its_names))
        if out:
            result.excluded.append(Selected(module, its_names, out))
        elif caught:
            result.taken.append(Selected(module, its_names, caught))
    result.dead = _dead_patterns(selection, names)
    return result


def _check_regex(pattern: str, where: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{where}: got {pattern!r}; expected a regular expression ({error}). Escape it with re.escape."
        ) from None
    if not pattern:
        raise ConfigError(
            f"{where}: got ''; expected a non-empty regular expression. Write '.' to take every module."
        )


def _names_by_module(model: nn.Module) -> list[tuple[nn.Module, tuple[str, ...]]]:
    found: dict[int, tuple[nn.Module, list[str]]] = {}
    walk = named_bare_modules(model)
    _, root = next(walk)
    for name, module in walk:
        if module is not root:
            found.setdefault(id(module), (module, []))[1].append(name)
    return [(module, tuple(names)) for module, names in found.values()]


def _found(pattern: str, texts: Iterable[str]) -> bool:
    return any(re.search(pattern, text) for text in texts)


def _caught(selection: Selection, names: tuple[str, ...], cls: str) -> Iterable[str]:
    yield from (pattern for pattern in selection.patterns if _found(pattern, names))
    yield from (f"class {pattern}" for pattern in selection.class_patterns if _found(pattern, (cls,)))


def _dead_patterns(
    selection: Selection, modules: list[tuple[nn.Module, tuple[str, ...]]]
) -> list[tuple[str, str, list[str]]]:
    names = [name for _, its_names in modules for name in its_names]
    classes = sorted({class_name(module) for module, _ in modules})
    kinds = (
        ("patterns", selection.patterns, names),
        ("class_patterns", selection.class_patterns, classes),
        ("exclude", selection.exclude, names),
    )
    return [
        (kind, pattern, nearest(pattern, texts))
        for kind, patterns, texts in kinds
        for pattern in patterns
        if not _found(pattern, texts)
    ]


def nearest(pattern: str, names: Sequence[str], count: int = 3) -> list[str]:
    """The names that look most like ``pattern``, by whole name or by last component."""
    literal = re.sub(r"[^\w.]", "", pattern.replace("\\.", ".")).strip(".")
    by_text: dict[str, str] = {}
    for name in names:
        by_text.setdefault(name.rpartition(".")[2].lower(), name)
        by_text.setdefault(name.lower(), name)
    close = difflib.get_close_matches(literal.lower(), by_text, n=count, cutoff=0.4)
    return list(dict.fromkeys(by_text[text] for text in close))
