"""The eager recorder where models, optimizers and torch itself do what is out of the ordinary."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import random
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from dtype_hooks.scales.operations import tensors_in
from dtype_hooks.scales.record import Scales
from dtype_hooks.scales.recorder import track_scales


def named(scales: Scales, direction: str = "forward") -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in scales.rows() if row["direction"] == direction}


def names(scales: Scales, kind: str = "activation") -> list[str]:
    return [entry.name for entry in scales.entries if entry.kind == kind]


def means(scales: Scales, direction: str) -> dict[str, float]:
    return {name: row["mean"] for name, row in named(scales, direction).items()}


def of(value: float | Tensor) -> Any:
    number = value.detach().double().mean().item() if isinstance(value, Tensor) else value
    return pytest.approx(number, rel=1e-5, abs=1e-6)


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


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0] * ctx.saved_tensors[0]


square = Square.apply  # as modules of operations do


class TestWritesThatNoVersionTells:
    """A view's statistics are taken over from its source, unless the memory may have changed."""

    @staticmethod
    def by_data(y: Tensor) -> None:
        y.data.mul_(10)

    @staticmethod
    def by_new_data(y: Tensor) -> None:
        y.data = y.detach() * 10

    @staticmethod
    def by_numpy(y: Tensor) -> None:
        array = y.detach().numpy()
        array *= 10

    @staticmethod
    def by_pointer(y: Tensor) -> None:
        ten = (y.detach() * 10).contiguous()
        ctypes.memmove(y.data_ptr(), ten.data_ptr(), 4 * y.numel())

    @pytest.mark.parametrize("write", ["by_data", "by_new_data", "by_numpy", "by_pointer"])
    def test_a_view_afterwards_is_measured_anew(self, write: str):
        def forward(self: Any, x: Tensor) -> Tensor:
            y = x * 2
            getattr(TestWritesThatNoVersionTells, write)(y)
            return y.view(-1)

        model, x = Of(forward), input_of(3, 4)
        with track_scales(model) as scales:
            assert torch.allclose(model(x), 20 * x.flatten())
        assert means(scales, "forward")[":view"] == of(20 * x)

    def test_a_memory_given_away_stays_mistrusted(self):
        def forward(self: Any, x: Tensor) -> Tensor:
            y = x * 2
            alias = y.data
            first = y.view(-1)
            alias.mul_(10)
            return first.view(3, 4)

        model, x = Of(forward), input_of(3, 4)
        with track_scales(model) as scales:
            model(x)
        assert means(scales, "forward")[":view.1"] == of(20 * x)

    def test_a_buffer_that_an_extension_fills_is_not_taken_for_zeros(self):
        def forward(self: Any, x: Tensor) -> Tensor:
            buffer = torch.zeros(4)
            with torch._C.DisableTorchFunction():  # as C++ does, which nobody sees
                address = buffer.data_ptr()
            ctypes.memmove(address, (ctypes.c_float * 4)(1, 2, 3, 6), 16)
            return buffer.view(2, 2)

        model = Of(forward)
        with track_scales(model) as scales:
            model(torch.ones(1))
        assert means(scales, "forward")[":view"] == 3

    @pytest.mark.parametrize("patterns", [None, "fc"])
    def test_an_optimizer_that_steps_on_data(self, patterns: str | None):
        class OnData(torch.optim.Optimizer):
            def step(self) -> None:  # type: ignore[override]
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.data.add_(parameter.grad, alpha=-1)

        fc = Of(lambda self, x: x @ self.weight.t())
        fc.weight = nn.Parameter(torch.ones(3, 4))
        model = Of(lambda self, x: self.fc(x).sum(), fc=fc)
        optimizer = OnData(model.parameters(), {})
        with track_scales(model, patterns) as scales:
            for _ in range(2):
                model(torch.ones(2, 4)).backward()
                optimizer.step()
        assert means(scales, "forward")["fc:t.1"] == -1

    def test_a_backward_that_writes_into_the_gradient_it_gets(self):
        class InPlace(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * 1

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Tensor:
                grads[0].data.mul_(100)
                return grads[0]

        weights = torch.arange(12.0)
        model = Of(lambda self, x: (InPlace.apply(x.view(3, 4)).view(-1) * weights).sum())
        with track_scales(model) as scales:
            model(input_of(12)).backward()
        found = means(scales, "backward")
        assert (found[":view.1"], found[":InPlace"], found[":view"], found[":input[0]"]) == (
            5.5,
            5.5,
            550,
            550,
        )


class TestGradientsOfParameters:
    @staticmethod
    def two() -> nn.Module:
        return Of(lambda self, x, which: getattr(self, which)(x).sum(), a=nn.Linear(4, 4), b=nn.Linear(4, 4))

    def test_one_that_is_zeroed_before_another_backward_keeps_its_own(self):
        model, x = self.two(), input_of(3, 4)
        with track_scales(model) as scales:
            model(x, "a").backward()
            expected = model.a.weight.grad.clone()
            for parameter in model.a.parameters():
                parameter.grad.zero_()
            model(x, "b").backward()
        assert means(scales, "backward")["a.weight"] == of(expected)
        assert means(scales, "backward")["b.weight"] == of(model.b.weight.grad)

    def test_one_that_was_there_before_the_block_and_is_let_go_in_it(self):
        model, x = nn.Linear(4, 4), input_of(3, 4)
        for _ in range(3):
            with track_scales(model) as scales:
                model.zero_grad()
                model(x).sum().backward()
            assert means(scales, "backward")["weight"] == of(model.weight.grad)

    def test_an_optimizer_in_the_backward_is_preceded(self):
        model, x, order = nn.Linear(4, 4), input_of(3, 4), []

        def step(parameter: Tensor) -> None:
            order.append(parameter.grad.clone())
            parameter.grad = None

        handles = [each.register_post_accumulate_grad_hook(step) for each in model.parameters()]
        before = [list(each._post_accumulate_grad_hooks) for each in model.parameters()]
        with track_scales(model) as scales:
            model(x).sum().backward()
        assert {"weight", "bias"} <= set(named(scales, "backward"))
        assert sorted(means(scales, "backward")[name] for name in ("weight", "bias")) == [
            of(gradient) for gradient in sorted(order, key=lambda each: each.mean())
        ]
        assert [list(each._post_accumulate_grad_hooks) for each in model.parameters()] == before
        for handle in handles:
            handle.remove()
        model(x).sum().backward()
        assert len(order) == 2


class TestOptimizers:
    def test_one_that_steps_inside_anothers_step_leaves_the_modes_on(self):
        class Around(torch.optim.Optimizer):
            def __init__(self, inner: torch.optim.Optimizer) -> None:
                self.inner = inner
                super().__init__(inner.param_groups, {})

            def step(self) -> None:  # type: ignore[override]
                self.inner.step()

        model = nn.Linear(4, 1)
        optimizer = Around(torch.optim.SGD(model.parameters(), lr=0.1))
        with track_scales(model) as scales:
            for _ in range(2):
                model(input_of(2, 4)).square().mean().backward()
                optimizer.step()
        assert [name for name in names(scales) if "input" not in name] == [
            *(":linear", ":square", ":mean", ":linear.1", ":square.1", ":mean.1")
        ]
        assert torch._C._len_torch_function_stack() == 0

    def test_a_step_that_fails_and_is_caught_blinds_until_the_next_alone(self):
        class Failing(torch.optim.SGD):
            fails = True

            def step(self, closure: Any = None) -> Any:
                if self.fails:
                    raise ValueError
                return super().step(closure)

        model = nn.Linear(4, 1)
        optimizer = Failing(model.parameters(), lr=0.1)
        with track_scales(model) as scales:
            for _ in range(3):
                model(input_of(2, 4)).square().backward(torch.ones(2, 1))
                try:
                    optimizer.step()
                except ValueError:
                    optimizer.fails = False
        assert {":square", ":square.1", ":linear.2"} <= set(names(scales))
        assert torch._C._len_torch_function_stack() == 0


class TestAutogradFunctions:
    def test_an_apply_that_was_taken_before_is_seen(self):
        model, x = Of(lambda self, x: square(x) * 3), input_of(3, 4)
        with track_scales(model) as outer, track_scales(model) as scales:
            model(x).sum().backward()
        assert means(scales, "forward")[":Square"] == of(x**2)
        assert means(scales, "backward")[":Square"] == 3
        assert names(outer) == names(scales)
        assert "apply" not in torch.autograd.function._SingleLevelFunction.__dict__

    def test_transforms_run_as_without_and_are_left_out(self):
        class WithVmap(torch.autograd.Function):
            generate_vmap_rule = True

            @staticmethod
            def forward(x: Tensor) -> Tensor:
                return x * x

            @staticmethod
            def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
                ctx.save_for_backward(*inputs)

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Tensor:
                return 2 * grads[0] * ctx.saved_tensors[0]

        model = Of(lambda self, x: self.fc(WithVmap.apply(x)).tanh(), fc=nn.Linear(3, 1))
        x, parameters = input_of(4, 3).detach(), dict(model.named_parameters())

        def all_of() -> list[Tensor]:
            loss = lambda p: torch.func.functional_call(model, p, (x,)).sum()  # noqa: E731
            return [
                *torch.func.grad(loss)(parameters).values(),
                torch.func.vmap(model)(x),
                torch.func.jacrev(model)(x[0]),
                torch.func.vmap(torch.func.grad(lambda y: model(y).sum()))(x),
            ]

        expected = all_of()
        for level in ("functions", "aten"):
            with track_scales(model, level=level) as scales:
                actual = all_of()
                model(x).sum().backward()
            assert all(map(torch.equal, expected, actual))
            assert [name for name in names(scales) if name[:2] == "fc"] == ["fc:linear"]
            assert not [name for name in names(scales) if "Vmapped" in name or "Generated" in name]

    def test_tracing_a_model_does_not_trace_the_measuring(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        expected = str(torch.jit.trace(model, torch.ones(2, 3)).inlined_graph).count("aten::")
        with track_scales(model) as scales:
            traced = torch.jit.trace(model, torch.ones(2, 3))
            model(torch.ones(2, 3))
        assert str(traced.inlined_graph).count("aten::") == expected
        assert "0:linear" in names(scales)


class TestCheckpointing:
    """What is written between modules, and the kinds inside of one another."""

    @staticmethod
    def run(
        around: Callable[..., Any], backward: Callable[[Tensor], Any] = Tensor.backward
    ) -> dict[tuple[str, str], Any]:
        def inner(self: Any, x: Tensor) -> Tensor:
            x = around(lambda y: self.fc(y).sin().mul(2), x)
            return around(lambda y: around(lambda z: z.sin() * 3, y).sin(), x)

        torch.manual_seed(0)
        block = Of(inner, fc=nn.Linear(4, 4))
        model = Of(lambda self, x: self.block(x).mul(5).sin().sum(), block=block)
        with track_scales(model) as scales:
            backward(model(input_of(3, 4)))
        rows = scales.rows()
        assert len({(row["name"], row["direction"]) for row in rows}) == len(rows)
        return {(row["name"], row["direction"]): (row["numel"], of(row["mean"])) for row in rows}

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_functions_between_the_modules_have_their_gradients(self, reentrant: bool):
        expected = self.run(lambda function, x: function(x))
        assert {("block:sin", "backward"), ("block:mul.1", "backward")} <= set(expected)
        assert self.run(partial(checkpoint, use_reentrant=reentrant)) == expected

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_a_backward_in_another_thread_whose_nodes_are_counted_anew(self, reentrant: bool):
        def in_a_thread(function: Callable[[], Any]) -> Any:
            with ThreadPoolExecutor(1) as executor:
                return executor.submit(function).result()

        around = partial(checkpoint, use_reentrant=reentrant)
        expected = self.run(lambda function, x: function(x))
        found = in_a_thread(lambda: self.run(around, lambda loss: in_a_thread(loss.backward)))
        assert found == expected

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_a_graph_that_is_gone_through_twice(self, reentrant: bool):
        def twice(loss: Tensor) -> None:
            loss.backward(retain_graph=True)
            loss.backward()

        expected = self.run(lambda function, x: function(x), twice)
        assert expected["block:sin", "backward"][0] == 24
        assert self.run(partial(checkpoint, use_reentrant=reentrant), twice) == expected

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_the_backwards_kernels_are_those_without_it(self, reentrant: bool):
        def kernels(around: Callable[..., Any]) -> list[tuple[str, str]]:
            model = Of(lambda self, x: around(lambda y: self.fc(y).sin().exp(), x).sum(), fc=nn.Linear(4, 4))
            x = input_of(3, 4)
            with track_scales(model, level="aten") as scales:
                model(x).backward()
            return [(row["name"], row["direction"]) for row in scales.rows() if row["kind"] == "kernel"]

        expected = kernels(lambda function, x: function(x))
        assert ("fc:aten.mm", "backward") in expected
        assert kernels(partial(checkpoint, use_reentrant=reentrant)) == expected

    @pytest.mark.parametrize(("outer", "inner"), [(True, False), (False, True)])
    def test_one_kind_inside_the_other(self, outer: bool, inner: bool):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Tanh()) for _ in range(4)))
        plain = Of(lambda self, x: self.body(x).square().sum(), body=model)

        def halves(x: Tensor) -> Tensor:
            return checkpoint(model[2:], checkpoint(model[:2], x, use_reentrant=inner), use_reentrant=inner)

        mixed = Of(lambda self, x: checkpoint(halves, x, use_reentrant=outer).square().sum(), body=model)
        found = []
        for each in (plain, mixed):
            torch.manual_seed(1)
            each.zero_grad()
            with track_scales(each) as scales:
                each(input_of(3, 4)).backward()
            found.append({(row["name"], row["direction"]): of(row["mean"]) for row in scales.rows()})
        assert ("body.2.0:linear", "backward") in found[0]
        assert found[1] == found[0]


class TestModesOfOthers:
    class Passing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def test_one_that_outlives_the_block_stays_and_ours_goes(self):
        mode = self.Passing()
        with track_scales(nn.Linear(2, 2)):
            mode.__enter__()
        stack = [torch._C._get_function_stack_at(at) for at in range(torch._C._len_torch_function_stack())]
        mode.__exit__(None, None, None)
        assert stack == [mode]
        assert torch._C._len_torch_function_stack() == 0

    def test_recordings_of_one_thread_that_end_in_the_order_they_began(self):
        model = nn.Linear(4, 4)
        first, second = track_scales(model, level="aten"), track_scales(model, level="aten")
        first.__enter__()
        scales = second.__enter__()
        first.__exit__(None, None, None)
        model(torch.ones(2, 4))
        second.__exit__(None, None, None)
        assert names(scales) == [":input[0]", ":linear"]
        assert "aten.addmm" in str(scales)
        assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0
        assert "_compiled_call_impl" not in model.__dict__

    def test_a_subclass_with_a_way_of_its_own_still_gets_attention_as_a_whole(self):
        seen = []

        class Own(Tensor):
            @classmethod
            def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
                seen.append(func)
                return super().__torch_function__(func, types, args, kwargs or {})

        model = nn.MultiheadAttention(4, 2)
        x = torch.ones(3, 2, 4).as_subclass(Own)
        with track_scales(model) as scales:
            model(x, x, x)
        assert torch.nn.functional.multi_head_attention_forward in seen
        assert ":multi_head_attention_forward[0]" in names(scales)


class TestInputs:
    def test_a_container_that_holds_itself(self):
        batch: dict[str, Any] = {"x": torch.ones(2)}
        batch["again"] = [batch, batch]
        batch["list"] = [torch.zeros(1)]
        batch["list"].append(batch["list"])
        model = Of(lambda self, batch: batch["x"] * 2)
        with track_scales(model) as scales:
            model(batch)
        assert names(scales) == [":input[0][x]", ":input[0][list][0]", ":mul"]

    def test_keys_that_look_alike_have_each_their_own_gradient(self):
        model = Of(lambda self, batch: (batch[1] * 2 + batch["1"] * 3).sum())
        with track_scales(model) as scales:
            model({1: input_of(3), "1": input_of(3, seed=1)}).backward()
        found = means(scales, "backward")
        assert (found[":input[0][1]"], found[":input[0][1]'"]) == (2, 3)

    def test_a_mapping_that_cannot_be_gone_through(self):
        class Lazy(Mapping):  # type: ignore[type-arg]
            def __getitem__(self, key: str) -> Any:
                raise RuntimeError("not yet")

            def __iter__(self) -> Iterator[str]:
                return iter(["x"])

            def __len__(self) -> int:
                return 1

        model = Of(lambda self, batch: torch.ones(2) * 2)
        with track_scales(model) as scales:
            model(Lazy())
        assert names(scales) == [":ones", ":mul"]

    def test_a_long_list_of_numbers_is_not_gone_through(self):
        assert list(tensors_in([*[0.5] * 17, torch.ones(1)])) == []
        assert [label for label, _ in tensors_in([*[0.5] * 2, torch.ones(1)])] == ["[2]"]

    def test_saving_one_in_the_block_does_not_warn(self):
        model, x = nn.Linear(4, 4), input_of(2, 4)
        with track_scales(model), warnings.catch_warnings():
            model(x)
            warnings.simplefilter("error")
            torch.save(x, io.BytesIO())

    def test_a_leaf_is_not_kept(self):
        model = nn.Linear(4, 4)
        with track_scales(model):
            x = input_of(2, 4)
            model(x).sum().backward()
            reference = weakref.ref(x)
            del x
            gc.collect()
            assert reference() is None


class TestCopiesOfTheModel:
    def test_a_module_that_hands_over_its_whole_dict_is_copied_without_us(self):
        class Whole(nn.Linear):
            def __getstate__(self) -> dict[str, Any]:
                return self.__dict__.copy()

        model = nn.Sequential(Whole(4, 4))
        with track_scales(model) as scales:
            copied = copy.deepcopy(model)
            with torch.no_grad():
                copied[0].weight.zero_()
                copied[0].bias.zero_()
                assert copied(torch.ones(2, 4)).abs().max() == 0
        assert names(scales) == []

    def test_replicas_of_data_parallel_compute_with_what_is_theirs(self):
        model = Of(lambda self, x: self.child(x) * self.factor, child=Of(lambda self, x: x + self.factor))
        model.factor = model.child.factor = 1.0
        make = sys.modules["torch.nn.parallel.data_parallel"]
        with track_scales(model) as outer, track_scales(model) as scales:
            # torch makes replicas of modules with parameters on GPUs only; without any it makes them anywhere
            replicas = make.replicate(model, [0, 1])  # type: ignore[attr-defined]
            for factor, replica in enumerate(replicas, start=2):
                replica.factor = replica.child.factor = float(factor)
            assert [replica(torch.ones(2)).tolist() for replica in replicas] == [[6.0, 6.0], [12.0, 12.0]]
        wanted = [":input[0]", "child:add", ":mul", ":input.1[0]", "child:add.1", ":mul.1"]
        assert names(scales) == names(outer) == wanted
        assert make.replicate is torch.nn.parallel.replicate  # type: ignore[attr-defined]


class Random(nn.Module):
    """A random program of views, in-place writes and arithmetic, which keeps what each result was and its gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.keeps = seed, False
        self.kept: list[list[Any]] = []

    def keep(self, op: str, tensor: Tensor) -> Tensor:
        if not self.keeps:
            return tensor
        record = [op, tensor.detach().clone(), None]
        self.kept.append(record)
        if tensor.requires_grad:
            _ = tensor.grad_fn  # brings a stale view up to date: torch 2.13 crashes otherwise

            def add(gradient: Tensor | None) -> None:
                if gradient is not None:
                    record[2] = gradient.clone() if record[2] is None else record[2] + gradient

            tensor.register_hook(add)
        return tensor

    def forward(self, x: Tensor) -> Tensor:
        chance = random.Random(self.seed)
        live = [self.keep("mul", x * 1.5)]
        for _ in range(chance.randint(5, 25)):
            a, b, same = chance.choice(live), chance.choice(live), chance.choice(live)
            b = b if b.shape == a.shape else a
            steps: list[Callable[[], tuple[str, Tensor]]] = [
                lambda a=a, b=b: ("add", a + b),
                lambda a=a: ("reshape", a.reshape(-1)),
                lambda a=a: ("sin", a.sin()),
                lambda a=a: ("t", a.t()),
                lambda a=a: ("mul_", a.mul_(1.1)),
                lambda a=a, b=b: ("add_", a.add_(b)),
                lambda a=a: ("getitem", a[0:1]),
                lambda a=a: ("setitem", (a.__setitem__((..., 0), 0.5), a)[1]),
                lambda a=a: ("detach", a.detach()),
                lambda a=a: ("clone", a.clone()),
                lambda a=a: ("relu_", torch.relu_(a)),
                lambda a=a: ("contiguous", a.contiguous()),
                lambda a=a: ("float", a.float()),
                lambda a=a: ("as_strided", a.as_strided((2, 2), (1, 1))),
                lambda a=a, b=b: ("sub", a - b),
                lambda a=a, same=same: ("squeeze", same.squeeze(0)),
            ]
            try:
                op, tensor = chance.choice(steps)()
            except (RuntimeError, IndexError):  # torch refuses: the same in both runs
                continue
            live.append(self.keep(op, tensor))
        return sum(tensor.sum() for tensor in live if tensor.requires_grad)  # type: ignore[return-value]


def test_random_programs_are_recorded_as_hooks_of_ones_own_see_them():
    checked = gradients = 0
    for seed in range(250):
        model, x = Random(seed), input_of(3, 4, seed=seed)
        model.keeps = True
        try:
            loss = model(x)
            loss.backward()
        except RuntimeError:  # a value that the backward needs was written over
            continue
        model.keeps = False
        with track_scales(model) as scales:
            again = model(x)
            again.backward()
        assert torch.equal(loss, again) or loss.isnan()
        found = {(entry.order, direction): each for entry, direction, each in scales.statistics()}
        per_op: dict[str, list[int]] = {}
        for entry in scales.entries:
            per_op.setdefault(entry.op, []).append(entry.order)
        for op, value, gradient in model.kept:
            order = per_op[op].pop(0)
            for direction, tensor in (("forward", value), ("backward", gradient)):
                assert (tensor is None) == ((order, direction) not in found), (seed, op, direction)
                if tensor is not None and tensor.isfinite().all() and tensor.numel():
                    each, exact = found[order, direction], tensor.double()
                    near = partial(pytest.approx, rel=1e-5, abs=1e-5 * exact.abs().max().item())
                    assert each.numel == exact.numel(), (seed, op, direction)
                    assert each.mean == near(exact.mean().item()), (seed, op, direction)
                    assert each.deviation == near(exact.std(unbiased=False).item()), (seed, op, direction)
                    checked += 1
                    gradients += direction == "backward"
    assert checked > 1000
    assert gradients > 300


def test_a_stale_view_that_is_written_to_does_not_crash():
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * 1.5
        view = y[0:1]
        y.mul_(1.1)
        view[..., 0] = 0.5
        return view.sum() + y.sum()

    model = Of(forward)
    with track_scales(model) as scales:
        model(input_of(3, 4)).backward()
    assert means(scales, "backward")[":setitem"] == 1
    assert means(scales, "backward")[":mul_"] == pytest.approx((8 + 2 * 3) / 12)
