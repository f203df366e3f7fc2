"""The text of Python's own documentation, split into training and validation characters.

The source is ``pydoc_data.topics`` of the running interpreter, about 0.46 million characters in 79 topics (3.11).
Its wording changes from one Python version to the next, and figures with it.

The topics overlap: ``compound`` holds all of ``if`` and ``while``, ``specialnames`` all of ``customization``. A plain split
would put the same sentences on both sides: in 3.11, 16% of the validation split's 50-character windows would occur in the
training split as well. So each paragraph is kept only where it occurs first, then whole topics are held out.
What is left, 2%, is the ruled lines of tables and the first line of tracebacks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pydoc_data.topics import topics as PYDOC_TOPICS

import torch
from torch import Tensor

UNKNOWN = "\ufffd"
"""Stands for every character outside printable ASCII; 0.1% of the text, nearly all of it typographic quotes."""

VOCABULARY = UNKNOWN + "\n" + "".join(map(chr, range(0x20, 0x7F)))
"""The 97 characters a model sees, at their ids. Fixed, so that it tells nothing about the validation text."""

VALIDATION_FRACTION = 0.1


def split_text(
    topics: Mapping[str, str] = PYDOC_TOPICS, validation_fraction: float = VALIDATION_FRACTION
) -> tuple[str, str]:
    """Split topics into training and validation text that share no paragraph and no topic.

    Topics are taken in alphabetical order. The last ones, whole, are the validation text: as many as come nearest to
    ``validation_fraction`` of the characters.

    Args:
        topics: Topic names and their text; at least two with a paragraph of their own.
        validation_fraction: In (0, 1), of the characters that are left after repeated paragraphs went.

    Returns:
        ``(train, validation)``; joined in this order they are all that is left of the topics.
    """
    kept = list(_drop_repeated_paragraphs(topics).values())
    held_out = _nearest_tail([len(text) for text in kept], validation_fraction)
    return "".join(kept[:-held_out]), "".join(kept[-held_out:])


def encode(text: str) -> Tensor:
    """Ids of the characters of ``text`` in :data:`VOCABULARY`: int64, shape ``(len(text),)``; 0 is unknown."""
    ids = {character: i for i, character in enumerate(VOCABULARY)}
    return torch.tensor([ids.get(character, 0) for character in text], dtype=torch.int64)


def decode(ids: Tensor) -> str:
    """Text of a one-dimensional integer tensor of ids; id 0 becomes U+FFFD."""
    return "".join(VOCABULARY[i] for i in ids.tolist())


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a topic, which blank lines part, with their indentation."""
    return re.split(r"\n\s*\n", text.strip("\n"))


def paragraph_words(paragraph: str) -> str:
    """What two paragraphs have in common when they differ in case, wrapping, indentation or punctuation alone."""
    return " ".join(re.findall(r"\w+", paragraph.lower()))


def _drop_repeated_paragraphs(topics: Mapping[str, str]) -> dict[str, str]:
    """Topics in alphabetical order, each paragraph only where it occurs first; emptied topics are left out."""
    seen: set[str] = set()
    kept: dict[str, str] = {}
    for name in sorted(topics):
        fresh = []
        for paragraph in paragraphs(topics[name]):
            words = paragraph_words(paragraph)
            if words not in seen:
                seen.add(words)
                fresh.append(paragraph)
        if fresh:
            kept[name] = "".join(paragraph + "\n\n" for paragraph in fresh)
    return kept


def _nearest_tail(sizes: list[int], fraction: float) -> int:
    """How many of the last sizes, neither none nor all, add up to nearest ``fraction`` of the sum."""
    wanted = fraction * sum(sizes)
    return min(range(1, len(sizes)), key=lambda count: abs(sum(sizes[-count:]) - wanted))
