"""Small trainings with ScaleTracker, and what is left of one that two runs can compare."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from stored_runs import Rows, digest, state_of, stored_runner
from torch import Tensor, nn
from torch.nn import functional as F

from dtype_hooks.report.scales_file import read_rows

SGD = {"type": "SGD", "lr": 0.05, "momentum": 0.9}
ADAMW = {"type": "AdamW", "lr": 0.01}
QUIET: dict[str, Any] = {"type": "ScaleTracker", "plots": False, "verbose": False}


class Block(nn.Module):
    """Views, changes in place, random numbers, an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)
        self.act = nn.ReLU(inplace=True)
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = x.view(2, -1, 8)
        y = self.attn(y, y, y, need_weights=False)[0].reshape(x.shape)
        y = self.fc(y)
        y += x
        y[:, 0] = y[:, 0] * 2
        y = self.act(y)
        return F.dropout(y, 0.2, self.training)


class Net(BaseModel):
    """stem -> bn -> block twice -> head; batches are dicts of ``x`` (4, 8) and ``y`` (4, 4)."""

    def __init__(self, extra: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.stem, self.bn, self.block, self.head = (
            nn.Linear(8, 8),
            nn.BatchNorm1d(8),
            Block(),
            nn.Linear(8, 4),
        )
        self.extra = extra

    def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        h = self.block(self.block(self.bn(self.stem(x))))
        loss = F.mse_loss(self.head(h).float(), y)
        return {"loss": loss, "loss_l2": 1e-3 * h.float().square().mean()}


class Plain(BaseModel):
    """Nothing that looks across samples or draws random numbers: stem -> norm -> gelu -> head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        return {"loss": F.mse_loss(self.head(F.gelu(self.norm(self.stem(x)))).float(), y)}


class Losses(Hook):
    """Keeps what every train_step returned."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.values.append({name: torch.as_tensor(value).item() for name, value in (outputs or {}).items()})


def seeded(build: Callable[[], nn.Module] = Net) -> Any:
    torch.manual_seed(0)
    return build()


def tracked(
    work_dir: Path | str,
    tracker: dict[str, Any] | None,
    build: Callable[[], nn.Module] = Net,
    hooks: Sequence[Any] = (),
    **kwargs: Any,
) -> Any:
    """A Runner with ScaleTracker(**tracker), quiet where nothing else is said; without it for None."""
    ours = [] if tracker is None else [{**QUIET, **tracker}]
    return stored_runner(work_dir, seeded(build), [*ours, *hooks], **{"optimizer": SGD, **kwargs})


def rows(count: int) -> dict[str, Any]:
    """A loader for more iterations than the usual 32: mmengine sleeps 2 s before it begins again."""
    return {
        "batch_size": 4,
        "dataset": Rows(count),
        "sampler": {"type": "DefaultSampler", "shuffle": True, "seed": 3},
        "collate_fn": {"type": "default_collate"},
    }


def left_of(runner: Any, losses: Losses) -> dict[str, Any]:
    """Weights, buffers, optimizer states, losses, and what the random generators give next."""
    return {
        **state_of(runner),
        "losses": losses.values,
        "random": [random.random(), float(np.random.rand()), digest(torch.rand(3))],
        "gradients": [None if p.grad is None else digest(p.grad) for p in runner.model.parameters()],
    }


def outcome(work_dir: Path | str, tracker: dict[str, Any] | None, **kwargs: Any) -> dict[str, Any]:
    """Train and return :func:`left_of`."""
    losses = Losses()
    runner = tracked(work_dir, tracker, hooks=[losses, *kwargs.pop("hooks", ())], **kwargs)
    runner.train()
    return left_of(runner, losses)


def rows_of(runner: Any) -> list[dict[str, Any]]:
    """The rows of the run's file."""
    return read_rows(Path(runner.log_dir) / "scales.jsonl")


def row_of(rows: Sequence[dict[str, Any]], name: str, direction: str = "forward") -> dict[str, Any]:
    """The one row of a tensor."""
    (row,) = [row for row in rows if row["name"] == name and row["direction"] == direction]
    return row


def log_of(runner: Any) -> str:
    """What stands in the run's log file."""
    (path,) = Path(runner.log_dir).glob("*.log")
    return path.read_text()
