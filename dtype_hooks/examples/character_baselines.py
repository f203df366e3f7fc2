"""What counting alone achieves: the figures that a language model has to beat.

Both models are estimated on the training ids with add-one (Laplace) smoothing and scored on every validation id but
the first, which are the ids a language model predicts there. Bits per character are means of ``-log2 p``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def unigram_bpc(train: Tensor, validation: Tensor, vocab_size: int) -> float:
    """Bits per character of ``p(c) = (n(c) + 1) / (n + vocab_size)``.

    Args:
        train: int64 ids, shape ``(n,)``.
        validation: int64 ids, shape ``(m,)`` with ``m >= 2``.
        vocab_size: Number of ids there are; every id is below it.
    """
    counts = torch.bincount(train, minlength=vocab_size).double() + 1
    bits = -(counts / counts.sum()).log2()
    return bits[validation[1:]].mean().item()


def bigram_bpc(train: Tensor, validation: Tensor, vocab_size: int) -> float:
    """Bits per character of ``p(c | b) = (n(b, c) + 1) / (n(b) + vocab_size)``, ``b`` being the character before.

    Args:
        train: int64 ids, shape ``(n,)``.
        validation: int64 ids, shape ``(m,)`` with ``m >= 2``.
        vocab_size: Number of ids there are; every id is below it.
    """
    pairs = torch.bincount(train[:-1] * vocab_size + train[1:], minlength=vocab_size**2)
    counts = pairs.view(vocab_size, vocab_size).double() + 1
    bits = -(counts / counts.sum(dim=1, keepdim=True)).log2()
    return bits[validation[:-1], validation[1:]].mean().item()
