"""Documents to memory-mapped tokens: read, part into sentences, train a vocabulary, tokenize, hold some out.

A corpus directory holds the tokenizer's files and, in `train/` and `heldout/`, three flat little-endian arrays:

    tokens.bin      uint16, or uint32 for vocabularies above 65,536 pieces: the ids of all sentences, end to end
    sentences.bin   int64 [S+1]: where each sentence starts in `tokens`
    documents.bin   int64 [D+1]: where each document starts in `sentences`

A build goes in three steps over a working directory, so that it can be interrupted, and shared by machines:

    prepare   what there is to read, in units that depend on the input alone; a vocabulary from a sample of it
    shards    each unit to folders of ids (train/shards.py), by as many processes as there are
    merge     the shards, in the order of the input, to the corpus directory

What stays in memory is a few chunks of a megabyte and, while a vocabulary is trained, the distinct words.
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertship import artifacts
from bertship.config import CorpusConfig
from bertship.errors import InputError
from bertship.tokenization import Tokenizer
from train.chunks import CHUNK_BYTES, PACKING, UNIT_BYTES, Chunk, Unit
from train.encode import sentences_of, token_dtype
from train.inputs import Input, Source, find_inputs
from train.progress import byte_progress, to_stderr
from train.readers import read_chunks, read_documents, units_of
from train.shards import Shard, ShardWriter, finished_shards, merge_shards, shard_folder
from train.splits import SPLITS, Corpus, describe, ensure_both_sides
from train.vocabulary import count_more, train_vocabulary, vocabulary_of
from train.workers import Workers

__all__ = [
    "SPLITS",
    "Corpus",
    "Plan",
    "build_corpus",
    "build_shards",
    "fingerprint_of",
    "merge",
    "prepare",
    "read_documents",
    "sentences_of",
    "train_vocabulary",
]

_ROOT = Path(__file__).parents[1]
_MODULES = (
    *("chunks", "corpus", "encode", "inputs", "lines", "readers", "rows"),
    *("shards", "splits", "vocabulary", "wikitext"),
)
_CODE = (
    "bertship/tokenization.py",
    *(f"train/{name}.py" for name in _MODULES),
)
_SMALL_BYTES = 1 << 22  # of text: starting processes would take longer
_MOST_WORKERS = 4  # unless more are asked for: each takes memory
_LONG_SHARD = 4  # units of text, where a document has no end before
_LEAST_SAMPLE_BYTES = 1 << 16  # of a unit


@dataclass(frozen=True)
class Plan:
    """What a build does, as kept in its working directory `work`. `units`: (number of the input, unit), in order."""

    work: Path
    fingerprint: str
    config: CorpusConfig
    inputs: list[Input]
    units: list[tuple[int, Unit]]

    @property
    def tokenizer_dir(self) -> Path:
        return self.work / "tokenizer"

    @property
    def shards(self) -> Path:
        return self.work / "shards"

    @property
    def weight(self) -> int:
        """Bytes of text, as far as that can be told beforehand."""
        return sum(unit.weight for _, unit in self.units)

    def item(self, number: int) -> Input:
        """The input that the unit `number` is of."""
        return self.inputs[self.units[number][0]]

    def read(
        self, number: int, resume: int | None = None, within: bool = False, chunk_bytes: int | None = None
    ) -> Iterator[Chunk]:
        """`read_chunks` of the unit `number`."""
        which, unit = self.units[number]
        fields = (self.config.text_field, resume, within, chunk_bytes or CHUNK_BYTES, self.config.rows_per_document)
        return read_chunks(self.inputs[which], unit, *fields)

    def save(self) -> None:
        facts = dataclasses.asdict(self) | {"work": None, "config": self.config.model_dump()}
        artifacts.write_text(self.work / "plan.json", json.dumps(facts, indent=1) + "\n")

    @classmethod
    def open(cls, work: Path) -> "Plan":
        """The plan that `prepare` wrote. Raises InputError."""
        try:
            facts = json.loads((work / "plan.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"no plan.json in {work}: it is no working directory of a corpus") from None
        return cls(
            work,
            facts["fingerprint"],
            CorpusConfig(**facts["config"]),
            [Input(**item) for item in facts["inputs"]],
            [(number, Unit(**unit)) for number, unit in facts["units"]],
        )


def fingerprint_of(sources: Sequence[Source | Input], config: CorpusConfig, tokenizer: Tokenizer | None = None) -> str:
    """What `build_corpus` would record: sources' names and hashes, configuration, tokenizer, code and library versions.

    Raises InputError when a source is missing.
    """
    return artifacts.sha256_json(
        {
            "sources": [item.identity for item in find_inputs(sources)],
            "config": config.model_dump(),
            "tokenizer": tokenizer.backend.to_str() if tokenizer else None,
            "code": artifacts.code_digest(_ROOT, _CODE),
            "tokenizers": artifacts.versions().get("tokenizers"),
        }
    )


def build_corpus(
    sources: Sequence[Source | Input],
    out: Path,
    config: CorpusConfig,
    tokenizer: Tokenizer | None = None,
    report: Callable[[str], None] = to_stderr,
    workers: int | None = None,
) -> dict[str, Any]:
    """Write the corpus directory `out` and return its manifest. `report` is given one line at a time.

    `sources`: see `train.inputs`. Without a `tokenizer` a vocabulary is trained on a sample spread over all
    documents, held-out ones included, as for any published BERT. Which documents are held out depends on
    `config.seed` and their text alone. Both splits get at least one document; a corpus of one document is parted
    instead, its last sentences held out. The metrics count documents, sentences, tokens, characters (code points),
    what was skipped or repaired by reason, and the share of [UNK].

    `workers` processes tokenize (None: one a core, four at most; 0: this one); their number changes no byte of the
    result. A build that ended early, killed or not, goes on where it was when it is started again with the same
    sources and settings. Raises InputError for sources that are missing, of an unknown kind or damaged, for a corpus
    of less than two sentences, and when another process is building the same corpus.
    """
    out = Path(out)
    out = out.resolve() if out.is_symlink() else out
    inputs = find_inputs(sources, report)
    work = out.with_name(f".{out.name}.building")
    with _alone(work), _full_disk_named(work):
        plan = prepare(inputs, work, config, tokenizer, report, workers)
        build_shards(plan, report=report, workers=workers)
        manifest = merge(plan, out, report)
        shutil.rmtree(work, ignore_errors=True)
    return manifest


def prepare(
    sources: Sequence[Source | Input],
    work: Path,
    config: CorpusConfig,
    tokenizer: Tokenizer | None = None,
    report: Callable[[str], None] = to_stderr,
    workers: int | None = None,
) -> Plan:
    """Make `work` the working directory of a build: its plan and its tokenizer. One of the same sources and settings
    is kept with all that is in it, any other is removed."""
    inputs = find_inputs(sources, report)
    fingerprint = fingerprint_of(inputs, config, tokenizer)
    with contextlib.suppress(InputError):
        plan = Plan.open(work)
        if plan.fingerprint == fingerprint and plan.tokenizer_dir.is_dir():
            return plan
    for leftover in work.iterdir() if work.is_dir() else ():
        if leftover.name != "lock":
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    units = [(number, unit) for number, item in enumerate(inputs) for unit in units_of(item, config.text_field)]
    plan = Plan(work, fingerprint, config, inputs, units)
    plan.shards.mkdir(parents=True)
    if tokenizer is None:
        tokenizer = _train_vocabulary(plan, report, workers)
        report(f"trained a vocabulary of {tokenizer.vocab_size:,} pieces")
    with artifacts.publish(plan.tokenizer_dir) as staging:
        tokenizer.save(staging)
    plan.save()
    return plan


def build_shards(
    plan: Plan,
    numbers: Iterable[int] | None = None,
    report: Callable[[str], None] = to_stderr,
    workers: int | None = None,
) -> None:
    """Build what is missing of the shards of the units `numbers`, all by default. Raises InputError, CheckFailed."""
    numbers = range(len(plan.units)) if numbers is None else list(numbers)
    ready = {number: finished_shards(plan.shards, number) for number in numbers}
    count = sum(map(len, ready.values()))
    if count:
        size = sum(shard.size for shards in ready.values() for shard in shards)
        report(f"going on with a build that was interrupted: {count:,} parts, {size / 1e6:,.0f} MB of text, are there")
    todo = [number for number in numbers if not (ready[number] and ready[number][-1].last)]
    if not todo:
        return
    total = sum(plan.units[number][1].weight for number in numbers)
    done = total - sum(plan.units[number][1].weight for number in todo)
    documents = 0
    with (
        _workers(plan, workers) as pool,
        byte_progress("corpus", total, done, report) as advance,
    ):
        writer: ShardWriter | None = None
        for step, encoded in pool.encode((s, plan.item(s.number), s.chunk) for s in _steps(plan, todo, ready)):
            if writer is None:
                folder = shard_folder(plan.shards, step.number, step.shard)
                side = finished_shards(plan.shards, step.number)[-1].open_side if step.shard else None
                writer = ShardWriter(folder, plan.config.heldout_share, side)
            if step.chunk and encoded:
                writer.add(encoded, step.chunk.size)
                documents += len(encoded.documents)
                advance(step.weight, step.chunk.size, f"{documents:,} documents")
            if step.closes:
                writer.close(step.after, step.last, step.within)
                writer = None


def merge(plan: Plan, out: Path, report: Callable[[str], None] = to_stderr) -> dict[str, Any]:
    """The corpus directory from a plan whose shards are all there; returns its manifest. Raises InputError."""
    shards: list[Shard] = []
    for number in range(len(plan.units)):
        found = finished_shards(plan.shards, number)
        if not found or not found[-1].last:
            raise InputError(f"{plan.work} is not complete: unit {number}, of {plan.item(number).name}, is missing")
        shards += found
    tokenizer = Tokenizer.from_dir(plan.tokenizer_dir)
    dtype = token_dtype(tokenizer.vocab_size)
    with artifacts.publish(out) as staging:
        sums, skipped = merge_shards(shards, staging)
        heldout_by = ensure_both_sides(staging, plan.config, dtype, [item.name for item in plan.inputs])
        if heldout_by == "sentences":
            report("one document only: its last sentences are held out, and every pair will be IsNext")
        tokenizer.save(staging)
        counts: dict[str, Any] = {
            name: sums.get(name, 0) for name in ("documents", "sentences", "tokens", "characters")
        }
        counts["unknown_share"] = sums.get("unknown", 0) / max(counts["tokens"], 1)
        splits = {split: describe(staging / split, dtype) for split in SPLITS}
        manifest = artifacts.write_manifest(
            staging,
            "corpus",
            fingerprint=plan.fingerprint,
            config=plan.config.model_dump(),
            inputs={item.name: item.stamp for item in plan.inputs},
            metrics=counts | {"skipped": skipped, "splits": splits, "heldout_by": heldout_by},
            token_dtype=dtype.str,
            vocab_size=tokenizer.vocab_size,
        )
    report(
        f"{counts['documents']:,} documents, {counts['sentences']:,} sentences, {counts['tokens']:,} tokens, "
        f"{counts['unknown_share']:.2%} unknown; skipped or repaired: "
        + (", ".join(f"{count:,} {reason}" for reason, count in skipped.items()) or "nothing")
    )
    return manifest


@dataclass(frozen=True)
class _Step:
    """A chunk to encode, and whether its shard ends with it; a unit without text is a step without a chunk."""

    number: int  # of the unit
    shard: int
    chunk: Chunk | None
    weight: int  # by which the build has come forward
    closes: bool
    after: int
    last: bool
    within: bool = False  # a document, which goes on in the next shard


def _steps(plan: Plan, numbers: Sequence[int], ready: dict[int, list[Shard]]) -> Iterator[_Step]:
    for number in numbers:
        which, unit = plan.units[number]
        item, shards = plan.inputs[which], ready[number]
        shard, resume = len(shards), shards[-1].after if shards else None
        size = behind = 0
        waiting: Chunk | None = None
        after = resume or 0

        def step(chunk: Chunk, closes: bool, last: bool, within: bool = False) -> _Step:
            nonlocal behind
            place = _behind(item, unit, chunk)  # noqa: B023 - used up within the round
            weight, behind = max(place - behind, 0), max(place, behind)
            return _Step(number, shard, chunk, weight, closes, chunk.after, last, within)  # noqa: B023

        within = bool(shards and shards[-1].open_side)
        for chunk in plan.read(number, resume, within):
            if waiting:
                # between documents, or within one that is longer than several shards
                closes = size >= UNIT_BYTES * (_LONG_SHARD if chunk.joins else 1)
                yield step(waiting, closes, last=False, within=closes and chunk.joins)
                if closes:
                    shard, size = shard + 1, 0
            waiting = chunk
            size += chunk.size
            after = chunk.after
        if waiting:
            yield step(waiting, closes=True, last=True)
        else:
            yield _Step(number, shard, None, 0, True, after, True)


def _behind(item: Input, unit: Unit, chunk: Chunk) -> int:
    """How much of the unit's weight lies before the end of the chunk."""
    if item.compression:
        return chunk.stored * PACKING
    if unit.end is None:
        return chunk.stored
    return chunk.after - unit.start if item.kind in ("text", "jsonl") else chunk.stored


def _workers(plan: Plan, count: int | None) -> Workers:
    if count is None:
        count = min(len(os.sched_getaffinity(0)), _MOST_WORKERS) if plan.weight > _SMALL_BYTES else 0
    config = plan.config
    return Workers(count, plan.tokenizer_dir, config.language, config.text_field, config.seed)


def _train_vocabulary(plan: Plan, report: Callable[[str], None], workers: int | None) -> Tokenizer:
    """A vocabulary from all of the text or, where that is large, from the beginning of each unit, in proportion."""
    words: Counter[str] = Counter()
    budget = plan.config.vocabulary_sample_mib << 20
    total = min(plan.weight, budget)
    if plan.weight > budget:
        report(f"the vocabulary is trained on {plan.config.vocabulary_sample_mib} MiB, spread over all of the text")
    with _workers(plan, workers) as pool, byte_progress("vocabulary", total, 0, report) as advance:
        for chunk, counts in pool.count((c, plan.item(number), c) for number, c in _sample(plan, budget)):
            count_more(words, counts)
            advance(chunk.size, chunk.size, f"{len(words):,} distinct words")
    return vocabulary_of(words, plan.config.vocab_size, plan.config.lowercase)


def _sample(plan: Plan, budget: int) -> Iterator[tuple[int, Chunk]]:
    for number, (which, unit) in enumerate(plan.units):
        item = plan.inputs[which]
        share = budget // len(plan.inputs) if item.size is None else budget
        if plan.weight > budget and item.size is not None:
            share = max(unit.weight * budget // plan.weight, _LEAST_SAMPLE_BYTES)
        left = share
        chunk_bytes = min(CHUNK_BYTES, share)
        for chunk in plan.read(number, chunk_bytes=chunk_bytes):
            yield number, chunk
            left -= chunk.size
            if left < chunk_bytes / 2:
                break


@contextlib.contextmanager
def _alone(work: Path) -> Iterator[None]:
    """Hold the working directory, or raise InputError where another process holds it."""
    if work.parent.is_file() or any(parent.is_file() for parent in work.parents):
        blocking = next(parent for parent in work.parents if parent.is_file())
        raise InputError(f"cannot write {work}: {blocking} is a file, not a directory")
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another process is building this corpus, in {work}; wait for it, or stop it") from None
        try:
            yield
        finally:
            # nothing worth going on with: no trace
            if work.is_dir() and not any((work / "shards").glob("[0-9]*")):
                shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _full_disk_named(work: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(
            f"no space left while writing {work}; free some and start again: it goes on where it was"
        ) from error
