"""The interpreter's results are fx's own, and its figures those of the library whose promise it keeps."""

from __future__ import annotations

import math
import operator
import warnings
import weakref

import pytest
import torch
from scale_block import Block, block_gradient, block_inputs
from torch import fx, nn

from dtype_hooks.scales.interpreter import ScalePair, ScaleTrackingInterpreter


@pytest.fixture(autouse=True)
def quiet_and_seeded():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="dtype_hooks")
        warnings.filterwarnings("error", message=".*degrees of freedom")
        yield


def recorded(function, *inputs, backward=True):
    """The scales of a function's (or module's) values, after a backward from its summed output."""
    interpreter = ScaleTrackingInterpreter(fx.symbolic_trace(function))
    output = interpreter.run(*inputs)
    if backward:
        output.sum().backward()
    return interpreter.scales


def std(values):
    return torch.as_tensor(values, dtype=torch.float64).std().item()


def leaf(*values, **kwargs):
    return torch.tensor(values, requires_grad=True, **kwargs)


# The figures and their text


def test_scales_are_those_of_the_reference():
    """Golden numbers: unit-scaling 0.3.5's interpreter on torch 2.13.0 (CPU)."""
    interpreter = ScaleTrackingInterpreter(fx.symbolic_trace(Block()))
    interpreter.run(*block_inputs()).backward(block_gradient())
    expected = {
        "x": (0.8158179521560669, 27.96732521057129),
        "mask": (1.4288690090179443, None),
        "norm": (1.47221040725708, 2.266007661819458),
        "up": (3.743258237838745, 0.6663505434989929),
        "gelu": (2.797194719314575, 0.75921231508255),
        "down": (12.529597282409668, 0.9926212430000305),
        "getitem": (5.885552883148193, 1.443825602531433),
        "getitem_1": (6.484699726104736, None),
        "mul": (9.354048728942871, 0.5477355718612671),
        "cat": (7.522163391113281, 0.5849283337593079),
        "add": (7.481295585632324, 0.5849283337593079),
        "cos": (0.7631320357322693, 0.9833321571350098),
        "output": (0.7631320357322693, 0.9833321571350098),
    }
    assert list(interpreter.scales) == list(expected)
    for name, pair in interpreter.scales.items():
        forward, backward = expected[name]
        assert pair.forward == pytest.approx(forward, rel=1e-5), name
        assert pair.backward == (backward and pytest.approx(backward, rel=1e-5)), name


@pytest.mark.parametrize(
    ("pair", "text"),
    [
        (ScalePair(0.1234, 1234567.0), "(-> 0.123, <- 1.23e+06)"),
        (ScalePair(math.nan, 0.0), "(-> nan, <- 0.0)"),
        (ScalePair(1.0), "(-> 1.0, <- n/a)"),
        (ScalePair(), "(-> n/a, <- n/a)"),
    ],
)
def test_pair_prints_three_significant_digits(pair, text):
    assert str(pair) == text


def test_a_forward_alone_leaves_the_backward_figures_none():
    scales = recorded(lambda x: x * 2, leaf(1.0, 2.0), backward=False)
    assert {name: pair.backward for name, pair in scales.items()} == {"x": None, "mul": None, "output": None}


def test_gradient_is_summed_over_all_uses():
    scales = recorded(lambda x: x.exp() + x * 5, leaf(1.0, 2.0))
    assert scales["x"].backward == pytest.approx(std([math.e + 5, math.e**2 + 5]))
    assert scales["exp"].backward == 0.0


def test_an_op_that_returns_its_argument_has_its_own_gradient():
    def forward(x):
        doubled = x * 2
        return doubled.contiguous() * torch.tensor([1.0, 3.0]) + doubled * torch.tensor([10.0, 50.0])

    scales = recorded(forward, leaf(1.0, 2.0))
    assert scales["contiguous"].backward == pytest.approx(std([1.0, 3.0]))
    assert scales["mul"].backward == pytest.approx(std([11.0, 53.0]))


def test_each_use_of_a_tied_weight_has_its_own_gradient():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

    graph = fx.Graph()
    first, second = graph.get_attr("weight"), graph.get_attr("weight")
    graph.output(graph.call_function(torch.mul, (first, graph.call_function(torch.exp, (second,)))))
    module = Tied()
    interpreter = ScaleTrackingInterpreter(fx.GraphModule(module, graph))
    interpreter.run().sum().backward()
    assert interpreter.scales[first.name].backward == pytest.approx(std([math.e, math.e**2]))
    assert interpreter.scales[second.name].backward == pytest.approx(std([math.e, 2 * math.e**2]))
    torch.testing.assert_close(module.weight.grad, torch.tensor([2 * math.e, 3 * math.e**2]))


def test_figures_of_a_second_backward_replace_those_of_the_first():
    interpreter = ScaleTrackingInterpreter(fx.symbolic_trace(lambda x: x * 2))
    output = interpreter.run(leaf(1.0, 2.0))
    output.backward(torch.tensor([0.0, 1.0]), retain_graph=True)
    output.backward(torch.tensor([0.0, 3.0]))
    assert interpreter.scales["mul"].backward == pytest.approx(std([0.0, 3.0]))


def test_no_gradients_are_followed_under_no_grad():
    with torch.no_grad():
        scales = recorded(lambda x: x * 2, leaf(1.0, 2.0), backward=False)
    assert scales["mul"] == ScalePair(pytest.approx(std([2.0, 4.0])), None)


def test_a_value_that_a_no_grad_section_of_the_graph_reads_keeps_its_gradient():
    graph = fx.Graph()
    graph.call_function(torch._C._set_grad_enabled, (False,))
    x = graph.placeholder("x")
    norm = graph.call_function(torch.sum, (x,))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    graph.output(graph.call_function(torch.mul, (x, norm)))
    interpreter, x = ScaleTrackingInterpreter(fx.GraphModule(nn.Module(), graph)), leaf(1.0, 2.0)
    interpreter.run(x).backward(torch.tensor([0.0, 1.0]))
    assert torch.equal(x.grad, torch.tensor([0.0, 3.0]))
    assert interpreter.scales["x"].backward == pytest.approx(std([0.0, 3.0]))
    assert interpreter.scales["sum_1"].backward is None


def test_inference_mode_is_recorded_forward():
    with torch.inference_mode():
        scales = recorded(lambda x: x * 2, leaf(1.0, 2.0), backward=False)
    assert scales["x"] == ScalePair(pytest.approx(std([1.0, 2.0])), None)


class GivesNoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return None


def test_a_gradient_that_autograd_leaves_undefined_is_zero_where_the_value_is_used():
    graph = fx.Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(operator.mul, (x, 2))
    single = graph.call_function(operator.getitem, (doubled, 0))
    for_one = graph.call_function(GivesNoGradient.apply, (single,))
    graph.output(
        graph.call_function(operator.add, (graph.call_function(GivesNoGradient.apply, (doubled,)), for_one))
    )
    interpreter = ScaleTrackingInterpreter(fx.GraphModule(nn.Module(), graph))
    interpreter.run(leaf(1.0, 2.0)).sum().backward()
    assert interpreter.scales["mul"].backward == 0.0
    assert math.isnan(interpreter.scales["getitem"].backward)


# In-place ops and views


def test_gradient_before_and_after_an_in_place_op():
    """relu_ hides the negative half of the gradient from what comes before it."""
    scales = recorded(lambda x: (x * 2).relu_() * torch.tensor([3.0, 5.0]), leaf(-1.0, 2.0))
    assert scales["mul"] == ScalePair(pytest.approx(std([-2.0, 4.0])), pytest.approx(std([0.0, 5.0])))
    assert scales["relu_"] == ScalePair(pytest.approx(std([0.0, 4.0])), pytest.approx(std([3.0, 5.0])))


def test_in_place_modules_and_sums_train_as_without_the_interpreter():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))

        def forward(self, x):
            y = self.layers(x)
            y += x
            return y.add_(1).sigmoid_()

    model, x = Residual(), torch.randn(3, 4)
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    interpreter = ScaleTrackingInterpreter(fx.symbolic_trace(model))
    interpreter.run(x).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert {name for name, pair in interpreter.scales.items() if pair.backward is None} == {"x"}


def test_a_view_changed_in_place_shows_the_gradient_of_earlier_uses_only():
    def forward(x):
        view = (x * 2).view(-1)
        early = view * torch.tensor([1.0, 4.0])
        return early + view.add_(1)

    scales = recorded(forward, leaf(1.0, 2.0))
    assert scales["view"].backward == pytest.approx(std([1.0, 4.0]))
    assert scales["add_"].backward == 0.0
    assert scales["mul"].backward == pytest.approx(std([2.0, 5.0]))


def test_assignment_into_a_slice_runs():
    graph = fx.Graph()
    x = graph.placeholder("x")
    canvas = graph.call_function(torch.zeros, (3,))
    graph.call_function(operator.setitem, (canvas, 0, x))
    graph.output(graph.call_function(operator.mul, (canvas, 2)))
    interpreter = ScaleTrackingInterpreter(fx.GraphModule(nn.Module(), graph))
    x = torch.tensor(3.0, requires_grad=True)
    interpreter.run(x).sum().backward()
    assert x.grad == 2
    assert list(interpreter.scales) == ["x", "zeros", "mul", "output"]


# Which tensors, and how


def test_integers_and_complex_numbers_are_left_out():
    def forward(x):
        return x[(x > 0).long()].sum() + torch.fft.fft(x).abs().sum()

    names = set(recorded(forward, leaf(-1.0, 2.0)))
    assert names == {"x", "getitem", "sum_1", "abs_1", "sum_2", "add", "output"}


def test_one_element_is_nan_and_none_is_too():
    scales = recorded(lambda x: x.sum() + x[:0].sum(), leaf(1.0, 2.0))
    assert math.isnan(scales["sum_1"].forward)
    assert math.isnan(scales["sum_1"].backward)
    assert math.isnan(scales["getitem"].forward)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_std_is_torchs_in_the_dtype_of_the_tensor(dtype):
    x = torch.randn(500, dtype=dtype, requires_grad=True)
    scales = recorded(lambda x: x * x, x)
    assert scales["x"] == ScalePair(x.std().item(), x.grad.std().item())


def test_float8_is_widened():
    x = torch.tensor([1.0, 2.0, 4.0]).to(torch.float8_e4m3fn)
    assert recorded(lambda x: x.float(), x, backward=False)["x"].forward == pytest.approx(
        std([1.0, 2.0, 4.0])
    )


def test_sparse_tensors_and_gradients_count_their_zeros():
    embedding = nn.Embedding(4, 1, sparse=True)

    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = embedding.weight

        def forward(self, ids, sparse):
            return nn.functional.embedding(ids, self.weight, sparse=True).sum() + torch.sparse.sum(sparse)

    sparse = torch.tensor([0.0, 3.0]).to_sparse()
    scales = recorded(Lookup(), torch.tensor([1, 1, 2]), sparse)
    assert scales["weight"].backward == pytest.approx(std([0.0, 2.0, 1.0, 0.0]))
    assert scales["sparse"].forward == pytest.approx(std([0.0, 3.0]))
    assert embedding.weight.grad.is_sparse


def test_meta_tensors_have_no_figures():
    scales = recorded(nn.Linear(2, 2, device="meta"), torch.ones(3, 2, device="meta"))
    assert set(map(str, scales.values())) == {"(-> n/a, <- n/a)"}


# Nothing is changed, nothing is kept


def test_results_and_gradients_are_bitwise_those_of_the_model():
    (x, mask), plain = block_inputs(), Block()
    output = plain(x, mask)
    output.backward(block_gradient())
    (y, mask), tracked = block_inputs(), Block()
    recorded_output = ScaleTrackingInterpreter(fx.symbolic_trace(tracked)).run(y, mask)
    recorded_output.backward(block_gradient())
    assert torch.equal(output, recorded_output)
    assert torch.equal(x.grad, y.grad)
    for ours, theirs in zip(tracked.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_arguments_and_parameters_keep_no_hooks():
    model, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True) * 1
    traced = fx.GraphModule(model, DeepTracer().trace(model))
    ScaleTrackingInterpreter(traced).run(x)
    assert not x._backward_hooks
    assert not model.weight._backward_hooks
    assert type(x.grad_fn).__name__ == "MulBackward0"


class DeepTracer(fx.Tracer):
    def is_leaf_module(self, m, module_qualified_name):
        return False


def test_values_are_freed_after_their_last_use():
    alive = []

    class Watching(ScaleTrackingInterpreter):
        def run_node(self, n):
            value = super().run_node(n)
            if n.op == "call_function":
                alive.append(weakref.ref(value))
                assert sum(ref() is not None for ref in alive) <= 2
            return value

    def forward(x):
        for _ in range(100):
            x = torch.relu(x)
        return x

    interpreter = Watching(fx.symbolic_trace(forward))
    with torch.no_grad():
        interpreter.run(torch.randn(8))
    assert [node.op for node in interpreter.env] == ["output"]
    assert len(interpreter.scales) == 102


class Remembers(torch.autograd.Function):
    """Keeps an object in the autograd graph, to see when the graph goes."""

    remembered: list[weakref.ref]

    @staticmethod
    def forward(ctx, x):
        ctx.kept = nn.Identity()
        Remembers.remembered.append(weakref.ref(ctx.kept))
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_the_autograd_graph_goes_with_the_output():
    Remembers.remembered = []
    graph = fx.Graph()
    graph.output(graph.call_function(Remembers.apply, (graph.call_method("exp", (graph.placeholder("x"),)),)))
    interpreter = ScaleTrackingInterpreter(fx.GraphModule(nn.Module(), graph))
    output = interpreter.run(leaf(1.0, 2.0))
    interpreter.env.clear()
    assert Remembers.remembered[0]() is not None
    del output
    assert Remembers.remembered[0]() is None


# Every method of fx.Interpreter


def test_run_returns_what_the_module_returns_and_records_in_order():
    interpreter = ScaleTrackingInterpreter(fx.symbolic_trace(lambda x, y=2.0: (x.sin() * y, {"x": x})))
    x = torch.randn(3)
    product, rest = interpreter.run(x)
    assert torch.equal(product, x.sin() * 2.0)
    assert rest["x"] is x
    assert list(interpreter.scales) == ["x", "sin", "mul"]


def test_run_takes_known_values_from_initial_env():
    traced = fx.symbolic_trace(lambda x: x.sin().cos())
    sin = next(node for node in traced.graph.nodes if node.name == "sin")
    interpreter = ScaleTrackingInterpreter(traced)
    known = torch.tensor([0.0, 1.0])
    assert torch.equal(interpreter.run(torch.ones(2), initial_env={sin: known}), known.cos())
    assert list(interpreter.scales) == ["x", "cos", "output"]


def test_run_flattens_and_rebuilds_only_with_enable_io_processing():
    traced = fx.symbolic_trace(
        lambda x: {"y": x["a"] + x["b"]}, concrete_args={"x": {"a": fx.PH, "b": fx.PH}}
    )
    one, two = torch.ones(2), torch.full((2,), 2.0)
    interpreter = ScaleTrackingInterpreter(traced)
    assert torch.equal(interpreter.run({"a": one, "b": two})["y"], one + two)
    (flat,) = interpreter.run(one, two, enable_io_processing=False)
    assert torch.equal(flat, one + two)


def test_boxed_run_empties_the_list_it_is_given():
    interpreter = ScaleTrackingInterpreter(fx.symbolic_trace(lambda x, y: x * y))
    arguments = [leaf(1.0, 2.0), torch.ones(2)]
    interpreter.boxed_run(arguments).sum().backward()
    assert arguments == []
    assert interpreter.scales["mul"] == ScalePair(pytest.approx(std([1.0, 2.0])), 0.0)
    with pytest.raises(RuntimeError, match="expected 2 arguments"):
        interpreter.boxed_run([torch.ones(2)])


def test_run_node_runs_and_records_one_node():
    traced = fx.symbolic_trace(lambda x: x.sin())
    x, sin, _ = traced.graph.nodes
    interpreter = ScaleTrackingInterpreter(traced)
    interpreter.env[x] = torch.tensor([0.0, 1.0])
    assert torch.equal(interpreter.run_node(sin), torch.tensor([0.0, 1.0]).sin())
    assert list(interpreter.scales) == ["sin"]


def test_placeholder_takes_the_next_argument_a_default_or_a_function():
    traced = fx.symbolic_trace(lambda x: x)
    traced.graph._tracer_extras = {"target_to_function": {"function_placeholder__sin": torch.sin}}
    interpreter = ScaleTrackingInterpreter(traced)
    interpreter.args_iter = iter([1, 2, 3])
    assert interpreter.placeholder("x", (), {}) == 1
    assert interpreter.placeholder("function_placeholder__sin", (), {}) is torch.sin
    assert interpreter.placeholder("*rest", (), {}) == [2, 3]
    assert interpreter.placeholder("y", (7,), {}) == 7
    with pytest.raises(RuntimeError, match="parameter y"):
        interpreter.placeholder("y", (), {})


def test_a_function_placeholder_runs_in_a_graph():
    graph = fx.Graph()
    function = graph.placeholder("function_placeholder__sin")
    x = graph.placeholder("x")
    graph.output(graph.call_function(lambda f, value: f(value), (function, x)))
    graph._tracer_extras = {"target_to_function": {"function_placeholder__sin": torch.sin}}
    traced = fx.GraphModule(nn.Module(), graph)
    assert torch.equal(ScaleTrackingInterpreter(traced).run(torch.ones(2)), torch.ones(2).sin())


def test_get_attr_and_fetch_attr_find_tensors_of_children():
    model = nn.Sequential(nn.Linear(2, 2))
    interpreter = ScaleTrackingInterpreter(fx.symbolic_trace(model))
    assert interpreter.get_attr("0.weight", (), {}) is model[0].weight
    assert interpreter.fetch_attr("0.bias") is model[0].bias
    with pytest.raises(RuntimeError, match="nonexistent target"):
        interpreter.fetch_attr("1.bias")


class Renaming(ScaleTrackingInterpreter):
    """The example of fx's own documentation: one function and one method are exchanged while the module runs."""

    def call_function(self, target, args, kwargs):
        return super().call_function(torch.neg if target is torch.sigmoid else target, args, kwargs)

    def call_method(self, target, args, kwargs):
        return super().call_method("exp" if target == "neg" else target, args, kwargs)


def test_call_function_and_call_method_may_be_overridden():
    interpreter = Renaming(fx.symbolic_trace(lambda x: torch.sigmoid(x).neg()))
    x = torch.tensor([1.0, 2.0])
    assert torch.equal(interpreter.run(x), (-x).exp())
    assert interpreter.scales["sigmoid"].forward == pytest.approx(std([-1.0, -2.0]))


def test_call_function_calls_the_target():
    interpreter = ScaleTrackingInterpreter(fx.symbolic_trace(lambda x: x))
    assert interpreter.call_function(sorted, ([1, 2],), {"reverse": True}) == [2, 1]
    assert interpreter.call_function(math.hypot, (3.0, 4.0), {}) == 5.0


def test_call_method_calls_the_method_of_the_first_argument():
    interpreter = ScaleTrackingInterpreter(fx.symbolic_trace(lambda x: x))
    assert interpreter.call_method("split", ("a-b", "-"), {"maxsplit": 1}) == ["a", "b"]


def test_call_module_calls_the_child():
    model = nn.Sequential(nn.Linear(2, 2))
    interpreter = ScaleTrackingInterpreter(fx.symbolic_trace(model))
    x = torch.ones(1, 2)
    assert torch.equal(interpreter.call_module("0", (x,), {}), model(x))


def test_output_returns_its_argument():
    interpreter = ScaleTrackingInterpreter(fx.symbolic_trace(lambda x: x))
    assert interpreter.output("output", (("a", 1),), {}) == ("a", 1)


def test_fetch_args_kwargs_from_env_and_map_nodes_to_values():
    traced = fx.symbolic_trace(lambda x, y: torch.add(x, y, alpha=2))
    x, y, add, _ = traced.graph.nodes
    interpreter = ScaleTrackingInterpreter(traced)
    interpreter.env = {x: 1, y: 3}
    assert interpreter.fetch_args_kwargs_from_env(add) == ((1, 3), {"alpha": 2})
    assert interpreter.map_nodes_to_values([y, (x, 5)], add) == [3, (1, 5)]
    with pytest.raises(RuntimeError, match="nonexistent value"):
        interpreter.map_nodes_to_values([add], add)


# A trace that is older than the training flag


class Dropped(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, training=self.training)


def test_training_flag_frozen_by_the_trace_is_named():
    traced = fx.symbolic_trace(Dropped().train())
    interpreter = ScaleTrackingInterpreter(traced.eval())
    message = r"got a module in eval mode whose ops \(dropout\) were traced in training mode.*track_scales"
    with pytest.warns(UserWarning, match=message) as caught:
        interpreter.run(torch.ones(8))
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_no_word_of_training_where_nothing_is_frozen():
    ScaleTrackingInterpreter(fx.symbolic_trace(Dropped().eval())).run(torch.ones(8))
    ScaleTrackingInterpreter(fx.symbolic_trace(Dropped().train())).run(torch.ones(8))
    norm = nn.BatchNorm1d(2, track_running_stats=False).eval()
    traced = fx.symbolic_trace(lambda x: nn.functional.batch_norm(x, None, None, training=True))
    ScaleTrackingInterpreter(traced.eval()).run(torch.randn(4, 2))
    ScaleTrackingInterpreter(fx.symbolic_trace(nn.Sequential(norm)).eval()).run(torch.randn(4, 2))


def test_a_trace_that_notes_its_mode_is_compared_exactly():
    traced = fx.symbolic_trace(Dropped().eval())
    traced.graph._tracer_extras = {"training": False}
    ScaleTrackingInterpreter(traced).run(torch.ones(8))
    with pytest.warns(UserWarning, match="in training mode whose ops were traced in eval mode"):
        ScaleTrackingInterpreter(traced.train()).run(torch.ones(8))
