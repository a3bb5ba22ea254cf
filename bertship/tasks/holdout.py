"""A dev split held out of the training file, for data that comes as one file."""

import collections
import hashlib
import re
from collections.abc import Sequence

from bertship.errors import InputError
from bertship.tasks.base import Example, Task, nested


def text_key(task: Task, example: Example) -> str:
    """What two examples share that differ in case, spacing and punctuation alone."""
    texts = (t for n in task.behaviour.inputs for t in nested(example.columns[n]))
    return "\t".join(" ".join(re.findall(r"\w+", text.lower())) or text for text in texts)


def part_of(task: Task, examples: list[Example], split: str) -> list[Example]:
    """The examples of a file that belong to `split`: all of them, unless the task has a share of its training file held
    out as dev. Raises InputError as `held_out` does."""
    share = task.files.dev_share
    if not share or split not in ("train", "dev"):
        return examples
    held = held_out(task, examples, share)
    return [example for example, dev in zip(examples, held, strict=True) if dev is (split == "dev")]


def held_out(task: Task, examples: Sequence[Example], share: float) -> list[bool]:
    """Whether each example belongs to the dev split, about `share` of them, and of each label where there are classes.

    A text's own hash decides, so that the same text is always on the same side: however often it occurs, in whatever
    order, and mostly also after rows were added. All questions about one context go together. Raises InputError where
    there are too few different texts for two splits.
    """
    keys = [_digest(_place(task, example)) for example in examples]
    classes = task.behaviour.loss == "cross_entropy"
    groups: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    label_of: dict[str, str] = {}
    for key, example in zip(keys, examples, strict=True):
        label = label_of.setdefault(key, str(example.target) if classes else "")  # a text with two labels: the first
        groups[label][key] += 1
    if len(label_of) < 2:
        raise InputError(f"task {task.name}: dev = {share:g}: one text alone cannot be parted into train and dev")
    dev: set[str] = set()
    for counts in groups.values():
        wanted, taken = share * counts.total(), 0
        for key in sorted(counts)[:-1]:  # at least one stays to be learnt from
            if taken + counts[key] / 2 > wanted:
                break
            dev.add(key)
            taken += counts[key]
    dev = dev or {min(label_of)}
    return [key in dev for key in keys]


def _place(task: Task, example: Example) -> str:
    """The text that must not stand on both sides."""
    if task.behaviour.loss == "span":
        return str(example.columns[task.behaviour.inputs[-1]])
    return text_key(task, example)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
