"""What stands where on the axes of pictures of scales: tensors in order, the names that fit, samples over time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from dtype_hooks.report.scales_file import Row, iteration

MAX_LABEL = 40
"""Characters of a tensor's name on an axis."""


def execution_order(rows: Iterable[Row]) -> list[str]:
    """The names of all tensors in order of execution.

    Samples need not hold the same: the largest gives the order, and what it lacks comes after what preceded it
    in its own sample.
    """
    samples: dict[int, dict[str, int]] = {}
    for row in rows:
        samples.setdefault(iteration(row), {})[row["name"]] = row["order"]
    order: list[str] = []
    for sample in sorted(samples.values(), key=len, reverse=True):
        if not sample.keys() <= set(order):
            order = _merged(order, sorted(sample, key=sample.__getitem__))
    return order


def choose_labels(names: Sequence[str], capacity: int) -> list[tuple[int, str]]:
    """Choose which tensors to name where ``capacity`` names fit beside one another, and by what.

    All of them where there is room. Else the first one of each module, beginning with the outermost modules and going
    inwards, and in the end any, each if there is room for it left between those chosen. Where that ends at some depth of
    modules the names do as well: ``model.layers.3``.

    Returns:
        Positions and texts; the first tensor is always among them.
    """
    distance = max(math.ceil(len(names) / max(capacity, 1)), 1)
    if distance == 1:
        return list(enumerate(names))
    parts = [name.partition(":")[0].split(".") for name in names]
    chosen: list[int] = []
    reached = 0
    deepest = max(map(len, parts), default=0) + 1
    for depth in range(1, deepest + 1):
        prefixes: Sequence[Any] = names if depth == deepest else [each[:depth] for each in parts]
        new = [_insert_if_free(chosen, at, distance) for at in _run_starts(prefixes)]
        reached = depth if any(new) else reached
    return [
        (at, names[at] if reached == deepest else ".".join(parts[at][:reached]) or names[at]) for at in chosen
    ]


def shorten(name: str, longest: int = MAX_LABEL) -> str:
    """Shorten a long dotted name, from its first part on, to initials: ``m.l.11.self_attn.q_proj:linear``.

    Numbers stay as they are, since they say which layer it is. What is too long all the same loses its middle.
    """
    parts = name.split(".")
    for at, part in enumerate(parts[:-2]):
        if len(".".join(parts)) <= longest:
            break
        parts[at] = part if part.isdigit() else part[:1]
    name = ".".join(parts)
    half = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[:half]}…{name[half + 1 - longest :]}"


def time_cells(samples: Sequence[int]) -> tuple[list[float], list[int | None]]:
    """Lay samples along an axis of iterations.

    Returns:
        The edges of the cells, and what is in each: an iteration; or None in a gap, where samples are missing, seen by a
        distance of more than one and a half of those beside it.
    """
    steps = [later - earlier for earlier, later in pairwise(samples)]
    if not steps:
        return [sample + side for sample in samples for side in (-0.5, 0.5)] or [0.0, 1.0], list(samples) or [
            None
        ]
    edges: list[float] = [samples[0] - steps[0] / 2]
    slots: list[int | None] = [samples[0]]
    for at, step in enumerate(steps):
        before, after = (
            steps[at - 1 : at] or steps[at + 1 : at + 2],
            steps[at + 1 : at + 2] or steps[at - 1 : at],
        )
        if before and step > 1.5 * max(before + after):
            edges += [samples[at] + before[0] / 2, samples[at + 1] - after[0] / 2]
            slots += [None, samples[at + 1]]
        else:
            edges.append((samples[at] + samples[at + 1]) / 2)
            slots.append(samples[at + 1])
    return [*edges, samples[-1] + (samples[-1] - edges[-1])], slots


def thinned(items: Sequence[Any], most: int) -> list[Any]:
    """Every k-th item, with the least k that leaves ``most`` or fewer."""
    return list(items[:: max(math.ceil(len(items) / most), 1)])


def _merged(order: Sequence[str], names: Sequence[str]) -> list[str]:
    """``order`` with what it lacks of ``names`` put after what precedes it there."""
    known = set(order)
    after: dict[str | None, list[str]] = {}
    last: str | None = None
    for name in names:
        if name in known:
            last = name
        else:
            after.setdefault(last, []).append(name)
    return [*after.get(None, ()), *(new for name in order for new in (name, *after.get(name, ())))]


def _run_starts(keys: Sequence[Any]) -> list[int]:
    """Where each run of equal keys begins."""
    return [at for at, key in enumerate(keys) if not at or keys[at - 1] != key]


def _insert_if_free(chosen: list[int], at: int, distance: int) -> bool:
    """Insert a position into sorted ones unless one is closer than ``distance``; tell whether it was."""
    place = bisect_left(chosen, at)
    free = all(abs(other - at) >= distance for other in chosen[max(place - 1, 0) : place + 1])
    if free:
        chosen.insert(place, at)
    return free
