"""A dev split out of the training file, where a task's `files.dev` is a share: the same examples on each reading.

What shares its text is on one side, labels have equal shares on both, and an example stays on its side as far as the
share allows when others are added: groups of one text are ordered by a hash of it, and the first ones are held out.
"""

import collections
import hashlib
import re
from collections.abc import Sequence

from bertship.errors import InputError
from bertship.tasks.base import Example, Task, nested


def text_key(task: Task, example: Example) -> str:
    """What two examples share that differ in case, spacing and punctuation alone."""
    return _key(example, task.behaviour.inputs)


def part(task: Task, examples: Sequence[Example], split: str) -> list[Example]:
    """Of all `examples` of the training file those of `split`: dev, or train for the rest; in their order.

    Of a label's examples a share of `task.files.dev_share` is held out, of all together where there are no labels.
    Questions on one document stay together. Raises InputError where nothing would be left on one of the sides.
    """
    groups: dict[str, list[int]] = collections.defaultdict(list)
    # the last input is what several questions are asked of
    names = task.behaviour.inputs[-1:] if task.behaviour.loss == "span" else task.behaviour.inputs
    for i, example in enumerate(examples):
        groups[_key(example, names)].append(i)
    strata: dict[str, list[list[int]]] = collections.defaultdict(list)
    for _, members in sorted(groups.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest()):
        labelled = task.behaviour.loss == "cross_entropy"
        strata[str(examples[members[0]].target) if labelled else ""].append(members)
    held: set[int] = set()
    for ordered in strata.values():
        wanted = round(task.files.dev_share * sum(map(len, ordered)))
        spare = ordered[:-1]  # one text of each label is left to learn from
        taken: list[int] = []
        for members in spare:
            if len(taken) + len(members) <= wanted:
                taken += members
        if wanted and spare and not taken:
            taken = min(spare, key=len)
        held.update(taken)
    if not held:
        raise InputError(
            f"{examples[0].where.rpartition(', ')[0] or 'the training data'} has too few different texts "
            f"({len(groups)}) to hold out dev = {task.files.dev_share:g}; give more, or a dev file"
        )
    return [example for i, example in enumerate(examples) if (i in held) == (split == "dev")]


def _key(example: Example, names: Sequence[str]) -> str:
    texts = (text for name in names for text in nested(example.columns[name]))
    return "\t".join(" ".join(re.findall(r"\w+", text.lower())) or text for text in texts)
