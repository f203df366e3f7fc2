"""Loss scaling in fresh processes, alone or under torchrun, for tests/hooks/test_loss_scaling_resume.py and _ddp.py.

``straight`` trains K + M iterations and saves after K; ``resumed`` goes on from there; ``ddp`` compares and plants Infs.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mmengine.model import MMDistributedDataParallel
from mmengine.registry import MODEL_WRAPPERS
from mmengine.runner import FlexibleRunner
from processes import hand_back
from scaled_runs import CLIP, EXACT, joint, scaled_runner, scaler_of, single, two
from stored_runs import digest, log_text, state_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dtype_hooks.core.loss_scaling import LossScale, LossScaler
from dtype_hooks.core.shared_scaler import SharedScaler
from dtype_hooks.hooks.checkpoints import allow_mmengine_checkpoints
from dtype_hooks.hooks.loss_scaling_wrapper import ScaledWrapper

K, M = 6, 6
RANK = int(os.environ.get("RANK", 0))
# Overflows at first, then grows again, with one planted Inf before the checkpoint and one after it.
MOVING = {"init_scale": 2.0**11, "growth_interval": 3}
INFINITE = {5: "head.bias", 9: "stem.weight"}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {"wrapper": single("sgd")},
    "fused": {"wrapper": single("adamw_fused")},
    "clip": {"wrapper": single("adamw", clip_grad=dict(CLIP))},
    "accumulation": {"wrapper": single("adamw", accumulative_counts=2, clip_grad=dict(CLIP))},
    "two": {"wrapper": two("adamw"), "update": joint},
    "flexible": {"wrapper": single("adamw"), "runner_type": FlexibleRunner},
}


@MODEL_WRAPPERS.register_module()
class NotWrapped(nn.Module):
    """Leaves the gradients of each rank its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        return self.module.train_step(data, optim_wrapper)


@MODEL_WRAPPERS.register_module()
class JointDDP(MMDistributedDataParallel):
    """One DDP for a model with several optimizers; mmengine's own for that resumes nothing bit for bit."""

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        return {"loss": joint(self, data, optim_wrapper)}

    def loss(self, batch: Any) -> Any:
        return self._run_forward(batch, mode="loss")["loss"]


def run(folder: Path, name: str, loss_scale: Any = MOVING, wrapped: str = "", **kwargs: Any) -> Any:
    if "RANK" in os.environ:
        kwargs["launcher"] = "pytorch"
        wrapped = wrapped or ("JointDDP" if kwargs.get("update") else "MMDistributedDataParallel")
        wrapper = {"type": wrapped} if wrapped == "NotWrapped" else {"type": wrapped, "device_ids": None}
        kwargs["cfg"] = {"model_wrapper_cfg": wrapper}
    return scaled_runner(folder / name, loss_scale, seed=1 + RANK, **kwargs)


def trained(runner: Any) -> dict[str, Any]:
    with allow_mmengine_checkpoints():
        runner.train()
    wrapper = runner.optim_wrapper
    leaf = wrapper["head"] if hasattr(wrapper, "keys") else wrapper
    scale = runner.message_hub.get_scalar("train/grad_scale").current()
    return {
        **state_of(runner),
        "scaler": leaf.state_dict()["loss_scaler"],
        "logged": [scale, runner.message_hub.get_scalar("train/skipped_steps").current()],
        "fresh": log_text(runner).count("starts afresh"),
    }


def going_on(folder: Path, name: str, phase: str) -> dict[str, Any]:
    save = {"checkpoint": {"type": "CheckpointHook", "interval": K, "by_epoch": False, "max_keep_ckpts": -1}}
    options = {**RUNS[name], "iters": K + M, "infinite": dict(INFINITE), "default_hooks": save}
    if phase == "straight":
        return trained(run(folder, name, **options))
    options |= {"load_from": str(folder / name / f"iter_{K}.pth"), "resume": True}
    options["infinite"] = {
        call - K: where for call, where in INFINITE.items()
    }  # the model counts from 1 again
    return trained(run(folder, f"{name}_resumed", **options))


def other_states(folder: Path, kind: str) -> dict[str, Any]:
    """From a checkpoint without the key, or of which only the weights are loaded."""
    path = str(folder / "plain" / f"iter_{K}.pth")
    if kind == "without the key":
        checkpoint = torch.load(path, weights_only=False)
        del checkpoint["optimizer"]["loss_scaler"]
        path = str(folder / "without_the_key.pth")
        torch.save(checkpoint, path)
    options = {**RUNS["plain"], "iters": K + M, "load_from": path, "resume": kind != "weights"}
    if kind == "flexible weights":
        options |= {"runner_type": FlexibleRunner, "iters": 1, "resume": False}
    return trained(run(folder, kind.replace(" ", "_"), EXACT, **options))


def same(folder: Path, **options: Any) -> dict[str, Any]:
    """Scaled and unscaled, on ranks with different data."""
    scaled = run(folder, "scaled", EXACT, **options)
    scaled.train()
    unscaled = run(folder, "unscaled", None, **options)
    unscaled.train()
    return {
        "scaled": state_of(scaled)["parameters"],
        "unscaled": state_of(unscaled)["parameters"],
        "scale": scaler_of(scaled).scale,
    }


def inf_on_one(folder: Path, wrapped: str = "", optimizer: str = "sgd", **options: Any) -> dict[str, Any]:
    """Rank 1 alone has an Inf, in the third of its losses."""
    runner = run(
        folder,
        f"inf_{wrapped}_{optimizer}_{len(options)}",
        {"init_scale": 8.0},
        wrapped,
        wrapper=single(optimizer, clip_grad=dict(CLIP), **options),
        infinite={3: "head.bias"} if RANK == 1 else {},
        iters=4,
    )
    runner.train()
    shared = scaler_of(runner)
    return {
        "scale": [shared.scale, shared.scaler.get_scale(), shared.skipped_steps],
        "finite": all(bool(p.isfinite().all()) for p in runner.model.parameters()),
        "named": [line for line in log_text(runner).splitlines() if "step skipped" in line],
        "head": digest(runner.model.module.head.bias),
    }


def endless(folder: Path) -> dict[str, Any]:
    """Rank 1 has nothing but Infs: both stop, with what it has found."""
    infinite = dict.fromkeys(range(3, 100), "stem.weight") if RANK == 1 else {}
    runner = run(
        folder,
        "endless",
        {"init_scale": 8.0},
        "NotWrapped",
        infinite=infinite,
        iters=20,
        hook={"max_consecutive_skips": 4},
    )
    try:
        runner.train()
    except ValueError as error:
        return {"message": str(error), "iter": runner.iter + 1}
    return {"message": "", "iter": runner.iter}


def half_on_one(folder: Path) -> dict[str, Any]:
    """Rank 1 alone stores a parameter in float16: both stop before the start."""
    runner = run(folder, "half_on_one", "dynamic", "NotWrapped")
    if RANK == 1:
        runner.model.module.head.half()
    try:
        runner.train()
    except ValueError as error:
        return {"message": str(error)}
    return {"message": ""}


def sharded(scaled: bool, infinite_at: int | None = None) -> dict[str, Any]:
    """FSDP2, by hand: every rank has a part of each gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    wrapper = single("adamw", clip_grad=dict(CLIP))(model)
    choice = LossScale.make({"init_scale": 8.0})
    scaler = LossScaler("cpu", choice.arguments)
    shared = SharedScaler(choice, scaler)
    if scaled:
        scaler.start(torch.device("cpu"))
        ScaledWrapper(wrapper, shared).put_on()
    rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(RANK))
    for at, row in enumerate(rows.split(4)):
        loss = 16 * model(row).square().sum()
        wrapper.update_params(loss * torch.inf if (at, RANK) == (infinite_at, 1) else loss)
        shared.end_iteration()
    weights = [p.full_tensor() for p in model.parameters()]
    finite = all(bool(w.isfinite().all()) for w in weights)
    return {
        "weights": [digest(w) for w in weights],
        "scale": [shared.scale, scaler.get_scale(), shared.skipped_steps, finite],
    }


def scenarios(phase: str, folder: Path) -> dict[str, Callable[[], Any]]:
    runs = [name for name in RUNS if name != "flexible" or "RANK" not in os.environ]
    do: dict[str, Callable[[], Any]] = {
        name: functools.partial(going_on, folder, name, phase) for name in runs
    }
    if phase == "resumed" and "RANK" not in os.environ:
        for kind in ("without the key", "weights", "flexible weights"):
            do[kind] = functools.partial(other_states, folder, kind)
    if phase == "straight" and "RANK" in os.environ:
        cosine = {"type": "CosineAnnealingLR", "by_epoch": False, "T_max": 8}
        for optimizer in ("sgd", "adamw_fused"):
            clip = single(optimizer, clip_grad=dict(CLIP), accumulative_counts=2)
            do[f"same clip {optimizer}"] = functools.partial(
                same, folder, wrapper=clip, param_scheduler=cosine
            )
            do[f"same two {optimizer}"] = functools.partial(
                same, folder, wrapper=two(optimizer), update=joint
            )
        do["inf under ddp"] = functools.partial(inf_on_one, folder)
        do["inf not synced"] = functools.partial(inf_on_one, folder, accumulative_counts=2)
        do["inf not wrapped"] = functools.partial(inf_on_one, folder, "NotWrapped")
        do["inf fused"] = functools.partial(inf_on_one, folder, "NotWrapped", "adamw_fused")
        do["sharded"] = functools.partial(sharded, True)
        do["sharded unscaled"] = functools.partial(sharded, False)
        do["sharded inf"] = functools.partial(sharded, True, 2)
        do["endless"] = functools.partial(endless, folder)
        do["half on one"] = functools.partial(half_on_one, folder)
    return do


if __name__ == "__main__":
    hand_back(scenarios(sys.argv[2], Path(sys.argv[1])))
