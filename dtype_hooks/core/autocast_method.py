"""The object that stands in for a node's forward and runs it in an autocast region of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from dtype_hooks.core.casting import map_tensors
from dtype_hooks.core.native import stored_dtype
from dtype_hooks.core.stand_in import StandIn
from dtype_hooks.node_dtype import node_scope


class Phase:
    """Which phase the run is in; one object for all regions of a run, and for copies of them.

    Attributes:
        on: Whether regions are opened in this phase.
        predicts: Whether the outputs are predictions (validation and testing).
    """

    def __init__(self, on: bool = True, predicts: bool = False) -> None:
        self.on = on
        self.predicts = predicts

    def __deepcopy__(self, memo: dict) -> Phase:
        return self  # an EMA copy goes through the phases of its run


class AutocastMethod(StandIn):
    """A node's ``forward`` in a fresh ``torch.autocast`` region, named by :func:`~dtype_hooks.node_dtype.node_scope`.

    A fresh region for each call is what makes nested calls, recursion, threads, exceptions, recomputed checkpoints and
    weights that change in place between calls right. A node without a dtype is kept out: autocast is off inside, and
    arguments that a region around it has made narrow come in the dtype that its parameters are stored in.
    """

    layer = 1  # outside an override of the same method, which turns autocast off again

    def __init__(
        self,
        module: nn.Module,
        node: str,
        device_type: str,
        dtype: torch.dtype | None,
        cache_enabled: bool | None,
        phase: Phase,
    ) -> None:
        super().__init__(module, "forward")
        self.node = node
        self.device_type = device_type
        self.dtype = dtype
        self.cache_enabled = cache_enabled
        self.phase = phase
        self.cast_output: Callable[[Any], Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        y = self._in_region(args, kwargs) if self.phase.on else self._original(args, kwargs)
        if self.cast_output is not None and (self.phase.predicts or kwargs.get("mode") == "predict"):
            return self.cast_output(y)
        return y

    def _in_region(self, args: tuple, kwargs: dict) -> Any:
        if is_compiling():  # dynamo cannot trace a change of a context variable
            return self._autocast(args, kwargs)
        with node_scope(self.node, self.dtype):
            return self._autocast(args, kwargs)

    def _autocast(self, args: tuple, kwargs: dict) -> Any:
        if self.dtype is None:
            dtype = stored_dtype(self.module)
            with torch.autocast(self.device_type, enabled=False):
                return self._original(
                    *map_tensors(lambda x: x.to(dtype) if is_narrow(x) else x, (args, kwargs))
                )
        with torch.autocast(self.device_type, self.dtype, True, self.cache_enabled):
            return self._original(args, kwargs)


def is_narrow(x: Tensor) -> bool:
    """Whether ``x`` is in a dtype that autocast casts to."""
    return x.dtype is torch.bfloat16 or x.dtype is torch.float16
