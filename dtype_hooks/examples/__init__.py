"""Models and data sets of the example configs, registered in mmengine's registries.

A config reaches them through ``custom_imports = dict(imports=['dtype_hooks', 'dtype_hooks.examples'],
allow_failed_imports=False)``. Nothing else in the package imports this room.
"""

from .char_gpt import CharGPT
from .character_baselines import bigram_bpc, unigram_bpc
from .digits_images import DigitsImages
from .digits_resnet import DigitsResNet
from .metrics import BitsPerCharacter, TopOneAccuracy
from .pydoc_characters import PydocCharacters
from .pydoc_text import VOCABULARY, decode, encode, split_text

__all__ = [
    "VOCABULARY",
    "BitsPerCharacter",
    "CharGPT",
    "DigitsImages",
    "DigitsResNet",
    "PydocCharacters",
    "TopOneAccuracy",
    "bigram_bpc",
    "decode",
    "encode",
    "split_text",
    "unigram_bpc",
]
