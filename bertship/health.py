"""Whether a server answers: one inference a task, as anybody would ask. The standard library alone.

Triton's own readiness says that models are loaded; a model whose Python process has died stays "ready" there. So this
is what belongs into a container's probe: `python -m bertship.health http://127.0.0.1:8000`, exit 0 or 1.
"""

import argparse
import http.client
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, urlsplit

_LATE = "no answer within"
NO_ANSWER = "no answer:"  # how a problem begins where nobody listens, or what listens does not answer
STEPS = ("tokenize", "encode", "decode")  # the models of a task's ensemble: TASK_tokenize, ...


@dataclass(frozen=True)
class TaskHealth:
    """What one task answered: `problem` is empty where it answered well, `seconds` is how long that took.

    `status` is that of HTTP; 0 where no answer came. `version` is that of the task's steps, where the server tells.
    """

    task: str
    problem: str
    seconds: float
    status: int = 0
    version: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem

    @property
    def slow(self) -> bool:
        """Whether the task was reached and gave no answer in time."""
        return self.problem.startswith(_LATE)


class Endpoint:
    """A server's HTTP address; a new connection for each call, past any proxy of the user's.

    `headers` go with every call. Raises ValueError for an address that is none.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"address {url!r}: http://HOST:PORT is needed")
        self.url, self._parts, self._headers = url.rstrip("/"), parts, dict(headers or {})

    def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 5.0
    ) -> tuple[int, bytes]:
        """Status and body of one call. Raises OSError or http.client.HTTPException where there is no answer."""
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=timeout_s)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._parts.path.rstrip("/") + path, data, self._headers)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def probe(self, task: str, timeout_s: float = 5.0) -> TaskHealth:
        """Ask `task` for one short answer, with the inputs that its metadata names."""
        started_s, status = time.monotonic(), 0
        try:
            status, body = self.call("GET", f"/v2/models/{quote(task, safe='')}", timeout_s=timeout_s)
            if status == 200:
                request = probe_request(json.loads(body))
                status, body = self.call("POST", f"/v2/models/{quote(task, safe='')}/infer", request, timeout_s)
            problem = "" if status == 200 else error_text(body) or f"HTTP status {status}"
        except TimeoutError:
            problem, status = f"{_LATE} {timeout_s:g} s", 0
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            problem, status = _no_answer(error), 0
        return TaskHealth(task, " ".join(problem.split()), time.monotonic() - started_s, status)

    def version(self, task: str, timeout_s: float = 5.0) -> str:
        """The version that the task's ensemble names for its steps; empty where it tells none."""
        try:
            status, body = self.call("GET", f"/v2/models/{quote(task, safe='')}/config", timeout_s=timeout_s)
            steps = json.loads(body)["ensemble_scheduling"]["step"] if status == 200 else []
            return version_of(steps)
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return ""


def version_of(steps: Sequence[Mapping[str, Any]]) -> str:
    """The version that an ensemble's steps name, which is what a deployment changes; empty where it is the newest."""
    named = [int(step.get("model_version", -1)) for step in steps]
    return str(max(named)) if named and min(named) > 0 else ""


def probe_request(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The shortest request that a model with this metadata takes: one text, and two where choices are asked for."""
    inputs = []
    for tensor in metadata["inputs"]:
        shape = [1 if i == 0 else 2 for i, _ in enumerate(tensor["shape"])]
        count = 1
        for size in shape:
            count *= size
        inputs.append({"name": tensor["name"], "shape": shape, "datatype": "BYTES", "data": ["ok"] * count})
    return {"inputs": inputs}


def error_text(body: bytes) -> str:
    """What Triton says went wrong; empty where it says nothing."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return ""


def _no_answer(error: Exception) -> str:
    return f"{NO_ANSWER} {getattr(error, 'strerror', None) or error or type(error).__name__}"


def tasks_of(statistics: Mapping[str, Any]) -> list[str]:
    """The tasks that a server has or should have: also one whose ensemble is not loaded while its steps are."""
    names = {model["name"] for model in statistics["model_stats"]}
    found = set()
    for name in names:
        task, _, step = name.rpartition("_")
        if step in STEPS and task:
            found.add(task)
    return sorted(found)


def check(url: str, tasks: Iterable[str] = (), timeout_s: float = 5.0) -> list[TaskHealth]:
    """One inference of each of `tasks`, or of every task that the server has.

    No server, or a server without tasks, is one result with an empty name and a problem.
    """
    endpoint = Endpoint(url)
    names = list(tasks)
    if not names:
        started_s = time.monotonic()
        try:
            status, body = endpoint.call("GET", "/v2/models/stats", timeout_s=timeout_s)
            names = tasks_of(json.loads(body)) if status == 200 else []
            problem = "" if names else "it serves no task" if status == 200 else f"HTTP status {status}"
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            problem = _no_answer(error)
        if problem:
            return [TaskHealth("", problem, time.monotonic() - started_s)]
    results = [endpoint.probe(name, timeout_s) for name in names]
    return [replace(r, version=endpoint.version(r.task, timeout_s)) if r.ok else r for r in results]


def lines(results: Iterable[TaskHealth]) -> list[str]:
    """The results for people, one line each."""
    return [
        f"{result.task or 'server':<16} {f'version {result.version} ' if result.version else ''}"
        f"{result.problem or f'answers in {result.seconds * 1000:.0f} ms'}"
        for result in results
    ]


def main(arguments: list[str]) -> int:
    """`python -m bertship.health [--timeout-s S] [--slow-is-alive] [URL [TASK...]]`; returns the exit status.

    With --slow-is-alive a task that does not answer in time is no failure, as for a probe that restarts what it kills;
    a server that cannot be reached is one all the same.
    """
    parser = argparse.ArgumentParser(prog="bertship.health")
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("tasks", nargs="*")
    parser.add_argument("--timeout-s", type=float, default=5.0)
    parser.add_argument("--slow-is-alive", action="store_true")
    given = parser.parse_args(arguments)
    try:
        results = check(given.url, given.tasks, given.timeout_s)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write("".join(f"{line}\n" for line in lines(results)))
    return 0 if all(result.ok or (given.slow_is_alive and result.slow) for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
