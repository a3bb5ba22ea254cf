"""`bertship task`: look through labelled data before training, list the tasks, and write GLUE's leaderboard file."""

from pathlib import Path
from typing import Annotated

import typer

from bertship.commands.options import RUNS, InitOption, NameOption, RunsOption, get_task
from bertship.console import load, report, show
from bertship.errors import CheckFailed, counted

app = typer.Typer(name="task", help="The tasks, their data, and what leaderboards read.", no_args_is_help=True)


@app.command("list")
def list_tasks() -> None:
    """The built-in tasks: kind, metrics, and the files that DATA has to hold."""
    tasks = load("bertship.tasks:TASKS").values()
    result = [
        {
            "name": task.name,
            "kind": task.kind,
            "description": task.description,
            "metrics": list(task.metrics),
            "splits": {split: list(names) for split, names in task.files.splits.items()},
            "hub": task.hub.path + (f":{task.hub.config}" if task.hub.config else ""),
        }
        for task in tasks
    ]
    lines = []
    for task in result:
        files = ", ".join(f"{split} {names[0]}" for split, names in task["splits"].items())
        lines += [f"{task['name']:<8} {task['kind']:<16} {task['description']}", f"{'':<8} {files}; hub {task['hub']}"]
    show({"tasks": result}, lines)


@app.command()
def check(
    file: Annotated[str, typer.Argument(help="A .toml file with your task, or a built-in task's name.")],
    data: Annotated[Path, typer.Argument(help="The folder with its files.")],
    init: InitOption = "",
) -> None:
    """Look through labelled data before training.

    Rows, label balance, lengths, duplicates, leaks between splits, odd rows by line number. With --init, lengths are
    counted in that model's tokens too. Exits with 1 on what would spoil training.
    """
    task = get_task(file)
    tokenizer = None
    if init:
        directory, _ = load("train.stages:find_init")(init, RUNS, "tiny", report)
        tokenizer = load("bertship.tokenization:Tokenizer").from_dir(directory)
    findings = load("bertship.tasks.checking:check_data")(task, data, tokenizer)
    show({"task": task.name, **findings.as_dict()}, findings.lines())
    if findings.faults:
        raise CheckFailed(
            f"{data} would spoil a training of {task.name}: {counted(len(findings.faults), 'fault')}, listed above"
        )


@app.command()
def leaderboard(
    target: Annotated[Path, typer.Argument(help="The zip file to write.")],
    data: Annotated[Path, typer.Option("--data", help="The folder that holds GLUE's folders (CoLA, SST-2, ...).")],
    runs: RunsOption = RUNS,
    name: NameOption = "default",
) -> None:
    """Predictions of GLUE's test splits as its leaderboard takes them.

    Of every GLUE task with a run NAME, and of AX by the MNLI run; files of tasks without a run are named and left out.
    """
    written = load("train.leaderboard:write_leaderboard")(target, data, runs, name, report)
    show(
        {"file": str(target), "predictions": written},
        [f"{file:<12} {count:>8,} rows" for file, count in written.items()],
    )
