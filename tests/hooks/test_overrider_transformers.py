"""Random-weight models of the transformers package, trained through Runner with norms, an attention and the head in float32."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dtype_recorder import Call, Calls, record_dtypes
from mmengine.dataset import InfiniteSampler
from mmengine.model import BaseModel
from small_runs import Losses, log_text, small_runner
from torch import nn
from torch.utils.data import DataLoader

import dtype_hooks  # noqa: F401  registers the hooks

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH, ITERATIONS = 64, 12, 4

MATMULS = {
    "addmm",
    "mm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention_for_cpu",
    "mm_backward",
    "convolution_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
}
CASTS = {"_to_copy"}
"""What an override itself runs inside a matched module: casts in and out, and their backward."""

FP32, BF16 = {torch.float32}, {torch.bfloat16}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        attn_implementation="eager",  # the other falls back to a kernel that multiplies in float32 by itself
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=5,
    )
    return transformers.ViTForImageClassification(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "gpt2": (gpt2, r"h\.0\.attn$", "lm_head"),
    "llama": (llama, r"layers\.0\.self_attn$", "lm_head"),
    "t5": (t5, r"decoder\.block\.1\.layer\.1\.EncDecAttention$", "lm_head"),
    "vit": (vit, r"layers?\.0\.attention$", "classifier"),
}
"""How it is made, which attention is overridden, and the name of its head."""


class Wrapped(BaseModel):
    """A model of the transformers package as mmengine wants it, under bf16 autocast."""

    def __init__(self, net: nn.Module, autocast: bool = True):
        super().__init__()
        self.net = net
        self.autocast = autocast

    def forward(self, mode: str = "tensor", **inputs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            out = self.net(**inputs)
        return {"loss": out.loss} if mode == "loss" else out.logits


def build(name: str, **kwargs: Any) -> Wrapped:
    torch.manual_seed(0)
    return Wrapped(MODELS[name][0](), **kwargs)


def batches(name: str, dtype: torch.dtype = torch.float32) -> DataLoader:
    """The same four examples again and again, so that the loss falls."""
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        rows = [
            {"pixel_values": torch.randn(3, 16, 16, generator=generator).to(dtype), "labels": i % 5}
            for i in range(4)
        ]
    else:
        tokens = torch.randint(1, VOCABULARY, (4, LENGTH), generator=generator)
        rows = [{"input_ids": row, "labels": row} for row in tokens]
    return DataLoader(rows, batch_size=4, sampler=InfiniteSampler(rows, shuffle=False))


def rule(name: str, **kwargs: Any) -> dict:
    _, attention, head = MODELS[name]
    return {
        "type": "DtypeOverrider",
        "patterns": [attention, rf"net\.{head}$"],
        "class_patterns": ["Norm$"],
        "dtype": "float32",
        "cast_inputs": "all",  # attentions are called by keyword
        **kwargs,
    }


def matched_names(model: nn.Module, name: str) -> list[str]:
    """The modules that :func:`rule` means, said without regexes where that is possible."""
    _, attention, head = MODELS[name]
    norms = [n for n, module in model.named_modules() if type(module).__name__.endswith("Norm")]
    (one,) = (n for n, _ in model.named_modules() if re.search(attention, n))
    return [*norms, one, f"net.{head}"]


def factors(call: Call) -> set[torch.dtype]:
    """The dtypes of what is multiplied and of the product; a flash attention's logsumexp is float32 by design."""
    return {*call.inputs[:2], *call.outputs[:1]}


def assert_no_leak(calls: Calls, model: nn.Module, name: str) -> None:
    """In the matched modules every operator but casts is in float32, products outside of them are in bf16."""
    matched = matched_names(model, name)
    for module in matched:
        for backward in (False, True):
            # All that touches floating tensors: matrix products, norms, softmax, sums, elementwise ones, views.
            work = [c for c in calls.of(module=module, backward=backward) if c.op not in CASTS and c.dtypes]
            # Except where gradients of the module and of its neighbour meet in the tensor that both were given.
            work = [c for c in work if not (backward and c.op == "add")]
            assert work, f"nothing ran in {module}, backward={backward}"
            assert [c for c in work if c.dtypes != FP32] == []

    below = re.compile(rf"({'|'.join(map(re.escape, matched))})(\.|$)")
    products = [c for c in calls if c.op in MATMULS and not below.match(c.module)]
    products = [c for c in products if "rotary" not in c.module]  # Llama turns autocast off there itself
    assert [c for c in products if factors(c) != BF16] == []
    assert sum(c.backward for c in products) >= 10 * ITERATIONS
    assert sum(not c.backward for c in products) >= 8 * ITERATIONS


@pytest.mark.parametrize("name", MODELS)
def test_norms_an_attention_and_the_head_train_in_float32_and_their_neighbours_in_bf16(tmp_path, name):
    model, losses = build(name), Losses()
    runner = small_runner(
        tmp_path, model, [rule(name), losses], iters=ITERATIONS, loader=batches(name), log_level="INFO"
    )
    with record_dtypes(model) as calls:
        runner.train()

    assert_no_leak(calls, model, name)
    assert all(map(math.isfinite, losses.values))
    assert losses.values[-1] < losses.values[0]
    assert {dtype.dtype for dtype in model.parameters()} == FP32
    expected = f"DtypeOverrider: {len(matched_names(model, name))} of "
    log = log_text(runner)
    assert expected in log
    assert "never called" not in log
    assert "cast_inputs" not in log


@pytest.mark.parametrize("name", MODELS)
def test_without_the_hook_the_attention_and_the_head_are_in_bf16(tmp_path, name):
    model = build(name)
    with record_dtypes(model) as calls:
        model(**next(iter(batches(name))), mode="loss")["loss"].backward()

    with pytest.raises(AssertionError):
        assert_no_leak(calls, model, name)
    for module in matched_names(model, name)[-2:]:
        products = [c for c in calls.of(module=module) if c.op in MATMULS]
        assert products
        assert {dtype for c in products for dtype in factors(c)} == BF16


@pytest.mark.parametrize("name", MODELS)
def test_parameters_stored_in_bf16_compute_in_float32_and_get_bf16_gradients(tmp_path, name):
    model, losses = build(name, autocast=False).bfloat16(), Losses()
    gradients: set[torch.dtype] = set()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: gradients.add(p.grad.dtype))
    runner = small_runner(
        tmp_path,
        model,
        [rule(name), losses],
        iters=ITERATIONS,
        loader=batches(name, torch.bfloat16),
    )
    with record_dtypes(model) as calls:
        runner.train()

    assert_no_leak(calls, model, name)
    assert gradients == BF16
    assert {parameter.dtype for parameter in model.parameters()} == BF16
    assert all(map(math.isfinite, losses.values))
    assert losses.values[-1] < losses.values[0]


def test_an_attention_called_by_keyword_needs_cast_inputs_all_and_the_log_says_so(tmp_path):
    model = build("llama")
    runner = small_runner(
        tmp_path, model, [rule("llama", cast_inputs="first")], iters=2, loader=batches("llama")
    )
    with record_dtypes(model) as calls:
        runner.train()

    (attention,) = (n for n in matched_names(model, "llama") if n.endswith("self_attn"))
    assert calls.dtypes("mm", attention) == BF16
    assert calls.dtypes("mm", "net.lm_head") == FP32
    assert log_text(runner).count("Set cast_inputs='all' to cast every floating tensor") == 1
    assert "LlamaAttention.forward" in log_text(runner)
