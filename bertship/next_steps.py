"""What to do with a run next: the exact commands, from where the run is and what it holds.

A run says them itself, at the end of its `report.html`, or in `NEXT.md` where it has no report.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bertship.artifacts import published, write_text
from bertship.shell import place, shown, typed
from bertship.tasks import TASKS, Task

RUNS = "runs"  # what commands take where --runs is not given
NEXT = "NEXT.md"
_SHORT = 120  # characters of a text that is shown as an example
_OPTIONS = {"TEXT": "--text", "TEXT_PAIR": "--text-pair", "QUESTION": "--question", "CONTEXT": "--context"}


def next_steps(stage: str, directory: Path) -> list[str]:
    """Commands for a shell in the checkout, for a run of `stage`; its directory may still be the staging one."""
    return _STAGES[stage](Path(shown(published(directory))), directory)


def ending(stage: str, directory: Path) -> list[str]:
    """The last lines of a command that made a run: where its page is, and how to go on."""
    page = directory / "report.html"
    following = [f"        {typed(line)}" for line in next_steps(stage, directory)]
    if following:
        following[0] = following[0].replace("       ", "next:  ", 1)
    return [*([f"report: {shown(page)}"] if page.is_file() else []), *following]


def write_next(stage: str, directory: Path) -> None:
    """`NEXT.md` in a run's directory, for a run without a report; none where there is nothing to say."""
    lines = next_steps(stage, directory)
    if lines:
        write_text(directory / NEXT, "\n".join(["# Next", "", "```bash", *map(typed, lines), "```", ""]))


def task_file(task: Task, source: str = "") -> str:
    """What `--task` takes for a `task` that has no run yet: a built-in one's name, or the file that it is from."""
    file = task.source or source
    return task.name if task.name in TASKS else place(file) if file else f"{task.name}.toml"


def of_run(run: Path) -> str:
    """Options that name a fine-tuning run, whose task is known by name from then on, and the folder of its runs."""
    run, home = _settled(run), _runs(run, "finetune", 2)
    return f" --task {run.parent.name}{_name(run)}{_option(home) if home is not None else ''}"


def where_to(run: Path) -> str:
    """Options that put a fine-tuning run where this one lies."""
    run, home = _settled(run), _runs(run, "finetune", 2)
    # one that starts from another task's model is set apart by that alone
    run = run.with_name(run.name.partition("-from-")[0])
    return f"{_name(run)}{_option(home) if home is not None else ''}"


def _settled(run: Path) -> Path:
    """Where a sweep keeps the run, should it be the best."""
    return run.with_name(run.name.partition(".candidate-")[0])


def question(task: Task, columns: Mapping[str, Any] | None = None) -> str:
    """Options that ask `task`: for the texts of `columns`, or for dots."""
    words = []
    for name in task.behaviour.inputs:
        value = (columns or {}).get(name, "...")
        if isinstance(value, str):
            words.append(f"{_OPTIONS[name]} {shlex.quote(value)}" if name in _OPTIONS else f"--choice {value}")
        else:
            words += [f"--choice {shlex.quote(choice)}" for choice in value]
    return " ".join(words)


def _corpus(directory: Path, files: Path) -> list[str]:
    runs = _runs(directory, "corpus", 1)
    if runs is None:
        return []
    return [f"bertship pretrain --preset tiny --corpus {shlex.quote(directory.name)}{_option(runs)}"]


def _pretrain(directory: Path, files: Path) -> list[str]:
    runs = _runs(directory, "pretrain", 1)
    given = _option(runs) if runs is not None else ""
    return [
        f"bertship finetune --task sst2 --init {place(directory)}{given}    # or --task tickets.toml, yours",
        f"tensorboard --logdir {place(directory / 'tensorboard')}",
    ]


def _finetune(directory: Path, files: Path) -> list[str]:
    if _runs(directory, "finetune", 2) is None:
        return [f"bertship export {place(directory)} --task {Task.from_file(files / 'task.json').name}"]
    return [f"bertship evaluate{of_run(directory)}", f"bertship export{of_run(directory)}"]


def _export(directory: Path, files: Path) -> list[str]:
    task = Task.from_file(files / "task.json")
    runs = _runs(directory, "export", 1)
    given = _option(runs) if runs is not None else ""
    export = place(directory)
    lines = [f"bertship parity {export} --full{given}", f"bertship bench-engine {export}{given}"]
    if runs is None:
        return lines
    named = f" --task {task.name}"
    asked = question(task, _sample(files))
    return [
        f"bertship predict{named}{_option(runs)} {asked}",
        *lines,
        f"bertship repository{named}{_option(runs)}",
        f"bertship serve --detach{_option(runs)}",
        f"bertship deploy {export}{_option(runs)}    # where a server runs already, instead of the two before",
        f"bertship ask{named}{_option(runs)} {asked}",
    ]


def _bench(directory: Path, files: Path) -> list[str]:
    task = _read(files / "bench.json")["task"]
    runs = _runs(directory, "bench", 1)
    if runs is None:
        return []
    again = f"bertship bench --task {task}{_option(runs)}"
    return [*_kept(directory, again), f"bertship playground{_option(runs)}"]


def _bench_engine(directory: Path, files: Path) -> list[str]:
    runs = _runs(directory, "bench-engine", 1)
    if runs is None:
        return []
    export = Path(_read(files / "engines.json")["export"]["path"])
    return _kept(directory, f"bertship bench-engine {place(export)}{_option(runs)}")


_STAGES: dict[str, Callable[[Path, Path], list[str]]] = {
    "corpus": _corpus,
    "pretrain": _pretrain,
    "finetune": _finetune,
    "export": _export,
    "bench": _bench,
    "bench-engine": _bench_engine,
}


def _kept(directory: Path, again: str) -> list[str]:
    """A measurement is replaced by the next one: keep it, change something, measure again, compare."""
    kept = place(directory.with_name(f"{directory.name}.before"))
    return [
        f"cp -rT {place(directory)} {kept}",
        f"{again}    # after a change",
        f"bertship compare {kept} {place(directory)}",
    ]


def _sample(export: Path) -> Mapping[str, Any] | None:
    """A short one of the export's own texts."""
    path = export / "samples.jsonl"
    for line in path.read_text(encoding="utf-8").split("\n") if path.is_file() else ():
        columns: Mapping[str, Any] = json.loads(line)["columns"] if line else {}
        texts = [text for value in columns.values() for text in ([value] if isinstance(value, str) else value)]
        if texts and sum(map(len, texts)) <= _SHORT and all(text.isprintable() and text.strip() for text in texts):
            return columns
    return None


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _runs(directory: Path, stage: str, levels: int) -> Path | None:
    """The folder of all runs, where the directory is that folder's `stage`/... of so many levels."""
    home = directory.parents[levels] if len(directory.parts) > levels + 1 else None
    return home if home is not None and directory.parents[levels - 1].name == stage else None


def _option(runs: Path) -> str:
    return "" if str(runs) == RUNS else f" --runs {place(runs)}"


def _name(directory: Path) -> str:
    return "" if directory.name == "default" else f" --name {shlex.quote(directory.name)}"
