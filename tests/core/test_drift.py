"""Looks at overrides and stored dtypes without mmengine: the quick one sees all, the slow one says what, restore mends."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from dtype_hooks.core.drift import Finding, Watch, findings, restore
from dtype_hooks.core.override import OverrideRule

BF16, F32 = torch.bfloat16, torch.float32


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 1))
        self.bn = nn.BatchNorm1d(4)
        self.gain = nn.Module()
        self.gain.value = nn.Parameter(torch.ones(()))
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight

    def forward(self, x):
        return self.block(self.tied(self.bn(self.first(x))))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


def install(model, patterns=("first", "tied", "block", "bn", "gain"), **kwargs):
    kwargs = {"override_parameters": True, "override_buffers": True, **kwargs}
    rule = OverrideRule.make(list(patterns), dtype="bfloat16", **kwargs)
    return rule.install(model, warn=False)


def new_like(parameter, **kwargs):
    return nn.Parameter(parameter.detach().clone().to(**kwargs))


def move_parameter(m):
    m.block[0].weight.data = m.block[0].weight.data.float()


def move_tied(m):
    m.tied.weight.data = m.tied.weight.data.float()


def move_buffer(m):
    m.bn.running_mean.data = m.bn.running_mean.data.double()


def replace_buffer_in_another_dtype(m):
    m.bn.running_var = m.bn.running_var.float()


def replace_parameter(m):
    m.block[0].weight = new_like(m.block[0].weight)


def replace_parameter_of_one_element(m):
    m.gain.value = new_like(m.gain.value)


def replace_bias_of_one_element(m):
    m.block[1].bias = new_like(m.block[1].bias)


def replace_by_another_shape(m):
    m.block[0].weight = nn.Parameter(torch.ones(1, dtype=BF16))


def break_a_tie(m):
    m.tied.weight = new_like(m.tied.weight)


def break_a_tie_at_its_first_name(m):
    m.first.weight = nn.Parameter(torch.zeros(4, 4))


def drop_parameter(m):
    m.block[0].bias = None


def delete_parameter(m):
    del m.block[0].bias


def replace_module(m):
    m.block[0] = nn.LayerNorm(4)


def replace_parent(m):
    m.block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 1))


def delete_module(m):
    del m.block[1]


def delete_forward(m):
    del m.block[0].__dict__["forward"]


def overwrite_forward(m):
    m.block[0].forward = lambda x: x


DRIFTS = {
    move_parameter: [Finding("dtype moved", "block.0.weight", "bfloat16", "float32")],
    move_tied: [Finding("dtype moved", "first.weight = tied.weight", "bfloat16", "float32")],
    move_buffer: [Finding("dtype moved", "bn.running_mean", "bfloat16", "float64")],
    replace_buffer_in_another_dtype: [Finding("dtype moved", "bn.running_var", "bfloat16", "float32")],
    replace_parameter: [
        Finding("parameter replaced", "block.0.weight", "bfloat16", "another Parameter, bfloat16")
    ],
    replace_parameter_of_one_element: [
        Finding("parameter replaced", "gain.value", "bfloat16", "another Parameter, bfloat16")
    ],
    replace_bias_of_one_element: [
        Finding("parameter replaced", "block.1.bias", "bfloat16", "another Parameter, bfloat16")
    ],
    replace_by_another_shape: [
        Finding("parameter replaced", "block.0.weight", "bfloat16", "another Parameter, bfloat16")
    ],
    break_a_tie: [Finding("parameter replaced", "tied.weight", "bfloat16", "another Parameter, bfloat16")],
    break_a_tie_at_its_first_name: [
        Finding("parameter replaced", "first.weight", "bfloat16", "another Parameter, float32")
    ],
    drop_parameter: [Finding("gone", "block.0.bias", "bfloat16", "no such tensor")],
    delete_parameter: [Finding("gone", "block.0.bias", "bfloat16", "no such tensor")],
    replace_module: [Finding("module replaced", "block.0", "LayerNorm", "another LayerNorm")],
    replace_parent: [
        Finding("module replaced", "block", "Sequential", "another Sequential"),
        Finding("module replaced", "block.0", "LayerNorm", "another LayerNorm"),
        Finding("module replaced", "block.1", "Linear", "another Linear"),
    ],
    delete_module: [Finding("gone", "block.1", "Linear", "no such module")],
    delete_forward: [Finding("override gone", "block.0.forward", "overridden", "not overridden")],
    overwrite_forward: [Finding("override gone", "block.0.forward", "overridden", "not overridden")],
}
drifts = pytest.mark.parametrize("drift", DRIFTS, ids=lambda drift: drift.__name__)


@drifts
def test_the_quick_look_sees_it_and_the_slow_one_says_what_it_is(model, drift):
    handle = install(model)
    watch = Watch(handle)
    assert watch.is_unchanged()
    assert findings(handle) == []
    drift(model)
    assert not watch.is_unchanged()
    assert findings(handle) == DRIFTS[drift]


@drifts
def test_after_restore_both_looks_are_quiet_and_everything_that_is_there_is_stored_and_overridden(
    model, drift
):
    handle = install(model)
    drift(model)
    restore(handle)
    assert findings(handle) == []
    assert Watch(handle).is_unchanged()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            assert tensor.dtype is BF16, name
    assert "forward" in model.block[0].__dict__
    assert model.tied.weight is model.first.weight


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m(torch.randn(3, 4)).sum().backward(),
        lambda m: m.zero_grad(),
        lambda m: m.eval(),
        lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
        lambda m: m.register_buffer("own", torch.zeros(1)),
        lambda m: m.block[0].weight.requires_grad_(False),
        lambda m: m.tied.bias.data.double(),
    ],
)
def test_what_a_training_does_is_no_drift(model, change):
    handle = install(model)
    watch = Watch(handle)
    change(model)
    assert watch.is_unchanged()
    assert findings(handle) == []


def test_a_forward_that_somebody_wrapped_is_looked_at_slowly_and_is_no_drift(model):
    """mmengine's activation checkpointing and torch.compile put their own function around it."""
    handle = install(model)
    watch = Watch(handle)
    overridden = model.block[0].forward

    @functools.wraps(overridden)
    def wrapped(*args, **kwargs):
        return overridden(*args, **kwargs)

    model.block[0].forward = wrapped
    assert not watch.is_unchanged()
    assert findings(handle) == []
    assert Watch(handle).is_unchanged()


def test_a_neighbour_in_the_same_dict_is_looked_at_slowly_and_is_no_drift(model):
    handle = install(model, [r"block\.0"])
    watch = Watch(handle)
    model.block[1] = nn.Linear(4, 1)
    assert not watch.is_unchanged()
    assert findings(handle) == []


def test_restore_says_whether_optimizer_state_and_ddp_must_follow(model):
    handle = install(model)
    assert not restore(handle)
    delete_forward(model)
    assert not restore(handle)
    move_parameter(model)
    assert restore(handle)
    replace_parameter(model)
    assert restore(handle)


@pytest.mark.parametrize("known", [True, False])
def test_a_replaced_parameter_stays_where_the_optimizer_knows_it_and_gives_its_values_otherwise(model, known):
    handle = install(model)
    old, new = model.block[0].weight, nn.Parameter(torch.full((4,), 1.5))
    model.block[0].weight = new
    restore(handle, [new] if known else [old])
    now = model.block[0].weight
    assert now is (new if known else old)
    assert torch.equal(now, torch.full((4,), 1.5, dtype=BF16))
    handle.remove()
    assert model.block[0].weight.dtype is F32


@pytest.mark.parametrize("drift", [break_a_tie, break_a_tie_at_its_first_name])
def test_a_broken_tie_is_tied_again_with_the_values_of_what_stayed(model, drift):
    handle = install(model)
    old = model.first.weight
    values = old.detach().clone()
    drift(model)
    restore(handle, [old])
    assert model.first.weight is old
    assert model.tied.weight is old
    assert torch.equal(old, values)


def test_a_replaced_tied_parameter_comes_back_under_all_its_names(model):
    handle = install(model)
    old = model.first.weight
    model.first.weight = model.tied.weight = new_like(old, dtype=F32)
    restore(handle)
    assert model.first.weight is old
    assert model.tied.weight is old


def test_gradients_accumulated_so_far_are_kept_in_the_stored_dtype(model):
    handle = install(model)
    model(torch.randn(3, 4)).sum().backward()
    before = model.block[0].weight.grad.clone()
    model.block[0].float()  # moves the gradient as well
    restore(handle)
    assert torch.equal(model.block[0].weight.grad, before)
