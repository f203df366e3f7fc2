"""Where in a model a function is called: the names of its modules, and which of them are recorded."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from dtype_hooks.core.naming import named_bare_modules
from dtype_hooks.core.selection import Selection, select
from dtype_hooks.errors import SelectionError


@dataclass(frozen=True)
class Place:
    """A module of the model: its name, and whether what happens in it is recorded."""

    name: str
    wanted: bool
    module: nn.Module  # kept, so that its id stays its own


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
        places: dict[int, Place] = {}
        wanted: dict[str, bool] = {}
        for name, module in named_bare_modules(model):
            inside = wanted[name.rpartition(".")[0]] if name else selection.is_empty
            wanted[name] = (inside or id(module) in taken) and id(module) not in out
            places.setdefault(id(module), Place(name, wanted[name], module))
        return cls(places, selection.is_empty)


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
