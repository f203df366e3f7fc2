"""Casting of what a model predicts, data elements of mmengine included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from mmengine.structures import BaseDataElement
from torch import Tensor

from dtype_hooks.core.casting import cast_floating


@dataclass(frozen=True)
class CastPredictions:
    """Casts every floating tensor in a prediction to ``dtype``; picklable, so that it may lie on a module.

    Reaches into lists, tuples, dicts, dataclasses and mmengine's ``BaseDataElement``, whose fields are changed in
    place (they were made by this forward). Integer tensors, boxes of ints and meta information stay.
    """

    dtype: torch.dtype

    def __call__(self, output: Any) -> Any:
        """Return ``output`` with its floating tensors cast."""
        if isinstance(output, (list, tuple)):
            for item in output:
                self._cast_element(item)
        else:
            self._cast_element(output)
        return cast_floating(output, self.dtype)

    def _cast_element(self, item: Any) -> None:
        if not isinstance(item, BaseDataElement):
            return
        for name, value in list(item.items()):
            if isinstance(value, BaseDataElement):
                self._cast_element(value)
            elif isinstance(value, Tensor) and value.is_floating_point():
                item.set_field(value.to(self.dtype), name)
