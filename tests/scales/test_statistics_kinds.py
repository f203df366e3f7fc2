"""Which tensors are measured, and which are left out by rule."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dtype_hooks.core.number_formats import DEFAULT_FORMATS
from dtype_hooks.scales.statistics import TensorStatistics, can_measure, gather, measure


class Named(Tensor):
    """A subclass that changes what functions do, not what the numbers are."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapped(Tensor):
    """A subclass without numbers of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def freed() -> Tensor:
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor


def statistics_of(tensor: Tensor) -> TensorStatistics:
    return gather([measure(tensor, DEFAULT_FORMATS)])[0]


LEFT_OUT = {
    "an integer tensor": lambda: torch.arange(3),
    "a bool tensor": lambda: torch.tensor([True]),
    "a complex tensor": lambda: torch.ones(2, dtype=torch.complex64),
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "a sparse tensor": lambda: torch.eye(2).to_sparse(),
    "a sparse compressed tensor": lambda: torch.eye(2).to_sparse_csr(),
    "an mkldnn tensor": lambda: torch.ones(2).to_mkldnn(),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "a jagged tensor": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "a meta tensor": lambda: torch.ones(2, device="meta"),
    "a fake tensor": lambda: FakeTensorMode().from_tensor(torch.ones(2)),
    "a parameter not yet initialised": lambda: torch.nn.LazyLinear(2).weight,
    "a tensor whose memory was freed": freed,
    "zeros without memory": lambda: torch._efficientzerotensor(3),
    "a wrapper subclass": lambda: Wrapped(torch.ones(2)),
    "two floats to a byte": lambda: torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "a number": lambda: 3.0,
    "nothing": lambda: None,
}


@pytest.mark.parametrize("kind", LEFT_OUT)
@pytest.mark.filterwarnings("ignore")
def test_left_out_by_rule(kind):
    if kind.startswith("two floats") and not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch lacks the dtype")
    assert can_measure(LEFT_OUT[kind]()) is False


def test_tensors_inside_function_transforms_are_left_out():
    seen = []

    def loss(x: Tensor) -> Tensor:
        seen.append(can_measure(x))
        return (x * x).sum()

    torch.func.grad(loss)(torch.ones(3))
    torch.func.vmap(loss)(torch.ones(3, 2))
    assert seen == [False, False]


@pytest.mark.parametrize(
    "name",
    [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
    ],
)
def test_floating_tensors_are_taken(name):
    tensor = torch.tensor([[0.5, -2.0, 0.0]]).to(getattr(torch, name))
    assert can_measure(tensor)
    found = statistics_of(tensor)
    assert (found.mean, found.amax, found.amin, found.zeros) == (-0.5, 2.0, 0.5, 1)


def test_an_empty_tensor_has_a_row_of_nothing():
    assert can_measure(torch.empty(0, 3))
    row = statistics_of(torch.empty(0, 3)).as_row()
    assert {row[key] for key in ("numel", "zeros", "nans", "infs")} == {0}
    assert {value for key, value in row.items() if key not in ("numel", "zeros", "nans", "infs")} == {None}


def test_a_subclass_is_measured_without_its_functions_being_called():
    tensor = torch.tensor([1.0, 3.0]).as_subclass(Named)
    Named.calls = 0
    assert can_measure(tensor)
    assert statistics_of(tensor).mean == 2.0
    assert Named.calls == 0


def test_buffers_and_parameters_are_taken():
    assert can_measure(torch.nn.Parameter(torch.ones(2)))
    assert can_measure(torch.nn.Buffer(torch.ones(2)))


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_of_a_dtensor_this_ranks_part_is_measured(one_rank):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    tensor = distribute_tensor(torch.tensor([1.0, 3.0]), init_device_mesh("cpu", (1,)), [Shard(0)])
    assert can_measure(tensor)
    assert statistics_of(tensor.requires_grad_()).mean == 2.0
