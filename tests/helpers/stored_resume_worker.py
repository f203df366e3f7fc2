"""``straight`` trains K + M iterations and saves after K; ``resumed``, in a fresh process, goes on from there.

For tests/hooks/test_stored_resume.py, alone or under torchrun.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch
from mmengine.runner import FlexibleRunner
from processes import hand_back
from stored_runs import (
    OPTIMIZERS,
    CastDataInBeforeTrain,
    log_text,
    overrider,
    seeded,
    store,
    stored_runner,
    train,
)

from dtype_hooks.hooks.checkpoints import allow_mmengine_checkpoints

K, M = 3, 3
TWO = ("norm", "head")
EMA = {"type": "EMAHook", "momentum": 0.3, "update_buffers": True}
WARM_UP = {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "begin": 0, "end": 5}


def runner(folder: Path, name: str, kind: str, optimizer: str, **kwargs: Any) -> Any:
    """``kind``: the hook stores; the model is cast ``before``; ``naive``; ``nobody`` stores. All compute alike."""
    model = seeded()
    hooks: list[Any] = [overrider(TWO, override_parameters=kind == "hook", check_interval=2)]
    # The naive cast does not get past EMAHook. Nor does mmengine's EMAHook resume under FlexibleRunner, which loads
    # before EMAHook has made its copy.
    if kind != "naive" and kwargs.get("runner_type") is not FlexibleRunner:
        hooks.append(EMA)
    if kind == "before":
        store(model, TWO, torch.bfloat16)
    if kind == "naive":
        hooks.append(CastDataInBeforeTrain(TWO, torch.bfloat16))
    return stored_runner(
        folder / name,
        model,
        hooks,
        iters=K + M,
        optimizer=OPTIMIZERS[optimizer],
        param_scheduler=dict(WARM_UP),
        **kwargs,
    )


def saved(folder: Path, name: str) -> str:
    return str(folder / name / f"iter_{K}.pth")


def straight(folder: Path, kind: str, optimizer: str, **kwargs: Any) -> Any:
    """Train K + M iterations, saving after K."""
    return train(runner(folder, f"{kind}_{optimizer}", kind, optimizer, save_at=K, **kwargs))


def resumed(folder: Path, written_by: str, kind: str, optimizer: str, **kwargs: Any) -> Any:
    """Train M more iterations, from what ``straight`` has saved."""
    path = saved(folder, f"{written_by}_{optimizer}")
    name = f"{kind}_{optimizer}_from_{written_by}"
    going_on = runner(folder, name, kind, optimizer, load_from=path, resume=True, **kwargs)
    with allow_mmengine_checkpoints():
        return train(going_on) | {"rounded": log_text(going_on).count("are rounded")}


def flexible(folder: Path, kind: str, written_by: str | None = None) -> Any:
    """FlexibleRunner, which loads a checkpoint before ``before_run``."""
    path = {"load_from": saved(folder, f"flexible_{written_by}"), "resume": True} if written_by else {}
    name = f"flexible_{kind}" + (f"_from_{written_by}" if written_by else "")
    one = runner(folder, name, kind, "adamw", save_at=K, runner_type=FlexibleRunner, **path)
    with allow_mmengine_checkpoints():
        return train(one) | {"rounded": log_text(one).count("are rounded")}


def loaded(folder: Path, kind: str) -> Any:
    """Only the weights of a float32 checkpoint (``load_from`` without ``resume``), then M iterations."""
    path = saved(folder, "nobody_adamw")
    one = runner(folder, f"loaded_{kind}", kind, "adamw", load_from=path)
    with allow_mmengine_checkpoints():
        return train(one) | {"rounded": log_text(one).count("are rounded")}


def scenarios(phase: str, folder: Path) -> dict[str, Any]:
    do: dict[str, Any] = {}
    for optimizer in OPTIMIZERS:
        for written_by in ("hook", "nobody"):
            if phase == "straight":
                do[f"{written_by}_{optimizer}"] = functools.partial(straight, folder, written_by, optimizer)
            for kind in ("hook", "before", "naive", "nobody") if phase == "resumed" else ():
                do[f"{kind}_{optimizer}_from_{written_by}"] = functools.partial(
                    resumed, folder, written_by, kind, optimizer
                )
    if "RANK" not in os.environ:
        for written_by in ("hook", "nobody"):
            if phase == "straight":
                do[f"flexible_{written_by}"] = functools.partial(flexible, folder, written_by)
            for kind in ("hook", "before") if phase == "resumed" else ():
                do[f"flexible_{kind}_from_{written_by}"] = functools.partial(
                    flexible, folder, kind, written_by
                )
        for kind in ("hook", "before") if phase == "resumed" else ():
            do[f"loaded_{kind}"] = functools.partial(loaded, folder, kind)
    return do


if __name__ == "__main__":
    hand_back(scenarios(sys.argv[2], Path(sys.argv[1])))
