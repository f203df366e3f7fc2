"""Statistics of one tensor equal a naive float64 reference, whatever the dtype, the strides and the size."""

from __future__ import annotations

import json
import math
import pickle
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtype_hooks.core.number_formats import DEFAULT_FORMATS, NUMBER_FORMATS, resolve_formats
from dtype_hooks.errors import ConfigError
from dtype_hooks.scales import host_kernel, torch_kernel
from dtype_hooks.scales.statistics import TensorStatistics, Workspace, gather, measure

ALL = tuple(NUMBER_FORMATS.values())
NAN, INF = math.nan, math.inf


def reference(tensor: Tensor) -> dict[str, int | float | None]:
    """What ``as_row`` should say, element by element in float64."""
    x = tensor.detach().double().reshape(-1)
    x_finite = x[x.isfinite()]
    magnitude = x_finite.abs()
    nonzero = magnitude[magnitude > 0]
    unit = 2.0 ** math.frexp(magnitude.max().clamp(2.0**-1000, 2.0**1000))[1] if len(magnitude) else 1.0
    scaled = x_finite / unit
    count = len(scaled)
    row = {
        "numel": len(x),
        "zeros": int((magnitude == 0).sum()),
        "nans": int(x.isnan().sum()),
        "infs": int(x.isinf().sum()),
        "mean": float(scaled.mean()) * unit if count else None,
        "std": (float(scaled.std()) * unit if count > 1 else 0.0) if count else None,
        "rms": float(scaled.square().mean().sqrt()) * unit if count else None,
        "amax": float(magnitude.max()) if count else None,
        "amin": float(nonzero.min()) if len(nonzero) else None,
    }
    for each in ALL:
        flushed, subnormal = nonzero <= each.zero_at, nonzero < each.normal_from
        over = magnitude >= each.overflow_at if each.overflow_inclusive else magnitude > each.overflow_at
        row[f"{each.name}_underflow"] = float(flushed.double().mean()) if len(nonzero) else None
        row[f"{each.name}_subnormal"] = (
            float((subnormal & ~flushed).double().mean()) if len(nonzero) else None
        )
        row[f"{each.name}_overflow"] = float(over.double().mean()) if count else None
    return row


def assert_row(row: dict[str, int | float | None], expected: dict[str, int | float | None]) -> None:
    """Counts and extremes are equal, moments within 1e-6 of std and rms."""
    for key, right in expected.items():
        if key == "mean" and right is not None:
            assert row[key] == pytest.approx(right, abs=1e-6 * expected["rms"]), key
        elif key in ("std", "rms") and right is not None:
            # a constant's std in the reference is a rounding error of the reference
            assert row[key] == pytest.approx(right, rel=1e-6, abs=1e-14 * expected["rms"]), key
        elif key.endswith("flow") or key.endswith("subnormal"):
            assert row[key] == (None if right is None else pytest.approx(right, rel=1e-12)), key
        else:
            assert row[key] == right, key


def seeded(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def sprinkled(x: Tensor, value: float) -> Tensor:
    """Some of the elements replaced."""
    return x.masked_fill(seeded(*x.shape).roll(1) > 1, value)


def octaves(size: int) -> Tensor:
    """Numbers over all of float32's binades."""
    return seeded(size) * torch.exp2(torch.linspace(-149, 126, size, dtype=torch.float64)).float()


CASES: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: seeded(3000),
    "small gradients": lambda: seeded(3000) * 1e-6,
    "half zeros": lambda: seeded(3000).relu(),
    "all zeros": lambda: torch.zeros(7),
    "negative zeros": lambda: -torch.zeros(7),
    "with NaN": lambda: sprinkled(seeded(3000), NAN),
    "with Inf": lambda: sprinkled(seeded(3000), -INF),
    "with NaN, Inf and zeros": lambda: sprinkled(sprinkled(seeded(3000).relu(), NAN).flip(0), INF),
    "with NaN, far from zero": lambda: sprinkled(seeded(3000) + 100, NAN),
    "only NaN": lambda: torch.full((5,), NAN),
    "only Inf": lambda: torch.full((5,), INF),
    "NaN but for zeros": lambda: torch.tensor([NAN, 0.0, 0.0]),
    "every binade": lambda: octaves(5000),
    "near 1000": lambda: 1000 + 1e-3 * seeded(3000).double(),
    "near 1": lambda: 1 + 1e-2 * seeded(3000).double(),
    "constant": lambda: torch.full((3000,), 0.1),
    "ones": lambda: torch.ones(64),
    "alike but for the sign": lambda: 0.1 * seeded(3000).sign(),
    "squares overflow float32": lambda: seeded(3000) * 1e30,
    "squares underflow float32": lambda: seeded(3000) * 1e-30,
    "subnormal in float32": lambda: seeded(3000) * 1e-41,
    "one element": lambda: torch.tensor([-3.0]),
    "zero dimensions": lambda: torch.tensor(2.5),
    "two elements": lambda: torch.tensor([1.0, -2.0]),
    "empty": lambda: torch.empty(0, 3),
    "transposed": lambda: seeded(30, 50).t(),
    "channels last": lambda: seeded(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "with gaps": lambda: seeded(20, 30, 9)[:, ::2, 1::3],
    "gaps and transposed": lambda: seeded(20, 30)[:, ::3].t(),
    "expanded": lambda: seeded(5, 1, 3).expand(5, 7, 3),
    "expanded from one": lambda: torch.tensor(0.3).expand(4, 6),
    "overlapping": lambda: seeded(100).unfold(0, 10, 3),
    "more than a chunk": lambda: seeded(3, 70_001),
    "chunks with zeros and NaN": lambda: sprinkled(seeded(300_000).relu(), NAN),
    "chunks near 1": lambda: 1 + 0.1 * seeded(300_000),
    "chunks alike but for the sign": lambda: 0.1 * seeded(300_000).sign(),
    "chunks of every binade": lambda: octaves(300_000),
    "chunks over and over": lambda: sprinkled(seeded(300_000), 0) * 10 ** (5 * seeded(300_000)),
    "a chunk of zeros, then not": lambda: torch.cat([torch.zeros(140_000), seeded(140_000)]),
    "chunks with gaps": lambda: seeded(400, 3, 300)[:, 1:, ::2],
    "chunks with gaps in one row": lambda: seeded(1, 300_000)[:, ::2],
    "chunks transposed": lambda: seeded(300, 700).t(),
}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(params=["numpy", "torch"])
def workspace(request) -> Workspace:
    """Measures through numpy, or as on a device."""
    found = Workspace()
    if request.param == "torch":
        found.memory = None
    return found


def statistics_of(tensor: Tensor, workspace: Workspace | None = None, **keywords) -> TensorStatistics:
    return gather([measure(tensor, ALL, workspace=workspace, **keywords)])[0]


@pytest.mark.parametrize("case", CASES)
def test_statistics_are_those_of_a_float64_reference(case, workspace):
    slow = case.startswith("chunks") and workspace.memory is None
    for dtype in DTYPES[: 1 if slow else None]:
        tensor = CASES[case]().to(dtype)
        expected = reference(tensor)
        assert_row(statistics_of(tensor, workspace).as_row(), expected)
        row = statistics_of(tensor, workspace, only_std=True).as_row()
        assert list(row) == ["numel", "nans", "infs", "mean", "std", "rms"]
        assert_row(row, {key: expected[key] for key in row})


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1000.1, 1e-30])
def test_a_constant_is_its_own_mean_without_deviation(value):
    for size in (100, 5000):
        tensor = torch.full((size,), value)
        found = statistics_of(tensor)
        assert (found.mean, found.std) == (tensor[0].item(), 0.0)


@pytest.mark.parametrize("scale", [1e200, 1e-200, 1e307, 1e-310])
def test_float64_keeps_its_range(scale, workspace):
    tensor = seeded(3000).double() * scale
    assert_row(statistics_of(tensor, workspace).as_row(), reference(tensor))


def test_float64_bounds_are_compared_in_float64(workspace):
    for each in ALL:
        at = torch.tensor(each.zero_at, dtype=torch.float64)
        above = at.nextafter(torch.tensor(1.0, dtype=torch.float64))
        assert statistics_of(torch.stack([at, above]), workspace).fractions(each.name).underflow == 0.5


@pytest.mark.parametrize("size", [65_536, 2048, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_pattern_is_counted_as_torch_casts_it(dtype, size, workspace):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    for part in [every] if size == 65_536 else every.split(size)[:: max(1, 300 // size)]:
        assert_counts_are_those_of_casts(part, workspace)


def test_float32_bounds_and_their_neighbours_are_counted_as_torch_casts_them(workspace):
    at = torch.tensor(
        [b for e in ALL for b in (e.zero_at, e.normal_from, e.overflow_at)], dtype=torch.float64
    )
    for value in at.float():
        around = torch.stack([value.nextafter(torch.tensor(0.0)), value, value.nextafter(torch.tensor(INF))])
        for part in (*around, around, -around):
            assert_counts_are_those_of_casts(part, workspace)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds_and_their_neighbours_are_told_apart_among_many_values(dtype, workspace):
    at = torch.tensor([b for e in ALL for b in (e.zero_at, e.normal_from, e.overflow_at)], dtype=dtype)
    around = torch.cat([at, at.nextafter(at * 0), at.nextafter(at * 2)])
    for rest in (torch.zeros(9000), torch.ones(9000), seeded(9000).relu()):
        tensor = torch.cat([rest.to(dtype), around[around.isfinite()], -around])
        assert_row(statistics_of(tensor, workspace).as_row(), reference(tensor))


def assert_counts_are_those_of_casts(part: Tensor, workspace: Workspace) -> None:
    found = statistics_of(part, workspace)
    finite = part.reshape(-1)[part.reshape(-1).isfinite()].float()
    assert (found.numel, found.finite, found.zeros) == (part.numel(), len(finite), int((finite == 0).sum()))
    for each in ALL:
        becomes = finite.to(each.dtype).float().abs()
        counts = found.formats[each.name]
        assert counts.underflow == int(((becomes == 0) & (finite != 0)).sum())
        assert counts.subnormal == int(((becomes > 0) & (becomes < each.smallest_normal)).sum())
        if each.name != "float8_e4m3fn":
            assert counts.overflow == int(becomes.isinf().sum())
        else:  # torch clamps or makes NaN, by version: the halfway point to the number above 448 is 464
            assert counts.overflow == int((finite.abs() > 464).sum())


def test_flushed_subnormals_are_still_told_from_zeros():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        found = statistics_of(torch.tensor([1, 2**20, 2**22, 0], dtype=torch.int32).view(torch.float32))
        many = statistics_of(torch.full((140_000,), 2**20, dtype=torch.int32).view(torch.float32))
    finally:
        torch.set_flush_denormal(False)
    assert (found.zeros, found.amin) == (1, 2**-149)
    assert found.formats["bfloat16"] == (1, 2, 0)
    assert many.formats["bfloat16"] == (0, 140_000, 0)


def test_second_moments_that_fp16_would_lose_are_counted(workspace):
    # exp_avg_sq of Adam at 1e-8: gone in float16, kept in bfloat16; true zeros are no underflow
    row = statistics_of(torch.tensor([1e-8, 1.2e-8, 0.0, 0.0]), workspace).as_row()
    assert (row["float16_underflow"], row["bfloat16_underflow"], row["zeros"]) == (1.0, 0.0, 2)


def test_what_overflowed_already_is_no_overflow_to_come(workspace):
    row = statistics_of(torch.tensor([INF, NAN, 1e5, 1.0]), workspace).as_row()
    assert (row["float16_overflow"], row["infs"], row["nans"]) == (0.5, 1, 1)


def test_rows_are_json_even_where_float64_ends(workspace):
    tensor = torch.tensor([1.7e308, -1.7e308], dtype=torch.float64)
    row = statistics_of(tensor, workspace).as_row()
    assert row["std"] is None  # 2.4e308
    assert row["amax"] == 1.7e308
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_no_formats_leave_no_columns(workspace):
    row = gather([measure(seeded(10), resolve_formats([]), workspace=workspace)])[0].as_row()
    assert list(row) == ["numel", "zeros", "nans", "infs", "mean", "std", "rms", "amax", "amin"]


def parts_of(tensor: Tensor, workspace: Workspace | None = None, **keywords) -> list[TensorStatistics]:
    return gather(
        [measure(part, ALL, workspace=workspace, **keywords) for part in tensor.split([0, 1, 999, 2000])]
    )


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_merged_parts_equal_the_whole(scale, workspace):
    tensor = (sprinkled(sprinkled(seeded(3000).relu(), NAN), INF) + 2) * scale
    first, *others = parts_of(tensor, workspace)
    for other in others:
        first = first.merge(pickle.loads(pickle.dumps(other)))
    assert first.formats == statistics_of(tensor, workspace).formats
    assert_row(first.as_row(), reference(tensor))


def test_merging_knows_no_order():
    a, b, c, d = parts_of(seeded(3000) + 5)
    assert a.merge(b).merge(c.merge(d)).as_row() == pytest.approx(d.merge(c).merge(b.merge(a)).as_row())


def test_nothing_merges_with_something():
    nothing, something = statistics_of(torch.empty(0)), statistics_of(seeded(10))
    assert nothing.merge(something) == something == something.merge(nothing)
    assert nothing.merge(nothing) == nothing


def test_std_alone_merges():
    tensor = seeded(3000) + 3
    first, *others = parts_of(tensor, only_std=True)
    for other in others:
        first = first.merge(other)
    assert first.as_row()["std"] == pytest.approx(reference(tensor)["std"], rel=1e-6)


def test_what_was_measured_differently_does_not_merge():
    everything, std = statistics_of(seeded(10)), statistics_of(seeded(10), only_std=True)
    other = gather([measure(seeded(10), DEFAULT_FORMATS[:1])])[0]
    with pytest.raises(ConfigError) as error:
        everything.merge(std)
    assert str(error.value) == (
        "TensorStatistics.merge: got std only; expected statistics with float16, bfloat16, float32, "
        "float8_e4m3fn, float8_e5m2. Measure both alike."
    )
    with pytest.raises(
        ConfigError, match="got statistics with float16; expected statistics with float16, bfl"
    ):
        everything.merge(other)


def test_scaled_gradients_keep_the_counts_of_what_was_there():
    found = statistics_of(torch.tensor([1e-7, -3e-7, 0.0]))
    half = found.scaled(-0.5)
    assert (half.mean, half.std, half.rms) == (-0.5 * found.mean, 0.5 * found.std, 0.5 * found.rms)
    assert (half.amax, half.amin) == (found.amax * 0.5, found.amin * 0.5)
    assert (half.formats, half.zeros) == (found.formats, found.zeros)
    assert statistics_of(torch.empty(0)).scaled(2.0) == statistics_of(torch.empty(0))


def test_measuring_leaves_no_trace_on_the_tensor(workspace):
    leaf = seeded(140_000).requires_grad_()
    for tensor in (leaf, leaf * 2, torch.nn.Parameter(seeded(5)), (leaf * 2).bfloat16()):
        version, node, bits = tensor._version, tensor.grad_fn, tensor.detach().clone()
        state = torch.get_rng_state()
        found = statistics_of(tensor, workspace)
        assert (tensor._version, tensor.grad_fn) == (version, node)
        assert torch.equal(tensor.detach(), bits)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.is_grad_enabled()
        assert found.numel == tensor.numel()


def test_a_measured_tensor_can_still_be_resized(workspace):
    # Tensor.numpy() would forbid it, which breaks who frees memory by hand, as FSDP does
    for dtype in DTYPES:
        tensor = seeded(100).to(dtype)
        statistics_of(tensor, workspace)
        tensor.untyped_storage().resize_(0)


def test_a_measurement_is_of_the_values_at_that_time(workspace):
    tensor = seeded(100)
    found = measure(tensor, ALL, workspace=workspace)
    expected = reference(tensor)
    tensor.zero_()
    assert_row(gather([found])[0].as_row(), expected)


def test_inference_tensors_and_one_workspace_in_and_out_of_inference_mode(workspace):
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2):
        for size in (10, 140_000):
            with torch.inference_mode():
                inside = seeded(size).to(dtype)
                found = statistics_of(inside, workspace)
            outside = seeded(size).to(dtype)
            assert found == statistics_of(outside, workspace) == statistics_of(inside, workspace)


def test_negated_views_are_measured_as_what_they_show(workspace):
    imaginary = torch.view_as_complex(seeded(50, 2)).conj().imag
    assert imaginary.is_neg()
    assert_row(statistics_of(imaginary, workspace).as_row(), reference(imaginary.clone()))
    assert statistics_of(imaginary[:1], workspace).mean == -statistics_of(imaginary[:1].neg(), workspace).mean


def test_autocast_changes_nothing(workspace):
    expected = statistics_of(seeded(5000), workspace)
    with torch.autocast("cpu", torch.bfloat16):
        assert statistics_of(seeded(5000), workspace) == expected


def test_strict_numpy_settings_are_not_tripped_over():
    with np.errstate(all="raise"):
        for case in CASES.values():
            statistics_of(case())
            statistics_of(case(), only_std=True)


def test_threads_share_a_workspace():
    workspace = Workspace()
    tensors = [seeded(100_000).bfloat16() * (i + 1) for i in range(8)]
    expected = [reference(tensor) for tensor in tensors]
    found: dict[int, dict] = {}
    memories = [workspace.memory]

    def work(index: int) -> None:
        memories.append(workspace.memory)
        for _ in range(5):
            found[index] = statistics_of(tensors[index], workspace).as_row()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(memory) for memory in memories}) == 9
    for index, right in enumerate(expected):
        assert_row(found[index], right)


def test_one_workspace_serves_different_formats(workspace):
    for formats in (ALL, DEFAULT_FORMATS[:1], DEFAULT_FORMATS[1:], ALL):
        found = gather([measure(seeded(3000), formats, workspace=workspace)])[0]
        assert found.formats == {
            each.name: statistics_of(seeded(3000)).formats[each.name] for each in formats
        }


def test_what_does_not_exist_is_none(workspace):
    zeros, lost = statistics_of(torch.zeros(3), workspace), statistics_of(torch.tensor([NAN]), workspace)
    assert (zeros.amax, zeros.amin, zeros.std) == (0.0, None, 0.0)
    assert (lost.amax, lost.amin, lost.std, lost.rms) == (None, None, None, None)


class Operations(TorchDispatchMode):
    """Which operations run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket._qualified_op_name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def test_the_device_kernel_never_waits_for_a_number():
    workspace = Workspace()
    workspace.memory = None
    with Operations() as operations:
        for dtype in DTYPES:
            for only_std in (False, True):
                measure(CASES["with NaN, Inf and zeros"]().to(dtype), ALL, only_std, workspace)
    waiting = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "bincount", "unique"}
    assert "le" in operations.names
    assert not waiting & operations.names


def test_device_chunks_make_up_the_whole(monkeypatch, workspace):
    monkeypatch.setattr(torch_kernel, "CHUNK", 1000)
    monkeypatch.setattr(host_kernel, "CHUNK", 3000)
    for case in ("with NaN", "gaps and transposed", "expanded", "more than a chunk", "all zeros", "only NaN"):
        tensor = CASES[case]()
        assert_row(statistics_of(tensor, workspace).as_row(), reference(tensor))


def test_gather_keeps_the_order_of_mixed_measurements():
    on_host, as_device = Workspace(), Workspace()
    as_device.memory = None
    tensors = [seeded(size) + size for size in (3, 0, 5, 140_000, 1)]
    measured = [
        measure(x, ALL, only_std=bool(index % 2), workspace=(on_host, as_device)[index % 3 > 0])
        for index, x in enumerate(tensors)
    ]
    assert [found.numel for found in gather(measured)] == [3, 0, 5, 140_000, 1]
    assert [found.mean for found in gather(measured)] == pytest.approx(
        [float(x.double().mean()) if len(x) else 0.0 for x in tensors]
    )
    assert gather([]) == []
