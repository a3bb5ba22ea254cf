"""Engines behind one call: rows in, logits out.

On a CPU a padded batch costs what its padded rows cost one by one, so rows run unpadded: with all threads on one row
when one is waiting, on a row each when many are. Only short rows of one length run together, as they are bound by the
reading of weights. None of it changes a bit of a row's logits, which never depend on its neighbours.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import onnxruntime

from bertship.errors import InputError
from bertship.processor import check_int8
from bertship.tasks.base import Logits
from bertship.tokenization import Row, pad

SPIN_US = 50
TOGETHER_TOKENS = 64  # of rows of one length in one run: with more, the weights are no longer what a run waits for


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
    Raises InputError when the file is missing, no graph of ours, or INT8 that this processor would compute wrongly.
    """

    INPUTS = ("input_ids", "attention_mask", "token_type_ids")

    def __init__(self, path: Path, threads: int | None = None) -> None:
        self.path = Path(path)
        self.threads = threads or available_threads()
        self._wide = self._session(self.threads)
        check_int8(self.path, self._wide.get_modelmeta().custom_metadata_map)
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
        """Logits of each row, in order, unpadded.

        A row alone takes all threads, and so does the longest where one is left over.
        """
        parts = _parts(rows, self.threads)
        results: list[list[np.ndarray]] = [[]] * len(rows)
        if len(parts) % self.threads == 1 and len(parts[0]) == 1:
            self._run(rows, parts.pop(0), results, wide=True)
        waiting = iter(parts)  # that of a list: each part goes to one of the threads that ask for it

        def work() -> None:
            for part in waiting:
                self._run(rows, part, results, wide=False)

        helpers = [self._pool.submit(work) for _ in range(min(len(parts), self.threads) - 1)]
        try:
            work()
        finally:
            wait(helpers)
        for helper in helpers:
            helper.result()
        return {name: [result[i] for result in results] for i, name in enumerate(self.outputs)}

    def _run(self, rows: Sequence[Row], part: Sequence[int], results: list[list[np.ndarray]], wide: bool) -> None:
        """The rows at the places `part`, all of one length, into `results`."""
        feeds = {
            "input_ids": np.array([rows[place].ids for place in part], np.int64),
            "attention_mask": np.ones((len(part), len(rows[part[0]])), np.int64),
            "token_type_ids": np.array([rows[place].types for place in part], np.int64),
        }
        outputs = self.run(feeds, wide)
        for i, place in enumerate(part):
            results[place] = [output[i] for output in outputs]

    def warm_up(self, lengths: Sequence[int]) -> None:
        """Run a row of each length on every session, so that the first request finds memory and threads in place."""
        for length in lengths:
            row = Row(np.zeros(length, np.int64), np.zeros(length, np.int64))
            for wide in (True, False):
                self._run([row], [0], [[]], wide)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _parts(rows: Sequence[Row], threads: int) -> list[list[int]]:
    """Places of rows that run together: of one length, and no more than leave work for all threads; longest first."""
    share = -(-len(rows) // threads)
    parts: list[list[int]] = []
    for place in sorted(range(len(rows)), key=lambda place: -len(rows[place])):
        length = len(rows[place])
        # a product of one row of a matrix is computed in another way than one of several
        most = min(share, TOGETHER_TOKENS // length) if length > 1 else 1
        if parts and len(parts[-1]) < most and len(rows[parts[-1][0]]) == length:
            parts[-1].append(place)
        else:
            parts.append([place])
    return sorted(parts, key=lambda part: -len(part) * len(rows[part[0]]))


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
