"""The configs that store parameters in bfloat16 train by tools/train.py, alone and on two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
STORED = {
    "gpt_pydoc_stored_bf16.py": ("blocks.0.mlp.up.weight", "norm.weight", 24),
    "digits_resnet_stored_bf16.py": ("stem.weight", "bn1.running_var", None),
}


def train(config: str, work_dir: Path, ranks: int) -> dict[str, torch.Tensor]:
    """Four iterations by the command line; the weights of the checkpoint."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    options = ["train_cfg.max_iters=4", "train_cfg.val_interval=4", "default_hooks.checkpoint.interval=4"]
    command = [sys.executable, *(torchrun if ranks > 1 else []), str(ROOT / "tools" / "train.py")]
    command += [str(ROOT / "configs" / config), "--work-dir", str(work_dir), "--cfg-options", *options]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "changed since they were put in place" not in done.stdout
    return torch.load(work_dir / "iter_4.pth", weights_only=False)["state_dict"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("config", STORED)
def test_a_config_with_stored_dtypes_trains_and_saves_them(config, ranks, tmp_path):
    narrow, wide, count = STORED[config]
    weights = train(config, tmp_path / "run", ranks)
    assert weights[narrow].dtype is torch.bfloat16
    assert weights[wide].dtype is torch.float32
    assert all(weight.isfinite().all() for weight in weights.values() if weight.is_floating_point())
    if count is not None:
        assert sum(weight.dtype is torch.bfloat16 for weight in weights.values()) == count
