"""What a build of a corpus does, decided before it begins: the units to read and the vocabulary to use."""

import contextlib
import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bertship import artifacts
from bertship.config import CorpusConfig
from bertship.errors import InputError
from bertship.progress import byte_progress, to_stderr
from bertship.tokenization import Tokenizer
from train.chunks import CHUNK_BYTES, Chunk, Unit
from train.inputs import Input, Source, find_inputs
from train.readers import read_chunks, units_of
from train.vocabulary import count_more, vocabulary_of
from train.workers import Workers

_ROOT = Path(__file__).parents[1]
_MODULES = (
    *("chunks", "corpus", "encode", "inputs", "lines", "plan", "readers", "rows"),
    *("shards", "splits", "vocabulary", "wikitext"),
)
_CODE = (
    "bertship/tokenization.py",
    *(f"train/{name}.py" for name in _MODULES),
)
LOCK = "lock"  # in the working directory, whoever builds there holds it
_SMALL_BYTES = 1 << 22  # of text: starting processes would take longer
_MOST_WORKERS = 4  # unless more are asked for: each takes memory
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
    artifacts.clear_directory(work, but=LOCK)
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


def workers_for(plan: Plan, count: int | None) -> Workers:
    """`count` processes, or none where the text is little; for None one a core, four at most."""
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
    with workers_for(plan, workers) as pool, byte_progress("vocabulary", total, 0, report) as advance:
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
