"""What stored dtypes mean to optimizers and to EMA: following states, and warnings before it is too late."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from mmengine.hooks import EMAHook
from mmengine.optim import OptimWrapperDict
from mmengine.runner import Runner
from torch import Tensor
from torch.optim import Optimizer

from dtype_hooks.core.dtypes import dtype_name
from dtype_hooks.core.storage import Stored

DIVIDING = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad")
"""Optimizers that divide by ``sqrt(v) + eps``: with parameters in float16 an eps of 1e-8 rounds to zero (each seen to
give NaN or -inf in torch 2.13 where ``v`` rounds to zero too; the fused kernels compute in float32)."""

SMALLEST_HALF = 2.0**-25
"""Half of float16's smallest subnormal: what is not above it rounds to zero."""


def optimizers_of(runner: Runner) -> list[Optimizer]:
    """The optimizers that have been built; none in a run that only validates."""
    wrapper = getattr(runner, "optim_wrapper", None)
    wrappers = wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]
    found = [getattr(each, "optimizer", None) for each in wrappers]
    return [optimizer for optimizer in found if isinstance(optimizer, Optimizer)]


def trained_parameters(runner: Runner) -> list[Tensor]:
    """Every parameter that an optimizer holds."""
    return [
        p for optimizer in optimizers_of(runner) for group in optimizer.param_groups for p in group["params"]
    ]


def mend_optimizer_states(runner: Runner) -> int:
    """Give states the dtype of their parameters again, by torch's own rule for loading; returns how many needed it."""
    mended = 0
    for optimizer in optimizers_of(runner):
        if any(_is_foreign(p, key, value) for p, key, value in _states(optimizer)):
            optimizer.load_state_dict(optimizer.state_dict())
            mended += 1
    return mended


def storage_warnings(runner: Runner, stored: list[Stored]) -> list[str]:
    """What will go wrong, silently, with these stored dtypes in this run; one sentence each, with what to do."""
    trained = {id(p) for p in trained_parameters(runner)}
    half = [s for s in stored if s.dtype is torch.float16 and id(s.tensor) in trained]
    checks = (_unscaled_half, _half_divided_by_zero, _standing_ema)
    return [text for check in checks if (text := check(runner, half, stored)) is not None]


def checkpoint_dtypes(checkpoint: dict[str, Any]) -> dict[str, torch.dtype]:
    """The dtypes of the floating weights in a checkpoint, by name."""
    weights = checkpoint.get("state_dict", {})
    return {
        name.removeprefix("module."): value.dtype
        for name, value in weights.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def rounding_of_checkpoint(dtypes: dict[str, torch.dtype], stored: list[Stored]) -> str | None:
    """Say so when a checkpoint holds stored tensors in a dtype whose values they cannot all take."""
    found = [(s, next((dtypes[name] for name in s.names if name in dtypes), s.dtype)) for s in stored]
    rounded = [(s, dtype) for s, dtype in found if not _holds_all_of(s.dtype, dtype)]
    if not rounded:
        return None
    first, dtype = rounded[0]
    return (
        f"DtypeOverrider: the checkpoint holds {len(rounded)} tensors ({first.names[0]!r}, ...) in {dtype_name(dtype)}, "
        f"stored here in {dtype_name(first.dtype)}: they and their optimizer states are rounded. Keep the checkpoint."
    )


def _holds_all_of(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether every value of ``other`` is one of ``dtype``; torch promotes no 8-bit ones, which fit into all of ours."""
    return other.itemsize == 1 or torch.promote_types(dtype, other) is dtype


def _states(optimizer: Optimizer) -> Iterator[tuple[Tensor, str, Any]]:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            yield parameter, key, value


def _is_foreign(parameter: Tensor, key: str, value: Any) -> bool:
    """A floating state in another dtype than its parameter; counters keep their own (torch leaves ``step`` alone)."""
    return (
        isinstance(value, Tensor)
        and key != "step"
        and value.is_floating_point()
        and value.dtype is not parameter.dtype
    )


def _unscaled_half(runner: Runner, half: list[Stored], stored: list[Stored]) -> str | None:
    if not half:
        return None
    return (
        f"DtypeOverrider: {len(half)} trained parameters ({half[0].names[0]!r}, ...) are stored in float16 and no loss "
        "scaler can serve them (torch's refuses float16 gradients): gradients below 6e-8 become zero. Store them in "
        "bfloat16, or keep them in float32 and let them compute in float16."
    )


def _half_divided_by_zero(runner: Runner, half: list[Stored], stored: list[Stored]) -> str | None:
    ids = {id(s.tensor) for s in half}
    for optimizer in optimizers_of(runner):
        for group in optimizer.param_groups:
            if _divides_by_zero(optimizer, group) and any(id(p) in ids for p in group["params"]):
                fused = "fused=True, or " if "fused" in group else ""
                return (
                    f"DtypeOverrider: {type(optimizer).__name__} with eps={group['eps']} on parameters stored in float16: "
                    f"eps rounds to zero there and weights become NaN. Set {fused}eps >= 1e-4, or store them in bfloat16."
                )
    return None


def _divides_by_zero(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    return (
        type(optimizer).__name__ in DIVIDING
        and not group.get("fused")
        and group.get("eps", 1.0) <= SMALLEST_HALF
    )


def _standing_ema(runner: Runner, half: list[Stored], stored: list[Stored]) -> str | None:
    narrow = [s for s in stored if s.is_parameter and s.dtype in (torch.float16, torch.bfloat16)]
    if not narrow or not _has_ema(runner.hooks):
        return None
    return (
        f"DtypeOverrider: EMAHook averages {len(narrow)} parameters stored in {dtype_name(narrow[0].dtype)} "
        f"({narrow[0].names[0]!r}, ...): its small steps round away and the average stands still. Store them in float32 "
        "and let them compute in the narrow dtype (override_parameters=False), or do without EMA."
    )


def _has_ema(hooks: Iterable[object]) -> bool:
    return any(isinstance(hook, EMAHook) for hook in hooks)
