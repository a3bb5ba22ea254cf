"""Masked language modelling: which tokens are to be predicted and what stands in their place (Devlin et al. 2019,
section 3.1, "Masked LM", and section A.1)."""

import re
from dataclasses import dataclass

import numpy as np

from bertship.errors import InputError
from bertship.tokenization import Tokenizer

_CONTINUED = "##"
_UNUSED = re.compile(r"\[unused\d+\]")


@dataclass(frozen=True)
class MaskingVocabulary:
    """What masking has to know of a vocabulary.

    `mask_id`: the id of [MASK]; `maskable` bool [V]: whether a piece may be predicted; `replacements` int64 [R]: the
    pieces that may stand in for another. Special tokens, [UNK] among them, and [unusedN] are in neither.
    `continues` bool [V]: the pieces that go on with a word (`##`), where words are to be masked whole, else None.
    """

    mask_id: int
    maskable: np.ndarray
    replacements: np.ndarray
    continues: np.ndarray | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, whole_words: bool = False) -> "MaskingVocabulary":
        maskable = np.ones(tokenizer.vocab_size, bool)
        maskable[list(tokenizer.special_ids)] = False
        continues = np.zeros(tokenizer.vocab_size, bool)
        for piece, index in tokenizer.backend.get_vocab(with_added_tokens=True).items():
            if _UNUSED.fullmatch(piece):
                maskable[index] = False
            continues[index] = len(piece) > len(_CONTINUED) and piece.startswith(_CONTINUED)
        return cls(tokenizer.mask_id, maskable, np.flatnonzero(maskable), continues if whole_words else None)


@dataclass(frozen=True)
class Masked:
    """`ids` int64 [S]: the sequence as the encoder sees it; `positions` int64 [P], ascending: what is to be predicted;
    `labels` int64 [P]: the pieces that stood there."""

    ids: np.ndarray
    positions: np.ndarray
    labels: np.ndarray


def check_rates(rates: tuple[float, float, float]) -> None:
    """Raises InputError unless the shares of [MASK], random piece and unchanged are shares that add up to 1."""
    if min(rates) < 0 or abs(sum(rates) - 1) > 1e-6:
        raise InputError(f"mask_rates {tuple(rates)} do not add up to 1; BERT's are (0.8, 0.1, 0.1)")


def mask_tokens(
    ids: np.ndarray,
    rng: np.random.Generator,
    masked_share: float,
    rates: tuple[float, float, float],
    vocabulary: MaskingVocabulary,
) -> Masked:
    """Choose `masked_share` of the maskable tokens of `ids` int64 [S], at least one, without replacement.

    Where the vocabulary has `continues`, words are chosen in place of tokens, all pieces of a word or none, as many as
    fit into the same number of tokens; a word at the edge of the sequence is what of it is there.

    Each token becomes [MASK], a random piece or stays, with the probabilities `rates`. A pure function: `ids` is not
    changed, and the same `rng` state gives the same result. A sequence of special and unknown tokens alone has no
    position to predict; the loss over a batch must not divide by a count of zero.
    """
    candidates = np.flatnonzero(vocabulary.maskable[ids])
    count = min(len(candidates), max(1, round(masked_share * len(candidates))))
    if vocabulary.continues is None:
        positions = np.sort(rng.choice(candidates, count, replace=False))
    else:
        positions = _whole_words(ids, candidates, count, rng, vocabulary.continues)
    fate = rng.random(len(positions))
    masked = np.array(ids, np.int64)
    masked[positions[fate < rates[0]]] = vocabulary.mask_id
    replaced = positions[(fate >= rates[0]) & (fate < rates[0] + rates[1])]
    masked[replaced] = rng.choice(vocabulary.replacements, len(replaced))
    return Masked(masked, positions, np.asarray(ids, np.int64)[positions])


def _whole_words(
    ids: np.ndarray, candidates: np.ndarray, count: int, rng: np.random.Generator, continues: np.ndarray
) -> np.ndarray:
    """int64 [P], ascending: of `candidates` the pieces of words drawn one after another, those that fit into `count`
    together; where none does, the word drawn first."""
    if not len(candidates):
        return candidates
    # a word begins at any piece but one that goes on with the maskable piece before it
    goes_on = continues[ids[candidates]] & (np.diff(candidates, prepend=-2) == 1)
    begins = np.flatnonzero(~goes_on)
    ends = np.append(begins[1:], len(candidates))
    order = rng.permutation(len(begins))
    chosen: list[np.ndarray] = []
    left = count
    for word in order:
        length = int(ends[word] - begins[word])
        if length <= left:
            chosen.append(candidates[begins[word] : ends[word]])
            left -= length
            if not left:
                break
    return np.sort(np.concatenate(chosen or [candidates[begins[order[0]] : ends[order[0]]]]))


def next_tokens(ids: np.ndarray, vocabulary: MaskingVocabulary) -> Masked:
    """`ids` int64 [S] as they are; each position but the last predicts the piece after it, where that is maskable.

    A language model from left to right (Devlin et al. 2019, section 5.1): nothing need be hidden from it.
    """
    positions = np.flatnonzero(vocabulary.maskable[ids[1:]])
    return Masked(np.array(ids, np.int64), positions, np.asarray(ids, np.int64)[positions + 1])
