"""Pre-training samples for masked LM and next sentence prediction (Devlin et al. 2019, sections 3.1 and A.1).

A sample is a pure function of (seed, epoch, index) over the memory-mapped corpus: nothing is kept between calls, so
any number of workers, in any order, sees the same samples, and a run resumes by knowing its step.

How the samples of an epoch lie in a document of T tokens, for sequences with room for L tokens of text:

    |-- slot 0 --|-- slot 1 --|-- ... --|-- slot n-1 --|      n = T / L, rounded, at least 1
          ^ start      ^ start                 ^ start        the same place in each slot, drawn anew each epoch,
          [=== A ===|=== B ===]                               then moved back to the start of its sentence

So the chunks of an epoch lie end to end, and since a start may fall anywhere, what one epoch cuts off at a sentence's
start or replaces by a random segment, another has: nothing of a document is left out for its length. A and B part at a
random sentence border within the chunk, or within the sentence where the chunk is one sentence; the true next segment
is therefore always possible, and the label need not depend on the text: of each two neighbouring indices one is IsNext.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bertship.config import PretrainConfig
from bertship.errors import InputError
from bertship.tokenization import Row, Tokenizer, pad
from train.corpus import Corpus
from train.heads import IS_NEXT, NOT_NEXT
from train.masking import MaskingVocabulary, check_rates, mask_tokens, next_tokens

SPECIAL_PER_ROW = 3  # [CLS] A [SEP] B [SEP]
_ORDER, _LABELS, _PHASES = 1, 2, 3  # keys that keep these random numbers apart from those of samples


@dataclass(frozen=True)
class Span:
    """Tokens [start, end) of a document, counted from the document's first."""

    document: int
    start: int
    end: int


@dataclass(frozen=True)
class Sample:
    """One sequence: `row` as the encoder sees it, `positions` and `labels` int64 [P] of what is to be predicted,
    `next_label` IS_NEXT or NOT_NEXT, and where the two segments come from."""

    row: Row
    positions: np.ndarray
    labels: np.ndarray
    next_label: int
    first: Span
    second: Span


class PretrainingDataset:
    """Samples over `corpus` of at most `sequence_length` tokens, special ones included.

    `len()` is the number of samples an epoch. Raises InputError when the corpus has no document of two tokens, or
    the mask rates do not add up to 1.
    """

    def __init__(self, corpus: Corpus, sequence_length: int, config: PretrainConfig, tokenizer: Tokenizer) -> None:
        check_rates(config.mask_rates)
        self.corpus, self.config, self.tokenizer = corpus, config, tokenizer
        self.room = sequence_length - SPECIAL_PER_ROW  # tokens of text a row
        self.vocabulary = MaskingVocabulary.of(tokenizer, config.whole_word_masking)
        self._bounds = np.asarray(corpus.sentences)[np.asarray(corpus.documents)]  # int64 [D+1], in tokens
        lengths = np.diff(self._bounds)
        # a document of one token can only be a random segment
        slots = np.where(lengths >= 2, np.maximum(1, np.rint(lengths / self.room)), 0).astype(np.int64)
        self._slots = np.concatenate([[0], np.cumsum(slots)])
        if not len(self):
            raise InputError(f"none of the corpus's {len(corpus)} documents has two tokens to make a pair of")
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        return int(self._slots[-1])

    def order(self, epoch: int) -> np.ndarray:
        """int64 [len]: the indices in the order in which an epoch visits them."""
        known, order = self._order
        if known != epoch:
            order = self._random(epoch, key=_ORDER).permutation(len(self))
            self._order = (epoch, order)  # one assignment: threads may share the dataset
        return order

    def order_hash(self, epochs: int = 1) -> str:
        """SHA-256 of the orders of the first `epochs` epochs: equal hashes mean equal data order."""
        digest = hashlib.sha256()
        for epoch in range(epochs):
            digest.update(self.order(epoch).astype("<i8").tobytes())
        return digest.hexdigest()

    def batch(self, indices: Sequence[int] | np.ndarray, epoch: int) -> dict[str, np.ndarray]:
        """The samples `indices` of an epoch as arrays; see `collate`."""
        return self.collate([self.sample(int(index), epoch) for index in indices])

    def batch_at(self, step: int, batch_size: int) -> dict[str, np.ndarray]:
        """The batch of an update: `batch_size` samples further along the epochs' orders with each step."""
        samples = []
        for visit in range(step * batch_size, (step + 1) * batch_size):
            epoch, place = divmod(visit, len(self))
            samples.append(self.sample(int(self.order(epoch)[place]), epoch))
        return self.collate(samples)

    def collate(self, samples: Sequence[Sample]) -> dict[str, np.ndarray]:
        """All int64: `input_ids`, `attention_mask`, `token_type_ids` [B, S] padded to the longest row,
        `predicted_positions` [M] into the flattened [B*S], `mlm_labels` [M], `nsp_labels` [B]."""
        inputs = pad([sample.row for sample in samples], self.tokenizer.pad_id)
        longest = inputs["input_ids"].shape[1]
        return inputs | {
            "predicted_positions": np.concatenate([i * longest + s.positions for i, s in enumerate(samples)]),
            "mlm_labels": np.concatenate([sample.labels for sample in samples]),
            "nsp_labels": np.array([sample.next_label for sample in samples], np.int64),
        }

    def sample(self, index: int, epoch: int) -> Sample:
        """The sample `index` of an epoch, whatever was asked before."""
        rng = self._random(epoch, index)
        document = int(np.searchsorted(self._slots, index, side="right")) - 1
        chunk = self._chunk(document, index - int(self._slots[document]), epoch, rng)
        first, second = self._part(chunk, rng)
        next_label = self._next_label(index, epoch)
        if next_label == NOT_NEXT:
            # as long as the true next segment, so that the length does not give the label away
            second = self._random_segment(document, second.end - second.start, rng)
        ids = [[self.tokenizer.cls_id], self._ids(first), [self.tokenizer.sep_id], self._ids(second)]
        row_ids = np.concatenate([np.asarray(part, np.int64) for part in [*ids, [self.tokenizer.sep_id]]])
        types = np.zeros(len(row_ids), np.int64)
        types[first.end - first.start + 2 :] = 1
        if self.config.objective == "ltr":
            masked = next_tokens(row_ids, self.vocabulary)
        else:
            masked = mask_tokens(row_ids, rng, self.config.masked_share, self.config.mask_rates, self.vocabulary)
        return Sample(Row(masked.ids, types, index), masked.positions, masked.labels, next_label, first, second)

    def _random(self, epoch: int, index: int = 0, key: int | None = None) -> np.random.Generator:
        spawn_key = () if key is None else (key,)
        return np.random.default_rng(np.random.SeedSequence([self.config.seed, epoch, index], spawn_key=spawn_key))

    def _next_label(self, index: int, epoch: int) -> int:
        """IS_NEXT for exactly one of the indices 2j and 2j+1, a coin says which; always where there is no other
        document to take a random segment from, or the objective has no next sentence prediction."""
        if len(self.corpus) < 2 or self.config.objective != "mlm+nsp":
            return IS_NEXT
        coin = int(self._random(epoch // 2, index // 2, key=_LABELS).integers(2))
        # what an even epoch replaced by a random segment, the odd one after it has
        return IS_NEXT if (index + epoch + coin) % 2 == 0 else NOT_NEXT

    def _ids(self, span: Span) -> np.ndarray:
        begin = int(self._bounds[span.document])
        return self.corpus.tokens[begin + span.start : begin + span.end]

    def _borders(self, document: int) -> np.ndarray:
        """int64 [sentences+1]: where the sentences start and the last one ends, in tokens from the document's first."""
        first, last = self.corpus.documents[document], self.corpus.documents[document + 1]
        return self.corpus.sentences[first : last + 1] - self._bounds[document]

    def _chunk(self, document: int, slot: int, epoch: int, rng: np.random.Generator) -> Span:
        """At least two tokens in a row of a document, as many as a sample has room for where there are that many."""
        borders = self._borders(document)
        length = int(borders[-1])
        slots = int(self._slots[document + 1] - self._slots[document])
        target = self.room
        if rng.random() < self.config.short_sequence_share:
            target = int(rng.integers(2, self.room + 1))
        # drawn from half a chunk before the document on, or its first tokens would be seen more rarely than others
        phase = self._random(epoch, document, key=_PHASES).random()
        start = max(0, int((slot + phase) / slots * length - self.room / 2))
        if start + target >= length:  # before it is moved back, or a long last sentence would rarely be seen to its end
            start = max(0, length - target)
            # better a little shorter than in the middle of a sentence
            following = int(borders[np.searchsorted(borders, start)])
            if following - start <= target // 4:
                start = following
        else:
            start = _sentence_start(borders, start, self.room // 2)
        return Span(document, start, min(start + target, length))

    def _part(self, chunk: Span, rng: np.random.Generator) -> tuple[Span, Span]:
        """The chunk in two: at a sentence border where it has one, otherwise within the sentence, not near its ends."""
        borders = self._borders(chunk.document)
        inner = borders[np.searchsorted(borders, chunk.start, "right") : np.searchsorted(borders, chunk.end)]
        if len(inner):
            middle = int(rng.choice(inner))
        else:
            length = chunk.end - chunk.start
            middle = chunk.start + int(rng.integers(max(1, length // 4), max(1, length - 1 - length // 4) + 1))
        return Span(chunk.document, chunk.start, middle), Span(chunk.document, middle, chunk.end)

    def _random_segment(self, document: int, wanted: int, rng: np.random.Generator) -> Span:
        """`wanted` tokens, or all that there are, of another document, drawn by length: each token is as likely as any,
        so that what a segment is about does not tell whether it is a random one."""
        begin, end = int(self._bounds[document]), int(self._bounds[document + 1])
        token = int(rng.integers(int(self._bounds[-1]) - (end - begin)))
        token += (end - begin) * (token >= begin)
        other = int(np.searchsorted(self._bounds, token, side="right")) - 1
        borders = self._borders(other)
        length = int(borders[-1])
        start = _sentence_start(borders, int(rng.integers(max(0, length - wanted) + 1)), self.room // 2)
        return Span(other, start, min(start + wanted, length))


def _sentence_start(borders: np.ndarray, token: int, reach: int) -> int:
    """The start of the sentence that `token` is in, or `token` itself where that start is more than `reach` before.

    So every part of a sentence longer than a sequence is met.
    """
    start = int(borders[np.searchsorted(borders, token, side="right") - 1])
    return start if token - start <= reach else token
