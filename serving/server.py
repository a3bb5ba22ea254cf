"""Start, watch and stop the embedded Triton server.

    with TritonServer().start(Path("model_repository"), log_path=Path("runs/serve/triton.log")) as server:
        ...ask server.http_url...

`start` returns when every model answers, or raises with Triton's own reason and leaves nothing behind. The server ends
with its owner, even a killed one (`supervisor.py`). What mends and restarts it is `watch.py`.
"""

import contextlib
import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from bertship.errors import InputError, ServerUnavailable
from serving import control, environment, supervisor, triton_log
from serving.control import Control
from serving.environment import TritonEnvironment
from serving.ports import checked_ports
from serving.stubs import stubs

EXIT_TIMEOUT_S = 8  # how long the server itself waits for running requests before it ends
_GRACE_S = 15.0  # what the supervisor gives it after its owner has gone
POLL_S = 0.05
# An exception in a model is in the log well before. A crash never is: Triton waits for a word from the dead stub.
_CRASH_S = 1.0
# every Python model instance maps a region of this size at its start; it grows by what larger tensors need
_SHM_MIB = 4
_SHM_GROWTH_MIB = 1
_STUB_TIMEOUT_S = 60


class TritonServer:
    """One embedded Triton server; `stop` or the end of the `with` block ends it.

    While it runs: `pid`, `host`, `http_port`, `grpc_port`, `metrics_port`, `http_url` ("http://host:port"), `grpc_url`
    ("host:port"), `metrics_url` ("http://host:port/metrics"), `models`, `repository`, `shm_prefix`, `log_path`,
    `key_path` (the file with the key of the control APIs), `control`.
    """

    def __init__(self, triton: TritonEnvironment | None = None) -> None:
        """`triton`: what to run, else `environment.prepare()` at the start."""
        self._triton = triton
        self._supervisor: subprocess.Popen[str] | None = None
        self.pid = 0
        self.host = ""
        self.http_port = self.grpc_port = self.metrics_port = 0
        self.models: list[str] = []
        self.repository = self.log_path = self.key_path = Path()
        self.shm_prefix = ""
        self._key = ""
        self._options: dict[str, Any] = {}

    @property
    def supervisor_pid(self) -> int:
        """The process that takes the server along when this object's process ends."""
        assert self._supervisor is not None
        return self._supervisor.pid

    @property
    def control(self) -> Control:
        """The server's control API, with its key."""
        return Control(self.http_url, self._key)

    @property
    def http_url(self) -> str:
        return f"http://{self.host}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"{self.host}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.host}:{self.metrics_port}/metrics"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(
        self,
        repository: Path,
        *,
        log_path: Path,
        http_port: int = 8000,
        grpc_port: int = 8001,
        metrics_port: int = 8002,
        host: str = "127.0.0.1",
        models: Sequence[str] | None = None,
        timeout_s: float = 60.0,
        model_config_name: str = "embedded",
        key_path: Path | None = None,
        trace_path: Path | None = None,
        trace_rate: int = 1,
        extra_flags: Sequence[str] = (),
    ) -> Self:
        """Start the server on `repository` and wait until it and its models are ready; returns itself.

        A port of 0 takes a free one. With `models` only these (and what their ensembles need) are loaded, and models
        can be loaded and unloaded later (explicit control), with the key that is put into `key_path` (by default
        control.key beside the log, mode 0600). `trace_path`: time stamps of the steps of one in `trace_rate` requests,
        no texts. `extra_flags` come last on tritonserver's command line; they must leave HTTP and the log's
        information level on, which tell when it is ready.

        Raises InputError: repository, ports or shared memory will not do. Raises ServerUnavailable: the server ended,
        a model failed to load, or `timeout_s` has passed. Nothing is left running then, nor after Ctrl-C.
        """
        if self._supervisor is not None:
            raise InputError(f"this server is already running on {self.http_url}: stop it first")
        self._options = {name: value for name, value in locals().items() if name != "self"}
        self.repository = Path(repository).absolute()
        self.models = _known_models(self.repository, models)
        _check_shared_memory(len(self.models))
        self.http_port, self.grpc_port, self.metrics_port = checked_ports(host, (http_port, grpc_port, metrics_port))
        # an address to listen on is not always one to ask
        self.host = "127.0.0.1" if host == "0.0.0.0" else host
        self.shm_prefix = f"bertship_{os.getpid()}_{secrets.token_hex(4)}_"
        self.log_path = Path(log_path).absolute()
        self._triton = self._triton or environment.prepare()
        self._key = self._key or control.new_key()
        self.key_path = Path(key_path or self.log_path.with_name(control.KEY_FILE)).absolute()
        control.write_key(self.key_path, self._key)
        explicit = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in models)] if models else []
        traces = _trace_flags(trace_path, trace_rate) if trace_path else []
        closed = control.flags(supervisor.KEY_PLACE)
        command = [*_command(self._triton, self, host, model_config_name), *closed, *explicit, *traces, *extra_flags]
        try:
            self._launch(self._triton, command)
            self._await_ready(timeout_s)
        except BaseException:
            self._kill()
            raise
        return self

    def restart(self, models: Sequence[str] | None = None) -> Self:
        """Start a server that has ended again as it was: same ports, same key; with `models` where they are given.

        Raises as `start` does.
        """
        self._kill()
        ports = {"http_port": self.http_port, "grpc_port": self.grpc_port, "metrics_port": self.metrics_port}
        wanted = self._options["models"] if models is None else models
        return self.start(**self._options | ports | {"models": wanted})

    @property
    def explicit(self) -> bool:
        """Whether models can be loaded and unloaded."""
        return bool(self._options.get("models"))

    @property
    def ended(self) -> int | None:
        """The exit status of a server that has ended by itself, 128 + a signal's number; None while it runs."""
        return None if self._supervisor is None else self._supervisor.poll()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Let running requests end, then end the server; after `timeout_s` seconds kill what is left. Idempotent."""
        if self._supervisor is None:
            return
        try:
            self._supervisor.terminate()
            self._supervisor.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass  # killed below
        finally:
            self._kill()

    def wait(self) -> None:
        """Return when the server has ended, for whatever reason: what a command in the foreground does."""
        if self._supervisor is not None:
            self._supervisor.wait()

    def _launch(self, triton: TritonEnvironment, command: list[str]) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        if self.log_path.is_file():  # what a server said that has crashed
            self.log_path.replace(self.log_path.with_name(f"{self.log_path.name}.1"))
        script = Path(supervisor.__file__)
        watch = [sys.executable, "-I", str(script), str(os.getpid()), str(_GRACE_S), self.shm_prefix, *command]
        with self.log_path.open("w", encoding="utf-8") as log, _interrupts_held():
            self._supervisor = subprocess.Popen(
                watch,
                env=triton.variables() | {supervisor.KEY_VARIABLE: self._key},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert self._supervisor.stdout is not None
        with self._supervisor.stdout as answer:
            # nothing comes where the supervisor itself failed; `_await_ready` then finds it ended
            self.pid = int(answer.readline() or 0)

    def _await_ready(self, timeout_s: float) -> None:
        assert self._supervisor is not None
        deadline_s = time.monotonic() + timeout_s
        stub_died_s = float("inf")
        while True:
            # asked before the log is read: what a process has said by its end is then all there
            ended = self._supervisor.poll()
            log = self.log_path.read_text(encoding="utf-8", errors="replace")
            if reason := triton_log.failure(log):
                raise self._failed(reason)
            if ended is not None:
                raise self._failed(triton_log.last_error(log) or f"tritonserver ended with status {ended}")
            states = self._states()
            waiting = [name for name in self.models if states.get(name) != "READY"]
            if not waiting and triton_log.listens(log) and self._get("GET", "/v2/health/ready") is not None:
                return
            stub_died, living = stubs(self.pid)
            stub_died_s = min(stub_died_s, time.monotonic()) if stub_died else float("inf")
            if time.monotonic() - stub_died_s > _CRASH_S:
                alive = {name for name, _ in living.values()}
                crashed = ", ".join(name for name in triton_log.loading(log) if name not in alive) or "a model"
                raise self._failed(f"the Python stub of {crashed} crashed")
            if time.monotonic() > deadline_s:
                slow = ", ".join(f"{name} is {states.get(name) or 'not loaded'}" for name in waiting) or "no answer"
                raise self._failed(f"not ready after {timeout_s:g} s: {slow}")
            time.sleep(POLL_S)

    def _failed(self, reason: str) -> ServerUnavailable:
        return ServerUnavailable(f"Triton did not start: {reason}; its log is {self.log_path}")

    def _states(self) -> dict[str, str]:
        """The state of each model that the server knows; READY where one of its versions is."""
        body = self._get("POST", "/v2/repository/index")
        rows = sorted(json.loads(body or b"[]"), key=lambda row: row.get("state") == "READY")
        return {row["name"]: row.get("state", "") for row in rows}

    def _get(self, method: str, path: str) -> bytes | None:
        """The body of a reply of status 200; None where there is none (yet). Goes past any proxy of the user's."""
        connection = http.client.HTTPConnection(self.host, self.http_port, timeout=2.0)
        try:
            connection.request(method, path, headers={control.HEADER: self._key})
            reply = connection.getresponse()
            return reply.read() if reply.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _kill(self) -> None:
        """Leave nothing, at once. After an orderly end there is nothing left to do."""
        process, self._supervisor = self._supervisor, None
        if process is None:
            return
        if process.poll() is None:
            # the supervisor last: it waits for what is killed, so that no zombies are left where init does not care
            supervisor.kill_session(process.pid, keep=process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=2.0)
        # one that ended by itself has cleaned up, and its process id may by now be somebody else's
        if process.poll() is None or process.returncode < 0:
            supervisor.kill_session(process.pid)
        process.wait()
        supervisor.remove_shared_memory(self.shm_prefix)
        self.key_path.unlink(missing_ok=True)
        self.pid = 0


def list_models(repository: Path) -> list[str]:
    """Names of the models in a repository: folders with a config.pbtxt or a configs/ folder, sorted."""
    return sorted(
        folder.name
        for folder in Path(repository).iterdir()
        if (folder / "config.pbtxt").is_file() or (folder / "configs").is_dir()
    )


def _known_models(repository: Path, wanted: Sequence[str] | None) -> list[str]:
    if not repository.is_dir():
        raise InputError(f"no model repository at {repository}: `make repository` renders one")
    present = list_models(repository)
    if not present:
        raise InputError(f"{repository} holds no models (folders with a config.pbtxt): `make repository` renders them")
    if wanted is not None and (not wanted or not set(wanted) <= set(present)):
        missing = ", ".join(sorted(set(wanted) - set(present))) or "an empty list"
        raise InputError(f"cannot load {missing}: {repository} holds {', '.join(present)}")
    return present if wanted is None else list(wanted)


def _command(triton: TritonEnvironment, server: TritonServer, host: str, model_config_name: str) -> list[str]:
    runtime = triton.runtime
    python = {
        "shm-region-prefix-name": server.shm_prefix,
        "shm-default-byte-size": _SHM_MIB << 20,
        "shm-growth-byte-size": _SHM_GROWTH_MIB << 20,
        "stub-timeout-seconds": _STUB_TIMEOUT_S,
    }
    return [
        str(triton.tritonserver),
        f"--model-repository={server.repository}",
        f"--backend-directory={runtime / 'backends'}",
        f"--cache-directory={runtime / 'caches'}",
        f"--repoagent-directory={runtime / 'repoagents'}",
        f"--http-address={host}",
        f"--http-port={server.http_port}",
        f"--grpc-address={host}",
        f"--grpc-port={server.grpc_port}",
        f"--metrics-address={host}",
        f"--metrics-port={server.metrics_port}",
        "--rate-limit=execution_count",  # encoders name the cores as their resource and take turns at them
        "--metrics-interval-ms=200",  # the end of the server waits for the next one
        "--allow-gpu-metrics=false",
        "--pinned-memory-pool-byte-size=0",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        *([f"--model-config-name={model_config_name}"] if model_config_name else []),
        *(f"--backend-config=python,{name}={value}" for name, value in python.items()),
    ]


def _trace_flags(path: Path, rate: int) -> list[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    # written in pieces of 100 traces: without them all is kept until the end
    return [
        "--trace-config=mode=triton",
        f"--trace-config=triton,file={Path(path).absolute()}",
        "--trace-config=triton,log-frequency=100",
        "--trace-config=level=TIMESTAMPS",
        f"--trace-config=rate={rate}",
    ]


def _check_shared_memory(models: int) -> None:
    needed_mib = models * (_SHM_MIB + _SHM_GROWTH_MIB)
    folder = supervisor.SHARED_MEMORY
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{folder} cannot be written to, and Triton passes tensors through it: mount a tmpfs there")
    usage = os.statvfs(folder)
    free_mib = usage.f_bavail * usage.f_frsize >> 20
    if free_mib < needed_mib:
        raise InputError(
            f"{folder} has {free_mib} MiB free and {models} models need {needed_mib} MiB: enlarge it "
            f"(Docker: --shm-size={max(256, 2 * needed_mib)}m) or remove what other programs left there"
        )


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Keep Ctrl-C waiting while a process is born: no moment when it runs and we do not know it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
