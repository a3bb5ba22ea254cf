"""bertship/next_steps.py: what a run's directory says is parsed and found by the commands themselves."""

import json
import shlex
from pathlib import Path

import pytest
import typer

from bertship import artifacts, cli
from bertship.errors import InputError
from bertship.next_steps import NEXT, next_steps, of_run, question, task_file, where_to, write_next
from bertship.shell import typed
from bertship.tasks import TASKS, find_task, get_task
from bertship.tasks.base import Task

OWN = """
name = "tickets"
kind = "pair"

[files]
format = "csv"
target = "label"
columns = { TEXT = "one", TEXT_PAIR = "two" }
"""


def parsed(line: str) -> dict[str, object]:
    """The line's own options, as the command line reads them."""
    program, name, *words = shlex.split(line, comments=True)
    assert program == "bertship"
    command = typer.main.get_command(cli.app).commands[name]  # type: ignore[attr-defined]
    return dict(command.make_context(name, words).params)


def run(folder: Path, stage: str, task: Task = TASKS["sst2"]) -> Path:
    """A directory with what `next_steps` reads."""
    folder.mkdir(parents=True)
    (folder / "task.json").write_text(task.to_json(), encoding="utf-8")
    columns = {"TEXT": 'it\'s a "joy"', "TEXT_PAIR": "$HOME"}
    (folder / "samples.jsonl").write_text(json.dumps({"columns": columns}) + "\n", encoding="utf-8")
    (folder / "bench.json").write_text(json.dumps({"task": task.name}), encoding="utf-8")
    (folder / "engines.json").write_text(json.dumps({"export": {"path": "runs/export/x y"}}), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "place", ["corpus/n", "pretrain/n", "finetune/sst2/n", "export/sst2", "bench/sst2", "bench-engine/sst2"]
)
@pytest.mark.parametrize("runs", ["runs", "other runs"])
def test_every_line_is_a_command_with_options_that_exist(tmp_path, monkeypatch, place, runs):
    monkeypatch.chdir(tmp_path)
    stage = place.partition("/")[0]
    lines = next_steps(stage, run(tmp_path / runs / place, stage))
    assert lines and not any(str(tmp_path) in line for line in lines), "paths are as one would type them"
    for line in lines:
        if line.startswith("bertship"):
            given = parsed(line)
            if "runs" in given and not line.startswith("bertship compare"):
                assert str(given["runs"]) == runs, line


def test_what_the_commands_are_given_is_this_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tuned = [parsed(line) for line in next_steps("finetune", run(Path("runs/finetune/sst2/seed1"), "finetune"))]
    assert [(given["task"], given["name"]) for given in tuned] == [("sst2", "seed1")] * 2
    pretrained = next_steps("pretrain", run(Path("runs/pretrain/n"), "pretrain"))
    assert parsed(pretrained[0])["init"] == "runs/pretrain/n"
    (corpus,) = next_steps("corpus", run(Path("runs/corpus/n"), "corpus"))
    assert parsed(corpus)["corpus_name"] == "n"
    engine = next_steps("bench-engine", run(Path("runs/bench-engine/sst2"), "bench-engine"))
    assert str(parsed(engine[1])["export_dir"]) == "runs/export/x y"
    assert [str(d) for d in parsed(engine[2])["directories"]] == [
        "runs/bench-engine/sst2.before",
        "runs/bench-engine/sst2",
    ]


def test_texts_arrive_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = next_steps("export", run(Path("runs/export/mrpc"), "export", TASKS["mrpc"]))
    for line in (lines[0], lines[-1]):
        given = parsed(line)
        assert given["text"] == ['it\'s a "joy"'] and given["text_pair"] == ["$HOME"]


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_every_task_can_be_asked(task):
    given = parsed(f"bertship predict --task {task_file(task)} {question(task)}")
    assert given["task"] == task.name and any(given[name] for name in ("text", "question", "choice"))


def test_an_own_task_is_named_by_its_file_until_it_has_a_run(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "my tickets.toml").write_text(OWN, encoding="utf-8")
    task = get_task("../my tickets.toml")
    file = f"'{tmp_path / 'my tickets.toml'}'"
    assert task_file(task) == file, "for the shell"
    kept = get_task_of(run(Path("runs/finetune/tickets/default"), "finetune", task))
    assert task_file(kept, str(tmp_path / "my tickets.toml")) == file, "the run knows where it was"
    for stage, place in (
        ("finetune", "finetune/tickets/default"),
        ("export", "export/tickets"),
        ("bench", "bench/tickets"),
    ):
        place = Path("runs", place)
        lines = next_steps(stage, place if place.exists() else run(place, stage, task))
        named = [parsed(line) for line in lines if line.startswith("bertship")]
        assert {given["task"] for given in named if given.get("task")} == {"tickets"}
        assert find_task("tickets", Path("runs")).labels == task.labels


def get_task_of(directory: Path) -> Task:
    return Task.from_file(directory / "task.json")


def test_a_name_is_found_where_the_task_was_kept(tmp_path):
    own = Task(name="tickets", kind="sentence", labels=("a", "b"))
    runs, repository = tmp_path / "runs", tmp_path / "models"
    with pytest.raises(InputError, match=r"unknown task 'tickets'; tasks are sst2, .*, or give a \.toml file"):
        find_task("tickets", runs, repository)
    run(repository / "tickets_decode" / "1", "x", own)
    assert find_task("tickets", runs, repository).labels == ("a", "b")
    with pytest.raises(InputError, match="unknown task 'tickets'"):
        find_task("tickets", runs)
    run(runs / "export" / "tickets", "x", own.with_labels(("a", "c")))
    assert find_task("tickets", runs).labels == ("a", "c")
    run(runs / "finetune" / "sst2" / "n", "x", own)
    assert find_task("sst2", runs) is TASKS["sst2"], "a built-in task's name is its own"
    with pytest.raises(InputError, match=r"squad2, in \S+runs: tickets, or give"):
        find_task("ticket", runs)


def test_a_run_is_named_where_it_will_lie(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert of_run(Path("runs/finetune/tickets/default.candidate-0123456789ab")) == " --task tickets"
    assert of_run(Path("runs/finetune/rte/seed1-from-mnli")) == " --task rte --name seed1-from-mnli"
    assert where_to(Path("home/finetune/rte/seed1-from-mnli")) == " --name seed1 --runs home", "what makes it again"


def test_a_run_elsewhere_is_named_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (line,) = next_steps("finetune", run(Path("home/model"), "finetune"))
    assert str(parsed(line)["model_dir"]) == "home/model" and parsed(line)["task"] == "sst2"
    assert next_steps("corpus", run(Path("elsewhere"), "corpus")) == []


def test_while_it_is_being_made_a_run_has_its_name_already(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with artifacts.publish(tmp_path / "runs" / "pretrain" / "n") as staging:
        assert next_steps("pretrain", staging)[0].startswith("bertship finetune --task sst2 --init runs/pretrain/n ")


def test_a_corpus_says_it_in_a_file_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_next("corpus", run(Path("runs/corpus/n"), "corpus"))
    text = Path("runs/corpus/n", NEXT).read_text(encoding="utf-8")
    assert f"```bash\n{typed('bertship pretrain')} --preset tiny --corpus n\n```\n" in text
    write_next("corpus", run(Path("home"), "corpus"))
    assert not Path("home", NEXT).exists(), "no empty file"
