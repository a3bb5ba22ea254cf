"""Documents to memory-mapped tokens: read, part into sentences, train a vocabulary, tokenize, hold some out.

A corpus directory holds the tokenizer's files and, in `train/` and `heldout/`, three flat little-endian arrays:

    tokens.bin      uint16, or uint32 for vocabularies above 65,536 pieces: the ids of all sentences, end to end
    sentences.bin   int64 [S+1]: where each sentence starts in `tokens`
    documents.bin   int64 [D+1]: where each document starts in `sentences`

Text is read document by document and written as it comes; what stays in memory is one document, one batch of
sentences and, while a vocabulary is trained, the distinct words.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencex

from bertship import artifacts
from bertship.config import CorpusConfig
from bertship.errors import InputError
from bertship.tokenization import Tokenizer
from train.progress import to_stderr
from train.readers import read_documents
from train.vocabulary import train_vocabulary

__all__ = ["SPLITS", "Corpus", "build_corpus", "fingerprint_of", "read_documents", "sentences_of", "train_vocabulary"]

SPLITS = ("train", "heldout")
_ROOT = Path(__file__).parents[1]
_CODE = ("train/corpus.py", "train/readers.py", "train/vocabulary.py", "bertship/tokenization.py")
_BATCH_CHARACTERS = 1_000_000  # tokenized in one call, so that every core has work and memory stays flat


def sentences_of(text: str) -> list[str]:
    """Sentences of a document in order, stripped, none empty; a line break always ends one."""
    return [
        sentence.strip()
        for line in text.splitlines()
        if line.strip()
        for sentence in sentencex.segment("en", line)
        if sentence.strip()
    ]


def fingerprint_of(sources: Sequence[Path], config: CorpusConfig, tokenizer: Tokenizer | None = None) -> str:
    """What `build_corpus` would record: sources' names and hashes, configuration, tokenizer, code and library versions.

    Raises InputError when a source is missing.
    """
    return artifacts.sha256_json(
        {
            "sources": [(path.name, artifacts.sha256_file(path)) for path in _checked(sources)],
            "config": config.model_dump(),
            "tokenizer": tokenizer.backend.to_str() if tokenizer else None,
            "code": artifacts.code_digest(_ROOT, _CODE),
            "tokenizers": artifacts.versions().get("tokenizers"),
        }
    )


def build_corpus(
    sources: Sequence[Path],
    out: Path,
    config: CorpusConfig,
    tokenizer: Tokenizer | None = None,
    report: Callable[[str], None] = to_stderr,
) -> dict[str, Any]:
    """Write the corpus directory `out` and return its manifest. `report` is given one line at a time.

    Without a `tokenizer` a vocabulary is trained on all documents, held-out ones included, as for any published
    BERT. Which documents are held out depends on `config.seed` and the document's number alone. Both splits get at
    least one document; a corpus of one document is parted instead, its last sentences held out. The metrics count
    documents, sentences, tokens, characters (code points), what was skipped by reason, and the share of [UNK].

    Raises InputError for sources that are missing, of an unknown kind or damaged, and for a corpus of less than
    two sentences.
    """
    sources = _checked(sources)
    fingerprint = fingerprint_of(sources, config, tokenizer)
    skipped: Counter[str] = Counter()
    with artifacts.publish(out) as staging:
        documents = _segmented(sources, skipped, report)
        if tokenizer is None:
            spool = staging / "sentences.jsonl"
            _spool(documents, spool)
            tokenizer = train_vocabulary(_read_spool_flat(spool), config.vocab_size, config.lowercase)
            report(f"trained a vocabulary of {tokenizer.vocab_size:,} pieces")
            documents = _read_spool(spool)
        else:
            spool = None
        dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        counts = _write_splits(documents, staging, tokenizer, config, dtype, skipped)
        if spool:
            spool.unlink()
        heldout_by = _ensure_both_sides(staging, config, dtype, sources)
        if heldout_by == "sentences":
            report("one document only: its last sentences are held out, and every pair will be IsNext")
        tokenizer.save(staging)
        splits = {split: _describe(staging / split, dtype) for split in SPLITS}
        metrics = counts | {"skipped": dict(sorted(skipped.items())), "splits": splits, "heldout_by": heldout_by}
        manifest = artifacts.write_manifest(
            staging,
            "corpus",
            fingerprint=fingerprint,
            config=config.model_dump(),
            inputs={str(path): artifacts.sha256_file(path) for path in sources},
            metrics=metrics,
            token_dtype=dtype.str,
            vocab_size=tokenizer.vocab_size,
        )
    report(
        f"{counts['documents']:,} documents, {counts['sentences']:,} sentences, {counts['tokens']:,} tokens, "
        f"{counts['unknown_share']:.2%} unknown; skipped: "
        + (", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items())) or "nothing")
    )
    return manifest


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


def _checked(sources: Sequence[Path]) -> list[Path]:
    paths = [Path(source) for source in sources]
    if not paths:
        raise InputError("no source files for the corpus; name at least one")
    for path in paths:
        if not path.is_file():
            raise InputError(f"{path} is a directory; name its files" if path.is_dir() else f"no such file: {path}")
    return paths


def _segmented(sources: Sequence[Path], skipped: Counter[str], report: Callable[[str], None]) -> Iterator[list[str]]:
    """Documents as lists of sentences."""
    for path in sources:
        report(f"reading {path}")
        for text in read_documents(path, skipped):
            if sentences := sentences_of(text):
                yield sentences
            else:
                skipped["empty documents"] += 1


def _spool(documents: Iterable[list[str]], spool: Path) -> None:
    """Keep what was read, so that a dump is parsed once although the vocabulary needs all of it beforehand."""
    with spool.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(sentences) + "\n" for sentences in documents)


def _read_spool(spool: Path) -> Iterator[list[str]]:
    with spool.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _read_spool_flat(spool: Path) -> Iterator[str]:
    for sentences in _read_spool(spool):
        yield "\n".join(sentences)


def _write_splits(
    documents: Iterable[list[str]],
    staging: Path,
    tokenizer: Tokenizer,
    config: CorpusConfig,
    dtype: np.dtype,
    skipped: Counter[str],
) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    unknown = 0
    with _Writer(staging / "train", dtype) as train, _Writer(staging / "heldout", dtype) as heldout:
        for sentences, ids in _tokenized(documents, tokenizer):
            kept = [sentence for sentence in ids if sentence]
            # a sentence of nothing but control characters has no token
            skipped["sentences without a token"] += len(ids) - len(kept)
            if not kept:
                skipped["empty documents"] += 1
                continue
            side = heldout if _rank(config.seed, counts["documents"]) < config.heldout_share else train
            side.add(kept)
            unknown += sum(sentence.count(tokenizer.unk_id) for sentence in kept)
            counts["documents"] += 1
            counts["sentences"] += len(kept)
            counts["tokens"] += sum(map(len, kept))
            counts["characters"] += sum(map(len, sentences))
    for reason in [reason for reason, count in skipped.items() if not count]:
        del skipped[reason]
    names = ("documents", "sentences", "tokens", "characters")
    return {name: counts[name] for name in names} | {"unknown_share": unknown / max(counts["tokens"], 1)}


def _tokenized(documents: Iterable[list[str]], tokenizer: Tokenizer) -> Iterator[tuple[list[str], list[list[int]]]]:
    """Each document's sentences and their ids, without offsets, which training does not need."""
    batch: list[list[str]] = []
    characters = 0

    def flush() -> Iterator[tuple[list[str], list[list[int]]]]:
        flat = [sentence for sentences in batch for sentence in sentences]
        encoded = iter(tokenizer.backend.encode_batch_fast(flat, add_special_tokens=False))
        for sentences in batch:
            yield sentences, [next(encoded).ids for _ in sentences]

    for sentences in documents:
        batch.append(sentences)
        characters += sum(map(len, sentences))
        if characters >= _BATCH_CHARACTERS:
            yield from flush()
            batch, characters = [], 0
    yield from flush()


def _rank(seed: int, document: int) -> float:
    """A number in [0, 1) that depends on the seed and the document's number alone."""
    digest = hashlib.blake2b(f"{seed} {document}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _ensure_both_sides(staging: Path, config: CorpusConfig, dtype: np.dtype, sources: Sequence[Path]) -> str:
    """Give an empty split something of the other one; says by what the held-out part is parted.

    Only a small corpus can leave a split without a document, so writing it a second time costs little.
    """
    train, heldout = (Corpus._map(staging / split, dtype) for split in SPLITS)
    if len(train) and len(heldout):
        return "documents"
    everything = train if len(train) else heldout
    documents = [everything.document(index) for index in range(len(everything))]
    where = ", ".join(map(str, sources))
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
        ranks = [_rank(config.seed, index) for index in range(len(documents))]
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


def _describe(folder: Path, dtype: np.dtype) -> dict[str, int]:
    corpus = Corpus._map(folder, dtype)
    return {"documents": len(corpus), "sentences": len(corpus.sentences) - 1, "tokens": len(corpus.tokens)}


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    # an empty file cannot be mapped
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
