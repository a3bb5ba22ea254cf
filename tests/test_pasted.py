"""A task of one's own from one file, named from elsewhere: what its reports tell to type is typed, and does it."""

import html
import json
import re
import shlex
from pathlib import Path

import pytest

from bertship.shell import typed
from train.training_data import read_training_data

TOML = """
name = "queues"
kind = "sentence"
metrics = ["f1", "accuracy"]

[files]
format = "csv"
train = "all of them.csv"
dev = 0.25
columns = { TEXT = "message" }
"""
LABELS = ("billing", "other", "technical")
SMALL = ("--set", "min_updates=2", "--set", "epochs=0.05", "--set", "precision=fp32", "--set", "batch_size=4")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder to work in, the task's file and its data beside it."""
    (tmp_path / "my data").mkdir()
    lines = [f"a message about {LABELS[i % 3]} number {i},{LABELS[i % 3]}" for i in range(60)]
    (tmp_path / "my data" / "all of them.csv").write_text("\n".join(["message,label", *lines]) + "\n", "utf-8")
    (tmp_path / "queues.toml").write_text(TOML, "utf-8")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def commands(report: Path, heading: str) -> list[list[str]]:
    """The command lines below a heading of a report, as words."""
    page = html.unescape(report.read_text("utf-8"))
    (lines,) = re.findall(rf"<h2>{heading}</h2><pre>(.*?)</pre>", page, re.DOTALL)
    assert not re.search(r"\w/\.\./", page), "places without turns"
    return [shlex.split(line, comments=True) for line in lines.split("\n")]


def test_every_command_of_every_report_can_be_typed(bertship, own, warm_start):
    runs = Path("runs")
    tuned = runs / "finetune" / "queues" / "default"
    given = ("--task", "../queues.toml", "--data", "../my data", "--init", warm_start, *SMALL)
    code, out, err = bertship("finetune", *given)
    assert code == 0, err
    assert re.search(r"dev: \d+ of 60 examples in .*, parted by text", err) and "dev split after update 2: f1 " in err
    assert re.search(r"  f1 +0\.\d{4}  \(macro\)\n", out) and re.search(r"  train +[\d.]+ s\n", out)
    steps = [typed(f"bertship {command} --task queues") for command in ("evaluate", "export")]
    assert out.endswith(f"report: {tuned}/report.html\nnext:   {steps[0]}\n        {steps[1]}\n")
    facts = json.loads((tuned / "manifest.json").read_text("utf-8"))
    assert facts["inputs"]["dev_share"] == 0.25 and facts["metrics"]["epochs_run"] == pytest.approx(
        2 * 4 / 45, abs=0.01
    )

    (again,) = commands(tuned / "report.html", "Reproduce")
    assert (
        again[again.index("--task") + 1] == f"{own}/queues.toml"
        and again[again.index("--data") + 1] == f"{own}/my data"
    )
    code, out, err = bertship(*again[1:])
    assert code == 0 and f"{tuned} is up to date" in err, "the very same run"

    code, out, err = bertship("finetune", "--task", "queues")
    assert code == 2 and f"queues is trained by what its file says: --task {own}/queues.toml" in err

    evaluate, export = commands(tuned / "report.html", "Next")
    for line in (evaluate, export):
        assert line[1:] == [line[1], "--task", "queues"]
        code, out, err = bertship(*line[1:])
        assert code == 0 and "report: runs/" in out, err
    (again,) = commands(runs / "evaluate" / "queues" / "default" / "report.html", "Reproduce")
    assert bertship(*again[1:])[0] == 0
    assert commands(runs / "evaluate" / "queues" / "default" / "report.html", "Next") == [export]
    (again,) = commands(runs / "export" / "queues" / "report.html", "Reproduce")
    assert again[again.index("--data") + 1] == f"{own}/my data"
    code, _, err = bertship(*again[1:])
    assert code == 0, err
    for line in commands(runs / "export" / "queues" / "report.html", "Next"):
        if line[1] in ("predict", "parity", "repository"):
            code, out, err = bertship(*line[1:], *(["--repository", "models"] if line[1] == "repository" else []))
            assert code == 0, err
            if line[1] == "predict":
                assert tuple(json.loads(out)["PROBABILITIES"]) == LABELS, "by name, in the order of task.json"
    page = html.unescape((tuned / "report.html").read_text("utf-8"))
    assert "<h2>By label</h2>" in page and "f1 (macro)" in page and "held out of the training file" in page


def test_a_sweep_says_what_made_it(bertship, own, warm_start):
    given = ("--task", "../queues.toml", "--data", "../my data", "--init", warm_start, *SMALL, "--name", "n")
    code, _, err = bertship("finetune", *given, "--seeds", "2")
    assert code == 0, err
    (again,) = commands(Path("runs/finetune/queues/n.sweep/report.html"), "Reproduce")
    assert again[-2:] == ["--seeds", "2"] and again[again.index("--name") + 1] == "n"
    for line in commands(Path("runs/finetune/queues/n.sweep/report.html"), "Next"):
        assert line[2:] == ["--task", "queues", "--name", "n"]
        assert bertship(*line[1:])[0] == 0
    (again,) = commands(Path("runs/finetune/queues/n/report.html"), "Reproduce")
    assert again[again.index("--name") + 1] == "n", "not the place where a sweep makes its runs"


def test_epochs_that_are_asked_for_count(own):
    from bertship.tasks import get_task

    def settings(toml: str = "", **given: str) -> tuple[float, int]:
        (own / "queues.toml").write_text(TOML + toml, "utf-8")
        config = read_training_data(get_task("../queues.toml"), "../my data", given, lambda line: None).config
        return config.epochs, config.min_updates

    assert settings() == (3, 200), "a small set is gone through more often, where nobody says how often"
    assert settings(epochs="1") == (1, 1)
    assert settings(epochs="1", min_updates="7") == (1, 7)
    assert settings("[training]\nepochs = 2\n") == (2, 1)
    assert settings("[training]\nepochs = 2\nmin_updates = 50\n") == (2, 50)


def test_a_floor_of_updates_is_said_in_epochs(bertship, own, warm_start):
    small = ("--set", "min_updates=24", "--set", "precision=fp32", "--set", "batch_size=15")
    given = ("--task", "../queues.toml", "--data", "../my data", "--init", warm_start)
    code, out, err = bertship("finetune", *given, *small)
    assert code == 0, err
    assert "24 updates of 15 in fp32 on cpu: about 8 epochs, as min_updates = 24 (3 epochs alone are 9 updates;" in err
    assert re.search(r"  epochs_run +8\.\d\n", out)
    page = html.unescape(Path("runs/finetune/queues/default/report.html").read_text("utf-8"))
    assert "after 24 updates (about 8 epochs)" in page
