"""scikit-learn's handwritten digits as a data set for mmengine."""

from __future__ import annotations

import torch
from mmengine.registry import DATASETS
from torch import Tensor
from torch.utils.data import Dataset

from dtype_hooks.errors import ConfigError, MissingDependencyError

SPLITS = {"train": slice(0, 1257), "validation": slice(1257, 1437), "test": slice(1437, 1797)}
"""Consecutive parts of the 1,797 images: 70%, 10% and 20%. Nothing is drawn, so they are the same everywhere."""

MAX_GREY = 16
"""A pixel of an 8x8 image counts the set pixels of a 4x4 field (UCI optical recognition of handwritten digits)."""


@DATASETS.register_module()
class DigitsImages(Dataset):
    """One part of ``sklearn.datasets.load_digits``: real 8x8 images of ten digits.

    An item is ``dict(inputs=..., targets=...)``: float32 of shape ``(1, 8, 8)`` in [0, 1], and an int in [0, 9].
    ``metainfo`` holds ``classes``.

    Args:
        split: ``"train"`` (1,257 images), ``"validation"`` (180) or ``"test"`` (360).

    Raises:
        ConfigError: ``split`` is anything else.
        MissingDependencyError: scikit-learn is not installed.
    """

    def __init__(self, split: str) -> None:
        if split not in SPLITS:
            raise ConfigError(
                f"DigitsImages.split: got {split!r}; expected one of {', '.join(SPLITS)}; choose one"
            )
        images, targets = _load_digits()
        self.inputs = images[SPLITS[split]]
        self.targets = targets[SPLITS[split]]
        self.metainfo = {"classes": tuple(map(str, range(10)))}

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        return {"inputs": self.inputs[index], "targets": self.targets[index]}


def _load_digits() -> tuple[Tensor, list[int]]:
    """All images, float32 of shape ``(1797, 1, 8, 8)`` in [0, 1], and their digits."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependencyError(
            "DigitsImages: got no module 'sklearn'; expected scikit-learn, which brings the images; "
            "pip install 'dtype-hooks[examples]'"
        ) from error
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / MAX_GREY
    return images, digits.target.tolist()
