"""Sentences and sentence pairs, classified or scored (Devlin et al. 2019, section 4.1): the kinds."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from bertship.errors import InputError
from bertship.metrics import f1_note, score_labels, score_values
from bertship.tasks.base import (
    Answers,
    Columns,
    Encoded,
    Example,
    Judged,
    Kind,
    Logits,
    Table,
    Task,
    TensorSpec,
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
        rows, truncated = pair_rows(task, tokenizer, texts, range(len(texts[0])))
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

    def metric_note(self, task: Task, metric: str) -> str:
        return f1_note(task.labels) if metric == "f1" else ""

    def degenerate(self, task: Task, examples: Sequence[Example], answers: Answers) -> str:
        predicted = set(answers["LABEL"])
        if len(predicted) == 1 and len({example.target for example in examples}) > 1:
            return f"every answer is {predicted.pop()!r}"
        return ""

    def judged(self, task: Task, examples: Sequence[Example], answers: Answers) -> list[Judged]:
        return [
            Judged(example.target, label, float(score) if label != example.target else 0.0, float(score))
            for example, label, score in zip(examples, answers["LABEL"], answers["SCORE"], strict=True)
        ]

    def tables(self, task: Task, examples: Sequence[Example], answers: Answers) -> list[Table]:
        """The confusion matrix, a row a label of the data and a column a label that was answered; each label's F1."""
        counts = Counter(zip((e.target for e in examples), answers["LABEL"], strict=True))
        matrix, by_label = [], []
        for label in task.labels:
            found = [counts[label, answered] for answered in task.labels]
            right, answered = counts[label, label], sum(counts[gold, label] for gold in task.labels)
            precision, recall = (right / total if total else 0.0 for total in (answered, sum(found)))
            f1 = 2 * right / (answered + sum(found)) if answered + sum(found) else 0.0
            matrix.append((label, *found))
            by_label.append((label, sum(found), precision, recall, f1))
        return [
            ("Confusion matrix", ("labelled \\ answered", *task.labels), matrix),
            ("By label", ("label", "texts", "precision", "recall", "f1"), by_label),
        ]

    def decisions(self, answers: Answers) -> list[Any]:
        return list(answers["LABEL"])

    def example(
        self, task: Task, columns: Mapping[str, Any], target: Any, where: str, id: str = "", start: Any = None
    ) -> Example:
        return Example(columns, None if target is None else task.files.labels.get(target, target), where, id)

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
    inputs: tuple[str, ...] = ("TEXT", "TEXT_PAIR")
    needs_labels = False
    config: ClassVar[Mapping[str, Any]] = {"problem_type": "regression"}

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

    def degenerate(self, task: Task, examples: Sequence[Example], answers: Answers) -> str:
        gold = np.ptp([float(example.target) for example in examples])
        if gold and np.ptp(answers["SCORE"]) < 0.01 * gold:
            return f"every answer is about {float(answers['SCORE'][0]):.3g}"
        return ""

    def judged(self, task: Task, examples: Sequence[Example], answers: Answers) -> list[Judged]:
        return [
            Judged(str(example.target), f"{value:.3f}", abs(float(example.target) - value))
            for example, value in zip(examples, answers["SCORE"].tolist(), strict=True)
        ]

    def tables(self, task: Task, examples: Sequence[Example], answers: Answers) -> list[Table]:
        """Answers by what was wanted."""
        gold = np.array([float(example.target) for example in examples])
        edges = np.unique(np.quantile(gold, np.linspace(0, 1, 6)))
        rows = []
        for low, high in itertools.pairwise(edges):
            chosen = (gold >= low) & ((gold < high) | (high == edges[-1]))
            if chosen.any():
                error = answers["SCORE"][chosen] - gold[chosen]
                rows.append(
                    (f"{low:.3g} to {high:.3g}", int(chosen.sum()), float(error.mean()), float(abs(error).mean()))
                )
        return [("Answers by the wanted value", ("wanted", "texts", "mean error", "mean absolute error"), rows)]

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


@register_kind
class SingleRegression(Regression):
    """One number a text."""

    name = "single_regression"
    inputs = ("TEXT",)


def pair_rows(
    task: Task, tokenizer: Tokenizer, texts: Sequence[Sequence[Tokens]], owners: Sequence[int]
) -> tuple[list[Row], list[bool]]:
    """A row for each tuple of one or two tokenized texts, cut to `max_tokens`, and whether it was cut."""
    room = task.max_tokens - 1 - len(texts)
    rows, truncated = [], []
    for owner, parts in zip(owners, zip(*texts, strict=True), strict=True):
        kept = _cut_longest([len(part) for part in parts], room)
        cut = [_first(part, n) for part, n in zip(parts, kept, strict=True)]
        rows.append(tokenizer.row(cut[0], cut[1] if len(cut) > 1 else None, owner))
        truncated.append(sum(kept) < sum(map(len, parts)))
    return rows, truncated


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
