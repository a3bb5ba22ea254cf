"""The one Triton server behind the page: which tasks it serves, what they take and give, and single answers.

What a task takes and gives is Triton's own metadata, so a user's own tasks are there like the built-in ones. What the
metadata does not hold, the names of the labels and texts to try, comes from the repository and the export where these
lie on the same machine; without them the page still works, with fewer words.
"""

import contextlib
import http.client
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from bertship.console import read_samples
from bertship.errors import InputError, ServerUnavailable
from bertship.health import version_of
from bertship.tasks.base import Task
from bertship.wire import labels_of

EXAMPLES = 8  # texts to try a task
EXAMPLE_CHARACTERS = 20_000  # at most, of one of them

# what to try where no export tells better, by the task's inputs
_TEXTS: Mapping[tuple[str, ...], Sequence[tuple[str | list[str], ...]]] = {
    ("TEXT",): [
        ("Ada Lovelace wrote the first program in London, for Charles Babbage's engine.",),
        ("The plot is thin, but the actors are a joy to watch.",),
    ],
    ("TEXT", "TEXT_PAIR"): [
        ("A man is playing a guitar.", "Someone makes music."),
        ("The shop opens at nine.", "The shop is open all night."),
    ],
    ("QUESTION", "CONTEXT"): [
        (
            "When was the bridge opened?",
            "The old ferry was slow. In 1894 the bridge was opened, after eight years of work, and the ferry stopped.",
        ),
    ],
    ("TEXT", "CHOICES"): [
        ("She opens the fridge and", ["takes out the milk.", "flies to the moon.", "paints the roof."]),
    ],
}


@dataclass(frozen=True)
class Reply:
    """What Triton answered: the status and body as they came, and how long it took in seconds."""

    status: int
    body: bytes
    seconds: float


class Served:
    """The tasks of one Triton server at `url` (http://HOST:PORT).

    `repository` and `runs` are folders on this machine, looked into for the labels' names and for texts to try.
    Raises InputError for an address that is none.
    """

    def __init__(
        self, url: str, repository: Path | None = None, runs: Path | None = None, timeout_s: float = 60.0
    ) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme != "http" or not parts.hostname or not port or parts.path not in ("", "/"):
            raise InputError(f"address {url!r}: http://HOST:PORT is needed, the server's HTTP address")
        self.url = f"http://{parts.netloc}"
        self._host, self._port, self._timeout_s = parts.hostname, port, timeout_s
        self._repository, self._runs = repository, runs
        self._models: dict[str, dict[str, Any]] = {}

    def tasks(self) -> list[dict[str, Any]]:
        """What is served, as the page shows it, sorted by name. Raises ServerUnavailable.

        Each has `name`, `version`, `inputs` and `outputs` (name, datatype, shape), and `description`, `labels`,
        `examples` and `scale` (the least and the greatest value of a regression), empty where unknown, and `options`,
        the parameters that a request may have: None where unknown, empty where there are none.
        """
        self._models = {name: facts for name in self._names() if (facts := self._model(name))}
        return [self._describe(name, facts) for name, facts in self._models.items()]

    def knows(self, task: str) -> bool:
        """Whether a task of this name is served: nothing else of the server is reached through the page."""
        if task not in self._models:
            self.tasks()
        return task in self._models

    def infer(self, task: str, body: bytes) -> Reply:
        """One request to the task as it came, and the answer as it came. Raises ServerUnavailable."""
        return self._ask("POST", f"/v2/models/{quote(task, safe='')}/infer", body)

    def rows(self, task: str, body: bytes) -> dict[str, Any]:
        """What the request of `body` came to: `rows` (windows) and `tokens`, and the `version` that answers it now.

        Asks the ensemble's first step, the tokenizer, for its mask alone; None for what the server does not tell.
        """
        steps = self._steps(task)
        told: dict[str, Any] = {"rows": None, "tokens": None, "version": version_of(steps)}
        step = next((s for s in steps if set(s["input_map"].values()) <= self._models[task]["names"]), None)
        try:
            asked = json.loads(body)
            wanted = {"inputs": asked["inputs"], "outputs": [{"name": "attention_mask"}]}
            if asked.get("parameters"):
                wanted["parameters"] = asked["parameters"]
        except (ValueError, TypeError, KeyError):
            return told
        if step is None:
            return told
        pinned = f"/versions/{version}" if (version := version_of([step])) else ""
        path = f"/v2/models/{quote(step['model_name'], safe='')}{pinned}/infer"
        reply = self._ask("POST", path, json.dumps(wanted).encode())
        if reply.status == 200:
            (mask,) = json.loads(reply.body)["outputs"]
            told |= {"rows": int(mask["shape"][0]), "tokens": sum(mask["data"])}
        return told

    def _names(self) -> list[str]:
        """Loaded models by name; where the server does not tell, those that the repository holds."""
        reply = self._ask("GET", "/v2/models/stats")
        if reply.status == 200:
            return sorted({model["name"] for model in json.loads(reply.body)["model_stats"]})
        if self._repository is None or not self._repository.is_dir():
            reason = _message(reply.body) or f"status {reply.status}"
            raise ServerUnavailable(
                f"{self.url} does not list its models ({reason}); name its repository with --repository"
            )
        return sorted(folder.name for folder in self._repository.iterdir() if (folder / "config.pbtxt").is_file())

    def _model(self, name: str) -> dict[str, Any] | None:
        """Metadata of a task's ensemble; None for any other model, such as a version that is being tried."""
        metadata = self._json(f"/v2/models/{quote(name, safe='')}")
        if metadata is None or metadata.get("platform") != "ensemble":
            return None
        if not all(step["model_name"].startswith(f"{name}_") for step in self._steps(name)):
            return None
        return {**metadata, "names": {tensor["name"] for tensor in metadata["inputs"]}}

    def _steps(self, name: str) -> list[dict[str, Any]]:
        """The ensemble's steps as they are now, first to last."""
        return _steps(self._config(name))

    def _config(self, name: str) -> dict[str, Any]:
        return self._json(f"/v2/models/{quote(name, safe='')}/config") or {}

    def _describe(self, name: str, facts: dict[str, Any]) -> dict[str, Any]:
        config = self._config(name)
        steps = _steps(config)
        task = self._definition(steps)
        inputs = tuple(tensor["name"] for tensor in facts["inputs"])
        samples = self._samples(name, inputs)
        return {
            "name": name,
            "version": version_of(steps) or max(facts["versions"], key=_as_number, default=""),
            "inputs": facts["inputs"],
            "outputs": facts["outputs"],
            "description": task.description if task else "",
            "labels": list(task.labels if task else labels_of(config)),
            "options": {**dict.fromkeys(task.behaviour.options), **task.options} if task else None,
            "examples": _examples(samples, inputs),
            "scale": _scale(samples),
        }

    def _definition(self, steps: Sequence[Mapping[str, Any]]) -> Task | None:
        """The task as the repository defines it, in the version that the steps name or else in the newest."""
        for step in steps if self._repository is not None else ():
            assert self._repository is not None
            found = self._repository.glob(f"{step['model_name']}/{version_of([step]) or '*'}/task.json")
            with contextlib.suppress(InputError, OSError):
                if paths := sorted(found, key=lambda path: _as_number(path.parent.name)):
                    return Task.from_file(paths[-1])
        return None

    def _samples(self, name: str, inputs: tuple[str, ...]) -> list[dict[str, Any]]:
        if self._runs is None:
            return []
        with contextlib.suppress(OSError, ValueError):
            samples = read_samples(self._runs / "export" / name)
            return [sample for sample in samples if set(inputs) <= sample["columns"].keys()]
        return []

    def _json(self, path: str) -> Any:
        reply = self._ask("GET", path)
        return json.loads(reply.body) if reply.status == 200 else None

    def _ask(self, method: str, path: str, body: bytes | None = None) -> Reply:
        """One request, past any proxy of the user's. Raises ServerUnavailable."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        started_s = time.perf_counter()
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            reply = connection.getresponse()
            content = reply.read()
        except TimeoutError:
            raise ServerUnavailable(f"no answer from {self.url} within {self._timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ServerUnavailable(f"no server at {self.url}: {reason}; start one with `make serve`") from None
        finally:
            connection.close()
        return Reply(reply.status, content, time.perf_counter() - started_s)


def _steps(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(config.get("ensemble_scheduling", {}).get("step", []))


def _as_number(version: str) -> int:
    return int(version) if version.isdigit() else -1


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, TypeError, KeyError):
        return ""


def _examples(samples: Sequence[dict[str, Any]], inputs: tuple[str, ...]) -> list[dict[str, Any]]:
    """Texts to try: real ones of all lengths that have something to show, else ours."""
    ours = [dict(zip(inputs, texts, strict=True)) for texts in _TEXTS.get(inputs, [])]
    fitting = [
        {name: sample["columns"][name] for name in inputs}
        for sample in samples
        if all(sample["columns"][name] for name in inputs)
        and sum(len(sample["columns"][name]) for name in inputs) <= EXAMPLE_CHARACTERS
        and sample["answer"].get("ENTITIES") != "[]"
    ]
    # the middle of each eighth, as samples come from the shortest to the longest; there is more to see in long ones
    number = min(EXAMPLES, len(fitting))
    real = [fitting[(2 * i + 1) * len(fitting) // (2 * number)] for i in reversed(range(number))]
    # labels of whole texts differ from task to task; people, places and organizations are in every text
    return [*ours[:1], *real] if any("ENTITIES" in sample["answer"] for sample in samples) else real or ours


def _scale(samples: Sequence[dict[str, Any]]) -> list[float]:
    """The range of the answers where a number is all that an answer is."""
    values = [float(sample["answer"]["SCORE"]) for sample in samples if set(sample["answer"]) == {"SCORE"}]
    return [min(values), max(values)] if values else []
