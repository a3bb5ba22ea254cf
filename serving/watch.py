"""What keeps a started server answering.

Three things go wrong in a running server, and each is seen from outside and mended:

- tritonserver ends: it is started again on its ports, with a pause that grows while it goes on ending.
- A Python stub dies. Triton never starts it again and goes on calling the model ready. Its process is looked for four
  times a second; the ensembles that need it are unloaded at once, so that readiness tells the truth and requests are
  refused instead of waiting for the dead, and loaded again with it.
- A task answers errors while its processes live: a canary request every two seconds sees it, and after two in a row
  all of its models are loaded again.

A slow answer is no fault: under load a canary waits in the queue as everybody does.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

from bertship.errors import BertshipError, ServerUnavailable
from bertship.health import Endpoint, TaskHealth
from serving import triton_log
from serving.control import CANDIDATE, Control, steps_of
from serving.events import EventLog
from serving.server import TritonServer
from serving.stubs import stubs

POLL_S = 0.25
CANARY_S = 2.0
CANARY_TIMEOUT_S = 10.0
# an ended server is started again this often, with these pauses; one that ran for _STEADY_S starts from the beginning
_PAUSES_S = (0.0, 1.0, 5.0, 15.0, 30.0)
_STEADY_S = 60.0


class Watch:
    """Over one started server. `run` returns when `stop` is set; the server is then still running."""

    def __init__(self, server: TritonServer, log: EventLog, changed: Callable[[], Any] = lambda: None) -> None:
        """`changed` is called when the server has another process id."""
        self._server, self._log, self._changed = server, log, changed
        self._endpoint = Endpoint(server.http_url)
        self._control: Control = server.control
        self._known: dict[int, tuple[str, int]] = {}  # stubs by process id
        self._failures: dict[str, int] = {}  # canaries in a row that failed, by task
        self._broken: dict[str, set[str]] = {}  # what has to be loaded again: ensembles with their dead models
        self._retry_s = 0.0
        self._ensembles: dict[str, set[str]] = {}
        self._reloaded_s: dict[str, float] = {}  # when the canaries had a task loaded again
        self._restarts, self._started_s = 0, time.monotonic()
        self._log_read = 0
        self._learn()

    def run(self, stop: Event) -> None:
        """Watch until `stop`. Raises ServerUnavailable where the server cannot be brought back."""
        next_canary_s = 0.0
        pending: Future[list[TaskHealth]] | None = None
        pool = ThreadPoolExecutor(1, thread_name_prefix="canary")
        try:
            while not stop.wait(POLL_S):
                self._follow_log()
                if self._server.ended is not None:
                    self._bring_back(stop)
                    continue
                # a server that has just ended refuses connections: seen above the next time round
                with contextlib.suppress(ServerUnavailable):
                    self._look_for_dead_stubs()
                    if pending is None and time.monotonic() >= next_canary_s:
                        pending = pool.submit(self._ask, self._to_ask())
                    elif pending is not None and pending.done():
                        finished, pending = pending, None
                        next_canary_s = time.monotonic() + CANARY_S
                        self._judge(finished)
                    if self._broken and time.monotonic() >= self._retry_s:
                        self._mend()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _learn(self) -> None:
        """What is loaded: the ensembles and the models that they are made of, and the stubs."""
        with contextlib.suppress(ServerUnavailable):
            ready = self._control.ready()
            for name in ready - self._ensembles.keys():
                steps = steps_of(self._control.config(name))
                if steps and not name.endswith(CANDIDATE):
                    self._ensembles[name] = set(steps)
        self._known |= stubs(self._server.pid)[1]

    def _look_for_dead_stubs(self) -> None:
        living = stubs(self._server.pid, self._known)[1]
        gone = {what for pid, what in self._known.items() if pid not in living} - set(living.values())
        self._known = living
        if not gone:
            return
        # a version that is being unloaded or replaced ends its stub too
        state = self._control.index()
        dead = {model for model, version in gone if state.get((model, version)) == "READY"}
        for model in sorted(dead):
            self._log("stub died", f"the Python process of {model} has died", level="error", model=model)
            self._mark(model)

    def _mark(self, model: str) -> None:
        """Take what needs `model` out of service at once."""
        self._learn()
        needing = [name for name, steps in self._ensembles.items() if model in steps] or [model]
        for name in needing:
            self._broken.setdefault(name, set()).add(model)
            self._control.unload(name)
        for name in needing:
            self._log("unloaded", f"{name} is out of service until it is mended", level="warning", task=name)
        self._retry_s = 0.0

    def _mend(self) -> None:
        """Load again what is out of service; what does not load is tried again after a pause."""
        for name, models in list(self._broken.items()):
            started_s = time.monotonic()
            try:
                for model in models:
                    self._control.unload(model)
                # an ensemble brings the models that it is made of
                self._control.load(name)
            except ServerUnavailable as error:
                if self._server.ended is not None:
                    return
                self._retry_s = time.monotonic() + 5.0
                self._log("mending failed", f"{name} does not load: {error}", level="error", task=name)
                continue
            del self._broken[name]
            self._failures.pop(name, None)
            seconds = time.monotonic() - started_s
            self._log("mended", f"{name} is loaded again after {seconds:.1f} s", task=name, seconds=round(seconds, 3))
        self._known |= stubs(self._server.pid)[1]

    def _to_ask(self) -> list[str]:
        """The tasks that should answer: not what somebody with the key has unloaded."""
        self._learn()
        loaded = self._control.ready()
        return [name for name in self._ensembles if name in loaded and name not in self._broken]

    def _ask(self, tasks: Sequence[str]) -> list[TaskHealth]:
        """The canaries: one short request to each task."""
        return [self._endpoint.probe(name, CANARY_TIMEOUT_S) for name in tasks]

    def _judge(self, finished: "Future[list[TaskHealth]]") -> None:
        for result in finished.result():
            task = result.task
            # a refusal (4xx) is no sign of a broken model, nor is a slow answer
            if result.status < 500 or task in self._broken:
                self._failures.pop(task, None)
                continue
            self._failures[task] = self._failures.get(task, 0) + 1
            problem = triton_log.without_texts(result.problem)
            self._log("canary failed", f"{task}: {problem}", level="warning", task=task)
            # a model that goes on failing after it was loaded again is not loaded again all the time
            recent = time.monotonic() - self._reloaded_s.get(task, float("-inf")) < _STEADY_S
            if self._failures[task] > 1 and not recent and task in self._control.ready():
                self._reloaded_s[task] = time.monotonic()
                for model in self._ensembles[task]:
                    self._mark(model)

    def _bring_back(self, stop: Event) -> None:
        status = self._server.ended
        said = triton_log.last_error(self._server.log_path.read_text(encoding="utf-8", errors="replace"))
        reason = f"ended with status {status}" + (f": {said}" if said else "")
        self._log("server ended", f"tritonserver {reason}", level="error", status=status)
        # tasks that were deployed since the start belong to it too
        deployed = {name for task, steps in self._ensembles.items() for name in (task, *steps)}
        wanted = sorted({*self._server.models, *deployed})
        for pause_s in _PAUSES_S[self._crashes() :]:
            if stop.wait(pause_s):
                return
            started_s = time.monotonic()
            try:
                self._server.restart(wanted if self._server.explicit else None)
            except BertshipError as error:
                self._log("restart failed", str(error), level="error")
                continue
            seconds = round(time.monotonic() - started_s, 3)
            self._log("restarted", f"started again in {seconds:.1f} s", pid=self._server.pid, seconds=seconds)
            self._started_s, self._log_read = time.monotonic(), 0
            self._known, self._broken, self._failures = {}, {}, {}
            self._learn()
            self._changed()
            return
        raise ServerUnavailable(f"the server ends again and again ({reason}); its log is {self._server.log_path}")

    def _crashes(self) -> int:
        """How many times the server has ended without running steadily in between."""
        steady = time.monotonic() - self._started_s > _STEADY_S
        self._restarts = 1 if steady else self._restarts + 1
        return self._restarts - 1

    def _follow_log(self) -> None:
        """Triton's warnings and errors into the log of events."""
        with contextlib.suppress(OSError), self._server.log_path.open("rb") as file:
            file.seek(self._log_read)
            new = file.read()
            complete = new[: new.rfind(b"\n") + 1]
            self._log_read += len(complete)
            for level, message in triton_log.complaints(complete.decode("utf-8", "replace")):
                self._log("triton", level=level, detail=message[:500])
