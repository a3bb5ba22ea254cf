"""The small process between us and tritonserver: whatever ends, nothing of the server is left.

It leads a session of its own, so Ctrl-C in the terminal does not reach the server before its owner has decided. It
stops the server in order when it is told to (SIGTERM) or when its owner is gone, however that ended, and then removes
what an orderly stop or a crash may leave: Python stubs and shared memory.
It runs the standard library alone, in a single thread: that is what makes `preexec_fn` below safe, which it would not
be in an owner with threads (and a thread's end there, not the process's, would count as the parent's death).

The key of the server's control APIs comes in the variable BERTSHIP_CONTROL_KEY and takes KEY_PLACE in the command,
as everybody may read a process's arguments; once the server has read them, it is blotted out there too.

usage: python -I supervisor.py OWNER_PID GRACE_S SHM_PREFIX COMMAND...      prints the server's process id
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_POLL_S = 0.2
_HIDE_POLL_S = 0.01  # until the key is out of the process list
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WATCHED = (*_STOP, signal.SIGCHLD)
KEY_VARIABLE = "BERTSHIP_CONTROL_KEY"
KEY_PLACE = "CONTROL-KEY"


def process_facts(pid: int) -> tuple[str, int, int] | None:
    """State letter, session id and start time (clock ticks since boot) of a process; None where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # the second field is the command's name in brackets and may itself hold spaces and brackets
    fields = stat.rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[3]), int(fields[19])


def session_members(session: int) -> list[int]:
    """Process ids of a session, zombies left out."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    facts = {pid: process_facts(pid) for pid in pids}
    return [pid for pid, fact in facts.items() if fact and fact[1] == session and fact[0] not in "ZX"]


def kill_session(session: int, *, keep: int = 0, timeout_s: float = 5.0) -> None:
    """SIGKILL what is in `session`, but for the process `keep`, until nothing is left or `timeout_s` has passed."""
    deadline_s = time.monotonic() + timeout_s
    while left := [pid for pid in session_members(session) if pid != keep]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            return
        time.sleep(0.02)


def remove_shared_memory(prefix: str) -> None:
    """Unlink the regions whose names begin with `prefix`."""
    assert prefix  # an empty one would take everybody's
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)


def hide(pid: int, secret: str) -> None:
    """Overwrite `secret` in a child's arguments. Raises OSError where the kernel does not let us."""
    start, end = (int(field) for field in Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[45:47])
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(start)
        arguments = memory.read(end - start)
        at = arguments.find(secret.encode())
        while at >= 0:
            memory.seek(start + at)
            memory.write(b"*" * len(secret))
            at = arguments.find(secret.encode(), at + 1)


def supervise(owner: int, grace_s: float, prefix: str, command: list[str]) -> int:
    """Run the server until it ends or is to end; returns its exit status (negative: the signal that ended it)."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    libc = ctypes.CDLL(None, use_errno=True)
    # stubs whose server has died become children of this process, which can then wait for them
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def in_child() -> None:
        # should this process be killed, the kernel asks the server to stop
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)

    key = os.environ.pop(KEY_VARIABLE, "")
    command = [argument.replace(KEY_PLACE, key) for argument in command]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, preexec_fn=in_child)  # noqa: PLW1509
    try:
        with contextlib.suppress(BrokenPipeError):
            os.write(1, f"{server.pid}\n".encode())
        os.dup2(2, 1)  # closes the pipe: the owner has read all there is
        deadline_s = float("inf")
        while server.poll() is None:
            got = signal.sigtimedwait(_WATCHED, _HIDE_POLL_S if key else _POLL_S)
            number = got.si_signo if got else 0
            if key and os.fstat(2).st_size:  # it writes to its log after it has read its arguments
                try:
                    hide(server.pid, key)
                except (FileNotFoundError, ProcessLookupError):
                    pass  # it has ended
                except OSError as error:
                    os.write(2, f"the control key can be seen in the process list: {error}\n".encode())
                key = ""
            if deadline_s == float("inf") and (number in _STOP or os.getppid() != owner):
                server.terminate()
                deadline_s = time.monotonic() + grace_s
            if time.monotonic() > deadline_s:
                server.kill()
        return server.returncode
    finally:
        kill_session(os.getpid(), keep=os.getpid())
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        remove_shared_memory(prefix)


if __name__ == "__main__":
    status = supervise(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:])
    sys.exit(status if status >= 0 else 128 - status)
