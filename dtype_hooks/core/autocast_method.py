"""The object that stands in for a node's forward and runs it in an autocast region of its own."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from dtype_hooks.core.autocast import NARROW
from dtype_hooks.core.casting import map_tensors
from dtype_hooks.core.compiling import never_compiled_alone, trace_backward_without_autocast
from dtype_hooks.core.stand_in import StandIn
from dtype_hooks.node_dtype import node_scope, warn_implicit_downcast


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


class CastOutput(Protocol):
    """What casts the outputs of predicting calls."""

    def given(self, inputs: Any) -> frozenset[int]:
        """Note, before the call, what of its inputs is not to be cast where it comes out again."""

    def __call__(self, output: Any, given: frozenset[int]) -> Any:
        """Return ``output`` with its floating tensors cast."""


@never_compiled_alone
class AutocastMethod(StandIn):
    """A node's ``forward`` in a fresh ``torch.autocast`` region, named by :func:`~dtype_hooks.node_dtype.node_scope`.

    A fresh region for each call is what makes nested calls, recursion, threads, exceptions, recomputed checkpoints and
    weights that change in place between calls right. A node without a dtype is kept out: autocast is off inside, and
    arguments that a region around it has made narrow come in the dtype that its parameters are stored in.

    Attributes:
        node: The node's name.
        device_type: Of the region.
        dtype: Of the region; None turns autocast off.
        cache_enabled: Of the region.
        phase: Says whether regions are opened now.
        has_region_around: Whether another node's region may have made the arguments narrow.
        cast_output: Casts what predicting calls return; None leaves it.
        called: Whether an eager call has come here.
    """

    layer = 1  # outside an override of the same method, which turns autocast off again

    def __init__(self, module: nn.Module, node: str) -> None:
        super().__init__(module, "forward")
        self.node = node
        self.device_type = "cpu"
        self.dtype: torch.dtype | None = None
        self.cache_enabled: bool | None = None
        self.phase = Phase(on=False)
        self.has_region_around = False
        self.cast_output: CastOutput | None = None
        self.called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cast_output = self.cast_output
        if cast_output is None or not (self.phase.predicts or kwargs.get("mode") == "predict"):
            return self._in_region(args, kwargs)
        given = cast_output.given((args, kwargs))
        return cast_output(self._in_region(args, kwargs), given)

    def switch_off(self) -> None:
        """Be as if not there, where it cannot be taken off: somebody has wrapped it since."""
        self.phase, self.cast_output = Phase(on=False), None

    def _in_region(self, args: tuple, kwargs: dict) -> Any:
        compiling = is_compiling()
        if not compiling:
            self.called = True
        if not self.phase.on:
            return self._original(args, kwargs)
        if compiling:  # dynamo cannot trace a change of a context variable
            trace_backward_without_autocast()
            return self._autocast(args, kwargs)
        with node_scope(self.node, self.dtype):
            return self._autocast(args, kwargs)

    def _autocast(self, args: tuple, kwargs: dict) -> Any:
        if self.dtype is None:
            if self.has_region_around:
                args, kwargs = self._as_stored(args, kwargs)
            with torch.autocast(self.device_type, enabled=False):
                return self._original(args, kwargs)
        with torch.autocast(self.device_type, self.dtype, True, self.cache_enabled):
            return self._original(args, kwargs)

    def _as_stored(self, args: tuple, kwargs: dict) -> Any:
        """The arguments with what a region has made narrow in the dtype of the parameters."""
        stored = _computed_dtype(self.module)

        def cast(x: Tensor) -> Tensor:
            if x.dtype is stored or x.dtype not in NARROW:
                return x
            warn_implicit_downcast("arguments", x.dtype, stored)
            return x.to(stored)

        return map_tensors(cast, (args, kwargs))


def _computed_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of the module's first floating parameter or buffer of more than 8 bits, else torch's default dtype."""
    for tensors in (module.parameters(), module.buffers()):
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.itemsize > 1:  # the others are for storage alone
                return tensor.dtype
    return torch.get_default_dtype()
