from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch

from dtype_hooks.errors import ConfigError
from dtype_hooks.examples import (
    VOCABULARY,
    PydocCharacters,
    bigram_bpc,
    decode,
    encode,
    split_text,
    unigram_bpc,
)
from dtype_hooks.examples.pydoc_text import UNKNOWN, paragraph_words, paragraphs


def windows_of(text: str, length: int) -> set[str]:
    return {text[i : i + length] for i in range(len(text) - length + 1)}


def test_no_validation_paragraph_occurs_in_the_training_text():
    train, validation = split_text()

    in_both = set(map(paragraph_words, paragraphs(train))) & set(map(paragraph_words, paragraphs(validation)))

    assert in_both == set()


def test_few_long_windows_of_the_validation_text_occur_in_the_training_text():
    train, validation = split_text()
    seen = windows_of(train, 50)

    repeated = sum(validation[i : i + 50] in seen for i in range(len(validation) - 49))

    # 2.1% in Python 3.11; 16% without dropping repeated paragraphs.
    assert repeated / len(validation) < 0.05


@pytest.mark.parametrize(
    ("fraction", "held_out"), [(0.001, 1), (0.05, 1), (0.1, 2), (0.15, 2), (0.3, 3), (0.999, 3)]
)
def test_validation_text_is_the_last_topics_nearest_to_the_fraction(fraction, held_out):
    topics = {"b": "bbb\n\nmiddle", "a": "aaa\n" * 10, "c": "cc", "d": "dd"}
    texts = ["aaa\n" * 9 + "aaa\n\n", "bbb\n\nmiddle\n\n", "cc\n\n", "dd\n\n"]  # 42, 13, 4 and 4 characters

    train, validation = split_text(topics, validation_fraction=fraction)

    assert train == "".join(texts[:-held_out])
    assert validation == "".join(texts[-held_out:])


def test_paragraph_repeated_with_other_wrapping_is_kept_where_it_occurs_first():
    topics = {"a": "One two\nthree.\n\nMore", "b": "   one\n   two three\n\nOther", "c": "more"}

    assert "".join(split_text(topics)) == "One two\nthree.\n\nMore\n\nOther\n\n"


def test_validation_text_is_about_a_tenth_of_a_large_text():
    train, validation = split_text()

    assert 0.08 < len(validation) / (len(train) + len(validation)) < 0.12
    assert len(train) > 250_000


def test_vocabulary_has_97_different_characters():
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 97


def test_printable_ascii_round_trips():
    text = 'def f(x):\n    return "~!"\n'

    ids = encode(text)

    assert ids.dtype == torch.int64
    assert ids.shape == (len(text),)
    assert decode(ids) == text


def test_whole_text_round_trips_but_for_the_few_characters_outside_ascii():
    for text in split_text():
        restored = decode(encode(text))

        assert all(a == b or b == UNKNOWN for a, b in zip(text, restored, strict=True))
        assert restored.count(UNKNOWN) / len(text) < 0.005


@pytest.mark.parametrize("context", [1, 7, 64])
def test_windows_predict_every_validation_character_but_the_first_once(context):
    dataset = PydocCharacters("validation", context=context)

    targets = torch.cat([item["targets"] for item in map(dataset.__getitem__, range(len(dataset)))])

    assert torch.equal(targets[targets >= 0], dataset.ids[1:])


def test_targets_are_the_characters_that_follow():
    dataset = PydocCharacters("train", context=16, stride=1)

    item = dataset[123]

    assert torch.equal(item["inputs"], dataset.ids[123:139])
    assert torch.equal(item["targets"], dataset.ids[124:140])


def test_stride_one_gives_every_window_and_no_short_one():
    dataset = PydocCharacters("train", context=16, stride=1)

    assert len(dataset) == len(dataset.ids) - 16
    assert (dataset[len(dataset) - 1]["targets"] >= 0).all()


def test_short_last_window_is_filled_up_and_not_scored():
    dataset = PydocCharacters("validation", context=64)
    left = (len(dataset.ids) - 1) % 64
    assert left, "choose another context: this one divides the text"

    last = dataset[len(dataset) - 1]

    assert last["inputs"].shape == last["targets"].shape == (64,)
    assert (last["targets"] >= 0).tolist() == [True] * left + [False] * (64 - left)


def test_baselines_agree_with_counting_by_hand():
    ids = [encode(text[:20_000]) for text in split_text()]
    train, validation = map(decode, ids)
    counts, pairs, firsts = Counter(train), Counter(pairwise(train)), Counter(train[:-1])

    unigram = [-math.log2((counts[c] + 1) / (20_000 + 97)) for c in validation[1:]]
    bigram = [-math.log2((pairs[b, c] + 1) / (firsts[b] + 97)) for b, c in pairwise(validation)]

    assert unigram_bpc(*ids, 97) == pytest.approx(sum(unigram) / 19_999, rel=1e-12)
    assert bigram_bpc(*ids, 97) == pytest.approx(sum(bigram) / 19_999, rel=1e-12)


def test_baselines_are_in_the_metainfo_of_the_validation_split_alone():
    meta = PydocCharacters("validation").metainfo

    assert meta["bigram_bpc"] < meta["unigram_bpc"] < math.log2(97)
    assert PydocCharacters("train").metainfo == {"vocabulary": VOCABULARY}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "test"}, "PydocCharacters.split: got 'test'; expected 'train' or 'validation'"),
        ({"split": "train", "context": 0}, "PydocCharacters.context: got 0; expected 1 or more"),
        ({"split": "train", "stride": 0}, "PydocCharacters.stride: got 0; expected 1 or more"),
    ],
)
def test_bad_argument_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        PydocCharacters(**arguments)
