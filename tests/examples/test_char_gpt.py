from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from dtype_hooks.errors import ConfigError
from dtype_hooks.examples import BitsPerCharacter, CharGPT


def small_gpt(autocast_dtype: str | None = None) -> CharGPT:
    torch.manual_seed(0)
    return CharGPT(97, context=16, dim=32, num_layers=2, num_heads=4, autocast_dtype=autocast_dtype)


def characters(batch: int = 4, time: int = 16) -> torch.Tensor:
    return torch.randint(97, (batch, time), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("autocast_dtype", [None, "bfloat16"])
def test_changing_a_character_changes_its_own_logits_and_later_ones_only(autocast_dtype):
    model, inputs = small_gpt(autocast_dtype), characters()
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


@pytest.mark.parametrize(
    ("autocast_dtype", "computed"), [(None, torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_matrix_products_run_in_the_autocast_dtype_and_the_residual_stream_in_float32(
    autocast_dtype, computed
):
    model, dtypes = small_gpt(autocast_dtype), {}
    for name in ("blocks.0.attn", "blocks.1", "norm", "head"):
        model.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, name=name: dtypes.update({name: output.dtype})
        )

    model(characters())

    assert dtypes == {
        "blocks.0.attn": computed,
        "blocks.1": torch.float32,
        "norm": torch.float32,
        "head": computed,
    }
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"autocast_dtype": "float32"},
            "CharGPT.autocast_dtype: got 'float32'; expected bfloat16, float16 or None",
        ),
        ({"autocast_dtype": "bf61"}, "CharGPT.autocast_dtype: got 'bf61'"),
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
