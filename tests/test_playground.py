"""serving/playground: what it hands to a browser, what it learns from the server, and what it refuses."""

import dataclasses
import http.client
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_triton import FakeTriton, Model, labelled

from bertship.errors import InputError, ServerUnavailable
from bertship.pipeline import encode, from_export
from bertship.tasks import TASKS, get_task
from serving.playground import Playground, Served
from serving.playground.server import MAX_BYTES, PAGE

ROOT = Path(__file__).parents[1]
QUESTION = {"inputs": [{"name": "TEXT", "shape": [1], "datatype": "BYTES", "data": ["a lovely film 😀"]}]}
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def fake():
    models = {
        "mood": labelled(["bad", "good"], lambda text: int("good" in text)),
        "mood_tokenize": Model({"TEXT": [-1]}, {}, lambda body: (400, {"error": "never asked"}), platform=""),
    }
    with FakeTriton(models).run() as server:
        yield server


@pytest.fixture
def page(fake):
    with Playground(Served(fake.url), port=0) as playground:
        yield playground.start()


def request(page, method, path, body=None, **headers):
    """Status, headers and parsed body."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
    connection.putrequest(method, path, skip_host="Host" in headers)
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    if content is not None and "Content-Length" not in headers:
        headers["Content-Length"] = str(len(content))
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders(content)
    reply = connection.getresponse()
    text = reply.read()
    connection.close()
    try:
        return reply.status, reply.headers, json.loads(text)
    except ValueError:
        return reply.status, reply.headers, text


def test_tasks_of_the_real_server(line):
    """Found from the server alone; labels, options and texts to try from what lies beside it."""
    bare = {task["name"]: task for task in Served(line.server.http_url).tasks()}
    full = {task["name"]: task for task in Served(line.server.http_url, line.repository, line.runs).tasks()}
    assert bare.keys() == full.keys() == line.tasks.keys()
    for name, task in bare.items():
        definition = get_task(line.tasks[name])
        assert [tensor["name"] for tensor in task["inputs"]] == list(definition.behaviour.inputs)
        assert task["version"] == "1" and task["scale"] == []
        named = any(tensor["name"] == "PROBABILITIES" for tensor in task["outputs"])
        assert task["labels"] == (full[name]["labels"] if named else []), "the server names what it gives shares of"
        assert all(set(example) == set(definition.behaviour.inputs) for example in task["examples"])
        assert full[name]["outputs"] == task["outputs"]
        assert full[name]["description"] == definition.description
        assert full[name]["examples"] != task["examples"] and full[name]["examples"]
    assert full["sst2"]["labels"] == ["negative", "positive"] and full["weather"]["labels"] == ["fair", "foul"]
    assert full["squad"]["options"] == dict(TASKS["squad"].options) and full["sst2"]["options"] == {}
    low, high = full["stsb"]["scale"]
    assert low < high


def test_an_answer_is_what_triton_answers(line):
    served = Served(line.server.http_url, line.repository, line.runs)
    with Playground(served, port=0) as page:
        page.start()
        body = json.dumps(QUESTION).encode()
        status, headers, reply = request(page, "POST", "/api/infer/sst2", QUESTION, **JSON)
        assert (status, reply) == (200, json.loads(served.infer("sst2", body).body))
        assert float(headers["Server-Timing"].removeprefix("triton;dur=")) > 0
        pipeline = from_export(line.runs / "export" / "sst2")
        tokens = len(encode(pipeline.task, pipeline.tokenizer, {"TEXT": QUESTION["inputs"][0]["data"]}).rows[0])
        rows = request(page, "POST", "/api/rows/sst2", QUESTION, **JSON)[2]
        assert (rows["rows"], rows["tokens"]) == (1, tokens) and rows["version"] in ("", "1")
        long = {"name": "CONTEXT", "shape": [1], "datatype": "BYTES", "data": ["It was warm. " * 400]}
        asked = {"inputs": [{**long, "name": "QUESTION", "data": ["Where?"]}, long], "parameters": {"top_k": 2}}
        rows = request(page, "POST", "/api/rows/squad", asked, **JSON)[2]
        definition = TASKS["squad"]
        assert rows["rows"] > 4 and rows["tokens"] > (rows["rows"] - 1) * definition.max_tokens
        status, _, reply = request(page, "POST", "/api/infer/squad", {**asked, "parameters": {"top_k": 0}}, **JSON)
        assert status == 400 and "top_k=0" in reply["error"]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "says"),
    [
        ("GET", "/", {"Host": "evil.example"}, 403, "host 'evil.example' is not the playground's"),
        ("GET", "/api/tasks", {"Host": "127.0.0.1:1"}, 403, "is not the playground's"),
        ("POST", "/api/infer/mood", {"Origin": "http://evil.example", **JSON}, 403, "may not ask"),
        ("POST", "/api/infer/mood", {"Origin": "null", **JSON}, 403, "may not ask"),
        ("POST", "/api/infer/mood", {"Content-Type": "text/plain"}, 415, "application/json is needed"),
        ("POST", "/api/infer/mood", {**JSON, "Content-Length": str(MAX_BYTES + 1)}, 413, "are allowed"),
        ("POST", "/api/infer/mood", {**JSON, "Content-Length": "-1"}, 411, "Content-Length is needed"),
        ("POST", "/api/infer/mood_tokenize", JSON, 404, "no task 'mood_tokenize'"),
        ("POST", "/api/infer/nobody", JSON, 404, "no task 'nobody'"),
        ("POST", "/api/infer/..%2Frepository%2Fmodels%2Fmood%2Funload", JSON, 404, "no task '../repository"),
        ("POST", "/api/unload/mood", JSON, 404, "nothing at"),
        ("POST", "/v2/repository/models/mood/unload", JSON, 404, "nothing at"),
        ("POST", "/api/infer/mood/extra", JSON, 404, "nothing at"),
        ("GET", "/v2/models/mood", {}, 404, "nothing at"),
        ("GET", "/../server.py", {}, 404, "nothing at"),
        ("GET", "/%2e%2e/server.py", {}, 404, "nothing at"),
        ("GET", "http://127.0.0.1:1/", {"Host": "127.0.0.1:1"}, 403, "is not the playground's"),
        ("PUT", "/", {}, 501, b""),
    ],
)
def test_what_is_refused(fake, page, method, path, headers, status, says):
    fake.seen.clear()
    got, _, reply = request(page, method, path, QUESTION if method == "POST" else None, **headers)
    assert got == status
    assert status == 501 or (says in reply["error"] and "\n" not in reply["error"])
    assert not [seen for seen in fake.seen if "infer" in seen or "unload" in seen]


def test_its_own_names_are_let_in(page):
    for host in (f"127.0.0.1:{page.port}", f"localhost:{page.port}"):
        headers = {**JSON, "Host": host, "Origin": f"http://{host}"}
        assert request(page, "POST", "/api/infer/mood", QUESTION, **headers)[0] == 200


def test_the_page_brings_everything_itself(page):
    for path in sorted(PAGE.iterdir()):
        name = "/" if path.name == "index.html" else f"/{path.name}"
        status, headers, _ = request(page, "GET", name)
        assert status == 200 and headers["X-Content-Type-Options"] == "nosniff", name
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in text and "innerHTML" not in text, path
    assert request(page, "GET", "/app.js")[1]["Content-Type"].startswith("text/javascript")


def test_it_listens_on_this_machine_alone(page):
    assert page._server.server_address[0] == "127.0.0.1"


def test_a_server_that_lists_nothing_leaves_the_repository(fake, tmp_path):
    fake.stats_status = 403
    with pytest.raises(ServerUnavailable, match="does not list its models \\(closed\\); name its repository"):
        Served(fake.url).tasks()
    for name in ("mood", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").touch()
    assert [task["name"] for task in Served(fake.url, tmp_path).tasks()] == ["mood"]


def test_no_rows_where_the_server_does_not_tell(page):
    assert request(page, "POST", "/api/rows/mood", QUESTION, **JSON)[::2] == (
        200,
        {"rows": None, "tokens": None, "version": ""},
    )
    assert request(page, "POST", "/api/rows/mood", b"[1", **JSON)[::2] == (
        200,
        {"rows": None, "tokens": None, "version": ""},
    )


def test_the_version_is_the_one_that_the_steps_name(fake, tmp_path):
    """A deployment changes the steps' versions, not the ensemble's; the labels are that version's, not the newest's."""
    for version, labels in ((1, ("bad", "good")), (2, ("bad", "good", "so-so")), (3, ("never", "served"))):
        folder = tmp_path / "mood_tokenize" / str(version)
        folder.mkdir(parents=True)
        text = dataclasses.replace(TASKS["sst2"], name="mood", labels=labels).to_json()
        (folder / "task.json").write_text(text, encoding="utf-8")
    served = Served(fake.url, tmp_path)
    (task,) = served.tasks()
    assert (task["version"], task["labels"]) == ("1", ["never", "served"])  # named by nobody: the newest
    fake.models["mood"].pinned = 2
    (task,) = served.tasks()
    assert (task["version"], task["labels"]) == ("2", ["bad", "good", "so-so"])
    mask = [{"name": "attention_mask", "shape": [1, 3], "data": [1, 1, 0]}]
    tokenize = Model({"TEXT": [-1]}, {}, lambda body: (200, mask), version="2", platform="")
    fake.models["mood_tokenize"] = tokenize
    fake.models["mood_candidate"] = dataclasses.replace(fake.models["mood"], steps="mood")
    assert [task["name"] for task in served.tasks()] == ["mood"]
    assert served.rows("mood", json.dumps(QUESTION).encode()) == {"rows": 1, "tokens": 2, "version": "2"}
    assert fake.seen[-1] == "POST /v2/models/mood_tokenize/versions/2/infer"


def test_a_server_that_has_gone(fake, page):
    request(page, "GET", "/api/tasks")
    page.served._port = 1
    status, _, reply = request(page, "POST", "/api/infer/mood", QUESTION, **JSON)
    assert status == 502 and reply["error"].startswith(f"no server at {fake.url}: ") and "make serve" in reply["error"]
    assert request(page, "GET", "/api/tasks")[0] == 502


def test_a_fault_of_ours_is_said_and_ends_nothing(page, monkeypatch):
    monkeypatch.setattr(page.served, "tasks", lambda: 1 / 0)
    assert request(page, "GET", "/api/tasks")[::2] == (500, {"error": "unexpected ZeroDivisionError: division by zero"})
    monkeypatch.undo()
    assert request(page, "GET", "/api/tasks")[0] == 200


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "grpc://127.0.0.1:8001", "http://host", "http://a:b", "http://a:1/x"]
)
def test_an_address_that_is_none(url):
    with pytest.raises(InputError, match="http://HOST:PORT is needed"):
        Served(url)


def test_a_taken_port_is_said(fake, page):
    said = f"cannot listen on 127.0.0.1:{page.port}: address already in use; PLAYGROUND_PORT=N"
    with pytest.raises(InputError, match=said):
        Playground(Served(fake.url), port=page.port)


def test_the_command(fake):
    command = [sys.executable, "-m", "bertship", "--json", "playground", "--url", fake.url, "--port", "0"]
    started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said = json.loads(started.stdout.readline())
        assert said["server"] == fake.url and said["tasks"] == ["mood"]
        connection = http.client.HTTPConnection(said["url"].removeprefix("http://"), timeout=30)
        connection.request("GET", "/")
        assert b"bertship playground" in connection.getresponse().read()
    finally:
        started.send_signal(signal.SIGINT)
        out, err = started.communicate(timeout=30)
    assert (started.returncode, out, err) == (0, "", "")


def test_the_command_without_a_server(bertship, tmp_path):
    code, out, err = bertship("playground", "--url", "http://127.0.0.1:1", "--runs", tmp_path, "--port", "0")
    assert (code, out) == (1, "") and err.startswith("error: no server at http://127.0.0.1:1: ") and "make serve" in err


def test_the_command_finds_the_detached_server(bertship, tmp_path, monkeypatch):
    """And looks for labels in the repository that this server serves."""
    from bertship import console
    from bertship.commands import tools

    asked = {}

    class Stop(Exception): ...

    def served(url, repository, runs):
        asked.update(url=url, repository=repository, runs=runs)
        raise Stop

    stubs = {
        "serving.detached:running": lambda runs: {"http_url": "http://127.0.0.1:5", "repository": "/else/where"},
        "serving.playground:Served": served,
    }
    monkeypatch.setattr(tools, "load", lambda where: stubs.get(where) or console.load(where))
    code, _, err = bertship("playground", "--runs", tmp_path)
    assert code == 1 and "unexpected Stop" in err
    assert asked == {"url": "http://127.0.0.1:5", "repository": Path("/else/where"), "runs": tmp_path}
