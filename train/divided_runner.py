"""Rows dealt to all processes of a training and put together again, so that evaluating takes each its share."""

from collections.abc import Callable, Sequence

from bertship.pipeline import Runner
from bertship.tasks.base import Logits
from bertship.tokenization import Row
from train.distributed import Processes


class Interrupted(Exception):
    """An evaluation was given up as the training is to end."""


class DividedRunner:
    """`runner` on this process's rows; every process gets all logits, in the order of the rows.

    All processes call it with the same rows, and each has a row once: metrics do not depend on how many there are.
    Raises Interrupted, on all of them, when `stopped` says so on one.
    """

    def __init__(self, runner: Runner, processes: Processes, stopped: Callable[[], bool]) -> None:
        self.runner, self.processes, self.stopped = runner, processes, stopped

    def __call__(self, rows: Sequence[Row]) -> Logits:
        count = self.processes.count
        mine = rows[self.processes.rank :: count]
        logits = self.runner(mine) if mine else {}
        found = self.processes.gather((self.stopped(), logits))
        if any(stopped for stopped, _ in found):
            raise Interrupted
        if count == 1:
            return logits
        parts = [logits for _, logits in found]
        return {name: [parts[i % count][name][i // count] for i in range(len(rows))] for name in parts[0]}
