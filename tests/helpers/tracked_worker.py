"""Under torchrun: ScaleTracker on two ranks, for tests/hooks/test_scale_tracker_ranks.py."""

from __future__ import annotations

import functools
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import torch
from processes import hand_back
from stored_runs import Rows, state_of
from torch import Tensor, nn
from torch.nn import functional as F
from tracked_runs import ADAMW, SGD, Losses, Net, Plain, outcome, rows_of, tracked

import dtype_hooks

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
AT = 3

ORDERED = {
    "batch_size": 8 // WORLD,
    "dataset": Rows(),
    "sampler": {"type": "DefaultSampler", "shuffle": False},
    "collate_fn": {"type": "default_collate"},
}
"""Rank r has the samples r, r + 2, ... of what one process has as a whole."""


def folder(name: str) -> Path:
    return Path(sys.argv[1]) / name


def accumulating(counts: int) -> dict[str, Any]:
    return {"type": "OptimWrapper", "optimizer": SGD, "accumulative_counts": counts}


BITWISE: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": SGD},
    "adamw bf16": {"optimizer": ADAMW, "hooks": [{"type": "AutocastHook", "dtype": "bfloat16"}]},
    "accumulation": {"optim_wrapper": accumulating(2)},
}
TRACKERS: dict[str, Any] = {
    "without": None,
    "functions": {"interval": 2},
    "aten": {"interval": 2, "level": "aten"},
    "watched": {"interval": 3, "watch_nonfinite": True},
}


def bitwise() -> dict[str, dict[str, Any]]:
    return {
        f"{run} {tracker}": outcome(folder("bitwise"), TRACKERS[tracker], iters=4, **dict(BITWISE[run]))
        for run, tracker in itertools.product(BITWISE, TRACKERS)
    }


def rows(counts: int = 1) -> list[dict[str, Any]]:
    """What the file of rank 0 holds; the other rank sees the same file."""
    runner = tracked(
        folder(f"rows{counts}"),
        {"interval": 1},
        Plain,
        iters=4,
        train_dataloader=ORDERED,
        optim_wrapper=accumulating(counts),
    )
    runner.train()
    torch.distributed.barrier() if WORLD > 1 else None
    return rows_of(runner)


class Branches(Plain):
    """Each rank runs a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

    def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        h = self.own[RANK](self.norm(self.stem(x)))
        return {"loss": F.mse_loss(self.head(h), y)}


def branches() -> list[dict[str, Any]]:
    runner = tracked(
        folder("branches"), {"interval": 1}, Branches, iters=1, wrapper={"find_unused_parameters": True}
    )
    runner.train()
    torch.distributed.barrier()
    return rows_of(runner)


class Planted(Net):
    """Something bad in the third step, on one rank or on all."""

    def __init__(self, where: str, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.where, self.ranks = where, ranks
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        self.step += 1
        h = self.bn(self.stem(x))
        if int(self.step) == AT and RANK in self.ranks:
            if self.where == "forward":
                h = h + (h * 0 - 1).log()
            elif self.where == "backward":
                h = h + (h * 0).abs().sqrt()
        loss = F.mse_loss(self.head(self.block(h)), y)
        if int(self.step) == AT and RANK in self.ranks and self.where == "weights":
            loss = loss + WeightGradient.apply(self.head.weight).sum() * 0
        logged = torch.tensor(1.0)
        if int(self.step) == AT and RANK in self.ranks and self.where == "loss":
            logged = torch.tensor(-1.0).log()
        return {"loss": loss, "loss_logged": logged}


class WeightGradient(torch.autograd.Function):
    """A gradient that is bad in a parameter alone."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("nan")


def nonfinite(where: str, ranks: tuple[int, ...], how: str, what: str) -> dict[str, Any]:
    tracker = {
        "sampled": {"interval": 1},
        "watched": {"interval": 0, "watch_nonfinite": True},
        "without": None,
    }[how]
    name = f"{where}_{how}_{what}_{len(ranks)}"
    losses, error = Losses(), ""
    runner = tracked(
        folder(name),
        None if tracker is None else {**tracker, "on_nonfinite": what},
        lambda: Planted(where, ranks),
        [losses, {"type": "CheckpointHook", "interval": AT, "by_epoch": False}],
        iters=5,
    )
    try:
        runner.train()
    except dtype_hooks.NonFiniteError as caught:
        error = str(caught)
    torch.distributed.barrier()
    return {
        "error": error,
        "log": "".join(path.read_text() for path in Path(runner.log_dir).glob("*.log")),
        "state": state_of(runner) if not error else None,
        "losses": str(losses.values),
        "checkpoint": (folder(name) / f"iter_{AT}.pth").is_file(),
        "iteration": runner.iter + 1,
    }


NONFINITE = [
    *((where, (1,), how, "warn") for where in ("forward", "backward") for how in ("sampled", "watched")),
    *((where, (1,), "without", "warn") for where in ("forward", "backward")),
    *(("forward", (1,), how, "raise") for how in ("sampled", "watched")),
    ("backward", (0, 1), "watched", "raise"),
    ("loss", (1,), "watched", "warn"),
    ("weights", (1,), "sampled", "warn"),
    ("weights", (1,), "watched", "warn"),
]


def together() -> dict[str, Any]:
    """The three hooks in every order."""
    hooks = {
        "tracker": {
            "type": "ScaleTracker",
            "interval": 2,
            "plots": False,
            "verbose": False,
            "watch_nonfinite": True,
        },
        "autocast": {"type": "AutocastHook", "dtype": "float16", "loss_scale": "dynamic"},
        "overrider": {"type": "DtypeOverrider", "patterns": ["bn"], "dtype": "float32"},
    }
    found = {}
    for order in [*itertools.permutations(hooks), ("autocast", "overrider")]:
        losses = Losses()
        runner = tracked(
            folder("together"), None, hooks=[*(dict(hooks[name]) for name in order), losses], iters=3
        )
        runner.train()
        found[" ".join(order)] = {
            "state": state_of(runner),
            "losses": str(losses.values),
            "dtypes": {
                row["name"]: row["dtype"]
                for row in (rows_of(runner) if RANK == 0 and "tracker" in order else [])
                if row["direction"] == "forward"
            },
        }
    return found


SCENARIOS = {
    "bitwise": bitwise,
    "rows": rows,
    "accumulated rows": functools.partial(rows, 2),
    "branches": branches,
    "together": together,
    **{
        " ".join([w, *map(str, r), h, o]): functools.partial(nonfinite, w, r, h, o)
        for w, r, h, o in NONFINITE
    },
}

if __name__ == "__main__":
    hand_back(SCENARIOS)
