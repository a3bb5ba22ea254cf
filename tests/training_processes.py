"""Trainings in processes of their own: stopped at an update, and started by torchrun."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertship.errors import InputError
from train.watch import read_log

ROOT = Path(__file__).parents[1]


def stop_at(process: Any, log: Path, at: int, number: int, poll_s: float) -> int:
    """Start `process`, send it the signal once update `at` is in its log; its exit code."""
    process.start()
    until = time.monotonic() + 120
    while process.is_alive() and time.monotonic() < until:
        if log.is_file() and (lines := read_log(log)) and lines[-1]["step"] >= at:
            os.kill(process.pid, number)
            break
        time.sleep(poll_s)
    process.join(60)
    assert process.exitcode is not None
    return int(process.exitcode)


def refused_beside(running: Any, log: Path, again: Callable[[bool], Any]) -> None:
    """Start `running`; from its eighth update on `again(restart)` is refused, and it goes on. Then it is killed."""
    running.start()
    until = time.monotonic() + 60
    while (not log.is_file() or len(read_log(log)) < 8) and time.monotonic() < until:
        time.sleep(0.002)
    for restart in (False, True):
        with pytest.raises(InputError, match=rf"process {running.pid} is training in .*run\.training; wait .*--name"):
            again(restart)
    assert running.is_alive()
    assert len(read_log(log)) >= 8
    running.kill()
    running.join()


def torchrun(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """`bertship --json ARGUMENTS` in two processes of one thread each, which have to end well."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "bertship", "--json"]
    done = subprocess.run(
        [sys.executable, *command, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done
