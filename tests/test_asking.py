"""What asks a server: which one is found, what is said where it is not there, and how answers name their labels."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from fake_triton import FakeTriton, Model

from bertship.console import answer_lines
from serving import keeper

WORDS = Model(
    {"TEXT": [-1]},
    {"LABEL": ("BYTES", [-1]), "SCORE": ("FP32", [-1]), "PROBABILITIES": ("FP32", [-1, 2])},
    lambda body: (
        200,
        [
            {"name": "LABEL", "datatype": "BYTES", "shape": [1], "data": ["no"]},
            {"name": "SCORE", "datatype": "FP32", "shape": [1], "data": [0.75]},
            {"name": "PROBABILITIES", "datatype": "FP32", "shape": [1, 2], "data": [0.25, 0.75]},
        ],
    ),
    labels='["yes", "no"]',
)


@pytest.fixture
def server():
    with FakeTriton({"words": WORDS, "words_encode": Model({}, {}, WORDS.answer, platform="")}).run() as fake:
        yield fake


@pytest.fixture
def found(server, monkeypatch, tmp_path):
    """The runs whose server is the fake one."""
    state = {"http_url": server.url, "repository": str(tmp_path)}
    monkeypatch.setattr(keeper, "running", lambda folder: state if folder == tmp_path / "serve" else None)
    return tmp_path


def test_the_running_server_is_asked_where_no_address_is_given(bertship, server, found):
    code, out, err = bertship("ask", "--task", "words", "--text", "a", "--runs", found)
    assert (code, err) == (0, "")
    assert json.loads(out)["PROBABILITIES"] == {"yes": 0.25, "no": 0.75}, "by the labels' names, for people"
    code, out, _ = bertship("--json", "ask", "--task", "words", "--text", "a", "--runs", found)
    assert json.loads(out)["answers"][0]["PROBABILITIES"] == [0.25, 0.75], "the tensor as it is"
    assert json.loads(out)["labels"] == ["yes", "no"]
    code, out, _ = bertship("--json", "health", "--runs", found)
    assert json.loads(out)["url"] == server.url
    code, _, err = bertship("ask", "--task", "words", "--text", "a", "--runs", found, "--url", "http://127.0.0.1:9")
    assert code == 1 and "no server at http://127.0.0.1:9" in err, "an address that is given counts"


def test_labels_that_nobody_names_leave_the_answer_as_it_is(bertship, server, found, monkeypatch):
    monkeypatch.setattr(WORDS, "labels", "")
    code, out, err = bertship("ask", "--task", "words", "--text", "a", "--runs", found)
    assert code == 0 and json.loads(out)["PROBABILITIES"] == [0.25, 0.75], err
    answers = [{"PROBABILITIES": [0.5, 0.5]}, {"ANSWER": "x"}]
    assert [json.loads(line) for line in answer_lines(answers, ("a", "b", "c"))] == answers


def test_a_question_to_a_task_that_takes_texts_says_what_it_takes(bertship, server, found, monkeypatch):
    said = "unexpected inference input 'QUESTION' for model 'words'"
    monkeypatch.setattr(WORDS, "answer", lambda body: (400, {"error": said}))
    code, out, err = bertship("ask", "--task", "words", "--question", "a", "--context", "b", "--runs", found)
    assert (code, out) == (1, "") and err.endswith(f"{said}; words is asked with TEXT\n")


def test_numbers_for_people_have_the_digits_that_fp32_has(found):
    (line,) = answer_lines([{"SCORE": 0.8769000172615051, "ENTITIES": [{"score": 1e-7, "start": 3}]}])
    assert json.loads(line) == {"SCORE": 0.8769, "ENTITIES": [{"score": 1e-7, "start": 3}]}


def test_a_task_that_is_not_served_brings_the_list_of_those_that_are(bertship, found):
    code, out, err = bertship("ask", "--task", "wrods", "--text", "a", "--runs", found)
    assert (code, out) == (1, "") and "wrods is not served at http://" in err
    assert err.endswith("; served there: words\n") and err.count("\n") == 1


def test_health_says_how_to_get_a_server(bertship, tmp_path):
    code, out, err = bertship("health", "--url", "http://127.0.0.1:9", "--runs", tmp_path)
    assert code == 1 and "no answer: Connection refused; start one with `make serve`" in err and "--url" in err
    assert "Errno" not in out + err


def test_another_program_at_the_address_is_named_as_one(bertship, tmp_path):
    class Page(BaseHTTPRequestHandler):
        def log_message(self, *_): ...

    with HTTPServer(("127.0.0.1", 0), Page) as other:
        Thread(target=other.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{other.server_address[1]}"
        code, out, err = bertship("ask", "--text", "a", "--url", url, "--runs", tmp_path)
        other.shutdown()
    assert (code, out) == (1, "") and err.count("\n") == 1 and "<" not in err
    assert f"what answers at {url} is no Triton (HTTP status 501, text/html)" in err
