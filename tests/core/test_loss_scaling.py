"""Loss scaling's decisions and flags, against torch's own kernels and a naive version."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from dtype_hooks.core.loss_scaling import (
    HostCopy,
    LossScale,
    LossScaler,
    multiply_gradients,
    next_scale,
    non_finite_flags,
    scales_itself,
    with_gradients,
)
from dtype_hooks.errors import ConfigError

LARGEST = torch.finfo(torch.float32).max
CPU = torch.device("cpu")


class TestWhatIsAskedFor:
    @pytest.mark.parametrize(
        ("value", "mode", "arguments"),
        [
            (None, "off", {}),
            ("auto", "auto", {}),
            ("dynamic", "dynamic", {}),
            (512, "static", {"init_scale": 512.0}),
            (0.5, "static", {"init_scale": 0.5}),
            ({}, "dynamic", {}),
            ({"init_scale": 4, "growth_interval": 10}, "dynamic", {"init_scale": 4.0, "growth_interval": 10}),
            (
                {"growth_factor": 1.5, "backoff_factor": 0.1},
                "dynamic",
                {"growth_factor": 1.5, "backoff_factor": 0.1},
            ),
        ],
    )
    def test_each_form_is_understood(self, value, mode, arguments):
        choice = LossScale.make(value)

        assert (choice.mode, choice.arguments) == (mode, arguments)
        assert choice.static == (arguments["init_scale"] if mode == "static" else None)

    @pytest.mark.parametrize(
        "value",
        [True, False, 0, -1.0, math.inf, math.nan, 1e39, 1e-50, "static", "1024", "Dynamic", [], b"auto", 1j],
    )
    def test_anything_else_lists_what_is(self, value):
        with pytest.raises(
            ConfigError, match=r"^AutocastHook.loss_scale: got .*; expected 'auto', 'dynamic', a"
        ):
            LossScale.make(value, "AutocastHook.loss_scale")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("init_scale", 0),
            ("init_scale", True),
            ("init_scale", "65536"),
            ("growth_factor", 1),
            ("growth_factor", math.inf),
            ("backoff_factor", 1.0),
            ("backoff_factor", 0),
            ("growth_interval", 0),
            ("growth_interval", 1.5),
            ("growth_interval", True),
        ],
    )
    def test_a_bad_value_in_a_dict_is_named_with_its_key(self, key, value):
        with pytest.raises(ConfigError, match=rf"^loss_scale.{key}: got .*; expected .*\. Leave it out"):
            LossScale.make({key: value})

    @pytest.mark.parametrize("key", ["enabled", "scale", "mode", "device", 3])
    def test_a_key_that_is_none_of_gradscalers_lists_those_that_are(self, key):
        with pytest.raises(ConfigError, match=r"got the key .*; expected some of init_scale, growth_factor,"):
            LossScale.make({key: 1})

    def test_a_resumed_state_keeps_its_scale_and_takes_the_factors_that_are_given(self):
        state = {"scale": 4.0, "growth_factor": 2.0, "growth_interval": 2000, "_growth_tracker": 7}

        assert LossScale.make("dynamic").applied_to(state) == state
        given = LossScale.make({"init_scale": 64, "growth_interval": 5})
        assert given.applied_to(state) == {**state, "growth_interval": 5}
        assert LossScale.make(64).applied_to(state) == {**state, "scale": 64.0}


def test_the_scale_moves_as_torch_moves_it():
    scales = [2.0**-149, 2.0**-126, 1e-3, 1.0, 3.0, 65536.0, 2.0**127, LARGEST]
    settings = itertools.product(
        scales, range(4), [False, True], [1.5, 2.0, 3.3], [0.5, 0.3, 1e-3], [1, 2, 4]
    )
    for scale, tracker, found, growth, backoff, interval in settings:
        on_device, tracked = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32)
        torch._amp_update_scale_(on_device, tracked, torch.tensor(float(found)), growth, backoff, interval)
        if not found and tracker + 1 > interval:  # a tracker past the interval never comes up
            continue
        expected = (on_device.item(), tracked.item())
        assert next_scale(torch.tensor(scale).item(), tracker, found, growth, backoff, interval) == expected


def parameter(gradient, like=None):
    p = nn.Parameter(torch.zeros(like or gradient.shape, dtype=gradient.dtype))
    p.grad = gradient
    return p


class TestFlags:
    @pytest.mark.parametrize(
        "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
    )
    def test_each_gradient_with_an_inf_or_nan_is_flagged_and_no_other(self, dtype):
        rows = [[1, 2], [math.inf, 0], [0, -math.inf], [math.nan, 1], [0, 0], [1e4, -1e4]]
        gradients = [torch.tensor(row, dtype=dtype) for row in rows]
        flags = non_finite_flags([parameter(g) for g in gradients])

        assert flags.tolist() == [not bool(torch.isfinite(g).all()) for g in gradients]

    def test_mixed_dtypes_shapes_and_layouts_in_one_list(self):
        sparse = torch.sparse_coo_tensor([[0, 0]], [3e38, 3e38], (4,))  # uncoalesced: its sum would overflow
        bad_sparse = torch.sparse_coo_tensor([[1]], [math.nan], (4,))
        gradients = [
            torch.tensor(1e300, dtype=torch.float64),  # past float32
            torch.zeros(0),
            torch.tensor([[LARGEST]]),
            sparse,
            bad_sparse,
            torch.tensor([65504.0], dtype=torch.float16),
            torch.tensor([math.inf], dtype=torch.float16),
            torch.zeros(2, 0, dtype=torch.float64),
        ]

        flags = non_finite_flags([parameter(g, like=g.shape) for g in gradients])

        assert flags.tolist() == [False, False, False, False, True, False, True, False]
        assert non_finite_flags([]).tolist() == []

    def test_gradients_are_multiplied_in_place_whatever_their_layout(self):
        gradients = [
            torch.ones(3),
            torch.sparse_coo_tensor([[0]], [1.0], (2,)),
            torch.ones(2, dtype=torch.bfloat16),
        ]
        parameters = [parameter(g, like=g.shape) for g in gradients]
        multiply_gradients(parameters, torch.tensor(4.0))
        multiply_gradients([], torch.tensor(4.0))

        assert [p.grad.to_dense().tolist() for p in parameters] == [[4.0] * 3, [4.0, 0.0], [4.0] * 2]
        assert all(p.grad is g for p, g in zip(parameters, gradients, strict=True))

    @pytest.mark.parametrize("ahead", [False, True])
    def test_a_host_copy_reads_what_the_tensor_holds(self, ahead):
        assert HostCopy(torch.tensor([True, False]), ahead).read() == [True, False]


class TestScaler:
    def sgd(self):
        p = nn.Parameter(torch.ones(2))
        return p, torch.optim.SGD([p], lr=1.0)

    def scaler(self, **arguments):
        scaler = LossScaler("cpu", arguments)
        scaler.start(CPU)
        return scaler

    def test_it_is_enabled_on_the_cpu(self):
        assert self.scaler().is_enabled()
        assert self.scaler().current.item() == 65536.0

    @pytest.mark.parametrize("infinite_at", [0, 1, None])
    def test_an_optimizer_may_step_twice_and_an_inf_in_either_step_counts(self, infinite_at):
        p, optimizer = self.sgd()
        scaler = self.scaler(init_scale=8.0)
        for at in range(2):
            scaler.scale(p.sum() * (math.inf if at == infinite_at else 1)).backward()
            scaler.restart(optimizer)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()

        assert scaler.get_scale() == (8.0 if infinite_at is None else 4.0)
        assert p.tolist() == [-1.0 if infinite_at is None else 0.0] * 2

    def test_many_restarts_of_several_optimizers_lose_no_flag(self):
        p, one = self.sgd()
        q, two = self.sgd()
        scaler = self.scaler(init_scale=8.0)
        for at, (x, optimizer) in enumerate([(p, one), (q, two), (p, one), (q, two), (p, one)]):
            x.grad = torch.full((2,), math.inf if at == 0 else 1.0)
            scaler.restart(optimizer)
            scaler.unscale_(optimizer)
            if at == 3:
                scaler.forget(optimizer)
        scaler.update()

        assert scaler.get_scale() == 4.0

    def test_a_step_without_any_gradient_does_nothing(self):
        p, optimizer = self.sgd()
        scaler = self.scaler()
        scaler.unscale_(optimizer)
        assert [flag.item() for flag in scaler.found_inf(optimizer)] == [0.0]
        scaler.step(optimizer)
        scaler.update()

        assert p.tolist() == [1.0, 1.0]
        assert with_gradients(optimizer) == []

    def test_which_optimizers_decide_on_the_device(self):
        p = nn.Parameter(torch.ones(1))

        assert scales_itself(torch.optim.AdamW([p], fused=True))
        assert not scales_itself(torch.optim.AdamW([p]))
