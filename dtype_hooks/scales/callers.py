"""Which module's method calls a function: forwards are seen as calls, other methods only in Python's frames."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

from torch import nn

from dtype_hooks.scales.places import Place

DEPTH = 40
"""How many frames up a method is looked for."""

_CALL = nn.Module._call_impl.__code__
_HERE = str(Path(__file__).parent)


def method_place(places: dict[int, Place], place: Place) -> Place:
    """The module whose method runs innermost: ``place``, whose forward runs, or one that it has called a method of.

    A detector calls ``self.head.loss(features)``: what that computes is the head's, though the head is not called. Only
    frames up to the call of ``place`` are looked at, and of these only methods' (whose first argument is ``self``): asking
    a frame for its variables keeps them until it ends.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    for _ in range(DEPTH):
        if frame is None or _is_call(frame.f_code):
            return place
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            owner = frame.f_locals.get("self")
            found = places.get(id(owner))
            if found is not None and found.module is owner:
                return found
        frame = frame.f_back
    return place


def _is_call(code: CodeType) -> bool:
    """Whether it is that of a module's call, ours around it, or that of a recompute."""
    ours = code.co_filename.startswith(_HERE) and code.co_name not in (
        "__torch_function__",
        "__torch_dispatch__",
    )
    return code is _CALL or ours
