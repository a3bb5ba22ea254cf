"""Sentences and sentence pairs, classified or scored (Devlin et al. 2019, sections 4.1 and B.1), and GLUE's tasks."""

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
    Files,
    Hub,
    Judged,
    Kind,
    Logits,
    Table,
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
        """Precision, recall and F1 of each label, and the confusion matrix: a row a label of the data, a column an
        answered one.
        """
        counts = Counter(zip((e.target for e in examples), answers["LABEL"], strict=True))
        matrix, scores = [], []
        for label in task.labels:
            row = [counts[label, answered] for answered in task.labels]
            wanted, given = sum(row), sum(counts[gold, label] for gold in task.labels)
            right = counts[label, label]
            precision, recall = (right / n if n else 0.0 for n in (given, wanted))
            f1 = 2 * right / (wanted + given) if wanted + given else 0.0
            matrix.append((label, *row))
            scores.append((label, wanted, given, precision, recall, f1))
        return [
            ("By label", ("label", "labelled", "answered", "precision", "recall", "F1"), scores),
            ("Confusion matrix", ("labelled \\ answered", *task.labels), matrix),
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


_SPLITS = {"train": ("train.tsv",), "dev": ("dev.tsv",), "test": ("test.tsv",)}
_HUB_SPLITS = {"train": "train", "dev": "validation", "test": "test"}
_HUB = "nyu-mll/glue"
_TWO = {"TEXT": "sentence1", "TEXT_PAIR": "sentence2"}
_THREE_WAY = ("entailment", "neutral", "contradiction")

register(
    Task(
        name="sst2",
        kind="sentence",
        description="sentiment of a movie-review sentence (SST-2)",
        labels=("negative", "positive"),
        metrics=("accuracy",),
        files=Files(
            splits=_SPLITS,
            columns={"TEXT": "sentence"},
            labels={"0": "negative", "1": "positive"},
            folders=("SST-2",),
            rows={"train": 67_349, "dev": 872, "test": 1_821},
        ),
        hub=Hub(_HUB, "sst2", splits=_HUB_SPLITS, columns={"TEXT": "sentence"}),
        submission={"SST-2.tsv": "test"},
        packaged="reviews",
        training={"epochs": 2, "learning_rate": 1e-4},
    )
)
register(
    Task(
        name="cola",
        kind="sentence",
        description="is the sentence acceptable English? (CoLA)",
        labels=("unacceptable", "acceptable"),
        metrics=("mcc", "accuracy"),
        files=Files(
            splits=_SPLITS,
            columns={"TEXT": 3},
            target=1,
            header=False,
            test_columns={"TEXT": "sentence"},
            labels={"0": "unacceptable", "1": "acceptable"},
            folders=("CoLA",),
            rows={"train": 8_551, "dev": 1_043, "test": 1_063},
        ),
        hub=Hub(_HUB, "cola", splits=_HUB_SPLITS, columns={"TEXT": "sentence"}),
        submission={"CoLA.tsv": "test"},
    )
)
register(
    Task(
        name="mrpc",
        kind="pair",
        description="do two sentences say the same? (MRPC)",
        labels=("not_equivalent", "equivalent"),
        metrics=("f1", "accuracy"),
        files=Files(
            splits={
                "train": ("train.tsv", "msr_paraphrase_train.txt"),
                "dev": ("dev.tsv", "msr_paraphrase_test.txt"),
                "test": ("test.tsv",),
            },
            columns={"TEXT": "#1 String", "TEXT_PAIR": "#2 String"},
            target="Quality",
            labels={"0": "not_equivalent", "1": "equivalent"},
            folders=("MRPC",),
            rows={"train": 3_668, "dev": 408, "test": 1_725},
        ),
        hub=Hub(_HUB, "mrpc", splits=_HUB_SPLITS, columns=_TWO),
        submission={"MRPC.tsv": "test"},
    )
)
register(
    Task(
        name="stsb",
        kind="regression",
        description="similarity of two sentences, 0 to 5 (STS-B)",
        metrics=("pearson", "spearman"),
        files=Files(
            splits=_SPLITS,
            columns=_TWO,
            target="score",
            folders=("STS-B",),
            rows={"train": 5_749, "dev": 1_500, "test": 1_379},
        ),
        hub=Hub(_HUB, "stsb", splits=_HUB_SPLITS, columns=_TWO),
        submission={"STS-B.tsv": "test"},
    )
)
register(
    Task(
        name="qqp",
        kind="pair",
        description="do two questions ask the same? (QQP)",
        labels=("not_duplicate", "duplicate"),
        metrics=("f1", "accuracy"),
        files=Files(
            splits=_SPLITS,
            columns={"TEXT": "question1", "TEXT_PAIR": "question2"},
            target="is_duplicate",
            labels={"0": "not_duplicate", "1": "duplicate"},
            ragged=True,
            folders=("QQP",),
            rows={"train": 363_849, "dev": 40_430, "test": 390_965},
        ),
        hub=Hub(_HUB, "qqp", splits=_HUB_SPLITS, columns={"TEXT": "question1", "TEXT_PAIR": "question2"}),
        submission={"QQP.tsv": "test"},
    )
)
register(
    Task(
        name="mnli",
        kind="pair",
        description="does the premise (TEXT) entail the hypothesis (TEXT_PAIR)? (MNLI)",
        labels=_THREE_WAY,
        metrics=("accuracy",),
        files=Files(
            splits={
                "train": ("train.tsv",),
                "dev": ("dev_matched.tsv", "dev.tsv"),
                "dev_mismatched": ("dev_mismatched.tsv",),
                "test": ("test_matched.tsv",),
                "test_mismatched": ("test_mismatched.tsv",),
            },
            columns=_TWO,
            target="gold_label",
            unlabelled=("-",),
            folders=("MNLI",),
            rows={"train": 392_702, "dev": 9_815, "dev_mismatched": 9_832, "test": 9_796, "test_mismatched": 9_847},
        ),
        hub=Hub(
            _HUB,
            "mnli",
            splits={
                "train": "train",
                "dev": "validation_matched",
                "dev_mismatched": "validation_mismatched",
                "test": "test_matched",
                "test_mismatched": "test_mismatched",
            },
            columns={"TEXT": "premise", "TEXT_PAIR": "hypothesis"},
        ),
        more_splits=("dev_mismatched",),
        submission={"MNLI-m.tsv": "test", "MNLI-mm.tsv": "test_mismatched"},
    )
)
register(
    Task(
        name="qnli",
        kind="pair",
        description="does the sentence (TEXT_PAIR) answer the question (TEXT)? (QNLI)",
        labels=("entailment", "not_entailment"),
        metrics=("accuracy",),
        files=Files(
            splits=_SPLITS,
            columns={"TEXT": "question", "TEXT_PAIR": "sentence"},
            folders=("QNLI",),
            rows={"train": 104_743, "dev": 5_463, "test": 5_463},
        ),
        hub=Hub(_HUB, "qnli", splits=_HUB_SPLITS, columns={"TEXT": "question", "TEXT_PAIR": "sentence"}),
        submission={"QNLI.tsv": "test"},
    )
)
register(
    Task(
        name="rte",
        kind="pair",
        description="does the text (TEXT) entail the hypothesis (TEXT_PAIR)? (RTE)",
        labels=("entailment", "not_entailment"),
        metrics=("accuracy",),
        files=Files(splits=_SPLITS, columns=_TWO, folders=("RTE",), rows={"train": 2_490, "dev": 277, "test": 3_000}),
        hub=Hub(_HUB, "rte", splits=_HUB_SPLITS, columns=_TWO),
        submission={"RTE.tsv": "test"},
    )
)
register(
    Task(
        name="wnli",
        kind="pair",
        description="is the pronoun resolved rightly? (WNLI; its dev split contradicts its training split)",
        labels=("not_entailment", "entailment"),
        metrics=("accuracy",),
        files=Files(
            splits=_SPLITS,
            columns=_TWO,
            labels={"0": "not_entailment", "1": "entailment"},
            folders=("WNLI",),
            rows={"train": 635, "dev": 71, "test": 146},
        ),
        hub=Hub(_HUB, "wnli", splits=_HUB_SPLITS, columns=_TWO),
        submission={"WNLI.tsv": "test"},
    )
)
register(
    Task(
        name="ax",
        kind="pair",
        description="GLUE's diagnostics: trained on MNLI, judged on phenomena (AX)",
        labels=_THREE_WAY,
        metrics=("mcc", "accuracy"),
        files=Files(
            splits={"train": ("train.tsv",), "dev": ("diagnostic-full.tsv",), "test": ("diagnostic.tsv",)},
            columns=_TWO,
            target="gold_label",
            aliases={"sentence1": ("Premise",), "sentence2": ("Hypothesis",), "gold_label": ("Label",)},
            unlabelled=("-",),
            folders=("diagnostic", "AX", "MNLI"),
            rows={"train": 392_702, "dev": 1_104, "test": 1_104},
        ),
        # the hub has the diagnostics without labels: there the dev split is MNLI's
        hub=Hub(
            _HUB,
            "mnli",
            splits={"train": "train", "dev": "validation_matched"},
            columns={"TEXT": "premise", "TEXT_PAIR": "hypothesis"},
        ),
        submission={"AX.tsv": "test"},
    )
)
