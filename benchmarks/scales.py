"""Cost of a recorded training step, as a ratio to the same step without recording, in one run.

    python benchmarks/scales.py

One thread, CPU time of it, forward to optimizer step. A bare step and a recorded one take turns, so that the machine's drift
hits both. ``std`` records std, mean and rms of activations and their gradients; ``all`` every statistic of them for four number
formats; ``all + parameters`` those of parameters as well. ``seen`` leaves the statistics of ``std`` out and shows what seeing each
tensor costs; ``pass`` adds one ``sum()`` a tensor to that: the floor.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import dtype_hooks
from dtype_hooks.examples.char_gpt import CharGPT
from dtype_hooks.scales import recorder
from dtype_hooks.scales.record import Measurement

Step = Callable[[], None]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm around a shortcut, as in ResNet-18."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        same = before == after and stride == 1
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        )

    def forward(self, x: Tensor) -> Tensor:
        """The block's result."""
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.shortcut(x)
        return self.relu(y)


def resnet18() -> nn.Module:
    """ResNet-18 without its max-pooling, for small images."""
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [BasicBlock(before, after, 1 if before == after else 2) for before, after in pairwise(widths)]
    stem = (nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def gpt_step(autocast: bool) -> tuple[nn.Module, Step]:
    """A GPT of 4 layers and width 256 on 8 sequences of 128."""
    model = CharGPT(97, context=128, dim=256, num_layers=4, num_heads=4)
    ids = torch.randint(97, (8, 129))
    region = (lambda: torch.autocast("cpu", torch.bfloat16)) if autocast else nullcontext

    def loss() -> Tensor:
        with region():
            return model(ids[:, :-1], ids[:, 1:], mode="loss")["loss"]

    return model, training_step(model, loss)


def resnet_step() -> tuple[nn.Module, Step]:
    """ResNet-18 on 8 images of 32 x 32."""
    model, images, labels = resnet18(), torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    return model, training_step(model, lambda: F.cross_entropy(model(images), labels))


def tiny_step() -> tuple[nn.Module, Step]:
    """100 x (Linear(32, 32), LayerNorm, GELU) on 32 rows."""
    layers = (nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(100))
    model, x = nn.Sequential(*layers), torch.randn(32, 32)
    return model, training_step(model, lambda: model(x).square().mean())


def training_step(model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    """Forward, backward, SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def recorded(model: nn.Module, step: Step, only_std: bool = False, parameters: bool = False) -> Step:
    """The step inside ``track_scales``, with its statistics read."""

    def run() -> None:
        with dtype_hooks.track_scales(model, only_std=only_std, parameters=parameters) as scales:
            step()
        list(scales.statistics())

    return run


def with_kernel(step: Step, kernel: Callable[..., Measurement]) -> Step:
    """The step with another kernel in the place of the statistics."""

    def run() -> None:
        with mock.patch.object(recorder, "measure", kernel):
            step()

    return run


def nothing(tensor: Tensor, *_: object) -> Measurement:
    """No statistics."""
    return NOTHING


def one_pass(tensor: Tensor, *_: object) -> Measurement:
    """Each element read once."""
    tensor.sum()
    return NOTHING


NOTHING = recorder.measure(torch.zeros(1), (), True)


def seconds(step: Step) -> float:
    """CPU time of one step."""
    start = time.thread_time()
    step()
    return time.thread_time() - start


def ratios(bare: Step, other: Step, pairs: int) -> Iterator[float]:
    """``other / bare``, one a pair; who begins alternates."""
    for step in (bare, other, bare, other):
        step()
    for pair in range(pairs):
        first, second = (other, bare) if pair % 2 else (bare, other)
        took = {first: seconds(first), second: seconds(second)}
        yield took[other] / took[bare]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = Table(
        "model", "record", "median", "25 %", "75 %", title=f"recorded step / step, torch {torch.__version__}"
    )
    for name, (model, step) in {
        "GPT, float32": gpt_step(False),
        "GPT, bfloat16 autocast": gpt_step(True),
        "ResNet-18": resnet_step(),
        "tiny modules": tiny_step(),
    }.items():
        std = recorded(model, step, only_std=True)
        variants = {
            "std": std,
            "all": recorded(model, step),
            "all + parameters": recorded(model, step, parameters=True),
            "seen": with_kernel(std, nothing),
            "pass": with_kernel(std, one_pass),
        }
        for what, variant in variants.items():
            low, median, high = statistics.quantiles(ratios(step, variant, args.pairs), n=4)
            table.add_row(name, what, f"{median:.2f}", f"{low:.2f}", f"{high:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
