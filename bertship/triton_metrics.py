"""What the served steps count, in Triton's own /metrics beside its own figures (pb_utils.MetricFamily, counters).

Every metric has the label `task`. Ratios are for the reader of the metrics to take, over the time that matters:

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

from typing import Any

import triton_python_backend_utils as pb_utils

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
    """The counters `names` of one task, by their name in `FAMILIES`."""

    def __init__(self, task: str, names: tuple[str, ...]) -> None:
        # a metric ends with its family, and a family with the object that holds it
        self._families: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}
        for name in names:
            self._families[name] = pb_utils.MetricFamily(
                name=f"bertship_{name}_total", description=FAMILIES[name], kind=pb_utils.MetricFamily.COUNTER
            )
            self._metrics[name] = self._families[name].Metric(labels={"task": task})

    def close(self) -> None:
        """Let go of them while the server still listens: the stub crashes where they outlive it."""
        self._metrics.clear()
        self._families.clear()

    def add(self, **values: int) -> None:
        for name, value in values.items():
            if value:  # each update is a message to the server, so nothing is sent for nothing
                self._metrics[name].increment(float(value))
