"""Texts to rows to logits to answers, in NumPy: `predict`, the parity gate and Triton's steps all run this code."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bertship.artifacts import check_files, read_manifest
from bertship.errors import InputError, seen
from bertship.tasks.base import Answers, Columns, Encoded, Logits, Task, nested, read_options, row_table
from bertship.tokenization import Row, Tokenizer

JSON_OUTPUTS = ("CANDIDATES", "ENTITIES")  # text that holds JSON
FIRST = ("LABEL", "CHOICE", "ANSWER", "ENTITIES", "SCORE")  # what a reader of an answer looks for, before the rest
BATCH_ROWS = 256  # rows tokenized, run and decoded together; bounds the memory of a whole dev set


class Runner(Protocol):
    """Runs rows through an encoder: row w's logits are item w of each output."""

    def __call__(self, rows: Sequence[Row]) -> Logits: ...


class Pipeline:
    """One task, ready to answer.

    >>> pipeline({"TEXT": ["a joy to watch"]})["LABEL"]
    array(['positive'], dtype=object)
    """

    def __init__(self, task: Task, tokenizer: Tokenizer, runner: Runner, details: bool = False) -> None:
        """`details` adds to the answers what only an evaluation needs."""
        self.task, self.tokenizer, self.runner = task, tokenizer, runner
        self._decode = task.behaviour.details if details else task.behaviour.decode

    def __call__(self, columns: Columns, parameters: Mapping[str, Any] | None = None) -> Answers:
        """Answers for lists of texts by tensor name, TRUNCATED included: a request's, or a whole data set's.

        Raises InputError for what cannot be answered.
        """
        check_columns(self.task, columns)
        options = read_options(self.task, parameters)
        total = len(columns[self.task.behaviour.inputs[0]])
        parts = []
        for start in range(0, total, BATCH_ROWS):
            part = {name: list(values[start : start + BATCH_ROWS]) for name, values in columns.items()}
            encoded = encode(self.task, self.tokenizer, part)
            logits = self.runner(encoded.rows)
            table = row_table(self.task.behaviour, encoded.rows)
            answers = self._decode(self.task, part, table, logits, options)
            parts.append({**answers, "TRUNCATED": encoded.truncated})
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def ask(self, columns: Columns, parameters: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """The answers to one request as plain Python, one dict an element; its size is checked as a server would."""
        check_columns(self.task, columns)
        check_size(self.task, columns)
        return as_records(self(columns, parameters))


def as_records(answers: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Answers by tensor name as one dict an element, with JSON outputs read."""

    def plain(name: str, value: Any) -> Any:
        if name in JSON_OUTPUTS:
            return json.loads(value)
        return value.tolist() if isinstance(value, np.ndarray | np.generic) else value

    count = len(next(iter(answers.values())))
    ordered = sorted(answers, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
    return [{name: plain(name, answers[name][i]) for name in ordered} for i in range(count)]


def from_export(export: Path, precision: str | None = None, threads: int | None = None) -> Pipeline:
    """The pipeline of an export directory on ONNX Runtime; `precision` None takes what would be served."""
    from bertship.runners import OnnxRunner

    manifest = read_manifest(export, "export")
    graph = graph_of(manifest, precision)
    check_files(export, manifest, ("task.json", "tokenizer.json", graph))
    runner = OnnxRunner(export / graph, threads)
    return Pipeline(Task.from_file(export / "task.json"), Tokenizer.from_file(export / "tokenizer.json"), runner)


def graph_of(manifest: Mapping[str, Any], precision: str | None) -> str:
    """The file name of an export's graph in `precision`, or in the one that would be served. Raises InputError."""
    graphs = manifest["graphs"]
    chosen = precision or manifest["serve"]
    if chosen not in graphs:
        raise InputError(f"the export of {manifest['task']} has no {chosen} graph; it has {', '.join(graphs)}")
    return str(graphs[chosen])


def encode(task: Task, tokenizer: Tokenizer, columns: Columns) -> Encoded:
    """The task's rows for texts that `check_columns` has passed."""
    return task.behaviour.encode(task, tokenizer, columns)


def check_columns(task: Task, columns: Columns) -> None:
    """Refuse what cannot be answered: a missing or empty list, unequal lengths, no strings."""
    names = task.behaviour.inputs
    for name in names:
        if name not in columns:
            raise InputError(f"{task.name}: input {name} is missing; it takes {', '.join(names)}")
    for name, texts in columns.items():
        if name not in (*names, *task.behaviour.annotations):
            raise InputError(f"{task.name}: unknown input {name}; it takes {', '.join(names)}")
        if isinstance(texts, str | bytes) or not hasattr(texts, "__len__"):
            raise InputError(f"{task.name}: {name} is {seen(texts)}, a list of strings is needed")
    lengths = {name: len(columns[name]) for name in names}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise InputError(f"{task.name}: inputs of unequal length: {shown} elements; one of each a question is needed")
    if lengths[names[0]] == 0:
        raise InputError(f"{task.name}: {names[0]} is an empty list; at least one element is needed")
    for spec in task.behaviour.request():
        for i, element in enumerate(columns[spec.name]):
            if len(spec.dims) == 1:
                _check_text(task, f"{spec.name}[{i}]", element)
            else:
                _check_list(task, spec.name, i, element, len(columns[spec.name][0]))


def _check_list(task: Task, name: str, i: int, texts: Any, needed: int) -> None:
    if not isinstance(texts, list | tuple | np.ndarray):
        raise InputError(f"{task.name}: {name}[{i}] is {seen(texts)}, a list of strings is needed")
    if len(texts) != needed or len(texts) < 2:
        raise InputError(
            f"{task.name}: {name}[{i}] has {len(texts)} elements; two or more are needed, everywhere the same number"
        )
    for j, text in enumerate(texts):
        _check_text(task, f"{name}[{i}][{j}]", text)


def _check_text(task: Task, where: str, text: Any) -> None:
    if not isinstance(text, str):
        raise InputError(f"{task.name}: {where} is {seen(text)}, a string is needed")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{task.name}: {where} has a lone surrogate {text[error.start]!r} at character {error.start}; "
            "decode the text with the right encoding first"
        ) from None


def check_size(task: Task, columns: Columns) -> None:
    """Refuse more characters than one request may have; a whole data set is no request."""
    names = task.behaviour.inputs
    characters = sum(len(text) for name in names for text in nested(columns[name]))
    if characters > task.max_characters:
        raise InputError(
            f"{task.name}: the request has {characters:,} characters; at most {task.max_characters:,} are allowed, "
            "send fewer or shorter texts"
        )
