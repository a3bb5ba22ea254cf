"""Multiple choice: which of several continuations fits (Devlin et al. 2019, section 4.4), and SWAG.

Every choice is encoded with the text as a pair of its own, the head gives each one number, and the softmax is over a
question's choices.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from bertship.errors import InputError, seen
from bertship.metrics import score_labels
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
    Task,
    TensorSpec,
    register,
    register_kind,
    softmax,
)
from bertship.tasks.sentence import pair_rows
from bertship.tokenization import Row, Tokenizer


@register_kind
class MultipleChoice(Kind):
    """One of a question's choices. Targets are its number, from 0."""

    name = "multiple_choice"
    head = "sentence"
    loss = "choice"
    inputs = ("TEXT", "CHOICES")
    row_tensors = (TensorSpec("OWNER", "INT32"),)
    needs_labels = False
    config: ClassVar[Mapping[str, Any]] = {"architectures": ["BertForMultipleChoice"]}

    def request(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("TEXT", "BYTES"), TensorSpec("CHOICES", "BYTES", (-1, -1)))

    def outputs(self, task: Task) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("CHOICE", "INT64"),
            TensorSpec("SCORE", "FP32"),
            TensorSpec("PROBABILITIES", "FP32", (-1, -1)),
        )

    def logits(self, task: Task) -> tuple[TensorSpec, ...]:
        return (TensorSpec("logits", "FP32", (1,)),)

    def width(self, task: Task) -> int:
        return 1

    def encode(self, task: Task, tokenizer: Tokenizer, columns: Columns) -> Encoded:
        """A row a choice: `[CLS] text [SEP] choice [SEP]`."""
        owners = [i for i, choices in enumerate(columns["CHOICES"]) for _ in choices]
        texts = tokenizer.tokenize(columns["TEXT"])
        choices = tokenizer.tokenize([choice for choices in columns["CHOICES"] for choice in choices])
        rows, cut = pair_rows(task, tokenizer, [[texts[i] for i in owners], choices], owners)
        truncated = np.zeros(len(texts), bool)
        np.logical_or.at(truncated, owners, cut)
        return Encoded(rows, truncated)

    def decode(
        self, task: Task, columns: Columns, table: Mapping[str, np.ndarray], logits: Logits, options: Mapping[str, Any]
    ) -> Answers:
        scores = np.stack(list(logits["logits"]))[:, 0]
        probabilities = softmax(scores.reshape(len(columns["TEXT"]), -1)).astype(np.float32)
        best = probabilities.argmax(axis=1)
        return {
            "CHOICE": best.astype(np.int64),
            "SCORE": probabilities[np.arange(len(best)), best],
            "PROBABILITIES": probabilities,
        }

    def units(self, rows: Sequence[Row]) -> list[list[int]]:
        by_owner: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            by_owner.setdefault(row.owner, []).append(i)
        return list(by_owner.values())

    def targets(self, task: Task, rows: Sequence[Row], examples: Sequence[Example]) -> list[Any]:
        return [int(examples[rows[unit[0]].owner].target) for unit in self.units(rows)]

    def score(self, task: Task, examples: Sequence[Example], answers: Answers) -> dict[str, float]:
        gold = [str(example.target) for example in examples]
        return score_labels(task.metrics, gold, [str(choice) for choice in answers["CHOICE"]], sorted(set(gold)))

    def degenerate(self, task: Task, examples: Sequence[Example], answers: Answers) -> str:
        chosen = set(answers["CHOICE"].tolist())
        if len(chosen) == 1 and len({example.target for example in examples}) > 1:
            return f"every answer is choice {chosen.pop()}"
        return ""

    def judged(self, task: Task, examples: Sequence[Example], answers: Answers) -> list[Judged]:
        found = []
        for example, choice, score in zip(examples, answers["CHOICE"], answers["SCORE"], strict=True):
            choices = example.columns["CHOICES"]
            error = float(score) if choice != example.target else 0.0
            found.append(Judged(choices[example.target], choices[choice], error, float(score)))
        return found

    def decisions(self, answers: Answers) -> list[Any]:
        return list(answers["CHOICE"].tolist())

    def example(
        self, task: Task, columns: Mapping[str, Any], target: Any, where: str, id: str = "", start: Any = None
    ) -> Example:
        if target is not None:
            written = str(target).strip()
            if len(written) == 1 and written.isalpha() and written.isascii():  # A, B, C, ...
                target = ord(written.upper()) - ord("A")
            elif written.isascii() and written.isdigit():
                target = int(written)
            else:
                raise InputError(f"{where}: {seen(written)} is no choice; its number from 0, or its letter, is needed")
        return Example(columns, target, where, id)

    def check(self, task: Task, examples: Sequence[Example]) -> None:
        count = len(examples[0].columns["CHOICES"]) if examples else 0
        for example in examples:
            choices = example.columns["CHOICES"]
            if len(choices) != count or count < 2:
                raise InputError(
                    f"{example.where}: {len(choices)} choices, {max(count, 2)} are needed, the same number everywhere"
                )
            if not 0 <= example.target < count:
                raise InputError(f"{example.where}: choice {example.target} of {count}; they count from 0")


_ENDINGS = ("ending0", "ending1", "ending2", "ending3")

register(
    Task(
        name="swag",
        kind="multiple_choice",
        description="which of four sentences follows (SWAG)",
        metrics=("accuracy",),
        files=Files(
            format="csv",
            splits={"train": ("train.csv",), "dev": ("val.csv",), "test": ("test.csv",)},
            columns={"TEXT": "sent1", "CHOICES": _ENDINGS},
            prefix="sent2",
            rows={"train": 73_546, "dev": 20_006, "test": 20_005},
        ),
        hub=Hub(
            "allenai/swag",
            "regular",
            splits={"train": "train", "dev": "validation", "test": "test"},
            columns={"TEXT": "sent1", "CHOICES": _ENDINGS},
            prefix="sent2",
        ),
        training={"batch_size": 16, "epochs": 2},
    )
)
