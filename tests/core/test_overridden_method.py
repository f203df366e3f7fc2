"""Inside an overridden method everything computes in the dtype, bit for bit as with casts by hand."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import random
import warnings
from collections import namedtuple

import numpy as np
import pytest
import torch
from by_hand import assert_same, gradients, run_by_hand
from dtype_recorder import record_dtypes
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from dtype_hooks import override_dtype
from dtype_hooks.core.casting import cast_floating, tensors_in

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def quiet_and_seeded():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="dtype_hooks")
        warnings.filterwarnings("ignore", message=".*running statistics in bfloat16")
        yield
    assert not torch.is_autocast_enabled("cpu")


@contextlib.contextmanager
def notes():
    """The texts of the warnings given inside."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts.extend(str(warning.message) for warning in caught)


def autocast(on=True):
    return torch.autocast("cpu", BF16, enabled=on)


class Root(nn.Module):
    """A root around one module, which rules may then take."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def overridden(inner, dtype=F32, **rule):
    override_dtype(Root(inner), ["^inner$"], dtype=dtype, **rule)
    return inner


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)
        self.down.weight = self.up.weight

    def forward(self, x):
        return self.down(self.up(x).tanh())


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.ws = nn.ParameterList([torch.randn(6, 6) for _ in range(2)])
        self.d = nn.ParameterDict({"b": torch.randn(6)})
        self.register_buffer("scale", torch.full((6,), 0.3))
        self.register_buffer("step", torch.tensor(3))
        self.register_buffer("absent", None)

    def forward(self, x):
        for w in self.ws:
            x = x @ w + self.d["b"]
        return x * self.scale + self.step


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x):
        y = self.lin(x)
        return {"y": y, "all": [self.norm(y), (y.argmax(-1), y > 0)], "n": 3}


class Rms(nn.Module):
    """As Llama and T5 write it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def wide(*shape):
    return lambda: torch.randn(*shape)


ZOO = {
    "linear": (lambda: nn.Linear(6, 3), wide(4, 6)),
    "bilinear_free": (Listed, wide(4, 6)),
    "layer_norm": (lambda: nn.LayerNorm(6), wide(4, 6)),
    "layer_norm_plain": (lambda: nn.LayerNorm(6, elementwise_affine=False), wide(4, 6)),
    "group_norm": (lambda: nn.GroupNorm(2, 6), wide(4, 6, 3)),
    "rms_norm": (lambda: nn.RMSNorm(6), wide(4, 6)),
    "rms_by_hand": (Rms, wide(4, 6)),
    "batch_norm": (lambda: nn.BatchNorm1d(6), wide(8, 6)),
    "batch_norm_slow": (lambda: nn.BatchNorm2d(6, momentum=None), wide(8, 6, 2, 2)),
    "instance_norm": (lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True), wide(4, 6, 5)),
    "conv": (lambda: nn.Conv2d(2, 3, 3, padding="same"), wide(2, 2, 5, 5)),
    "conv_transpose": (lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), wide(1, 2, 3, 3, 3)),
    "lstm": (lambda: nn.LSTM(6, 5, num_layers=2, bidirectional=True), wide(3, 2, 6)),
    "lstm_projected": (lambda: nn.LSTM(6, 5, proj_size=3), wide(3, 2, 6)),
    "gru": (lambda: nn.GRU(6, 5, batch_first=True), wide(2, 3, 6)),
    "gru_cell": (lambda: nn.GRUCell(6, 5), wide(2, 6)),
    "encoder_layer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), wide(2, 3, 6)),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(6, 3)), wide(4, 6)),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(6, 3)), wide(4, 6)),
    "prelu_softmax": (lambda: nn.Sequential(nn.PReLU(6), nn.Softmax(-1)), wide(4, 6)),
    "tied": (Tied, wide(4, 6)),
    "nested_outputs": (Branches, wide(4, 6)),
    "in_place_inside": (lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)), wide(4, 6)),
    "gelu": (nn.GELU, wide(4, 6)),
    "identity": (nn.Identity, wide(4, 6)),
    "deep": (lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), Tied(), Rms()), wide(8, 6)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("stored", "dtype", "around", "training"),
    [
        (F32, F32, True, True), (BF16, F32, True, True), (BF16, F32, False, True), (BF16, F32, False, False),
        (F32, F64, True, True), (F32, BF16, False, True),
    ],
    ids=["amp_32", "amp_16_32", "16_32", "16_32_eval", "amp_32_64", "32_16"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ZOO)
def test_outputs_gradients_and_buffers_equal_casts_by_hand(kind, stored, dtype, around, training):
    """O27"""
    make, make_input = ZOO[kind]
    module = make().to(stored).train(training)
    given = BF16 if around else stored
    x = make_input().to(given)
    reference = copy.deepcopy(module)
    expected, buffers = run_by_hand(reference, dtype, x1 := x.clone().requires_grad_())
    sum(t.double().pow(2).sum() for t in tensors_in(expected) if t.requires_grad).backward()

    inner = overridden(module, dtype)
    keys, parameters = list(module.state_dict()), dict(module.named_parameters())
    with autocast(around):
        y = inner(x2 := x.clone().requires_grad_())
    sum(t.double().pow(2).sum() for t in tensors_in(y) if t.requires_grad).backward()

    assert type(y) is type(expected)
    assert_same(cast_floating(y, F64), cast_floating(expected, F64))
    assert all(t.dtype is given for t in tensors_in(y) if t.is_floating_point())
    assert_same(gradients(module), gradients(reference))
    assert_same(x2.grad, x1.grad)
    assert_same(dict(module.named_buffers()), buffers)
    assert list(module.state_dict()) == keys
    assert all(parameters[name] is p for name, p in module.named_parameters())
    assert all(p.dtype is stored for p in module.parameters() if p.is_floating_point())


# ---- which input is cast, and what the outputs are cast to


class Kinds(nn.Module):
    """Returns whatever it was made with, floats in the dtype of its input."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        assert x.dtype is F32
        return self.make(x)


Point = namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Box:
    x: Tensor
    n: int = 1


def model_output(x):
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=x, hidden_states=(x, x))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (x, x.int()), lambda x: [x, [x]], lambda x: {"a": x, "b": {"c": (x,)}}, lambda x: Point(x, 3),
        lambda x: collections.OrderedDict(b=x, a=x), lambda x: collections.defaultdict(list, a=x), Box, model_output,
        lambda x: (x, None, "s", x > 0, x.to(torch.complex64), x.long()), lambda x: torch.max(x, -1), lambda x: None,
    ],
)  # fmt: skip
def test_every_floating_output_comes_back_in_the_inputs_dtype_and_the_rest_untouched(make):
    inner = overridden(Kinds(make))
    x = torch.randn(2, 3).bfloat16()
    expected, y = make(x.float()), inner(x)
    assert type(y) is type(expected)
    for got, want in zip(tensors_in(y), tensors_in(expected), strict=True):
        assert got.dtype is (BF16 if want.is_floating_point() else want.dtype)
        assert_same(got, want.to(got.dtype))


def test_only_the_first_positional_is_cast_and_one_warning_names_the_others():
    """O10"""

    class Adds(nn.Module):
        def forward(self, x, bias, *, mask=None, scale=1.0, steps=None):
            seen.append((x.dtype, bias.dtype, mask["m"].dtype, steps.dtype))
            return x + bias.to(x.dtype)

    seen = []
    inner = overridden(Adds())
    x, steps = torch.ones(2).bfloat16(), torch.ones(2, dtype=torch.int64)
    with notes() as caught:
        for _ in range(5):
            inner(x, x, mask={"m": torch.ones(2, dtype=F64)}, steps=steps)
    assert seen == [(F32, BF16, F64, torch.int64)] * 5
    assert len(caught) == 1
    message = caught[0]
    assert "Adds.forward (^inner$): argument 1 comes in as bfloat16 and is not cast" in message
    assert "cast_inputs='all'" in message


def test_a_keyword_in_another_dtype_is_named():
    """O10"""

    class Masked(nn.Module):
        def forward(self, x, mask):
            return x * mask.to(x.dtype)

    inner = overridden(Masked())
    with pytest.warns(UserWarning, match="argument 'mask' comes in as bfloat16"):
        inner(torch.ones(2).bfloat16(), mask=torch.ones(2).bfloat16())


@pytest.mark.parametrize("call", ["keyword", "tuple", "dict", "none", "number"])
def test_without_a_tensor_first_the_call_is_wholly_unwrapped_and_says_so_once(call):
    class Any_(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(2, 2)

        def forward(self, a=None, x=None):
            x = x if x is not None else a
            x = x[0] if isinstance(x, tuple) else x["x"] if isinstance(x, dict) else x
            return self.lin(x) if isinstance(x, Tensor) else self.lin(torch.ones(1, 2))

    inner, x = overridden(Any_()), torch.ones(1, 2)
    args, kwargs = {
        "keyword": ((), {"x": x}), "tuple": (((x,),), {}), "dict": (({"x": x},), {}), "none": ((None,), {}), "number": ((3,), {})
    }[call]  # fmt: skip
    with notes() as caught, autocast(), record_dtypes(inner) as calls:
        for _ in range(4):
            assert inner(*args, **kwargs).dtype is BF16
    assert calls.dtypes("addmm") == {BF16}
    assert len(caught) == 1
    assert "so this call runs without the override. Set cast_inputs='all'" in caught[0]


def test_all_casts_every_floating_tensor_of_the_arguments_and_nothing_else():
    """O10"""

    class Takes(nn.Module):
        def forward(self, n, *, x, extra, flag, word):
            seen.extend(t.dtype for t in tensors_in((n, x, extra, flag)))
            assert word == "s"
            return x @ extra["w"][0], n, flag

    seen = []
    inner = overridden(Takes(), F64, cast_inputs="all")
    n, flag, extra = (
        torch.tensor(3),
        torch.tensor(True),
        {"w": [torch.ones(2, 2).bfloat16()], "z": torch.ones(1, dtype=torch.complex64)},
    )
    for _ in range(4):
        y, n2, flag2 = inner(n, x=torch.ones(2, 2), extra=extra, flag=flag, word="s")
    assert seen[:5] == [torch.int64, F64, F64, torch.complex64, torch.bool]
    assert y.dtype is F32  # the first floating tensor's
    assert n2 is n
    assert flag2 is flag
    assert extra["w"][0].dtype is BF16


def test_all_reaches_inputs_behind_a_tuple():
    class Neck(nn.Sequential):
        def forward(self, feats):
            return tuple(self[0](f) for f in feats)

    inner = overridden(Neck(nn.Linear(2, 2)), cast_inputs="all")
    with autocast(), record_dtypes(inner) as calls:
        y = inner((torch.ones(1, 2).bfloat16(), torch.ones(1, 2).bfloat16()))
    assert calls.dtypes("addmm") == {F32}
    assert [t.dtype for t in y] == [BF16, BF16]


@pytest.mark.parametrize("cast_inputs", ["first", "all"])
@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("stored", [F32, BF16])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Embedding(7, 4), lambda: nn.Embedding(7, 4, padding_idx=0, max_norm=0.5), lambda: nn.EmbeddingBag(7, 4),
        lambda: nn.Sequential(nn.Embedding(7, 4), nn.Dropout(0.5), nn.Linear(4, 4)),
        lambda: nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4)), lambda: Scores(), lambda: LowRankEmbedding(7, 4),
    ],
    ids=["embedding", "max_norm", "bag", "encoder", "norm", "two_dtypes", "low_rank"],
)  # fmt: skip
def test_integer_inputs_pass_and_outputs_have_the_dtype_of_a_run_without_us(
    make, stored, around, cast_inputs
):
    """The contract's Embedding; the probe that asks for the dtype draws no random number and changes nothing."""
    inner = make().to(stored)
    plain = copy.deepcopy(inner)
    overridden(inner, cast_inputs=cast_inputs)
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    torch.manual_seed(3)
    with autocast(around):
        expected = plain(tokens)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    with autocast(around), record_dtypes(inner) as calls:
        y = inner(tokens)
    assert torch.equal(torch.get_rng_state(), after)
    assert [t.dtype for t in tensors_in(y)] == [t.dtype for t in tensors_in(expected)]
    assert calls.dtypes("embedding" if calls.of("embedding") else "_embedding_bag") == {F32}
    assert not calls.of("addmm") or calls.dtypes("addmm") == {F32}
    assert all(a is not b for a, b in zip(inner.parameters(), plain.parameters(), strict=True))
    if not any(getattr(module, "max_norm", None) for module in inner.modules()):
        assert_same(inner.state_dict(), plain.state_dict())


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.lin = nn.Embedding(7, 4), nn.Linear(4, 4)

    def forward(self, tokens):
        y = self.lin(self.emb(tokens))
        return {"y": y, "loss": y.double().sum(), "tokens": tokens}


class LowRankEmbedding(nn.Embedding):
    """A subclass that computes more than a look-up."""

    def __init__(self, n, d):
        super().__init__(n, d)
        self.b = nn.Parameter(torch.randn(d, d))

    def forward(self, tokens):
        return super().forward(tokens) @ self.b


def test_the_probe_is_made_once_for_a_kind_of_input_and_runs_none_of_the_modules_hooks():
    inner = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4))
    seen = []
    inner[1].register_forward_hook(lambda m, args, y: seen.append(type(y)))
    inner[0].register_forward_pre_hook(lambda m, args: seen.append(type(args[0])))
    overridden(inner)
    for _ in range(3):
        inner(torch.tensor([1, 2]))
    assert seen == [Tensor] * 6


def test_the_probe_leaves_pythons_and_numpys_random_numbers_alone():
    class LayerDrop(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(7, 4)

        def forward(self, tokens):
            drawn.append((random.random(), np.random.uniform()))
            return self.emb(tokens)

    drawn = []
    inner = overridden(LayerDrop())
    random.seed(0), np.random.seed(0)
    expected = (random.random(), np.random.uniform())
    random.seed(0), np.random.seed(0)
    inner(torch.tensor([1]))
    assert drawn[-1] == expected


def test_control_flow_on_data_falls_back_on_the_stored_dtype():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(7, 4)

        def forward(self, tokens):
            return self.emb(tokens) if tokens.sum() > 3 else self.emb(tokens) * 0

    inner = overridden(Routed().bfloat16())
    assert inner(torch.tensor([1, 5])).dtype is BF16


def test_a_complex_first_argument_passes_untouched():
    class Spectrum(nn.Module):
        def forward(self, z):
            assert z.dtype is torch.complex64
            return z.abs()

    assert overridden(Spectrum(), F64)(torch.ones(2, dtype=torch.complex64)).dtype is F32


def test_complex_and_integer_parameters_are_left_alone():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.z = nn.Parameter(torch.ones(2, dtype=torch.complex64))
            self.i = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x):
            assert (self.z.dtype, self.i.dtype, self.w.dtype, x.dtype) == (
                torch.complex64,
                torch.int64,
                F64,
                F64,
            )
            return x * self.w * self.i

    assert overridden(Mixed(), F64)(torch.ones(2)).dtype is F32
