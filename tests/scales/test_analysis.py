"""The annotated code, what it refuses, and what it warns of."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import math
import re
import sys
import warnings
from fractions import Fraction
from types import ModuleType

import pytest
import torch
from scale_block import Block, block_gradient, block_inputs
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint

from dtype_hooks import override_dtype
from dtype_hooks.errors import ConfigError, TraceError
from dtype_hooks.scales.analysis import analyse_module


@pytest.fixture(autouse=True)
def quiet_and_seeded():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="dtype_hooks")
        yield


@contextlib.contextmanager
def one_warning():
    """The text of the one warning of this package that is given inside, in a list."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts.extend(str(warning.message) for warning in caught if "dtype_hooks" in str(warning.message))
    assert len(texts) == 1
    assert all(warning.filename == __file__ for warning in caught if "dtype_hooks" in str(warning.message))


def analysed(module, *inputs, backward=None, **kwargs):
    """The code of a module, with a gradient of 0, 1, 2, ... where none is given."""
    if backward is None:
        shape = module(*inputs).shape
        backward = torch.arange(float(shape.numel())).view(shape)
    return analyse_module(module, inputs, backward, **{"syntax_highlight": False, **kwargs})


def figures(code, name):
    """The two figures of the line that assigns a name."""
    (line,) = [line for line in code.splitlines() if line.split(" = ")[0].strip() == name]
    return line.split(";  ")[-1]


# The text


GOLDEN = """
def forward(self, x, mask):  (-> 0.816, <- 28.0), (-> 1.43, <- n/a)
    norm_weight = self.norm.weight;  (-> 1.08, <- 3.41)
    norm_bias = self.norm.bias;  (-> 1.08, <- 0.834)
    layer_norm = torch.nn.functional.layer_norm(x, (4,), weight = norm_weight, bias = norm_bias, eps = 1e-05);  (-> 1.47, <- 2.27)
    up_weight = self.up.weight;  (-> 0.769, <- 1.18)
    up_bias = self.up.bias;  (-> 0.935, <- 0.894)
    linear = torch._C._nn.linear(layer_norm, up_weight, up_bias);  (-> 3.74, <- 0.666)
    gelu = torch._C._nn.gelu(linear);  (-> 2.8, <- 0.759)
    down_weight = self.down.weight;  (-> 0.769, <- 3.66)
    down_bias = self.down.bias;  (-> 1.08, <- 1.36)
    linear_1 = torch._C._nn.linear(gelu, down_weight, down_bias);  (-> 12.5, <- 0.993)
    chunk = linear_1.chunk(2, 1)
    getitem = chunk[0];  (-> 5.89, <- 1.44)
    getitem_1 = chunk[1];  (-> 6.48, <- n/a)
    mul = getitem * mask;  (-> 9.35, <- 0.548)
    cat = torch.cat([getitem, mul], 1);  (-> 7.52, <- 0.585)
    add = x + cat;  (-> 7.48, <- 0.585)
    cos = add.cos();  (-> 0.763, <- 0.983)
    return cos
""".strip()

GOLDEN_CHILDREN = """
def forward(self, x, mask):  (-> 0.816, <- 28.0), (-> 1.43, <- n/a)
    norm = self.norm(x);  (-> 1.47, <- 2.27)
    up = self.up(norm);  (-> 3.74, <- 0.666)
    gelu = torch._C._nn.gelu(up);  (-> 2.8, <- 0.759)
    down = self.down(gelu);  (-> 12.5, <- 0.993)
    chunk = down.chunk(2, 1)
    getitem = chunk[0];  (-> 5.89, <- 1.44)
    getitem_1 = chunk[1];  (-> 6.48, <- n/a)
    mul = getitem * mask;  (-> 9.35, <- 0.548)
    cat = torch.cat([getitem, mul], 1);  (-> 7.52, <- 0.585)
    add = x + cat;  (-> 7.48, <- 0.585)
    cos = add.cos();  (-> 0.763, <- 0.983)
    return cos
""".strip()


@pytest.mark.parametrize(("recurse", "expected"), [(True, GOLDEN), (False, GOLDEN_CHILDREN)])
def test_code_is_that_of_the_reference(recurse, expected):
    """Golden text: unit-scaling 0.3.5's analyse_module on torch 2.13.0 (CPU)."""
    code = analyse_module(
        Block(), block_inputs(), block_gradient(), recurse_modules=recurse, syntax_highlight=False
    )
    assert code == expected


def test_signature_is_that_of_the_reference():
    parameters = inspect.signature(analyse_module).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert list(defaults) == [
        "module",
        "inputs",
        "backward",
        "recurse_modules",
        "syntax_highlight",
        "autowrap_modules",
        "autowrap_functions",
    ]
    assert list(defaults.values())[2:] == [None, True, True, (math,), ()]


def test_a_single_element_needs_no_backward():
    class Loss(nn.Module):
        def forward(self, x):
            return (x * x).sum()

    code = analyse_module(Loss(), torch.tensor([1.0, 2.0], requires_grad=True), syntax_highlight=False)
    assert code == (
        "def forward(self, x):  (-> 0.707, <- 1.41)\n"
        "    mul = x * x;  (-> 2.12, <- 0.0)\n"
        "    sum_1 = mul.sum();  (-> nan, <- nan)\n"
        "    return sum_1"
    )


def test_string_annotations_read_as_they_were_written():
    class Typed(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, int]:
            return x * 2

    code = analysed(Typed(), torch.ones(2, requires_grad=True))
    assert code.splitlines()[0].startswith(
        "def forward(self, x : torch.Tensor, y : torch.Tensor | None = None)"
    )
    assert code.splitlines()[0].endswith("-> dict[str, int]:  (-> 0.0, <- 1.41)")


def test_in_place_ops_have_the_figures_of_what_they_make():
    class InPlace(nn.Module):
        def forward(self, x, y):
            z = x * 2
            z += y
            return torch.relu_(z)

    x, y = torch.tensor([1.0, 2.0, 4.0], requires_grad=True), torch.tensor([1.0, -6.0, 2.0])
    assert analysed(InPlace(), x, y) == (
        "def forward(self, x, y):  (-> 1.53, <- 2.31), (-> 4.36, <- n/a)\n"
        "    mul = x * 2;  (-> 3.06, <- 1.15)\n"
        "    add = mul + y;  (-> 6.03, <- 1.15)\n"
        "    relu_ = torch.relu_(add);  (-> 5.13, <- 1.0)\n"
        "    return relu_"
    )


def test_in_place_operators_are_kept_where_a_later_use_sees_the_change():
    class Aliased(nn.Module):
        def forward(self, x, y):
            z = alias = x * 2
            z += y
            return alias * z

    x, y = torch.tensor([1.0, 2.0, 4.0], requires_grad=True), torch.tensor([1.0, -6.0, 2.0])
    assert analysed(Aliased(), x, y) == (
        "def forward(self, x, y):  (-> 1.53, <- 48.7), (-> 4.36, <- n/a)\n"
        "    mul = x * 2;  (-> 3.06, <- 24.3)\n"
        "    mul += y;  add = mul;  (-> 6.03, <- 24.3)\n"
        "    mul_1 = mul * add;  (-> 54.0, <- 1.0)\n"
        "    return mul_1"
    )
    Aliased()(x, y).backward(torch.arange(3.0))
    assert f"{x.grad.std().item():.3}" == "48.7"


def test_views_see_in_place_operators_too():
    class Views(nn.Module):
        def forward(self, x, y):
            z = x * 2
            row = z.view(-1)
            z += y
            flat = z.flatten()
            flat *= y
            return row + z * 0

    x, y = torch.tensor([1.0, 2.0, 4.0], requires_grad=True), torch.tensor([1.0, -6.0, 2.0])
    assert figures(analysed(Views(), x, y), "add_1") == f"(-> {Views()(x, y).std().item():.3}, <- 1.0)"


def test_functions_passed_as_arguments_are_shown_and_run():
    class Applies(nn.Module):
        def forward(self, x, scale=3.0, **kwargs):
            x = apply_to(torch.nn.functional.gelu, x)
            return apply_to(
                lambda value: value * 6, apply_to(lambda value: value + 1, apply_to(torch.relu, x))
            )

    code = analysed(Applies(), torch.tensor([1.0, 2.0], requires_grad=True), autowrap_functions=(apply_to,))
    assert code.splitlines()[0].startswith("def forward(self, x, scale = 3.0, **kwargs):  (-> 0.707, <- ")
    assert "function_placeholder__" not in code
    calls = re.findall(r"test_analysis_apply_to\((\w+), (\w+)\)", code)
    assert [value for _, value in calls] == ["x", "apply_to", "apply_to_1", "apply_to_2"]
    assert len({function for function, _ in calls}) == 4
    expected = 6 * (nn.functional.gelu(torch.tensor([1.0, 2.0])) + 1)
    assert figures(code, "apply_to_3") == f"(-> {expected.std().item():.3}, <- 0.707)"


def apply_to(function, value):
    return function(value)


def test_classes_of_wrapped_modules_stay_classes():
    class Checks(nn.Module):
        def forward(self, x):
            return x * 2 if isinstance(x, Fraction | nn.Module) else x * 3

    module = ModuleType("of_someone")
    module.Fraction = Fraction
    code = analysed(Checks(), torch.tensor([1.0, 2.0], requires_grad=True), autowrap_modules=(module,))
    assert "x * 3" in code


def test_functions_of_wrapped_modules_and_wrapped_functions_stay_one_line():
    class Rooted(nn.Module):
        def forward(self, x):
            return twice(x) / math.sqrt(x.size(0))

    code = analysed(Rooted(), torch.tensor([1.0, 2.0], requires_grad=True), autowrap_functions=(twice,))
    assert "math_sqrt" in code or "math.sqrt" in code
    assert "twice = " in code
    assert "wrap(" not in code


def twice(x):
    return x * 2 if x.sum() > 0 else x * 3


def test_highlighted_code_says_the_same():
    coloured = analyse_module(Block(), block_inputs(), block_gradient())
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured).strip() == GOLDEN


def test_without_pygments_the_text_is_plain(monkeypatch):
    monkeypatch.setitem(sys.modules, "pygments", None)
    spec = importlib.util.spec_from_file_location(
        "analysis_without_pygments", inspect.getfile(analyse_module)
    )
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    assert plain.analyse_module(Block(), block_inputs(), block_gradient()) == GOLDEN


# Nothing of the caller's changes


def test_module_and_inputs_are_left_as_they_were():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("calls", torch.zeros(()))
            self.last = None

        def forward(self, x):
            self.calls.add_(1)
            self.last = self.layer(x)
            return self.last * self.calls * torch.tensor(2.0)

    model = Counting().train()
    parameters = list(model.parameters())
    parameters[0].grad = torch.full((2, 2), 7.0)
    stepped = []
    parameters[0].register_post_accumulate_grad_hook(stepped.append)
    x = torch.ones(3, 2, requires_grad=True)
    x.register_hook(stepped.append)
    attributes = {name: dict(vars(child)) for name, child in model.named_modules()}
    version = model.calls._version
    analyse_module(model, x, torch.ones(3, 2), syntax_highlight=False)
    assert {name: dict(vars(child)) for name, child in model.named_modules()} == attributes
    assert torch.equal(parameters[0].grad, torch.full((2, 2), 7.0))
    assert parameters[1].grad is None
    assert x.grad is None
    assert stepped == []
    assert model.calls == 0
    assert model.calls._version > version


def test_a_buffer_that_is_only_read_is_not_written_to():
    norm = nn.Sequential(nn.BatchNorm1d(2)).eval()
    version = norm[0].running_mean._version
    analysed(norm, torch.randn(4, 2, requires_grad=True))
    assert norm[0].running_mean._version == version


def test_inputs_changed_in_place_are_copies():
    class Doubles(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, 3.0]))

        def forward(self, x):
            return x.mul_(2) * self.weight

    x = torch.tensor([1.0, 2.0])
    code = analyse_module(Doubles(), x, torch.ones(2), syntax_highlight=False)
    assert torch.equal(x, torch.tensor([1.0, 2.0]))
    assert figures(code, "mul_") == "(-> 1.41, <- n/a)"


def test_module_is_left_as_it_was_after_an_error():
    class Breaks(nn.Module):
        def forward(self, x):
            self.seen = x
            raise KeyError("mode")

    model = Breaks()
    with pytest.raises(TraceError, match=r"\(KeyError: 'mode'\)"):
        analyse_module(model, torch.ones(2))
    assert not hasattr(model, "seen")


# What is refused


class Branches(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


class Loops(nn.Module):
    def forward(self, x):
        for row in x:
            x = x + row
        return x


class Counts(nn.Module):
    def forward(self, *inputs):
        return inputs[len(inputs[0]) - 1]


class Modes(nn.Module):
    def forward(self, x, mode):
        if mode == "loss":
            return x
        raise RuntimeError(f"Invalid mode {mode}")


@pytest.mark.parametrize("kind", [Branches, Loops, Counts, Modes])
def test_untraceable_module_is_named_with_the_way_out(kind):
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"inner": kind()})["inner"])
    message = rf"^analyse_module: got '1' \({kind.__name__}\), which torch.fx cannot trace \(.+\); expected .+\. .*track_scales\(model\)"
    with pytest.raises(TraceError, match=message) as caught:
        analyse_module(model, torch.ones(2, 2))
    assert caught.value.__cause__ is not None
    assert "\n" not in str(caught.value)
    with pytest.raises(TraceError, match=rf"got a {kind.__name__}, which"):
        analyse_module(kind(), torch.ones(2, 2))


def test_the_innermost_untraceable_module_is_named():
    with pytest.raises(TraceError, match=r"got '0\.1' \(Branches\), which"):
        analyse_module(nn.Sequential(nn.Sequential(nn.Linear(2, 2), Branches())), torch.ones(2, 2))


class Returns(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.function = function

    def forward(self, x):
        return self.function(x * self.weight)


@pytest.mark.parametrize(
    ("function", "name"),
    [(lambda y: (y, y), "tuple"), (lambda y: {"loss": y}, "dict"), (lambda y: None, "NoneType")],
)
def test_output_that_is_not_one_tensor(function, name):
    message = rf"^analyse_module: got a module that returns a {name}; expected one tensor .*track_scales"
    with pytest.raises(TraceError, match=message):
        analyse_module(Returns(function), torch.ones(2))


@pytest.mark.parametrize("recurse", [True, False])
def test_call_that_fx_cannot_write_down_is_named(recurse):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x):
            return self.norm(x, object())

    with pytest.raises(TraceError, match=r"'norm' \(BatchNorm1d\), which torch.fx cannot trace \(\w+Error: "):
        analyse_module(Odd(), torch.ones(3, 2), recurse_modules=recurse)


def test_missing_backward_is_asked_for():
    message = r"^analyse_module.backward: got None for an output of shape \(3, 2\); expected its gradient.*track_scales"
    with pytest.raises(ConfigError, match=message):
        analyse_module(nn.Linear(2, 2), torch.ones(3, 2))


def test_backward_of_another_shape():
    with pytest.raises(
        ConfigError, match=r"backward: got a tensor of shape \(2,\); expected the output's, \(3, 2\)"
    ):
        analyse_module(nn.Linear(2, 2), torch.ones(3, 2), torch.ones(2))


def test_output_without_a_gradient():
    with pytest.raises(TraceError, match=r"got an output that needs no gradient; .*requires_grad_\(\)"):
        analyse_module(nn.ReLU(), torch.ones(2), torch.ones(2))
    with torch.no_grad(), pytest.raises(TraceError, match=r"leave torch\.no_grad\(\)"):
        analyse_module(nn.Linear(2, 2), torch.ones(2), torch.ones(2))


def test_lazy_module_is_asked_to_run_first():
    model = nn.Sequential(nn.LazyLinear(2), nn.ReLU())
    with pytest.raises(
        TraceError, match=r"got '0' \(a LazyLinear\) without parameters as yet; expected .* Call it once"
    ):
        analyse_module(model, torch.ones(2, 3), torch.ones(2, 2))
    model(torch.ones(2, 3))
    assert "linear = " in analysed(model, torch.ones(2, 3))


def test_function_is_no_module():
    with pytest.raises(
        ConfigError, match=r"^analyse_module.module: got <built-in .*>; expected an nn\.Module\. Wrap"
    ):
        analyse_module(torch.relu, torch.ones(2))


def test_an_error_of_the_forward_itself_comes_through():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        analyse_module(nn.Linear(2, 2), torch.ones(3, 5), torch.ones(3, 2))


# Where tracing would change the mathematics


class Inner(nn.Module):
    """A child whose forward is one given function of its input and its weight."""

    def __init__(self, function=torch.mul):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.1, 0.7, 1.3]))
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight)


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x * 2) * torch.tensor([1.0, 3.0, 4.0])


def row():
    return torch.tensor([1.1, 2.3, 3.7], requires_grad=True)


def autocast(x, weight):
    with torch.autocast("cpu", torch.bfloat16):
        return x.outer(weight).mv(weight).float()


def no_grad(x, weight):
    with torch.no_grad():
        factor = x.exp()
    return factor * x * weight


def inference(x, weight):
    with torch.inference_mode():
        size = (x * 2).sum()
    return x * weight + size.clone()


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


REGIONS = [
    (autocast, "autocast"),
    (no_grad, "no_grad"),
    (inference, "inference_mode"),
    (lambda x, weight: Straight.apply(x) * weight, "a custom autograd.Function"),
]


def eager_std(model):
    """Of the gradient of the input, by the model itself."""
    x = row()
    model(x).backward(torch.tensor([0.0, 1.0, 2.0]))
    return f"{x.grad.std().item():.3}"


@pytest.mark.parametrize(("function", "region"), REGIONS)
def test_child_that_opens_a_region_is_kept_whole(function, region):
    model = Outer(Inner(function))
    with one_warning() as texts:
        code = analysed(model, row())
    assert re.search(rf"kept whole.*: 'inner' \(.*{region}.*\)\. .*track_scales", texts[0])
    assert "leaves out" not in texts[0]
    assert "    inner = self.inner(mul);" in code
    assert code.splitlines()[0].endswith(f"<- {eager_std(model)})")


@pytest.mark.parametrize(("function", "region"), REGIONS)
def test_region_of_the_module_itself_is_named(function, region):
    with one_warning() as texts:
        analysed(Inner(function), row())
    assert re.search(rf"leaves out, of the module itself: .*{region}.*; the figures are without", texts[0])
    assert "kept whole" not in texts[0]


def test_region_of_the_module_around_its_children_leaves_them_open():
    class Autocasts(Outer):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    with one_warning() as texts:
        code = analysed(Autocasts(Inner()), row())
    assert "of the module itself: autocast; the figures" in texts[0]
    assert "kept whole" not in texts[0]
    assert "inner_weight" in code


def test_region_around_the_call_is_kept_without_a_word():
    model = nn.Sequential(nn.Linear(3, 3))
    with torch.autocast("cpu", torch.bfloat16):
        code = analyse_module(
            model, torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bfloat16), syntax_highlight=False
        )
    assert "linear" in code


def test_regions_without_ops_are_not_worth_a_warning():
    class Sizes(nn.Module):
        def forward(self, x):
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                size = x.shape[:1]
                width = x.size(0)
            with torch.autocast("cpu", enabled=False):
                return x * 2 + size[0] + width

    analysed(Outer(Sizes()), row())


def test_regions_deep_inside_keep_only_the_child_that_opens_them():
    model = nn.Sequential(nn.Sequential(Inner(), Inner(autocast)), Inner(no_grad))
    with one_warning() as texts:
        code = analysed(model, row())
    assert re.search(r"'0\.1' \(autocast\), '1' \(no_grad", texts[0])
    assert "weight" in code


def test_hooks_of_a_child_run():
    """S1: with hooks traced away the figures would be those of another model."""
    model = Outer(Inner())
    model.inner.register_forward_hook(lambda module, inputs, output: output * 9999)
    with one_warning() as texts:
        code = analysed(model, row())
    assert "'inner' (forward hooks)" in texts[0]
    assert code.splitlines()[0].endswith(f"<- {eager_std(model)})")


def test_hooks_of_the_module_itself_are_named():
    model = Outer(Inner())
    model.register_forward_pre_hook(lambda module, inputs: None)
    model.register_forward_hook(lambda module, inputs, output: output * 9999)
    model.register_full_backward_hook(lambda module, inputs, outputs: None)
    with one_warning() as texts:
        analysed(model, row())
    assert "of the module itself: forward pre-hooks, forward hooks, backward hooks; the figures" in texts[0]


def test_hooks_with_one_line_per_child_are_run_without_a_word():
    model = Outer(Inner())
    model.inner.register_forward_hook(lambda module, inputs, output: output * 9999)
    code = analysed(model, row(), recurse_modules=False)
    assert code.splitlines()[0].endswith(f"<- {eager_std(model)})")


@pytest.mark.parametrize(
    ("kind", "kept"), [(spectral_norm, "'0' (forward pre-hooks)"), (parametrizations.spectral_norm, "")]
)
def test_spectral_norm_computes_as_in_the_model(kind, kept):
    """S1. The parametrization's power method is a child of torch's own that cannot be traced: one line, no warning."""
    model = nn.Sequential(kind(nn.Linear(3, 3)), nn.ReLU())
    x = torch.randn(4, 3, requires_grad=True)
    with one_warning() if kept else contextlib.nullcontext([""]) as texts:
        code = analyse_module(model, x, torch.ones(4, 3), syntax_highlight=False)
    assert kept in texts[0]
    model(x).backward(torch.ones(4, 3))
    assert figures(code, "input_1").endswith(f"<- {x.grad.std().item():.3})")


def test_parametrization_without_a_region_is_traced_through():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)))
    code = analysed(model, torch.randn(4, 3, requires_grad=True))
    assert "original0" in code


def test_overridden_child_computes_in_its_dtype():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).to(torch.bfloat16)
    x = torch.randn(4, 3, dtype=torch.bfloat16, requires_grad=True)
    with override_dtype(model, "1", dtype="float32"):
        backward = torch.arange(12.0).view(4, 3).to(torch.bfloat16)
        with one_warning() as texts:
            code = analyse_module(model, x, backward, syntax_highlight=False)
        model(x).backward(backward)
    assert "'1' (an overridden method)" in texts[0]
    assert figures(code, "input_1").endswith(f"<- {x.grad.std().item():.3})")


def test_override_of_another_method_than_forward_counts_too():
    class Attends(Inner):
        def attend(self, x):
            return x * self.weight

        def forward(self, x):
            return self.attend(x)

    model = Outer(Attends())
    with (
        override_dtype(model, "inner", dtype="bfloat16", methods_to_override=["attend"]),
        one_warning() as texts,
    ):
        code = analysed(model, row())
        assert code.splitlines()[0].endswith(f"<- {eager_std(model)})")
    assert "'inner' (an overridden method)" in texts[0]


def test_overridden_module_itself_is_named():
    model = Outer(Inner())
    model.forward = lambda x: x
    with one_warning() as texts:
        analyse_module(model, row(), torch.ones(3), syntax_highlight=False)
    assert "of the module itself: an overridden method; the figures" in texts[0]


def test_training_flags_are_those_of_the_call():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8))
    x = torch.ones(4, 8, requires_grad=True)
    assert "training = False" in analysed(model.eval(), x)
    assert "(-> 0.0, <-" in figures(analysed(model.eval(), x), "dropout")
    model[0].train()
    assert "training = True" in analysed(model, x)
    assert "(-> 0.0, <-" not in figures(analysed(model, x), "dropout")


def test_untraceable_children_of_torchs_own_are_one_line():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.TransformerEncoderLayer(4, 2, 8))
    code = analysed(model, torch.randn(6, 4, requires_grad=True))
    assert re.findall(r"^    (\w+) = ", code, flags=re.MULTILINE) == [
        "input_1",
        "_0_weight",
        "_0_bias",
        "linear",
        "_1",
        "_2",
    ]


def test_checkpointed_child_computes_the_same():
    class Checkpointed(Outer):
        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    code = analysed(Checkpointed(Inner()), row())
    assert code.splitlines()[0].endswith(f"<- {eager_std(Checkpointed(Inner()))})")


def test_reentrant_checkpoint_in_a_child_is_refused():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=True)

    with (
        one_warning() as texts,
        pytest.raises(TraceError, match=r"expected use_reentrant=False\. Set it, or .*track_scales"),
    ):
        analysed(nn.Sequential(Checkpointed()), torch.ones(2, 3, requires_grad=True))
    assert "custom autograd.Function" in texts[0]


def test_compiled_module_is_that_which_was_compiled():
    model = nn.Sequential(nn.Linear(3, 3))
    compiled = torch.compile(model, backend="eager")
    x = torch.ones(2, 3, requires_grad=True)
    assert analyse_module(compiled, x, torch.ones(2, 3)) == analyse_module(model, x, torch.ones(2, 3))


def test_scripted_child_is_one_line():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(torch.jit.script(nn.Linear(3, 3)), nn.ReLU())
    code = analysed(model, torch.ones(2, 3, requires_grad=True))
    assert re.findall(r"^    (\w+) = ", code, flags=re.MULTILINE) == ["input_1", "_0", "relu"]


def test_a_second_trace_starts_from_the_module_as_it_was():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner(no_grad)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.add_(1)
            return self.inner(x) * (self.calls + 1)

    with one_warning():
        code = analysed(Counts(), row(), backward=torch.ones(3))
    assert figures(code, "mul") == f"(-> {Counts()(row()).std().item():.3}, <- 0.0)"


def test_a_constant_that_needs_a_gradient_is_followed():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = [torch.tensor([1.0, 2.0], requires_grad=True)]
            self.plain = torch.tensor([1.0, 4.0], requires_grad=True)

        def forward(self, x):
            return x * self.scale[0] * self.plain.exp()

    code = analyse_module(Constant(), torch.tensor([1.0, 3.0]), torch.ones(2), syntax_highlight=False)
    assert "n/a)" not in code.split("\n", 1)[1]


def test_an_argument_whose_name_is_taken_has_its_figures_in_the_body():
    class Shadows(nn.Module):
        def forward(self, max, x):
            return x * max

    code = analysed(Shadows(), torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([1.0, 3.0]))
    assert code.splitlines()[0] == "def forward(self, max, x):  (-> 1.41, <- n/a)"
    assert figures(code, "max_1") == "(-> 0.707, <- 2.12)"
