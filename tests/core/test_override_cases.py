"""Faults that people met in practice, each with the case it holds: the table is tests/CASES.md."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from by_hand import assert_same
from dtype_recorder import record_dtypes
from torch import nn

from dtype_hooks import override_dtype

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def quiet_and_seeded():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="dtype_hooks")
        yield
    assert not torch.is_autocast_enabled("cpu")


def autocast(dtype=BF16):
    return torch.autocast("cpu", dtype)


def test_under_autocast_matched_modules_run_in_float32_and_their_neighbours_in_bf16():
    """The contract's purpose, read at the dispatcher, forward and backward."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc1, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return x + self.fc2(F.gelu(self.fc1(self.norm(x))))

    model = nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 3))
    override_dtype(model, [r"norm", r"2\.fc1", r"^3$"])
    with record_dtypes(model) as calls:
        with autocast():
            y = model(torch.randn(4, 8))
        y.float().sum().backward()
    for module in ("1.norm", "2.norm"):
        assert calls.dtypes("native_layer_norm", module) == {F32}
        assert calls.dtypes("native_layer_norm_backward", module) == {F32}
    for module in ("2.fc1", "3"):
        assert calls.dtypes("addmm", module) == {F32}
        assert calls.dtypes("mm", module, backward=True) == {F32}
    for module in ("0", "1.fc1", "1.fc2", "2.fc2"):
        assert calls.dtypes("addmm", module) == {BF16}
        assert calls.dtypes("mm", module, backward=True) == {BF16}
    for module in ("1", "2"):
        assert calls.dtypes("gelu", module) == {BF16}
    assert y.dtype is BF16


def test_a_projection_kept_in_float32_hands_half_to_the_next_norm():
    """O2"""

    class T5Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.wi, self.wo, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)

        def forward(self, x):
            return self.norm(self.wo(F.relu(self.wi(x))))

    model = T5Block().half()
    model.wo.float()  # as a model with a keep-in-float32 list is loaded
    x = torch.randn(2, 4).half()
    with pytest.raises(RuntimeError, match="dtype"):
        model(x)
    override_dtype(model, ["wo$"], dtype="float32")
    with record_dtypes(model) as calls:
        y = model(x)
    assert calls.dtypes("addmm", "wo") == {F32}
    assert calls.dtypes("addmm", "wi") == calls.dtypes("native_layer_norm", "norm") == {F16}
    assert y.dtype is F16


class Gemm(torch.autograd.Function):
    """A custom operator that autocast does not reach and that wants one dtype."""

    @staticmethod
    def forward(ctx, x, w):
        assert x.dtype is w.dtype, "Half vs Float"
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        assert g.dtype is x.dtype is w.dtype
        return g @ w.T, x.T @ g


class MyOp(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return Gemm.apply(x, self.w)


def test_a_custom_operator_under_autocast_gets_one_dtype_and_trains():
    """O12"""
    model = nn.Sequential(nn.Linear(4, 4), MyOp())
    x = torch.randn(2, 4)
    with autocast(), pytest.raises(AssertionError, match="Half vs Float"):
        model(x)
    override_dtype(model, class_patterns=["^MyOp$"])
    with autocast():
        y = model(x)
    assert y.dtype is BF16
    y.float().sum().backward()
    assert model[1].w.grad.dtype is F32
    assert model[0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", ["float32", "fp16"])
def test_a_kernel_chosen_by_the_filters_dtype_sees_features_of_the_same(dtype):
    """O13: float16 without storing the parameters in it casts them for the call."""

    class SparseConv(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, features):
            assert features.dtype is self.weight.dtype
            return features @ self.weight

    model = nn.Sequential(nn.Linear(4, 4), SparseConv())
    override_dtype(model, class_patterns=["Sparse.*"], dtype=dtype)
    with autocast(), record_dtypes(model) as calls:
        y = model(torch.randn(2, 4))
    assert calls.dtypes("mm", "1") == {F32 if dtype == "float32" else F16}
    assert y.dtype is BF16
    assert model[1].weight.dtype is F32


def test_a_norm_that_asserts_float32_input_gets_it():
    """O15"""

    class MyNorm(nn.Module):
        def forward(self, x):
            assert x.dtype == torch.float32
            return F.layer_norm(x, x.shape[-1:])

    model = nn.Sequential(nn.Linear(4, 4), MyNorm())
    with autocast(), pytest.raises(AssertionError):
        model(torch.randn(2, 4))
    override_dtype(model, class_patterns=["MyNorm"])
    with autocast():
        assert model(torch.randn(2, 4)).dtype is BF16


class SquaredLoss(nn.Module):
    """Its matmul makes halves of anything under autocast; 300 ** 2 is beyond float16's maximum of 65504."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.eye(2))

    def forward(self, x):
        return (x @ self.mix).pow(2).mean()


def test_a_hand_written_loss_does_not_overflow_in_float32():
    """O16"""
    model = nn.ModuleDict({"loss": SquaredLoss()})
    x = torch.full((1, 2), 300.0)
    with autocast(F16):
        assert model["loss"](x) == torch.inf
        override_dtype(model, ["loss"])
        assert model["loss"](x) == 90000.0


def test_what_does_not_fit_the_inputs_dtype_overflows_on_its_way_out():
    """O16: the contract casts outputs back, so a loss fed with halves returns a half, whatever it computed in."""
    model = nn.ModuleDict({"loss": SquaredLoss()})
    override_dtype(model, ["loss"])
    with record_dtypes(model) as calls:
        y = model["loss"](torch.full((1, 2), 300.0).half())
    assert calls.dtypes("mean") == {F32}
    assert (y.dtype, y.item()) == (F16, torch.inf)


@pytest.mark.parametrize("training", [True, False])
def test_norms_of_a_bf16_net_compute_in_float32_and_return_bf16(training):
    """O25"""
    model = (
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.LayerNorm(4))
        .bfloat16()
        .train(training)
    )
    seen = []
    for norm in (model[1], model[3]):
        forward = type(norm).forward
        norm.forward = lambda x, norm=norm, forward=forward: seen.append(x.dtype) or forward(norm, x)
    override_dtype(model, class_patterns=["BatchNorm", "LayerNorm"])
    outputs = []
    for norm in (model[1], model[3]):
        norm.register_forward_hook(lambda m, args, y: outputs.append((args[0].dtype, y.dtype)))
    model(torch.randn(8, 4).bfloat16()).sum().backward()
    assert seen == [F32, F32]
    assert outputs == [(BF16, BF16)] * 2


def test_batch_norm_after_a_linear_under_autocast_sees_float32_only_with_a_rule():
    """O26"""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    def inputs_of_batch_norm():
        with autocast(), record_dtypes(model) as calls:
            model(torch.randn(8, 4))
        (call,) = calls.of("native_batch_norm")
        return call.inputs[0], call.outputs[0], calls.dtypes("addmm", "2")

    assert inputs_of_batch_norm() == (BF16, BF16, {BF16})
    override_dtype(model, class_patterns=["BatchNorm.*"])
    assert inputs_of_batch_norm() == (F32, F32, {BF16})


@pytest.mark.parametrize(
    "make",
    [lambda: nn.LayerNorm(4), lambda: nn.GroupNorm(2, 4), lambda: nn.BatchNorm1d(4), lambda: nn.RMSNorm(4)],
)
def test_a_norm_with_bf16_parameters_and_float32_input_computes_in_float32(make):
    """O27"""
    model = nn.Sequential(make().bfloat16())
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.rand(4))
    plain = copy.deepcopy(model).float()
    x = torch.randn(8, 4)
    if not isinstance(model[0], nn.RMSNorm):
        with pytest.raises(RuntimeError, match="mixed dtype"):
            model(x)
    override_dtype(model, ["0"], dtype="float32")
    y = model(x)
    assert_same(y, plain(x))
    y.sum().backward()
    assert model[0].weight.grad.dtype is BF16
    assert model[0].weight.dtype is BF16


def test_two_low_rank_layers_of_different_stored_dtypes_join_a_bf16_base():
    """O30"""

    class Lora(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.lora_A, self.lora_B = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 4)

        def forward(self, x):
            return self.base(x) + self.lora_B(self.lora_A(x))

    model = Lora().bfloat16()
    model.lora_A.float()
    x = torch.randn(2, 4).bfloat16()
    with pytest.raises(RuntimeError, match="dtype"):
        model(x)
    override_dtype(model, ["lora_[AB]"], dtype="float32")
    y = model(x)
    assert y.dtype is BF16
    y.sum().backward()
    assert [p.grad.dtype for p in (model.base.weight, model.lora_A.weight, model.lora_B.weight)] == [
        BF16,
        F32,
        BF16,
    ]


def test_autocast_is_off_for_chosen_layers_of_a_volumetric_net():
    """O31"""
    model = nn.Sequential(
        nn.Conv3d(1, 2, 3), nn.ConvTranspose3d(2, 2, 2), nn.MaxPool3d(2), nn.ConvTranspose3d(2, 1, 2)
    )
    override_dtype(model, class_patterns=["ConvTranspose3d|MaxPool3d"])
    with autocast(), record_dtypes(model) as calls:
        y = model(torch.randn(1, 1, 6, 6, 6))
    assert calls.dtypes("convolution", "0") == {BF16}
    for module in ("1", "3"):
        assert calls.dtypes("convolution", module) == {F32}
    assert y.dtype is BF16


def test_unpooling_runs_in_float32_with_its_integer_indices():
    """O31"""
    pool, unpool = nn.MaxPool3d(2, return_indices=True), nn.Sequential(nn.MaxUnpool3d(2))
    override_dtype(unpool, class_patterns=["MaxUnpool3d"])
    x = torch.randn(1, 1, 4, 4, 4).bfloat16()
    values, indices = pool(x.float())
    with record_dtypes(unpool) as calls:
        y = unpool[0](values.bfloat16(), indices)
    assert y.dtype is BF16
    assert calls.dtypes("max_unpool3d", "0") == {F32}


def test_an_upsampling_rule_works_for_a_kernel_that_lacks_bf16():
    """A17: the example of a rule, whether or not torch has the kernel by now."""
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Upsample(scale_factor=2, mode="bicubic"))
    override_dtype(model, class_patterns=["Upsample"])
    with autocast(), record_dtypes(model) as calls:
        y = model(torch.randn(1, 1, 4, 4))
    assert calls.dtypes("upsample_bicubic2d") == {F32}
    assert y.dtype is BF16


def test_cells_keep_the_dtype_of_their_state_over_steps():
    """A24"""
    for cell in (nn.LSTMCell(4, 4), nn.GRUCell(4, 4)):
        model = nn.Sequential(cell)
        override_dtype(model, ["0"], cast_inputs="all")
        x = torch.randn(2, 4).bfloat16()
        zeros = torch.zeros(2, 4, dtype=BF16)
        state = (zeros, zeros) if isinstance(cell, nn.LSTMCell) else zeros
        for _ in range(3):
            with autocast():
                state = cell(x, state)
            assert {t.dtype for t in (state if isinstance(state, tuple) else (state,))} == {BF16}


def test_a_float_mask_with_bf16_attention_is_cast_with_the_rest():
    """A22"""
    mha = nn.MultiheadAttention(8, 2, batch_first=True).bfloat16()
    override_dtype(nn.Sequential(mha), ["^0$"], cast_inputs="all")
    x, mask = torch.randn(2, 3, 8).bfloat16(), torch.zeros(3, 3)
    with record_dtypes(mha) as calls:
        y, _ = mha(x, x, x, attn_mask=mask)
    assert y.dtype is BF16
    assert calls.dtypes("addmm") == {F32}


def test_eight_bit_weights_joined_with_others_are_handled_by_a_rule():
    """A28"""

    class Joins(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, 4).to(torch.float8_e4m3fn), requires_grad=False)

        def forward(self, x):
            return torch.cat([self.w, x])

    model = nn.Sequential(Joins())
    with autocast(), pytest.raises(RuntimeError):
        model(torch.randn(2, 4))
    override_dtype(model, ["0"])
    with autocast():
        assert model(torch.randn(2, 4)).dtype is F32
    assert model[0].w.dtype is torch.float8_e4m3fn


def test_threads_of_ones_own_need_no_autocast_to_be_overridden():
    """A35: autocast is a thread's own; an override lies on the module."""
    import threading

    model, seen = nn.Sequential(nn.Linear(4, 4)), []
    override_dtype(model, ["0"], dtype="float64")
    model[0].register_forward_pre_hook(lambda m, args: None)

    def work():
        with record_dtypes(model) as calls:
            model(torch.randn(2, 4))
        seen.append(calls.dtypes("addmm"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [{F64}]


def test_a_small_angle_loss_is_finite_and_that_of_float32():
    """A38"""

    class AngleLoss(nn.Module):
        def forward(self, x, y):
            return (torch.sqrt(x * x + y * y + 1e-12) + torch.atan2(y, x) - torch.exp(-x / 1e-5)).mean()

    model = nn.ModuleDict({"loss": AngleLoss()})
    x, y = torch.full((4,), 3e-5), torch.full((4,), 2e-5)
    expected = model["loss"](x, y)
    override_dtype(model, ["loss"], cast_inputs="all")
    with autocast():
        assert_same(model["loss"](x, y), expected)
