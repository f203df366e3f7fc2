"""Under torchrun: what each rank prints, and which modules a rule takes below DDP; for test_dtype_overrider.py."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import torch
from dtype_recorder import record_dtypes
from mmengine.registry import HOOKS
from processes import hand_back
from small_runs import AutocastNet, data, small_runner
from torch.nn.parallel import DistributedDataParallel

import dtype_hooks  # noqa: F401  registers the hooks

RULE = {"type": "DtypeOverrider", "patterns": ["^norm$", "^haed$"], "verbose": True}


def trained_under_mmengines_ddp() -> dict:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runner = small_runner(
            Path(sys.argv[1]) / "ddp",
            hooks=[RULE],
            loader=data(seed=torch.distributed.get_rank(), endless=True),
            launcher="pytorch",
            cfg={"model_wrapper_cfg": {"type": "MMDistributedDataParallel", "device_ids": None}},
        )
        with record_dtypes(runner.model) as calls:
            runner.train()
    return {
        "wrapper": type(runner.model).__name__,
        "printed": printed.getvalue(),
        "norm": sorted(map(str, calls.dtypes("native_layer_norm", "norm"))),
        "head": sorted(map(str, calls.dtypes("addmm", "head"))),
        "keys": list(runner.model.module.state_dict()),
        "weights": [float(p.double().sum()) for p in runner.model.parameters()],
    }


def installed_under_torchs_ddp() -> list[list[str]]:
    """``is_model_wrapper`` does not know every wrapper; names are the bare model's all the same."""
    names = []
    for wrap in (
        lambda model: model,
        DistributedDataParallel,
        lambda m: DistributedDataParallel(torch.compile(m)),
    ):
        runner = small_runner(Path(sys.argv[1]) / "torch_ddp")
        runner.model = wrap(AutocastNet())
        hook = HOOKS.build(RULE)
        hook.before_train(runner)
        names.append([name for record in hook.handle.records for name in record.names])
    return names


if __name__ == "__main__":
    hand_back({"trained": trained_under_mmengines_ddp, "installed": installed_under_torchs_ddp})
