"""Models for AutocastHook's tests: one that knows nothing of autocast, and one that has it written in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mmengine.runner import Runner
from small_runs import AutocastNet
from torch import Tensor, nn
from torch.nn import functional as F

from dtype_hooks import AutocastHook

HOOK = {"type": "AutocastHook", "dtype": "bfloat16"}
FP32, BF16, FP16 = {torch.float32}, {torch.bfloat16}, {torch.float16}


class Net(AutocastNet):
    """stem -> norm -> relu -> head, without a region of its own; the loss is computed in the forward."""

    def forward(self, x: Tensor, y: Tensor | None = None, mode: str = "tensor") -> Any:
        out = self.predict(x)
        if mode == "tensor":
            return out
        loss = F.mse_loss(out, y)
        return {"loss": loss} if mode == "loss" else [loss]


class InModelNet(Net):
    """The same with ``torch.autocast`` written into it."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", self.dtype):
            return super().forward(*args, **kwargs)


def hook_of(runner: Runner) -> AutocastHook:
    """The run's only AutocastHook."""
    (hook,) = (hook for hook in runner.hooks if isinstance(hook, AutocastHook))
    return hook


def seeded(build: Callable[..., nn.Module], *args: Any) -> Any:
    torch.manual_seed(0)
    return build(*args)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) and a[k].dtype is b[k].dtype for k in a)
