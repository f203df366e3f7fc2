"""The edges of number formats agree with torch's casts, bit by bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dtype_hooks.core.number_formats import DEFAULT_FORMATS, NUMBER_FORMATS, NumberFormat, resolve_formats
from dtype_hooks.errors import ConfigError

ALL = list(NUMBER_FORMATS.values())


def halves(dtype: torch.dtype) -> Tensor:
    """All 65,536 numbers of a 16-bit dtype as float64."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).double()


def bounds(each: NumberFormat) -> list[float]:
    return [each.zero_at, each.normal_from, each.overflow_at, each.smallest_normal, each.max]


def neighbours(dtype: torch.dtype) -> Tensor:
    """Every bound in the dtype, and what is next to it on both sides, as float64."""
    at = torch.tensor([bound for each in ALL for bound in bounds(each)], dtype=torch.float64).to(dtype)
    found = torch.cat([at, at.nextafter(at.new_tensor(0.0)), at.nextafter(at.new_tensor(math.inf))]).double()
    return torch.cat([found, -found])


def many_floats() -> Tensor:
    """A float32 for every upper half of the bits, and random lower halves."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32).repeat_interleave(8) << 16
    lower = torch.randint(
        0, 2**16, upper.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32
    )
    return (upper | lower).view(torch.float32).double()


SOURCES = {
    "all of float16": lambda: halves(torch.float16),
    "all of bfloat16": lambda: halves(torch.bfloat16),
    "bounds in float32": lambda: neighbours(torch.float32),
    "many of float32": many_floats,
}


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What torch makes of float32 numbers, as float64."""
    return x.float().to(dtype).double()


@pytest.fixture(params=SOURCES, scope="module")
def values(request) -> Tensor:
    x = SOURCES[request.param]()
    return x[x.isfinite()]


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.name)
def test_zero_and_subnormal_bounds_are_those_of_torchs_cast(each, values):
    becomes = cast(values, each.dtype).abs()
    magnitude = values.abs()
    assert torch.equal(magnitude <= each.zero_at, becomes == 0)
    normal = (becomes >= each.smallest_normal) | becomes.isnan()
    assert torch.equal(magnitude >= each.normal_from, normal)


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.name)
def test_overflow_bound_is_that_of_torchs_cast(each, values):
    overflows = [each.overflows(magnitude) for magnitude in values.abs().tolist()]
    becomes = cast(values, each.dtype)
    if each.name == "float8_e4m3fn":  # torch clamps or makes NaN, by version; the halfway point is arithmetic
        assert overflows == [rounds_beyond_448(x) for x in values.tolist()]
    else:
        assert overflows == becomes.isinf().tolist()


def rounds_beyond_448(x: float) -> bool:
    """Nearest multiple of 32 (the step of the top binade), ties to even, is beyond 448."""
    return round(abs(x) / 32) * 32 > 448


def test_bounds_are_the_published_ones():
    at = {each.name: (each.zero_at, each.overflow_at, each.overflow_inclusive) for each in DEFAULT_FORMATS}
    assert at == {
        "float16": (2**-25, 65520, True),
        "bfloat16": (2**-134, (2 - 2**-8) * 2**127, True),
        "float8_e4m3fn": (2**-10, 464, False),
        "float8_e5m2": (2**-17, 61440, True),
    }
    assert NUMBER_FORMATS["float8_e4m3fn"].max == 448  # OCP OFP8
    assert NUMBER_FORMATS["float16"].smallest_subnormal == 2**-24  # IEEE 754 binary16


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.name)
def test_a_tie_at_the_top_goes_to_the_even_neighbour(each):
    assert each.overflows(each.overflow_at) is (each.name != "float8_e4m3fn")
    assert each.overflows(math.nextafter(each.overflow_at, math.inf))
    assert not each.overflows(math.nextafter(each.overflow_at, 0))


def test_formats_are_asked_for_by_long_and_short_names_and_dtypes():
    found = resolve_formats(["fp16", "torch.bfloat16", torch.float8_e5m2, "float16"])
    assert [each.name for each in found] == ["float16", "bfloat16", "float8_e5m2"]
    assert resolve_formats("half") == resolve_formats(torch.float16)
    assert resolve_formats(None) is DEFAULT_FORMATS
    assert resolve_formats([]) == ()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            ["float8_e4m3"],
            "ScaleTracker.formats: got 'float8_e4m3'; expected any of float16, bfloat16, float32, float8_e4m3fn, "
            "float8_e5m2. Did you mean 'float8_e4m3fn'?",
        ),
        (
            [torch.int8],
            "ScaleTracker.formats: got torch.int8; expected any of float16, bfloat16, float32, float8_e4m3fn, "
            "float8_e5m2. Name some of them, such as 'float16'.",
        ),
        (3, "ScaleTracker.formats: got 3; expected a list of number formats. Write ['float16']."),
    ],
)
def test_another_format_is_an_error_that_says_what_to_write(asked, message):
    with pytest.raises(ConfigError) as error:
        resolve_formats(asked, where="ScaleTracker.formats")
    assert str(error.value) == message
