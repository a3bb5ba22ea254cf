"""Two processes fine-tune what one does: gradients, losses, metrics, one log, a stop together, the launcher."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SETTINGS
from gloo_processes import start, together
from safetensors.torch import load_file, save_file
from small_bert import TASKS_BY_HEAD, TOKENIZER, TRAINED_TASKS, make_examples, make_model
from training_processes import torchrun

from bertship.config import FinetuneConfig
from bertship.tasks.ner import IGNORED
from train.checkpoint import save_model
from train.distributed import Processes, join
from train.divided_runner import DividedRunner, Interrupted
from train.features import cache_features
from train.finetune import finetune, with_features
from train.finetune_batches import Units
from train.finetune_learner import FinetuneLearner
from train.finetune_start import start_model
from train.losses import counted
from train.watch import read_log

ROOT = Path(__file__).parents[1]
UNITS = 16
# the last has one unit alone, of which the second process gets none
BATCHES = ([3, 1, 4, 0, 5, 9, 2], [6, 7, 8], [10])
SETTINGS_OF = {"whole": {}, "parts": {"accumulation": 3}, "frozen": {"layers": "weighted_all"}}


def quiet(line: str) -> None:
    assert "\n" not in line


@pytest.fixture(params=TRAINED_TASKS)
def head(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def init(head: str, tmp_path: Path) -> Path:
    """A warm start without dropout, of which each process draws its own."""
    folder = tmp_path / "init"
    folder.mkdir()
    save_model(make_model(head), TOKENIZER, folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return folder


def learner_of(head: str, init: Path, settings: dict[str, Any], processes: Processes, folder: Path) -> FinetuneLearner:
    config = FinetuneConfig(batch_size=8, precision="fp32", **settings)
    task = with_features(TRAINED_TASKS[head], config)
    torch.manual_seed(1)
    examples = make_examples(head, UNITS)
    model = start_model(task, init, TOKENIZER, examples, quiet)
    units = Units.of(task, TOKENIZER, examples)
    cache = None
    if task.layers:
        with processes.main_first():
            cache = cache_features(model, units.rows, TOKENIZER.pad_id, folder, init, quiet)  # type: ignore[arg-type]
    return FinetuneLearner(task, model, units, config, processes, TOKENIZER.pad_id, cache)


def write_gradients(head: str, init: Path, settings: dict[str, Any], out: Path) -> None:
    with join() as processes:
        learner = learner_of(head, init, settings, processes, out / "features")
        found = {}
        for number, chosen in enumerate(BATCHES):
            learner.optimizer.zero_grad(set_to_none=True)
            value, _, _ = learner.backward(chosen)
            found[f"{number}/loss"] = torch.tensor(processes.sum(value))
            found |= {
                f"{number}/{n}": p.grad.clone() for n, p in learner.model.named_parameters() if p.grad is not None
            }
        save_file(found, out / f"{processes.count}-{processes.rank}.safetensors")


@pytest.mark.parametrize("settings", SETTINGS_OF)
def test_two_processes_have_the_gradients_of_one(settings: str, head: str, init: Path, tmp_path: Path) -> None:
    """trn.1: the loss is a mean over the whole batch, though the processes have unequal shares of its targets."""
    given = (head, init, SETTINGS_OF[settings], tmp_path)
    together(write_gradients, *given)
    write_gradients(*given)
    one, *two = (load_file(tmp_path / f"{name}.safetensors") for name in ("1-0", "2-0", "2-1"))
    for number in range(len(BATCHES)):
        assert max(float(g.abs().max()) for name, g in one.items() if name.startswith(f"{number}/")) > 1e-2
    for other in two:
        assert other.keys() == one.keys()
        for name, gradient in one.items():
            torch.testing.assert_close(other[name], gradient, atol=1e-6, rtol=1e-6, msg=name)


def test_the_shares_are_unequal_indeed(tmp_path: Path) -> None:
    task = TASKS_BY_HEAD["token"]
    targets = Units.of(task, TOKENIZER, make_examples("token", UNITS)).targets
    shares = [[counted("token", [targets[i] for i in chosen[rank::2]]) for rank in range(2)] for chosen in BATCHES]
    assert shares[0][0] != shares[0][1] and shares[2][1] == 0
    assert counted("token", [np.array([IGNORED, 1, 2])]) == 2


def train(head: str, init: Path, out: Path, settings: dict[str, Any]) -> None:
    examples = make_examples(head, 30)
    fixed = {"min_updates": 24, "epochs": 0.1, "batch_size": 5, "learning_rate": 1e-3, "precision": "fp32"}
    config = FinetuneConfig(**{**fixed, **settings})
    with join() as processes:
        finetune(
            TRAINED_TASKS[head], init, out, config, examples, examples[:13], quiet, more={"other": examples[13:]},
            processes=processes,
        )  # fmt: skip


def test_a_training_by_two_processes_is_that_of_one(head: str, init: Path, tmp_path: Path) -> None:
    """Thirty examples in batches of five: a share of three and one of two, and metrics over uneven shares."""
    settings = {"evaluations": 3}
    train(head, init, tmp_path / "one", settings)
    together(train, head, init, tmp_path / "two", settings)
    one, two = (read_log(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert [sorted(line) for line in two] == [sorted(line) for line in one], "one log, whoever trains"
    assert [line["step"] for line in two if "loss" in line] == list(range(1, 25))
    for ours, theirs in zip(one, two, strict=True):
        if "loss" in ours:
            assert [theirs[n] for n in ("loss", "norm", "lr")] == pytest.approx(
                [ours[n] for n in ("loss", "norm", "lr")], rel=1e-3
            )
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("one", "two")]
    assert [manifest["processes"] for manifest in manifests] == [1, 2]
    ours, theirs = (manifest["metrics"] for manifest in manifests)
    assert ours.keys() == theirs.keys()
    # decisions are the same; a correlation moves with every answer's last digits
    near = 1e-4 if head == "value" else 1e-6
    for name in ours.keys() - {"train_seconds", "tokens_per_second", "padding_share"}:
        assert theirs[name] == pytest.approx(ours[name], abs=near), f"fit.13: {name}"
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two")]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=1e-4, rtol=0, msg=name)


def test_two_processes_stop_together_and_go_on(tmp_path: Path) -> None:
    """One of them is asked to end; both save, leave with its code, and lose nothing."""
    head, settings = "token", {"min_updates": 60, "evaluations": 2, "snapshot_every_s": 3600}
    init = tmp_path / "init"
    init.mkdir()
    save_model(make_model(head), TOKENIZER, init)
    together(train, head, init, tmp_path / "whole", settings)
    log = tmp_path / "run.training" / "metrics.jsonl"
    running = start(train, head, init, tmp_path / "run", settings)
    until = time.monotonic() + 120
    while not (log.is_file() and (lines := read_log(log)) and lines[-1]["step"] >= 6):
        assert time.monotonic() < until
        time.sleep(0.001)
    os.kill(running[1].pid, signal.SIGTERM)
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [143, 143]
    assert 6 <= read_log(log)[-1]["step"] < 60
    together(train, head, init, tmp_path / "run", settings)
    assert read_log(tmp_path / "run" / "metrics.jsonl") == read_log(tmp_path / "whole" / "metrics.jsonl")
    ours, theirs = ((tmp_path / n / "model" / "model.safetensors").read_bytes() for n in ("run", "whole"))
    assert ours == theirs


def test_a_divided_evaluation_has_every_row_once_and_in_order() -> None:
    """fit.13"""
    rows = list(range(5))
    dealt: list[Any] = []

    class Two(Processes):
        def gather(self, value: Any) -> list[Any]:
            dealt.append(value)
            others = [(False, {"logits": [10 * row for row in rows[rank::2]]}) for rank in range(2)]
            return others if not value[0] else [value, others[1]]

    def runner(mine: Any) -> Any:
        return {"logits": [10 * row for row in mine]}

    for rank in range(2):
        two = Two(rank, 2, torch.device("cpu"))
        assert DividedRunner(runner, two, lambda: False)(rows) == {"logits": [0, 10, 20, 30, 40]}  # type: ignore[arg-type]
    assert [value[1]["logits"] for value in dealt] == [[0, 20, 40], [10, 30]]
    with pytest.raises(Interrupted):
        DividedRunner(runner, Two(0, 2, torch.device("cpu")), lambda: True)(rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("many", [(), ("--seeds", "2")], ids=["one", "seeds"])
def test_torchrun_starts_the_command(many: tuple[str, ...], data: Path, warm_start: Path, tmp_path: Path) -> None:
    small = [pair.replace("epochs=15", "epochs=1") for pair in map(str, SETTINGS)]
    given = ["finetune", "--task", "sst2", "--data", data / "sst2", "--init", warm_start, "--runs", tmp_path]
    done = torchrun(*given, *small, "--set", "min_updates=4", *many)
    said = json.loads(done.stdout)
    run = json.loads((tmp_path / "finetune" / "sst2" / "default" / "manifest.json").read_text())
    assert run["processes"] == 2 and done.stderr.count("updates of 16 in ") == (2 if many else 1), "one speaks for all"
    assert said["metrics"]["runs"] == 2 if many else said == run
    assert (tmp_path / "finetune" / "sst2" / "default" / "report.html").is_file()
