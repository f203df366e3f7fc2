"""Seeing every call of a module, and every custom autograd function, without touching a module."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

_PATCHING = threading.Lock()


class _Patch:
    """A function in the ``__dict__`` of a class or a module of Python that calls what lay there before.

    Two recordings may overlap in time without being nested (two threads): the one that ends first must not put back
    what the other has replaced since. So each patch knows what is below it, and is unlinked from wherever it lies.

    Attributes:
        eager: The region in which compiled code runs eagerly, if this patch's recording is the one that keeps it.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[_Patch], Callable[..., Any]]) -> None:
        self.owner, self.name = owner, name
        self.eager: AbstractContextManager | None = None
        function = make(self)
        function._scale_patch = self  # type: ignore[attr-defined]
        with _PATCHING:
            self.previous: Any = owner.__dict__[name]
            self.function: Any = classmethod(function) if isinstance(self.previous, classmethod) else function
            setattr(owner, name, self.function)

    def remove(self) -> None:
        """Take it out, wherever it lies; nothing happens where somebody else has wrapped it since."""
        with _PATCHING:
            if self.owner.__dict__[self.name] is self.function:
                setattr(self.owner, self.name, self.previous)
            for patch in _patches(self.owner, self.name):
                if patch.previous is self.function:
                    patch.previous = self.previous


def _patches(owner: Any, name: str) -> Iterator[_Patch]:
    """The patches that lie there, the last one first."""
    function = owner.__dict__[name]
    while (patch := getattr(getattr(function, "__func__", function), "_scale_patch", None)) is not None:
        yield patch
        function = patch.previous


def _begin_eager(patch: _Patch) -> None:
    """Run compiled code eagerly from here on, where anything can have been compiled: importing dynamo takes seconds."""
    if "torch._dynamo" in sys.modules and not any(each.eager for each in _patches(patch.owner, patch.name)):
        patch.eager = torch.compiler.set_stance("force_eager")
        patch.eager.__enter__()


def _end_eager(patch: _Patch) -> None:
    """The stance is the process's: the last recording to end puts it back, whichever began it."""
    if patch.eager is None:
        return
    heir = next((each for each in _patches(patch.owner, patch.name) if each is not patch), None)
    if heir is None:
        patch.eager.__exit__(None, None, None)
    else:
        heir.eager = patch.eager
    patch.eager = None


@contextmanager
def watch_calls(
    around_call: Callable[[Callable[..., Any], nn.Module, tuple, dict], Any],
    after_function: Callable[[type, tuple, dict, Any], None],
    after_backward: Callable[[], None],
) -> Iterator[None]:
    """Have ``around_call(original, module, args, kwargs)`` make every module call, in all threads.

    ``after_function(cls, args, kwargs, outputs)`` is told of every ``torch.autograd.Function`` that was applied, save the one that
    checkpointing is made of: its outputs are those of the function that it runs. ``after_backward()`` is told of every
    ``torch.autograd.backward`` that has come to its end, ``Tensor.backward`` among them. Compiled code runs eagerly.
    """

    def calls(patch: _Patch) -> Callable[..., Any]:
        def __call__(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return around_call(patch.previous, module, args, kwargs)

        return __call__

    def applies(patch: _Patch) -> Callable[..., Any]:
        def apply(cls: type, /, *args: Any, **kwargs: Any) -> Any:
            outputs = patch.previous.__func__(cls, *args, **kwargs)
            if not issubclass(cls, CheckpointFunction):
                after_function(cls, args, kwargs, outputs)
            return outputs

        return apply

    def runs_backward(patch: _Patch) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> None:
            patch.previous(*args, **kwargs)
            after_backward()

        return backward

    patches: list[_Patch] = []
    try:
        patches.append(_Patch(nn.Module, "__call__", calls))
        _begin_eager(patches[0])
        patches.append(_Patch(torch.autograd.Function, "apply", applies))
        patches.append(_Patch(torch.autograd, "backward", runs_backward))
        yield
    finally:
        if patches:
            _end_eager(patches[0])
        for patch in reversed(patches):
            patch.remove()
