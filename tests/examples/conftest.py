"""Short trainings of the example configs through a real Runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.config import Config
from mmengine.runner import Runner

import dtype_hooks.examples  # noqa: F401  registers the models and data sets

CONFIGS = Path(__file__).parents[2] / "configs"

Train = Callable[..., Runner]


@pytest.fixture(autouse=True)
def own_random_state_and_one_thread() -> Iterator[None]:
    """Put back torch's generator, which Runner seeds; keep OpenMP's threads from waiting for a core in tiny kernels."""
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Train a config of configs/ for a few iterations: ``train(name, {dotted key: value})`` gives the runner."""

    def train_config(name: str, options: dict[str, Any], work_dir: str = "run") -> Runner:
        config = Config.fromfile(CONFIGS / name)
        config.merge_from_dict({"log_level": "ERROR", "default_hooks.logger.interval": 1, **options})
        config.work_dir = str(tmp_path / work_dir)
        config.experiment_name = f"{tmp_path.name}_{work_dir}"  # names are global to the process
        runner = Runner.from_cfg(config)
        runner.train()
        return runner

    return train_config
