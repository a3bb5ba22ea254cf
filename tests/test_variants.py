"""The configurations for native backends, executed: the real Triton with a stand-in for TensorRT and ONNX Runtime.

It proves the files that NVIDIA's container reads, as they are rendered: wiring, buckets, batches, warm-up.
"""

import json

import numpy as np
import pytest
from small_repository import (
    SENTENCE,
    SPAN,
    TOKEN,
    add_plan,
    ask_at_once,
    columns_of,
    make_export,
    serving,
    with_native_backends,
)

from bertship.client import Client
from bertship.errors import InvalidRequest, ServerUnavailable
from bertship.pipeline import from_export
from bertship.triton_limits import PLAN_MAX_BATCH
from serving import environment
from serving.repository import render

TASKS = {"sentence": SENTENCE, "span": SPAN, "token": TOKEN}


@pytest.fixture(scope="module")
def triton(tmp_path_factory):
    return with_native_backends(environment.prepare(), tmp_path_factory.mktemp("backends"))


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    made = {task.name: make_export(folder / task.name, head) for head, task in TASKS.items()}
    for export in made.values():
        add_plan(export)
    return made


@pytest.fixture(scope="module")
def repository(exports, tmp_path_factory):
    folder = tmp_path_factory.mktemp("native") / "repository"
    for export in exports.values():
        render(export, folder)
    return folder


@pytest.fixture(scope="module")
def served(triton, repository):
    """Plans, by `config.pbtxt`."""
    with serving(triton, repository, model_config_name="") as server:
        yield server


def executions(repository, task):
    path = repository / f"{task}_encode" / "1" / "executions.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("world", ["", "onnxruntime"])
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_native_backends_answer_what_predict_answers(exports, triton, served, repository, task, world, tmp_path):
    """In windows of long texts too, whose rows share the batches of the others."""
    pipeline, columns = from_export(exports[task.name]), columns_of(task)
    expected = pipeline(columns)

    def check(url):
        with Client(url) as client:
            got = client.infer(task.name, columns)
        assert got.keys() == expected.keys()
        for name, values in expected.items():
            if values.dtype == np.float32:  # padded batches add up in another order
                np.testing.assert_allclose(got[name], values, atol=1e-5)
            elif name not in ("CANDIDATES", "ENTITIES"):
                assert got[name].tolist() == values.tolist()
            else:
                plain = [[{**a, "score": 0} for a in json.loads(text)] for text in values]
                assert [[{**a, "score": 0} for a in json.loads(text)] for text in got[name]] == plain

    if world:
        repository = tmp_path / "repository"
        render(exports[task.name], repository)
        with serving(triton, repository, model_config_name=world) as server:
            check(server.http_url)
    else:
        check(served.http_url)
    assert executions(repository, task.name)[-1]["tokens"] in task.buckets


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_every_bucket_is_warm_before_the_server_is_ready(served, repository, task):
    """srv.4: a plan's kernels are made for a shape when it first runs; nobody has asked the first of these."""
    shapes = [(e["rows"], e["tokens"], e["profile"]) for e in executions(repository, task.name)]
    assert shapes[: 2 * len(task.buckets)] == [
        (rows, tokens, profile) for profile, tokens in enumerate(task.buckets) for rows in (1, PLAN_MAX_BATCH)
    ]


def test_requests_of_one_bucket_reach_a_plan_together(served, repository):
    before = len(executions(repository, "moods"))
    requests = [{"TEXT": ["a " * n]} for n in range(1, 25)] * 16
    replies = ask_at_once(served.http_url, "moods", requests, 32)
    assert len(replies) == len(requests)
    after = executions(repository, "moods")[before:]
    assert {e["tokens"] for e in after} == set(SENTENCE.buckets)
    assert sum(e["rows"] for e in after) == len(requests)
    assert max(e["rows"] for e in after) > 1


def test_more_windows_than_a_plan_takes_are_refused_with_the_limit(served):
    for url in (served.http_url, f"grpc://{served.grpc_url}"):
        with Client(url) as client:
            with pytest.raises(InvalidRequest, match=r"finder: the request makes \d+ rows .*; at most 32 are allowed"):
                client.ask("finder", QUESTION="a", CONTEXT="b c " * 2000)
            assert client.ask("finder", QUESTION="a", CONTEXT="b c " * 300)["TRUNCATED"] is False


def test_the_stand_in_keeps_limits(exports, triton, tmp_path):
    """What it would let through proves nothing: a profile that is not listed, and a batch that no profile takes."""
    render(exports["moods"], tmp_path / "repository")
    config = tmp_path / "repository" / "moods_encode" / "config.pbtxt"
    text = config.read_text()
    config.write_text(text.replace('  profile: "0"\n  profile: "1"\n', "").partition("model_warmup")[0])
    with serving(triton, tmp_path / "repository", model_config_name="") as server, Client(server.http_url) as client:
        assert client.ask("moods", TEXT="a")["LABEL"] in SENTENCE.labels
        with pytest.raises(InvalidRequest, match="no profile takes 1 rows of 32 tokens"):
            client.ask("moods", TEXT="a b " * 20)
    config.write_text(text.replace("max_batch_size: 32", "max_batch_size: 33"))
    with (
        pytest.raises(ServerUnavailable, match="max_batch_size 33 exceeds the 32 rows of a profile"),
        serving(triton, tmp_path / "repository", model_config_name=""),
    ):
        pass


def test_a_plan_of_other_shapes_and_types_is_served_as_its_facts_say(triton, tmp_path):
    """exp.4: batch, buckets, profiles and types come from the manifest."""
    export = make_export(tmp_path / "export", "sentence")
    profiles = [
        {"smallest": (1, 1), "usual": (2, 16), "largest": (4, 16)},
        {"smallest": (1, 17), "usual": (2, 24), "largest": (4, 24)},
        {"smallest": (1, 25), "usual": (2, 40), "largest": (4, 40)},
    ]
    texts = ["a", "a b " * 10, "a b c " * 10]  # 3, 22 and 32 tokens
    add_plan(
        export, profiles=profiles, inputs=dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), "INT32")
    )
    render(export, tmp_path / "repository")
    with serving(triton, tmp_path / "repository", model_config_name="") as server, Client(server.http_url) as client:
        expected = from_export(export)({"TEXT": texts})
        for i, text in enumerate(texts):
            np.testing.assert_allclose(
                client.ask("moods", TEXT=text)["PROBABILITIES"], expected["PROBABILITIES"][i], atol=1e-5
            )
        with pytest.raises(InvalidRequest, match="at most 4 are allowed"):
            client.ask("moods", TEXT=["a"] * 5)
    used = executions(tmp_path / "repository", "moods")[-3:]
    assert [(e["tokens"], e["profile"]) for e in used] == [(16, 0), (24, 1), (40, 2)]
