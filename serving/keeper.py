"""A server that is kept answering, in this process or in one of its own: what `bertship serve` runs.

`serve` calls `keep`; `serve --detach` starts `python -m serving.keeper`, which does, and hands over its first line. The
file server.json of its folder says what runs there, to `stop`, `deploy` and `bench`.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertship import artifacts
from bertship.errors import BertshipError, InputError
from serving import events, supervisor
from serving.environment import TritonEnvironment
from serving.events import EventLog
from serving.server import TritonServer
from serving.watch import Watch

STATE = "server.json"
# what to do where a server runs that was to be started
INSTEAD = "`bertship deploy runs/export/TASK` brings a task or a new version into it, `make stop` ends it"


def keep(
    repository: Path,
    state_dir: Path,
    *,
    ready: Callable[[dict[str, Any]], None],
    triton: TritonEnvironment | None = None,
    say: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
    **options: Any,
) -> None:
    """Start a server, describe it in `state_dir`/server.json, call `ready` with that, and keep it until told to end.

    `options` are those of `TritonServer.start`; the log is `state_dir`/triton.log unless `log_path` is given. Returns
    after `stop`; whatever ends it (SIGTERM and Ctrl-C as exceptions) lets running requests end first. Raises as
    `start` does, InputError where a server of `state_dir` runs already, and ServerUnavailable where a server that
    has ended cannot be brought back.
    """
    state_dir = Path(state_dir)
    if known := running(state_dir):
        raise InputError(f"a server of {state_dir} already runs on {known['http_url']}: {INSTEAD}")
    log = EventLog(state_dir / events.LOG, say)
    options = {"log_path": state_dir / "triton.log"} | options
    with TritonServer(triton) as server:
        started_s = time.monotonic()
        server.start(repository, **options)
        try:
            state = _write_state(server, state_dir)
            log(
                "ready",
                seconds=round(time.monotonic() - started_s, 3),
                **{name: state[name] for name in ("http_url", "grpc_url", "metrics_url", "repository", "models")},
            )
            ready(state)
            Watch(server, log, lambda: _write_state(server, state_dir)).run(stop or threading.Event())
        finally:
            log("stopping", "ending: running requests are answered, new ones refused")
            server.stop()
            (state_dir / STATE).unlink(missing_ok=True)
            log("stopped")


def running(state_dir: Path) -> dict[str, Any] | None:
    """What `keep` wrote in `state_dir`, where its process still runs; else None."""
    state = read_state(state_dir)
    return state if state and start_time(state["keeper"]) == state["keeper_started"] else None


def read_state(state_dir: Path) -> dict[str, Any] | None:
    """What a server's description says, whether it runs or not. Raises InputError where it cannot be read."""
    try:
        state = json.loads((Path(state_dir) / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {Path(state_dir) / STATE}: {error}; remove it") from None
    return state if isinstance(state, dict) and state.get("keeper") else None


def start_time(pid: int) -> str:
    """What tells a process from a later one of the same id: boot and clock ticks since; empty where it has ended."""
    facts = supervisor.process_facts(pid)
    if not facts or facts[0] in "ZX":
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{facts[2]}"


def _write_state(server: TritonServer, state_dir: Path) -> dict[str, Any]:
    state = {
        "keeper": os.getpid(),
        "keeper_started": start_time(os.getpid()),
        "supervisor": server.supervisor_pid,
        "supervisor_started": start_time(server.supervisor_pid),
        "pid": server.pid,
        "host": server.host,
        "http_port": server.http_port,
        "grpc_port": server.grpc_port,
        "metrics_port": server.metrics_port,
        "http_url": server.http_url,
        "grpc_url": server.grpc_url,
        "metrics_url": server.metrics_url,
        "repository": str(server.repository),
        "models": server.models,
        "shm_prefix": server.shm_prefix,
        "key": str(server.key_path),
        "log": str(server.log_path),
        "events": str((state_dir / events.LOG).absolute()),
    }
    artifacts.write_text(state_dir / STATE, json.dumps(state, indent=2) + "\n")
    return state


def spawn(options: Mapping[str, Any]) -> "tuple[subprocess.Popen[str], dict[str, Any]]":
    """A process of its own that keeps a server; returns it, and its one line: a `state` or an `error`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "serving.keeper", json.dumps(options, default=str)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[1],
    )
    assert process.stdout is not None
    try:
        with process.stdout as answer:
            line = answer.readline()
    except BaseException:  # Ctrl-C: nothing is left running
        process.terminate()
        process.wait()
        raise
    if not line:
        return process, {"error": f"the server's keeper ended with status {process.wait()}", "exit_code": 1}
    return process, json.loads(line)


def main(arguments: Sequence[str]) -> int:
    """`python -m serving.keeper JSON`: what `spawn` starts. One line on stdout, then it serves until SIGTERM."""
    options = json.loads(arguments[0])
    for name in ("repository", "state_dir", "log_path", "key_path", "trace_path"):
        if options.get(name):
            options[name] = Path(options[name])
    if given := options.pop("triton", None):
        places = {name: Path(value) for name, value in given.items() if name != "libdir"}
        options["triton"] = TritonEnvironment(libdir=given["libdir"], **places)
    told = False

    def tell(line: Mapping[str, Any]) -> None:
        nonlocal told
        told = True
        # nobody left to read it: whoever wanted the server was interrupted, and it ends by this error
        os.write(1, (json.dumps(line, default=str) + "\n").encode())
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    try:
        keep(ready=lambda state: tell({"state": state}), **options)
    except BertshipError as error:
        if not told:
            tell({"error": str(error), "exit_code": error.exit_code})
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
