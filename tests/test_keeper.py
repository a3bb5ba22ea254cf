"""serving/keeper.py and watch.py with the real Triton: what dies is noticed and mended; what is shut stays shut."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tritonclient.grpc
from test_server import (
    ANY_PORTS,
    PROJECT,
    add_model,
    ask_http,
    left_of,
    regions,
    repository,  # noqa: F401 - a fixture
    triton,  # noqa: F401 - a fixture
    wait_until,
)

from bertship import health
from bertship.errors import InputError, ServerUnavailable
from bertship.health import Endpoint
from serving import control, detached, events, watch
from serving.control import Control
from serving.events import EventLog
from serving.stubs import stubs
from serving.watch import Watch

# Triton gives the empty "both" no version folder of its own
STEP = """
backend: "python"
max_batch_size: 0
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "ECHO" data_type: TYPE_STRING dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
# from this text on it fails at everything, until it is loaded again; its words hold the text, as an exception's may
POISON = """if b"poison" in texts:
                self.broken = texts
            if hasattr(self, "broken"):
                raise RuntimeError(f"cannot do {self.broken}")
            if b"sleep" in texts:"""


@pytest.fixture
def kept(triton, repository, tmp_path):  # noqa: F811
    """A kept server of three models as a task has them; its description."""
    for step in ("tokenize", "encode", "decode"):
        code = (repository / "echo" / "1" / "model.py").read_text()
        add_model(repository, f"chat_{step}", STEP, code.replace('if b"sleep" in texts:', POISON))
    wiring = "".join(
        f'{{ model_name: "chat_{step}" model_version: -1 input_map {{ key: "TEXT" value: "{source}" }} '
        f'output_map {{ key: "ECHO" value: "{target}" }} }},'
        for step, source, target in (("tokenize", "TEXT", "a"), ("encode", "a", "b"), ("decode", "b", "ECHO"))
    ).rstrip(",")
    ensemble = STEP.replace('backend: "python"', 'platform: "ensemble"').replace(
        "instance_group [ { count: 1 kind: KIND_CPU } ]", f"ensemble_scheduling {{ step [ {wiring} ] }}"
    )
    add_model(repository, "chat", ensemble)
    models = ["chat", "chat_tokenize", "chat_encode", "chat_decode"]
    state = detached.start_detached(repository, tmp_path / "serve", triton=triton, models=models, **ANY_PORTS)
    yield state
    assert detached.stop_detached(tmp_path / "serve")
    assert left_of(repository) == [] and regions(state["shm_prefix"]) == []


def stub_of(state, model):
    wait_until(lambda: [name for name, _ in stubs(state["pid"])[1].values()].count(model) == 1)
    return next(pid for pid, (name, _) in stubs(state["pid"])[1].items() if name == model)


def told(state, event):
    return [row for row in events.read(Path(state["events"])) if row["event"] == event]


@pytest.mark.parametrize("model", ["chat_tokenize", "chat_encode", "chat_decode"])
def test_a_dead_stub_is_noticed_and_mended_within_five_seconds(kept, model):
    """srv.14; and while it is not, the task is not ready.

    On a machine so busy that loading the model by hand takes more than a third of that, within three times as long.
    """
    chat, key = Endpoint(kept["http_url"]), control.read_key(Path(kept["key"]))
    started_s = time.monotonic()
    (Path(kept["repository"]) / model / "1" / "model.py").touch()  # or Triton would see nothing to do
    Control(kept["http_url"], key).load(model)
    allowed_s = max(5.0, 3 * (time.monotonic() - started_s))
    assert chat.probe("chat", 10).ok
    statuses = []
    time.sleep(1)  # the keeper has seen the new process
    os.kill(stub_of(kept, model), signal.SIGKILL)
    died_s = time.monotonic()
    while not (told(kept, "mended") and chat.probe("chat", 10).ok):
        statuses.append(chat.call("GET", "/v2/models/chat/ready")[0])
        assert time.monotonic() - died_s < allowed_s, events.read(Path(kept["events"]))
        time.sleep(0.05)
    assert 400 in statuses  # it said so meanwhile
    assert told(kept, "stub died")[0]["model"] == model
    assert told(kept, "unloaded")[0]["task"] == "chat"
    assert ask_http(kept["http_url"], "chat", [b"again"], "ECHO") == [b"again"]


def test_a_stub_that_a_look_at_the_threads_misses_lives(tmp_path):
    """A child moves to another thread when the one that made it ends, as those do in which Triton loads models."""
    script = tmp_path / "chat" / "2" / "model.py"
    script.parent.mkdir(parents=True)
    script.write_text("import time\ntime.sleep(60)\n")
    stub = subprocess.Popen([sys.executable, script])
    try:
        missed = stubs(1)[1]
        assert stub.pid not in missed
        wait_until(lambda: stubs(1, [stub.pid])[1].get(stub.pid) == ("chat", 2))
        assert stubs(os.getpid())[1][stub.pid] == ("chat", 2)
        stub.kill()
        os.waitid(os.P_PID, stub.pid, os.WEXITED | os.WNOWAIT)
        assert stubs(1, [stub.pid]) == (True, {})
    finally:
        stub.kill()
        stub.wait()
    assert stubs(1, [stub.pid]) == (False, {})


def test_a_model_that_fails_at_everything_is_seen_by_the_canaries_and_loaded_again(kept, tmp_path):
    with pytest.raises(Exception, match="cannot do"):
        ask_http(kept["http_url"], "chat", [b"poison", b"confidential"], "ECHO")
    wait_until(lambda: told(kept, "mended"), 20)
    assert ask_http(kept["http_url"], "chat", [b"again"], "ECHO") == [b"again"]
    assert len(told(kept, "canary failed")) == 2 and not told(kept, "stub died")
    assert b"confidential" not in Path(kept["events"]).read_bytes()
    assert any(row["detail"].endswith("message: RuntimeError") for row in told(kept, "triton"))


def test_a_crashed_server_is_started_again_on_its_ports(kept, tmp_path):
    os.kill(kept["pid"], signal.SIGKILL)
    wait_until(lambda: told(kept, "restarted"), 30)
    assert ask_http(kept["http_url"], "chat", [b"again"], "ECHO") == [b"again"]
    now = detached.running(tmp_path / "serve")
    assert now["pid"] != kept["pid"] and now["http_url"] == kept["http_url"]
    assert told(kept, "server ended")[0]["status"] == 128 + signal.SIGKILL
    # the key has stayed too
    assert Control(now["http_url"], control.read_key(Path(now["key"]))).ready() >= {"chat"}


def test_a_server_that_ends_again_and_again_is_given_up(tmp_path, monkeypatch):
    class Ending:
        http_url, pid, models, explicit, ended = "http://127.0.0.1:1", 0, [], False, 139
        control, log_path, restarts = Control(http_url, "key"), tmp_path / "triton.log", 0

        def restart(self, models):
            self.restarts += 1
            raise ServerUnavailable("Triton did not start")

    monkeypatch.setattr(watch, "_PAUSES_S", (0.0, 0.0, 0.0))
    Ending.log_path.write_text("Segmentation fault: error 4\n")
    server, log = Ending(), EventLog(tmp_path / "serve.jsonl")
    with pytest.raises(ServerUnavailable, match=r"again and again \(ended with status 139: Segmentation fault"):
        Watch(server, log).run(threading.Event())
    assert server.restarts == 3
    rows = [row["event"] for row in events.read(tmp_path / "serve.jsonl") if row["event"] != "triton"]
    assert rows == ["server ended", *["restart failed"] * 3]


def test_health_asks_every_task_and_notices_a_missing_one(kept):
    (result,) = health.check(kept["http_url"])
    assert (result.task, result.ok, result.status) == ("chat", True, 200)
    key = control.read_key(Path(kept["key"]))
    Control(kept["http_url"], key).unload("chat")
    (result,) = health.check(kept["http_url"])
    assert not result.ok and "chat" in result.problem
    # one that has the key has unloaded it: the keeper lets it be
    time.sleep(3)
    assert not health.check(kept["http_url"])[0].ok and not told(kept, "unloaded")
    probe = [sys.executable, "-I", "-m", "bertship.health", kept["http_url"]]
    assert subprocess.run(probe, capture_output=True, check=False, cwd=PROJECT).returncode == 1
    Control(kept["http_url"], key).load("chat")
    assert subprocess.run(probe, capture_output=True, check=False, cwd=PROJECT).returncode == 0
    (result,) = health.check("http://127.0.0.1:1")
    assert not result.ok and result.problem.startswith("no answer")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v2/repository/index"),
        ("POST", "/v2/repository/models/chat/load"),
        ("POST", "/v2/repository/models/chat/unload"),
        ("GET", "/v2/systemsharedmemory/status"),
        ("POST", "/v2/systemsharedmemory/region/x/register"),
        ("GET", "/v2/cudasharedmemory/status"),
        ("GET", "/v2/trace/setting"),
        ("POST", "/v2/models/chat/trace/setting"),
        ("POST", "/v2/logging"),
    ],
)
def test_control_is_closed_without_the_key(line, method, path):
    status, body = Endpoint(line.server.http_url).call(method, path, {"key": "/etc/passwd"})
    assert status == 403, body
    status, _ = Endpoint(line.server.http_url, {control.HEADER: "guess"}).call(method, path, {})
    assert status == 403


def test_control_is_closed_over_grpc_too_and_the_key_is_nobodys_to_read(line):
    with tritonclient.grpc.InferenceServerClient(line.server.grpc_url) as client:
        for call in (
            client.get_model_repository_index,
            lambda: client.unload_model("sst2"),
            lambda: client.load_model("sst2"),
            client.get_system_shared_memory_status,
            client.get_trace_settings,
            lambda: client.update_log_settings({"log_verbose_level": 9}),
        ):
            with pytest.raises(tritonclient.utils.InferenceServerException, match="restricted"):
                call()
    path = line.server.key_path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = control.read_key(path)
    for pid in (line.server.pid, line.server.supervisor_pid):
        wait_until(lambda pid=pid: key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes())
    assert line.server.control.ready() >= {"sst2", "sst2_encode"}
    with pytest.raises(InputError, match="refuses the key"):
        Control(line.server.http_url, "guess").ready()
    with pytest.raises(ServerUnavailable, match="no server at"):
        Control("http://127.0.0.1:1", key).ready()


def test_serve_in_the_foreground_drains_on_sigterm_and_says_where_it_is(triton, repository, tmp_path):  # noqa: F811
    code = f"""
import sys; from pathlib import Path
from bertship.commands import serving as commands
from serving.keeper import keep
with commands.stopped_in_order():
    keep(Path({str(repository)!r}), Path({str(tmp_path)!r}), ready=lambda s: print(s["http_url"], flush=True),
         say=lambda line: print(line, file=sys.stderr), http_port=0, grpc_port=0, metrics_port=0)
print("left in order", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    url = process.stdout.readline().strip()
    answers = []
    asking = threading.Thread(target=lambda: answers.append(ask_http(url, "both", [b"sleep"], "LENGTH")))
    asking.start()
    time.sleep(0.4)
    process.send_signal(signal.SIGTERM)
    asking.join(20)
    out, err = process.communicate(timeout=30)
    assert answers == [[5]] and process.returncode == 0 and "left in order" in out
    assert "ending: running requests are answered" in err
    assert left_of(repository) == [] and not (tmp_path / "server.json").exists()
    rows = events.read(tmp_path / "serve.jsonl")
    assert [row["event"] for row in rows if row["event"] != "triton"] == ["ready", "stopping", "stopped"]
    assert all(row["time"].endswith("Z") and row["level"] for row in rows)


def test_traces_have_times_and_no_texts(triton, repository, tmp_path):  # noqa: F811
    trace = tmp_path / "trace.json"
    state = detached.start_detached(repository, tmp_path / "serve", triton=triton, trace_path=trace, **ANY_PORTS)
    assert ask_http(state["http_url"], "both", [b"confidential"], "LENGTH") == [12]
    with pytest.raises(Exception, match="refused"):
        ask_http(state["http_url"], "both", [b"refuse", b"confidential"], "LENGTH")
    detached.stop_detached(tmp_path / "serve")
    files = [path for path in tmp_path.rglob("*") if path.is_file() and "repository" not in path.parts]
    traces = [path for path in files if path.name.startswith("trace.json")]
    rows = [row for path in traces for row in json.loads(path.read_text())]
    assert {row["model_name"] for row in rows if "model_name" in row} >= {"both", "echo", "length"}
    assert not [path for path in files if b"confidential" in path.read_bytes()]
