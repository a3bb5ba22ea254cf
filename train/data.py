"""Where a task's labelled examples come from."""

from collections.abc import Callable
from pathlib import Path

from bertship.errors import InputError
from bertship.tasks import Example, Task
from bertship.tasks.readers import read_split
from train.sources import LABELLED

SAMPLES = Path(__file__).parents[1] / "bertship" / "tasks" / "samples"


def load_examples(task: Task, data: str | None, split: str, report: Callable[[str], None]) -> list[Example]:
    """One split's examples: from the folder `data`, else from packaged text, else from the made-up sample.

    Raises InputError when there is nothing to read, or what is there is not right.
    """
    if data:
        return _checked(task, read_split(task, Path(data), split))
    if task.packaged:
        return _checked(task, LABELLED[task.packaged](task, split, report))
    if (SAMPLES / task.name).is_dir():
        examples = read_split(task, SAMPLES / task.name, split)
        report(
            f"WARNING: no DATA= given: the {split} split of {task.name} is {len(examples)} made-up examples from the "
            "repository; they show that the line runs, they cannot show how good a model is"
        )
        return _checked(task, examples)
    raise InputError(f"task {task.name} needs data: give DATA= (--data), a folder with its files")


def _checked(task: Task, examples: list[Example]) -> list[Example]:
    if task.labels or not task.behaviour.needs_labels:  # open labels are checked once they are known
        task.behaviour.check(task, examples)
    return examples
