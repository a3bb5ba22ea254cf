"""A new version of a task into a running server, with no request failing and none seeing halves of two versions.

A version is a numbered folder in each of the task's three models; the ensemble names the version of every step that it
is made of, so which version serves is one file, and the switch is one reload of an ensemble, which Triton does
atomically: a request runs to its end on the version that it began with.
"""

import contextlib
import fcntl
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from bertship.artifacts import check_files, publish, read_manifest, write_text
from bertship.client import Client
from bertship.errors import BertshipError, CheckFailed, InputError, ServerUnavailable, seen
from bertship.health import Endpoint
from bertship.pipeline import from_export, graph_of
from bertship.tasks import TASKS
from bertship.tasks.base import Task
from serving.check import BATCH, check_answers
from serving.control import CANDIDATE, Control, steps_of
from serving.repository import STEPS, contents, copy_into, facts_of, render_files, served_facts, served_version

MAX_SAMPLES = 200
DRAIN_S = 30.0  # how long a version that no new request reaches is waited for before it is taken away
_LOCK = ".deploy.lock"


class Rollout:
    """Deployments into one repository and the server that reads it."""

    def __init__(self, repository: Path, server: Control, log: Callable[..., None]) -> None:
        self._repository, self._server, self._log = Path(repository).absolute(), server, log

    def deploy(self, export: Path, precision: str | None = None) -> dict[str, Any]:
        """Put the export's task into service.

        Returns {"task", "version", "previous", "removed", "facts", "facts_before", "samples", "seconds"}: `removed` are
        the versions taken away, `facts` those of `repository.facts_of`. Where this very export serves already nothing
        is done; where it is kept, as after a rollback, that version serves again; then no sample is asked.

        Raises InputError for an export that is none, CheckFailed where the new version does not load or does not
        answer as the export's samples do; the version before then goes on serving and nothing is left of the new one.
        """
        started_s = time.monotonic()
        manifest = read_manifest(export, "export")
        check_files(export, manifest, ("task.json", "tokenizer.json", "samples.jsonl", graph_of(manifest, precision)))
        task = Task.from_file(export / "task.json")
        with self._alone():
            before = self._served(task.name)
            facts = facts_of(manifest, precision)
            facts_before = served_facts(self._repository, task.name, before) if before else {}
            result = {"task": task.name, "removed": [], "facts": facts, "facts_before": facts_before}
            if known := self._version_of(task.name, facts, before):
                if known != before:
                    self._serve_kept(task.name, known)
                    self._log("deployed", f"{task.name}: version {known} serves again", task=task.name, version=known)
                seconds = round(time.monotonic() - started_s, 3)
                return {**result, "version": known, "previous": before, "samples": 0, "seconds": seconds}
            version = str(1 + max([0, *self._with_weights(task.name)]))
            said = {"task": task.name, "version": version}
            self._log("deploy", f"{task.name}: version {version} from {export}", **said)
            kept = self._configurations(task.name)
            try:
                ensemble = self._place(task, version, *contents(export, precision, version))
                self._try(task.name, version, ensemble)
                samples = self._check(task, export, manifest, precision or str(manifest["serve"]))
                self._switch(task.name, version, ensemble)
            except BaseException as error:  # an interrupted deployment leaves as little as one that failed
                self._take_away(task.name, version, kept, before)
                reason = f"{task.name}: version {version} was not put into service: {error or type(error).__name__}"
                self._log("rolled back", f"{reason}; {before or 'nothing'} goes on serving", level="error", **said)
                if isinstance(error, InputError) or not isinstance(error, BertshipError | OSError):
                    raise
                raise CheckFailed(f"{reason}; version {before or 'none'} goes on serving") from None
            self._remove_candidate(task.name)
            removed = self._retire(task.name, {version, before})
            seconds = round(time.monotonic() - started_s, 3)
            answers = f"{samples} samples were answered as at the export"
            self._log("deployed", f"{task.name}: {answers}, requests go to version {version}", seconds=seconds, **said)
            return {**result, **said, "previous": before, "removed": removed, "samples": samples, "seconds": seconds}

    def rollback(self, task: str) -> dict[str, Any]:
        """Serve the version before again; returns as `deploy` does. Raises InputError where none is kept."""
        started_s = time.monotonic()
        with self._alone():
            now = served_version(self._repository, task)
            earlier = [version for version in self._versions(task) if version < int(now)]
            if not earlier:
                raise InputError(
                    f"{task}: no version before {now} is kept in {self._repository}; `bertship deploy` of an export "
                    "puts another one into service"
                )
            version = str(max(earlier))
            self._serve_kept(task, version)
            self._log("rolled back", f"{task}: version {version} serves again", task=task, version=version)
            seconds = round(time.monotonic() - started_s, 3)
            facts, facts_before = (served_facts(self._repository, task, v) for v in (version, now))
            return {
                "task": task,
                "version": version,
                "previous": now,
                "removed": [],
                "facts": facts,
                "facts_before": facts_before,
                "samples": 0,
                "seconds": seconds,
            }

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One deployment at a time."""
        if not self._repository.is_dir():
            raise InputError(f"no model repository at {self._repository}")
        with (self._repository / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"another deployment into {self._repository} is running: wait for it") from None
            yield

    def _served(self, task: str) -> str:
        """The version that the repository's ensemble names; empty where the task is new to the server."""
        return served_version(self._repository, task) if task in self._server.ready() else ""

    def _versions(self, task: str) -> list[int]:
        """Every version that one of the task's models has a folder of."""
        folders = (folder for step in STEPS for folder in (self._repository / f"{task}_{step}").glob("[0-9]*"))
        return sorted({int(folder.name) for folder in folders if folder.name.isdigit()})

    def _with_weights(self, task: str) -> list[int]:
        """Versions that could serve: version control brings adapters of a version 1 for every built-in task."""
        return [v for v in self._versions(task) if (self._repository / f"{task}_tokenize/{v}/tokenizer.json").is_file()]

    def _version_of(self, task: str, facts: Mapping[str, Any], first: str) -> str:
        """The version that is this very export: `first`, another that is kept, or none."""
        for version in [first, *map(str, self._with_weights(task))] if first else []:
            known = served_facts(self._repository, task, version)
            if all(known.get(name) == facts[name] for name in ("files", "bertship")):
                return version
        return ""

    def _serve_kept(self, task: str, version: str) -> None:
        """Switch to a version that is in place and was checked when it came."""
        path = self._repository / task / "config.pbtxt"
        config = text_format.Parse(path.read_text(encoding="utf-8"), pb.ModelConfig())
        for step in config.ensemble_scheduling.step:
            step.model_version = int(version)
        self._switch(task, version, text_format.MessageToString(config))

    def _configurations(self, task: str) -> dict[Path, str]:
        """The task's configurations as they are."""
        models = [task, *(f"{task}_{step}" for step in STEPS)]
        paths = [path for model in models for path in (self._repository / model).rglob("*.pbtxt")]
        return {path: path.read_text(encoding="utf-8") for path in paths}

    def _place(self, task: Task, version: str, texts: dict[str, str], brought: dict[str, Path]) -> str:
        """The version's folders, each appearing whole, and configurations that hold for all versions.

        Returns the ensemble's configuration for it, which is not put in place.
        """
        for step in STEPS:
            folder = f"{task.name}_{step}/{version}"
            with publish(self._repository / folder) as staging:
                copy_into(staging, f"{folder}/", texts, brought)
        ensemble = ""
        for name, text in texts.items():
            if name.endswith(".pbtxt"):
                path = self._repository / name
                old = path.read_text(encoding="utf-8") if path.is_file() else ""
                new = _for_both(old, text) if old else text
                if name == f"{task.name}/config.pbtxt":
                    ensemble = new
                elif new != old:
                    write_text(path, new)
        return ensemble

    def _try(self, task: str, version: str, ensemble: str) -> None:
        """Load the version, warm, behind an ensemble that nobody asks but us."""
        candidate = f"{task}{CANDIDATE}"
        with publish(self._repository / candidate) as staging:
            (staging / "1").mkdir()
            text = ensemble.replace(f'name: "{task}"', f'name: "{candidate}"', 1)
            (staging / "config.pbtxt").write_text(text, encoding="utf-8")
        try:
            # an ensemble brings the models that it is made of
            self._server.load(candidate)
        except ServerUnavailable as error:
            reasons = self._server.reasons()
            causes = [f"{model}: {text}" for (model, number), text in reasons.items() if number == int(version)]
            mine = [cause for cause in causes if cause.startswith(tuple(f"{task}_{step}:" for step in STEPS))]
            raise CheckFailed("; ".join(mine) or str(error)) from None
        named = steps_of(self._server.config(candidate))
        state = self._server.index()
        if missing := [model for model in named if state.get((model, int(version))) != "READY"]:
            raise CheckFailed(f"{', '.join(missing)} did not become ready")

    def _check(self, task: Task, export: Path, manifest: dict[str, Any], precision: str) -> int:
        """Ask the candidate the export's samples; returns how many. Raises CheckFailed."""
        lines = (export / "samples.jsonl").read_text(encoding="utf-8").split("\n")
        samples = [json.loads(line) for line in lines if line]
        samples = samples[:: -(-len(samples) // MAX_SAMPLES)] if samples else []
        if not samples:
            raise InputError(f"{export / 'samples.jsonl'} is empty: export again")
        candidate = f"{task.name}{CANDIDATE}"
        limits = next(row["limits"] for row in manifest["metrics"]["parity"] if row["precision"] == precision)
        _compare(task, samples, self._ask(task, samples, candidate), limits)
        # the embedded encoder runs what `predict` runs; a plan has other kernels
        if self._server.config(f"{task.name}_encode").get("backend") == "python":
            check_answers(from_export(export, precision, threads=1), self._server.url, samples, candidate)
        return len(samples)

    def _ask(self, task: Task, samples: Sequence[dict[str, Any]], model: str) -> dict[str, np.ndarray]:
        parts = []
        with Client(self._server.url, timeout_s=120) as client:
            for start in range(0, len(samples), BATCH):
                part = samples[start : start + BATCH]
                columns = {name: [sample["columns"][name] for sample in part] for name in task.behaviour.inputs}
                parts.append(client.infer(model, columns))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _switch(self, task: str, version: str, ensemble: str) -> None:
        """Let the ensemble name `version`. Raises ClientError or CheckFailed, with the version before serving again."""
        path = self._repository / task / "config.pbtxt"
        before = path.read_text(encoding="utf-8") if path.is_file() else ""
        (path.parent / "1").mkdir(parents=True, exist_ok=True)
        write_text(path, ensemble)
        try:
            self._server.load(task)
            if set(steps_of(self._server.config(task)).values()) != {int(version)}:
                raise CheckFailed(f"the server does not serve version {version} after the switch")
            if problem := Endpoint(self._server.url).probe(task, 30).problem:
                raise CheckFailed(f"no answer after the switch: {problem}")
        except BertshipError:
            if before:
                write_text(path, before)
                self._server.load(task)
            raise

    def _take_away(self, task: str, version: str, kept: dict[Path, str], before: str) -> None:
        """Leave nothing of a version that failed, in the repository or in the server."""
        self._remove_candidate(task)
        models = [f"{task}_{step}" for step in STEPS]
        for model in models:
            shutil.rmtree(self._repository / model / version, ignore_errors=True)
        for path in self._configurations(task).keys() - kept.keys():
            path.unlink()
        for path, text in kept.items():
            if path.read_text(encoding="utf-8") != text:
                write_text(path, text)
        if not before:  # what version control holds of a built-in task, or nothing
            for model in (task, *models):
                if not kept:
                    shutil.rmtree(self._repository / model, ignore_errors=True)
            for name, text in render_files(TASKS[task]).items() if kept and task in TASKS else ():
                if not (self._repository / name).exists():
                    write_text(self._repository / name, text)
        for model in (*models, task):
            with contextlib.suppress(BertshipError):  # the reason why it failed may be that the server is gone
                if before:
                    self._server.load(model)
                else:
                    self._server.unload(model)

    def _remove_candidate(self, task: str) -> None:
        with contextlib.suppress(BertshipError):
            self._server.unload(f"{task}{CANDIDATE}")
        shutil.rmtree(self._repository / f"{task}{CANDIDATE}", ignore_errors=True)

    def _retire(self, task: str, keep: set[str]) -> list[str]:
        """Take away versions that neither serve nor served before, once their last request has ended.

        Returns those that could have served.
        """
        weights = [str(version) for version in self._with_weights(task) if str(version) not in keep]
        old = [version for version in self._versions(task) if str(version) not in keep]
        if not old:
            return []
        deadline_s = time.monotonic() + DRAIN_S
        while time.monotonic() < deadline_s and any(self._under_way(task, version) for version in old):
            time.sleep(0.2)
        for step in STEPS:
            for version in old:
                shutil.rmtree(self._repository / f"{task}_{step}" / str(version), ignore_errors=True)
            self._server.load(f"{task}_{step}")
        return weights

    def _under_way(self, task: str, version: int) -> bool:
        """Whether a request has passed the version's first step and not the last."""
        counts = {}
        for model in self._server.statistics():
            if int(model["version"]) == version:
                stats = model["inference_stats"]
                ended = sum(int(stats.get(how, {}).get("count", 0)) for how in ("fail", "cancel"))
                counts[model["name"]] = (int(stats["success"]["count"]), ended)
        begun = counts.get(f"{task}_tokenize", (0, 0))[0]
        encoding, decoding = counts.get(f"{task}_encode", (0, 0)), counts.get(f"{task}_decode", (0, 0))
        return begun > decoding[0] + decoding[1] + encoding[1]


def measured(facts: Mapping[str, Any]) -> str:
    """How good a version is, in words, by what the gate found."""
    metric = facts.get("metric")
    if not metric:
        return "not measured on labels"
    return f"{metric['name']} {metric['value']:.4f} on {metric['examples']:,} labelled texts"


def warning_of(facts: Mapping[str, Any], facts_before: Mapping[str, Any]) -> str:
    """What speaks against a version that serves now; empty where nothing does."""
    if facts.get("degenerate"):
        return f"its model is degenerate ({facts['degenerate']})"
    now, before = facts.get("metric"), facts_before.get("metric")
    if now and before and now["name"] == before["name"] and now["value"] < before["value"]:
        return f"it is worse than the version before: {now['name']} {now['value']:.4f}, not {before['value']:.4f}"
    return ""


def _for_both(old: str, new: str) -> str:
    """The configuration `new`, with every dimension left open in which `old`, which is still served, differs."""
    before, after = (text_format.Parse(text, pb.ModelConfig()) for text in (old, new))
    for tensors, others in ((after.input, before.input), (after.output, before.output)):
        dims = {tensor.name: list(tensor.dims) for tensor in others}
        for tensor in tensors:
            known = dims.get(tensor.name, list(tensor.dims))
            if len(known) == len(tensor.dims):
                tensor.dims[:] = [a if a == b else -1 for a, b in zip(tensor.dims, known, strict=True)]
    return str(text_format.MessageToString(after))


def _compare(
    task: Task, samples: Sequence[dict[str, Any]], served: dict[str, np.ndarray], limits: dict[str, float]
) -> None:
    """Hold served answers against those that PyTorch gave at the export. Raises CheckFailed.

    Decisions agree as far as the gate asked of the precision; where a task decides nothing its values may differ by
    the gate's share of the largest one.
    """
    for name, values in served.items():
        if values.dtype == np.float32 and not np.isfinite(values).all():
            place = int(np.argwhere(~np.isfinite(values))[0][0])
            raise CheckFailed(f"{name} of sample {place} is not finite")
    recorded = {name: np.array([sample["answer"][name] for sample in samples]) for name in samples[0]["answer"]}
    wanted, got = (task.behaviour.decisions(answers) for answers in (recorded, served))
    agreement = sum(a == b for a, b in zip(wanted, got, strict=True)) / len(samples)
    if agreement < limits["agreement"]:
        place = next(i for i, (a, b) in enumerate(zip(wanted, got, strict=True)) if a != b)
        raise CheckFailed(
            f"{agreement:.1%} of {len(samples)} samples are answered as PyTorch answered them, "
            f"{limits['agreement']:.1%} needed; sample {place}: {seen(got[place])}, not {seen(wanted[place])}"
        )
    if wanted[0] is None:
        largest = float(np.abs(served["SCORE"] - recorded["SCORE"]).max())
        allowed = limits["max_difference"] * float(np.abs(recorded["SCORE"]).max())
        if largest > allowed:
            raise CheckFailed(f"a SCORE departs by {largest:.3g} from PyTorch's, {allowed:.3g} allowed")
