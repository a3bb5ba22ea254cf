"""The files of a corpus, memory-mapped: a training part and a held-out part, each with at least one document."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bertship import artifacts
from bertship.config import CorpusConfig
from bertship.errors import InputError
from train.encode import rank
from train.shards import SPLITS

_BLOCK = 1 << 20  # elements copied at once


class TooLittleText(InputError):
    """Text that makes no corpus, however often it is read."""


class Corpus:
    """A split of a corpus directory, memory-mapped.

    `tokens` uint16 or uint32 [T], `sentences` int64 [S+1] offsets into tokens, `documents` int64 [D+1] offsets into
    sentences. Raises InputError when the directory is no corpus or its files are not those that were written.
    """

    def __init__(self, tokens: np.ndarray, sentences: np.ndarray, documents: np.ndarray) -> None:
        self.tokens, self.sentences, self.documents = tokens, sentences, documents

    @classmethod
    def open(cls, directory: Path, split: str = "train") -> "Corpus":
        if split not in SPLITS:
            raise InputError(f"unknown split {split!r} of a corpus; splits are {', '.join(SPLITS)}")
        manifest = artifacts.read_manifest(directory, "corpus")
        for name in ("tokens", "sentences", "documents"):
            path = Path(directory) / split / f"{name}.bin"
            bytes_written = manifest["files"].get(f"{split}/{name}.bin", {}).get("bytes")
            bytes_found = path.stat().st_size if path.is_file() else None
            if bytes_found is None or bytes_found != bytes_written:
                found = "missing" if bytes_found is None else f"{bytes_found} bytes long"
                raise InputError(f"{path} is {found}, its manifest says {bytes_written}; make the corpus again")
        return cls._map(Path(directory) / split, np.dtype(manifest["token_dtype"]))

    @classmethod
    def _map(cls, folder: Path, token_dtype: np.dtype) -> "Corpus":
        corpus = cls(
            _mapped(folder / "tokens.bin", token_dtype),
            _mapped(folder / "sentences.bin", np.dtype("<i8")),
            _mapped(folder / "documents.bin", np.dtype("<i8")),
        )
        ends = (int(corpus.sentences[-1]), int(corpus.documents[-1]))
        if ends != (len(corpus.tokens), len(corpus.sentences) - 1):
            raise InputError(f"{folder} contradicts itself: its offsets end at {ends}; make the corpus again")
        return corpus

    def __len__(self) -> int:
        """Documents."""
        return len(self.documents) - 1

    def document(self, index: int) -> list[np.ndarray]:
        """Ids of each sentence of a document: views of `tokens`, not copies."""
        bounds = self.sentences[self.documents[index] : self.documents[index + 1] + 1]
        return [self.tokens[start:end] for start, end in itertools.pairwise(bounds)]


def ensure_both_sides(staging: Path, config: CorpusConfig, dtype: np.dtype, sources: Sequence[str]) -> str:
    """Give an empty split something of the other one; says by what the held-out part is parted.

    A corpus that leaves a split without a document has few of them; they may be long, so they are copied in blocks.
    """
    train, heldout = (Corpus._map(staging / split, dtype) for split in SPLITS)
    if len(train) and len(heldout):
        return "documents"
    everything = train if len(train) else heldout
    count, ends = len(everything), np.asarray(everything.documents)
    last = int(ends[-1])
    where = ", ".join(sources)
    if not count:
        raise TooLittleText(f"empty corpus: no document with a sentence in {where}")
    if last < 2:
        raise TooLittleText(
            f"a single sentence in {where}; a corpus needs two or more, some to train on and some held out"
        )
    if count == 1:
        cut = max(1, last - max(1, round(last * config.heldout_share)))
        sides = {"train": [(0, np.array([cut]))], "heldout": [(cut, ends[1:])]}
    else:
        ranks = [rank(config.seed, _tokens_of(everything, document).data) for document in range(count)]
        # the document that would change sides first if the share were moved
        moved = int(np.argmin(ranks) if everything is train else np.argmax(ranks))
        one = [(int(ends[moved]), ends[moved + 1 : moved + 2])]
        rest = [(0, ends[1 : moved + 1]), (int(ends[moved + 1]), ends[moved + 2 :])]
        sides = {"train": rest, "heldout": one} if everything is train else {"train": one, "heldout": rest}
    for split, parts in sides.items():
        _copy(everything, staging / f"{split}.again", parts)
    for split in SPLITS:
        for file in (staging / split).iterdir():
            file.unlink()
        (staging / split).rmdir()
        (staging / f"{split}.again").rename(staging / split)
    return "sentences" if count == 1 else "documents"


def _tokens_of(corpus: Corpus, document: int) -> np.ndarray:
    first, last = corpus.documents[document], corpus.documents[document + 1]
    return corpus.tokens[corpus.sentences[first] : corpus.sentences[last]]


def _copy(source: Corpus, folder: Path, parts: Sequence[tuple[int, np.ndarray]]) -> None:
    """Write parts of `source` as a split. A part: its first sentence, and the sentence behind each of its documents."""
    folder.mkdir()
    tokens_before = sentences_before = 0
    with (
        (folder / "tokens.bin").open("wb") as tokens,
        (folder / "sentences.bin").open("wb") as sentences,
        (folder / "documents.bin").open("wb") as documents,
    ):
        for file in (sentences, documents):
            file.write(np.zeros(1, "<i8").tobytes())
        for first, ends in parts:
            if not len(ends):
                continue
            last = int(ends[-1])
            start, end = int(source.sentences[first]), int(source.sentences[last])
            for place in range(start, end, _BLOCK):
                tokens.write(source.tokens[place : min(place + _BLOCK, end)].tobytes())
            for place in range(first + 1, last + 1, _BLOCK):
                offsets = source.sentences[place : min(place + _BLOCK, last + 1)]
                sentences.write((offsets - start + tokens_before).astype("<i8").tobytes())
            documents.write((ends - first + sentences_before).astype("<i8").tobytes())
            tokens_before += end - start
            sentences_before += last - first


def describe(folder: Path, dtype: np.dtype) -> dict[str, int]:
    corpus = Corpus._map(folder, dtype)
    return {"documents": len(corpus), "sentences": len(corpus.sentences) - 1, "tokens": len(corpus.tokens)}


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    # an empty file cannot be mapped
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
