"""Names of modules are the bare model's, however it is wrapped."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrizations

from dtype_hooks import OverrideError, override_dtype
from dtype_hooks.core.naming import bare_module, class_name, named_bare_modules, wrapped_child


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.backbone(x))


PLAIN = ["", "backbone", "backbone.0", "backbone.1", "head"]


def names(model):
    return [name for name, _ in named_bare_modules(model)]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    file = tmp_path_factory.mktemp("ddp") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: m,
        DistributedDataParallel,
        compiled,
        checkpoint_wrapper,
        offload_wrapper,
        DataParallel,
        lambda m: compiled(DistributedDataParallel(m)),
        lambda m: DistributedDataParallel(compiled(m)),
        lambda m: compiled(checkpoint_wrapper(DistributedDataParallel(checkpoint_wrapper(compiled(m))))),
    ],
    ids=[
        "plain", "ddp", "compile", "checkpoint", "offload", "dp", "compile_ddp", "ddp_compile", "five_deep"
    ],
)  # fmt: skip
def test_wrappers_leave_no_trace_in_names(wrap, one_rank):
    """C7, C8."""
    model = Net()
    wrapped = wrap(model)
    assert names(wrapped) == PLAIN
    assert bare_module(wrapped) is model
    with override_dtype(wrapped, ["^backbone"], dtype="float64") as handle:
        assert [record.names for record in handle.records] == [
            ("backbone",),
            ("backbone.0",),
            ("backbone.1",),
        ]
        assert all(isinstance(name, str) and "module" not in name for r in handle.records for name in r.names)


def test_wrappers_inside_the_model_leave_no_trace(one_rank):
    model = Net()
    model.backbone = checkpoint_wrapper(compiled(model.backbone))
    model.backbone._checkpoint_wrapped_module._orig_mod[1] = compiled(checkpoint_wrapper(nn.LayerNorm(2)))
    model.head = DistributedDataParallel(model.head)
    assert names(model) == PLAIN
    assert all(wrapped_child(module) is None for _, module in named_bare_modules(model))


def test_a_module_of_the_users_own_called_module_keeps_its_name():
    model = nn.Sequential()
    model.module = nn.Linear(2, 2)
    assert names(model) == ["", "module"]


@pytest.mark.parametrize("name", ["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"])
def test_a_users_own_module_with_a_wrappers_child_name_is_no_wrapper(name):
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.extra = nn.Linear(2, 2)
            self.add_module(name, nn.Linear(2, 2))

    model = nn.Sequential(Mine())
    assert names(model) == ["", "0", "0.extra", f"0.{name}"]


def test_a_shared_module_comes_under_each_of_its_names():
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    assert names(model) == ["", "a", "b", "b.0"]


def test_a_child_that_holds_its_parent_ends_the_walk():
    model = Net()
    model.head.add_module("owner", model)
    assert names(model) == PLAIN


def test_empty_places_are_passed_over():
    model = Net()
    model.backbone[0] = None
    assert names(model) == ["", "backbone", "backbone.1", "head"]


def test_the_class_name_is_the_one_the_user_wrote():
    class ParametrizedByHand(nn.Linear):
        pass

    assert class_name(nn.Linear(2, 2)) == "Linear"
    assert class_name(parametrizations.weight_norm(nn.Linear(2, 2))) == "Linear"
    assert class_name(parametrizations.spectral_norm(ParametrizedByHand(2, 2))) == "ParametrizedByHand"
    assert class_name(ParametrizedByHand(2, 2)) == "ParametrizedByHand"


def test_fully_sharded_modules_keep_their_names(one_rank):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    model = Net()
    fsdp.fully_shard(model.backbone[0], mesh=dist.init_device_mesh("cpu", (1,)))
    fsdp.fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    assert names(model) == PLAIN
    assert class_name(model) == "Net"
    assert class_name(model.backbone[0]) == "Linear"


def test_replicas_on_several_devices_are_refused():
    model = DataParallel(Net())
    model.device_ids = [0, 1]
    with pytest.raises(OverrideError, match=r"DataParallel over devices \[0, 1\].*DistributedDataParallel"):
        override_dtype(model, ["head"])
