"""Under torchrun: FSDP2's ``fully_shard`` on gloo, for tests/hooks/test_stored_fsdp.py."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from processes import hand_back
from stored_runs import SGD, Net, digest, overrider, seeded, stored_runner
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dtype_hooks import override_dtype

FOLDER = sys.argv[1] if len(sys.argv) > 1 else ""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.lin(self.norm(x)).relu()


def blocks() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.LayerNorm(8), nn.Linear(8, 4))


def shard(model: nn.Module, units: Sequence[str] = (), policy: MixedPrecisionPolicy | None = None) -> None:
    given: dict[str, Any] = {"mesh": init_device_mesh("cpu", (2,))}
    if policy is not None:
        given["mp_policy"] = policy
    for name in units:
        fully_shard(model.get_submodule(name), **given)
    fully_shard(model, **given)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def computing(
    patterns: Sequence[str],
    dtype: str,
    units: Sequence[str] = (),
    autocast: bool = False,
    shard_first: bool = True,
    policy: MixedPrecisionPolicy | None = None,
) -> dict[str, Any]:
    """One forward and backward of a sharded model, beside an unsharded one whose gradients are averaged by hand."""
    model = seeded(blocks)
    reference = copy.deepcopy(model)
    if policy is not None:
        reference.to(policy.param_dtype)
    override_dtype(reference, patterns, dtype=dtype)
    if shard_first:
        shard(model, units, policy)
    override_dtype(model, patterns, dtype=dtype)
    if not shard_first:
        shard(model, units, policy)

    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 + dist.get_rank()))
    results = []
    for each in (model, reference):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = each(x if policy is None or each is model else x.to(policy.param_dtype))
        y.float().square().sum().backward()
        results.append({"output": digest(y.detach())})
    if policy is None:
        for p in reference.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 2
        for each, result in zip((model, reference), results, strict=True):
            result["gradients"] = {name: digest(whole(p.grad)) for name, p in each.named_parameters()}
    plain = seeded(blocks)
    if policy is not None:
        plain.to(policy.param_dtype)
        x = x.to(policy.param_dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        without = digest(plain(x).detach())
    return {
        "sharded": results[0],
        "by_hand": results[1],
        "without": without,
        "stored": sorted({str(p.dtype) for p in model.parameters()}),
    }


def storing(**kwargs: Any) -> str:
    model = seeded(blocks)
    shard(model)
    try:
        override_dtype(model, ["2", "3"], dtype="bfloat16", **kwargs)
    except Exception as error:
        assert set(model[2].__dict__) & {"forward"} == set()
        return f"{type(error).__name__}: {error}"
    return "no error"


def in_a_runner(store: bool) -> dict[str, Any]:
    """mmengine knows no FSDP2: a model sharded by the user, given to a Runner that wraps nothing."""
    ours = overrider(("norm", "head"), override_parameters=store)
    results = []
    for build in (_sharded, Net):
        model = seeded(build)
        launcher = {"launcher": "none"} if build is _sharded else {}
        runner = stored_runner(
            FOLDER,
            model,
            [ours],
            iters=3,
            optimizer=SGD,
            wrapper={"broadcast_buffers": False},
            **launcher,
        )
        runner.train()
        results.append({name: digest(whole(p)) for name, p in model.named_parameters()})
    return {"fsdp2": results[0], "ddp": results[1]}


class NoInitWeights(Net):
    """mmengine broadcasts the weights of a model that has ``init_weights``, which DTensors refuse."""

    @property
    def init_weights(self) -> None:
        raise AttributeError


def _sharded() -> nn.Module:
    model = NoInitWeights()
    shard(model, ["norm"])
    return model


BF16_UNITS = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
BLOCK_PARTS = ("0.norm", "0.lin")

COMPUTING: dict[str, dict[str, Any]] = {
    "inside_a_unit": {"patterns": ["2", "3"], "dtype": "bfloat16"},
    "inside_a_unit_float64": {"patterns": ["norm", "3"], "dtype": "float64"},
    "own_units": {"patterns": ["2", "3"], "dtype": "bfloat16", "units": ["2", "3"]},
    "a_block_that_is_a_unit": {"patterns": ["^0$"], "dtype": "bfloat16", "units": ["0", "1"]},
    "a_parent_and_its_units": {"patterns": ["^0"], "dtype": "bfloat16", "units": [*BLOCK_PARTS, "0"]},
    "float32_under_autocast": {"patterns": ["norm", "3"], "dtype": "float32", "autocast": True},
    "own_units_float32_under_autocast": {
        "patterns": ["0.norm", "3"],
        "dtype": "float32",
        "units": ["0.norm", "3"],
        "autocast": True,
    },
    "sharded_afterwards": {
        "patterns": ["2", "3"],
        "dtype": "bfloat16",
        "units": ["2", "3"],
        "shard_first": False,
    },
    "policy_inside_a_unit": {"patterns": ["^0$"], "dtype": "float32", "policy": BF16_UNITS},
    "policy_own_unit": {"patterns": ["^0$"], "dtype": "float32", "policy": BF16_UNITS, "units": ["0", "1"]},
}
REFUSED: dict[str, dict[str, Any]] = {
    "a_parent_of_units": {"patterns": ["^0$"], "dtype": "bfloat16", "units": BLOCK_PARTS},
    "a_parent_of_units_with_a_policy": {
        "patterns": ["^0$"],
        "dtype": "float32",
        "units": BLOCK_PARTS,
        "policy": BF16_UNITS,
    },
}

if __name__ == "__main__":
    scenarios: dict[str, Callable[[], Any]] = {
        name: functools.partial(computing, **kwargs) for name, kwargs in {**COMPUTING, **REFUSED}.items()
    }
    scenarios["storing_parameters"] = functools.partial(storing, override_parameters=True)
    scenarios["storing_buffers"] = functools.partial(storing, override_buffers=True)
    scenarios["runner_computing"] = functools.partial(in_a_runner, store=False)
    scenarios["runner_storing"] = functools.partial(in_a_runner, store=True)
    hand_back(scenarios)
