"""Real text of a task with what PyTorch FP32 says to it: what every artifact is held against.

Nothing here imports PyTorch: in NVIDIA's container the FP32 graph, which has passed, stands in for it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bertship.errors import InputError
from bertship.pipeline import Runner
from bertship.tasks import Example, Task
from bertship.tasks.base import Answers, Logits, read_options, row_table
from bertship.tokenization import Tokenizer

MAX_EXAMPLES = 500


class Departure(NamedTuple):
    """How far logits are from the reference's, as shares of the largest magnitude that the reference gives.

    `worst` is the row of the largest difference, or the first one with a value that is not finite; `by_row` float64
    [W] is each row's own largest.
    """

    largest: float
    mean: float
    worst: int
    where: str
    by_row: np.ndarray


class Reference:
    """Made once and held against every artifact."""

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        runner: Runner,
        examples: Sequence[Example],
        most: int | None = MAX_EXAMPLES,
        labelled: bool = True,
    ) -> None:
        """`examples` beyond `most` are thinned out evenly over their lengths; without labels the metric is left out.

        Raises InputError for no examples.
        """
        if not examples:
            raise InputError(f"the parity gate of {task.name} needs examples; give DATA=")
        self.task, self.tokenizer = task, tokenizer
        self.examples = list(examples) if most is None else spread(examples, most)
        names = task.behaviour.inputs + (task.behaviour.annotations if labelled else ())
        self.columns = {name: [example.columns[name] for example in self.examples] for name in names}
        self.rows = task.behaviour.encode(task, tokenizer, self.columns).rows
        self.logits = runner(self.rows)
        self.answers = self.decode(self.logits)
        self.metric = task.metrics[0]
        self.labelled = labelled
        self.score = self.score_of(self.answers)

    def decode(self, logits: Logits) -> Answers:
        table = row_table(self.task.behaviour, self.rows)
        options = read_options(self.task, None)
        return self.task.behaviour.decode(self.task, self.columns, table, logits, options)

    def score_of(self, answers: Answers) -> float | None:
        """The task's first metric; None without labels."""
        if not self.labelled:
            return None
        return self.task.behaviour.score(self.task, self.examples, answers)[self.metric]

    def agreement(self, answers: Answers) -> float:
        """The share of equal decisions: label, span, entities."""
        decisions = self.task.behaviour.decisions
        pairs = list(zip(decisions(self.answers), decisions(answers), strict=True))
        return sum(a == b for a, b in pairs) / len(pairs)

    def departure(self, logits: Logits) -> Departure:
        """How far `logits` depart, and where most."""
        by_row = np.zeros(len(self.rows))
        places = [("", 0)] * len(self.rows)
        total, count = 0.0, 0
        for name, rows in self.logits.items():
            scale = max(float(np.abs(row).max()) for row in rows)
            for w, (wanted, got) in enumerate(zip(rows, logits[name], strict=True)):
                difference = np.abs(np.asarray(got, np.float64) - wanted) / scale
                bad = np.flatnonzero(~np.isfinite(difference))
                if bad.size:
                    return Departure(np.nan, np.nan, w, self._place(name, w, int(bad[0])), np.full(len(rows), np.nan))
                total, count = total + float(difference.sum()), count + difference.size
                if not places[w][0] or difference.max() > by_row[w]:
                    by_row[w], places[w] = difference.max(), (name, int(difference.argmax()))
        worst = int(by_row.argmax())
        return Departure(
            float(by_row[worst]), total / count, worst, self._place(places[worst][0], worst, places[worst][1]), by_row
        )

    def _place(self, name: str, w: int, index: int) -> str:
        return f"in {name}, element {index}, of {self.examples[self.rows[w].owner].where or f'row {w}'}"


def spread(examples: Sequence[Example], most: int) -> list[Example]:
    """At most `most` examples, evenly over the lengths of their texts, so that short and long ones are both judged."""
    if len(examples) <= most:
        return list(examples)
    by_length = sorted(examples, key=lambda e: sum(len(text) for text in e.columns.values() if isinstance(text, str)))
    return [by_length[i] for i in np.linspace(0, len(by_length) - 1, most).round().astype(int)]
