"""Engines behind one call: rows in, logits out.

On a CPU a padded batch costs what its padded rows cost one by one, so rows run unpadded: with all threads on one row
when one is waiting, one row a thread when many are. A row's logits therefore never depend on its neighbours.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime

from bertship.errors import InputError
from bertship.tasks.base import Logits
from bertship.tokenization import Row, pad

SPIN_US = 50


def available_threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def session_options(threads: int) -> onnxruntime.SessionOptions:
    """Of a session with so many threads, beside which others need the cores."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    # between the operators of a run threads spin for a moment, as they wake too slowly from sleep; neither for long nor
    # after the run, as that would take the cores from the server's other steps
    for name, value in (("allow_spinning", "1"), ("spin_duration_us", str(SPIN_US))):
        options.add_session_config_entry(f"session.intra_op.{name}", value)
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


class OnnxRunner:
    """An ONNX file on ONNX Runtime's CPU provider.

    `threads` is the number of cores that it may keep busy; None takes all that the process has.
    Raises InputError when the file is missing or no graph of ours.
    """

    INPUTS = ("input_ids", "attention_mask", "token_type_ids")

    def __init__(self, path: Path, threads: int | None = None) -> None:
        self.path = Path(path)
        self.threads = threads or available_threads()
        self._wide = self._session(self.threads)
        # one thread a row: a second session, as the number of threads belongs to a session
        self._narrow = self._wide if self.threads == 1 else self._session(1)
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="encoder")
        self.outputs = [output.name for output in self._wide.get_outputs()]

    def _session(self, threads: int) -> onnxruntime.InferenceSession:
        onnxruntime.disable_telemetry_events()  # a served text is nobody else's business
        if not self.path.is_file():
            raise InputError(f"no such model: {self.path}")
        try:
            session = onnxruntime.InferenceSession(
                str(self.path), session_options(threads), providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # the library has no common base class for its errors
            reason = str(error).splitlines()[0]
            raise InputError(f"{self.path} does not load in ONNX Runtime: {reason}; export it again") from None
        names = {tensor.name for tensor in session.get_inputs()}
        if names != set(self.INPUTS):
            raise InputError(f"{self.path} has inputs {sorted(names)}; {', '.join(self.INPUTS)} are needed")
        return session

    def run(self, feeds: dict[str, np.ndarray], wide: bool = True) -> list[np.ndarray]:
        """One padded batch by input name, each int64 [B, S]; outputs in the graph's order."""
        session = self._wide if wide else self._narrow
        return list(session.run(self.outputs, feeds))

    def __call__(self, rows: Sequence[Row]) -> Logits:
        """Each row alone and unpadded."""
        if len(rows) == 1 or self.threads == 1:
            results = [self._one(row, True) for row in rows]
        else:
            results = list(self._pool.map(lambda row: self._one(row, False), rows))
        return {name: [result[i] for result in results] for i, name in enumerate(self.outputs)}

    def _one(self, row: Row, wide: bool) -> list[np.ndarray]:
        feeds = {
            "input_ids": row.ids[None],
            "attention_mask": np.ones((1, len(row)), np.int64),
            "token_type_ids": row.types[None],
        }
        return [output[0] for output in self.run(feeds, wide)]

    def warm_up(self, lengths: Sequence[int]) -> None:
        """Run a row of each length on every session, so that the first request finds memory and threads in place."""
        for length in lengths:
            row = Row(np.zeros(length, np.int64), np.zeros(length, np.int64))
            for wide in (True, False):
                self._one(row, wide)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def run_in_batches(
    run: Callable[[dict[str, np.ndarray]], list[np.ndarray]],
    outputs: Sequence[str],
    rows: Sequence[Row],
    tokenwise: Mapping[str, bool],
    buckets: Sequence[int],
    max_batch: int,
) -> Logits:
    """Each row's logits from padded batches of at most `max_batch` rows: the way of GPUs.

    Rows of like length go together, padded to the shortest of `buckets` that holds them. `tokenwise` says which outputs
    have one element a token; those are cut to the row's own. Raises InputError for a row longer than every bucket.
    """
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    found: dict[str, list[np.ndarray]] = {name: [np.empty(0)] * len(rows) for name in outputs}
    start = 0
    while start < len(order):
        tokens = len(rows[order[start]])
        bucket = next((length for length in sorted(buckets) if length >= tokens), None)
        if bucket is None:
            raise InputError(f"a row of {tokens} tokens is longer than the engine takes: {max(buckets)}")
        chosen = [i for i in order[start : start + max_batch] if len(rows[i]) <= bucket]
        start += len(chosen)
        batch = run(pad([rows[i] for i in chosen], 0, bucket))  # padding is masked, whatever its id
        for name, output in zip(outputs, batch, strict=True):
            for place, i in enumerate(chosen):
                found[name][i] = output[place, : len(rows[i])] if tokenwise[name] else output[place]
    return found
