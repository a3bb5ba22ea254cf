"""Options that several commands share, and how their values are read."""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from bertship.console import load
from bertship.errors import InputError

RUNS = Path("runs")
REPOSITORY = Path("model_repository")
URL = "http://127.0.0.1:8000"


def plain_name(name: str) -> str:
    """A run's name is a folder's name: anything else could lead out of the runs, or name the folder of all of them."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise InputError(f"run name {name!r}: letters, digits, '.', '_' and '-' are needed, a letter or digit first")
    return name


def _tasks(incomplete: str) -> list[str]:
    """For the shell's completion: built-in tasks, and files here that may be tasks."""
    names = [*load("bertship.tasks:TASKS"), *(path.name for path in sorted(Path().glob("*.toml")))]
    return [name for name in names if name.startswith(incomplete)]


def _presets(incomplete: str) -> list[str]:
    return [name for name in load("bertship.config:preset_names")() if name.startswith(incomplete)]


TaskOption = Annotated[
    str,
    typer.Option(
        "--task",
        "-t",
        help="A built-in task's name, a .toml file with yours, or the name of one that has been trained.",
        autocompletion=_tasks,
    ),
]
TaskToTrainOption = Annotated[
    str,
    typer.Option("--task", "-t", help="A built-in task's name, or a .toml file with yours.", autocompletion=_tasks),
]
RunsOption = Annotated[Path, typer.Option("--runs", help="The folder that holds the runs.")]
NameOption = Annotated[
    str,
    typer.Option("--name", help="The run's name: several runs can stand side by side.", callback=plain_name),
]
DataOption = Annotated[
    str | None,
    typer.Option("--data", help="A folder with the task's official files, or a name on the Hugging Face hub."),
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the configuration.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Run again even when the result is up to date.")]
BringOption = Annotated[bool, typer.Option("--bring", help="Make what this command needs first, where it is missing.")]
InitOption = Annotated[
    str, typer.Option("--init", help="The warm start: `minilm`, a model directory, a run, or a hub name.")
]
PresetOption = Annotated[
    str, typer.Option("--preset", help="A size (tiny, mini, ..., large), or a .toml file.", autocompletion=_presets)
]
RepositoryOption = Annotated[Path, typer.Option("--repository", help="The Triton model repository.")]
UrlOption = Annotated[
    str,
    typer.Option("--url", help=f"http://HOST:PORT or grpc://HOST:PORT; the server that `serve` runs, else {URL}."),
]
PrecisionOption = Annotated[str, typer.Option("--precision", help="auto, or of fp32, fp16, int8, int8_qdq.")]
ParameterOption = Annotated[
    list[str] | None,
    typer.Option("--parameter", "-p", metavar="NAME=VALUE", help="One of the task's request parameters, as top_k=5."),
]
_AGAIN = "give the option again to ask several at once."
TextOption = Annotated[list[str] | None, typer.Option("--text", help=f"The text, or a pair's first one; {_AGAIN}")]
TextPairOption = Annotated[list[str] | None, typer.Option("--text-pair", help=f"A pair's second text; {_AGAIN}")]
QuestionOption = Annotated[
    list[str] | None, typer.Option("--question", help=f"What is asked of the --context; {_AGAIN}")
]
ContextOption = Annotated[
    list[str] | None, typer.Option("--context", help="The document that holds the answer, one for each --question.")
]
ChoiceOption = Annotated[
    list[str] | None, typer.Option("--choice", help="How --text may go on; give it once for each choice.")
]


def get_task(name: str) -> Any:
    """A task by name or file; what is wrong in a file is named with its line."""
    try:
        return load("bertship.tasks:get_task")(name)
    except InputError as error:
        raise InputError(_with_line(str(error), name)) from None


def find_task(name: str, runs: Path, repository: Path | None = None) -> Any:
    """As `get_task`; also by the name alone what has been trained, exported or put into a repository."""
    if name.endswith(".toml"):
        return get_task(name)
    return load("bertship.tasks:find_task")(name, runs, repository)


def task_to_train(name: str, runs: Path) -> Any:
    """As `get_task`; of a task that has been trained before, its file is named where its name alone is given."""
    try:
        return get_task(name)
    except InputError:
        made = sorted((runs / "finetune" / name).glob("*/manifest.json"), key=lambda path: path.stat().st_mtime)
        known = [json.loads(path.read_text(encoding="utf-8"))["inputs"].get("task_file") for path in made[-1:]]
        if not known or not known[0]:
            raise
        file = load("bertship.shell:place")(known[0])
        raise InputError(f"{name} is trained by what its file says: --task {file} (TASK={file})") from None


def server_url(url: str, runs: Path) -> str:
    """The server to ask: the one named, else the one that `serve` runs for these runs, else the usual port."""
    if url:
        return url
    try:
        state = load("serving.keeper:running")(runs / "serve")
    except InputError:  # a client's wheel alone
        state = None
    return str(state["http_url"]) if state else URL


def _with_line(message: str, file: str) -> str:
    """`FILE: FIELD ...` as `FILE, line N: FIELD ...`, where one of the first words is a field that the file sets."""
    place, separator, rest = message.partition(": ")
    path, _, table = place.partition(", ")
    if path != file or not separator:
        return message
    table = table.strip("[]")
    line_of = load("bertship.config:line_of")
    for word in re.findall(r"[A-Za-z_][\w.]*", rest)[:5]:
        for name in (word, f"{word}s"):
            if line := line_of(Path(path), f"{table}.{name}" if table else name):
                return f"{place}, line {line}: {rest}"
    return message


def need(directory: Path, command: str) -> None:
    """Raise InputError where there is no `directory`, with its neighbours and the command that makes it."""
    if not directory.is_dir():
        others = sorted(path.parent.name for path in directory.parent.glob("*/manifest.json"))
        beside = f" (there: {', '.join(others)})" if others else ""
        raise InputError(f"there is no {directory}{beside}; run `{command}` first, or its Make target")


def need_run(run: Path, definition: Any) -> None:
    """The same for a fine-tuning run of the task `definition`."""
    name = "" if run.name == "default" else f" --name {run.name}"
    need(run, f"bertship finetune --task {load('bertship.next_steps:task_file')(definition)}{name}")


def parse_precisions(names: str) -> tuple[str, ...]:
    """Names parted by commas; a typo is said before anything is trained."""
    known = tuple(load("export.precision:PRECISIONS"))
    found = tuple(name.strip() for name in names.split(","))
    if unknown := [name for name in found if name not in known]:
        raise InputError(f"unknown precision {unknown[0]!r}; precisions are auto, {', '.join(known)}")
    return found


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers of 1 or more, parted by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise InputError(f"{option} {text!r}: whole numbers of 1 or more are needed, such as {option} 1,8,32")
    return tuple(int(part) for part in parts)


def parse_settings(pairs: list[str] | None) -> dict[str, str]:
    settings = {}
    for pair in pairs or []:
        field, separator, value = pair.partition("=")
        if not separator or not field:
            raise InputError(f"--set {pair!r}: FIELD=VALUE is needed, such as --set learning_rate=3e-5")
        settings[field.strip()] = value.strip()
    return settings


def parse_parameters(pairs: list[str] | None) -> dict[str, str]:
    """A request's parameters as text, which the task reads as numbers where it needs numbers."""
    parameters = {}
    for pair in pairs or []:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise InputError(f"--parameter {pair!r}: NAME=VALUE is needed, such as --parameter top_k=5")
        parameters[name.strip()] = value.strip()
    return parameters


def parse_columns(
    text: list[str] | None,
    text_pair: list[str] | None,
    question: list[str] | None,
    context: list[str] | None,
    choice: list[str] | None = None,
) -> dict[str, list[Any]]:
    given = {"TEXT": text, "TEXT_PAIR": text_pair, "QUESTION": question, "CONTEXT": context}
    columns: dict[str, list[Any]] = {name: texts for name, texts in given.items() if texts}
    if choice:
        columns["CHOICES"] = [choice] * len(text or [""])
    if not columns:
        raise InputError("nothing to ask: give --text (TEXT=), or --question and --context (QUESTION=, CONTEXT=)")
    return columns
