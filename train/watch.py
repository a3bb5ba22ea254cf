"""What a training writes down as it goes, and what makes it stop: shared by pre-training and fine-tuning."""

import contextlib
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from bertship import artifacts
from bertship.errors import CheckFailed

WORKERS_END_S = 60
SKIPS_IN_A_ROW = 10  # one bad batch is an accident, ten are a diverged run


class UpdateGuard:
    """Counts the updates that were skipped as their gradient was not finite, and stops a run that only skips."""

    def __init__(self, limit: int = SKIPS_IN_A_ROW, skipped: int = 0, in_a_row: int = 0) -> None:
        self.limit, self.skipped, self.in_a_row = limit, skipped, in_a_row

    def saw(self, applied: bool, diagnosis: Callable[[int], str]) -> None:
        """Note an update. Raises CheckFailed with `diagnosis(updates in a row)` once `limit` in a row were skipped."""
        self.in_a_row = 0 if applied else self.in_a_row + 1
        self.skipped += not applied
        if self.in_a_row >= self.limit:
            raise CheckFailed(diagnosis(self.in_a_row))


def weights_state(model: nn.Module) -> str:
    """For a diagnosis: whether the weights themselves are broken, and where first."""
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            return f"weights are not finite, first {name}"
    return "all weights are still finite"


class Board:
    """TensorBoard's files in `directory`; a run that goes on after update `after` takes back what lies beyond."""

    def __init__(self, directory: Path, after: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second to import

        self._writer: Any = SummaryWriter(str(directory), purge_step=after + 1 if after else None)

    def draw(self, facts: Mapping[str, Any], group: str) -> None:
        """The numbers among `facts`, but `step`, as scalars `group/name` at that step."""
        for name, value in facts.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(f"{group}/{name}", value, facts["step"])

    def __enter__(self) -> "Board":
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()


class MetricsLog:
    """`path` as JSON lines, one object a call, in the file when the call returns; drawn on `board` besides.

    Opened again for a run that goes on after update `after`, it forgets the lines beyond, and those that `known` does
    not know. NaN and infinity, which
    JSON does not have, become null.
    """

    def __init__(
        self,
        path: Path,
        after: int = 0,
        board: Board | None = None,
        known: Callable[[dict[str, Any]], bool] = lambda facts: True,
    ) -> None:
        kept = [line for line in _lines_until(path, after) if known(json.loads(line))]
        artifacts.write_text(path, "".join(kept))
        self._file, self._board = path.open("a", encoding="utf-8"), board

    def write(self, facts: Mapping[str, Any], group: str = "training") -> None:
        """`facts["step"]` is the update's number, the rest values by name; `group` is the board's."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()
        if self._board:
            self._board.draw(facts, group)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The objects of a log; a last line that a killed writer left half written is left out."""
    return [json.loads(line) for line in _lines_until(path, None)]


def _lines_until(path: Path, last: int | None) -> list[str]:
    if not path.is_file():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            step = json.loads(line)["step"] if line.endswith("\n") else None
        except (ValueError, KeyError, TypeError):
            step = None
        if step is None or (last is not None and step > last):
            break
        kept.append(line)
    return kept


class StopRequest:
    """Whether SIGTERM or Ctrl-C asked for an end, which comes once the update under way is done."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def leave(self) -> None:
        """End as the signal asks, everything being saved: exit code 143 for SIGTERM, 130 for Ctrl-C."""
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + signal.SIGTERM)


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Within the block, SIGTERM and Ctrl-C are requests; a second Ctrl-C ends at once. Elsewhere than in the main
    thread, which alone gets signals, nothing changes."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    owner = os.getpid()

    def ask(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            # a forked worker that makes samples: the main process ends it when the update is done, SIGALRM otherwise
            signal.alarm(WORKERS_END_S if number == signal.SIGTERM else 0)
            return
        if request.signal == signal.SIGINT == number:
            raise KeyboardInterrupt
        request.signal = number

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
