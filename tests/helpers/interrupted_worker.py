"""Trains with ScaleTracker until somebody interrupts it; for tests/hooks/test_scale_tracker_files.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mmengine.hooks import Hook
from tracked_runs import Plain, rows, tracked

import dtype_hooks  # noqa: F401  registers the hooks


class Ready(Hook):
    """Says that training is on its way, and waits for nobody."""

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        if runner.iter == 20:
            (Path(sys.argv[1]) / "ready").touch()


if __name__ == "__main__":
    tracked(
        sys.argv[1],
        {"interval": 5, "patterns": "head", "plots": True, "verbose": True},
        Plain,
        [Ready()],
        iters=100_000,
        train_dataloader=rows(400_000),
    ).train()
