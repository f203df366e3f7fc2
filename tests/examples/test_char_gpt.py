from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dtype_hooks import autocast
from dtype_hooks.errors import ConfigError
from dtype_hooks.examples import BitsPerCharacter, CharGPT
from dtype_hooks.node_dtype import resolve_node_dtype


def small_gpt(**arguments: Any) -> CharGPT:
    torch.manual_seed(0)
    return CharGPT(97, context=16, dim=32, num_layers=2, num_heads=4, **arguments)


def characters(batch: int = 4, time: int = 16) -> torch.Tensor:
    return torch.randint(97, (batch, time), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("enabled", [False, True])
def test_changing_a_character_changes_its_own_logits_and_later_ones_only(enabled):
    model, inputs = autocast("cpu", torch.bfloat16, enabled)(small_gpt()), characters()
    for position in (0, 7, 15):
        changed = inputs.clone()
        changed[:, position] = (changed[:, position] + 1) % 97

        same = (model(inputs) == model(changed)).all(dim=-1).all(dim=0)

        assert same.tolist() == [True] * position + [False] * (16 - position)


def test_loss_of_fresh_weights_is_that_of_guessing():
    losses = small_gpt()(characters(64), characters(64).flip(0), mode="loss")

    assert losses["loss"].item() == pytest.approx(math.log(97), abs=0.05)
    assert losses["bpc"].item() == pytest.approx(math.log2(97), abs=0.08)


def test_loss_is_the_mean_over_scored_characters():
    model, inputs, targets = small_gpt(), characters(), characters().roll(1, 0)
    targets[1, 5:] = -100

    loss = model(inputs, targets, mode="loss")["loss"]

    assert loss.item() == pytest.approx(
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
    )


def test_predictions_add_up_to_the_loss():
    model, inputs, targets = small_gpt(), characters(), characters().roll(1, 0)
    targets[1, 5:] = -100

    predictions = model(inputs, targets, mode="predict")
    metric = BitsPerCharacter()
    metric.process({}, predictions)

    figures = metric.compute_metrics(metric.results)
    losses = model(inputs, targets, mode="loss")
    assert [p["characters"] for p in predictions] == [16, 5, 16, 16]
    assert figures["loss"] == pytest.approx(losses["loss"].item(), rel=1e-6)
    assert figures["bpc"] == pytest.approx(losses["bpc"].item(), rel=1e-6)


def test_metric_repeats_the_baselines_of_the_data_set():
    metric = BitsPerCharacter()
    metric.dataset_meta = {"vocabulary": "ab", "unigram_bpc": 4.5, "bigram_bpc": 3.5}
    metric.process({}, [{"nll": math.log(4), "characters": 1}])

    assert metric.compute_metrics(metric.results) == {
        "loss": math.log(4),
        "bpc": 2.0,
        "unigram_bpc": 4.5,
        "bigram_bpc": 3.5,
    }


@pytest.mark.parametrize(("enabled", "computed"), [(False, torch.float32), (True, torch.bfloat16)])
def test_matrix_products_run_in_the_autocast_dtype_and_the_residual_stream_in_float32(enabled, computed):
    model, dtypes = small_gpt(), {}
    for name in ("blocks.0.attn", "blocks.1", "norm", "head"):
        model.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, name=name: dtypes.update({name: output.dtype})
        )

    with autocast("cpu", torch.bfloat16, enabled):
        model(characters())

    assert dtypes == {
        "blocks.0.attn": computed,
        "blocks.1": torch.float32,
        "norm": torch.float32,
        "head": computed,
    }


def test_each_block_says_which_dtype_it_wants():
    blocks = small_gpt(block_dtypes=["float16", "off"]).blocks
    assert [resolve_node_dtype(block, torch.bfloat16) for block in blocks] == [torch.float16, None]
    for plain in (small_gpt(), small_gpt(block_dtypes=["model", "model"])):
        assert [resolve_node_dtype(b, torch.bfloat16) for b in plain.blocks] == [torch.bfloat16] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"block_dtypes": ["off"]},
            r"CharGPT.block_dtypes: got \['off'\]; expected num_layers=4 entries; change either",
        ),
        ({"block_dtypes": ["bf61"] * 4}, "CharGPT.block_dtypes: got 'bf61'"),
        ({"dim": 30}, "CharGPT.dim: got 30; expected a multiple of num_heads=4"),
    ],
)
def test_bad_argument_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        CharGPT(97, **arguments)


def test_unknown_mode_and_missing_targets_are_refused():
    with pytest.raises(ConfigError, match="got mode='train'; expected tensor, loss or predict"):
        small_gpt()(characters(), characters(), mode="train")
    with pytest.raises(ConfigError, match="got targets=None; expected ids for mode='loss'"):
        small_gpt()(characters(), mode="loss")
