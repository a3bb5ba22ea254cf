"""What a client's typed methods return: one frozen object an answer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from bertship.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Classification:
    """`label` with its probability `score`; `probabilities` of all labels add up to 1.

    They are in the order of the labels in the task's `task.json`, which `Client.labels` names.
    """

    label: str
    score: float
    probabilities: tuple[float, ...]
    truncated: bool

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        return cls(record["LABEL"], record["SCORE"], tuple(record["PROBABILITIES"]), record["TRUNCATED"])


@dataclass(frozen=True, slots=True)
class Value:
    """A regression's `score`, in the task's own units."""

    score: float
    truncated: bool

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        if record.keys() - {"SCORE", "TRUNCATED"}:  # every kind has a SCORE
            raise KeyError("SCORE alone")
        return cls(record["SCORE"], record["TRUNCATED"])


@dataclass(frozen=True, slots=True)
class Choice:
    """`choice` is the index of the alternative that was taken, `score` its probability."""

    choice: int
    score: float
    probabilities: tuple[float, ...]
    truncated: bool

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        return cls(record["CHOICE"], record["SCORE"], tuple(record["PROBABILITIES"]), record["TRUNCATED"])


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a context: code points `start` to `end` (exclusive), -1 and empty `text` for no answer."""

    text: str
    score: float
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Answer(Span):
    """The best span, and `candidates`: the `top_k` best, itself among them. `truncated`: the question was cut."""

    candidates: tuple[Span, ...]
    truncated: bool

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        candidates = tuple(
            Span(found["answer"], found["score"], found["start"], found["end"]) for found in record["CANDIDATES"]
        )
        best = record["ANSWER"], record["SCORE"], record["START"], record["END"]
        return cls(*best, candidates, record["TRUNCATED"])


@dataclass(frozen=True, slots=True)
class Entity:
    """`text` is code points `start` to `end` (exclusive) of what was asked; `score` is its probability."""

    label: str
    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True, slots=True)
class Entities:
    """The entities of one text, in order; iterates over them."""

    entities: tuple[Entity, ...]
    truncated: bool

    def __iter__(self) -> Iterator[Entity]:
        return iter(self.entities)

    def __len__(self) -> int:
        return len(self.entities)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        found = tuple(Entity(e["label"], e["text"], e["start"], e["end"], e["score"]) for e in record["ENTITIES"])
        return cls(found, record["TRUNCATED"])


R = TypeVar("R", Classification, Value, Choice, Answer, Entities)


def typed(kind: type[R], task: str, records: Sequence[Mapping[str, Any]]) -> list[R]:
    """A reply's records as objects of `kind`. Raises InvalidRequest where the task answers something else."""
    try:
        return [kind.from_record(record) for record in records]
    except KeyError as error:
        answers = ", ".join(records[0])
        raise InvalidRequest(
            f"{task} gives no {kind.__name__} (there is no {error.args[0]}): it answers {answers}"
        ) from None
