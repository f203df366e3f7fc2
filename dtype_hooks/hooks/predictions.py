"""Casting of what a model predicts, data elements of mmengine included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from mmengine.structures import BaseDataElement

from dtype_hooks.core.casting import cast_floating, tensors_in


@dataclass(frozen=True)
class CastPredictions:
    """Casts every floating tensor in a prediction to ``dtype``; picklable, so that it may lie on a module.

    Reaches into lists, tuples, dicts, dataclasses and mmengine's ``BaseDataElement``, whose fields are changed in place, as
    models themselves do to the data samples that they are given: fields that came in with those, ground truth above all,
    stay as they are. So do integer tensors and meta information.
    """

    dtype: torch.dtype

    def given(self, inputs: Any) -> frozenset[int]:
        """The ids of the tensors in data elements among a call's arguments; to be asked before the call."""
        return frozenset(
            id(x) for element in _elements(inputs) for value in element.values() for x in tensors_in(value)
        )

    def __call__(self, output: Any, given: frozenset[int] = frozenset()) -> Any:
        """Return ``output`` with its floating tensors cast, but for those in ``given``."""
        for element in _elements(output):
            for name, value in list(element.items()):
                new = value if any(id(x) in given for x in tensors_in(value)) else self._cast(value)
                if new is not value:
                    element.set_field(new, name)
        return self._cast(output)

    def _cast(self, value: Any) -> Any:
        return cast_floating(value, self.dtype)


def _elements(value: Any) -> Iterator[BaseDataElement]:
    """Every data element in ``value``, and in the fields of those."""
    if isinstance(value, BaseDataElement):
        yield value
        for _, field in value.items():
            yield from _elements(field)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _elements(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _elements(item)
