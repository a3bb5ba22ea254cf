"""The whole line, from labelled files to answers of the real server, for every kind of task and for a user's own."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from conftest import LEARNT, SETTINGS, Line

from bertship.client import Client
from bertship.errors import InvalidRequest, RequestTimeout, ServerUnavailable
from bertship.pipeline import from_export
from bertship.tasks import get_task
from serving.repository import COMMITTED, render_files

ROOT = Path(__file__).parents[1]
QUESTIONS: dict[str, dict[str, list[str]]] = {
    "sst2": {"TEXT": ["a lovely film", "", "dull " * 300, "naïve 😀 日本", "[MASK] [SEP]"]},
    "weather": {"TEXT": ["It is warm", "It is awful in the river", ""]},
    "mnli": {"TEXT": ["Anna is here", ""], "TEXT_PAIR": ["it is cold", "it is lovely"]},
    "stsb": {"TEXT": ["the garden", "the river"], "TEXT_PAIR": ["the garden", ""]},
    "swag": {
        "TEXT": ["Anna is here.", ""],
        "CHOICES": [["It was warm", "It was cold", "", "It was dull " * 200], ["", "a", "b", "naïve 😀"]],
    },
    "squad": {
        "QUESTION": ["Where did Anna go?", "Where did Felix go?", "", "Where " * 100],
        "CONTEXT": [
            "Anna went to the market today.",
            "It was warm. " * 200 + "Felix went to the castle today.",
            "x",
            "",
        ],
    },
    "ner": {"TEXT": ["Clara went to Old river .", "", "It was gentle there. " * 80 + "Bruno went to Old castle ."]},
}


@pytest.mark.parametrize("name", LEARNT)
def test_the_server_answers_what_predict_answers(line: Line, name: str, data: Path) -> None:
    """To the last bit, over HTTP and gRPC, one by one and together."""
    pipeline = from_export(line.runs / "export" / name)
    samples = [json.loads(text) for text in (line.runs / "export" / name / "samples.jsonl").open(encoding="utf-8")]
    columns = {key: texts + [sample["columns"][key] for sample in samples] for key, texts in QUESTIONS[name].items()}
    expected = pipeline(columns)
    for url in line.urls:
        with Client(url) as client:
            together = client.infer(name, columns)
            assert together.keys() == expected.keys()
            for key, values in expected.items():
                np.testing.assert_array_equal(together[key], values, err_msg=f"{name} {key} {url}")
            for i in range(len(QUESTIONS[name]["TEXT" if "TEXT" in columns else "QUESTION"])):
                alone = client.infer(name, {key: texts[i] for key, texts in columns.items()})
                for key, values in expected.items():
                    np.testing.assert_array_equal(alone[key][0], values[i], err_msg=f"{name} {key} {i} {url}")


def test_answers_are_right(line: Line) -> None:
    with Client(line.urls[0]) as client:
        assert client.ask("sst2", TEXT="a lovely film about the river")["LABEL"] == "positive"
        assert client.ask("weather", TEXT="It is harsh")["LABEL"] == "foul"
        question = QUESTIONS["squad"]
        answers = client.ask("squad", QUESTION=question["QUESTION"][:2], CONTEXT=question["CONTEXT"][:2])
        assert [answer["ANSWER"] for answer in answers] == ["market", "castle"]
        for answer, context in zip(answers, question["CONTEXT"], strict=False):
            assert context[answer["START"] : answer["END"]] == answer["ANSWER"]
        choices = ["It was awful", "It was lovely", "It was cold", "It was harsh"]
        answer = client.ask("swag", TEXT="Anna is here.", CHOICES=choices)
        assert answer["CHOICE"] == 1 and len(answer["PROBABILITIES"]) == 4
        assert client.ask("swag", TEXT=["Anna is here."], CHOICES=[choices]) == [answer]
        with pytest.raises(InvalidRequest, match=r"CHOICES\[0\] has 1 elements; two or more"):
            client.ask("swag", TEXT="Anna is here.", CHOICES=["one"])
        text = QUESTIONS["ner"]["TEXT"][2]
        entities = client.ask("ner", TEXT=text)["ENTITIES"]
        assert [(e["label"], e["text"]) for e in entities] == [("person", "Bruno"), ("place", "Old castle")]
        assert all(text[e["start"] : e["end"]] == e["text"] for e in entities)


def test_truncation_is_said(line: Line) -> None:
    with Client(line.urls[0]) as client:
        assert [a["TRUNCATED"] for a in client.ask("sst2", TEXT=["short", "dull " * 300])] == [False, True]
        assert client.ask("squad", QUESTION="Where?", CONTEXT="Anna. " * 500)["TRUNCATED"] is False


def test_parameters_reach_the_answer(line: Line) -> None:
    with Client(line.urls[1]) as client:
        columns = {"QUESTION": "Where did Anna go?", "CONTEXT": "Anna went to the market today."}
        assert len(client.ask("squad", {"top_k": 5}, **columns)["CANDIDATES"]) == 5
        with pytest.raises(InvalidRequest, match="top_k=0"):
            client.ask("squad", {"top_k": 0}, **columns)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("wrong type", "data-type is 'FP32'"),
        ("wrong rank", "Expected \\[-1\\], got \\[1,1\\]"),
        ("empty list", "TEXT is an empty list"),
        ("too long", "1,000,001 characters; at most 1,000,000"),
        ("not UTF-8", "TEXT\\[1\\] is not UTF-8 at byte 2 \\(0xff\\)"),
        ("missing", "expected 1 inputs but got 0"),
    ],
)
def test_bad_requests_are_refused_and_the_server_goes_on(line: Line, protocol: str, case: str, says: str) -> None:
    module = {"http": tritonclient.http, "grpc": tritonclient.grpc}[protocol]
    url = line.server.http_url.removeprefix("http://") if protocol == "http" else line.server.grpc_url
    values: dict[str, np.ndarray] = {
        "wrong type": np.zeros(1, np.float32),
        "wrong rank": np.array([[b"x"]], object),
        "empty list": np.array([], object),
        "too long": np.array([b"x" * 1_000_001], object),
        "not UTF-8": np.array([b"fine", b"ab\xff"], object),
    }
    tensors = []
    if case in values:
        kind = "FP32" if case == "wrong type" else "BYTES"
        tensors = [module.InferInput("TEXT", list(values[case].shape), kind)]
        tensors[0].set_data_from_numpy(values[case])
    client = module.InferenceServerClient(url)
    with pytest.raises(tritonclient.utils.InferenceServerException, match=says) as caught:
        client.infer("sst2", tensors)
    assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
    assert "\n" not in caught.value.message().strip()
    client.close()
    with Client(line.urls[0]) as after:
        assert after.ask("sst2", TEXT="")["LABEL"] in ("negative", "positive")


def test_unequal_lists_and_unknown_tasks(line: Line) -> None:
    with Client(line.urls[0]) as client:
        with pytest.raises(InvalidRequest, match="QUESTION has 2, CONTEXT has 1"):
            client.infer("squad", {"QUESTION": ["a", "b"], "CONTEXT": ["c"]})
        with pytest.raises(ServerUnavailable, match="nope is not served"):
            client.ask("nope", TEXT="x")
        assert client.tasks() == sorted(LEARNT)


@pytest.mark.parametrize("which", [0, 1])
def test_a_client_waits_no_longer_than_it_was_told(line: Line, which: int) -> None:
    with Client(line.urls[which], timeout_s=0.001) as client, pytest.raises(RequestTimeout, match=r"within 0\.001 s"):
        client.ask("squad", QUESTION="Where?", CONTEXT="It was warm. " * 5000)


def test_a_text_in_every_form(line: Line) -> None:
    with Client(line.urls[0]) as client:
        expected = client.ask("sst2", TEXT="a warm film")
        for form in (["a warm film"], np.array(["a warm film"]), np.array([["a warm film"]], object)):
            assert client.ask("sst2", TEXT=form) == [expected]


def test_mixed_requests_under_load_keep_their_answers(line: Line) -> None:
    """Sixteen clients with texts of unlike lengths: each gets the bits that it gets alone."""
    from concurrent.futures import ThreadPoolExecutor

    texts = ["a lovely film " * n for n in range(1, 17)]
    with Client(line.urls[0]) as client:
        alone = [client.ask("sst2", TEXT=text) for text in texts]

    def ask(text: str) -> Any:
        with Client(line.urls[0]) as mine:
            return [mine.ask("sst2", TEXT=text) for _ in range(5)]

    with ThreadPoolExecutor(16) as pool:
        for expected, answers in zip(alone, pool.map(ask, texts), strict=True):
            assert answers == [expected] * 5


def test_unlike_lengths_reach_the_encoder_together(line: Line) -> None:
    """A request's rows and other requests' merge: fewer executions than requests under load."""
    from concurrent.futures import ThreadPoolExecutor

    with Client(line.urls[1]) as client:
        before = client._client.get_inference_statistics("sst2_encode").model_stats[0]

        def ask(n: int) -> None:
            with Client(line.urls[1]) as mine:
                for i in range(20):
                    mine.ask("sst2", TEXT="warm " * (1 + (7 * n + i) % 100))

        with ThreadPoolExecutor(32) as pool:
            list(pool.map(ask, range(32)))
        after = client._client.get_inference_statistics("sst2_encode").model_stats[0]
    requests = after.inference_count - before.inference_count
    executions = after.execution_count - before.execution_count
    assert requests == 640
    assert executions < requests


@pytest.mark.parametrize("name", COMMITTED)
def test_what_is_committed_is_what_is_rendered(name: str) -> None:
    for path, text in render_files(get_task(name)).items():
        committed = ROOT / "model_repository" / path
        assert committed.is_file(), f"{path} is missing: run `python -m serving.repository` and commit"
        assert committed.read_text(encoding="utf-8") == text, f"{path} differs: run `python -m serving.repository`"


def test_a_second_run_does_nothing_again(
    line: Line, data: Path, warm_start: Path, bertship: Callable[..., Any]
) -> None:
    run = line.runs / "finetune" / "sst2" / "default"
    before = (run / "manifest.json").stat().st_mtime_ns
    common = ("--task", "sst2", "--data", data / "sst2", "--runs", line.runs)
    assert "up to date" in bertship("finetune", *common, "--init", warm_start, *SETTINGS)[2]
    assert "up to date" in bertship("export", *common, "--precision", "fp32")[2]
    assert (run / "manifest.json").stat().st_mtime_ns == before


def test_ask_and_evaluate_and_predict(line: Line, data: Path, bertship: Callable[..., Any]) -> None:
    text = "a lovely film about the river"
    code, out, err = bertship("--json", "ask", "--task", "sst2", "--url", line.urls[0], "--text", text)
    assert code == 0, err
    code, predicted, err = bertship("--json", "predict", "--task", "sst2", "--runs", line.runs, "--text", text)
    assert code == 0, err
    assert json.loads(out) == json.loads(predicted)
    arguments = ("--task", "ner", "--data", data / "ner", "--runs", line.runs)
    code, out, err = bertship("--json", "evaluate", *arguments)
    assert code == 0, err
    assert json.loads(out)["metrics"]["f1"] >= 0.9


def test_transformers_loads_a_fine_tuned_run(line: Line) -> None:
    """And agrees with the server to 1e-5 in its probabilities (FP32 graph)."""
    script = """
import json, sys, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1]).eval()
batch = AutoTokenizer.from_pretrained(sys.argv[1])(sys.argv[2], return_tensors="pt")
with torch.no_grad():
    print(json.dumps([model.config.id2label, model(**batch).logits.softmax(-1)[0].tolist()]))
"""
    text = "a lovely film about the river"
    folder = line.runs / "finetune" / "sst2" / "default" / "model"
    done = subprocess.run([sys.executable, "-c", script, folder, text], capture_output=True, text=True, check=True)
    labels, probabilities = json.loads(done.stdout)
    with Client(line.urls[0]) as client:
        answer = client.ask("sst2", TEXT=text)
    assert tuple(labels.values()) == get_task("sst2").labels
    np.testing.assert_allclose(answer["PROBABILITIES"], probabilities, atol=1e-5)
