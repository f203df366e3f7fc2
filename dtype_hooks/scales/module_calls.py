"""Seeing every call of a model's modules, every custom autograd function, and every backward."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from dtype_hooks.scales.places import Place

Original = Callable[..., Any]
AroundCall = Callable[[Place, Original, tuple, dict], Any]

_SLOT = "_compiled_call_impl"
"""What ``nn.Module.__call__`` calls in place of ``_call_impl`` when it is set on a module, as ``module.compile()`` does.

It lies in one module's ``__dict__``, is left out of copies and pickles, and is seen by all threads. Changing
``nn.Module.__call__`` itself would make Python forget what it knows of every module class, at each recorded step.
"""

_MADE_BY_TRANSFORMS = "torch._functorch.autograd_function"

_PATCHING = threading.Lock()


class _Patch:
    """A callable under a name of a ``__dict__`` that calls what lay there before.

    Two recordings may overlap in time without being nested (two threads): the one that ends first must not put back
    what the other has replaced since. So each patch knows what is below it, and is unlinked from wherever it lies.

    Attributes:
        previous: What it stands in for; None is nothing.
        eager: The region in which compiled code runs eagerly, if this patch's recording is the one that keeps it.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.eager: AbstractContextManager | None = None
        with _PATCHING:
            self.previous: Any = owner.__dict__.get(name)
            self._put(self.as_attribute())

    def as_attribute(self) -> Any:
        """What lies in the ``__dict__``."""
        return self

    def _put(self, value: Any) -> None:
        if not isinstance(self.owner, nn.Module):
            delattr(self.owner, self.name) if value is None else setattr(self.owner, self.name, value)
        elif value is None:
            del self.owner.__dict__[self.name]
        else:
            self.owner.__dict__[self.name] = value

    def remove(self) -> None:
        """Take it out, wherever it lies; nothing happens where somebody else has wrapped it since."""
        with _PATCHING:
            above = self.owner.__dict__.get(self.name)
            if _patch_of(above) is self:
                self._put(self.previous)
                return
            for patch in self.all():
                if _patch_of(patch.previous) is self:
                    patch.previous = self.previous

    def all(self) -> Iterator[_Patch]:
        """The patches that lie there, the last one first."""
        patch = _patch_of(self.owner.__dict__.get(self.name))
        while patch is not None:
            yield patch
            patch = _patch_of(patch.previous)


def _patch_of(value: Any) -> _Patch | None:
    if isinstance(value, _Patch):
        return value
    return getattr(getattr(value, "__func__", None), "patch", None)


class _Call(_Patch):
    """A module's call."""

    def __init__(self, place: Place, around: AroundCall) -> None:
        self.place, self.around = place, around
        super().__init__(place.module, _SLOT)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.place, self.previous or self.owner._call_impl, args, kwargs)

    def __reduce_ex__(self, _: Any) -> tuple:
        """Nothing, in a copy or a pickle: some modules hand over their whole ``__dict__``."""
        return type(None), ()

    def call_of(self, replica: nn.Module) -> Original:
        """The same for a replica, which holds other parameters under the same names."""
        below = _patch_of(self.previous)
        original = below.call_of(replica) if isinstance(below, _Call) else replica._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.around(self.place, original, args, kwargs)

        return call


class _Replicate(_Patch):
    """What ``nn.DataParallel`` makes replicas with: they get the module's ``__dict__``, and with it the module's own call."""

    def __init__(self) -> None:
        super().__init__(sys.modules["torch.nn.parallel.data_parallel"], "replicate")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        replicas = self.previous(*args, **kwargs)
        for replica in replicas:
            for module in replica.modules():
                call = module.__dict__.get(_SLOT)
                if isinstance(call, _Call):
                    module.__dict__[_SLOT] = call.call_of(module)
        return replicas


class _Apply(_Patch):
    """``apply`` of every custom ``torch.autograd.Function``.

    It lies where ``Function.apply`` looks for torch's own, so that an ``f = MyFunction.apply`` of long ago is seen, too.
    """

    def __init__(
        self,
        after: Callable[[type, tuple, dict, Any], None],
        recomputing: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self.after, self.recomputing = after, recomputing
        super().__init__(torch.autograd.function._SingleLevelFunction, "apply")

    def as_attribute(self) -> Any:
        """A class method: which function it is comes first."""

        def apply(cls: type, /, *args: Any, **kwargs: Any) -> Any:
            if self.previous is None:
                original = super(self.owner, cls).apply  # type: ignore[misc]
            else:
                original = partial(self.previous.__func__, cls)
            if issubclass(cls, CheckpointFunction):
                return original(self.recomputing(args[0]), *args[1:], **kwargs)
            outputs = original(*args, **kwargs)
            if issubclass(cls, torch.autograd.Function) and cls.__module__ != _MADE_BY_TRANSFORMS:
                self.after(cls, args, kwargs, outputs)
            return outputs

        apply.patch = self  # type: ignore[attr-defined]
        return classmethod(apply)


class _Backward(_Patch):
    """``torch.autograd.backward``, which ``Tensor.backward`` calls."""

    def __init__(self, around: Callable[[], AbstractContextManager]) -> None:
        self.around = around
        super().__init__(torch.autograd, "backward")

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        with self.around():
            self.previous(*args, **kwargs)

    def begin_eager(self) -> None:
        """Run compiled code eagerly from here on, where any can be: importing dynamo takes seconds."""
        if "torch._dynamo" in sys.modules and not any(patch.eager for patch in self.all()):
            self.eager = torch.compiler.set_stance("force_eager")
            self.eager.__enter__()

    def end_eager(self) -> None:
        """The stance is the process's: the last recording to end puts it back, whichever began it."""
        heir = next((patch for patch in self.all() if patch is not self), None)
        if self.eager is not None and heir is None:
            self.eager.__exit__(None, None, None)
        elif self.eager is not None and heir is not None:
            heir.eager = self.eager
        self.eager = None


@contextmanager
def watch_calls(
    places: Iterable[Place],
    around_call: AroundCall,
    after_function: Callable[[type, tuple, dict, Any], None],
    recomputing: Callable[[Callable[..., Any]], Callable[..., Any]],
    around_backward: Callable[[], AbstractContextManager],
) -> Iterator[None]:
    """Have ``around_call(place, original, args, kwargs)`` make the calls of the places' modules, in all threads.

    ``after_function(cls, args, kwargs, outputs)`` is told of every ``torch.autograd.Function`` that was applied, save the
    one that checkpointing is made of: its outputs are those of the function that it runs, in whose place
    ``recomputing(function)`` is run, in the forward and again in the backward. Every ``torch.autograd.backward`` runs inside
    an ``around_backward()``. Compiled code runs eagerly.
    """
    patches: list[_Patch] = []
    backward = _Backward(around_backward)
    try:
        backward.begin_eager()
        patches.append(_Apply(after_function, recomputing))
        patches.append(_Replicate())
        for place in places:
            patches.append(_Call(place, around_call))
        yield
    finally:
        for patch in reversed(patches):
            patch.remove()
        backward.end_eager()
        backward.remove()
