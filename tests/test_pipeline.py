"""bertship/pipeline.py: what cannot be answered is refused with its place; how texts are grouped changes nothing."""

import dataclasses
import json

import numpy as np
import pytest

from bertship.errors import InputError
from bertship.pipeline import BATCH_ROWS, Pipeline, as_records, check_columns, check_size, from_export, graph_of
from bertship.tasks import TASKS
from bertship.tasks.base import read_options
from bertship.tokenization import SPECIAL_TOKENS, Tokenizer

TOKENIZER = Tokenizer.from_vocab([*SPECIAL_TOKENS, *"abcdefghijklmnopqrstuvwxyz"], lowercase=True)
SST2, MNLI, SQUAD, NER = (TASKS[name] for name in ("sst2", "mnli", "squad", "ner"))


def logits_of(task):
    """A runner whose logits are a fixed function of each row alone."""

    def of(row, dims):
        shape = [len(row) if d == -1 else d for d in dims]
        return np.random.default_rng(row.ids.tolist()).normal(size=shape).astype(np.float32)

    specs = task.behaviour.logits(task)
    return lambda rows: {spec.name: [of(row, spec.dims) for row in rows] for spec in specs}


def pipeline_of(task):
    task = task if task.labels or not task.behaviour.needs_labels else task.with_labels(("O", "B-P", "I-P"))
    return Pipeline(task, TOKENIZER, logits_of(task))


@pytest.mark.parametrize(
    ("task", "columns", "message"),
    [
        (SST2, {}, "sst2: input TEXT is missing; it takes TEXT"),
        (MNLI, {"TEXT": ["a"]}, "mnli: input TEXT_PAIR is missing; it takes TEXT, TEXT_PAIR"),
        (SST2, {"TEXT": ["a"], "TEXT_PAIR": ["b"]}, "sst2: unknown input TEXT_PAIR; it takes TEXT"),
        (SST2, {"TEXT": "a text"}, "sst2: TEXT is 'a text', a list of strings is needed"),
        (SST2, {"TEXT": b"a text"}, "sst2: TEXT is b'a text', a list"),
        (SST2, {"TEXT": None}, "sst2: TEXT is None, a list"),
        (SST2, {"TEXT": []}, "sst2: TEXT is an empty list"),
        (MNLI, {"TEXT": ["a", "b"], "TEXT_PAIR": ["c"]}, "unequal length: TEXT has 2, TEXT_PAIR has 1 elements"),
        (SST2, {"TEXT": ["a", 3]}, r"sst2: TEXT\[1\] is 3, a string is needed"),
        (SST2, {"TEXT": ["a", None]}, r"sst2: TEXT\[1\] is None"),
        (SST2, {"TEXT": [b"a"]}, r"sst2: TEXT\[0\] is b'a'"),
        (SST2, {"TEXT": [["a"]]}, r"sst2: TEXT\[0\] is \['a'\]"),
        (SST2, {"TEXT": np.array([["a"]])}, r"sst2: TEXT\[0\] is array"),
        (
            MNLI,
            {"TEXT": ["a", "b"], "TEXT_PAIR": ["c", "x\ud83d"]},
            r"TEXT_PAIR\[1\] has a lone surrogate '\\ud83d' at c.* 1",
        ),
    ],
)
def test_what_cannot_be_answered(task, columns, message):
    for refuse in (lambda: check_columns(task, columns), lambda: pipeline_of(task)(columns)):
        with pytest.raises(InputError, match=message) as caught:
            refuse()
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("task", "columns"),
    [
        (SST2, {"TEXT": ["a" * 500_000, "b" * 500_001]}),
        (SQUAD, {"QUESTION": ["a"], "CONTEXT": ["b" * 1_000_000]}),
    ],
)
def test_a_request_has_a_size_and_a_data_set_has_none(task, columns):
    for refuse in (lambda: check_size(task, columns), lambda: pipeline_of(task).ask(columns)):
        with pytest.raises(InputError, match="the request has 1,000,001 characters; at most 1,000,000 are allowed"):
            refuse()
    small, texts = dataclasses.replace(task, max_characters=3), {name: ["a b"] * 3 for name in task.behaviour.inputs}
    assert len(pipeline_of(small)(texts)["TRUNCATED"]) == 3


def test_what_can_be_answered():
    check_columns(SST2, {"TEXT": ["", "\U0001f44d", "a\x00b"]})
    check_columns(SST2, {"TEXT": np.array(["a", "b"])})
    check_size(SST2, {"TEXT": ("a" * 1_000_000,)})
    check_columns(NER, {"TEXT": ["a"], "WORDS": [[(0, 1)]]})
    check_size(dataclasses.replace(SST2, max_characters=2), {"TEXT": ["a", "b"]})


@pytest.mark.parametrize(
    ("task", "given", "message"),
    [
        (SST2, {"top_k": 1}, "unknown parameter 'top_k' for sst2; known: none"),
        (SQUAD, {"topk": 1}, "unknown parameter 'topk' for squad; known: top_k, max_answer_tokens, null_threshold"),
        (SQUAD, {"top_k": "three"}, "parameter top_k='three': a whole number from 1 to 100"),
        (SQUAD, {"top_k": 101}, "parameter top_k=101"),
        (SQUAD, {"top_k": 2.5}, "parameter top_k=2.5"),
        (SQUAD, {"top_k": True}, "parameter top_k=True"),
        (SQUAD, {"top_k": None}, "parameter top_k=None"),
        (SQUAD, {"top_k": float("nan")}, "parameter top_k=nan"),
        (SQUAD, {"max_answer_tokens": float("inf")}, "parameter max_answer_tokens=inf"),
        (SQUAD, {"null_threshold": float("nan")}, "parameter null_threshold=nan: a number"),
        (SQUAD, {"null_threshold": 1e5}, "parameter null_threshold=1"),
    ],
)
def test_parameters_that_are_none(task, given, message):
    with pytest.raises(InputError, match=message):
        pipeline_of(task)({name: ["a"] for name in task.behaviour.inputs}, given)


def test_parameters_stand_over_the_tasks_own():
    own = dataclasses.replace(SQUAD, options={**SQUAD.options, "null_threshold": 1.0})
    assert read_options(own, None) == own.options
    assert read_options(own, {"top_k": 2.0, "null_threshold": None}) == {
        "top_k": 2,
        "max_answer_tokens": 30,
        "null_threshold": None,
    }


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_many_texts_get_what_each_gets_alone(task):
    rng = np.random.default_rng(1)
    count = BATCH_ROWS + 9
    texts = lambda n: [" ".join(rng.choice(list("abcxyz"), rng.integers(0, 9))) for _ in range(n)]  # noqa: E731
    columns: dict = {s.name: texts(count) for s in task.behaviour.request() if len(s.dims) == 1}
    columns[list(columns)[-1]][5] = "a b c " * 200  # cut, or several windows
    columns |= {s.name: [texts(3) for _ in range(count)] for s in task.behaviour.request() if len(s.dims) > 1}
    pipeline = pipeline_of(task)
    together = pipeline(columns)
    assert together.keys() == {*(spec.name for spec in task.behaviour.outputs(pipeline.task)), "TRUNCATED"}
    alone = [pipeline({name: [texts[i]] for name, texts in columns.items()}) for i in range(count)]
    for name, values in together.items():
        np.testing.assert_array_equal(values, np.concatenate([answer[name] for answer in alone]))
    windowed = any(spec.name == "OFFSETS" for spec in task.behaviour.row_tensors)
    assert together["TRUNCATED"].tolist() == [i == 5 and not windowed for i in range(count)]


def test_answers_as_plain_python():
    records = pipeline_of(SST2).ask({"TEXT": ["a", "b"]})
    assert json.loads(json.dumps(records)) == records
    assert [set(record) for record in records] == [{"LABEL", "SCORE", "PROBABILITIES", "TRUNCATED"}] * 2
    assert type(records[0]["TRUNCATED"]) is bool and type(records[0]["PROBABILITIES"]) is list
    assert isinstance(pipeline_of(SQUAD).ask({"QUESTION": ["a"], "CONTEXT": ["b"]})[0]["CANDIDATES"], list)
    assert as_records({"SCORE": np.array([1.5], np.float32)}) == [{"SCORE": 1.5}]


def test_graphs_are_chosen_by_precision(tmp_path):
    manifest = {"task": "sst2", "serve": "int8", "graphs": {"fp32": "model.onnx", "int8": "model.int8.onnx"}}
    assert (graph_of(manifest, None), graph_of(manifest, "fp32")) == ("model.int8.onnx", "model.onnx")
    with pytest.raises(InputError, match="the export of sst2 has no fp16 graph; it has fp32, int8"):
        graph_of(manifest, "fp16")
    with pytest.raises(InputError, match=r"no manifest.json in .*bertship export"):
        from_export(tmp_path)


def test_parameters_that_requests_cannot_write_otherwise():
    """HTTP carries neither fractions nor null, so both may come as text."""
    options = read_options(SQUAD, {"top_k": "3", "null_threshold": "-1.5"})
    assert (options["top_k"], options["null_threshold"]) == (3, -1.5)
    assert read_options(SQUAD, {"null_threshold": "none"})["null_threshold"] is None
    for value in (10**400, "1e999", "nan", "2.5", True):
        with pytest.raises(InputError, match="parameter top_k="):
            read_options(SQUAD, {"top_k": value})
