"""Where in a model a function is called: the names of its modules, and which of them are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from dtype_hooks.core.naming import named_bare_modules
from dtype_hooks.core.selection import Selection, select
from dtype_hooks.errors import SelectionError


@dataclass(frozen=True)
class Place:
    """A module of the model.

    Attributes:
        name: Its dotted name, ``""`` for the model itself.
        wanted: Whether what happens in it is recorded.
        module: The module, kept so that its ``id`` stays its own.
        has_children: Whether it has submodules, whose methods it may call.
        holds_wanted: Whether something below it is recorded.
    """

    name: str
    wanted: bool
    module: nn.Module
    has_children: bool = False
    holds_wanted: bool = False


@dataclass(frozen=True)
class Places:
    """A model's modules by their ``id``, a shared one under its first name.

    Attributes:
        of: The modules.
        everything: Whether what happens outside of all modules is recorded too.
    """

    of: dict[int, Place]
    everything: bool

    @classmethod
    def make(cls, model: nn.Module, selection: Selection, where: str) -> Places:
        """Find the places of a model.

        Raises:
            SelectionError: When ``selection`` has patterns that take no module.
        """
        taken, out = _chosen(model, selection, where)
        named = list(named_bare_modules(model))
        wanted: dict[str, bool] = {}
        for name, module in named:
            inside = wanted[name.rpartition(".")[0]] if name else selection.is_empty
            wanted[name] = (inside or id(module) in taken) and id(module) not in out
        holding = {above for name, is_wanted in wanted.items() if is_wanted for above in _above(name)}
        places: dict[int, Place] = {}
        for name, module in named:
            place = Place(name, wanted[name], module, bool(module._modules), name in holding)
            places.setdefault(id(module), place)
        return cls(places, selection.is_empty)


def _above(name: str) -> Iterator[str]:
    """The names of the modules that hold the module of this name."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _chosen(model: nn.Module, selection: Selection, where: str) -> tuple[set[int], set[int]]:
    """The ``id`` of the modules taken, and of those kept out."""
    if selection.is_empty and not selection.exclude:
        return set(), set()
    result = select(model, selection)
    if not selection.is_empty and not result.taken:
        raise SelectionError(
            "; ".join(result.dead_messages(where))
            or f"{where}: got {selection}; expected patterns that take a module that exclude does not name. Mend them."
        )
    return {id(each.module) for each in result.taken}, {id(each.module) for each in result.excluded}
