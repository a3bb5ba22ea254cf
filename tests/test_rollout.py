"""serving/rollout.py with the real Triton: versions come and go while clients ask, and nobody notices a bad one."""

import json
import re
import shutil
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import Line
from test_server import wait_until

from bertship.artifacts import MANIFEST, sha256_file
from bertship.client import Client
from bertship.commands.serving import _deployed
from bertship.errors import CheckFailed, InputError
from bertship.health import check
from bertship.triton_limits import FLUSH_S
from serving.control import CANDIDATE
from serving.events import EventLog, read
from serving.repository import ready_models, render, render_files, served_version
from serving.rollout import Rollout, _for_both, warning_of
from serving.server import TritonServer

OTHER = ("sunny", "stormy", "strange")
TEXTS = ["It is warm", "It is awful in the river", "", "It is lovely " * 20]


def altered(export: Path, target: Path, change: Callable[[Path], None]) -> Path:
    """A copy of an export, changed, with a manifest that agrees with what is now in it."""
    shutil.copytree(export, target)
    change(target)
    manifest = json.loads((target / MANIFEST).read_text())
    for name in manifest["files"]:
        path = target / name
        manifest["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    (target / MANIFEST).write_text(json.dumps(manifest))
    return target


def relabel(folder: Path) -> None:
    """Other names and one label more, in the task, the samples and every graph."""
    task = json.loads((folder / "task.json").read_text())
    names = dict(zip(task["labels"], OTHER, strict=False))
    (folder / "task.json").write_text(json.dumps(task | {"labels": OTHER}))
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        sample["answer"]["LABEL"] = names[sample["answer"]["LABEL"]]
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    for path in folder.glob("*.onnx"):
        model = onnx.load(path)
        (output,) = model.graph.output
        for node in model.graph.node:
            node.output[:] = ["narrow" if name == output.name else name for name in node.output]
        kind = output.type.tensor_type.elem_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind)
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, 0, 0, 1]), "pads"))
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(-50, dtype), "nothing"))
        model.graph.node.append(onnx.helper.make_node("Pad", ["narrow", "pads", "nothing"], [output.name]))
        output.type.tensor_type.shape.dim[1].dim_value = 3
        onnx.save(model, path)


def described(text: str) -> Callable[[Path], None]:
    """The same answers by another file."""

    def change(folder: Path) -> None:
        task = json.loads((folder / "task.json").read_text())
        (folder / "task.json").write_text(json.dumps(task | {"description": text}))

    return change


def confuse(folder: Path) -> None:
    """Labels the wrong way round: it loads, and answers wrongly."""
    task = json.loads((folder / "task.json").read_text())
    (folder / "task.json").write_text(json.dumps(task | {"labels": task["labels"][::-1]}))


def unloadable(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def not_finite(folder: Path) -> None:
    for path in folder.glob("*.onnx"):
        model = onnx.load(path)
        output = model.graph.output[0].name
        for node in model.graph.node:
            node.output[:] = ["finite" if name == output else name for name in node.output]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(model.graph.output[0].type.tensor_type.elem_type)
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(np.nan, dtype), "nan"))
        model.graph.node.append(onnx.helper.make_node("Add", ["finite", "nan"], [output]))
        onnx.save(model, path)


@dataclass
class Served:
    repository: Path
    server: TritonServer
    rollout: Rollout
    export: Path
    events: Path


@pytest.fixture(scope="module")
def exports(line: Line, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, export = tmp_path_factory.mktemp("exports"), line.runs / "export" / "weather"
    changes = {"relabelled": relabel, "confused": confuse, "unloadable": unloadable, "not finite": not_finite}
    return {"plain": export} | {name: altered(export, root / name, change) for name, change in changes.items()}


@pytest.fixture
def served(exports: dict[str, Path], tmp_path: Path) -> Iterator[Served]:
    """The task `weather` alone on a server of its own."""
    repository = tmp_path / "repository"
    render(exports["plain"], repository)
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    with TritonServer() as server:
        server.start(repository, models=ready_models(repository), log_path=tmp_path / "triton.log", **ports)
        log = tmp_path / "serve.jsonl"
        yield Served(repository, server, Rollout(repository, server.control, EventLog(log)), exports["plain"], log)


class Clients:
    """Busy clients: what they were answered, and every failure."""

    def __init__(self, url: str, count: int) -> None:
        self.answers: Counter[str] = Counter()
        self.labels: dict[str, set[str]] = {text: set() for text in TEXTS}
        self.failures: list[str] = []
        self._url, self._stop = url, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(count)]

    def _ask(self, number: int) -> None:
        with Client(self._url, timeout_s=60) as client:
            while not self._stop.is_set():
                try:
                    texts = TEXTS[: 1 + number % len(TEXTS)]
                    for text, answer in zip(texts, client.ask("weather", TEXT=texts), strict=True):
                        self.labels[text].add(answer["LABEL"])
                        known = OTHER if answer["LABEL"] in OTHER else ("fair", "foul")
                        assert answer["LABEL"] in known and len(answer["PROBABILITIES"]) == len(known), answer
                        self.answers[answer["LABEL"]] += 1
                except Exception as error:
                    self.failures.append(repr(error))

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def label(served: Served) -> str:
    with Client(served.server.http_url) as client:
        return client.ask("weather", TEXT="It is awful in the river")["LABEL"]


@pytest.mark.slow
def test_ten_reloads_under_sixteen_busy_clients_fail_no_request(
    served: Served, exports: dict[str, Path], tmp_path: Path
) -> None:
    """srv.6; every other version has other labels, and no answer mixes two versions."""
    versions = [
        altered(exports["plain" if number % 2 else "relabelled"], tmp_path / f"v{number}", described(f"v{number}"))
        for number in range(10)
    ]
    with Clients(served.server.http_url, 8) as http, Clients(f"grpc://{served.server.grpc_url}", 8) as grpc:
        for number, export in enumerate(versions):
            result = served.rollout.deploy(export)
            assert (result["version"], result["previous"]) == (str(number + 2), str(number + 1))
            time.sleep(0.2)
    assert http.failures == grpc.failures == []
    for clients in (http, grpc):
        assert clients.answers["stormy"] > 20 and clients.answers["foul"] > 20
    # what served before is kept, what served before that is not
    for step in ("tokenize", "encode", "decode"):
        folder = served.repository / f"weather_{step}"
        assert (
            sorted(path.name for path in folder.iterdir() if path.is_dir())
            == ["10", "11", "configs"][: 3 if (folder / "configs").is_dir() else 2]
        )
    assert served_version(served.repository, "weather") == "11"
    assert not list(served.repository.glob("*candidate*"))
    assert [row["version"] for row in read(served.events) if row["event"] == "deployed"] == [
        str(number) for number in range(2, 12)
    ]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("confused", "0.0% of 40 samples are answered as PyTorch answered them"),
        ("not finite", "of sample 0 is not finite"),
        ("unloadable", "weather_tokenize: .*tokenizer.json"),
    ],
)
def test_a_bad_version_is_rolled_back_and_the_old_one_goes_on_serving(
    served: Served, exports: dict[str, Path], bad: str, says: str
) -> None:
    before = contents(served.repository)
    with Clients(served.server.http_url, 4) as clients:
        with pytest.raises(CheckFailed, match=says) as caught:
            served.rollout.deploy(exports[bad])
        assert str(caught.value).endswith("version 1 goes on serving") and "\n" not in str(caught.value)
        time.sleep(0.3)
    assert clients.failures == [] and set(clients.answers) == {"fair", "foul"}
    assert {len(labels) for labels in clients.labels.values()} == {1}  # nobody was answered by the new one
    assert contents(served.repository) == before
    assert {state for _, state in served.server.control.index().items()} <= {"READY", "UNAVAILABLE", "UNLOADING"}
    # and a good one is taken as if nothing had been
    assert served.rollout.deploy(exports["relabelled"])["version"] == "2"
    assert label(served) == "stormy"


@pytest.mark.parametrize("task", ["weather", "sst2"])  # served before, and new to the server
def test_an_interruption_while_triton_loads_leaves_nothing_and_the_server_answers(
    served: Served, exports: dict[str, Path], line: Line, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    """Ctrl-C and SIGTERM end the waiting, not the load: the version's folders go away while Triton reads them."""
    before, control = contents(served.repository), served.rollout._server
    load, export = control.load, exports["relabelled"] if task == "weather" else line.runs / "export" / task

    def interrupted(model: str) -> None:
        if not model.endswith(CANDIDATE):
            return load(model)
        threading.Thread(target=load, args=(model,), daemon=True).start()
        time.sleep(0.3)
        raise KeyboardInterrupt

    with Clients(served.server.http_url, 2) as clients:
        with monkeypatch.context() as patch:
            patch.setattr(control, "load", interrupted)
            with pytest.raises(KeyboardInterrupt):
                served.rollout.deploy(export)
        assert contents(served.repository) == before
        assert served.rollout.deploy(export)["version"] == ("2" if task == "weather" else "1")
    assert clients.failures == []


def test_the_version_before_is_kept_and_can_be_gone_back_to(served: Served, exports: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="no version before 1 is kept"):
        served.rollout.rollback("weather")
    served.rollout.deploy(exports["relabelled"])
    assert label(served) == "stormy"
    assert served.rollout.rollback("weather")["version"] == "1"
    assert label(served) == "foul"
    # a start on the repository serves what was served
    served.server.restart()
    assert label(served) == "foul"


def test_an_export_that_serves_is_not_put_in_again(served: Served, exports: dict[str, Path], tmp_path: Path) -> None:
    """It would push the version before out, which is the way back; what goes is named, and how good both are."""
    before = contents(served.repository)
    result = served.rollout.deploy(served.export)
    assert (result["version"], result["previous"], result["samples"], result["removed"]) == ("1", "1", 0, [])
    assert contents(served.repository) == before
    for _ in range(2):
        result = served.rollout.deploy(exports["relabelled"])
        assert result["version"] == "2"
    assert _deployed(result) == ["weather: this export serves already, as version 2; nothing was changed"]
    assert [row.version for row in check(served.server.http_url)] == ["2"]
    result = served.rollout.rollback("weather")
    assert (result["version"], result["removed"]) == ("1", [])
    assert _deployed(result)[0].startswith(
        "weather: version 1 serves; version 2 is kept, `bertship deploy` of its export"
    )
    before = contents(served.repository)
    result = served.rollout.deploy(exports["relabelled"])  # kept, so it is gone on to
    assert (result["version"], result["previous"], result["samples"], result["removed"]) == ("2", "1", 0, [])
    assert label(served) == "stormy" and [row.version for row in check(served.server.http_url)] == ["2"]
    assert {name for name, digest in contents(served.repository).items() if before[name] != digest} == {
        "weather/config.pbtxt"
    }
    result = served.rollout.deploy(altered(exports["plain"], tmp_path / "third", described("third")))
    assert (result["version"], result["previous"], result["removed"]) == ("3", "2", ["1"])
    said = _deployed(result)
    assert said[0].startswith(
        "weather: version 3 serves; version 2 is kept, `bertship deploy --rollback --task weather`"
    )
    assert [line.split(":")[0] for line in said[1:]] == ["  version 3", "  version 2", "  removed"]
    assert re.fullmatch(r"  version 2: accuracy [01]\.\d{4} on \d+ labelled texts", said[2])


def test_the_steps_counters_outlive_a_deployment(served: Served, exports: dict[str, Path], tmp_path: Path) -> None:
    """Two versions that count beside each other share no metric: Triton would free it under the one that stays."""

    def series() -> dict[str, int]:
        time.sleep(4 * FLUSH_S)
        text = urllib.request.urlopen(served.server.metrics_url).read().decode()
        found = re.findall(r'^bertship_texts_total\{.*version="(\d+)".*\} (\S+)$', text, re.MULTILINE)
        return {version: int(float(value)) for version, value in found}

    before = series()
    label(served)
    assert series() == {"1": before["1"] + 1}
    served.rollout.deploy(exports["relabelled"])
    at_first = series()
    assert at_first.keys() == {"1", "2"}
    for _ in range(3):
        label(served)
    # takes the first version's models away
    served.rollout.deploy(altered(exports["plain"], tmp_path / "third", described("third")))
    label(served)
    wait_until(lambda: series().keys() == {"2", "3"}, 60)  # Triton ends the processes of a model after its unloading
    assert series()["2"] == at_first["2"] + 3


def test_a_task_new_to_the_server(served: Served, line: Line) -> None:
    result = served.rollout.deploy(line.runs / "export" / "sst2")
    assert (result["version"], result["previous"]) == ("1", "")
    with Client(served.server.http_url) as client:
        assert client.ask("sst2", TEXT="a lovely film")["LABEL"] == "positive"
        assert client.tasks() == ["sst2", "weather"]


def test_what_is_no_export_is_refused_before_anything_happens(served: Served, tmp_path: Path) -> None:
    before = contents(served.repository)
    with pytest.raises(InputError, match=r"no manifest\.json"):
        served.rollout.deploy(tmp_path)
    damaged = shutil.copytree(served.export, tmp_path / "damaged")
    (damaged / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="has changed since it was made"):
        served.rollout.deploy(damaged)
    assert contents(served.repository) == before


def test_one_deployment_at_a_time(served: Served, exports: dict[str, Path]) -> None:
    with served.rollout._alone(), pytest.raises(InputError, match="another deployment"):
        served.rollout.deploy(exports["plain"])


def test_configurations_hold_for_both_versions() -> None:
    from bertship.tasks import get_task

    two, three = (get_task("sst2").with_labels(labels) for labels in (("a", "b"), OTHER))
    path = "sst2_encode/configs/embedded.pbtxt"
    merged = _for_both(render_files(two)[path], render_files(three, "2")[path])
    assert "dims: -1" in merged.split("output {")[1] and "dims: 3" not in merged
    assert _for_both(merged, merged) == merged


def test_the_command(served: Served, exports: dict[str, Path], bertship: Any, tmp_path: Path) -> None:
    where = ("--runs", tmp_path / "runs", "--repository", served.repository)
    server = ("--url", served.server.http_url, "--key-file", served.server.key_path)
    code, out, err = bertship("--json", "deploy", exports["relabelled"], *where, *server)
    assert code == 0, err
    assert json.loads(out)["version"] == "2" and label(served) == "stormy"
    code, out, err = bertship("deploy", exports["confused"], *where, *server)
    assert code == 1 and "version 2 goes on serving" in err and label(served) == "stormy"
    code, _, err = bertship("deploy", "--rollback", "--task", "weather", *where, *server)
    assert code == 0 and label(served) == "foul", err
    code, _, err = bertship("deploy", exports["plain"], "--runs", tmp_path / "runs")
    assert code == 2 and "start one with `make serve`" in err
    (tmp_path / "key").write_text("guess\n")
    code, _, err = bertship("deploy", exports["plain"], *where, *server[:3], tmp_path / "key")
    assert code == 2 and "refuses the key" in err
    assert bertship("health", "--url", served.server.http_url)[0] == 0
    served.server.control.unload("weather")
    code, out, err = bertship("--json", "health", "--url", served.server.http_url)
    assert code == 1 and json.loads(out)["healthy"] is False and "is not healthy: weather" in err


@pytest.mark.slow
def test_a_kept_server_takes_a_deployment_for_no_fault(exports: dict[str, Path], bertship: Any, tmp_path: Path) -> None:
    """`serve`, `deploy`, `health` and `stop` as they are used, with clients all the while."""
    repository, runs = tmp_path / "repository", ("--runs", tmp_path / "runs")
    render(exports["plain"], repository)
    ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    code, out, err = bertship("--json", "serve", "--detach", "--repository", repository, *runs, *ports)
    assert code == 0, err
    state = json.loads(out)
    try:
        with Clients(state["http_url"], 4) as clients:
            code, _, err = bertship("deploy", exports["relabelled"], *runs)
            assert code == 0, err
            code, _, err = bertship("deploy", exports["not finite"], *runs)
            assert code == 1 and "version 2 goes on serving" in err
            code, _, err = bertship("deploy", "--rollback", "--task", "weather", *runs)
            assert code == 0, err
            time.sleep(2.5)  # a canary
        assert clients.failures == [] and clients.answers["stormy"] and clients.answers["foul"]
        assert bertship("health", "--url", state["http_url"])[0] == 0
    finally:
        assert bertship("stop", *runs)[0] == 0
    told = [row["event"] for row in read(Path(state["events"])) if row["event"] != "triton"]
    assert told == [
        "ready",
        *("deploy", "deployed"),
        *("deploy", "rolled back"),
        "rolled back",
        *("stopping", "stopped"),
    ]


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): sha256_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".deploy.lock"
    }


def test_a_version_that_is_worse_or_never_learnt_is_warned_of():
    def facts(value: float, degenerate: str = "", name: str = "accuracy") -> dict[str, object]:
        return {"metric": {"name": name, "value": value, "examples": 40}, "degenerate": degenerate}

    assert warning_of(facts(0.9), facts(0.9)) == warning_of(facts(0.9), {}) == ""
    assert "accuracy 0.8250, not 0.9750" in warning_of(facts(0.825), facts(0.975))
    assert warning_of(facts(0.8), facts(0.9, name="f1")) == ""  # no comparison
    assert warning_of({"metric": None}, facts(0.9)) == ""
    assert "every answer is 'a'" in warning_of(facts(0.9, "every answer is 'a'"), {})
