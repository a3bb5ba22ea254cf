"""Turns: how rows of unlike requests share the encoder's executions.

A request that needs more of an execution than its turn is carried over and goes on in the next ones, together with
whatever has come meanwhile. So a document of a thousand windows delays others by a turn, not by its whole length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bertship.tasks.base import Logits
from bertship.tokenization import Row


@dataclass
class Work:
    """A request's rows and, in their order, the logits so far."""

    rows: Sequence[Row]
    tokens: int  # padded length of the request's rows
    answer: Callable[[Any], None] = lambda response: None  # where the response goes
    done: dict[str, list[np.ndarray]] = field(default_factory=dict)
    finished: int = 0  # rows

    @property
    def left(self) -> int:
        return len(self.rows) - self.finished

    def keep(self) -> None:
        """Copy the rows: a request's memory is the server's again once the execution that it came in has ended."""
        if not self.finished:  # later they are copies already
            self.rows = [Row(row.ids.copy(), row.types.copy()) for row in self.rows]

    def turn(self, tokens: int, least: int) -> Sequence[Row]:
        """The rows of the next turn: at least `least`, and as many as fit into `tokens`."""
        count, total = 0, 0
        for row in self.rows[self.finished :]:
            total += len(row)
            if count >= least and total > tokens:
                break
            count += 1
        return self.rows[self.finished : self.finished + count]

    def add(self, logits: Logits) -> None:
        """Take the logits of a turn."""
        for name, values in logits.items():
            self.done.setdefault(name, []).extend(values)
        self.finished += len(next(iter(logits.values())))
