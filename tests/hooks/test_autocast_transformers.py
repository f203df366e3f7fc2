"""Random-weight models of the transformers package under AutocastHook, alone and with DtypeOverrider on norms and head."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from autocast_runs import BF16, FP32, HOOK, hook_of, same_bits, weights
from dtype_recorder import Calls, record_dtypes
from mmengine.model import BaseModel
from small_runs import Losses, log_text, small_runner
from torch import nn

import dtype_hooks  # noqa: F401  registers the hooks

pytest.importorskip("transformers")

from test_overrider_transformers import MATMULS, MODELS, batches, factors

ITERATIONS = 3


class Plain(BaseModel):
    """A model of the transformers package as mmengine wants it, which knows nothing of autocast."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, mode: str = "tensor", **inputs: Any) -> Any:
        out = self.net(**inputs)
        if mode == "loss":
            return {"loss": out.loss}
        return [{"logits": out.logits, "loss": out.loss}] if mode == "predict" else out.logits


class Written(Plain):
    """The same with ``torch.autocast`` written in."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(*args, **kwargs)


def build(name: str, cls: type[Plain] = Plain) -> Plain:
    torch.manual_seed(0)
    return cls(MODELS[name][0]())


def rule(name: str) -> dict:
    return {
        "type": "DtypeOverrider",
        "patterns": [rf"net\.{MODELS[name][2]}$"],
        "class_patterns": ["Norm$"],
        "dtype": "float32",
    }


def products(calls: Calls, inside: bool, *names: str) -> set[torch.dtype]:
    """The dtypes of matrix products in modules of these names, or outside of them."""
    found = [c for c in calls if c.op in MATMULS and any(c.module.endswith(n) for n in names) is inside]
    found = [c for c in found if "rotary" not in c.module]  # Llama turns autocast off there itself
    assert len(found) >= ITERATIONS
    return {dtype for call in found for dtype in factors(call)}


def train(tmp_path: Path, name: str, hooks: list, cls: type[Plain] = Plain) -> tuple[Any, Calls, list[float]]:
    model, losses = build(name, cls), Losses()
    runner = small_runner(
        tmp_path, model, [*hooks, losses], iters=ITERATIONS, loader=batches(name), log_level="INFO"
    )
    with record_dtypes(model) as calls:
        runner.train()
    assert all(map(math.isfinite, losses.values))
    assert losses.values[-1] < losses.values[0]
    return runner, calls, losses.values


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_in_bf16_bitwise_as_with_autocast_written_in(tmp_path, name):
    runner, calls, losses = train(tmp_path / "ours", name, [HOOK])
    written, _, losses_written = train(tmp_path / "written", name, [], Written)

    assert products(calls, False, "nothing has this name") == BF16
    assert {p.dtype for p in runner.model.parameters()} == FP32
    assert losses == losses_written
    assert same_bits(weights(runner.model), weights(written.model))


@pytest.mark.parametrize(
    ("name", "overrider_first"), [*((name, True) for name in MODELS), ("gpt2", False), ("t5", False)]
)
def test_norms_and_the_head_train_in_float32_beside_it(tmp_path, name, overrider_first):
    hooks = [rule(name), HOOK] if overrider_first else [HOOK, rule(name)]
    runner, calls, _ = train(tmp_path, name, hooks)
    head = f"net.{MODELS[name][2]}"
    norms = [n for n, m in runner.model.named_modules() if type(m).__name__.endswith("Norm")]

    assert products(calls, True, head) == FP32
    assert products(calls, False, head) == BF16
    for norm in norms:
        work = [c for c in calls.of(module=norm) if c.dtypes and c.op not in ("_to_copy", "add")]
        assert work
        assert {dtype for call in work for dtype in call.dtypes} == FP32
    assert "never called" not in log_text(runner)


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_the_head_alone_stays_out_and_the_predictions_are_float32(tmp_path, name):
    head = MODELS[name][2]
    runner, calls, _ = train(
        tmp_path,
        name,
        [{**HOOK, "exclude": [rf"net\.{head}$"], "output_dtype": "float32", "phases": "train"}],
    )
    assert products(calls, True, f"net.{head}") == FP32
    assert products(calls, False, f"net.{head}") == BF16

    hook_of(runner).phases = ("test",)
    hook_of(runner).before_test(runner)
    (prediction,) = runner.model(**next(iter(batches(name))), mode="predict")
    assert prediction["logits"].dtype is torch.float32
