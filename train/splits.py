"""The files of a corpus, memory-mapped: a training part and a held-out part, each with at least one document."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertship import artifacts
from bertship.config import CorpusConfig
from bertship.errors import InputError
from train.encode import rank
from train.shards import SPLITS


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


class _Writer:
    """Appends documents to the three files of a split."""

    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        folder.mkdir()
        self.dtype = dtype
        self.tokens, self.sentences, self.documents = (
            (folder / f"{name}.bin").open("wb") for name in ("tokens", "sentences", "documents")
        )
        self.token_count = self.sentence_count = 0
        self._offsets(self.sentences, [0])
        self._offsets(self.documents, [0])

    @staticmethod
    def _offsets(file: Any, values: Sequence[int] | np.ndarray) -> None:
        file.write(np.asarray(values, "<i8").tobytes())

    def add(self, document: Sequence[Sequence[int] | np.ndarray]) -> None:
        ids = np.concatenate([np.asarray(sentence, self.dtype) for sentence in document])
        self.tokens.write(ids.tobytes())
        self._offsets(self.sentences, self.token_count + np.cumsum([len(sentence) for sentence in document]))
        self.token_count += len(ids)
        self.sentence_count += len(document)
        self._offsets(self.documents, [self.sentence_count])

    def close(self) -> None:
        for file in (self.tokens, self.sentences, self.documents):
            file.close()

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ensure_both_sides(staging: Path, config: CorpusConfig, dtype: np.dtype, sources: Sequence[str]) -> str:
    """Give an empty split something of the other one; says by what the held-out part is parted.

    Only a small corpus can leave a split without a document, so writing it a second time costs little.
    """
    train, heldout = (Corpus._map(staging / split, dtype) for split in SPLITS)
    if len(train) and len(heldout):
        return "documents"
    everything = train if len(train) else heldout
    documents = [everything.document(index) for index in range(len(everything))]
    where = ", ".join(sources)
    if not documents:
        raise InputError(f"empty corpus: no document with a sentence in {where}")
    if len(documents) == 1:
        (sentences,) = documents
        if len(sentences) < 2:
            raise InputError(
                f"a single sentence in {where}; a corpus needs two or more, some to train on and some held out"
            )
        cut = max(1, len(sentences) - max(1, round(len(sentences) * config.heldout_share)))
        sides, heldout_by = {"train": [sentences[:cut]], "heldout": [sentences[cut:]]}, "sentences"
    else:
        ranks = [rank(config.seed, np.concatenate(document).tobytes()) for document in documents]
        # the document that would change sides first if the share were moved
        moved = int(np.argmin(ranks) if everything is train else np.argmax(ranks))
        rest = documents[:moved] + documents[moved + 1 :]
        sides = {"train": rest, "heldout": [documents[moved]]}
        if everything is heldout:
            sides = {"train": [documents[moved]], "heldout": rest}
        heldout_by = "documents"
    for split, side in sides.items():
        with _Writer(staging / f"{split}.again", dtype) as writer:
            for document in side:
                writer.add(document)
    for split in SPLITS:
        for file in (staging / split).iterdir():
            file.unlink()
        (staging / split).rmdir()
        (staging / f"{split}.again").rename(staging / split)
    return heldout_by


def describe(folder: Path, dtype: np.dtype) -> dict[str, int]:
    corpus = Corpus._map(folder, dtype)
    return {"documents": len(corpus), "sentences": len(corpus.sentences) - 1, "tokens": len(corpus.tokens)}


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    # an empty file cannot be mapped
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
