"""Start, watch and stop the embedded Triton server.

    with TritonServer().start(Path("model_repository"), log_path=Path("runs/serve/triton.log")) as server:
        ...ask server.http_url...

`start` returns when every model answers, or raises with Triton's own reason and leaves nothing behind. The server ends
with its owner, even a killed one (`supervisor.py`), unless `serving/detached.py` lets it go.
"""

import contextlib
import http.client
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from bertship.errors import InputError, ServerUnavailable
from serving import environment, supervisor, triton_log
from serving.environment import TritonEnvironment

EXIT_TIMEOUT_S = 8  # how long the server itself waits for running requests before it ends
_GRACE_S = 15.0  # what the supervisor gives it after its owner has gone
POLL_S = 0.05
# An exception in a model is in the log well before. A crash never is: Triton waits for a word from the dead stub.
_CRASH_S = 1.0
# every Python model instance maps a region of this size at its start; it grows by what larger tensors need
_SHM_MIB = 4
_SHM_GROWTH_MIB = 1
_STUB_TIMEOUT_S = 60
# below the range that the kernel takes the client side of connections from, so a picked port stays free
_FREE_PORTS = range(20_000, 32_000)


class TritonServer:
    """One embedded Triton server; `stop` or the end of the `with` block ends it.

    While it runs: `pid`, `host`, `http_port`, `grpc_port`, `metrics_port`, `http_url` ("http://host:port"), `grpc_url`
    ("host:port"), `metrics_url` ("http://host:port/metrics"), `models`, `repository`, `shm_prefix`, `log_path`.
    """

    def __init__(self, triton: TritonEnvironment | None = None) -> None:
        """`triton`: what to run, else `environment.prepare()` at the start."""
        self._triton = triton
        self._supervisor: subprocess.Popen[str] | None = None
        self.pid = 0
        self.host = ""
        self.http_port = self.grpc_port = self.metrics_port = 0
        self.models: list[str] = []
        self.repository = self.log_path = Path()
        self.shm_prefix = ""

    @property
    def supervisor_pid(self) -> int:
        """The process that watches over the server while this object owns it."""
        assert self._supervisor is not None
        return self._supervisor.pid

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
        extra_flags: Sequence[str] = (),
    ) -> Self:
        """Start the server on `repository` and wait until it and its models are ready; returns itself.

        A port of 0 takes a free one. With `models` only these (and what their ensembles need) are loaded, and models
        can be loaded and unloaded later (explicit control). `extra_flags` come last on tritonserver's command line;
        they must leave HTTP and the log's information level on, which tell when it is ready.

        Raises InputError: repository, ports or shared memory will not do. Raises ServerUnavailable: the server ended,
        a model failed to load, or `timeout_s` has passed. Nothing is left running then, nor after Ctrl-C.
        """
        if self._supervisor is not None:
            raise InputError(f"this server is already running on {self.http_url}: stop it first")
        self.repository = Path(repository).absolute()
        self.models = _known_models(self.repository, models)
        _check_shared_memory(len(self.models))
        self.http_port, self.grpc_port, self.metrics_port = _checked_ports(host, (http_port, grpc_port, metrics_port))
        # an address to listen on is not always one to ask
        self.host = "127.0.0.1" if host == "0.0.0.0" else host
        self.shm_prefix = f"bertship_{os.getpid()}_{secrets.token_hex(4)}_"
        self.log_path = Path(log_path).absolute()
        self._triton = self._triton or environment.prepare()
        explicit = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in models)] if models else []
        command = [*_command(self._triton, self, host, model_config_name), *explicit, *extra_flags]
        try:
            self._launch(self._triton, command)
            self._await_ready(timeout_s)
        except BaseException:
            self._kill()
            raise
        return self

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

    def detach(self) -> "subprocess.Popen[str]":
        """Let the server outlive this process; returns its supervisor, which SIGTERM stops."""
        assert self._supervisor is not None
        self._supervisor.send_signal(signal.SIGUSR1)
        process, self._supervisor = self._supervisor, None
        return process

    def _launch(self, triton: TritonEnvironment, command: list[str]) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        script = Path(supervisor.__file__)
        watch = [sys.executable, "-I", str(script), str(os.getpid()), str(_GRACE_S), self.shm_prefix, *command]
        with self.log_path.open("w", encoding="utf-8") as log, _interrupts_held():
            self._supervisor = subprocess.Popen(
                watch,
                env=triton.variables(),
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
            stub_died, stubs = _stubs(self.pid)
            stub_died_s = min(stub_died_s, time.monotonic()) if stub_died else float("inf")
            if time.monotonic() - stub_died_s > _CRASH_S:
                crashed = ", ".join(name for name in triton_log.loading(log) if name not in stubs) or "a model"
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
            connection.request(method, path)
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


def _checked_ports(host: str, asked: tuple[int, int, int]) -> list[int]:
    """The ports to listen on (HTTP, gRPC, metrics), each of them free; a free one for every 0."""
    chosen: list[int] = []
    for name, port in zip(("HTTP", "GRPC", "METRICS"), asked, strict=True):
        if not 0 <= port <= 65535:
            raise InputError(f"{name}_PORT={port} is no port: take one of 1 to 65535, or 0 for any free one")
        if port and asked.count(port) > 1:
            raise InputError(f"{name}_PORT={port} is given twice: HTTP, gRPC and metrics need a port each")
        if port and (problem := _bind_problem(host, port)):
            raise InputError(
                f"{name}_PORT={port} on {host}: {problem}{_holder(port)}; `make stop` ends an earlier server of ours, "
                f"{name}_PORT=N (--{name.lower()}-port N) takes another port"
            )
        candidates = [port] if port else random.sample(_FREE_PORTS, 100)
        free = (n for n in candidates if port or (n not in (*chosen, *asked) and not _bind_problem(host, n)))
        if (number := next(free, None)) is None:
            raise InputError(f"no free port on {host} for {name}_PORT=0: give one")
        chosen.append(number)
    return chosen


def _bind_problem(host: str, port: int) -> str:
    """Why a server cannot listen there; empty where it can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # connections of an earlier server that linger in TIME_WAIT are no obstacle to Triton either
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # two sockets may be bound with SO_REUSEADDR while neither listens
            probe.listen(1)
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return ""


def _holder(port: int) -> str:
    """Who listens on a port, as ` (by NAME, process PID)`; empty where that is not to be found out."""
    try:
        import psutil  # an optional extra, wanted for this alone
    except ImportError:
        return ""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" (by {psutil.Process(connection.pid).name()}, process {connection.pid})"
    return ""


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Keep Ctrl-C waiting while a process is born: no moment when it runs and we do not know it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stubs(server: int) -> tuple[bool, set[str]]:
    """Whether a child of the server has died and was not waited for, and the models whose stubs live."""
    children: list[int] = []
    dead, alive = False, set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{server}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
        for child in children:
            facts = supervisor.process_facts(child)
            dead = dead or (facts is not None and facts[0] == "Z")
            # a stub's first argument is MODEL/VERSION/model.py
            arguments = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if len(arguments) > 1:
                alive.add(Path(os.fsdecode(arguments[1])).parent.parent.name)
    return dead, alive
