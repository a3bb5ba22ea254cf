"""A WordPiece vocabulary from text: the same text gives the same pieces with the same ids, whatever the threads.

The trainer of `tokenizers` numbers single characters in the order of a hash map and breaks ties between merges by
these numbers, so left alone it differs from run to run. Here the characters are counted, chosen and numbered first;
what is left to the trainer is a sum over words, whose order does not matter.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import tokenizers

from bertship.tokenization import SPECIAL_TOKENS, Tokenizer, bert_backend

MULTIPLE_OF = 8  # pieces; matrix units like the vocabulary's dimension even
_LONGEST_WORD = 100  # characters; WordPiece takes longer ones as unknown (bert_backend), so nothing is learnt from them
_LEAST_COUNT = 2  # of a merge; a pair seen once is a word, not a piece
_MOST_WORDS = 600_000  # distinct, while they are counted
_MOST_TRAINED = 300_000  # the most frequent, each of which takes the trainer more than a kilobyte
_REPEATS = 1000  # of a word in one text for the trainer


def train_vocabulary(texts: Iterable[str], size: int, lowercase: bool) -> Tokenizer:
    """Pieces in the order: special tokens ([PAD] = 0), characters, `##` characters, merges, then [unused0].. to fill.

    The vocabulary has `size` pieces, or, where the texts yield fewer, as many as they do, rounded up to a multiple
    of 8. Characters take at most half of it, the most frequent first; words with another character are unknown.
    """
    by_spaces: Counter[str] = Counter()
    for text in texts:
        count_more(by_spaces, Counter(text.split()))
    return vocabulary_of(by_spaces, size, lowercase)


def count_more(by_spaces: Counter[str], more: Counter[str]) -> None:
    """Add counts of words, as parted by white space. Beyond a number of distinct words those seen once are forgotten,
    so that memory stays bounded; counts that are added in the same order give the same result."""
    by_spaces.update(more)
    if len(by_spaces) > _MOST_WORDS:
        for word in [word for word, count in by_spaces.items() if count < _LEAST_COUNT]:
            del by_spaces[word]
        if len(by_spaces) > _MOST_WORDS // 2:  # all of them are common: forget the rarest half
            keep = _most_frequent(by_spaces, _MOST_WORDS // 2)
            by_spaces.clear()
            by_spaces.update(keep)


def _most_frequent(words: Counter[str], count: int) -> Counter[str]:
    return Counter(dict(sorted(words.items(), key=lambda item: (-item[1], item[0]))[:count]))


def vocabulary_of(by_spaces: Counter[str], size: int, lowercase: bool) -> Tokenizer:
    """`train_vocabulary` from counts of words as parted by white space."""
    backend = bert_backend({token: index for index, token in enumerate(SPECIAL_TOKENS)}, lowercase)
    words = _count_words(by_spaces, backend)
    alphabet = _alphabet(words, (size - len(SPECIAL_TOKENS)) // 2)
    if len(words) > _MOST_TRAINED:
        words = _most_frequent(words, _MOST_TRAINED)
    known = {piece.removeprefix("##") if len(piece) > 1 else piece for piece in alphabet}
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=_LEAST_COUNT,
        # the trainer numbers special tokens in the order given; nothing else of being special is kept
        special_tokens=[*SPECIAL_TOKENS, *alphabet],
        show_progress=False,
    )
    learnt = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    learnt.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()  # the words are parted and normalized already
    learnt.train_from_iterator(_repeated(words, known), trainer)
    numbered = learnt.get_vocab()
    pieces = sorted(numbered, key=numbered.__getitem__)[:size]
    unused = (f"[unused{index}]" for index in range(MULTIPLE_OF))
    while len(pieces) % MULTIPLE_OF:
        pieces.append(next(unused))
    return Tokenizer.from_vocab(pieces, lowercase)


def _count_words(by_spaces: Counter[str], backend: tokenizers.Tokenizer) -> Counter[str]:
    """How often each word occurs, words being what BERT's normalizer and pre-tokenizer leave."""
    words: Counter[str] = Counter()
    for text, count in by_spaces.items():
        for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text)):
            if len(word) <= _LONGEST_WORD:
                words[word] += count
    return words


def _alphabet(words: Counter[str], room: int) -> list[str]:
    """Single-character pieces for the most frequent characters, as many as `room` holds, in order of code points."""
    total: Counter[str] = Counter()
    inner: set[str] = set()
    for word, count in words.items():
        for character in word:
            total[character] += count
        inner.update(word[1:])
    chosen: list[str] = []
    for character, _ in sorted(total.items(), key=lambda item: (-item[1], item[0])):
        room -= 1 + (character in inner)
        if room < 0:
            break
        chosen.append(character)
    chosen.sort()
    return chosen + [f"##{character}" for character in chosen if character in inner]


def _repeated(words: Counter[str], known: set[str]) -> Iterator[str]:
    """Each word as often as it was counted, a bounded number in one text."""
    for word in sorted(words):
        if known.issuperset(word):
            for done in range(0, words[word], _REPEATS):
                yield " ".join([word] * min(_REPEATS, words[word] - done))
