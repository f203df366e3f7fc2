"""What a call does to parameters, buffers and inputs, also when it fails, recurses or meets other threads."""

from __future__ import annotations

import ast
import contextlib
import copy
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from by_hand import assert_same, gradients, run_by_hand
from dtype_recorder import record_dtypes
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint

from dtype_hooks import OverrideError, override_dtype
from dtype_hooks.core import overridden_method

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def quiet_and_seeded():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="dtype_hooks")
        warnings.filterwarnings("ignore", message=".*running statistics in bfloat16")
        yield
    assert not torch.is_autocast_enabled("cpu")


def autocast(on=True):
    return torch.autocast("cpu", BF16, enabled=on)


def overridden(inner, dtype=F32, **rule):
    override_dtype(nn.Sequential(inner), ["^0$"], dtype=dtype, **rule)
    return inner


# ---- buffers


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_running_statistics_are_kept_in_their_stored_dtype(mode):
    """O24"""
    inner = overridden(nn.BatchNorm1d(3).bfloat16())
    buffers = dict(inner.named_buffers())
    x = torch.randn(64, 3) * 3 + 5
    for _ in range(3):
        with mode():
            inner(x.bfloat16())
    assert {name: b.dtype for name, b in inner.named_buffers()} == {
        "running_mean": BF16, "running_var": BF16, "num_batches_tracked": torch.int64
    }  # fmt: skip
    assert all(buffers[name] is b for name, b in inner.named_buffers())
    assert inner.num_batches_tracked == 3
    kept = 1 - 0.9**3
    torch.testing.assert_close(inner.running_mean.float(), x.mean(0) * kept, rtol=0.05, atol=0.05)
    torch.testing.assert_close(inner.running_var.float(), 0.9**3 + x.var(0) * kept, rtol=0.05, atol=0.05)


def test_float32_statistics_of_a_parent_that_computes_in_bf16_are_kept():
    inner = overridden(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), BF16)
    inner(torch.randn(64, 3))
    assert inner[1].running_mean.dtype is F32
    assert inner[1].running_mean.abs().min() > 0
    assert inner[1].num_batches_tracked == 1


def test_a_buffer_that_is_only_read_keeps_every_bit_and_its_version():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("odd", torch.tensor([1 + 2**-23, torch.inf, -0.0, 1e-45]))

        def forward(self, x):
            return x + self.odd[0]

    inner = overridden(Reads(), BF16)
    before, version = inner.odd.clone().view(torch.int32), inner.odd._version
    inner(torch.ones(2))
    assert torch.equal(inner.odd.view(torch.int32), before)
    assert inner.odd._version == version


def test_a_buffer_read_on_both_sides_of_an_override_does_not_spoil_the_backward():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor([2.0, 3.0]))

        def forward(self, x):
            return x * self.scale

    inner = overridden(Reads(), BF16)
    x = torch.ones(2, requires_grad=True)
    (inner(x * inner.scale) * inner.scale).sum().backward()
    assert torch.equal(x.grad, inner.scale**3)


def test_elements_that_were_left_alone_keep_every_bit():
    class WritesOne(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.full((3,), 1 + 2**-20))

        def forward(self, x):
            self.b[1] = 7
            return x + self.b

    inner = overridden(WritesOne(), BF16)
    inner(torch.ones(3))
    assert inner.b.tolist() == [1 + 2**-20, 7, 1 + 2**-20]


def test_an_expanded_or_sparse_buffer_is_read_like_any_other():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("e", torch.ones(1).expand(3))
            self.register_buffer("s", torch.eye(3).to_sparse())

        def forward(self, x):
            assert self.e.dtype is self.s.dtype is F64
            return torch.sparse.mm(self.s, x) + self.e

    assert torch.equal(overridden(Reads(), F64)(torch.ones(3, 3)), torch.full((3, 3), 2.0))


@pytest.mark.parametrize("how", ["assign", "register", "delete", "resize"])
def test_a_module_that_replaces_its_buffer_keeps_the_new_one_in_the_stored_dtype(how):
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))
            self.register_buffer("other", torch.ones(1))

        def forward(self, x):
            if how == "assign":
                self.seen = torch.cat([self.seen, x])
            elif how == "register":
                self.register_buffer("seen", torch.cat([self.seen, x]))
            elif how == "delete":
                del self.seen
            else:
                self.seen.resize_(3)
            return x

    inner = overridden(Grows().bfloat16())
    x = torch.ones(2).bfloat16()
    with contextlib.suppress(RuntimeError) if how == "resize" else contextlib.nullcontext():
        inner(x)
    if how in ("assign", "register"):
        assert inner.seen.dtype is BF16
        assert inner.seen.tolist() == [0, 1, 1]
    assert hasattr(inner, "seen") is (how != "delete")
    assert inner.other.dtype is BF16


def test_tied_buffers_are_cast_once_and_both_see_the_change():
    class Counts(nn.Module):
        def __init__(self, buffer):
            super().__init__()
            self.register_buffer("b", buffer)

        def forward(self, x):
            self.b += x
            return self.b.clone()

    buffer = torch.zeros(1, dtype=BF16)
    inner = overridden(nn.Sequential(Counts(buffer), Counts(buffer)))
    assert inner(torch.ones(1).bfloat16()) == 2
    assert buffer == 2
    assert inner[0].b is inner[1].b is buffer


# ---- parameters


def test_a_parameter_that_the_method_changes_under_no_grad_is_kept():
    class Clips(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.frozen = (
                nn.Parameter(torch.tensor(9.0)),
                nn.Parameter(torch.tensor(9.0), requires_grad=False),
            )

        def forward(self, x):
            with torch.no_grad():
                self.scale.clamp_(max=4)
                self.frozen.clamp_(max=4)
            return x * self.scale * self.frozen

    for module in (Clips(), overridden(Clips(), F64)):
        module(torch.ones(1)).backward()
        assert (module.scale.item(), module.frozen.item()) == (4, 4)
        assert module.scale.dtype is F32
        assert module.scale.grad == 4


def test_gradients_add_up_over_calls_and_land_in_the_stored_dtype():
    inner = overridden(nn.Linear(4, 4).bfloat16())
    reference = copy.deepcopy(inner)
    del reference.__dict__["forward"]
    for x in torch.randn(3, 2, 4).bfloat16():
        inner(x).sum().backward()
        run_by_hand(reference, F32, x)[0].sum().backward()
    assert inner.weight.grad.dtype is BF16
    assert_same(gradients(inner), gradients(reference))


def test_weights_tied_below_an_override_get_one_gradient_summed_in_its_dtype():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x).sin())

    inner = overridden(Tied().bfloat16())
    x = torch.randn(4, 8).bfloat16()
    inner(x).sum().backward()
    w = inner.a.weight.detach().float().requires_grad_()
    ((x.float() @ w.T).sin() @ w.T).bfloat16().sum().backward()
    assert inner.a.weight is inner.b.weight
    assert torch.equal(inner.a.weight.grad, w.grad.bfloat16())


def test_double_backward_goes_through_the_casts():
    inner = overridden(nn.Linear(3, 1), F64)
    x = torch.randn(2, 3, requires_grad=True)
    (g,) = torch.autograd.grad(inner(x.sin()).pow(2).sum(), x, create_graph=True)
    g.pow(2).sum().backward()
    assert inner.weight.grad.dtype is F32
    assert inner.weight.grad.abs().sum() > 0


def test_hooks_on_parameters_fire_with_gradients_in_the_stored_dtype():
    inner = overridden(nn.Linear(3, 3).bfloat16())
    seen = []
    inner.weight.register_hook(lambda g: seen.append(g.dtype))
    inner.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
    inner(torch.randn(2, 3).bfloat16()).sum().backward()
    assert seen == [BF16, BF16]


def test_module_hooks_see_what_they_see_without_us():
    inner = overridden(nn.Linear(3, 3), F64)
    seen = []
    inner.register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    inner.register_forward_hook(lambda m, args, y: seen.append(y.dtype))
    inner.register_full_backward_hook(lambda m, gi, go: seen.extend([gi[0].dtype, go[0].dtype]))
    inner(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert seen == [F32] * 4


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_and_their_copies_go_on_with_their_own_weights(cls):
    inner = overridden(cls(4, 4).bfloat16())
    x = torch.randn(3, 2, 4).bfloat16()
    y = inner(x)[0]
    twin = copy.deepcopy(inner)
    assert torch.equal(twin(x)[0], y)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert twin(x)[0].abs().sum() == 0
    assert torch.equal(inner(x)[0], y)
    assert all(a is b for a, b in zip(inner._flat_weights, inner.parameters(), strict=True))
    twin(x)[0].sum().backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in inner.parameters())
    inner.to(F32)  # goes through _flat_weights
    assert inner(x)[0].dtype is BF16


def test_a_recurrent_network_with_a_hidden_state_wants_all_inputs_cast():
    inner, x = overridden(nn.LSTM(4, 4), F64, cast_inputs="all"), torch.randn(3, 2, 4)
    state = (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    for _ in range(3):
        y, state = inner(x, state)
        assert {y.dtype, state[0].dtype, state[1].dtype} == {F32}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("stored", [F32, BF16])
def test_a_whole_multihead_attention_computes_in_the_dtype(stored, training, need_weights):
    """O6: the parent's rule covers out_proj, which is read and not called."""
    mha = nn.MultiheadAttention(8, 2, batch_first=True).to(stored).train(training)
    x = torch.randn(2, 3, 8).bfloat16()
    with torch.set_grad_enabled(training):
        expected = run_by_hand(mha, F32, x, x, x, need_weights=need_weights)[0]
        override_dtype(nn.Sequential(mha), ["^0$", "out_proj"], cast_inputs="all")
        with autocast(), record_dtypes(mha) as calls:
            y = mha(x, x, x, need_weights=need_weights)
    assert_same(y, expected)
    matmuls = [
        c
        for c in calls
        if c.op in ("addmm", "bmm", "baddbmm", "mm", "_native_multi_head_attention", "linear")
    ]
    assert matmuls
    assert all(c.dtypes == {F32} for c in matmuls)


def test_a_rule_on_out_proj_alone_is_told_as_never_called():
    """O6"""
    mha, x = nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = override_dtype(mha, ["out_proj"], dtype="float64")
    mha(x, x, x)[0].sum().backward()
    assert [record.names for record in handle.never_called()] == [("out_proj",)]


@pytest.mark.parametrize(
    "norm", [nn.utils.weight_norm, nn.utils.spectral_norm], ids=["weight_norm", "spectral_norm"]
)
@pytest.mark.parametrize(("stored", "dtype"), [(F32, F32), (BF16, F32), (F32, F64)])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_legacy_norms_of_weights_compute_in_the_dtype(norm, stored, dtype):
    """Their weight is a plain attribute that a pre-hook sets, in the stored dtype, before the method runs."""
    inner = overridden(norm(nn.Linear(4, 4)).to(stored), dtype)
    with autocast(), record_dtypes(inner) as calls:
        y = inner(torch.randn(2, 4).bfloat16())
    y.sum().backward()
    assert calls.dtypes("addmm", backward=False) == {dtype}
    assert all(p.grad.dtype is stored for p in inner.parameters())
    assert inner.weight.dtype is stored


def test_a_lazy_module_takes_its_shape_from_the_first_call():
    inner = overridden(nn.LazyLinear(3))
    with autocast(), record_dtypes(inner) as calls:
        y = inner(torch.randn(2, 5).bfloat16())
    assert y.shape == (2, 3)
    assert calls.dtypes("addmm") == {F32}
    assert type(inner) is nn.Linear


def test_a_lazy_module_below_an_override_is_refused_until_it_has_its_shape():
    model = nn.Sequential(nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()))
    with pytest.raises(
        OverrideError, match=r"0\.forward: got '0' below it, a LazyLinear .* Run the model once before"
    ):
        override_dtype(model, ["^0$"], dtype="float64")
    assert "forward" not in model[0].__dict__
    with override_dtype(model, ["^0$"], dtype="float32"):
        model(torch.randn(4, 5))
    override_dtype(model, ["^0$"], dtype="float64")
    assert model(torch.randn(4, 5)).dtype is F32


def test_a_scripted_module_below_an_override_is_cast_and_restored():
    scripted = torch.jit.script(nn.Linear(3, 3))
    plain, x = nn.Linear(3, 3), torch.randn(2, 3)
    plain.load_state_dict(scripted.state_dict())
    inner = overridden(nn.Sequential(scripted, nn.Tanh()), F64)
    expected = run_by_hand(nn.Sequential(plain, nn.Tanh()), F64, x)[0]
    assert_same(inner(x), expected)
    assert scripted.weight.dtype is F32
    assert isinstance(scripted.weight, nn.Parameter)


# ---- in-place modules


@pytest.mark.parametrize("cast_inputs", ["first", "all"])
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_an_in_place_module_changes_the_callers_tensor_and_returns_it(dtype, mode, cast_inputs):
    inner = overridden(nn.ReLU(inplace=True), dtype, cast_inputs=cast_inputs)
    with mode():
        x = torch.tensor([-1.0, 2.0])
        y = inner(x)
        assert x.tolist() == y.tolist() == [0, 2]
        assert y is x
        y.add_(1)
        assert x.tolist() == [1, 3]


def test_an_in_place_module_on_inputs_made_outside_inference_mode_changes_them():
    inner, x = overridden(nn.ReLU(inplace=True), F64), torch.tensor([-1.0, 2.0])
    with torch.inference_mode():
        inner(x)
    assert x.tolist() == [0, 2]


@pytest.mark.parametrize("cast_inputs", ["first", "all"])
def test_gradients_through_an_in_place_module_are_those_without_us(cast_inputs):
    grads = []
    for wrap in (lambda m: m, lambda m: overridden(m, F64, cast_inputs=cast_inputs)):
        lin, act = nn.Linear(3, 3), wrap(nn.ReLU(inplace=True))
        nn.init.eye_(lin.weight), nn.init.zeros_(lin.bias)
        h = lin(torch.tensor([[-1.0, 2.0, 3.0]]))
        (act(h).sum() + (h * h).sum()).backward()
        grads.append(lin.weight.grad)
    assert torch.equal(*grads)


def test_a_method_that_writes_into_part_of_its_input_changes_the_callers():
    class Masks(nn.Module):
        def forward(self, x, y):
            x[:, 0] = 0
            y["y"][0].zero_()
            return x[:, 1:]

    inner = overridden(Masks(), F64, cast_inputs="all")
    x, y = torch.ones(2, 2), {"y": torch.ones(2)}
    assert torch.equal(inner(x, y), torch.ones(2, 1))
    assert x.tolist() == [[0, 1], [0, 1]]
    assert y["y"].tolist() == [0, 1]


def test_an_in_place_module_on_a_leaf_that_wants_gradients_is_an_error_as_without_us():
    inner = overridden(nn.ReLU(inplace=True), F64)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        inner(torch.ones(2, requires_grad=True))


# ---- failures


class Raises(nn.Module):
    def __init__(self, error=ValueError):
        super().__init__()
        self.lin, self.error = nn.Linear(2, 2), error
        self.register_buffer("b", torch.zeros(2))

    def forward(self, x):
        self.lin(x)
        self.b += 1
        raise self.error("inside")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("stored", [F32, BF16])
@pytest.mark.parametrize("kept_out", [False, True])
def test_after_an_error_inside_autocast_is_on_again_and_parameters_are_back(error, stored, kept_out):
    """O11"""
    model = nn.Sequential(Raises(error).to(stored))
    override_dtype(model, ["^0$"], exclude=[r"0\.lin"] if kept_out else None)
    parameters, before = list(model.parameters()), dict(model[0].__dict__)
    with autocast():
        with pytest.raises(error, match="inside"):
            model(torch.ones(1, 2).bfloat16())
        assert torch.is_autocast_enabled("cpu")
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert dict(model[0].__dict__) == before
    assert model[0].b.dtype is stored
    assert model[0].b.tolist() == [1, 1]


OURS = Path(overridden_method.__file__)
CLEAN_UP = {
    line
    for node in ast.walk(ast.parse(OURS.read_text()))
    if isinstance(node, ast.Try)
    for part in node.finalbody
    for line in range(part.lineno, part.end_lineno + 1)
}


class InterruptAt:
    """A trace function: a KeyboardInterrupt before the n-th line of an override's own code.

    Not inside a ``finally`` or what it calls: that cannot be made harmless in Python.
    """

    def __init__(self, at):
        self.left, self.hit = at, False

    def __call__(self, frame, event, arg):
        if frame.f_code.co_filename != str(OURS) or frame.f_lineno in CLEAN_UP:
            return self
        if event == "line" and not self.hit and not self.in_clean_up(frame):
            self.left -= 1
            if self.left < 0:
                self.hit = True
                raise KeyboardInterrupt
        return self

    @staticmethod
    def in_clean_up(frame):
        while (frame := frame.f_back) is not None:
            if frame.f_code.co_filename == str(OURS) and frame.f_lineno in CLEAN_UP:
                return True
        return False


@pytest.mark.parametrize("stored", [F32, BF16])
def test_an_interrupt_at_any_line_of_ours_loses_no_parameter_and_no_autocast(stored):
    """O11: Ctrl-C can land between any two statements."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(stored))
    override_dtype(model, ["^0$"])
    parameters, buffers, x = list(model.parameters()), list(model.buffers()), torch.ones(4, 2).bfloat16()
    model(x)
    landed = 0
    for at in range(400):
        interrupt = InterruptAt(at)
        with autocast():
            sys.settrace(interrupt)
            try:
                model(x)
            except KeyboardInterrupt:
                landed += 1
            finally:
                sys.settrace(None)
            assert torch.is_autocast_enabled("cpu")
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert all(a is b for a, b in zip(model.buffers(), buffers, strict=True))
        if not interrupt.hit:
            break
    assert landed > 15
    assert torch.isfinite(model(x)).all()


def test_recursion_and_calls_of_ones_own_methods_nest():
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x, depth=3):
            x = self.lin(x).tanh()
            return self(x, depth - 1) if depth else self.encode(x)

        def encode(self, x):
            return self.lin(x)

    inner = Recursive().bfloat16()
    x = torch.randn(2, 3).bfloat16()
    expected = run_by_hand(inner, F32, x)[0]
    weight = inner.lin.weight
    overridden(inner, methods_to_override=["forward", "encode"])
    with autocast(), record_dtypes(inner) as calls:
        y = inner(x)
        assert torch.is_autocast_enabled("cpu")
    assert calls.dtypes("addmm") == {F32}
    assert inner.lin.weight is weight
    assert_same(y, expected)


# ---- threads


def in_threads(count, work):
    """Run ``work(i)`` in threads that start together; the first error is raised here."""
    errors, barrier = [], threading.Barrier(count)

    def run(i):
        try:
            barrier.wait()
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


def check_threads(model, calls, count=4, rounds=40):
    """``calls`` in turn in several threads: right results, the same Parameters afterwards."""
    parameters, buffers = list(model.named_parameters()), list(model.named_buffers())
    expected = [call() for call in calls]

    def work(i):
        with torch.no_grad():
            for k in range(rounds):
                which = (i + k) % len(calls)
                assert_same(calls[which](), expected[which])

    in_threads(count, work)
    for (name, before), (_, after) in zip(parameters, model.named_parameters(), strict=True):
        assert before is after, name
    for (name, before), (_, after) in zip(buffers, model.named_buffers(), strict=True):
        assert before is after, name


def test_four_threads_on_one_module_keep_its_parameters():
    model = nn.Sequential(nn.Linear(8, 8)).bfloat16()
    override_dtype(model, ["0"])
    x = torch.randn(4, 8).bfloat16()
    check_threads(model, [lambda: model(x)])


def test_threads_that_meet_the_first_call_keep_its_parameters():
    for _ in range(20):
        model = nn.Sequential(nn.Linear(8, 8)).bfloat16()
        override_dtype(model, ["0"])
        x, weight = torch.randn(4, 8).bfloat16(), model[0].weight
        in_threads(4, lambda i, model=model, x=x: model(x))
        assert model[0].weight is weight


def test_threads_in_a_parent_and_its_child_of_another_dtype_keep_the_parameters():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))).bfloat16()
    override_dtype(model, ["^0$"])
    override_dtype(model, [r"^0\.1\.0$"], dtype="float64")
    override_dtype(model, [r"^0\.1$"])
    x = torch.randn(4, 8).bfloat16()
    check_threads(model, [lambda: model(x), lambda: model[0][1](x), lambda: model[0][1][0](x)])


def test_threads_in_two_parents_that_share_a_child_keep_its_parameters():
    shared = nn.Linear(8, 8)
    model = nn.ModuleList([nn.Sequential(nn.Tanh(), shared), nn.Sequential(shared, nn.Tanh())]).bfloat16()
    override_dtype(model, ["^0$", "^1$"])
    x = torch.randn(4, 8).bfloat16()
    check_threads(model, [lambda: model[0](x), lambda: model[1](x)])


def test_threads_in_two_methods_of_one_module_keep_its_parameters():
    class Two(nn.Linear):
        def encode(self, x):
            return self.weight @ x.T

    model = nn.Sequential(Two(8, 8)).bfloat16()
    override_dtype(model, ["0"], methods_to_override=["forward", "encode"])
    x = torch.randn(4, 8).bfloat16()
    check_threads(model, [lambda: model[0](x), lambda: model[0].encode(x)])


def test_threads_have_their_own_autocast():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    override_dtype(model, ["0"])
    x = torch.randn(4, 8)
    expected = [model(x), None]
    with autocast():
        expected[1] = model(x)

    def work(i):
        with autocast(i % 2 == 1):
            for _ in range(40):
                assert_same(model(x), expected[i % 2])

    in_threads(4, work)


# ---- checkpointing


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.lin, self.act = nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x):
        return x + self.act(self.lin(self.norm(x)))


def train_grads(model, x, run):
    with autocast():
        y = run(model, x.requires_grad_())
    y.float().pow(2).sum().backward()
    found = {**gradients(model), "x": x.grad.clone()}
    x.grad = None
    return found


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("stored", [F32, BF16])
@pytest.mark.parametrize(
    "rule", [{"patterns": ["norm"]}, {"patterns": [r"^\d$"]}, {"patterns": ["."], "dtype": "float64"}]
)
def test_checkpointed_gradients_are_those_without_checkpointing(rule, stored, reentrant):
    model = nn.Sequential(Block(), Block()).to(stored)
    override_dtype(model, **rule)
    x = torch.randn(3, 4, dtype=stored)
    expected = train_grads(model, x, lambda m, x: m(x))
    got = train_grads(model, x, lambda m, x: m[1](checkpoint(m[0], x, use_reentrant=reentrant)))
    assert_same(got, expected)
    got = train_grads(model, x, lambda m, x: checkpoint(m, x, use_reentrant=reentrant))
    assert_same(got, expected)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("stored", [F32, BF16])
def test_checkpointing_inside_an_overridden_module_gives_the_same_gradients(stored, reentrant):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.use = Block(), False

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=reentrant) if self.use else self.block(x)

    model = nn.Sequential(Outer()).to(stored)
    override_dtype(model, ["."])
    x = torch.randn(3, 4, dtype=stored)
    expected = train_grads(model, x, lambda m, x: m(x))
    model[0].use = True
    assert_same(train_grads(model, x, lambda m, x: m(x)), expected)


# ---- torch.func, meta, modes


def test_functional_call_computes_with_the_tensors_it_is_given():
    inner, x = overridden(nn.Linear(3, 3), F64), torch.randn(2, 3)
    given = {"weight": torch.eye(3).bfloat16(), "bias": torch.zeros(3)}
    assert_same(functional_call(inner, given, x), x)
    assert isinstance(inner.weight, nn.Parameter)


@pytest.mark.parametrize("stored", [F32, BF16])
def test_vmap_and_grad_go_through(stored):
    models = [nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)).to(stored) for _ in range(2)]
    for model in models:
        override_dtype(model, ["."], dtype="float64")
    x = torch.randn(4, 3, dtype=stored)
    assert_same(vmap(models[0])(x), torch.stack([models[0](row) for row in x]))
    params, buffers = stack_module_state(models)
    stacked = vmap(lambda p, b: functional_call(models[0], (p, b), x))(params, buffers)
    assert_same(stacked, torch.stack([model(x) for model in models]))
    given = {name: p.detach() for name, p in models[0].named_parameters()}
    found = grad(lambda p: functional_call(models[0], p, x).float().sum())(given)
    models[0](x).float().sum().backward()
    assert_same(found, gradients(models[0]))


def test_a_batch_norm_in_vmap_keeps_working_in_eval_mode():
    inner = overridden(nn.BatchNorm1d(3).bfloat16().eval())
    x = torch.randn(4, 2, 3).bfloat16()
    assert_same(vmap(inner)(x), torch.stack([inner(part) for part in x]))


@pytest.mark.parametrize("around", [True, False])
def test_the_meta_device_gives_shapes_and_dtypes(around):
    with torch.device("meta"):
        inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).bfloat16()
        overridden(inner)
        with autocast(around):
            y = inner(torch.randn(4, 3).bfloat16())
    assert (y.device.type, y.dtype, y.shape) == ("meta", BF16, (4, 3))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("stored", [F32, BF16])
def test_without_gradients_the_numbers_are_the_same(mode, stored):
    inner, x = overridden(Block().to(stored)), torch.randn(3, 4).bfloat16()
    with autocast():
        expected = inner(x).detach()
        with mode():
            y = inner(x)
    assert_same(y, expected)
    inner(x.to(stored)).sum().backward()
    assert inner.lin.weight.grad.dtype is stored


def test_tensor_subclasses_pass_through():
    class Named(torch.Tensor):
        pass

    y = overridden(nn.Linear(3, 3), F64)(torch.randn(2, 3).as_subclass(Named))
    assert type(y) is Named
    assert y.dtype is F32


def test_a_tensor_created_inside_follows_the_default_dtype_and_is_promoted_by_torch():
    class Makes(nn.Module):
        def forward(self, x):
            return x + torch.zeros(2)

    assert overridden(Makes(), F64)(torch.ones(2)).dtype is F32
    assert torch.get_default_dtype() is F32


@pytest.mark.parametrize(
    ("given", "dtype"), [(F16, F32), (F64, F32), (torch.float8_e4m3fn, F32), (F64, BF16)]
)
def test_any_floating_input_dtype_comes_back(given, dtype):
    inner = overridden(nn.Tanh(), dtype)
    assert inner(torch.ones(2).to(given)).dtype is given
