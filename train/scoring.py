"""A model's answers to labelled examples and their metrics, through the same pipeline that serves it."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bertship.pipeline import BATCH_ROWS, Pipeline, Runner
from bertship.progress import progress
from bertship.tasks import Example, Task
from bertship.tasks.base import Answers
from bertship.tokenization import Tokenizer

Report = Callable[[str], None]


def columns_of(task: Task, examples: Sequence[Example], annotations: bool = False) -> dict[str, list[Any]]:
    """The examples' texts by tensor name; with what only labelled data has where `annotations` is set."""
    names = task.behaviour.inputs + (task.behaviour.annotations if annotations else ())
    return {name: [example.columns[name] for example in examples] for name in names}


def answer(
    task: Task,
    tokenizer: Tokenizer,
    runner: Runner,
    columns: dict[str, list[Any]],
    report: Report | None = None,
    what: str = "answering",
) -> Answers:
    """The answers to a whole data set with the kind's details; `report` is told now and then how far it is."""
    pipeline = Pipeline(task, tokenizer, runner, details=True)
    total = len(columns[task.behaviour.inputs[0]])
    starts = range(0, total, BATCH_ROWS)
    parts = []
    with progress(what, len(starts), report) if report else contextlib.nullcontext(lambda facts: None) as advance:
        for start in starts:
            parts.append(pipeline({name: values[start : start + BATCH_ROWS] for name, values in columns.items()}))
            advance(f"{min(start + BATCH_ROWS, total):,} of {total:,} examples")
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def evaluate(
    task: Task,
    tokenizer: Tokenizer,
    runner: Runner,
    examples: Sequence[Example],
    report: Report | None = None,
) -> tuple[dict[str, float], Answers]:
    """Metrics (shares are 0..1) and the answers that they judge, with the kind's details.

    Where the data says more than a request would (the words of a CoNLL file), the metrics use it, as is usual, and
    `served_*` are those of the plain texts.
    """
    answers = answer(task, tokenizer, runner, columns_of(task, examples, annotations=True), report, "evaluating")
    metrics = task.behaviour.score(task, examples, answers)
    return metrics | served(task, tokenizer, runner, examples, report), answers


def served(
    task: Task, tokenizer: Tokenizer, runner: Runner, examples: Sequence[Example], report: Report | None = None
) -> dict[str, float]:
    """`served_*`: the metrics of the plain texts, where labelled data says more than a request would."""
    if not task.behaviour.annotations:
        return {}
    plain = answer(task, tokenizer, runner, columns_of(task, examples), report, "evaluating as served")
    return {f"served_{name}": value for name, value in task.behaviour.score(task, examples, plain).items()}
