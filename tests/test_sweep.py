"""train/sweep.py: grids and seeds, what they spread over, degenerate runs by name, and going on after a stop."""

import json

import pytest
from conftest import SETTINGS

from bertship.tasks import TASKS
from train import sweep


def result(accuracy, degenerate="", **changes):
    return {"changes": changes, "metrics": {"accuracy": accuracy, "train_seconds": 1.0}, "degenerate": degenerate}


def test_the_papers_grid():
    """Devlin et al. 2019, section A.3."""
    assert sweep.GRID == {"batch_size": (16, 32), "learning_rate": (5e-5, 3e-5, 2e-5), "epochs": (2.0, 3.0, 4.0)}


def test_degenerate_runs_are_counted_and_named_not_averaged_away():
    """fit.3"""
    runs = [result(0.8, seed=1), result(0.9, seed=2), result(0.5, "every answer is 'positive'", seed=3)]
    found = sweep.summarise(TASKS["sst2"], runs)
    assert found["runs"] == 3
    assert found["degenerate_runs"] == [{"changes": {"seed": 3}, "reason": "every answer is 'positive'"}]
    assert found["accuracy"] == pytest.approx(
        {
            "mean": 0.85,
            "standard_deviation": 0.0707106781,
            "least": 0.8,
            "most": 0.9,
            "mean_with_degenerate": 2.2 / 3,
        }
    )
    all_bad = sweep.summarise(TASKS["sst2"], runs[2:])
    assert all_bad["accuracy"]["mean"] is None and len(all_bad["degenerate_runs"]) == 1


def test_a_run_that_learnt_beats_one_that_did_not():
    good, bad = result(0.6), result(0.9, "every answer is 'positive'")
    assert sweep._better(good, bad, TASKS["sst2"]) and not sweep._better(bad, good, TASKS["sst2"])
    assert not sweep._better(good, good, TASKS["sst2"]) and sweep._better(bad, None, TASKS["sst2"])


SMALL = [pair.replace("epochs=15", "epochs=1") for pair in map(str, SETTINGS)] + ["--set", "min_updates=3"]


def test_seeds_are_summed_up_and_the_best_one_is_kept(bertship, data, warm_start, tmp_path, monkeypatch):
    common = ("--task", "sst2", "--data", data / "sst2", "--runs", tmp_path, "--init", warm_start, *SMALL)
    code, out, err = bertship("--json", "finetune", *common, "--seeds", "3")
    assert code == 0, err
    found = json.loads(out)["metrics"]
    assert found["runs"] == 3
    folder = tmp_path / "finetune" / "sst2"
    lines = [json.loads(line) for line in (folder / "default.sweep" / "results.jsonl").read_text().splitlines()]
    assert [line["changes"] for line in lines] == [{"seed": 42}, {"seed": 43}, {"seed": 44}]
    kept = json.loads((folder / "default" / "manifest.json").read_text())
    best = max(lines, key=lambda line: (not line["degenerate"], line["metrics"]["accuracy"]))
    assert kept["config"]["seed"] == best["changes"]["seed"]
    assert sorted(p.name for p in folder.iterdir()) == ["default", "default.sweep"]
    assert "<h2>Runs</h2>" in (folder / "default.sweep" / "report.html").read_text()
    assert "3 runs, " in bertship("finetune", *common, "--seeds", "3")[1]


def test_an_interrupted_sweep_goes_on_where_it_stopped(bertship, data, warm_start, tmp_path, monkeypatch):
    common = ("--task", "sst2", "--data", data / "sst2", "--runs", tmp_path, "--init", warm_start, *SMALL)
    real, calls = sweep._run, []

    def stopped(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(sweep, "_run", stopped)
    assert bertship("finetune", *common, "--seeds", "3")[0] == 130
    code, _, err = bertship("finetune", *common, "--seeds", "3")
    assert code == 0, err
    assert len(calls) == 4 and err.count("known from before") == 2


def test_the_grid_leaves_out_what_is_set(bertship, data, warm_start, tmp_path):
    settings = ("--set", "batch_size=16", "--set", "epochs=0.1", "--set", "min_updates=2", "--set", "precision=fp32")
    code, out, err = bertship(
        "--json", "finetune", "--task", "sst2", "--data", data / "sst2", "--runs", tmp_path, "--init", warm_start,
        *settings, "--sweep",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["metrics"]["runs"] == 3  # the learning rates
    assert json.loads(out)["metrics"]["best"]["changes"].keys() == {"learning_rate", "seed"}


def test_a_start_from_mnli_is_kept_apart(bertship, data, warm_start, tmp_path):
    common = ("--runs", tmp_path, *SMALL)
    code, _, err = bertship("finetune", "--task", "mnli", "--data", data / "mnli", "--init", warm_start, *common)
    assert code == 0, err
    start = tmp_path / "finetune" / "mnli" / "default"
    code, out, err = bertship("--json", "finetune", "--task", "stsb", "--data", data / "stsb", "--init", start, *common)
    assert code == 0, err
    assert json.loads(out)["inputs"]["init_task"] == "mnli"
    assert (tmp_path / "finetune" / "stsb" / "default-from-mnli" / "task.json").is_file()
    assert not (tmp_path / "finetune" / "stsb" / "default").exists()
