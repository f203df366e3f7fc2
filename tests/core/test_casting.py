"""Casting reaches into containers, keeps their kinds, and leaves alone what is not floating."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, UserList, defaultdict, namedtuple
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dtype_hooks.core.casting import cast_floating, map_tensors, tensors_in

BF16, F32 = torch.bfloat16, torch.float32
Pair = namedtuple("Pair", "a b")


class Checked(NamedTuple("Checked", [("a", Tensor), ("n", int)])):
    """A named tuple whose constructor wants other arguments than its fields."""

    __slots__ = ()

    def __new__(cls, a):
        return super().__new__(cls, a, 1)


class TaggedList(list):
    def __init__(self, tag, items=()):
        super().__init__(items)
        self.tag = tag


class TaggedTuple(tuple):
    def __new__(cls, tag, items=()):
        self = super().__new__(cls, items)
        self.tag = tag
        return self


class SlottedTuple(tuple):
    __slots__ = ()


class TaggedDict(dict):
    def __init__(self, tag, **items):
        super().__init__(**items)
        self.tag = tag


class TaggedDefaultDict(defaultdict):
    """Its ``copy`` drops attributes, as defaultdict's does."""


@dataclasses.dataclass
class Plain:
    a: Tensor
    n: int = 0
    made: int = 0

    def __post_init__(self):
        self.made += 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Tensor
    rest: list = dataclasses.field(default_factory=list)
    hidden: Tensor | None = dataclasses.field(default=None, init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: Tensor
    n: int = 0


def x(dtype=BF16):
    return torch.ones(2, dtype=dtype)


def same(new, old):
    """Same type, and float32 where ``old`` was bf16."""
    assert type(new) is type(old)
    assert [t.dtype for t in tensors_in(new)] == [
        F32 if t.dtype is BF16 else t.dtype for t in tensors_in(old)
    ]
    return new


@pytest.mark.parametrize(
    "value",
    [
        (x(), 1, "s", None), [x(), [x(), (x(),)]], {"a": x(), "b": {"c": (x(), x(torch.int64))}}, Pair(x(), [x()]),
        OrderedDict(b=x(), a=[x()]), (), [], {}, ({"a": Pair(x(), None)},), torch.max(torch.ones(2, 2).bfloat16(), 0),
        {1: x(), (2, 3): x()}, Plain(x()), Frozen(x(), [x()]), Slotted(x(), 3), x(), Checked(x()), SlottedTuple([x()]),
    ],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_containers_keep_their_kind_and_their_floats_are_cast(value):
    new = same(cast_floating(value, F32), value)
    assert [t.shape for t in tensors_in(new)] == [t.shape for t in tensors_in(value)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128])
def test_what_is_not_floating_stays_the_same_object(dtype):
    value = x(dtype)
    assert cast_floating(value, F32) is value
    assert cast_floating([value], F32)[0] is value


@pytest.mark.parametrize(
    "value",
    [
        [x(F32)],
        (x(F32), 1),
        {"a": x(F32)},
        Pair(x(F32), 0),
        Plain(x(F32)),
        OrderedDict(a=x(F32)),
        3,
        "s",
        None,
    ],
)
def test_a_value_in_which_nothing_changes_is_returned_itself(value):
    assert cast_floating(value, F32) is value


def test_the_given_container_is_never_written_to():
    inner = [x()]
    value = {"a": inner, "b": Plain(x())}
    cast_floating(value, F32)
    assert value["a"] is inner
    assert inner[0].dtype is BF16
    assert value["b"].a.dtype is BF16


def test_defaultdict_keeps_its_factory_and_order():
    new = same(cast_floating(defaultdict(list, b=x(), a=x()), F32), defaultdict(list, b=x(), a=x()))
    assert list(new) == ["b", "a"]
    assert new["missing"] == []


@pytest.mark.parametrize(
    "value",
    [TaggedList("t", [x()]), TaggedTuple("t", [x()]), TaggedDict("t", a=x())],
    ids=lambda v: type(v).__name__,
)
def test_subclasses_with_constructors_and_attributes_of_their_own_survive(value):
    assert same(cast_floating(value, F32), value).tag == "t"


def test_a_subclass_of_defaultdict_survives():
    value = TaggedDefaultDict(list, a=x())
    new = same(cast_floating(value, F32), value)
    assert new.default_factory is list


def test_a_dataclass_is_not_initialised_a_second_time():
    new = same(cast_floating(Plain(x(), n=3), F32), Plain(x()))
    assert (new.n, new.made) == (3, 1)


def test_fields_that_init_does_not_take_are_kept():
    value = Frozen(x())
    object.__setattr__(value, "hidden", x())
    assert cast_floating(value, F32).hidden.dtype is F32


def test_a_dataclass_field_that_was_deleted_is_passed_over():
    value = Plain(x())
    del value.n
    assert cast_floating(value, F32).a.dtype is F32


def test_classes_and_unknown_objects_are_left_alone():
    items = UserList([x()])
    assert cast_floating(Plain, F32) is Plain
    assert cast_floating(items, F32) is items
    assert cast_floating(counter := Counter("aab"), F32) is counter
    size = torch.Size([1, 2])
    assert cast_floating(size, F32) is size


def test_outputs_of_transformers_keep_attributes_keys_and_missing_fields():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.BaseModelOutputWithPast(
        last_hidden_state=x(), hidden_states=(x(), x(F32)), attentions=None
    )
    new = same(cast_floating(value, F32), value)
    assert new.last_hidden_state is new["last_hidden_state"] is new[0]
    assert list(new.keys()) == ["last_hidden_state", "hidden_states"]
    assert new.attentions is None
    assert isinstance(new.hidden_states, tuple)


def test_packed_sequences_are_cast():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2).bfloat16(), torch.ones(1, 2).bfloat16()])
    new = cast_floating(packed, F32)
    assert type(new) is type(packed)
    assert new.data.dtype is F32
    assert torch.equal(new.batch_sizes, packed.batch_sizes)


def test_tensors_are_visited_in_the_order_in_which_they_are_mapped():
    value = {"a": [x(), Pair(x(), x())], "b": Frozen(x(), [x()]), "c": x()}
    visited: list[Tensor] = []
    map_tensors(lambda t: visited.append(t) or t, value)
    assert [id(t) for t in visited] == [id(t) for t in tensors_in(value)]


def test_gradients_flow_through_the_cast():
    a = torch.ones(2, requires_grad=True)
    cast_floating({"a": (a,)}, BF16)["a"][0].float().sum().backward()
    assert torch.equal(a.grad, torch.ones(2))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_are_cast_and_stay_sparse(layout):
    value = torch.eye(3).to_sparse(layout=layout)
    new = cast_floating(value, torch.float64)
    assert (new.layout, new.dtype) == (layout, torch.float64)


def test_eight_bit_floats_are_cast_too():
    value = torch.ones(2).to(torch.float8_e4m3fn)
    assert torch.equal(cast_floating(value, F32), torch.ones(2))
