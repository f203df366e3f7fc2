"""What stands in for a module's method: an object that lies in ``module.__dict__`` under the method's name."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from torch import nn

from dtype_hooks.core.compiling import never_compiled_alone
from dtype_hooks.errors import OverrideError


@never_compiled_alone
class StandIn:
    """Base of the objects that take a method's place; see CONTRIBUTING.md for why they are objects.

    Refers to its module and to plain values only, so that it is pickled and deep-copied with the module.

    Attributes:
        module: The module.
        name: The method's name.
        previous: What it calls in turn: what lay in ``module.__dict__`` before, or None for the class's method.
        layer: Of two stand-ins for one method the one with the higher layer calls the other, whichever came first.
    """

    layer = 0

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.previous: Any = None

    @property
    def __globals__(self) -> dict[str, Any]:
        """Empty; ``torch.jit.script`` asks for it on its way to ``__code__``, torch.fx for names to wrap."""
        return {}

    @property
    def __code__(self) -> NoReturn:
        """What ``torch.jit.script`` compiles: not to be had here, and it should say so in plain words."""
        raise OverrideError(
            f"torch.jit.script: got a {type(self.module).__name__} whose {self.name!r} is overridden; expected a module "
            "without overrides. Call remove() first, or use torch.jit.trace or torch.export."
        )

    def _original(self, args: tuple, kwargs: dict) -> Any:
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return getattr(type(self.module), self.name)(self.module, *args, **kwargs)


Kind = TypeVar("Kind", bound=StandIn)


def unwrap_to(kind: type[Kind], value: Any) -> Kind | None:
    """The stand-in of a kind that ``value`` is, or that lies below it.

    Follows other stand-ins, ``__wrapped__`` (functools.wraps, as mmengine's activation checkpointing uses it) and
    ``_torchdynamo_orig_callable`` (torch.compile).
    """
    while value is not None:
        if isinstance(value, kind):
            return value
        if isinstance(value, StandIn):
            value = value.previous
            continue
        inside = getattr(value, "__dict__", None) or {}
        value = inside.get("__wrapped__") or inside.get("_torchdynamo_orig_callable")
    return None


def put_in(stand_in: StandIn) -> None:
    """Put a stand-in into its module, below those of a higher layer."""
    held, above = stand_in.module.__dict__, None
    below = held.get(stand_in.name)
    while isinstance(below, StandIn) and below.layer > stand_in.layer:
        above, below = below, below.previous
    stand_in.previous = below
    if above is None:
        held[stand_in.name] = stand_in
    else:
        above.previous = stand_in


def take_out(stand_in: StandIn) -> None:
    """Put back what ``stand_in`` replaced. Where somebody has wrapped it since, nothing can be, and nothing is done."""
    held = stand_in.module.__dict__
    above = held.get(stand_in.name)
    if above is stand_in:
        if stand_in.previous is None:
            del held[stand_in.name]
        else:
            held[stand_in.name] = stand_in.previous
        return
    while isinstance(above, StandIn):
        if above.previous is stand_in:
            above.previous = stand_in.previous
            return
        above = above.previous
