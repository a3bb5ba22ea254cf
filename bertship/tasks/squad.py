"""Extractive question answering (Devlin et al. 2019, sections 4.2 and 4.3).

A long context becomes overlapping windows. Spans of all windows and the null answer are compared in logits, which
are on one scale; probabilities of separate softmaxes are not.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from bertship.errors import InputError
from bertship.metrics import score_squad
from bertship.tasks.base import (
    Answers,
    Columns,
    Encoded,
    Example,
    Files,
    Kind,
    Logits,
    Option,
    Task,
    TensorSpec,
    register,
    register_kind,
)
from bertship.tokenization import NO_OFFSET, Row, Tokenizer, Tokens, windows

MAX_QUESTION_TOKENS = 64


class Gold(NamedTuple):
    """What a question's target is: its id and the accepted answers, as (text, first code point); none: no answer."""

    id: str
    answers: tuple[tuple[str, int], ...]


class _Span(NamedTuple):
    score: float
    start: int
    end: int


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
    chunks = True
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
        contexts = columns["CONTEXT"]
        owners = table["OWNER"]
        found: list[dict[str, Any]] = []
        for i, context in enumerate(contexts):
            rows = np.flatnonzero(owners == i).tolist()
            found.append(_answer(context, [_spans(table, logits, w, options) for w in rows], options))
        return {
            "ANSWER": np.array([answer["answer"] for answer in found], object),
            "SCORE": np.array([answer["score"] for answer in found], np.float32),
            "START": np.array([answer["start"] for answer in found], np.int64),
            "END": np.array([answer["end"] for answer in found], np.int64),
            "CANDIDATES": np.array([json.dumps(a["candidates"], ensure_ascii=False) for a in found], object),
        }

    def targets(self, task: Task, rows: Sequence[Row], examples: Sequence[Example]) -> list[Any]:
        """First and last token of the answer in the row; (0, 0), the [CLS], where the row does not hold it whole."""
        return [_token_span(row, examples[row.owner].target) for row in rows]

    def score(self, task: Task, examples: Sequence[Example], answers: Answers) -> dict[str, float]:
        return score_squad([[text for text, _ in e.target.answers] for e in examples], list(answers["ANSWER"]))

    def decisions(self, answers: Answers) -> list[Any]:
        return list(zip(answers["START"].tolist(), answers["END"].tolist(), strict=True))

    def check(self, task: Task, examples: Sequence[Example]) -> None:
        for example in examples:
            context = example.columns["CONTEXT"]
            for text, start in example.target.answers:
                if context[start : start + len(text)] != text:
                    raise InputError(
                        f"{example.where}: answer {text!r} is not in the context at code point {start}; "
                        f"{context[start : start + len(text)]!r} is"
                    )


class _Window(NamedTuple):
    """One row's spans: `scores` float64 [D, L] for d + 1 tokens from token l, and what normalises them."""

    scores: np.ndarray
    offsets: np.ndarray
    null: float


def _spans(table: Mapping[str, np.ndarray], logits: Logits, w: int, options: Mapping[str, Any]) -> _Window:
    """Scores of all spans of window `w`: start logit plus end logit, at most `max_answer_tokens` long."""
    start, end = (np.asarray(logits[name][w], np.float64) for name in ("start_logits", "end_logits"))
    offsets = table["OFFSETS"][w]
    context = np.flatnonzero(offsets[:, 0] != NO_OFFSET)
    tokens = len(context)
    longest = min(options["max_answer_tokens"], tokens)
    scores = np.full((longest, tokens), -np.inf)
    s, e = start[context], end[context]
    for d in range(longest):
        scores[d, : tokens - d] = s[: tokens - d] + e[d:]
    return _Window(scores, offsets[context], float(start[0] + end[0]))


def _best(window: _Window, k: int) -> Iterator[_Span]:
    """The window's `k` best spans in code points."""
    flat = window.scores.ravel()
    if not len(flat):
        return
    top = np.argpartition(-flat, min(k, len(flat)) - 1)[:k]
    for place in top:
        d, first = divmod(int(place), window.scores.shape[1])
        if np.isfinite(flat[place]):
            yield _Span(float(flat[place]), int(window.offsets[first, 0]), int(window.offsets[first + d, 1]))


def _answer(context: str, spans: Sequence[_Window], options: Mapping[str, Any]) -> dict[str, Any]:
    """The best answer over all windows of one question, its probability, and the runners-up."""
    null = min(window.null for window in spans)
    # softmax over every span of every window and the null answer
    everything = np.concatenate([[null], *(window.scores.ravel() for window in spans)])
    highest = everything.max()
    total = highest + np.log(np.exp(everything - highest).sum())
    best: dict[tuple[int, int], float] = {}
    for window in spans:
        # windows overlap: the same span may come from two of them, and then counts once
        for span in _best(window, options["top_k"]):
            place = (span.start, span.end)
            best[place] = max(span.score, best.get(place, -np.inf))
    ranked = sorted((-score, *place) for place, score in best.items())[: options["top_k"]]
    candidates = [
        {"answer": context[start:end], "score": float(np.exp(-cost - total)), "start": start, "end": end}
        for cost, start, end in ranked
    ]
    threshold = options["null_threshold"]
    if not candidates or (threshold is not None and null + ranked[0][0] > threshold):
        empty = {"answer": "", "score": float(np.exp(null - total)), "start": -1, "end": -1}
        return {**empty, "candidates": [empty, *candidates][: options["top_k"]]}
    return {**candidates[0], "candidates": candidates}


def _token_span(row: Row, gold: Gold) -> tuple[int, int]:
    if not gold.answers or row.offsets is None:
        return (0, 0)
    text, first = gold.answers[0]
    last = first + len(text)
    inside = np.flatnonzero(row.offsets[:, 0] != NO_OFFSET)
    offsets = row.offsets[inside]
    if not len(inside) or offsets[0, 0] > first or offsets[-1, 1] < last:
        return (0, 0)
    begin = int(inside[np.flatnonzero(offsets[:, 1] > first)[0]])
    end = int(inside[np.flatnonzero(offsets[:, 0] < last)[-1]])
    return (begin, end)


register(
    Task(
        name="squad",
        kind="span",
        description="answer a question from a document (SQuAD)",
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
        ),
        training={"epochs": 2, "batch_size": 16},
    )
)
