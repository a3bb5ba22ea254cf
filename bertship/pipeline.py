"""Texts to rows to logits to answers, in NumPy: `predict`, the parity gate and Triton's steps all run this code."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from bertship.errors import InputError
from bertship.tasks.base import Answers, Columns, Encoded, Logits, Task, read_options, row_table
from bertship.tokenization import Row, Tokenizer

BATCH_ROWS = 256  # rows tokenized, run and decoded together; bounds the memory of a whole dev set


class Runner(Protocol):
    """Runs rows through an encoder: row w's logits are item w of each output."""

    def __call__(self, rows: Sequence[Row]) -> Logits: ...


class Pipeline:
    """One task, ready to answer.

    >>> pipeline({"TEXT": ["a joy to watch"]})["LABEL"]
    array(['positive'], dtype=object)
    """

    def __init__(self, task: Task, tokenizer: Tokenizer, runner: Runner) -> None:
        self.task, self.tokenizer, self.runner = task, tokenizer, runner

    def __call__(self, columns: Columns, parameters: Mapping[str, Any] | None = None) -> Answers:
        """Answers for lists of texts by tensor name, TRUNCATED included. Raises InputError as the server would."""
        check_columns(self.task, columns)
        options = read_options(self.task, parameters)
        total = len(columns[self.task.behaviour.inputs[0]])
        parts = []
        for start in range(0, total, BATCH_ROWS):
            part = {name: list(values[start : start + BATCH_ROWS]) for name, values in columns.items()}
            encoded = encode(self.task, self.tokenizer, part)
            logits = self.runner(encoded.rows)
            table = row_table(self.task.behaviour, encoded.rows)
            answers = self.task.behaviour.decode(self.task, part, table, logits, options)
            parts.append({**answers, "TRUNCATED": encoded.truncated})
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def encode(task: Task, tokenizer: Tokenizer, columns: Columns) -> Encoded:
    """The task's rows for texts that `check_columns` has passed."""
    return task.behaviour.encode(task, tokenizer, columns)


def check_columns(task: Task, columns: Columns) -> None:
    """Refuse what cannot be answered: a missing or empty list, unequal lengths, no strings, too many characters."""
    names = task.behaviour.inputs
    for name in names:
        if name not in columns:
            raise InputError(f"{task.name}: input {name} is missing; it takes {', '.join(names)}")
    lengths = {name: len(columns[name]) for name in names}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise InputError(f"{task.name}: inputs of unequal length: {shown} elements; one of each a question is needed")
    if lengths[names[0]] == 0:
        raise InputError(f"{task.name}: {names[0]} is an empty list; at least one element is needed")
    for name in names:
        for i, text in enumerate(columns[name]):
            if not isinstance(text, str):
                raise InputError(f"{task.name}: {name}[{i}] is {text!r:.60}, a string is needed")
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise InputError(
                    f"{task.name}: {name}[{i}] has a lone surrogate {text[error.start]!r} at character {error.start}; "
                    "decode the text with the right encoding first"
                ) from None
    characters = sum(len(text) for name in names for text in columns[name])
    if characters > task.max_characters:
        raise InputError(
            f"{task.name}: the request has {characters:,} characters; at most {task.max_characters:,} are allowed, "
            "send fewer or shorter texts"
        )
