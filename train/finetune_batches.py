"""What a fine-tuning trains on: rows, the units that a loss sees together, and their order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertship.config import FinetuneConfig
from bertship.tasks import Example, Task
from bertship.tokenization import Row, Tokenizer
from train.scoring import columns_of

SORTED_BATCHES = 32  # batches among which rows are sorted by length: little padding, still well shuffled


@dataclass(frozen=True)
class Units:
    """Training rows, the units (rows by number) that a loss sees together, and each unit's target."""

    rows: list[Row]
    units: list[list[int]]
    targets: list[Any]

    @staticmethod
    def of(task: Task, tokenizer: Tokenizer, examples: Sequence[Example]) -> "Units":
        kind = task.behaviour
        rows = kind.encode(task, tokenizer, columns_of(task, examples, annotations=True)).rows
        made = Units(rows, kind.units(rows), kind.targets(task, rows, examples))
        assert len(made.units) == len(made.targets)
        return made

    def lengths(self) -> list[int]:
        """Of each unit, in tokens: its longest row's."""
        return [max(len(self.rows[i]) for i in unit) for unit in self.units]


def batches(lengths: Sequence[int], config: FinetuneConfig, first: int = 0) -> Iterator[np.ndarray]:
    """Endless batches of units, by number, each epoch in a new order; units of like length share a batch.

    They begin at batch `first` of the training: a batch is a function of the seed and its number alone.
    """
    sizes = np.asarray(lengths)
    epoch, skipped = divmod(first, -(-len(sizes) // config.batch_size))
    while True:
        rng = np.random.default_rng([config.seed, epoch])
        order = rng.permutation(len(sizes))
        made = []
        for start in range(0, len(order), config.batch_size * SORTED_BATCHES):
            group = order[start : start + config.batch_size * SORTED_BATCHES]
            group = group[np.argsort(sizes[group], kind="stable")]
            made += [group[i : i + config.batch_size] for i in range(0, len(group), config.batch_size)]
        for i in rng.permutation(len(made))[skipped:]:
            yield made[i]
        epoch, skipped = epoch + 1, 0
