"""What real text puts into the products of a graph: ranges, tokens and second moments of each input."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime

from bertship.runners import available_threads
from bertship.tokenization import Row, pad

SAMPLED_TOKENS = 512


@dataclass(frozen=True, eq=False)
class Activity:
    """Of one input: each unit's lowest and highest value, float32 [K]; tokens, float32 [T, K]; moments.

    `moments`, float32 [K, K], are the sums of x x^T over all tokens; None where they were not asked for.
    """

    low: np.ndarray
    high: np.ndarray
    tokens: np.ndarray
    moments: np.ndarray | None

    @property
    def largest(self) -> np.ndarray:
        """Each unit's largest magnitude, float32 [K]."""
        return np.maximum(self.high, -self.low)


def calibrate(model: Any, names: Sequence[str], rows: Sequence[Row], moments: bool = False) -> dict[str, Activity]:
    """The activity of each of the tensors `names` over `rows`; tokens are drawn evenly from all rows."""
    if not names:  # a head of few labels on embeddings alone
        return {}
    seen = onnx.ModelProto()
    seen.CopyFrom(model)
    seen.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = make_session(seen)
    rng = np.random.default_rng(0)
    most = -(-SAMPLED_TOKENS // len(rows))
    low: dict[str, np.ndarray] = {}
    high: dict[str, np.ndarray] = {}
    sums: dict[str, np.ndarray] = {}
    tokens: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for row in rows:
        chosen = rng.permutation(len(row))[:most]
        for name, x in zip(names, session.run(list(names), pad([row], 0)), strict=True):
            x_SK = x.reshape(-1, x.shape[-1])
            low[name] = np.minimum(low.get(name, np.inf), x_SK.min(axis=0))
            high[name] = np.maximum(high.get(name, -np.inf), x_SK.max(axis=0))
            tokens[name].append(x_SK[chosen] if len(x_SK) == len(row) else x_SK)  # the first token's alone
            if moments:
                sums[name] = sums.get(name, 0) + x_SK.T @ x_SK
    return {name: Activity(low[name], high[name], np.concatenate(tokens[name]), sums.get(name)) for name in names}


def make_session(model: Any) -> onnxruntime.InferenceSession:
    """`model` in memory on ONNX Runtime's CPU provider, with every core that there is."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = available_threads()
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
