"""Names of dtypes."""

from __future__ import annotations

import pytest
import torch

from dtype_hooks import DTYPES, ConfigError, resolve_dtype
from dtype_hooks.core.dtypes import dtype_name

FOUR = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("name", DTYPES)
def test_every_name_serves_with_and_without_torch_before_it(name):
    assert resolve_dtype(name) is DTYPES[name]
    assert resolve_dtype(f"torch.{name}") is DTYPES[name]


@pytest.mark.parametrize("dtype", FOUR)
def test_a_dtype_means_itself_and_its_name_means_it(dtype):
    assert resolve_dtype(dtype) is dtype
    assert resolve_dtype(dtype_name(dtype)) is dtype
    assert resolve_dtype(str(dtype)) is dtype


def test_the_table_is_public_and_read_only():
    assert set(DTYPES.values()) == set(FOUR)
    with pytest.raises(TypeError):
        DTYPES["tf32"] = torch.float32


@pytest.mark.parametrize(
    "value",
    [
        "fp61", "int8", "float8_e4m3fn", "tf32", "", "torch.", "torch", "FP32", " float32", "16", "fp16-mixed",
        16, None, True, torch.int64, torch.float8_e4m3fn, torch.complex64, ["float32"], b"float32", float,
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_the_four_names(value):
    with pytest.raises(ConfigError) as error:
        resolve_dtype(value, "DtypeOverrider.dtype")
    message = str(error.value)
    assert message.startswith(f"DtypeOverrider.dtype: got {value!r}; expected one of ")
    assert "bfloat16, float16, float32, float64" in message


def test_a_slip_gets_the_nearest_name():
    with pytest.raises(ConfigError, match="Did you mean 'float32'"):
        resolve_dtype("flaot32")
    with pytest.raises(ConfigError, match="Did you mean 'bfloat16'"):
        resolve_dtype("torch.bfloat61")
