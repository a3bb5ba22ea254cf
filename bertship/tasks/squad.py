"""Extractive question answering (Devlin et al. 2019, sections 4.2 and 4.3).

A long context becomes overlapping windows; `spans.py` finds the best answer over all of them.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from bertship.errors import InputError, seen
from bertship.metrics import best_null_threshold, score_squad, squad_f1
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
    Option,
    Table,
    Task,
    TensorSpec,
    register,
    register_kind,
)
from bertship.tasks.spans import best_answers
from bertship.tokenization import NO_OFFSET, Row, Tokenizer, Tokens, windows

MAX_QUESTION_TOKENS = 64
N_BEST = 20  # spans of a question that an evaluation writes down


class Gold(NamedTuple):
    """What a question's target is: its id and the accepted answers, as (text, first code point); none: no answer."""

    id: str
    answers: tuple[tuple[str, int], ...]


@register_kind
class Span(Kind):
    """The answer is a span of the context, or there is none."""

    name = "span"
    head = "span"
    loss = "span"
    inputs = ("QUESTION", "CONTEXT")
    row_tensors = (TensorSpec("OWNER", "INT32"), TensorSpec("OFFSETS", "INT32", (-1, -1, 2)))
    options: ClassVar[Mapping[str, Option]] = {
        "top_k": Option(int, 1, 100),
        "max_answer_tokens": Option(int, 1, 512),
        "null_threshold": Option(float, -1e4, 1e4, optional=True),
    }
    needs_labels = False

    def outputs(self, task: Task) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("ANSWER", "BYTES"),
            TensorSpec("SCORE", "FP32"),
            TensorSpec("START", "INT64"),
            TensorSpec("END", "INT64"),
            TensorSpec("CANDIDATES", "BYTES"),
        )

    def logits(self, task: Task) -> tuple[TensorSpec, ...]:
        return (TensorSpec("start_logits", "FP32"), TensorSpec("end_logits", "FP32"))

    def width(self, task: Task) -> int:
        return 2

    def encode(self, task: Task, tokenizer: Tokenizer, columns: Columns) -> Encoded:
        questions = tokenizer.tokenize(columns["QUESTION"])
        contexts = tokenizer.tokenize(columns["CONTEXT"])
        # at least one token of context stays beside [CLS], [SEP], [SEP], or windows would never advance
        cap = min(MAX_QUESTION_TOKENS, task.max_tokens - 4)
        rows = []
        for owner, (question, context) in enumerate(zip(questions, contexts, strict=True)):
            asked = Tokens(question.ids[:cap], question.offsets[:cap])
            size = task.max_tokens - len(asked) - 3
            for start, end in windows(len(context), size, min(task.overlap, size - 1)):
                row = tokenizer.row(asked, Tokens(context.ids[start:end], context.offsets[start:end]), owner)
                offsets = np.full((len(row), 2), NO_OFFSET, np.int32)
                offsets[len(asked) + 2 : -1] = context.offsets[start:end]
                rows.append(Row(row.ids, row.types, owner, offsets))
        return Encoded(rows, np.array([len(question) > cap for question in questions], bool))

    def decode(
        self, task: Task, columns: Columns, table: Mapping[str, np.ndarray], logits: Logits, options: Mapping[str, Any]
    ) -> Answers:
        found = best_answers(columns["CONTEXT"], table, logits, options)
        return {
            "ANSWER": np.array([answer["answer"] for answer in found], object),
            "SCORE": np.array([answer["score"] for answer in found], np.float32),
            "START": np.array([answer["start"] for answer in found], np.int64),
            "END": np.array([answer["end"] for answer in found], np.int64),
            "CANDIDATES": np.array([json.dumps(a["candidates"], ensure_ascii=False) for a in found], object),
        }

    def details(
        self, task: Task, columns: Columns, table: Mapping[str, np.ndarray], logits: Logits, options: Mapping[str, Any]
    ) -> Answers:
        """The answers and, whatever the threshold says: NULL_ODDS, by how much the null answer's logits exceed the
        best span's, and NULL_SCORE, its probability, float64 [N]; SPAN, the best span's text; NBEST, the best as JSON.
        """
        found = best_answers(columns["CONTEXT"], table, logits, {**options, "top_k": N_BEST})
        return {
            **self.decode(task, columns, table, logits, options),
            "NULL_ODDS": np.array([answer["null_odds"] for answer in found], np.float64),
            "NULL_SCORE": np.array([answer["null_score"] for answer in found], np.float64),
            "SPAN": np.array([answer["spans"][0]["answer"] if answer["spans"] else "" for answer in found], object),
            "NBEST": np.array([json.dumps(answer["spans"], ensure_ascii=False) for answer in found], object),
        }

    def tune(self, task: Task, examples: Sequence[Example], details: Answers) -> tuple[Task, Answers]:
        """Where some questions have no answer, the null threshold that gives the best F1 on `examples`."""
        if all(example.target.answers for example in examples):
            return task, details
        texts = [[text for text, _ in example.target.answers] for example in examples]
        threshold = best_null_threshold(texts, list(details["SPAN"]), details["NULL_ODDS"])
        task = dataclasses.replace(task, options={**task.options, "null_threshold": threshold})
        silent = details["NULL_ODDS"] > threshold
        best = [json.loads(spans)[:1] for spans in details["NBEST"]]
        changed = dict(details)
        for i, spans in enumerate(best):
            said = not silent[i] and bool(spans)
            changed["ANSWER"][i] = spans[0]["answer"] if said else ""
            changed["START"][i] = spans[0]["start"] if said else -1
            changed["END"][i] = spans[0]["end"] if said else -1
            changed["SCORE"][i] = spans[0]["score"] if said else details["NULL_SCORE"][i]
        return task, changed

    def official(self, task: Task, examples: Sequence[Example], details: Answers) -> dict[str, str]:
        """What SQuAD's evaluation scripts read: predictions, n-best lists and null odds by the question's id."""
        ids = [example.target.id for example in examples]
        nbest = []
        for span_list, null in zip(details["NBEST"], details["NULL_ODDS"].tolist(), strict=True):
            spans = json.loads(span_list)
            rest = [
                {"text": s["answer"], "probability": s["score"], "start": s["start"], "end": s["end"]} for s in spans
            ]
            nbest.append([*rest, {"text": "", "null_odds": null}])
        return {
            "predictions.json": _dump(dict(zip(ids, details["ANSWER"], strict=True))),
            "nbest_predictions.json": _dump(dict(zip(ids, nbest, strict=True))),
            "null_odds.json": _dump(dict(zip(ids, details["NULL_ODDS"].tolist(), strict=True))),
        }

    def judged(self, task: Task, examples: Sequence[Example], answers: Answers) -> list[Judged]:
        found = []
        for example, f1, answer, score in zip(
            examples, self._f1(examples, answers), answers["ANSWER"], answers["SCORE"], strict=True
        ):
            gold = " | ".join(dict.fromkeys(text for text, _ in example.target.answers)) or "(no answer)"
            # a wholly wrong answer is worse than a half wrong one, and a sure one worse than a doubtful one
            error = (1 - f1) * (1 + float(score)) if f1 < 1 else 0.0
            found.append(Judged(gold, answer or "(no answer)", error, float(score)))
        return found

    def tables(self, task: Task, examples: Sequence[Example], answers: Answers) -> list[Table]:
        """F1 by the length of the answer, in words."""
        f1 = self._f1(examples, answers)
        by_length: dict[str, list[float]] = {}
        for example, value in zip(examples, f1, strict=True):
            words = min((len(text.split()) for text, _ in example.target.answers), default=0)
            name = "no answer" if not words else str(words) if words < 4 else "4 to 7" if words < 8 else "8 or more"
            by_length.setdefault(name, []).append(value)
        rows = [(name, len(values), float(np.mean(values))) for name, values in sorted(by_length.items())]
        return [("F1 by the answer's length", ("words", "questions", "F1"), rows)]

    def _f1(self, examples: Sequence[Example], answers: Answers) -> list[float]:
        gold = [[text for text, _ in example.target.answers] for example in examples]
        return squad_f1(gold, list(answers["ANSWER"]))

    def degenerate(self, task: Task, examples: Sequence[Example], answers: Answers) -> str:
        said = {answer == "" for answer in answers["ANSWER"]}
        if said == {True} and any(example.target.answers for example in examples):
            return "no question is answered"
        if said == {False} and sum(not example.target.answers for example in examples) > len(examples) / 20:
            return "every question is answered, and some have no answer"
        return ""

    def targets(self, task: Task, rows: Sequence[Row], examples: Sequence[Example]) -> list[Any]:
        """First and last token of the answer in the row; (0, 0), the [CLS], where the row does not hold it whole."""
        return [_token_span(row, examples[row.owner].target) for row in rows]

    def score(self, task: Task, examples: Sequence[Example], answers: Answers) -> dict[str, float]:
        return score_squad([[text for text, _ in e.target.answers] for e in examples], list(answers["ANSWER"]))

    def example(
        self, task: Task, columns: Mapping[str, Any], target: Any, where: str, id: str = "", start: Any = None
    ) -> Example:
        """`target` is the answer's text, or SQuAD's own {"text": [...], "answer_start": [...]}."""
        context = columns["CONTEXT"]
        if target is None or target == "":
            return Example(columns, Gold(id or where, ()), where, id)
        if isinstance(target, Mapping):
            pairs = tuple((str(t), int(s)) for t, s in zip(target["text"], target["answer_start"], strict=True))
            return Example(columns, Gold(id or where, pairs), where, id)
        text = str(target)
        if start is None or start == "":
            first = context.find(text)
            if first < 0:
                raise InputError(f"{where}: answer {seen(text)} is not in its context; copy it from there")
        else:
            first = _whole(start, where)
        return Example(columns, Gold(id or where, ((text, first),)), where, id)

    def decisions(self, answers: Answers) -> list[Any]:
        return list(zip(answers["START"].tolist(), answers["END"].tolist(), strict=True))

    def check(self, task: Task, examples: Sequence[Example]) -> None:
        for example in examples:
            context = example.columns["CONTEXT"]
            for text, start in example.target.answers:
                if not text.strip():
                    raise InputError(f"{example.where}: answer {text!r} is empty; no answer is an empty list")
                if start < 0 or context[start : start + len(text)] != text:
                    raise InputError(
                        f"{example.where}: answer {text!r} is not in the context at code point {start}; "
                        f"{context[max(start, 0) : max(start, 0) + len(text)]!r} is"
                    )


def _whole(value: Any, where: str) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise InputError(f"{where}: answer start {seen(value)} is no whole number; it counts code points") from None


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


def _token_span(row: Row, gold: Gold) -> tuple[int, int]:
    if not gold.answers or row.offsets is None:
        return (0, 0)
    text, first = gold.answers[0]
    last = first + len(text.rstrip())
    first += len(text) - len(text.lstrip())  # white space has no tokens
    inside = np.flatnonzero(row.offsets[:, 0] != NO_OFFSET)
    offsets = row.offsets[inside]
    if not len(inside) or offsets[0, 0] > first or offsets[-1, 1] < last:
        return (0, 0)
    begin = int(inside[np.flatnonzero(offsets[:, 1] > first)[0]])
    end = int(inside[np.flatnonzero(offsets[:, 0] < last)[-1]])
    return (begin, end) if begin <= end else (0, 0)  # an answer of characters that have no tokens


_SQUAD = Task(
    name="squad",
    kind="span",
    description="answer a question from a document (SQuAD 1.1)",
    metrics=("f1", "exact_match"),
    max_tokens=384,
    overlap=128,
    options={"top_k": 3, "max_answer_tokens": 30, "null_threshold": None},
    files=Files(
        format="squad",
        splits={
            "train": ("train.json", "train-v1.1.json", "train-v2.0.json"),
            "dev": ("dev.json", "dev-v1.1.json", "dev-v2.0.json"),
        },
        rows={"train": 87_599, "dev": 10_570},
    ),
    hub=Hub(
        "rajpurkar/squad",
        splits={"train": "train", "dev": "validation"},
        columns={"QUESTION": "question", "CONTEXT": "context"},
        target="answers",
    ),
    training={"epochs": 2, "batch_size": 16, "learning_rate": 1e-4},
)
register(_SQUAD)
register(
    dataclasses.replace(
        _SQUAD,
        name="squad2",
        description="answer a question from a document, or say that it has no answer (SQuAD 2.0)",
        # 0 until the one that is best on the dev split is chosen, after training
        options={**_SQUAD.options, "null_threshold": 0.0},
        files=Files(
            format="squad",
            splits={"train": ("train-v2.0.json", "train.json"), "dev": ("dev-v2.0.json", "dev.json")},
            rows={"train": 130_319, "dev": 11_873},
        ),
        hub=dataclasses.replace(_SQUAD.hub, path="rajpurkar/squad_v2"),
    )
)
