"""Masking: never a special token, always a prediction, BERT's shares, the originals as labels."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertship.errors import InputError
from bertship.tokenization import SPECIAL_TOKENS, Tokenizer
from train.masking import MaskingVocabulary, check_rates, mask_tokens

PIECES = [*SPECIAL_TOKENS, "[unused0]", *(f"w{index}" for index in range(40)), "[unused1]"]
TOKENIZER = Tokenizer.from_vocab(PIECES, lowercase=True)
VOCABULARY = MaskingVocabulary.of(TOKENIZER)
BARRED = {*TOKENIZER.special_ids, PIECES.index("[unused0]"), PIECES.index("[unused1]")}
RATES = (0.8, 0.1, 0.1)


def test_vocabulary_bars_special_and_unused_pieces() -> None:
    assert set(VOCABULARY.replacements.tolist()) == set(range(len(PIECES))) - BARRED
    assert set(np.flatnonzero(~VOCABULARY.maskable).tolist()) == BARRED


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=60),
    seed=st.integers(0, 2**32),
    share=st.floats(0.01, 0.99),
    rates=st.sampled_from([RATES, (0.0, 1.0, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0, 1.0)]),
)
def test_properties(ids: list[int], seed: int, share: float, rates: tuple[float, float, float]) -> None:
    original = np.array(ids, np.int64)
    kept = original.copy()
    masked = mask_tokens(original, np.random.default_rng(seed), share, rates, VOCABULARY)
    assert (original == kept).all(), "the argument was changed"
    maskable = sum(index not in BARRED for index in ids)
    assert len(masked.positions) == min(maskable, max(1, round(share * maskable)))
    assert (np.diff(masked.positions) > 0).all()
    assert not BARRED & set(original[masked.positions].tolist())
    assert (masked.labels == original[masked.positions]).all()
    assert (np.delete(masked.ids, masked.positions) == np.delete(original, masked.positions)).all()
    assert set(masked.ids[masked.positions].tolist()) <= {TOKENIZER.mask_id, *VOCABULARY.replacements.tolist()}
    again = mask_tokens(original, np.random.default_rng(seed), share, rates, VOCABULARY)
    assert (again.ids == masked.ids).all() and (again.positions == masked.positions).all()


WORD_PIECES = [*SPECIAL_TOKENS, *(f"w{index}" for index in range(20)), *(f"##p{index}" for index in range(20)), "##"]
WHOLE = MaskingVocabulary.of(Tokenizer.from_vocab(WORD_PIECES, lowercase=True), whole_words=True)


def words_in(ids: list[int]) -> list[list[int]]:
    """Positions of each word, by the definition; special tokens apart."""
    words: list[list[int]] = []
    for position, index in enumerate(ids):
        if index < len(SPECIAL_TOKENS):
            continue
        goes_on = WORD_PIECES[index].startswith("##p") and position > 0 and ids[position - 1] >= len(SPECIAL_TOKENS)
        if goes_on:
            words[-1].append(position)
        else:
            words.append([position])
    return words


@settings(max_examples=400, deadline=None)
@given(
    ids=st.lists(st.integers(0, len(WORD_PIECES) - 1), min_size=1, max_size=60),
    seed=st.integers(0, 2**32),
    share=st.floats(0.01, 0.99),
)
def test_words_are_masked_whole(ids: list[int], seed: int, share: float) -> None:
    """pre.6"""
    masked = mask_tokens(np.array(ids), np.random.default_rng(seed), share, RATES, WHOLE)
    chosen = set(masked.positions.tolist())
    words = words_in(ids)
    touched = [word for word in words if chosen & set(word)]
    assert chosen == {position for word in touched for position in word}, "half a word"
    assert (np.diff(masked.positions) > 0).all()
    assert (masked.labels == np.array(ids)[masked.positions]).all()
    maskable = sum(map(len, words))
    most = min(maskable, max(1, round(share * maskable)))
    assert bool(chosen) == bool(words)
    assert len(chosen) <= most or len(touched) == 1, "more than was asked for"
    # nothing that would still have fitted was left out
    left = most - len(chosen)
    assert all(len(word) > left for word in words if word not in touched)


def test_whole_words_over_a_large_sample() -> None:
    rng = np.random.default_rng(3)
    ids = rng.integers(len(SPECIAL_TOKENS), len(WORD_PIECES) - 1, 100_000)
    masked = mask_tokens(ids, rng, 0.15, RATES, WHOLE)
    assert len(masked.positions) == 15_000
    now = masked.ids[masked.positions]
    assert abs((now == WHOLE.mask_id).mean() - 0.8) < 0.01
    assert abs((now == masked.labels).mean() - (0.1 + 0.1 / len(WHOLE.replacements))) < 0.01
    assert abs(masked.positions.mean() / len(ids) - 0.5) < 0.01


def test_a_sequence_of_special_tokens_has_nothing_to_predict() -> None:
    ids = np.array([TOKENIZER.cls_id, TOKENIZER.unk_id, TOKENIZER.sep_id, TOKENIZER.pad_id])
    masked = mask_tokens(ids, np.random.default_rng(0), 0.15, RATES, VOCABULARY)
    assert len(masked.positions) == len(masked.labels) == 0
    assert masked.ids.tolist() == ids.tolist()


def test_one_token_is_predicted() -> None:
    for seed in range(50):
        ids = np.array([TOKENIZER.cls_id, 10, TOKENIZER.sep_id])
        assert mask_tokens(ids, np.random.default_rng(seed), 0.15, RATES, VOCABULARY).positions.tolist() == [1]


def test_shares_over_a_large_sample() -> None:
    rng = np.random.default_rng(7)
    ids = rng.choice(VOCABULARY.replacements, 200_000)
    masked = mask_tokens(ids, rng, 0.15, RATES, VOCABULARY)
    assert len(masked.positions) == 30_000
    now = masked.ids[masked.positions]
    by_chance = 1 / len(VOCABULARY.replacements)  # a random piece may be the original
    assert abs((now == TOKENIZER.mask_id).mean() - 0.8) < 0.01
    assert abs((now == masked.labels).mean() - (0.1 + 0.1 * by_chance)) < 0.01
    # over the whole sequence, and all pieces alike
    assert abs(masked.positions.mean() / len(ids) - 0.5) < 0.01
    replaced = now[(now != TOKENIZER.mask_id) & (now != masked.labels)]
    assert set(replaced.tolist()) == set(VOCABULARY.replacements.tolist())


@pytest.mark.parametrize("rates", [(0.8, 0.1, 0.2), (1.2, -0.1, -0.1), (0.5, 0.1, 0.1)])
def test_rates_that_are_no_shares(rates: tuple[float, float, float]) -> None:
    with pytest.raises(InputError, match="do not add up to 1"):
        check_rates(rates)
