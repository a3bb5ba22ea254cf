"""Evaluation: metrics that depend on nothing else, null thresholds, and what other people's scripts read."""

import itertools
import json
import os

import numpy as np
import pytest
from conftest import SETTINGS
from hypothesis import given, settings
from hypothesis import strategies as st
from small_bert import TASKS_BY_HEAD, TOKENIZER, make_examples, make_model

from bertship import pipeline
from bertship.config import FinetuneConfig
from bertship.errors import InputError
from bertship.metrics import best_null_threshold, calibration_error, score_squad
from bertship.tasks import TASKS, Example, Task
from bertship.tasks.squad import Gold
from train import finetune
from train.checkpoint import save_model
from train.finetuned import task_of_run
from train.scoring import evaluate
from train.torch_runner import TorchRunner


@pytest.mark.parametrize("head", TASKS_BY_HEAD)
def test_metrics_do_not_depend_on_the_batch_size(head, monkeypatch):
    """fit.13: nor on how a data set is cut: no padding sample, nothing twice."""
    task, examples = TASKS_BY_HEAD[head], make_examples(head, 23)
    found = []
    for rows, batch_size in ((256, 32), (5, 3), (1, 1)):
        monkeypatch.setattr(pipeline, "BATCH_ROWS", rows)
        monkeypatch.setattr("train.scoring.BATCH_ROWS", rows)
        metrics, answers = evaluate(
            task, TOKENIZER, TorchRunner(make_model(head), TOKENIZER.pad_id, batch_size), examples
        )
        assert all(len(values) == len(examples) for values in answers.values())
        found.append(metrics)
    assert found[0] == found[1] == found[2]


def test_training_and_evaluation_fork_nothing(tmp_path, monkeypatch):
    """tok.6: a tokenizer whose threads have run is never forked."""

    def refuse():
        raise AssertionError("fork")

    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    (tmp_path / "init").mkdir()
    save_model(make_model("sentence"), TOKENIZER, tmp_path / "init")
    examples = make_examples("sentence", 12)
    config = FinetuneConfig(min_updates=2, epochs=0.1, batch_size=4)
    task = TASKS_BY_HEAD["sentence"]
    finetune.finetune(task, tmp_path / "init", tmp_path / "out", config, examples, examples, lambda line: None)


def test_what_a_checkpoint_did_not_settle_is_listed(tmp_path):
    """fit.12: a head of another kind starts afresh and is named; what is left over is named too."""
    (tmp_path / "init").mkdir()
    save_model(make_model("sentence"), TOKENIZER, tmp_path / "init")
    said = []
    examples = make_examples("token", 8)
    config = FinetuneConfig(min_updates=1, epochs=0.1, batch_size=4)
    task = TASKS_BY_HEAD["token"]
    finetune.finetune(task, tmp_path / "init", tmp_path / "out", config, examples, examples, said.append)
    assert "starting afresh: classifier; left unused: bert.pooler.dense, classifier" in said


def test_a_run_that_does_not_fit_the_task_is_refused(tmp_path):
    task = TASKS_BY_HEAD["sentence"]
    (tmp_path / "task.json").write_text(task.to_json())
    with pytest.raises(InputError, match="was trained on the labels bad, good, odd, task moods has a, b"):
        task_of_run(task.with_labels(["a", "b"]), tmp_path)
    with pytest.raises(InputError, match="was trained as 'sentence', task squad is 'span'"):
        task_of_run(TASKS["squad"], tmp_path)
    assert task_of_run(task.with_labels(["odd", "bad", "good"]), tmp_path).labels == task.labels


def test_squad_2_scores_by_the_official_rules():
    gold = [["the cat"], [], ["a b c d", "b c"], [], ["x"], ["The"]]
    predicted = ["Cat!", "", "b", "wrong", "", ""]
    found = score_squad(gold, predicted)
    # "the cat" is the cat; two of the unanswerable are half right; "b" is half of "b c" at best; "The" has no word
    assert found == pytest.approx(
        {
            "exact_match": 3 / 6,
            "f1": (1 + 1 + 2 / 3 + 0 + 0 + 1) / 6,
            "has_answer_exact_match": 2 / 4,
            "has_answer_f1": (1 + 2 / 3 + 0 + 1) / 4,
            "no_answer_exact_match": 1 / 2,
            "no_answer_f1": 1 / 2,
        }
    )


def test_squad_1_knows_no_empty_answer():
    assert score_squad([["the"], ["x"]], ["a", "x"]) == {"exact_match": 1.0, "f1": 0.5}


QUESTIONS = st.lists(
    st.tuples(st.sampled_from([[], ["a b"], ["c"]]), st.sampled_from(["a b", "a", "c", "z"]), st.integers(-4, 4)),
    min_size=1,
    max_size=12,
)


@settings(deadline=None)  # a busy machine is no fault
@given(QUESTIONS)
def test_the_best_null_threshold_is_the_best_of_all(questions):
    gold, spans, odds = zip(*questions, strict=True)
    if all(gold):
        gold = ([], *gold[1:])  # one question without an answer makes it version 2.0

    def f1(threshold):
        answers = [span if o <= threshold else "" for span, o in zip(spans, odds, strict=True)]
        return score_squad(gold, answers)["f1"]

    threshold = best_null_threshold(gold, spans, np.array(odds, np.float64))
    assert f1(threshold) == pytest.approx(max(f1(t) for t in (*odds, min(odds) - 1)))


def spans_of(scores, nulls):
    """A runner for contexts of three tokens: a start logit at the first of them, and the null score at [CLS]."""

    def run(rows):
        start, end = [], []
        for row in rows:
            logits = np.full(len(row), -9.0, np.float32)
            logits[0] = nulls[row.owner] / 2
            logits[np.flatnonzero(row.offsets[:, 0] >= 0)[0]] = scores[row.owner] / 2
            start.append(logits)
            end.append(logits)
        return {"start_logits": start, "end_logits": end}

    return run


def test_the_threshold_is_chosen_on_dev_and_saved_with_the_task():
    task = Task(**{**TASKS["squad2"].__dict__, "max_tokens": 32, "overlap": 4})
    gold = [("x",), (), ("x",), ()]
    examples = [
        Example({"QUESTION": "q", "CONTEXT": "x y z"}, Gold(str(i), tuple((t, 0) for t in texts)), f"q {i}")
        for i, texts in enumerate(gold)
    ]
    # null odds of 1, 3, 2, 4: answered where they are at most 2
    runner = spans_of([5, 5, 5, 5], [6, 8, 7, 9])
    metrics, answers = evaluate(task, TOKENIZER, runner, examples)
    assert metrics["f1"] == 0.5 and list(answers["ANSWER"]) == [""] * 4
    tuned, changed = task.behaviour.tune(task, examples, answers)
    assert tuned.options["null_threshold"] == pytest.approx(2)
    assert list(changed["ANSWER"]) == ["x", "", "x", ""]
    metrics, again = evaluate(tuned, TOKENIZER, runner, examples)
    assert metrics["f1"] == 1
    for name in ("ANSWER", "START", "END"):
        assert list(changed[name]) == list(again[name])
    assert changed["SCORE"] == pytest.approx(again["SCORE"])
    assert Task.from_json(tuned.to_json()) == tuned
    files = {name: json.loads(text) for name, text in tuned.behaviour.official(tuned, examples, again).items()}
    assert files["predictions.json"] == {"0": "x", "1": "", "2": "x", "3": ""}
    assert files["null_odds.json"] == pytest.approx({"0": 1, "1": 3, "2": 2, "3": 4})
    assert files["nbest_predictions.json"]["1"][0]["text"] == "x"
    assert files["nbest_predictions.json"]["1"][-1]["text"] == ""


def test_questions_that_all_have_answers_need_no_threshold():
    task = TASKS["squad"]
    examples = [Example({"QUESTION": "q", "CONTEXT": "a b"}, Gold("1", (("a", 0),)), "x")]
    assert task.behaviour.tune(task, examples, {"ANSWER": np.array(["a"], object)})[0] is task


def test_conll_columns_agree_with_seqeval():
    from seqeval.metrics import f1_score
    from seqeval.scheme import IOB2

    task, examples = TASKS_BY_HEAD["token"], make_examples("token", 30)
    metrics, answers = evaluate(task, TOKENIZER, TorchRunner(make_model("token"), 0), examples)
    text = task.behaviour.official(task, examples, answers)["predictions.conll"]
    blocks = [[line.split(" ") for line in block.split("\n") if line] for block in text.split("\n\n") if block.strip()]
    assert len(blocks) == 30
    words = list(itertools.chain.from_iterable(e.columns["TEXT"].split() for e in examples))
    assert [row[0] for block in blocks for row in block] == words
    gold, predicted = ([[row[i] for row in block] for block in blocks] for i in (1, 2))
    assert metrics["f1"] == pytest.approx(f1_score(gold, predicted, mode="strict", scheme=IOB2))


def test_calibration_error_by_hand():
    scores, right = np.array([0.95, 0.85, 0.65, 0.62]), np.array([True, False, True, False])
    # bins 0.9, 0.8, 0.6: gaps of 0.05, 0.85 and 0.135, the last of two answers
    assert calibration_error(scores, right) == pytest.approx((0.05 + 0.85 + 2 * abs(0.635 - 0.5)) / 4)
    assert calibration_error(np.array([1.0]), np.array([True])) == 0


def test_evaluate_writes_what_others_read(bertship, data, warm_start, tmp_path):
    small = ("--runs", tmp_path, *SETTINGS, "--set", "epochs=0.1", "--set", "min_updates=2")
    for task, files in (
        ("squad", {"predictions.json", "nbest_predictions.json", "null_odds.json"}),
        ("ner", {"predictions.conll"}),
    ):
        common = ("--task", task, "--data", data / task)
        code, _, err = bertship("finetune", *common, "--init", warm_start, *small)
        assert code == 0, err
        code, out, err = bertship("--json", "evaluate", "--task", task, "--runs", tmp_path)
        assert code == 0, err
        folder = tmp_path / "evaluate" / task / "default"
        assert {path.name for path in folder.iterdir()} == files | {"report.html", "manifest.json"}
        trained = json.loads((tmp_path / "finetune" / task / "default" / "manifest.json").read_text())["metrics"]
        assert all(trained[name] == value for name, value in json.loads(out)["metrics"].items())
    predictions = json.loads((tmp_path / "evaluate" / "squad" / "default" / "predictions.json").read_text())
    assert predictions.keys() == {f"q{i}" for i in range(40)}


def test_mismatched_is_judged_beside_matched(bertship, data, warm_start, tmp_path):
    folder = tmp_path / "mnli"
    folder.mkdir()
    for name in ("train.tsv", "dev_matched.tsv"):
        (folder / name).write_bytes((data / "mnli" / name).read_bytes())
    lines = (folder / "dev_matched.tsv").read_text().splitlines(keepends=True)
    (folder / "dev_mismatched.tsv").write_text("".join(lines[:11]))
    small = ("--runs", tmp_path, *SETTINGS, "--set", "epochs=0.1", "--set", "min_updates=2")
    code, out, err = bertship("--json", "finetune", "--task", "mnli", "--data", folder, "--init", warm_start, *small)
    assert code == 0, err
    metrics = json.loads(out)["metrics"]
    code, out, err = bertship("--json", "evaluate", "--task", "mnli", "--runs", tmp_path)
    assert code == 0, err
    found = json.loads(out)["metrics"]
    assert found == {name: metrics[name] for name in ("accuracy", "mismatched_accuracy")}
