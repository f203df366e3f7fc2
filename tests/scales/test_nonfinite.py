"""The first NaN or Inf is laid to the function that made it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dtype_hooks.scales.nonfinite import Finding, first_nonfinite
from dtype_hooks.scales.recorder import track_scales


class Net(nn.Module):
    """Three layers; `middle` runs between the first two."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), Around(middle), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        return {"out": [self.c(self.b(self.a(x)))], "ids": torch.arange(3), "none": None, "flag": True}


class Around(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def found(
    middle: Callable[[Tensor], Tensor] = torch.relu,
    x: Tensor | None = None,
    change: Any = None,
    loss: Any = torch.mean,
) -> Finding | None:
    torch.manual_seed(0)
    model = Net(middle)
    if change is not None:
        change(model)
    with track_scales(model) as scales:
        loss(model(torch.randn(3, 4) if x is None else x)["out"][0]).backward()
    return first_nonfinite(scales)


def test_a_step_without_any_has_none():
    assert found() is None


def test_the_first_producer_in_the_forward_is_named_once_with_its_finite_inputs():
    finding = found(lambda x: (-x.square() - 1).log() * 2)
    assert finding is not None
    assert (finding.cause, finding.name, finding.module, finding.op) == ("forward", "b:log", "b", "log")
    assert (finding.nans, finding.infs) == (12, 0)
    assert [row["name"] for row in finding.inputs] == ["b:sub"]
    assert [row["name"] for row in finding.before] == [":input[0]", "a:linear", "b:square", "b:neg", "b:sub"]
    assert str(finding) == "12 NaN from 'log' in module 'b' ('b:log'), forward, from finite inputs"


def test_an_overflow_is_laid_to_what_overflowed_not_to_the_nan_that_came_of_it():
    finding = found(lambda x: (lambda y: y - y)((x * 0 + 100).exp()))
    assert finding is not None
    assert (finding.name, finding.nans, finding.infs) == ("b:exp", 0, 12)


def test_a_loss_that_is_nan_is_found_outside_of_the_model():
    finding = found(loss=lambda out: (out.sum() * 0 - 1).log())
    assert finding is not None
    assert (finding.cause, finding.name, finding.module) == ("forward", ":log", "")
    assert "outside of the model's submodules" in str(finding)


def test_a_gradient_is_laid_to_the_function_whose_backward_made_it():
    finding = found(lambda x: (x * 0).sqrt() + x)
    assert finding is not None
    assert (finding.cause, finding.name, finding.op, finding.module) == ("backward", "b:mul", "sqrt", "b")
    assert "b:sqrt" in [row["name"] for row in finding.inputs]
    assert finding.before[-1]["direction"] == "backward"
    assert "in the gradient of 'b:mul' from the backward of 'sqrt' in module 'b'" in str(finding)


def test_bad_weights_and_bad_batches_are_told_as_such():
    def spoil(model: Net) -> None:
        with torch.no_grad():
            model.c.weight[0, 0] = float("nan")
            model.c.bias[1] = float("inf")

    finding = found(change=spoil)
    assert finding is not None
    assert (finding.cause, finding.name, finding.also) == ("weights", "c.weight", ("c.bias",))
    assert "the weights were bad already" in str(finding)
    finding = found(x=torch.full((3, 4), float("inf")))
    assert finding is not None
    assert (finding.cause, finding.name) == ("input", ":input[0]")


@pytest.mark.parametrize(
    "mask",
    [
        lambda scores, hide: scores.masked_fill(hide, float("-inf")),
        lambda scores, hide: scores + torch.zeros(3, 4).masked_fill(hide, float("-inf")),
        lambda scores, hide: torch.where(hide, float("-inf"), scores),
        lambda scores, hide: scores + torch.full((3, 4), float("-inf")).triu(1),
    ],
)
def test_masks_that_a_softmax_consumes_are_legal(mask: Callable[[Tensor, Tensor], Tensor]):
    hide = torch.ones(3, 4, dtype=torch.bool).triu(1)
    assert found(lambda x: F.softmax(mask(x, hide), -1)) is None


def test_a_softmax_over_nothing_but_a_mask_is_the_producer():
    finding = found(lambda x: F.softmax(x.masked_fill(torch.ones(3, 4, dtype=torch.bool), float("-inf")), -1))
    assert finding is not None
    assert (finding.name, finding.nans) == ("b:softmax", 12)
    assert finding.inputs[0]["infs"] == 12


def test_an_inf_without_gradient_that_is_thrown_away_is_legal_and_one_that_makes_a_nan_is_the_producer():
    def positions(keep: bool) -> Callable[[Tensor], Tensor]:
        def middle(x: Tensor) -> Tensor:
            distance = torch.arange(4.0)
            bucket = distance.log() * 2
            if keep:
                return x + 0 * bucket
            return x + torch.where(distance < 1, distance.long(), bucket.long())

        return middle

    assert found(positions(keep=False)) is None
    finding = found(positions(keep=True))
    assert finding is not None
    assert (finding.name, finding.infs) == ("b:log", 1)


def test_a_mask_kept_in_the_model_or_given_to_it_is_legal_until_it_reaches_the_loss():
    mask = torch.zeros(3, 4).masked_fill(torch.ones(3, 4, dtype=torch.bool).triu(1), float("-inf"))
    assert found(lambda x: F.softmax(x + mask, -1)) is None
    assert found(lambda x: F.softmax(x.add_(mask), -1)) is None
    finding = found(lambda x: x + mask, loss=lambda out: out.sum())
    assert finding is not None
    assert finding.name == "c:linear"
    assert str(finding).endswith("forward, from inputs that hold Inf")


def test_a_gradient_that_overflows_by_a_scale_can_be_passed_over():
    torch.manual_seed(0)
    model = Net(lambda x: (x * 0).sqrt() + x)
    with track_scales(model) as scales:
        model(torch.randn(3, 4))["out"][0].mean().backward()
    assert first_nonfinite(scales) is not None
    assert first_nonfinite(scales, backward=False) is None


def test_what_a_part_of_a_model_got_is_not_called_finite():
    torch.manual_seed(0)
    model = Net(lambda x: (x * 0 - 1).log())
    with track_scales(model, patterns="^c$") as scales:
        model(torch.randn(3, 4))["out"][0].mean().backward()
    finding = first_nonfinite(scales, whole=False)
    assert finding is not None
    assert (
        str(finding)
        == "12 NaN from 'linear' in module 'c' ('c:linear'), forward, the first that was recorded"
    )
