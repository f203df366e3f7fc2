"""Two trainings that take turns, so that the machine's drift hits both: what several benchmarks measure with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from mmengine.runner import Runner
from torch import nn


class Training(Protocol):
    """What can be driven iteration by iteration."""

    model: nn.Module

    def run(self, iterations: int) -> float:
        """Train and return seconds of CPU time an iteration."""


def ratios(one: Training, other: Training, blocks: int, iterations: int) -> Iterator[float]:
    """``other / one``, one a block; who begins alternates. In the end their weights must be the same, bit for bit."""
    for training in (one, other):
        training.run(iterations)
    for block in range(blocks):
        order = (one, other) if block % 2 else (other, one)
        seconds = {id(training): training.run(iterations) for training in order}
        yield seconds[id(other)] / seconds[id(one)]
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)


def begin(runner: Runner) -> None:
    """Bring a Runner to where its loop would run the first iteration."""
    runner._train_loop = runner.build_train_loop(runner._train_loop)
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    runner.call_hook("before_run")
    runner.call_hook("before_train")
    runner.model.train()
