"""A server that outlives the command that started it: what `make serve` and `make stop` use."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from bertship.errors import InputError, ServerUnavailable
from serving import keeper, supervisor
from serving.environment import TritonEnvironment
from serving.keeper import STATE, running
from serving.server import EXIT_TIMEOUT_S

__all__ = ["running", "start_detached", "stop_detached"]

_POLL_S = 0.05
_started: dict[int, "subprocess.Popen[str]"] = {}  # by process id: to be waited for if this process stops them too


def start_detached(
    repository: Path, state_dir: Path, *, triton: TritonEnvironment | None = None, **options: Any
) -> dict[str, Any]:
    """Start a kept server (`keeper.keep`) that outlives this process; returns what describes it.

    Raises as `keep` does: InputError where the server of `state_dir` is already running.
    """
    state_dir = Path(state_dir).absolute()
    if known := running(state_dir):
        raise InputError(f"a server of {state_dir} already runs on {known['http_url']}: {keeper.INSTEAD}")
    given = options | {"repository": Path(repository).absolute(), "state_dir": state_dir}
    if triton:
        given["triton"] = {name: str(value) for name, value in dataclasses.asdict(triton).items()}
    process, answer = keeper.spawn(given)
    if "error" in answer:
        process.wait()
        raise (InputError if answer["exit_code"] == InputError.exit_code else ServerUnavailable)(answer["error"])
    _started[process.pid] = process
    return dict(answer["state"])


def stop_detached(state_dir: Path, timeout_s: float = EXIT_TIMEOUT_S + 4.0) -> bool:
    """Stop the server of `state_dir`: running requests end first, for up to `timeout_s` seconds.

    Returns whether one was running. Also ends what a killed keeper has left.
    """
    state_dir = Path(state_dir)
    state = keeper.read_state(state_dir)
    if not state:
        return False
    kept = keeper.start_time(state["keeper"]) == state["keeper_started"]
    watched = keeper.start_time(state["supervisor"]) == state["supervisor_started"]
    if kept or watched:
        with contextlib.suppress(ProcessLookupError):
            os.kill(state["keeper"] if kept else state["supervisor"], signal.SIGTERM)
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and (
            supervisor.session_members(state["supervisor"])
            or keeper.start_time(state["keeper"]) == state["keeper_started"]
        ):
            time.sleep(_POLL_S)
        supervisor.kill_session(state["supervisor"])
        if kept and keeper.start_time(state["keeper"]) == state["keeper_started"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(state["keeper"], signal.SIGKILL)
        if process := _started.pop(state["keeper"], None):
            process.wait()
    supervisor.remove_shared_memory(state["shm_prefix"])
    (state_dir / STATE).unlink(missing_ok=True)
    return kept or watched
