"""The tasks. `TASKS` holds the built-in ones by name, `get_task` also reads a user's own from a TOML file."""

from pathlib import Path

from bertship.errors import InputError
from bertship.tasks import choice, glue, ner, squad  # noqa: F401  each registers its kinds and tasks
from bertship.tasks.base import KINDS, TASKS, Example, Kind, Task, TensorSpec

__all__ = ["KINDS", "TASKS", "Example", "Kind", "Task", "TensorSpec", "get_task"]


def get_task(name_or_path: str) -> Task:
    """A built-in task by name, or the task that a `.toml` file defines. Raises InputError."""
    if name_or_path in TASKS:
        return TASKS[name_or_path]
    if name_or_path.endswith(".toml"):
        from bertship.tasks.custom import task_from_toml

        return task_from_toml(Path(name_or_path))
    raise InputError(f"unknown task {name_or_path!r}; tasks are {', '.join(TASKS)}, or give a .toml file")
