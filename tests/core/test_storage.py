"""Stored dtypes without mmengine: which tensors, what is kept, what is refused, and what remove() puts back."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from dtype_hooks import override_dtype
from dtype_hooks.core.override import OverrideRule
from dtype_hooks.errors import OverrideError, SelectionError

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def install(model, patterns, dtype="bfloat16", **kwargs):
    return override_dtype(model, patterns, dtype=dtype, override_parameters=True, **kwargs)


def dtypes(model):
    return {name: p.dtype for name, p in (*model.named_parameters(), *model.named_buffers())}


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.register_buffer("shift", torch.rand(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.index = nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return self.lin(x) * self.scale + self.shift


class Tied(nn.Module):
    """A language model's head on its embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


class TestWhatIsStored:
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
    def test_own_floating_parameters_only(self, dtype):
        model = nn.Sequential(Inner())
        handle = install(model, ["^0$"], dtype)
        stored = getattr(torch, dtype)
        assert dtypes(model) == {
            "0.scale": stored,
            "0.shift": F32,
            "0.count": torch.int64,
            "0.index": torch.int64,
            "0.lin.weight": F32,
            "0.lin.bias": F32,
        }
        assert [s.names for s in handle.stored] == [("0.scale",)]
        assert handle.stored[0].is_parameter

    def test_buffers_when_asked_and_then_parameters_only_if_asked_as_well(self):
        model = nn.Sequential(Inner())
        handle = override_dtype(model, ["^0$"], dtype="bfloat16", override_buffers=True)
        assert (model[0].scale.dtype, model[0].shift.dtype, model[0].count.dtype) == (F32, BF16, torch.int64)
        assert not handle.stored[0].is_parameter
        handle.remove()
        install(model, ["^0$"], override_buffers=True)
        assert (model[0].scale.dtype, model[0].shift.dtype) == (BF16, BF16)

    def test_values_are_those_of_a_cast_and_every_parameter_is_the_same_object(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        before = dict(model.named_parameters())
        values = {name: p.detach().clone() for name, p in before.items()}
        model[0].weight.note = "kept"
        install(model, ["0"])
        for name, p in model.named_parameters():
            assert p is before[name]
            assert torch.equal(p.detach(), values[name].to(p.dtype))
        assert model[0].weight.note == "kept"
        assert model[0].weight.requires_grad
        assert model[0].weight.is_leaf

    def test_frozen_parameters_stay_frozen(self):
        model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False))
        install(model, ["0"])
        assert not any(p.requires_grad for p in model.parameters())
        assert model[0].weight.dtype is BF16

    def test_a_gradient_in_another_dtype_is_dropped_and_one_in_the_dtype_stays(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        install(model, ["0", "1"])
        assert all(p.grad is None for p in model[0].parameters())
        assert all(p.grad is not None for p in model[1].parameters())

    def test_excluded_modules_below_a_matched_parent_keep_parameters_and_buffers(self):
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        install(model, ["0"], override_buffers=True, exclude=[r"0\.1"])
        assert dtypes(model) == {
            "0.0.weight": BF16,
            "0.0.bias": BF16,
            "0.1.weight": F32,
            "0.1.bias": F32,
            "0.1.running_mean": F32,
            "0.1.running_var": F32,
            "0.1.num_batches_tracked": torch.int64,
        }
        model(torch.randn(3, 4)).sum().backward()
        assert model[0][1].running_mean.dtype is F32

    def test_the_root_is_never_stored(self):
        model = Inner()
        handle = install(model, [".*"])
        assert model.scale.dtype is F32
        assert {name for s in handle.stored for name in s.names} == {"lin.weight", "lin.bias"}

    def test_a_parameter_list_has_no_forward_and_is_stored_all_the_same(self):
        class Tokens(nn.Module):
            def __init__(self):
                super().__init__()
                self.tokens = nn.ParameterList([torch.rand(3), torch.rand(3)])
                self.named = nn.ParameterDict({"a": torch.rand(2)})

        model = Tokens()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            handle = install(model, ["tokens", "named"])
        assert dtypes(model) == {"tokens.0": BF16, "tokens.1": BF16, "named.a": BF16}
        assert handle.records == []
        handle.remove()
        assert set(dtypes(model).values()) == {F32}

    def test_a_module_under_two_names_is_stored_once(self):
        lin = nn.Linear(4, 4)
        model = nn.ModuleDict({"a": lin, "b": lin})
        handle = install(model, ["^b$"])
        assert [s.names for s in handle.stored] == [("a.weight", "b.weight"), ("a.bias", "b.bias")]

    def test_it_computes_in_the_dtype_that_it_stores(self):
        model = nn.Sequential(nn.Linear(4, 4))
        by_hand = copy.deepcopy(model[0]).bfloat16()
        install(model, ["0"])
        x = torch.randn(3, 4)
        y = model(x)
        assert y.dtype is F32
        assert torch.equal(y, by_hand(x.bfloat16()).float())
        y.sum().backward()
        assert model[0].weight.grad.dtype is BF16


class TestTies:
    def test_a_tied_head_and_embedding_stay_tied_and_are_reported_with_both_names(self):
        model = Tied()
        handle = install(model, ["head", "embed"])
        assert handle.warnings == []
        assert model.head.weight is model.embed.weight
        assert model.embed.weight.dtype is BF16
        assert [s.names for s in handle.stored] == [("embed.weight", "head.weight")]
        tokens = torch.tensor([1, 2])
        model(tokens).sum().backward()
        assert model.embed.weight.grad.dtype is BF16

    def test_a_tied_module_that_no_rule_matches_is_warned_of(self):
        """It has to compute with the new dtype: a Linear on float32 inputs would fail."""
        model = Tied()
        with pytest.warns(
            UserWarning, match=r"'embed.weight = head.weight' is stored in bfloat16, and 'embed.weight'"
        ):
            install(model, ["head"])
        second = override_dtype(model, ["embed"], dtype="float32")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            install(model, ["head"])
        second.remove()

    def test_two_rules_on_one_tied_parameter_in_two_dtypes_are_an_error_that_names_both(self):
        model = Tied()
        first = install(model, ["embed"])
        with pytest.raises(SelectionError) as caught:
            install(model, ["^head$"], "float64")
        message = str(caught.value)
        for part in ("embed", "^head$", "bfloat16", "float64", "embed.weight = head.weight"):
            assert part in message
        assert model.embed.weight.dtype is BF16
        assert "forward" not in model.head.__dict__  # nothing was touched
        first.remove()
        assert model.embed.weight.dtype is F32

    def test_two_rules_in_the_same_dtype_share_it_until_both_are_removed(self):
        model = Tied()
        first, second = install(model, ["embed"]), install(model, ["head"])
        first.remove()
        assert model.head.weight.dtype is BF16
        second.remove()
        assert model.head.weight.dtype is F32

    @pytest.mark.parametrize("order", [1, -1])
    def test_one_module_under_two_rules_keeps_its_dtype_until_both_are_removed(self, order):
        model = nn.Sequential(nn.Linear(4, 4))
        handles = [install(model, ["0"]), install(model, ["^0$"])][::order]
        handles[0].remove()
        assert model[0].weight.dtype is BF16
        handles[1].remove()
        assert model[0].weight.dtype is F32

    def test_after_the_other_rule_is_removed_the_parameter_may_be_taken(self):
        model = Tied()
        install(model, ["embed"]).remove()
        install(model, ["head"], "float64")
        assert model.embed.weight.dtype is F64


class TestRefused:
    def test_out_proj_of_a_multihead_attention_alone(self):
        model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2)})
        with pytest.raises(
            OverrideError, match=r"'attn\.out_proj'.*MultiheadAttention.*reads without calling"
        ):
            install(model, ["out_proj"])
        assert set(dtypes(model).values()) == {F32}
        assert "forward" not in model["attn"].out_proj.__dict__

    def test_out_proj_is_stored_when_the_attention_computes_in_the_dtype_as_well(self):
        model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2, batch_first=True)})
        by_hand = copy.deepcopy(model["attn"]).bfloat16()
        install(model, ["attn"], cast_inputs="all")
        assert set(dtypes(model).values()) == {BF16}
        x = torch.randn(2, 3, 8)
        y = model["attn"](x, x, x)[0]
        b = x.bfloat16()
        assert torch.equal(y, by_hand(b, b, b)[0].float())

    def test_out_proj_is_stored_when_another_rule_computes_for_the_attention(self):
        model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2, batch_first=True)})
        override_dtype(model, ["^attn$"], dtype="bfloat16", cast_inputs="all")
        install(model, ["out_proj"])
        x = torch.randn(2, 3, 8)
        assert model["attn"](x, x, x)[0].dtype is F32

    def test_a_lazy_module(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = nn.Sequential(nn.LazyLinear(4))
        with pytest.raises(OverrideError, match=r"'0\.weight'.*without a shape yet.*Run one forward"):
            install(model, ["0"])
        model(torch.randn(2, 3))
        install(model, ["0"])
        assert model[0].weight.dtype is BF16

    def test_a_refusal_leaves_what_another_rule_stores_as_it_is(self):
        model = nn.ModuleDict({"lin": nn.Linear(8, 8), "attn": nn.MultiheadAttention(8, 2)})
        install(model, ["lin"])
        with pytest.raises(OverrideError):
            install(model, ["out_proj"])
        assert model["lin"].weight.dtype is BF16


class TestSpecialModules:
    @pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.orthogonal])
    def test_a_parametrized_module_stores_what_took_the_place_of_its_weight(self, wrap):
        model = nn.Sequential(wrap(nn.Linear(4, 4)))
        dtype = BF16 if wrap is parametrizations.weight_norm else F64  # orthogonal has no bf16 kernel
        originals = {name: p for name, p in model.named_parameters() if "parametrizations" in name}
        handle = install(model, ["^0$"], str(dtype).removeprefix("torch."))
        assert originals
        assert all(p.dtype is dtype for p in originals.values())
        assert all(p is originals[n] for n, p in model.named_parameters() if n in originals)
        y = model(torch.randn(2, 4))
        assert y.dtype is F32
        y.sum().backward()
        assert all(p.grad.dtype is dtype for p in originals.values())
        handle.remove()
        assert all(p.dtype is F32 for p in originals.values())

    def test_the_legacy_weight_norm_stores_its_two_halves(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = nn.Sequential(weight_norm(nn.Linear(4, 4)))
        install(model, ["0"])
        assert (model[0].weight_g.dtype, model[0].weight_v.dtype) == (BF16, BF16)
        y = model(torch.randn(2, 4))
        y.sum().backward()
        assert model[0].weight_v.grad.dtype is BF16

    @pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU])
    def test_a_recurrent_module_computes_as_one_cast_by_hand(self, cls):
        model = nn.ModuleDict({"rnn": cls(4, 4)})
        by_hand = copy.deepcopy(model["rnn"]).bfloat16()
        handle = install(model, ["rnn"])
        x = torch.randn(3, 2, 4)
        y = model["rnn"](x)[0]
        assert torch.equal(y, by_hand(x.bfloat16())[0].float())
        y.sum().backward()
        assert all(p.grad.dtype is BF16 for p in model.parameters())
        handle.remove()
        assert model["rnn"](x)[0].dtype is F32
        assert all(w.dtype is F32 for w in model["rnn"]._flat_weights)


class TestUndoAndCopies:
    def test_remove_restores_dtypes_with_the_values_of_now(self):
        model = nn.Sequential(nn.Linear(4, 4).double(), nn.Linear(4, 4), nn.LayerNorm(4).bfloat16())
        before = dtypes(model)
        handle = install(model, ["."], "float16")
        with torch.no_grad():
            model[1].weight.fill_(3.0)
        handle.remove()
        assert dtypes(model) == before
        assert torch.equal(model[1].weight, torch.full((4, 4), 3.0))
        assert not any("dtype_hooks" in key for m in model.modules() for key in m.__dict__)

    def test_leaving_with_restores(self):
        model = nn.Sequential(nn.Linear(4, 4))
        with install(model, ["0"]):
            assert model[0].weight.dtype is BF16
        assert model[0].weight.dtype is F32

    def test_refresh_changes_nothing_the_second_time_and_stores_what_is_new(self):
        model = nn.Sequential(nn.Linear(4, 4))
        handle = OverrideRule.make(["."], dtype="bfloat16", override_parameters=True).install(model)
        assert not handle.refresh()
        model.append(nn.Linear(4, 4))
        assert handle.refresh()
        assert model[1].weight.dtype is BF16
        assert len(handle.stored) == 4
        handle.remove()
        assert set(dtypes(model).values()) == {F32}

    def test_a_deep_copy_stores_and_computes_in_the_dtype_with_its_own_parameters(self):
        model = nn.Sequential(nn.Linear(4, 4))
        install(model, ["0"])
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin[0].weight.zero_()
            twin[0].bias.zero_()
        x = torch.randn(2, 4)
        assert twin[0].weight.dtype is BF16
        assert torch.equal(twin(x), torch.zeros(2, 4))
        assert model(x).abs().sum() > 0

    def test_a_pickled_model_and_a_saved_one_come_back_as_they_were(self):
        model = nn.Sequential(nn.Linear(4, 4))
        install(model, ["0"])
        x = torch.randn(2, 4)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for twin in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
            assert twin[0].weight.dtype is BF16
            assert torch.equal(twin(x), model(x))

    def test_a_state_dict_moves_both_ways_under_the_plain_keys(self):
        model, plain = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
        install(model, ["0"])
        assert model.state_dict().keys() == plain.state_dict().keys()
        plain.load_state_dict(model.state_dict())
        assert torch.equal(plain[0].weight, model[0].weight.float())
        model.load_state_dict(plain.state_dict())
        assert model[0].weight.dtype is BF16

    def test_another_rule_that_only_computes_leaves_the_stored_dtype(self):
        """Only stored dtypes of one tensor clash; what a rule computes in is checked elsewhere."""
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
        install(model, [r"0\.0"])
        override_dtype(model, ["^0$"], dtype="float64")
        assert model[0][0].weight.dtype is BF16
        assert model(torch.randn(2, 4)).dtype is F32
