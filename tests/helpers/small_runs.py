"""Small real trainings: a model that autocasts, its data, and a Runner around it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from mmengine.dataset import InfiniteSampler
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

_count = itertools.count()


class AutocastNet(BaseModel):
    """stem (Linear) -> norm (LayerNorm) -> relu -> head (Linear), under bf16 autocast."""

    def __init__(self, autocast: bool = True):
        super().__init__()
        self.autocast = autocast
        self.stem = nn.Linear(4, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor, y: Tensor | None = None, mode: str = "tensor") -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            out = self.predict(x)
        if mode == "tensor":
            return out
        loss = F.mse_loss(out.float(), y)
        return {"loss": loss} if mode == "loss" else [loss]

    def predict(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stem(x)).relu())


class HandCastNet(AutocastNet):
    """The same with norm and head held in float32 by casts written by hand."""

    def predict(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        given = x.dtype
        with torch.autocast("cpu", enabled=False):
            x = self.norm(x.float()).to(given)
        x = x.relu()
        with torch.autocast("cpu", enabled=False):
            return self.head(x.float()).to(given)


class MeanLoss(BaseMetric):
    def process(self, data_batch: Any, data_samples: Sequence[Any]) -> None:
        self.results.append(float(data_samples[0]))

    def compute_metrics(self, results: list) -> dict:
        return {"loss": sum(results) / len(results)}


class Losses(Hook):
    """Keeps the loss of every iteration and the metrics of every validation."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.validations: list[dict] = []

    def after_val_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        self.validations.append(dict(metrics or {}))

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.values.append(float(outputs["loss"]))


def data(rows: int = 8, seed: int = 1, endless: bool = False) -> DataLoader:
    """Batches of 4 rows, in order; endless for training, since mmengine sleeps 2 s before it starts a loader again."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, 4, generator=generator), torch.randn(rows, 2, generator=generator)
    dataset = TensorDataset(x, y)
    return DataLoader(
        dataset, batch_size=4, sampler=InfiniteSampler(dataset, shuffle=False) if endless else None
    )


def small_runner(
    work_dir: Path | str,
    model: nn.Module | None = None,
    hooks: Sequence[Any] = (),
    iters: int = 3,
    optimizer: dict | None = None,
    cfg: dict | None = None,
    train: bool = True,
    val_interval: int = 10_000,
    val: bool = False,
    test: bool = False,
    loader: DataLoader | None = None,
    **kwargs: Any,
) -> Runner:
    """A Runner for ``iters`` iterations; without ``model``, a seeded :class:`AutocastNet`."""
    if model is None:
        torch.manual_seed(0)
        model = AutocastNet()
    loops: dict[str, Any] = {}
    if train:
        loops["train_dataloader"] = loader or data(endless=True)
        loops["train_cfg"] = {"by_epoch": False, "max_iters": iters, "val_interval": val_interval}
        loops["optim_wrapper"] = {
            "type": "OptimWrapper",
            "optimizer": optimizer or {"type": "AdamW", "lr": 0.01},
            **kwargs.pop("optim_options", {}),
        }
    if val:
        loops |= {"val_dataloader": loader or data(), "val_cfg": {}, "val_evaluator": Evaluator([MeanLoss()])}
    if test:
        loops |= {
            "test_dataloader": loader or data(),
            "test_cfg": {},
            "test_evaluator": Evaluator([MeanLoss()]),
        }
    return Runner(
        model=model,
        work_dir=str(work_dir),
        custom_hooks=list(hooks),
        default_hooks=kwargs.pop("default_hooks", {"checkpoint": None}),
        cfg=cfg,
        randomness={"seed": 0},
        experiment_name=f"small_run_{next(_count)}",  # names are global to the process
        **loops,
        **kwargs,
    )


def log_text(runner: Runner) -> str:
    """What stands in the run's log file."""
    (path,) = Path(runner.log_dir).glob("*.log")
    return path.read_text()
