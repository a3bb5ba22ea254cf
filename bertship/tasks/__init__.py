"""The tasks. `TASKS` holds the built-in ones by name, `get_task` also reads a user's own from a TOML file.

`find_task` knows a user's own by its name too, once a run, an export or a model repository holds its definition.
"""

from pathlib import Path

from bertship.errors import InputError
from bertship.tasks import glue  # noqa: F401  each registers its kinds and tasks, in the order that they are listed in

# isort: split
from bertship.tasks import choice, ner, squad  # noqa: F401
from bertship.tasks.base import KINDS, TASKS, Example, Kind, Task, TensorSpec

__all__ = ["KINDS", "TASKS", "Example", "Kind", "Task", "TensorSpec", "find_task", "get_task"]


def get_task(name_or_path: str) -> Task:
    """A built-in task by name, or the task that a `.toml` file defines. Raises InputError."""
    if name_or_path in TASKS:
        return TASKS[name_or_path]
    if name_or_path.endswith(".toml"):
        from bertship.tasks.custom import task_from_toml

        return task_from_toml(Path(name_or_path))
    raise InputError(f"unknown task {name_or_path!r}; tasks are {', '.join(TASKS)}, or give a .toml file")


def find_task(name_or_path: str, runs: Path, repository: Path | None = None) -> Task:
    """As `get_task`; a name that is no built-in task's is looked for in the folder of all runs, then in `repository`.

    The definition is that of the task's newest run or export. Raises InputError that lists the names that are known.
    """
    if name_or_path in TASKS or name_or_path.endswith(".toml"):
        return get_task(name_or_path)
    found: dict[str, list[Path]] = {}
    kept = [(runs / "finetune", "*/*/task.json"), (runs / "export", "*/task.json")]
    if repository is not None:
        kept.append((repository, "*_decode/[0-9]*/task.json"))
    for home, pattern in kept:
        for path in home.glob(pattern):
            name = path.relative_to(home).parts[0].removesuffix("_decode")
            if name not in TASKS:
                found.setdefault(name, []).append(path)
    if name_or_path not in found:
        own = f", in {runs}: {', '.join(sorted(found))}" if found else ""
        raise InputError(f"unknown task {name_or_path!r}; tasks are {', '.join(TASKS)}{own}, or give a .toml file")
    return Task.from_file(max(found[name_or_path], key=lambda path: path.stat().st_mtime))
