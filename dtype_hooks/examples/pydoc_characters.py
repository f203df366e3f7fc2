"""Windows of Python's documentation, as a data set for character language models."""

from __future__ import annotations

import torch
from mmengine.logging import print_log
from mmengine.registry import DATASETS
from torch import Tensor
from torch.utils.data import Dataset

from dtype_hooks.errors import ConfigError

from .character_baselines import bigram_bpc, unigram_bpc
from .pydoc_text import VOCABULARY, encode, split_text

IGNORED_TARGET = -100
"""Target of a position that is not scored: ``torch.nn.functional.cross_entropy``'s default ``ignore_index``."""


@DATASETS.register_module()
class PydocCharacters(Dataset):
    """Windows of consecutive characters with, for each, the character that follows.

    An item is ``dict(inputs=..., targets=...)``, both int64 of shape ``(context,)``; ``targets`` is ``inputs`` moved on
    by one. The last window of a split may be short; it is filled up with id 0 and :data:`IGNORED_TARGET`.
    With ``stride=context`` every character of the split but the first is a target exactly once.

    ``metainfo`` holds ``vocabulary`` and, for the validation split, ``unigram_bpc`` and ``bigram_bpc``, which are logged
    when the data set is built.

    Args:
        split: ``"train"`` or ``"validation"``; see :func:`~dtype_hooks.examples.pydoc_text.split_text`.
        context: Characters in a window, at least 1.
        stride: Characters from the start of a window to the start of the next, at least 1; ``None`` means ``context``.

    Raises:
        ConfigError: An argument out of its range.
    """

    def __init__(self, split: str, context: int = 128, stride: int | None = None) -> None:
        if split not in ("train", "validation"):
            raise ConfigError(
                f"PydocCharacters.split: got {split!r}; expected 'train' or 'validation'; choose one"
            )
        stride = context if stride is None else stride
        for name, value in (("context", context), ("stride", stride)):
            if value < 1:
                raise ConfigError(
                    f"PydocCharacters.{name}: got {value!r}; expected 1 or more; mend the config"
                )
        train, validation = map(encode, split_text())
        self.ids: Tensor = train if split == "train" else validation
        self.context = context
        self.stride = stride
        self.metainfo: dict[str, str | float] = {"vocabulary": VOCABULARY}
        if split == "validation":
            self._measure_baselines(train, validation)

    def __len__(self) -> int:
        targets = len(self.ids) - 1
        return max(0, (targets - self.context + self.stride - 1) // self.stride) + 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self.stride
        window = self.ids[start : start + self.context + 1]
        missing = self.context + 1 - len(window)
        return {
            "inputs": torch.nn.functional.pad(window[:-1], (0, missing)),
            "targets": torch.nn.functional.pad(window[1:], (0, missing), value=IGNORED_TARGET),
        }

    def _measure_baselines(self, train: Tensor, validation: Tensor) -> None:
        unigram = unigram_bpc(train, validation, len(VOCABULARY))
        bigram = bigram_bpc(train, validation, len(VOCABULARY))
        self.metainfo |= {"unigram_bpc": unigram, "bigram_bpc": bigram}
        print_log(
            f"Python's documentation: {len(train):,} characters to train on, {len(validation):,} to validate on. "
            f"Counting alone gives there {unigram:.3f} bits per character (unigram) and {bigram:.3f} (bigram), "
            "with add-one smoothing.",
            logger="current",
        )
