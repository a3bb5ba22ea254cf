"""Sentences and sentence pairs, classified or scored (Devlin et al. 2019, sections 4.1 and B.1), and GLUE's tasks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bertship.errors import InputError
from bertship.metrics import score_labels, score_values
from bertship.tasks.base import (
    Answers,
    Columns,
    Encoded,
    Example,
    Files,
    Kind,
    Logits,
    Task,
    TensorSpec,
    register,
    register_kind,
    softmax,
)
from bertship.tokenization import Row, Tokenizer, Tokens


@register_kind
class Sentence(Kind):
    """One label a text."""

    name = "sentence"
    head = "sentence"
    loss = "cross_entropy"
    inputs: tuple[str, ...] = ("TEXT",)

    def outputs(self, task: Task) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("LABEL", "BYTES"),
            TensorSpec("SCORE", "FP32"),
            TensorSpec("PROBABILITIES", "FP32", (-1, len(task.labels))),
        )

    def logits(self, task: Task) -> tuple[TensorSpec, ...]:
        return (TensorSpec("logits", "FP32", (self.width(task),)),)

    def encode(self, task: Task, tokenizer: Tokenizer, columns: Columns) -> Encoded:
        texts = [tokenizer.tokenize(columns[name]) for name in self.inputs]
        room = task.max_tokens - 1 - len(texts)
        rows, truncated = [], []
        for owner, parts in enumerate(zip(*texts, strict=True)):
            kept = _cut_longest([len(part) for part in parts], room)
            cut = [_first(part, n) for part, n in zip(parts, kept, strict=True)]
            rows.append(tokenizer.row(cut[0], cut[1] if len(cut) > 1 else None, owner))
            truncated.append(sum(kept) < sum(map(len, parts)))
        return Encoded(rows, np.array(truncated, bool))

    def decode(
        self, task: Task, columns: Columns, table: Mapping[str, np.ndarray], logits: Logits, options: Mapping[str, Any]
    ) -> Answers:
        probabilities = softmax(np.stack(list(logits["logits"]))).astype(np.float32)
        best = probabilities.argmax(axis=1)
        return {
            "LABEL": np.array([task.labels[i] for i in best], object),
            "SCORE": probabilities[np.arange(len(best)), best],
            "PROBABILITIES": probabilities,
        }

    def targets(self, task: Task, rows: Sequence[Row], examples: Sequence[Example]) -> list[Any]:
        return [task.labels.index(examples[row.owner].target) for row in rows]

    def score(self, task: Task, examples: Sequence[Example], answers: Answers) -> dict[str, float]:
        return score_labels(task.metrics, [e.target for e in examples], list(answers["LABEL"]), task.labels)

    def decisions(self, answers: Answers) -> list[Any]:
        return list(answers["LABEL"])

    def check(self, task: Task, examples: Sequence[Example]) -> None:
        for example in examples:
            if example.target not in task.labels:
                raise InputError(
                    f"{example.where}: label {example.target!r} is unknown to task {task.name}; "
                    f"its labels are {', '.join(task.labels)}"
                )


@register_kind
class Pair(Sentence):
    """One label a pair of texts."""

    name = "pair"
    inputs = ("TEXT", "TEXT_PAIR")


@register_kind
class Regression(Sentence):
    """One number a pair of texts."""

    name = "regression"
    loss = "mean_squared_error"
    inputs = ("TEXT", "TEXT_PAIR")
    needs_labels = False

    def outputs(self, task: Task) -> tuple[TensorSpec, ...]:
        return (TensorSpec("SCORE", "FP32"),)

    def width(self, task: Task) -> int:
        return 1

    def decode(
        self, task: Task, columns: Columns, table: Mapping[str, np.ndarray], logits: Logits, options: Mapping[str, Any]
    ) -> Answers:
        return {"SCORE": np.stack(list(logits["logits"]))[:, 0].astype(np.float32)}

    def targets(self, task: Task, rows: Sequence[Row], examples: Sequence[Example]) -> list[Any]:
        return [float(examples[row.owner].target) for row in rows]

    def score(self, task: Task, examples: Sequence[Example], answers: Answers) -> dict[str, float]:
        return score_values(task.metrics, [float(e.target) for e in examples], answers["SCORE"])

    def decisions(self, answers: Answers) -> list[Any]:
        return [None] * len(answers["SCORE"])

    def check(self, task: Task, examples: Sequence[Example]) -> None:
        for example in examples:
            try:
                finite = np.isfinite(float(example.target))
            except ValueError:
                finite = False
            if not finite:
                raise InputError(f"{example.where}: score {example.target!r} is no finite number")


def _first(tokens: Tokens, n: int) -> Tokens:
    return Tokens(tokens.ids[:n], tokens.offsets[:n])


def _cut_longest(lengths: Sequence[int], room: int) -> list[int]:
    """Lengths cut to `room` together, always from the longest; the second gives way first on a tie."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    first, second = lengths
    half = room // 2
    if first + second <= room:
        return [first, second]
    if first <= room - half:
        return [first, room - first]
    if second <= half:
        return [room - second, second]
    return [room - half, half]


register(
    Task(
        name="sst2",
        kind="sentence",
        description="sentiment of a movie-review sentence (SST-2)",
        labels=("negative", "positive"),
        metrics=("accuracy",),
        files=Files(
            splits={"train": ("train.tsv",), "dev": ("dev.tsv",)},
            columns={"TEXT": "sentence"},
            labels={"0": "negative", "1": "positive"},
        ),
        packaged="reviews",
        training={"epochs": 2, "learning_rate": 1e-4},
    )
)
register(
    Task(
        name="mnli",
        kind="pair",
        description="does the premise (TEXT) entail the hypothesis (TEXT_PAIR)? (MNLI)",
        labels=("entailment", "neutral", "contradiction"),
        metrics=("accuracy",),
        files=Files(
            splits={"train": ("train.tsv",), "dev": ("dev_matched.tsv", "dev.tsv")},
            columns={"TEXT": "sentence1", "TEXT_PAIR": "sentence2"},
            target="gold_label",
        ),
    )
)
register(
    Task(
        name="stsb",
        kind="regression",
        description="similarity of two sentences, 0 to 5 (STS-B)",
        metrics=("pearson", "spearman"),
        files=Files(
            splits={"train": ("train.tsv",), "dev": ("dev.tsv",)},
            columns={"TEXT": "sentence1", "TEXT_PAIR": "sentence2"},
            target="score",
        ),
    )
)
