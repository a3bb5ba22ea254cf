"""What the served steps count, in Triton's own /metrics beside its own figures (pb_utils.MetricFamily, counters).

An update is a message to the server and back, which would cost every request a millisecond or more. So the steps count
for themselves, and a thread of its own tells the server FLUSH_S later.

Every metric has the labels `task`, `version` (of the step's model) and `process` (of its stub), so that its labels are
its own. Two models, or two versions beside each other in a deployment, must never share a metric: Triton counts the
owners of one within a model's own family only (core, metric_family.cc), and frees it under the others when the first
owner is unloaded. A series ends with its process: sum the rates over `version` and `process`. Ratios are for the reader
of the metrics to take, over the time that matters:

- `bertship_texts_total`              elements of requests
- `bertship_rows_total`               rows for the encoder: a text, or a window of a long one
- `bertship_tokens_total`             tokens of those rows, padding left out
- `bertship_padding_tokens_total`     padding that the encoder computes: 0 where rows run unpadded
- `bertship_truncated_texts_total`    elements whose text was cut
- `bertship_refused_requests_total`   requests that ended in INVALID_ARG
- `bertship_executions_total`         executions of the encoder (embedded server)
- `bertship_execution_requests_total` requests in them: divided by the executions, the mean batch in requests
- `bertship_execution_rows_total`     rows in them: divided by the executions, the mean batch in rows
"""

import os
import threading
from typing import Any

import triton_python_backend_utils as pb_utils

from bertship.triton_limits import FLUSH_S

FAMILIES = {
    "texts": "Elements of requests",
    "rows": "Rows for the encoder: texts, or windows of long ones",
    "tokens": "Tokens of the rows, padding left out",
    "padding_tokens": "Padding tokens that the encoder computes",
    "truncated_texts": "Elements whose text was cut",
    "refused_requests": "Requests that ended in INVALID_ARG",
    "executions": "Executions of the encoder",
    "execution_requests": "Requests in executions of the encoder",
    "execution_rows": "Rows in executions of the encoder",
}


class Counters:
    """The counters `names` of one step, by their name in `FAMILIES`; `add` may be called from any thread."""

    def __init__(self, task: str, version: int, names: tuple[str, ...]) -> None:
        # a metric ends with its family, and a family with the object that holds it
        self._families: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}
        labels = {"task": task, "version": str(version), "process": str(os.getpid())}
        for name in names:
            self._families[name] = pb_utils.MetricFamily(
                name=f"bertship_{name}_total", description=FAMILIES[name], kind=pb_utils.MetricFamily.COUNTER
            )
            self._metrics[name] = self._families[name].Metric(labels=labels)
        self._pending = dict.fromkeys(names, 0)
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._flush, name="metrics", daemon=True)
        self._thread.start()

    def add(self, **values: int) -> None:
        with self._lock:  # not Counter.update, which takes longer than all else here
            for name, value in values.items():
                self._pending[name] += value

    def close(self) -> None:
        """Tell the rest, then let go of them while the server still listens: the stub crashes where they outlive it."""
        self._ended.set()
        self._thread.join()
        self._metrics.clear()
        self._families.clear()

    def _flush(self) -> None:
        last = False
        while not last:
            last = self._ended.wait(FLUSH_S)
            with self._lock:
                pending, self._pending = self._pending, dict.fromkeys(self._metrics, 0)
            for name, value in pending.items():
                if value:
                    self._metrics[name].increment(float(value))
