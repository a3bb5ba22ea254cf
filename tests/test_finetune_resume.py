"""A fine-tuning that is interrupted at any moment goes on as if nothing had happened: equal to the last bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import SETTINGS
from gloo_processes import fresh_processes
from small_bert import TOKENIZER, TRAINED_TASKS, make_examples, make_model
from training_processes import refused_beside, stop_at

from bertship.config import FinetuneConfig
from bertship.errors import CheckFailed, InputError
from train import finetune, finetune_training
from train.checkpoint import save_model
from train.torch_runner import TorchRunner
from train.watch import read_log

ROOT = Path(__file__).parents[1]
STEPS = 40
# dropout is on in all; besides, what has a state: best weights, parts of a batch, the paper's Adam, a frozen encoder,
# a head in units of its values' spread
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "best": ("token", {"evaluations": 8}),
    "parts": ("sentence", {"accumulation": 2, "bias_correction": False}),
    "frozen": ("span", {"layers": "weighted_all"}),
    "units": ("value", {"evaluations": 3}),
}

# what is the same whatever a run has as its state
ONE_CASE = pytest.mark.parametrize("case", ["best"], indirect=True)


def config_of(case: str, **changes: Any) -> FinetuneConfig:
    settings = {"min_updates": STEPS, "epochs": 0.1, "batch_size": 4, "learning_rate": 1e-3, "precision": "fp32"}
    return FinetuneConfig(**{**settings, **CASES[case][1], "snapshot_every_s": 0, **changes})


def quiet(line: str) -> None:
    assert "\n" not in line


def train(case: str, init: Path, out: Path, config: FinetuneConfig, report: Any = quiet, **more: Any) -> dict[str, Any]:
    head = CASES[case][0]
    examples = make_examples(head, 30)
    return finetune.finetune(TRAINED_TASKS[head], init, out, config, examples, examples[:10], report, **more)


@pytest.fixture(scope="module")
def processes() -> Any:
    return fresh_processes()


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def init(case: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init")
    save_model(make_model(CASES[case][0]), TOKENIZER, folder)
    assert json.loads((folder / "config.json").read_text())["hidden_dropout_prob"] > 0
    return folder


@pytest.fixture(scope="module")
def whole(case: str, init: Path, processes: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupted, without any snapshot."""
    out = tmp_path_factory.mktemp("whole") / "run"
    process = processes.Process(target=train, args=(case, init, out, config_of(case, snapshot_every_s=3600)))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    return out


def interrupt(
    processes: Any, case: str, init: Path, out: Path, config: FinetuneConfig, at: int, number: int
) -> tuple[int, int]:
    """Run until update `at` is in the log, then send the signal; the exit code and the last update in the log."""
    log = out.with_name(f"{out.name}.training") / "metrics.jsonl"
    process = processes.Process(target=train, args=(case, init, out, config))
    code = stop_at(process, log, at, number, 0.0005)
    return code, max(line["step"] for line in read_log(log)) if log.is_file() else -1


def snapshots(out: Path) -> list[int]:
    folder = out.with_name(f"{out.name}.training") / "snapshots"
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def assert_same(out: Path, whole: Path) -> None:
    """The log, the weights, and all that was measured but the time it took, bit for bit."""
    assert read_log(out / "metrics.jsonl") == read_log(whole / "metrics.jsonl")
    assert [line["step"] for line in read_log(out / "metrics.jsonl") if "loss" in line] == list(range(1, STEPS + 1))
    assert (out / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()
    ours, theirs = (json.loads((path / "manifest.json").read_text()) for path in (out, whole))
    timings = {"train_seconds", "tokens_per_second"}
    assert ours["metrics"].keys() == theirs["metrics"].keys()
    for name in ours["metrics"].keys() - timings:
        assert ours["metrics"][name] == theirs["metrics"][name], name
    assert ours["degenerate"] == theirs["degenerate"]
    assert (out / "task.json").read_text() == (whole / "task.json").read_text()
    assert not out.with_name(f"{out.name}.training").exists(), "what a training keeps is gone when it is published"


def test_killed_at_random_steps_losses_and_weights_are_bitwise_the_same(
    case: str, init: Path, processes: Any, whole: Path, tmp_path: Path
) -> None:
    """trn.2"""
    out, rng = tmp_path / "run", random.Random(time.time_ns())
    killed_at = []
    for _ in range(6):
        step = min(max(snapshots(out), default=0) + rng.randint(1, 8), STEPS - 1)
        code, logged = interrupt(processes, case, init, out, config_of(case), step, signal.SIGKILL)
        assert code == -signal.SIGKILL, f"killed at {killed_at}, then at {step}"
        killed_at.append(logged)
        assert not out.exists(), "nothing is published before the end"
        assert len(snapshots(out)) <= finetune_training.SNAPSHOTS_KEPT
    assert len(set(killed_at)) > 1 and snapshots(out)
    said: list[str] = []
    train(case, init, out, config_of(case), said.append)
    assert any("going on after update" in line for line in said)
    assert_same(out, whole)
    left = {path.name for path in tmp_path.iterdir()}
    assert left - {".features"} == {"run"}


@ONE_CASE
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 1)])
def test_asked_to_end_it_saves_where_it_is(
    number: int, code: int, case: str, init: Path, processes: Any, whole: Path, tmp_path: Path
) -> None:
    """Also where it is not yet time for a snapshot; killed later, it goes on from there and forgets what was logged."""
    out, config = tmp_path / "run", config_of(case, snapshot_every_s=3600)
    found, logged = interrupt(processes, case, init, out, config, 7, number)
    assert (found, snapshots(out)) == (code, [logged])
    later, beyond = interrupt(processes, case, init, out, config, logged + 9, signal.SIGKILL)
    assert (later, snapshots(out)) == (-signal.SIGKILL, [logged]) and beyond > logged
    said: list[str] = []
    train(case, init, out, config, said.append)
    assert any(f"going on after update {logged}," in line for line in said)
    assert_same(out, whole)


@pytest.mark.parametrize("case", ["best", "parts", "units"], indirect=True)
@pytest.mark.parametrize("call", [1, 2])
def test_an_evaluation_is_given_up_when_asked_to_end_and_made_again(
    call: int, case: str, init: Path, processes: Any, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first evaluation and the one after it. Made again and then lost by a kill, it is in the log once."""
    real, calls = TorchRunner.__call__, []

    def asked(self: TorchRunner, rows: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, rows)

    out = tmp_path / "run"
    monkeypatch.setattr(TorchRunner, "__call__", asked)
    try:
        train(case, init, out, config_of(case, snapshot_every_s=3600))
    except SystemExit as leave:
        assert leave.code == 143
        (step,) = snapshots(out)
        logged = read_log(out.with_name("run.training") / "metrics.jsonl")
        assert logged[-1]["step"] == step
        assert len([line for line in logged if "dev" in line]) == call - 1
    else:
        assert call == 2 and len(calls) == 1, "there was one evaluation alone"
    monkeypatch.undo()
    config = config_of(case, snapshot_every_s=3600)
    if 0 < max(snapshots(out), default=0) < STEPS - 3:
        code, _ = interrupt(processes, case, init, out, config, snapshots(out)[0] + 3, signal.SIGKILL)
        assert code == -signal.SIGKILL
    train(case, init, out, config)
    assert_same(out, whole)


@ONE_CASE
def test_a_damaged_snapshot_is_passed_over_for_the_one_before(
    case: str, init: Path, processes: Any, whole: Path, tmp_path: Path
) -> None:
    """trn.9"""
    out = tmp_path / "run"
    interrupt(processes, case, init, out, config_of(case), 20, signal.SIGKILL)
    before, last = snapshots(out)
    (tmp_path / "run.training" / "snapshots" / f"step-{last:08d}" / "optimizer.safetensors").write_bytes(b"cut short")
    said: list[str] = []
    train(case, init, out, config_of(case), said.append)
    assert any("WARNING" in line and "passed over" in line for line in said)
    assert any(f"going on after update {before}," in line for line in said)
    assert_same(out, whole)


@ONE_CASE
def test_no_training_goes_on_from_anothers_snapshot(
    case: str, init: Path, processes: Any, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, config = tmp_path / "run", config_of(case, snapshot_every_s=3600)
    _, logged = interrupt(processes, case, init, out, config, 9, signal.SIGTERM)
    with pytest.raises(
        InputError, match=r"another finetune\.learning_rate \(0\.001 there, 0\.002 asked for\).*--force"
    ):
        train(case, init, out, config_of(case, learning_rate=2e-3))
    with pytest.raises(InputError, match=r"another finetune\.seed"):
        train(case, init, out, config_of(case, seed=1))
    task, examples = TRAINED_TASKS[CASES[case][0]], make_examples(CASES[case][0], 30)
    with pytest.raises(InputError, match="another data;"):
        finetune.finetune(task, init, out, config, examples[1:], examples[:10], quiet)
    assert snapshots(out) == [logged], "nothing of it is touched"
    # with other code, the same settings begin anew
    said: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(finetune, "code_of", lambda: "other")
        train(case, init, out, config, said.append)
    assert any("the code has changed since" in line and "begins anew" in line for line in said)
    assert not any("going on" in line for line in said)
    assert_same(out, whole)


@ONE_CASE
def test_force_forgets_an_interrupted_training(
    case: str, init: Path, processes: Any, whole: Path, tmp_path: Path
) -> None:
    out, config = tmp_path / "run", config_of(case, snapshot_every_s=3600)
    interrupt(processes, case, init, out, config_of(case, learning_rate=3e-3), 5, signal.SIGTERM)
    said: list[str] = []
    train(case, init, out, config, said.append, restart=True)
    assert not any("going on" in line for line in said)
    assert_same(out, whole)


@ONE_CASE
def test_a_diverged_training_leaves_nothing_to_go_on_from(case: str, init: Path, tmp_path: Path) -> None:
    """It would diverge again; with a lower learning rate it begins anew at once."""
    out = tmp_path / "run"
    with pytest.raises(CheckFailed, match="diverged"):
        train(case, init, out, config_of(case, learning_rate=1e30, clip_norm=1e30))
    assert not (tmp_path / "run.training").exists()
    train(case, init, out, config_of(case, min_updates=2))


def test_a_large_snapshot_is_made_more_seldom() -> None:
    """At most a twentieth of the time goes into snapshots, however long one takes."""
    training = object.__new__(finetune_training.Training)
    training.config = FinetuneConfig()
    for every_s, cost_s, since_s, due in (
        (60, 0.5, 59, False),
        (60, 0.5, 61, True),
        (60, 9.0, 170, False),
        (60, 9.0, 181, True),
        (0, 9.0, 0, True),
    ):
        training.config = FinetuneConfig(snapshot_every_s=every_s)
        training.cost_s, training.saved = cost_s, time.monotonic() - since_s
        assert training._due() is due, (every_s, cost_s, since_s)


LEFT = "nothing is left half written"


@pytest.mark.parametrize(("number", "ended"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_ended_sweep_keeps_its_runs_and_goes_on_in_the_midst_of_one(
    number: int, ended: int, bertship: Any, data: Path, warm_start: Path, tmp_path: Path
) -> None:
    small = [pair.replace("epochs=15", "epochs=1") for pair in map(str, SETTINGS)]
    small += ["--set", "min_updates=30", "--set", "snapshot_every_s=0"]
    common = ["--task", "sst2", "--data", data / "sst2", "--init", warm_start, *small, "--seeds", "3"]
    whole = bertship("--json", "finetune", *common, "--runs", tmp_path / "whole")
    assert whole[0] == 0, whole[2]

    folder = tmp_path / "runs" / "finetune" / "sst2"
    journal = folder / ".default.sweep-results.jsonl"
    command = [sys.executable, "-m", "bertship", "finetune", *map(str, common), "--runs", str(tmp_path / "runs")]
    said = tmp_path / "stderr.txt"
    with said.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=file)
    until = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < until:
        made = journal.is_file() and len(journal.read_text().splitlines())
        if made == 1 and list(folder.glob("default.candidate-*.training/snapshots/step-*")):
            process.send_signal(number)
            break
        time.sleep(0.001)
    assert process.wait(60) == ended
    last = (said.read_text(encoding="utf-8").splitlines() or [""])[-1]
    assert last == {143: f"error: ended by SIGTERM; {LEFT}", 130: f"error: interrupted; {LEFT}"}.get(ended, last)
    code, _, err = bertship("--json", "finetune", *common, "--runs", tmp_path / "runs")
    assert code == 0, err
    assert err.count("known from before") == 1 and err.count("going on after update") == 1
    timings = {"train_seconds", "tokens_per_second"}
    results = [
        [
            {name: value for name, value in json.loads(line)["metrics"].items() if name not in timings}
            for line in (runs / "finetune" / "sst2" / "default.sweep" / "results.jsonl").read_text().splitlines()
        ]
        for runs in (tmp_path / "whole", tmp_path / "runs")
    ]
    assert results[0] == results[1]
    assert sorted(path.name for path in folder.iterdir()) == ["default", "default.sweep"]


def train_slowly(init: Path, out: Path, config: FinetuneConfig) -> None:
    train("best", init, out, config, lambda line: time.sleep(0.2 if line.startswith("step ") else 0))


def test_two_trainings_of_one_name(processes: Any, tmp_path: Path) -> None:
    """The second is refused, whatever it was asked for, and leaves the first alone; a killed one holds nothing."""
    init, out = tmp_path / "init", tmp_path / "runs" / "run"
    init.mkdir()
    save_model(make_model(CASES["best"][0]), TOKENIZER, init)
    log, config = finetune_training.home_of(out) / "metrics.jsonl", config_of("best", evaluations=20)
    running = processes.Process(target=train_slowly, args=(init, out, config))
    refused_beside(running, log, lambda restart: train("best", init, out, config, restart=restart))
    train("best", init, out, config)
    assert [line["step"] for line in read_log(out / "metrics.jsonl") if "loss" in line] == list(range(1, STEPS + 1))
    assert [path.name for path in out.parent.iterdir()] == ["run"]
