"""From one rank's record to a sample's rows: free of loss scale and accumulation, merged over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mmengine.dist import is_main_process

from dtype_hooks.hooks.ranks import gather_from_ranks
from dtype_hooks.hooks.recorded_step import GradientScale
from dtype_hooks.scales.record import SCHEMA, Entry
from dtype_hooks.scales.statistics import TensorStatistics

Row = dict[str, Any]


@dataclass(frozen=True)
class Sampled:
    """One tensor of one direction in one sample.

    Attributes:
        columns: What a row says of the tensor itself.
        direction: ``"forward"`` or ``"backward"``.
        statistics: Free of :attr:`grad_scale`, save the counts per format.
        grad_scale: The factor that the gradient carried; None in the forward, or where it is not known.
    """

    columns: Row
    direction: str
    statistics: TensorStatistics
    grad_scale: float | None

    @property
    def key(self) -> tuple[str, str]:
        """What is the same tensor on all ranks and in all samples."""
        return self.columns["name"], self.direction

    def merged(self, other: Sampled) -> Sampled:
        """With another rank's."""
        return Sampled(self.columns, self.direction, self.statistics.merge(other.statistics), self.grad_scale)

    def as_row(self, iteration: int) -> Row:
        """The row of the file."""
        return {
            "schema": SCHEMA,
            "iter": iteration,
            **self.columns,
            "direction": self.direction,
            **self.statistics.as_row(),
            "grad_scale": self.grad_scale,
        }


def sampled(
    read: Iterable[tuple[Entry, str, TensorStatistics]], scale: GradientScale | None
) -> list[Sampled]:
    """This rank's tensors, gradients divided by the factor that they carried.

    Gradients of parameters are left out where they are not yet reduced over the ranks; so are single finite elements that
    need no gradient: box by box and sample by sample, target assignment makes hundreds of them, other ones in every batch.
    """
    found = []
    for entry, direction, statistics in read:
        factor = None
        if (
            entry.kind != "parameter"
            and not entry.requires_grad
            and statistics.numel == statistics.finite == 1
        ):
            continue
        if direction == "backward" and entry.kind == "parameter":
            if scale is not None and not scale.reduced:
                continue
            factor = scale and scale.of_parameters
        elif direction == "backward":
            factor = scale and scale.of_activations
        if factor:
            statistics = statistics.scaled(1 / factor)
        found.append(Sampled(entry.columns(), direction, statistics, factor or None))
    return found


def merge_ranks(mine: list[Sampled]) -> list[Sampled]:
    """All ranks' activations by key, in the order of rank 0, then what others have besides; parameters are rank 0's.

    A collective, of which rank 0 alone gets the result. Ranks may have run different parts of the model.
    """
    parameters = [each for each in mine if each.columns["kind"] == "parameter"]
    others = [each for each in mine if each.columns["kind"] != "parameter"]
    gathered = gather_from_ranks(others)
    if not is_main_process():
        return []
    merged: dict[tuple[str, str], Sampled] = {}
    for _, each in gathered:
        held = merged.get(each.key)
        merged[each.key] = each if held is None else held.merged(each)
    return _in_order([*parameters, *merged.values()])


def _in_order(found: Iterable[Sampled]) -> list[Sampled]:
    return sorted(found, key=lambda each: (each.columns["order"], each.direction == "backward"))
