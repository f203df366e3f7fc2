"""Decisions that all ranks take together, so that none waits for another that has raised."""

from __future__ import annotations

from typing import TypeVar

import torch
from mmengine.dist import all_gather_object, all_reduce, get_world_size

from dtype_hooks.errors import DtypeHooksError

Item = TypeVar("Item")


def raise_together(error: Exception | None) -> None:
    """Raise on every rank where any rank has an error. A collective: every rank calls it.

    Args:
        error: This rank's error, or None.

    Raises:
        DtypeHooksError: Where another rank has the error, naming it; otherwise ``error`` itself.
    """
    if get_world_size() > 1:
        texts = all_gather_object(None if error is None else f"{type(error).__name__}: {error}")
        first = next((rank for rank, text in enumerate(texts) if text is not None), None)
        if error is None and first is not None:
            raise DtypeHooksError(f"rank {first}: {texts[first]}")
    if error is not None:
        raise error


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is true on any rank: one all-reduce of a single number. A collective."""
    if get_world_size() == 1:
        return flag
    total = torch.tensor([float(flag)])
    all_reduce(total, op="sum")
    return bool(total.item() > 0)


def gather_from_ranks(items: list[Item]) -> list[tuple[int, Item]]:
    """``(rank, item)`` of every rank's items, in order of rank. A collective."""
    gathered = all_gather_object(items) if get_world_size() > 1 else [items]
    return [(rank, item) for rank, own in enumerate(gathered) for item in own]
