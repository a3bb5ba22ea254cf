"""bertship/tasks/squad.py: windows, spans compared in logits over all of them, answers that are the context's text."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertship.errors import InputError
from bertship.pipeline import Pipeline
from bertship.tasks import TASKS, Example
from bertship.tasks.base import row_table
from bertship.tasks.squad import MAX_QUESTION_TOKENS, Gold
from bertship.tokenization import NO_OFFSET, SPECIAL_TOKENS, Tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyzé日本👍"
TOKENIZER = Tokenizer.from_vocab([*SPECIAL_TOKENS, *LETTERS, *("##" + c for c in LETTERS)], lowercase=False)
SQUAD = TASKS["squad"]
SPAN = SQUAD.behaviour
OPTIONS = dict(SQUAD.options)


def small(max_tokens=12, overlap=3):
    return dataclasses.replace(SQUAD, max_tokens=max_tokens, overlap=overlap)


def crafted(**high):
    """A runner whose logits are 0 but where the letter says otherwise: `start`, `end` map a letter to its logit."""

    def run(rows):
        logits = {}
        for name in ("start", "end"):
            values = {TOKENIZER.backend.token_to_id(c): v for c, v in high.get(name, {}).items()}
            logits[f"{name}_logits"] = [
                np.array(
                    [
                        values.get(int(i), 0.0) if row.offsets[p, 0] != NO_OFFSET or p == 0 else 50.0
                        for p, i in enumerate(row.ids)
                    ]
                )
                for row in rows
            ]
        return logits

    return run


def ask(runner, context, question="q q", task=None, **options):
    answers = Pipeline(task or small(), TOKENIZER, runner)({"QUESTION": [question], "CONTEXT": [context]}, options)
    return {**{k: v[0] for k, v in answers.items()}, "CANDIDATES": json.loads(answers["CANDIDATES"][0])}


@given(st.integers(0, 100), st.integers(0, 60), st.integers(8, 40), st.integers(0, 50))
def test_every_token_is_in_a_window_whatever_the_question(question, context, max_tokens, overlap):
    """fit.5 fit.6"""
    task = small(max_tokens, overlap)
    text = " ".join(LETTERS[i % 26] for i in range(context))
    encoded = SPAN.encode(task, TOKENIZER, {"QUESTION": ["q " * question], "CONTEXT": [text]})
    cap = min(MAX_QUESTION_TOKENS, max_tokens - 4)
    assert encoded.truncated.tolist() == [question > cap]
    assert all(len(row) <= max_tokens for row in encoded.rows)
    held = [row.offsets[row.offsets[:, 0] != NO_OFFSET].tolist() for row in encoded.rows]
    places = TOKENIZER.tokenize([text])[0].offsets.tolist()
    assert sorted({tuple(p) for part in held for p in part}) == [tuple(p) for p in places]
    size = max_tokens - min(question, cap) - 3
    for before, after in itertools.pairwise(held):
        shared = min(overlap, size - 1)
        assert before[len(before) - shared :] == after[:shared]


def test_offsets_are_the_contexts_alone():
    row = SPAN.encode(small(), TOKENIZER, {"QUESTION": ["a b"], "CONTEXT": ["c d"]}).rows[0]
    assert row.offsets.tolist() == [[-1, -1]] * 4 + [[0, 1], [2, 3]] + [[-1, -1]]
    assert row.types.tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_an_answer_in_the_third_window_is_found():
    context = "a b c d e f g h i j k l m n o p"
    encoded = SPAN.encode(small(), TOKENIZER, {"QUESTION": ["q q"], "CONTEXT": [context]})
    assert len(encoded.rows) == 4
    assert ["l" in TOKENIZER.backend.decode(row.ids) for row in encoded.rows] == [False, False, True, False]
    found = ask(crafted(start={"l": 9}, end={"n": 9}), context)
    assert (found["ANSWER"], found["START"], found["END"]) == ("l m n", 22, 27)
    assert found["ANSWER"] == context[found["START"] : found["END"]]
    assert not found["TRUNCATED"]


def test_the_answer_never_lies_in_the_question():
    """srv.11: the crafted runner gives 50 to every token that is not of the context."""
    found = ask(crafted(), "a b c", question="x y z", top_k=100)
    assert all(0 <= c["start"] < c["end"] <= 5 for c in found["CANDIDATES"])
    assert len(found["CANDIDATES"]) == 6


@pytest.mark.parametrize(
    ("context", "first", "last", "answer"),
    [
        ("日本 a", "日", "本", "日本"),
        ("x 👍 é y", "👍", "é", "👍 é"),
        ("  é,  a\u00a0b ", "a", "b", "a\u00a0b"),
        ("ab\n\ncd", "##b", "c", "b\n\nc"),
    ],
)
def test_the_answer_is_the_contexts_text(context, first, last, answer):
    """fit.8"""
    found = ask(crafted(start={first: 9}, end={last: 9}), context)
    assert found["ANSWER"] == answer == context[found["START"] : found["END"]]


@pytest.mark.parametrize("context", ["", "   ", "\u200b"])
def test_an_empty_context_has_the_empty_answer(context):
    """fit.7"""
    found = ask(crafted(), context)
    assert (found["ANSWER"], found["START"], found["END"]) == ("", -1, -1)
    assert found["SCORE"] == pytest.approx(1)
    assert found["CANDIDATES"] == [{"answer": "", "score": 1.0, "start": -1, "end": -1}]


def test_no_answer_is_decided_in_logits():
    """srv.11: null - best against the threshold; the null is the lowest of the windows'."""
    runner = crafted(start={"[CLS]": 3, "b": 1}, end={"[CLS]": 1, "b": 1})  # null 4, best 2
    assert ask(runner, "a b c")["ANSWER"] == "b"  # no threshold, no null answer
    assert ask(runner, "a b c", null_threshold=2.0)["ANSWER"] == "b"
    found = ask(runner, "a b c", null_threshold=1.99)
    assert (found["ANSWER"], found["START"]) == ("", -1)
    assert [c["answer"] for c in found["CANDIDATES"]] == ["", "b", "a b"]

    def two(rows):
        logits = runner(rows)
        logits["start_logits"][1][0] = 0.0  # the second window's null is 1
        return logits

    assert ask(two, "a b c d e f g h i j", null_threshold=0.0)["ANSWER"] == "b"


def test_top_k_and_the_longest_answer():
    runner = crafted(start={"b": 5, "c": 1}, end={"d": 5, "c": 4})
    assert [c["answer"] for c in ask(runner, "a b c d", top_k=2)["CANDIDATES"]] == ["b c d", "b c"]
    assert [c["answer"] for c in ask(runner, "a b c d", top_k=2, max_answer_tokens=2)["CANDIDATES"]] == ["b c", "c d"]
    assert len(ask(runner, "a b", top_k=100)["CANDIDATES"]) == 3


def test_an_answer_in_two_windows_is_one_answer():
    """Certain in both of them, it is certain: its score must not halve because the windows overlap."""
    task = small(12, 6)
    context = "a b c d e f g h i j k"
    found = ask(crafted(start={"f": 30}, end={"f": 30}), context, task=task)
    assert (
        sum(
            "f" in TOKENIZER.backend.decode(r.ids)
            for r in SPAN.encode(task, TOKENIZER, {"QUESTION": ["q q"], "CONTEXT": [context]}).rows
        )
        > 1
    )
    assert (found["ANSWER"], found["SCORE"]) == ("f", pytest.approx(1))
    assert len({(c["start"], c["end"]) for c in found["CANDIDATES"]}) == 3


@settings(max_examples=60)
@given(st.integers(1, 30), st.integers(1, 6), st.integers(8, 16), st.integers(0, 9), st.integers(0, 2**32 - 1))
def test_agrees_with_brute_force(length, longest, max_tokens, overlap, seed):
    rng = np.random.default_rng(seed)
    task = small(max_tokens, overlap)
    context = " ".join(LETTERS[i] for i in rng.integers(0, 26, length))
    columns = {"QUESTION": ["q"], "CONTEXT": [context]}
    rows = SPAN.encode(task, TOKENIZER, columns).rows
    logits = {f"{n}_logits": [rng.normal(0, 2, len(r)) for r in rows] for n in ("start", "end")}
    options = {**OPTIONS, "max_answer_tokens": longest, "top_k": 4, "null_threshold": 0.0}
    answers = SPAN.decode(task, columns, row_table(SPAN, rows), logits, options)

    best = {}
    for row, start, end in zip(rows, logits["start_logits"], logits["end_logits"], strict=True):
        inside = [i for i in range(len(row)) if row.offsets[i, 0] != NO_OFFSET]
        for i in inside:
            for j in inside:
                if 0 <= j - i < longest:
                    place = (int(row.offsets[i, 0]), int(row.offsets[j, 1]))
                    best[place] = max(best.get(place, -np.inf), start[i] + end[j])
    null = min(start[0] + end[0] for start, end in zip(logits["start_logits"], logits["end_logits"], strict=True))
    total = np.exp(null) + sum(np.exp(v) for v in best.values())
    ranked = sorted(((v, p) for p, v in best.items()), reverse=True)
    expected = [(*p, np.exp(v) / total) for v, p in ranked]
    if null > ranked[0][0]:
        expected.insert(0, (-1, -1, np.exp(null) / total))
    expected = expected[:4]
    found = [(c["start"], c["end"], c["score"]) for c in json.loads(answers["CANDIDATES"][0])]
    assert [f[:2] for f in found] == [e[:2] for e in expected]
    np.testing.assert_allclose([f[2] for f in found], [e[2] for e in expected], rtol=1e-4)
    assert (answers["START"][0], answers["END"][0]) == expected[0][:2]
    assert answers["SCORE"][0] == pytest.approx(expected[0][2], rel=1e-4)


def test_padding_changes_nothing():
    columns = {"QUESTION": ["q", "q"], "CONTEXT": ["a b", "a b c d e f g h"]}
    rows = SPAN.encode(small(), TOKENIZER, columns).rows
    rng = np.random.default_rng(3)
    exact = {f"{n}_logits": [rng.normal(size=len(r)) for r in rows] for n in ("start", "end")}
    padded = {name: np.full((len(rows), 40), 99.0) for name in exact}
    for name, values in exact.items():
        for i, value in enumerate(values):
            padded[name][i, : len(value)] = value
    one, two = (SPAN.decode(small(), columns, row_table(SPAN, rows), given, OPTIONS) for given in (exact, padded))
    for name, values in one.items():
        np.testing.assert_array_equal(values, two[name])


def example(context, text, start):
    answers = () if text is None else ((text, start),)
    return Example({"QUESTION": "q q", "CONTEXT": context}, Gold("id", answers), "f, question id")


def targets(context, text, start, task=None):
    made = example(context, text, start)
    rows = SPAN.encode(task or small(), TOKENIZER, {k: [v] for k, v in made.columns.items()}).rows
    return SPAN.targets(task or small(), rows, [made]), rows


def test_targets_of_windows_that_hold_cut_or_lack_the_answer():
    context = "a b c d e f g h i j k l"  # windows of 7, sharing 3: a-g, e-k, i-l
    found, rows = targets(context, "f g h", 10)
    assert len(rows) == 3
    assert found == [(0, 0), (5, 7), (0, 0)]  # cut, held behind [CLS] q q [SEP] e, lacking
    assert [TOKENIZER.backend.decode(rows[1].ids[5:8])] == ["f g h"]
    assert targets(context, None, 0)[0] == [(0, 0)] * 3


@pytest.mark.parametrize(
    ("context", "text", "start", "token_span"),
    [
        ("ab cd", "ab", 0, (4, 5)),
        ("ab cd", "b c", 1, (5, 6)),
        ("abc", "b", 1, (5, 5)),
        (" ab", " ab", 0, (4, 5)),  # white space at the window's edge has no token
        ("ab ", "ab ", 0, (4, 5)),
        ("a \u200b b", "\u200b", 2, (0, 0)),  # no token at all
        ("日本 👍", "本 👍", 1, (5, 6)),
        ("", "", 0, (0, 0)),
    ],
)
def test_targets_are_the_tokens_of_the_answer(context, text, start, token_span):
    assert targets(context, text, start)[0] == [token_span]


@pytest.mark.parametrize(
    ("text", "start", "message"),
    [
        ("b", 0, r"f, question id: answer 'b' is not in the context at code point 0; 'a' is"),
        ("c", 9, "at code point 9; '' is"),
        ("c", -1, "at code point -1"),
        ("", 0, "answer '' is empty"),
    ],
)
def test_an_answer_that_is_not_there_is_refused(text, start, message):
    with pytest.raises(InputError, match=message):
        SPAN.check(SQUAD, [example("a b c", "a", 0), example("a b c", text, start)])


def test_options_are_bounded():
    for name, value in (("top_k", 0), ("top_k", 1.5), ("max_answer_tokens", None), ("null_threshold", "x"), ("n", 1)):
        with pytest.raises(InputError, match=f"parameter '?{name}"):
            ask(crafted(), "a", **{name: value})


def test_memory_is_that_of_a_window_however_long_the_context():
    """All spans of all windows of a long context would be gigabytes; they are never held at once."""
    import tracemalloc

    rng = np.random.default_rng(0)
    tokens, windows_ = 64, 400
    starts = np.arange(windows_) * 32
    offsets = np.stack([np.stack([s + np.arange(tokens), s + np.arange(tokens) + 1], 1) for s in starts]).astype(
        np.int32
    )
    offsets = np.concatenate([np.full((windows_, 1, 2), -1, np.int32), offsets], axis=1)
    table = {"OWNER": np.zeros(windows_, np.int32), "OFFSETS": offsets}
    logits = {name: rng.normal(size=(windows_, tokens + 1)) for name in ("start_logits", "end_logits")}
    options = {"top_k": 3, "max_answer_tokens": 64, "null_threshold": None}
    columns = {"QUESTION": ["q"], "CONTEXT": ["x" * int(offsets.max())]}
    tracemalloc.start()
    TASKS["squad"].behaviour.decode(TASKS["squad"], columns, table, logits, options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    spans = windows_ * tokens * (tokens + 1) // 2
    assert peak < spans * 8 / 4  # a quarter of what their scores alone would take
