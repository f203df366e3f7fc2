"""Under torchrun: AutocastHook below DDP, for tests/hooks/test_autocast_hook.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from autocast_runs import HOOK, Net, seeded
from dtype_recorder import record_dtypes
from mmengine.hooks import Hook
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.runner import Runner
from processes import hand_back
from small_runs import data, small_runner
from stored_runs import digest

import dtype_hooks  # noqa: F401  registers the hooks

RANK = int(__import__("os").environ.get("RANK", 0))


class ByHand(Net):
    """Autocast written in, off for the head."""

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x)).relu()
        with torch.autocast("cpu", enabled=False):
            return self.head(x.float())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(*args, **kwargs)


class Written(Net):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(*args, **kwargs)


def run(model: Any, hooks: list, **kwargs: Any) -> Runner:
    return small_runner(
        Path(sys.argv[1]) / "runs",
        model,
        hooks,
        loader=data(seed=RANK, endless=True),
        launcher="pytorch",
        cfg={"model_wrapper_cfg": {"type": "MMDistributedDataParallel", "device_ids": None}},
        **kwargs,
    )


def digests(runner: Runner) -> dict[str, str]:
    return {name.removeprefix("module."): digest(t) for name, t in runner.model.state_dict().items()}


def training() -> dict:
    runner = run(seeded(Net), [{**HOOK, "exclude": ["head"]}])
    with record_dtypes(runner.model) as calls:
        runner.train()
    in_model, without = run(seeded(ByHand), []), run(seeded(Net), [])
    in_model.train()
    without.train()
    return {
        "dtypes": {m: sorted(map(str, calls.dtypes("addmm", m))) for m in ("stem", "head")},
        "ours": digests(runner),
        "in_model": digests(in_model),
        "without": digests(without),
        "data": digest(next(iter(data(seed=RANK)))[0]),
    }


def cast_nodes() -> dict:
    sgd = {"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}}
    ours = run(seeded(Net), [{**HOOK, "cast_nodes": True}], **sgd)
    ours.train()
    before = run(seeded(Written).bfloat16(), [], **sgd)
    before.train()
    return {"ours": digests(ours), "before": digests(before)}


class DeleteOnRankOne(Hook):
    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        if RANK == 1 and runner.iter == 0:
            del runner.model.module.__dict__["forward"]


def gone() -> dict:
    runner = run(seeded(Net), [{**HOOK, "check_interval": 1}, DeleteOnRankOne()], iters=4)
    runner.train()
    with record_dtypes(runner.model) as calls:
        runner.model.module(torch.ones(1, 4))
    return {"dtypes": sorted(map(str, calls.dtypes("addmm", "stem"))), "weights": digests(runner)}


class Amp(AmpOptimWrapper):
    def __init__(self, optimizer: Any) -> None:
        OptimWrapper.__init__(self, optimizer)  # its own wants a GPU


Amp.__name__ = "AmpOptimWrapper"


def raised() -> dict:
    runner = run(seeded(Net), [HOOK])
    if RANK == 0:
        runner.optim_wrapper = Amp(torch.optim.SGD(runner.model.parameters(), lr=0.1))
    try:
        runner.train()
    except ValueError as error:
        return {"message": str(error)}
    return {"message": ""}


if __name__ == "__main__":
    hand_back({"training": training, "cast_nodes": cast_nodes, "gone": gone, "raised": raised})
