"""serving/server.py with the real Triton: it starts, answers, says why it does not, and leaves nothing behind."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http

from bertship.errors import InputError, ServerUnavailable
from serving import detached, environment, server, supervisor, triton_log
from serving.ports import bind_problem, checked_ports
from serving.server import TritonServer

PROJECT = Path(__file__).resolve().parent.parent
ANY_PORTS = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}

CONFIG = """
backend: "python"
max_batch_size: 0
input [ {{ name: "{0}" data_type: TYPE_STRING dims: [ -1 ] }} ]
output [ {{ name: "{1}" data_type: {2} dims: [ -1 ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 0
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "LENGTH" data_type: TYPE_INT64 dims: [ -1 ] } ]
ensemble_scheduling { step [
  { model_name: "echo" model_version: -1
    input_map { key: "TEXT" value: "TEXT" } output_map { key: "ECHO" value: "between" } },
  { model_name: "length" model_version: -1
    input_map { key: "ECHO" value: "between" } output_map { key: "LENGTH" value: "LENGTH" } }
] }
"""
ECHO = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        replies = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
            if b"sleep" in texts:
                time.sleep(1)
            if b"hang" in texts:
                time.sleep(600)
            if b"refuse" in texts:
                error = pb_utils.TritonError("TEXT[0] is refused: send another", pb_utils.TritonError.INVALID_ARG)
                replies.append(pb_utils.InferenceResponse(error=error))
            else:
                replies.append(pb_utils.InferenceResponse([pb_utils.Tensor("ECHO", texts)]))
        return replies
"""
LENGTH = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "ECHO").as_numpy() for request in requests]
        lengths = [np.array([len(text) for text in row], dtype=np.int64) for row in texts]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("LENGTH", row)]) for row in lengths]
"""
BROKEN = """
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("no vocabulary in the folder: run `make repository`")
"""
SLOW = """
import time

class TritonPythonModel:
    def initialize(self, args):
        time.sleep(600)
"""


@pytest.fixture(scope="module")
def triton():
    return environment.prepare()


def add_model(repository: Path, name: str, config: str, code: str = "") -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    if code:
        (repository / name / "1" / "model.py").write_text(code)


@pytest.fixture
def repository(tmp_path):
    repository = tmp_path / "repository"
    add_model(repository, "echo", CONFIG.format("TEXT", "ECHO", "TYPE_STRING"), ECHO)
    add_model(repository, "length", CONFIG.format("ECHO", "LENGTH", "TYPE_INT64"), LENGTH)
    add_model(repository, "both", ENSEMBLE)
    return repository


@pytest.fixture
def one_model(tmp_path):
    """Makes a repository of a single Python model of the given code."""

    def make(name: str, code: str) -> Path:
        repository = tmp_path / f"with_{name}"
        add_model(repository, name, CONFIG.format("TEXT", "ECHO", "TYPE_STRING"), code)
        return repository

    return make


def left_of(repository: Path) -> list[str]:
    """Living processes that have to do with `repository`, this one's descendants or not."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = " ".join(process.info["cmdline"] or [])
        if str(repository) in command and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            found.append(f"{process.pid} {command[:150]}")
    return found


def regions(prefix: str) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"{prefix}*")]


def can_listen(port: int) -> bool:
    return not bind_problem("127.0.0.1", port)


def wait_until(condition, timeout_s=20.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.05)


def ask_http(url: str, model: str, texts: list[bytes], output: str):
    with tritonclient.http.InferenceServerClient(url.removeprefix("http://")) as client:
        tensor = tritonclient.http.InferInput("TEXT", [len(texts)], "BYTES")
        tensor.set_data_from_numpy(np.array(texts, dtype=object))
        return client.infer(model, [tensor]).as_numpy(output).tolist()


def ask_grpc(url: str, model: str, texts: list[bytes], output: str):
    with tritonclient.grpc.InferenceServerClient(url) as client:
        tensor = tritonclient.grpc.InferInput("TEXT", [len(texts)], "BYTES")
        tensor.set_data_from_numpy(np.array(texts, dtype=object))
        return client.infer(model, [tensor]).as_numpy(output).tolist()


@contextlib.contextmanager
def in_another_process(code: str, *arguments: object):
    """A Python process that runs `code` from the checkout; killed at the end."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    process = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_starts_answers_and_leaves_nothing(triton, repository, tmp_path):
    with TritonServer(triton).start(repository, log_path=tmp_path / "log", **ANY_PORTS) as running:
        assert running.models == ["both", "echo", "length"]
        assert ask_http(running.http_url, "echo", [b"a", "ümlaut".encode(), b""], "ECHO") == [
            b"a",
            "ümlaut".encode(),
            b"",
        ]
        assert ask_http(running.http_url, "both", [b"a", b"four"], "LENGTH") == [1, 4]
        assert ask_grpc(running.grpc_url, "both", [b"a", b"four"], "LENGTH") == [1, 4]
        with pytest.raises(tritonclient.http.InferenceServerException) as caught:
            ask_http(running.http_url, "both", [b"refuse"], "LENGTH")
        assert (caught.value.status(), caught.value.message()) == (
            "400",
            "in ensemble 'both', TEXT[0] is refused: send another",
        )
        with pytest.raises(tritonclient.grpc.InferenceServerException) as caught:
            ask_grpc(running.grpc_url, "both", [b"refuse"], "LENGTH")
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        with urllib.request.urlopen(running.metrics_url) as metrics:
            assert b'nv_inference_request_success{model="both",version="1"}' in metrics.read()
        ports, prefix = (running.http_port, running.grpc_port, running.metrics_port), running.shm_prefix
        assert psutil.Process(running.pid).name() == "tritonserver"
        assert running.key_path == tmp_path / "control.key" and running.key_path.is_file()
        assert regions(prefix)
        # an owner's second start would lose sight of the first server
        with pytest.raises(InputError, match="already running"):
            running.start(repository, log_path=tmp_path / "log2", **ANY_PORTS)
    assert left_of(repository) == [] and regions(prefix) == [] and not running.key_path.exists()
    assert all(map(can_listen, ports))
    running.stop()  # again, to no effect


def test_only_the_models_asked_for_are_loaded(triton, repository, tmp_path):
    add_model(repository, "broken", CONFIG.format("TEXT", "ECHO", "TYPE_STRING"), BROKEN)
    with TritonServer(triton).start(repository, models=["echo"], log_path=tmp_path / "log", **ANY_PORTS) as running:
        assert {name for name, state in running._states().items() if state == "READY"} == {"echo"}


def test_the_embedded_configuration_is_preferred(triton, repository, tmp_path):
    (repository / "echo" / "configs").mkdir()
    (repository / "echo" / "config.pbtxt").rename(repository / "echo" / "configs" / "embedded.pbtxt")
    (repository / "echo" / "config.pbtxt").write_text('platform: "tensorrt_plan"\nmax_batch_size: 8\n')
    with TritonServer(triton).start(repository, models=["echo"], log_path=tmp_path / "log", **ANY_PORTS) as running:
        assert ask_http(running.http_url, "echo", [b"a"], "ECHO") == [b"a"]


def test_stop_waits_for_a_running_request_and_kills_a_hanging_one(triton, repository, tmp_path):
    def ask(url, text):
        with tritonclient.http.InferenceServerClient(url.removeprefix("http://")) as client:
            tensor = tritonclient.http.InferInput("TEXT", [1], "BYTES")
            tensor.set_data_from_numpy(np.array([text], dtype=object))
            pending = client.async_infer("both", [tensor])
            time.sleep(0.3)
            running.stop(timeout_s=4.0)
            return pending.get_result().as_numpy("LENGTH").tolist()

    running = TritonServer(triton).start(repository, log_path=tmp_path / "log", **ANY_PORTS)
    assert ask(running.http_url, b"sleep") == [5]
    running.start(repository, log_path=tmp_path / "log", **ANY_PORTS)
    prefix, started_s = running.shm_prefix, time.monotonic()
    with pytest.raises(Exception):  # noqa: B017 - whichever way the client sees its connection end
        ask(running.http_url, b"hang")
    assert time.monotonic() - started_s < 8
    assert left_of(repository) == [] and regions(prefix) == []


def test_taken_port_is_named_with_its_holder(triton, repository, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"^GRPC_PORT={port} on 127.0.0.1: address already in use") as caught:
            TritonServer(triton).start(repository, log_path=tmp_path / "log", **ANY_PORTS | {"grpc_port": port})
    assert f"process {os.getpid()}" in str(caught.value) and "make stop" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_servers_answer_is_not_taken_for_ours(triton, repository, tmp_path, monkeypatch):
    with TritonServer(triton).start(repository, log_path=tmp_path / "first", **ANY_PORTS) as first:
        ports = {name: getattr(first, name) for name in ANY_PORTS}
        # as when both looked at the ports before either listened
        monkeypatch.setattr(server, "checked_ports", lambda host, asked: asked)
        with pytest.raises(ServerUnavailable, match="already in use"):
            TritonServer(triton).start(repository, log_path=tmp_path / "second", **ports)
        assert ask_http(first.http_url, "both", [b"four"], "LENGTH") == [4]


@pytest.mark.parametrize(
    ("ports", "message"),
    [((70000, 0, 0), "HTTP_PORT=70000 is no port"), ((0, 9000, 9000), "GRPC_PORT=9000 is given twice")],
)
def test_impossible_ports(ports, message):
    with pytest.raises(InputError, match=message):
        checked_ports("127.0.0.1", ports)


def test_missing_and_empty_repositories_and_unknown_models(triton, repository, tmp_path):
    start = TritonServer(triton).start
    with pytest.raises(InputError, match=r"no model repository at .*nowhere: `make repository`"):
        start(tmp_path / "nowhere", log_path=tmp_path / "log")
    (tmp_path / "empty" / "notes").mkdir(parents=True)
    with pytest.raises(InputError, match="holds no models"):
        start(tmp_path / "empty", log_path=tmp_path / "log")
    with pytest.raises(InputError, match=r"cannot load sst3: .* holds both, echo, length"):
        start(repository, models=["echo", "sst3"], log_path=tmp_path / "log")
    with pytest.raises(InputError, match="cannot load an empty list"):
        start(repository, models=[], log_path=tmp_path / "log")


def test_small_or_read_only_shared_memory(monkeypatch):
    with pytest.raises(InputError, match=r"MiB free and 1000000 models need .*--shm-size="):
        server._check_shared_memory(1_000_000)
    monkeypatch.setattr(supervisor, "SHARED_MEMORY", Path("/proc/nowhere"))
    with pytest.raises(InputError, match="cannot be written to"):
        server._check_shared_memory(1)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (BROKEN, "model 'model': ValueError: no vocabulary in the folder: run `make repository`; its log is "),
        ("import nonesuch\n", "model 'model': ModuleNotFoundError: No module named 'nonesuch'; its log is "),
        ("import os\nos._exit(3)\n", "the Python stub of model crashed; its log is "),
        ("", "Python model file not found in "),
    ],
    ids=["raises", "import", "crash", "no-file"],
)
def test_a_model_that_does_not_load_is_told_at_once_with_its_reason(triton, one_model, tmp_path, code, reason):
    repository = one_model("model", code)
    running = TritonServer(triton)
    started_s = time.monotonic()
    with pytest.raises(ServerUnavailable) as caught:
        running.start(repository, log_path=tmp_path / "log", timeout_s=50, **ANY_PORTS)
    assert time.monotonic() - started_s < 25
    assert str(caught.value).startswith(f"Triton did not start: {reason}")
    assert str(tmp_path / "log") in str(caught.value) and "\n" not in str(caught.value)
    assert left_of(repository) == [] and regions(running.shm_prefix) == []


def test_wrong_configuration_says_where(triton, repository, tmp_path):
    (repository / "echo" / "config.pbtxt").write_text('backend: "python"\nmax_batch_sise: 0\n')
    with pytest.raises(
        ServerUnavailable, match=r"model 'echo': .* 2:15: .* no field named \"max_batch_sise\"; its log"
    ):
        TritonServer(triton).start(repository, log_path=tmp_path / "log", **ANY_PORTS)
    assert left_of(repository) == []


def test_wrong_flag_and_too_slow_a_model(triton, one_model, repository, tmp_path):
    with pytest.raises(ServerUnavailable, match="unrecognized option '--no-such-flag'; its log"):
        TritonServer(triton).start(repository, log_path=tmp_path / "a", extra_flags=["--no-such-flag"], **ANY_PORTS)
    with pytest.raises(ServerUnavailable, match=r"start: Invalid option value\. Got abc; its log"):
        TritonServer(triton).start(repository, log_path=tmp_path / "a", extra_flags=["--http-port=abc"], **ANY_PORTS)
    slow = one_model("slow", SLOW)
    with pytest.raises(ServerUnavailable, match=r"not ready after 2 s: slow is "):
        TritonServer(triton).start(slow, log_path=tmp_path / "b", timeout_s=2, **ANY_PORTS)
    assert left_of(slow) == []


START = """
    import sys, time
    from pathlib import Path
    from serving.server import TritonServer
    print("starting", flush=True)
    ports = dict(http_port=0, grpc_port=0, metrics_port=0)
    server = TritonServer().start(Path(sys.argv[1]), log_path=Path(sys.argv[2]), **ports)
    print(server.pid, server.shm_prefix, flush=True)
    time.sleep(600)
"""


def test_a_killed_owner_takes_the_server_and_its_stubs_along(triton, repository, tmp_path):
    with in_another_process(START, repository, tmp_path / "log") as owner:
        assert owner.stdout.readline() == "starting\n"
        prefix = owner.stdout.readline().split()[1]
        assert len(left_of(repository)) >= 4  # supervisor, server and two stubs, beside the owner
        owner.send_signal(signal.SIGKILL)
        wait_until(lambda: left_of(repository) == [])
    assert regions(prefix) == []


def test_a_killed_supervisor_or_server_leaves_nothing_either(triton, repository, tmp_path):
    running = TritonServer(triton).start(repository, log_path=tmp_path / "log", **ANY_PORTS)
    os.kill(running._supervisor.pid, signal.SIGKILL)
    wait_until(lambda: left_of(repository) == [])
    running.stop()
    assert regions(running.shm_prefix) == []

    running.start(repository, log_path=tmp_path / "log", **ANY_PORTS)
    os.kill(running.pid, signal.SIGKILL)
    running._supervisor.wait(10)
    assert left_of(repository) == [] and regions(running.shm_prefix) == []
    running.stop()


def test_ctrl_c_during_the_start_leaves_nothing(triton, one_model, tmp_path):
    repository = one_model("slow", SLOW)
    with in_another_process(START, repository, tmp_path / "log") as owner:
        wait_until(lambda: any("python_backend_stub" in line for line in left_of(repository)))
        owner.send_signal(signal.SIGINT)
        _, errors = owner.communicate(timeout=20)
    assert "KeyboardInterrupt" in errors
    assert left_of(repository) == []
    prefix = f"bertship_{owner.pid}_"
    assert regions(prefix) == []


def test_detached_server_outlives_its_command_and_is_found_and_stopped(triton, repository, tmp_path):
    code = """
        import sys
        from pathlib import Path
        from serving.detached import start_detached
        start_detached(Path(sys.argv[1]), Path(sys.argv[2]), http_port=0, grpc_port=0, metrics_port=0)
    """
    state_dir = tmp_path / "state"
    assert detached.running(state_dir) is None and not detached.stop_detached(state_dir)
    with in_another_process(code, repository, state_dir) as command:
        assert command.wait(60) == 0, command.stderr.read()
    time.sleep(3 * supervisor._POLL_S)  # an attached one would by now have noticed that its owner is gone
    state = detached.running(state_dir)
    assert state == json.loads((state_dir / "server.json").read_text())
    assert state["models"] == ["both", "echo", "length"] and state["repository"] == str(repository)
    assert ask_http(state["http_url"], "both", [b"four"], "LENGTH") == [4]
    with pytest.raises(InputError, match=f"already runs on {state['http_url']}: `make stop`"):
        detached.start_detached(repository, state_dir, **ANY_PORTS)
    assert detached.stop_detached(state_dir)
    assert detached.running(state_dir) is None and not (state_dir / "server.json").exists()
    assert left_of(repository) == [] and regions(state["shm_prefix"]) == []
    assert all(can_listen(state[name]) for name in ("http_port", "grpc_port", "metrics_port"))
    assert not detached.stop_detached(state_dir)


def test_a_killed_keeper_leaves_nothing_and_its_description_harms_nobody(triton, repository, tmp_path):
    state = detached.start_detached(repository, tmp_path, triton=triton, **ANY_PORTS)
    os.kill(state["keeper"], signal.SIGKILL)
    wait_until(lambda: detached.running(tmp_path) is None and left_of(repository) == [])
    # the same process ids, now somebody else's
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as other:
        (tmp_path / "server.json").write_text(json.dumps(state | {"keeper": other.pid, "supervisor": other.pid}))
        assert detached.running(tmp_path) is None
        assert not detached.stop_detached(tmp_path)
        assert other.poll() is None
        other.kill()
    assert not (tmp_path / "server.json").exists() and regions(state["shm_prefix"]) == []


def test_a_detached_start_that_fails_leaves_nothing(triton, one_model, tmp_path):
    repository = one_model("broken", BROKEN)
    with pytest.raises(ServerUnavailable, match="no vocabulary"):
        detached.start_detached(repository, tmp_path / "state", triton=triton, **ANY_PORTS)
    assert left_of(repository) == [] and detached.running(tmp_path / "state") is None


def test_log_reasons_are_one_line_without_the_traceback():
    begun = 'I1129 18:28:17.7 4827 x.cc:1] "loading: a:1"'
    failed = (
        "E1129 18:28:19.3 4827 model_lifecycle.cc:642] \"failed to load 'a' version 1: Internal: KeyError: "
        'two\\nlines\\n\\nAt:\\n  /m/1/model.py(3): initialize\\n"'
    )
    noise = 'E1129 18:28:17.7 4827 server.cc:241] "CudaDriverHelper has not been initialized."'
    assert triton_log.failure(f"{noise}\n{begun}\n{failed}\n") == "model 'a': KeyError: two lines"
    assert triton_log.failure(noise) == triton_log.last_error(noise) == ""
    assert triton_log.loading(begun) == ["a"]
