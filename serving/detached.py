"""A server that outlives the command that started it: what `make serve` and `make stop` use."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from bertship import artifacts
from bertship.errors import InputError
from serving import supervisor
from serving.environment import TritonEnvironment
from serving.server import POLL_S, TritonServer

STATE = "server.json"

_started: dict[int, subprocess.Popen[str]] = {}  # by process id: to be waited for if this process stops them too


def start_detached(
    repository: Path, state_dir: Path, *, triton: TritonEnvironment | None = None, **options: Any
) -> dict[str, Any]:
    """Start a server that outlives this process and describe it in `state_dir`/server.json; returns that description.

    `options` are those of `TritonServer.start`; the log is `state_dir`/triton.log unless `log_path` is given. Raises
    as that does, and InputError where the server of `state_dir` is already running.
    """
    state_dir = Path(state_dir)
    if known := running(state_dir):
        raise InputError(f"a server of {state_dir} already runs on {known['http_url']}: `make stop` ends it")
    options = {"log_path": state_dir / "triton.log"} | options
    with TritonServer(triton) as server:
        server.start(repository, **options)
        supervisor_pid = server.supervisor_pid
        state = {
            "pid": server.pid,
            "started": _start_time(server.pid),
            "supervisor": supervisor_pid,
            "supervisor_started": _start_time(supervisor_pid),
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
            "log": str(server.log_path),
        }
        # written before the server is let go: killed in between, we leave a stale file rather than an unknown server
        artifacts.write_text(state_dir / STATE, json.dumps(state, indent=2) + "\n")
        _started[supervisor_pid] = server.detach()
    return state


def running(state_dir: Path) -> dict[str, Any] | None:
    """What `start_detached` wrote in `state_dir`, where that very server still runs; else None."""
    state = _state(Path(state_dir))
    return state if state and _start_time(state["pid"]) == state["started"] else None


def stop_detached(state_dir: Path, timeout_s: float = 10.0) -> bool:
    """Stop the server of `state_dir` as `TritonServer.stop` does; returns whether one was running."""
    state_dir = Path(state_dir)
    state = _state(state_dir)
    if not state:
        return False
    watched = _start_time(state["supervisor"]) == state["supervisor_started"]
    alive = watched or _start_time(state["pid"]) == state["started"]
    if alive:
        # where the supervisor was killed, the kernel has told the server to end; telling it again does no harm
        with contextlib.suppress(ProcessLookupError):
            os.kill(state["supervisor"] if watched else state["pid"], signal.SIGTERM)
        deadline_s = time.monotonic() + timeout_s
        while supervisor.session_members(state["supervisor"]) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        supervisor.kill_session(state["supervisor"])
        if process := _started.pop(state["supervisor"], None):
            process.wait()
    supervisor.remove_shared_memory(state["shm_prefix"])
    (state_dir / STATE).unlink(missing_ok=True)
    return alive


def _start_time(pid: int) -> str:
    """What tells a process from a later one of the same id: boot and clock ticks since; empty where it has ended."""
    facts = supervisor.process_facts(pid)
    if not facts or facts[0] in "ZX":
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{facts[2]}"


def _state(state_dir: Path) -> dict[str, Any] | None:
    try:
        state = json.loads((state_dir / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {state_dir / STATE}: {error}; remove it") from None
    return state if isinstance(state, dict) and state.get("pid") else None
