"""Cutting a tensor of any strides into chunks, without copying it as a whole."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor


def in_memory_order(tensor: Tensor) -> tuple[Tensor, int]:
    """The elements as they lie in memory, where the order does not matter.

    Args:
        tensor: Any strided tensor, shape (...), outside autograd (detached).

    Returns:
        A view, one-dimensional where the elements lie without gaps (contiguous, transposed, channels last), and how
        many times each of its elements stands in ``tensor``: expanded dimensions (stride 0) are looked at once.
    """
    if tensor.is_contiguous():
        return tensor.view(-1), 1
    repeats = 1
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
            repeats *= size
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    tensor = tensor.permute(order)
    return (tensor.view(-1) if tensor.is_contiguous() else tensor), repeats


def chunks_of(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """Views of at most ``size`` elements each that make up the tensor, one-dimensional where it is."""
    if tensor.numel() <= size:
        yield tensor
    elif tensor.dim() == 1:
        yield from tensor.split(size)
    else:
        rows = max(1, size * tensor.shape[0] // tensor.numel())
        for part in tensor.split(rows):
            yield from chunks_of(part.squeeze(0) if rows == 1 else part, size)
