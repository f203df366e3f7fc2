"""The eager recorder: what it sees, under which names, and that nothing else changes."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dtype_hooks.errors import ConfigError, SelectionError
from dtype_hooks.scales.record import Scales
from dtype_hooks.scales.recorder import track_scales

RELATIVE = 1e-6


def named(scales: Scales, direction: str = "forward") -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in scales.rows() if row["direction"] == direction}


def names(scales: Scales, kind: str = "activation") -> list[str]:
    return [entry.name for entry in scales.entries if entry.kind == kind]


def close(value: float | None, tensor: Tensor) -> bool:
    return value == pytest.approx(tensor.detach().double().std().item(), rel=RELATIVE, abs=1e-30)


class Of(nn.Module):
    """A module around a function, with submodules."""

    def __init__(self, function: Callable[..., Any], **children: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def input_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


class TestWhatIsSeen:
    def test_each_function_and_its_gradient_in_order_of_execution(self):
        kept: dict[str, Tensor] = {}

        def forward(self: Any, x: Tensor) -> Tensor:
            for name, function in (
                (":add", lambda y: y + 1),
                ("fc:linear", self.fc),
                (":softmax", lambda y: F.softmax(y, -1)),
                (":matmul", lambda y: y @ y.T),
                (":sin", torch.sin),
            ):
                x = kept[name] = function(x)
                x.retain_grad()
            return x.sum()

        model = Of(forward, fc=nn.Linear(4, 6))
        with track_scales(model) as scales:
            model(input_of(3, 4)).backward()
        assert names(scales) == [
            ":input[0]",
            ":add",
            "fc:linear",
            ":softmax",
            ":T",
            ":matmul",
            ":sin",
            ":sum",
        ]
        forward_rows, backward_rows = named(scales), named(scales, "backward")
        for name, tensor in kept.items():
            assert close(forward_rows[name]["std"], tensor), name
            assert close(backward_rows[name]["std"], tensor.grad), name
        assert close(backward_rows["fc.weight"]["std"], model.fc.weight.grad)
        assert close(forward_rows["fc.bias"]["std"], model.fc.bias)

    def test_a_gradient_is_summed_over_all_uses(self):
        model = Of(lambda self, x: (lambda y: (y * 3).sum() + (y * y).sum())(x.exp()))
        x = input_of(5)
        with track_scales(model) as scales:
            model(x).backward()
        y = x.detach().exp()
        assert close(named(scales, "backward")[":exp"]["std"], 3 + 2 * y)

    def test_repeated_calls_are_counted_by_module_and_function(self):
        model = Of(lambda self, x: self.fc(self.fc(x).relu()).relu().sum(), fc=nn.Linear(4, 4))
        with track_scales(model) as scales:
            model(input_of(2, 4)).backward()
        assert names(scales)[1:] == ["fc:linear", ":relu", "fc:linear.1", ":relu.1", ":sum"]
        assert set(names(scales)[1:]) <= set(named(scales, "backward"))

    def test_a_module_shared_under_two_names_is_under_its_first(self):
        shared = nn.Linear(4, 4)
        model = Of(lambda self, x: self.b(self.a(x)), a=shared, b=shared)
        with track_scales(model) as scales:
            model(input_of(2, 4))
        assert names(scales)[1:] == ["a:linear", "a:linear.1"]
        assert names(scales, "parameter") == ["a.weight", "a.bias"]

    def test_in_place_functions_are_seen_by_what_they_leave_with_the_right_gradients(self):
        def forward(self: Any, x: Tensor) -> Tensor:
            y = self.fc(x)
            y.mul_(3)
            y += x
            y[0] = 2.0
            F.relu(y, inplace=True)
            return (y * 2).sum()

        model = Of(forward, fc=nn.Linear(4, 4))
        x = input_of(3, 4)
        with track_scales(model) as scales:
            model(x).backward()
        assert names(scales)[1:] == ["fc:linear", ":mul_", ":add_", ":setitem", ":relu", ":mul", ":sum"]
        linear = model.fc(x)
        added = linear * 3 + x
        final = added.clone()
        final[0] = 2.0
        forward_rows, backward_rows = named(scales), named(scales, "backward")
        for name, tensor in (
            ("fc:linear", linear),
            (":mul_", linear * 3),
            (":add_", added),
            (":setitem", final),
            (":relu", final.relu()),
        ):
            assert close(forward_rows[name]["std"], tensor), name
        after = 2.0 * (final > 0)
        before = after.clone()
        before[0] = 0  # the row that is written gets no gradient from what it was
        for name, gradient in (
            (":relu", torch.full_like(after, 2.0)),
            (":setitem", after),
            (":add_", before),
            (":mul_", before),
            ("fc:linear", before * 3),
        ):
            assert close(backward_rows[name]["std"], gradient), name

    def test_a_view_of_what_was_changed_since_is_measured_anew(self):
        def forward(self: Any, x: Tensor) -> Tensor:
            y = x * 2
            y.view(-1)
            y.mul_(10)
            return y.reshape(-1)

        model = Of(forward)
        x = input_of(3, 4)
        with track_scales(model) as scales:
            model(x)
        rows = named(scales)
        assert close(rows[":view"]["std"], x * 2)
        assert close(rows[":reshape"]["std"], x * 20)

    def test_a_gradient_handed_on_by_views_is_not_mistaken_for_another(self):
        def forward(self: Any, x: Tensor) -> Tensor:
            first, second = (x * 2).reshape(6, 4).chunk(2)
            wide = first.unsqueeze(0).expand(5, 3, 4)
            return (wide * torch.arange(5.0)[:, None, None]).sum() + (second.t() ** 3).sum()

        model = Of(forward)
        x = input_of(2, 3, 4)
        with track_scales(model) as scales:
            model(x).backward()
        rows = named(scales, "backward")
        first, second = (x.detach() * 2).reshape(6, 4).chunk(2)
        of_second = 3 * second**2
        assert close(rows[":chunk[1]"]["std"], of_second)
        assert close(rows[":t"]["std"], of_second)
        assert close(rows[":chunk[0]"]["std"], torch.full_like(first, 10.0))
        assert close(rows[":expand"]["std"], torch.arange(5.0)[:, None, None].expand(5, 3, 4))
        assert close(rows[":mul"]["std"], torch.cat([torch.full_like(first, 10.0), of_second]))

    def test_a_sum_hands_its_gradient_to_both_and_each_has_its_own(self):
        def forward(self: Any, x: Tensor) -> Tensor:
            left, right = x.exp(), x.sin()
            y = left + right
            return (y.reshape(-1) * torch.arange(12.0)).sum() + (left * 5).sum()

        model = Of(forward)
        with track_scales(model) as scales:
            model(input_of(3, 4)).backward()
        rows = named(scales, "backward")
        weights = torch.arange(12.0)
        assert rows[":add"]["mean"] == pytest.approx(weights.mean().item())
        assert rows[":sin"]["mean"] == pytest.approx(weights.mean().item())
        assert rows[":exp"]["mean"] == pytest.approx(weights.mean().item() + 5)

    def test_several_results_dicts_and_nested_ones_are_told_apart(self):
        def forward(self: Any, batch: dict[str, Any]) -> dict[str, Any]:
            top, where = batch["x"].max(dim=0)
            return {"top": [top * 2], "where": where}

        model = Of(forward)
        with track_scales(model) as scales:
            model({"x": input_of(3, 4), "ids": [torch.arange(3), torch.ones(2)]})
        assert names(scales) == [":input[0][x]", ":input[0][ids][1]", ":max[0]", ":mul"]

    def test_multihead_attention_is_seen_from_the_inside(self):
        model = Of(lambda self, x: self.attn(x, x, x)[0], attn=nn.MultiheadAttention(8, 2))
        x = input_of(5, 3, 8)
        expected = model(x)
        weights = model.attn(x, x, x, average_attn_weights=False)[1]
        with track_scales(model) as scales:
            output = model(x)
            output.square().sum().backward()
        assert torch.equal(output, expected)
        assert close(named(scales)["attn:softmax"]["std"], weights)
        assert "attn:softmax" in named(scales, "backward")
        assert "attn:multi_head_attention_forward" not in named(scales)
        assert (
            F.multi_head_attention_forward.__globals__["has_torch_function"]
            is torch.overrides.has_torch_function
        )

    def test_a_custom_autograd_function_is_seen_by_its_outputs(self):
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
                ctx.save_for_backward(x)
                return x * x, x.sign()

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Tensor:
                return 2 * ctx.saved_tensors[0] * grads[0]

        model = Of(lambda self, x: Square.apply(x)[0])
        x = input_of(3, 4)
        with track_scales(model) as scales:
            (model(x) * 3).sum().backward()
        assert close(named(scales)[":Square[0]"]["std"], x * x)
        assert close(named(scales, "backward")[":Square[0]"]["std"], torch.full((3, 4), 3.0))

    def test_what_is_computed_outside_the_model_is_seen_where_it_needs_gradients(self):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        with track_scales(model) as scales:
            data = torch.ones(3, 4) * 2 + 1
            loss = F.mse_loss(model(data), torch.zeros(3, 2))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert names(scales) == [":input[0]", ":linear", ":mse_loss"]

    def test_frozen_and_no_grad_parts_have_no_gradient(self):
        def forward(self: Any, x: Tensor) -> Tensor:
            with torch.no_grad():
                teacher = self.teacher(x)
            return F.mse_loss(self.student(x), teacher) + self.frozen(x).sum()

        frozen = nn.Linear(4, 4).requires_grad_(False)
        model = Of(forward, teacher=nn.Linear(4, 4), student=nn.Linear(4, 4), frozen=frozen)
        with track_scales(model) as scales:
            model(torch.ones(2, 4)).backward()
        assert {"teacher:linear", "frozen:linear", "frozen.weight"} <= set(named(scales))
        of_gradients = set(named(scales, "backward"))
        assert "student:linear" in of_gradients
        assert not {"teacher:linear", "frozen:linear", "frozen.weight", "teacher.weight"} & of_gradients

    def test_a_forward_in_another_thread_is_seen(self):
        model = Of(lambda self, x: self.fc(x).relu(), fc=nn.Linear(4, 4))
        with track_scales(model) as scales:
            thread = threading.Thread(target=model, args=(torch.ones(2, 4),))
            thread.start()
            thread.join()
        assert names(scales) == [":input[0]", "fc:linear", ":relu"]

    def test_inference_mode_is_seen(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Flatten())
        with torch.inference_mode(), track_scales(model) as scales:
            model(torch.ones(2, 2, 4))
        assert names(scales) == [":input[0]", "0:linear", "1:flatten"]

    def test_other_tensors_are_left_out_and_odd_ones_are_measured(self):
        def forward(self: Any, x: Tensor) -> Tensor:
            x.to(torch.complex64) * 1j
            x.to_sparse()
            x.argmax(-1) + 1
            torch.gt(x, 0)
            torch.empty(3)
            x.to("meta") * 2
            x.to(torch.float8_e4m3fn)
            x[:0] * 2
            x.sum()
            torch.func.vmap(torch.sin)(x)
            return x.double()

        with track_scales(Of(forward)) as scales:
            Of(forward)(torch.ones(2, 2))
        assert names(scales) == []  # another model's
        model = Of(forward)
        with track_scales(model) as scales:
            model(torch.arange(4.0).reshape(2, 2))
        rows = named(scales)
        assert (
            rows[":to.1"]["dtype"] if ":to.1" in rows else rows[":to"]["dtype"],
            rows[":to"]["amax"],
        ) == ("float8_e4m3fn", 3.0)
        assert rows[":sum"]["std"] == 0
        assert rows[":sum"]["numel"] == 1
        assert rows[":double"]["dtype"] == "float64"
        assert not {":to_sparse", ":argmax", ":gt", ":empty", ":sin"} & set(rows)

    def test_a_bf16_model_under_autocast_records_the_models_work_alone(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)).bfloat16()
        with torch.autocast("cpu", torch.bfloat16), track_scales(model, level="aten") as scales:
            y = model(torch.ones(2, 4, dtype=torch.bfloat16))
            repr(y)
        assert [name for name in names(scales) if "linear" in name or "layer_norm" in name] == [
            "0:linear",
            "1:layer_norm",
            "2:linear",
        ]
        assert not [name for name in names(scales, "kernel") if "dot" in name or "norm.1" in name]


class TestCheckpointing:
    """One record a tensor, and the gradients of a run without checkpointing."""

    @staticmethod
    def blocks(around: Callable[..., Any]) -> nn.Module:
        def forward(self: Any, x: Tensor) -> Tensor:
            for block in (self.a, self.b, self.a):  # `a` twice, in segments of its own
                x = around(block, x)
            return x.square().sum()

        def block() -> nn.Module:
            return Of(lambda self, x: self.fc(self.fc(x).tanh()).sin(), fc=nn.Linear(4, 4))

        torch.manual_seed(0)
        return Of(forward, a=block(), b=block())

    def rows(self, around: Callable[..., Any]) -> dict[tuple[str, str], float]:
        model = self.blocks(around)
        with track_scales(model) as scales:
            model(input_of(3, 4)).backward()
        rows = scales.rows()
        assert len({(row["name"], row["direction"]) for row in rows}) == len(rows)
        return {(row["name"], row["direction"]): row["std"] for row in rows}

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_each_tensor_once_with_its_gradient(self, reentrant: bool):
        expected = self.rows(lambda block, x: block(x))
        assert ("a.fc:linear.3", "backward") in expected
        actual = self.rows(lambda block, x: checkpoint(block, x, use_reentrant=reentrant))
        assert actual == pytest.approx(expected, rel=RELATIVE)  # parameters' are summed in another order

    def test_nested_segments(self):
        def nested(block: nn.Module, x: Tensor) -> Tensor:
            def outer(y: Tensor) -> Tensor:
                return checkpoint(block, checkpoint(block, y, use_reentrant=True).cos(), use_reentrant=True)

            return checkpoint(outer, x, use_reentrant=True)

        def plain(block: nn.Module, x: Tensor) -> Tensor:
            return block(block(x).cos())

        expected, actual = self.rows(plain), self.rows(nested)
        outside = {
            (":cos" + count, "backward") for count in ("", ".1", ".2")
        }  # no module is called around them
        for key in outside:
            expected.pop(key)
            actual.pop(key, None)
        assert actual == pytest.approx(expected, rel=RELATIVE)


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]] = {}


def case(make: Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]) -> Any:
    MODELS[make.__name__] = make
    return make


@case
def conv_net_with_in_place_relu_and_batch_norm() -> Any:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Flatten()
    )
    return net, lambda model: model(input_of(2, 3, 6, 6)).square().mean()


@case
def residual_with_in_place_addition() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.fc(x)
        y += x
        return y.relu_()

    return Of(forward, fc=nn.Linear(4, 4)), lambda model: model(input_of(3, 4)).sum()


@case
def transformer_layer() -> Any:
    return nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.1
    ), lambda model: model(input_of(5, 2, 8)).square().sum()


@case
def recurrent() -> Any:
    return nn.LSTM(4, 6, 2, dropout=0.3), lambda model: model(input_of(5, 2, 4))[0].square().sum()


@case
def autocast_with_an_embedding() -> Any:
    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(torch.arange(12).reshape(3, 4)).flatten(0, 1), torch.arange(12) % 7)

    return nn.Sequential(nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 7)), loss


@case
def reentrant_checkpointing_with_dropout() -> Any:
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
    return Of(
        lambda self, x: checkpoint(self.block, x, use_reentrant=True), block=block
    ), lambda model: model(input_of(3, 4)).sum()


@case
def non_reentrant_checkpointing_with_dropout() -> Any:
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
    return Of(
        lambda self, x: checkpoint(self.block, x, use_reentrant=False), block=block
    ), lambda model: model(input_of(3, 4)).sum()


@case
def spectral_norm() -> Any:
    return nn.utils.parametrizations.spectral_norm(
        nn.Linear(4, 4)
    ), lambda model: model(input_of(3, 4)).square().sum()


@case
def gradient_penalty() -> Any:
    def loss(model: nn.Module) -> Tensor:
        x = input_of(3, 4)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.square().sum() + model(x).sum()

    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), loss


@case
def sparse_embedding() -> Any:
    return nn.Embedding(10, 4, sparse=True), lambda model: model(torch.tensor([1, 1, 3])).square().sum()


@pytest.mark.parametrize("level", ["functions", "aten"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_gradients_and_buffers_are_bitwise_those_of_a_run_without(name: str, level: str):
    def run(tracked: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, loss_of = MODELS[name]()
        torch.manual_seed(1)
        if tracked:
            with track_scales(model, level=level) as scales:
                loss = loss_of(model)
                loss.backward()
            assert len(scales) > 3
            assert any(row["direction"] == "backward" for row in scales.rows())
        else:
            loss = loss_of(model)
            loss.backward()
        tensors = [loss.detach(), torch.rand(3)]  # and the generator's state
        tensors += [
            p.grad.to_dense() if p.grad.is_sparse else p.grad
            for p in model.parameters()
            if p.grad is not None
        ]
        return tensors + list(model.buffers())

    for without, with_it in zip(run(False), run(True), strict=True):
        assert torch.equal(without, with_it)


class TestNothingIsLeftBehind:
    @staticmethod
    def state() -> tuple:
        return (
            nn.Module.__dict__["__call__"],
            nn.Module.__dict__["_compiled_call_impl"],
            torch.autograd.Function.__dict__["apply"],
            torch.autograd.backward,
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
            torch.is_autocast_enabled("cpu"),
            torch.is_grad_enabled(),
        )

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    @pytest.mark.parametrize("where", ["forward", "backward"])
    def test_after_an_exception_or_an_interrupt(self, where: str, error: type[BaseException]):
        def fail(_: Any) -> None:
            raise error

        def forward(self: Any, x: Tensor) -> Tensor:
            y = self.fc(x)
            if where == "forward":
                fail(y)
            y.register_hook(fail)
            return y.sum()

        model = Of(forward, fc=nn.Linear(4, 4))
        before = self.state()
        x = input_of(2, 4)
        with (
            pytest.raises(error),
            torch.autocast("cpu", torch.bfloat16),
            track_scales(model, level="aten") as scales,
        ):
            model(x).backward()
        assert self.state() == before
        assert not [module for module in model.modules() if "_compiled_call_impl" in module.__dict__]
        assert x._backward_hooks is None
        assert model.fc.weight._backward_hooks is None
        assert "fc:linear" in named(scales)
        rows = len(scales)
        model.function = lambda self, x: self.fc(x).sum()
        model(x).backward()
        assert len(scales) == rows

    def test_no_graph_and_no_tensor_is_kept(self):
        model = Of(lambda self, x: self.fc(x).relu(), fc=nn.Linear(4, 4))
        kept = []
        with track_scales(model) as scales:
            y = model(input_of(2, 4))
            y.sum().backward()
            hidden = torch.ones(1)
            kept = [weakref.ref(hidden), weakref.ref(y)]
            y.grad_fn.register_hook(lambda *_, held=hidden: None)  # lives as long as the graph
            del y, hidden
            gc.collect()
            assert [ref() for ref in kept] == [None, None]
        assert len(scales) > 3

    def test_a_backward_after_the_block_is_not_recorded(self):
        model = nn.Linear(4, 4)
        with track_scales(model) as scales:
            loss = model(input_of(2, 4)).sum()
        loss.backward()
        assert named(scales, "backward") == {}
        assert not model.weight._backward_hooks

    def test_a_users_own_hooks_stay(self):
        model, seen = nn.Linear(4, 4), []
        model.weight.register_hook(seen.append)
        with track_scales(model):
            model(input_of(2, 4)).sum().backward()
        model(input_of(2, 4)).sum().backward()
        assert len(seen) == 2

    def test_recordings_that_overlap_in_two_threads_end_in_any_order(self):
        before = self.state()
        model = nn.Linear(4, 4)
        opened, go_on = threading.Event(), threading.Event()
        of_thread = []

        def in_a_thread() -> None:
            with track_scales(model) as scales:
                of_thread.append(scales)
                opened.set()
                go_on.wait(timeout=20)
                model(torch.ones(2, 4))

        thread = threading.Thread(target=in_a_thread)
        with track_scales(model) as first:
            thread.start()
            opened.wait(timeout=20)
            model(torch.ones(2, 4))
        assert self.state() != before  # the thread's is open
        go_on.set()
        thread.join()
        assert self.state() == before
        assert names(first) == [":input[0]", ":linear"]
        assert names(of_thread[0]) == [":input[0]", ":linear", ":input.1[0]", ":linear.1"]

    def test_nested_recordings_are_both_whole(self):
        model = nn.Linear(4, 4)
        with track_scales(model) as outer, track_scales(model) as inner:
            model(input_of(2, 4)).sum().backward()
        assert outer.rows() == inner.rows()
        assert len(outer.rows()) == 10

    def test_each_recording_begins_anew(self):
        model = nn.Linear(4, 4)
        for _ in range(3):
            with track_scales(model) as scales:
                model(torch.ones(2, 4))
            assert names(scales) == [":input[0]", ":linear"]


class TestParts:
    @staticmethod
    def model() -> nn.Module:
        block = lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))  # noqa: E731
        return Of(lambda self, x: self.head(self.body(x)).sum(), body=block(), head=block())

    def test_only_what_is_inside_chosen_modules_is_recorded(self):
        model = self.model()
        with track_scales(model, patterns=["^head"], exclude=[r"head\.1"]) as scales:
            model(input_of(2, 4)).backward()
        assert [entry.name for entry in scales.entries] == ["head.0.weight", "head.0.bias", "head.0:linear"]
        assert set(named(scales, "backward")) == set(named(scales))

    def test_without_patterns_exclude_leaves_out_alone(self):
        model = self.model()
        with track_scales(model, exclude=["^body"]) as scales:
            model(input_of(2, 4)).backward()
        assert names(scales) == [":input[0]", "head.0:linear", "head.1:layer_norm", ":sum"]

    def test_a_pattern_that_takes_nothing_is_an_error_with_the_nearest_names(self):
        with pytest.raises(SelectionError, match=r"'heads' matched none of 6 modules; nearest names: 'head'"):
            with track_scales(self.model(), patterns=["heads"]):
                pass

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"level": "ops"}, "track_scales.level: got 'ops'; expected one of 'functions', 'aten'"),
            ({"backward": "no"}, "track_scales.backward: got 'no'; expected True or False"),
            ({"formats": ["float61"]}, "track_scales.formats"),
            ({"patterns": ["("]}, "track_scales.patterns"),
        ],
    )
    def test_bad_arguments_are_told(self, arguments: dict, message: str):
        with pytest.raises(ConfigError, match=message), track_scales(self.model(), **arguments):
            pass


class TestAten:
    def test_casts_insides_and_backward_kernels_are_under_their_module(self):
        model = Of(lambda self, x: F.gelu(self.fc(x)).float().sum(), fc=nn.Linear(4, 4))
        with track_scales(model, level="aten") as scales, torch.autocast("cpu", torch.bfloat16):
            model(input_of(2, 4)).backward()
        kernels = [(entry.name, entry.dtype) for entry in scales.entries if entry.kind == "kernel"]
        assert ("fc:aten._to_copy", torch.bfloat16) in kernels
        assert ("fc:aten.addmm", torch.bfloat16) in kernels
        backward_rows = {
            row["name"] for row in scales.rows() if row["kind"] == "kernel" and row["direction"] == "backward"
        }
        assert {":aten.gelu_backward", "fc:aten.mm"} <= backward_rows
        assert not any("empty" in name for name, _ in kernels)


class TestCompiled:
    def test_a_sampled_step_runs_eagerly_and_compiles_nothing_anew(self):
        graphs = 0

        def backend(graph: Any, _: Any) -> Any:
            nonlocal graphs
            graphs += 1
            return graph.forward

        bare = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        model = torch.compile(bare, backend=backend)
        x = input_of(2, 4)
        model(x).sum().backward()
        assert graphs == 1
        with track_scales(model) as scales:
            model(x).sum().backward()
        model(x).sum().backward()
        assert graphs == 1
        assert names(scales) == [":input[0]", "0:linear", "1:relu", ":sum"]


class TestRecord:
    def test_rows_are_json_and_the_file_has_one_a_line(self, tmp_path: Path):
        model = nn.Linear(4, 4)
        with track_scales(model) as scales:
            model(torch.full((2, 4), float("nan"))).sum().backward()
            inside = len(scales.rows())
        scales.save(tmp_path / "scales.jsonl")
        lines = [json.loads(line) for line in (tmp_path / "scales.jsonl").read_text().splitlines()]
        assert lines == scales.rows()
        assert len(lines) == inside
        assert {
            "schema",
            "order",
            "name",
            "kind",
            "direction",
            "shape",
            "std",
            "amax",
            "float16_underflow",
        } <= set(lines[0])

    def test_printed_it_is_a_table_of_both_directions(self):
        model = nn.Linear(4, 4)
        with track_scales(model) as scales:
            model(torch.ones(2, 4)).sum().backward()
        lines = str(scales).splitlines()
        assert lines[0].split() == ["tensor", "dtype", "->", "std", "->", "amax", "<-", "std", "<-", "amax"]
        assert next(line for line in lines if line.startswith(":linear")).split()[-2:] == ["0", "1"]
        assert str(Scales(())) == "no tensors recorded"

    def test_several_backward_passes_over_one_tensor_are_pooled(self):
        model = nn.Linear(4, 4)
        with track_scales(model) as scales:
            y = model(input_of(2, 4))
            y.sum().backward(retain_graph=True)
            (3 * y).sum().backward()
        row = named(scales, "backward")[":linear"]
        assert (row["numel"], row["mean"], row["amax"]) == (16, 2.0, 3.0)

    def test_records_of_two_halves_merge_to_that_of_the_whole(self):
        model = Of(lambda self, x: (x * 3 + 1).relu())
        x = input_of(6, 4)

        def record(part: Tensor, extra: bool = False) -> Scales:
            with track_scales(model, parameters=False) as scales:
                model(part).sum().backward()
                if extra:
                    model(part).sum()
            return scales

        whole, merged = record(x).rows(), record(x[:2]).merge(record(x[2:], extra=True)).rows()
        assert [row["name"] for row in merged][: len(whole)] == [row["name"] for row in whole]
        for row, expected in zip(merged, whole, strict=False):
            if row["name"] != ":sum":  # of two sums and of one
                for column in (
                    "numel",
                    "zeros",
                    "mean",
                    "std",
                    "rms",
                    "amax",
                    "amin",
                    "float8_e4m3fn_underflow",
                ):
                    assert row[column] == pytest.approx(expected[column], rel=RELATIVE), (row["name"], column)
        assert [row["name"] for row in merged[len(whole) :]] == [
            ":input.1[0]",
            ":mul.1",
            ":add.1",
            ":relu.1",
            ":sum.1",
        ]


def test_what_is_no_module_is_told():
    with pytest.raises(ConfigError, match=r"track_scales.model: got list; expected an nn.Module"):
        with track_scales([nn.Linear(2, 2)]):
            pass


class Head(nn.Module):
    """A head in the manner of detectors: its loss is a method that calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).relu()

    def loss(self, x: Tensor) -> Tensor:
        return self.weigh(self(x), scale=2.0)

    def weigh(self, x: Tensor, scale: float) -> Tensor:
        return sum(F.mse_loss(each, each * scale) for each in x.unbind())


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(4, 4), Head()

    def forward(self, x: Tensor) -> Tensor:
        return self.head.loss(self.backbone(x)) + 1


class TestMethodsOfSubmodules:
    """``self.head.loss(x)`` is no call of the head, and yet the head's."""

    LOSS = ("head:unbind[0]", "head:unbind[1]", "head:mul", "head:mse_loss", "head:mul.1", "head:mse_loss.1")

    @pytest.mark.parametrize("level", ["functions", "aten"])
    def test_what_they_compute_is_under_the_submodule(self, level: str):
        model = Detector()
        with track_scales(model, level=level) as scales:
            model(input_of(2, 4)).backward()
        assert set(self.LOSS) <= set(named(scales)) & set(named(scales, "backward"))
        own = [entry.op for entry in scales.entries if entry.module == "" and entry.kind == "activation"]
        assert own == ["input", "add"]
        if level == "aten":
            assert "head:aten.mse_loss" in names(scales, "kernel")

    def test_patterns_take_them(self):
        model = Detector()
        with track_scales(model, patterns=["^head$"]) as scales:
            model(input_of(2, 4)).backward()
        assert set(self.LOSS) <= set(names(scales))
        assert {entry.module for entry in scales.entries} == {"head", "head.fc"}
        with track_scales(model, exclude=["^head$"]) as scales:
            model(input_of(2, 4)).backward()
        assert {entry.module for entry in scales.entries} == {"", "backbone"}

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_under_checkpointing_as_without(self, reentrant: bool):
        model = Detector()
        rows = []
        for run in (model, lambda x: checkpoint(lambda y: model(y) * 1, x, use_reentrant=reentrant)):
            with track_scales(model) as scales:
                run(input_of(2, 4)).backward()
            rows.append(
                {key: row["std"] for key, row in named(scales, "backward").items() if row["module"] == "head"}
            )
        assert rows[1] == pytest.approx(rows[0], rel=RELATIVE)
        assert set(self.LOSS) <= set(rows[0])
