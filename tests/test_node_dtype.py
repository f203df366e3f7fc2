"""Which dtype each node runs in, scopes, and warnings of implicit downcasts."""

from __future__ import annotations

import inspect
import itertools
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mmengine.config import Config
from torch import Tensor, nn

from dtype_hooks import ConfigError, node_dtype
from dtype_hooks.node_dtype import (
    holds,
    node_scope,
    reset_implicit_downcasts,
    resolve_model_dtype,
    resolve_node_dtype,
    warn_implicit_downcast,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    reset_implicit_downcasts()
    yield
    reset_implicit_downcasts()


class Model(nn.Module):
    """Without a word about its dtype."""


class Wanting(nn.Module):
    def __init__(self, wanted: Any) -> None:
        super().__init__()
        self.wanted = wanted

    def get_autocast_dtype(self) -> Any:
        return self.wanted


@dataclass
class DataclassConfig:
    autocast_dtype: Any = None


def warned(*calls: tuple) -> list[str]:
    """The warnings that calls of :func:`warn_implicit_downcast` give."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in calls:
            warn_implicit_downcast(*call)
    return [str(w.message) for w in caught]


class TestSignatures:
    @pytest.mark.parametrize(
        ("function", "signature"),
        [
            (resolve_model_dtype, ["model", "model_config"]),
            (resolve_node_dtype, ["submodule", "model_dtype"]),
            (node_scope, ["node_name", "dtype"]),
            (warn_implicit_downcast, ["op", "src", "dst"]),
        ],
    )
    def test_names_of_functions_and_arguments(self, function, signature):
        assert list(inspect.signature(function).parameters) == signature
        assert function.__name__ in node_dtype.__all__

    def test_a_scope_needs_no_dtype(self):
        assert inspect.signature(node_scope).parameters["dtype"].default is None

    def test_it_is_importable_and_works_without_mmengine(self):
        code = """
import sys
sys.modules["mmengine"] = None
import torch
from dtype_hooks.node_dtype import *
from dtype_hooks.node_dtype import resolve_model_dtype
assert resolve_model_dtype(torch.nn.Linear(1, 1), {"autocast_dtype": "bf16"}) is torch.bfloat16
with node_scope("a", None):
    warn_implicit_downcast("op", torch.float32, torch.float16)
assert not any(name.split(".")[0] in ("mmengine", "rich") and module for name, module in sys.modules.items())
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "node 'a': op runs a float32 input in float16" in done.stderr


class TestModelWide:
    @pytest.mark.parametrize("value", ["bfloat16", "bf16", "torch.bfloat16", torch.bfloat16])
    @pytest.mark.parametrize(
        "make",
        [
            lambda v: {"autocast_dtype": v},
            lambda v: SimpleNamespace(autocast_dtype=v),
            lambda v: DataclassConfig(v),
            lambda v: Config({"autocast_dtype": v}),
            lambda v: Config({"model": {"autocast_dtype": v}}).model,
        ],
        ids=["dict", "namespace", "dataclass", "Config", "ConfigDict"],
    )
    def test_the_configs_word_wins_over_the_models(self, make, value):
        assert resolve_model_dtype(Wanting(FP16), make(value)) is BF16
        assert resolve_model_dtype(Model(), make(value)) is BF16

    @pytest.mark.parametrize("config", [{}, None, SimpleNamespace(), Config({}), {"other": 1}])
    def test_an_absent_autocast_dtype_asks_the_model(self, config):
        assert resolve_model_dtype(Wanting(FP16), config) is FP16
        assert resolve_model_dtype(Wanting("bf16"), config) is BF16
        assert resolve_model_dtype(Wanting(None), config) is None
        assert resolve_model_dtype(Model(), config) is None

    @pytest.mark.parametrize(
        "config", [{"autocast_dtype": None}, DataclassConfig(), Config({"autocast_dtype": None})]
    )
    def test_null_is_no_autocast_whatever_the_model_says(self, config):
        assert resolve_model_dtype(Wanting(FP16), config) is None
        assert resolve_model_dtype(Wanting(None), config) is None
        assert resolve_model_dtype(Model(), config) is None

    def test_a_pinned_model_takes_no_other_word(self):
        with pytest.raises(ConfigError) as error:
            resolve_model_dtype(Wanting(None), {"autocast_dtype": "bf16"})
        assert str(error.value) == (
            "autocast_dtype: got 'bfloat16' for Wanting, whose get_autocast_dtype() returns None: "
            "its numerics are pinned; expected None. Leave autocast_dtype out."
        )

    @pytest.mark.parametrize("value", ["fp61", 16, True, ["bf16"], torch.int8, ""])
    def test_what_is_no_dtype_is_an_error_of_config_model_and_node(self, value):
        with pytest.raises(ConfigError, match=r"^autocast_dtype: got "):
            resolve_model_dtype(Model(), {"autocast_dtype": value})
        for resolve in (lambda m: resolve_model_dtype(m, {}), lambda m: resolve_node_dtype(m, BF16)):
            with pytest.raises(ConfigError, match=r"Wanting.get_autocast_dtype\(\): got "):
                resolve(Wanting(value))


class AsProperty(Wanting):
    @property
    def disable_autocast(self) -> bool:
        return self.wanted is FP16


class AsMethod(Wanting):
    def disable_autocast(self) -> bool:
        return self.wanted is FP16


class AsAttribute(Wanting):
    disable_autocast = True


class TestNode:
    @pytest.mark.parametrize("model_dtype", [None, BF16, FP16])
    def test_the_nodes_own_word_or_the_models(self, model_dtype):
        assert resolve_node_dtype(Model(), model_dtype) is model_dtype
        assert resolve_node_dtype(Wanting(None), model_dtype) is model_dtype
        assert resolve_node_dtype(Wanting(FP16), model_dtype) is FP16
        assert resolve_node_dtype(Wanting("torch.bfloat16"), model_dtype) is BF16

    @pytest.mark.parametrize("cls", [AsProperty, AsMethod, AsAttribute])
    def test_opting_out_wins_over_both(self, cls):
        assert resolve_node_dtype(cls(FP16), BF16) is None

    @pytest.mark.parametrize("cls", [AsProperty, AsMethod])
    def test_saying_no_is_not_opting_out(self, cls):
        assert resolve_node_dtype(cls(BF16), FP16) is BF16

    @pytest.mark.parametrize("value", [False, 0, None, lambda: False])
    def test_false_on_an_instance_is_not_opting_out(self, value):
        module = nn.Linear(1, 1)
        module.disable_autocast = value
        assert resolve_node_dtype(module, BF16) is BF16

    def test_true_on_an_instance_is(self):
        module = nn.Linear(1, 1)
        module.disable_autocast = True
        assert resolve_node_dtype(module, BF16) is None

    def test_buffers_have_no_say(self):
        """A model-wide bfloat16 with a float32 buffer is bfloat16: the resolver never looks at tensors."""
        module = nn.BatchNorm1d(2)
        assert resolve_node_dtype(module, BF16) is BF16
        assert resolve_model_dtype(module, {"autocast_dtype": "bf16"}) is BF16


DOWN = ("op", FP32, BF16)


class TestScope:
    def test_it_names_the_node_and_nests(self):
        with node_scope("outer"):
            with node_scope("inner"):
                inner = warned(("a", FP32, BF16))
            outer = warned(("a", FP32, BF16))
        outside = warned(("a", FP32, BF16))

        text = "a runs a float32 input in bfloat16, which cannot hold all of its values."
        assert (inner, outer, outside) == ([f"node 'inner': {text}"], [f"node 'outer': {text}"], [text])

    def test_a_node_without_a_name_is_like_none(self):
        with node_scope(None, FP16):
            assert warned(DOWN) == [
                "op runs a float32 input in bfloat16, which cannot hold all of its values."
            ]
            assert warned(("op2", FP32, FP16)) == []

    def test_it_ends_with_an_exception(self):
        with pytest.raises(RuntimeError), node_scope("node", BF16):
            raise RuntimeError
        assert warned(DOWN)[0].startswith("op runs")

    def test_as_a_decorator_each_call_has_its_own(self):
        @node_scope("node", BF16)
        def count(n: int) -> list[str]:
            return warned(DOWN) + (count(n - 1) if n else [])

        assert count(3) == []
        assert len(warned(DOWN)) == 1

    def test_threads_have_their_own(self):
        found: dict[int, list[str]] = {}
        barrier = threading.Barrier(4)

        def run(i: int) -> None:
            with node_scope(f"node{i}"):
                barrier.wait()
                found[i] = [node_dtype._scope.get().node]
                barrier.wait()
            found[i].append(str(node_dtype._scope.get()))

        with node_scope("main"):
            threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert found == {i: [f"node{i}", "None"] for i in range(4)}

    def test_a_generator_shows_its_scope_to_whoever_resumes_it_and_ends_it(self):
        def steps() -> Iterator[str]:
            with node_scope("generator"):
                yield node_dtype._scope.get().node
                yield node_dtype._scope.get().node

        with node_scope("caller"):
            assert list(steps()) == ["generator"] * 2
            assert node_dtype._scope.get().node == "caller"
            left = steps()
            next(left)
            left.close()
            assert node_dtype._scope.get().node == "caller"

    def test_a_generator_closed_in_another_thread_raises_nothing(self):
        def steps() -> Iterator[None]:
            with node_scope("generator"):
                yield

        left = steps()
        threads = [threading.Thread(target=next, args=(left,)), threading.Thread(target=left.close)]
        errors: list[Any] = []
        before, threading.excepthook = threading.excepthook, errors.append
        try:
            for thread in threads:
                thread.start()
                thread.join()
        finally:
            threading.excepthook = before
        assert errors == []


FLOATS = [
    FP16, BF16, FP32, FP64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def values_of(dtype: torch.dtype) -> Tensor:
    """All finite values of an 8- or 16-bit dtype, in float64; of wider ones, those of all dtypes and the extremes."""
    if dtype is torch.bool:
        return torch.tensor([0.0, 1.0], dtype=FP64)
    if dtype.itemsize == 1:
        values = torch.arange(256, dtype=torch.uint8).view(dtype).to(FP64)
    elif dtype.itemsize == 2:
        values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).to(FP64)
    elif dtype.is_floating_point:
        info = torch.finfo(dtype)
        values = torch.tensor(
            [info.max, info.smallest_normal, info.smallest_normal * info.eps, 1 + info.eps, 1 / 3], dtype=FP64
        ).to(dtype).to(FP64)  # fmt: skip
    else:
        info = torch.iinfo(dtype)
        ends = [info.min, info.min + 1, -(2**24) - 1, 2**24 + 1]
        values = torch.tensor(ends, dtype=torch.int64)
        return values
    return values[values.isfinite()]


def changes_a_value(src: torch.dtype, dst: torch.dtype) -> bool:
    """What :func:`holds` is to tell: whether a cast there and back changes a finite value."""
    values = values_of(src)
    if dst.is_floating_point:
        there = values.to(src).to(dst)
        back = there.to(FP64)
        exact = values.to(FP64)
        if not values.is_floating_point():  # int64 does not fit into float64
            return not torch.equal(there.to(FP64).to(torch.int64), values) or bool(there.isinf().any())
        return not torch.equal(back, exact)
    return not torch.equal(values.to(src).to(dst).to(src).to(FP64), values.to(FP64))


class TestHolds:
    @pytest.mark.parametrize(("src", "dst"), itertools.product(FLOATS, FLOATS))
    def test_of_floats_is_that_no_finite_value_changes_there_and_back(self, src, dst):
        assert holds(dst, src) is not changes_a_value(src, dst)

    @pytest.mark.parametrize(("src", "dst"), itertools.product([*INTEGERS, torch.bool], FLOATS[:4]))
    def test_of_integers_in_floats(self, src, dst):
        assert holds(dst, src) is not changes_a_value(src, dst)

    @pytest.mark.parametrize(("src", "dst"), itertools.product(INTEGERS, INTEGERS))
    def test_of_integers_in_integers(self, src, dst):
        a, b = torch.iinfo(src), torch.iinfo(dst)
        assert holds(dst, src) is (b.min <= a.min and a.max <= b.max)

    def test_the_halves_do_not_hold_each_other_and_the_rest_one_knows(self):
        assert not holds(FP16, BF16)
        assert not holds(BF16, FP16)
        assert not holds(torch.complex64, torch.complex128)
        assert holds(torch.complex64, BF16)
        assert not holds(FP32, torch.complex64)
        assert not holds(torch.int8, FP32)
        assert not holds(torch.bool, FP32)
        assert holds(FP16, torch.bool)
        assert holds(FP32, torch.float4_e2m1fn_x2)


class TestWarning:
    @pytest.mark.parametrize(("src", "dst"), itertools.product(FLOATS, FLOATS))
    def test_it_fires_exactly_where_the_narrower_dtype_cannot_hold_the_input(self, src, dst):
        assert bool(warned(("op", src, dst))) is not holds(dst, src)

    def test_once_for_each_node_and_op_over_many_iterations(self):
        texts = []
        for _ in range(50):
            for node in ("a", "b", None):
                with node_scope(node):
                    texts += warned(("x", FP32, BF16), ("y", FP32, FP16), ("x", FP64, BF16))
        assert len(texts) == 6

    def test_not_where_it_is_the_nodes_own_dtype(self):
        with node_scope("node", BF16):
            assert warned(("op", FP32, BF16)) == []
            assert len(warned(("op", FP32, FP16))) == 1
        with node_scope("kept out", None):
            assert len(warned(("op", FP32, BF16))) == 1

    def test_a_new_run_starts_afresh(self):
        assert [len(warned(DOWN)) for _ in range(3)] == [1, 0, 0]
        reset_implicit_downcasts()
        assert [len(warned(DOWN)) for _ in range(3)] == [1, 0, 0]

    def test_it_points_to_the_caller_and_obeys_the_filters(self):
        with pytest.warns(UserWarning, match="op") as caught:
            warn_implicit_downcast(*DOWN)
        assert caught[0].filename == __file__
        reset_implicit_downcasts()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="op runs a float32 input in bfloat16"):
                warn_implicit_downcast(*DOWN)

    def test_under_pythons_own_filters_a_second_run_is_heard_too(self):
        """The default filter shows a text once a line, by a registry in the caller's module."""
        code = """
import torch
from dtype_hooks.node_dtype import reset_implicit_downcasts, warn_implicit_downcast
for run in range(2):
    reset_implicit_downcasts()
    for iteration in range(5):
        warn_implicit_downcast("op", torch.float32, torch.bfloat16)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("op runs a float32 input in bfloat16") == 2


@torch.library.custom_op("dtype_hooks_tests::half_matmul", mutates_args=())
def half_matmul(x: Tensor, w: Tensor) -> Tensor:
    warn_implicit_downcast("half_matmul", x.dtype, torch.bfloat16)
    seen.append((torch.is_autocast_enabled("cpu"), torch.compiler.is_compiling()))
    return x.bfloat16() @ w.bfloat16()


@half_matmul.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1], dtype=torch.bfloat16)


seen: list[tuple[bool, bool]] = []


class TestCompiled:
    @pytest.fixture(autouse=True)
    def no_graphs(self) -> Iterator[None]:
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_it_is_silent_while_dynamo_traces_and_breaks_no_graph(self, backend):
        @torch.compile(backend=backend, fullgraph=True)
        def forward(x: Tensor) -> Tensor:
            with node_scope("inside", FP16):
                warn_implicit_downcast("traced", FP32, BF16)
                return x * 2

        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            with node_scope("outside", FP16):
                assert torch.equal(forward(torch.ones(3)), torch.full((3,), 2.0))
        assert node_dtype._scope.get() is None

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_a_custom_op_in_a_compiled_forward_reports_at_run_time_but_not_the_nodes_own_dtype(self, backend):
        seen.clear()
        x, w = torch.ones(2, 3), torch.ones(3, 2)

        @torch.compile(backend=backend, fullgraph=True)
        def forward(x: Tensor, w: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return half_matmul(x, w) + 1

        def run() -> list[str]:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(3):
                    assert forward(x, w).dtype is BF16
            return [str(w.message) for w in caught if "half_matmul" in str(w.message)]

        with node_scope("node", BF16):
            assert run() == []
        with node_scope("other", FP16):
            (text,) = run()
        assert text.startswith("node 'other': half_matmul runs a float32 input in bfloat16")
        assert len(run()) == 1
        assert len(seen) == 9
        if backend == "aot_eager":
            assert {compiling for _, compiling in seen} == {False}
