from __future__ import annotations

import sys

import pytest
import torch

from dtype_hooks.errors import ConfigError, MissingDependencyError
from dtype_hooks.examples import DigitsImages, DigitsResNet, TopOneAccuracy


def all_images() -> list[torch.Tensor]:
    return [item["inputs"] for split in ("train", "validation", "test") for item in images_of(split)]


def images_of(split: str) -> list[dict]:
    dataset = DigitsImages(split)
    return [dataset[i] for i in range(len(dataset))]


def test_splits_hold_every_image_once_and_in_order():
    from sklearn.datasets import load_digits

    expected = torch.from_numpy(load_digits().images).float() / 16

    assert [len(DigitsImages(split)) for split in ("train", "validation", "test")] == [1257, 180, 360]
    assert torch.equal(torch.stack(all_images()).squeeze(1), expected)


def test_no_image_of_one_split_occurs_in_another():
    assert len({image.numpy().tobytes() for image in all_images()}) == 1797


def test_images_are_float32_in_zero_to_one_with_their_digit():
    item = DigitsImages("train")[0]

    assert item["inputs"].shape == (1, 8, 8)
    assert item["inputs"].dtype == torch.float32
    assert 0 <= item["inputs"].min() < item["inputs"].max() <= 1
    assert [item["targets"] for item in images_of("train")[:10]] == list(range(10))


def test_unknown_split_is_refused():
    with pytest.raises(
        ConfigError, match=r"DigitsImages\.split: got 'val'; expected one of train, validation, test"
    ):
        DigitsImages("val")


def test_missing_scikit_learn_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)

    with pytest.raises(MissingDependencyError, match=r"pip install 'dtype-hooks\[examples\]'") as caught:
        DigitsImages("train")

    assert "\n" not in str(caught.value)


def test_convolutions_run_in_the_autocast_dtype():
    model, dtypes = DigitsResNet(), {}
    for name in ("stem", "stages.0.conv1", "fc"):
        model.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, name=name: dtypes.update({name: output.dtype})
        )

    with torch.autocast("cpu", torch.bfloat16):
        model(torch.rand(2, 1, 8, 8))

    assert dtypes == dict.fromkeys(("stem", "stages.0.conv1", "fc"), torch.bfloat16)


def test_every_stage_but_the_first_halves_the_image():
    model, shapes = DigitsResNet(channels=(4, 8, 16)), []
    for stage in model.stages:
        stage.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))

    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)
    assert shapes == [(2, 4, 8, 8), (2, 8, 4, 4), (2, 16, 2, 2)]


def test_unknown_mode_and_missing_targets_are_refused():
    with pytest.raises(ConfigError, match="got mode='train'; expected tensor, loss or predict"):
        DigitsResNet()(torch.rand(2, 1, 8, 8), torch.tensor([0, 1]), mode="train")
    with pytest.raises(ConfigError, match="got targets=None; expected classes for mode='predict'"):
        DigitsResNet()(torch.rand(2, 1, 8, 8), mode="predict")


def test_accuracy_is_the_share_of_right_predictions_in_percent():
    metric = TopOneAccuracy()
    metric.process({}, [{"predicted": p, "target": t} for p, t in [(1, 1), (2, 2), (3, 3), (3, 4)]])

    assert metric.compute_metrics(metric.results) == {"accuracy": 75.0}
