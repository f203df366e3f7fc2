"""The reference: what an override must equal bit for bit, written with torch's own pieces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dtype_hooks.core.casting import cast_floating


def run_by_hand(
    module: nn.Module, dtype: torch.dtype, *args: Any, **kwargs: Any
) -> tuple[Any, dict[str, Tensor]]:
    """Call ``module`` with everything cast to ``dtype`` and autocast off; nothing in it is changed.

    Returns:
        The output, cast back to the dtype of the first floating tensor of the arguments, and the buffers after
        the call in their stored dtypes (elements that it left alone as they were). Gradients land on the module's own parameters.
    """
    stored = {**dict(module.named_parameters()), **{n: b.clone() for n, b in module.named_buffers()}}
    cast = {name: cast_floating(tensor, dtype) for name, tensor in stored.items()}
    given = next(
        a.dtype for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.is_floating_point()
    )
    with torch.autocast("cpu", enabled=False):
        output = functional_call(module, cast, cast_floating(args, dtype), cast_floating(kwargs, dtype))
    buffers = {}
    for name, buffer in module.named_buffers():
        written = cast[name] != buffer.to(cast[name].dtype)
        buffers[name] = torch.where(written, cast[name].to(buffer.dtype), buffer)
    return cast_floating(output, given), buffers


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Copies of the parameters' gradients, which are then dropped."""
    found = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    return found


def assert_same(left: Any, right: Any) -> None:
    """Equal bit for bit (NaN equals NaN), dtype and shape included, through dicts and sequences."""
    if isinstance(left, Tensor):
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (tuple, list)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right
