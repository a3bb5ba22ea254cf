"""Which INT8 a model bears, found on real text: as it is, with a step a row, or with some layers left in FP32.

The recipes are tried from the fastest on. Each is judged by how many decisions it would change on the calibration text
(`expected_changes`), and the first below LARGEST_CHANGE is taken.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from bertship.runners import available_threads
from bertship.tokenization import Row, pad
from export.int8 import DOMAIN, Product, Recipe, Scaling, balance, copies, find_products, quantize

LARGEST_CHANGE = 0.01  # share of the decisions; the gate allows 0.02, on text that the model was not trained on
LARGEST_ERROR = 0.05  # root mean square, as a share of the logits' own spread: for tasks that decide nothing
EXTRA_COPIES = 64  # one copy more for each so many units
OUTLIERS = 16  # units of an x in FP32, where rows have their own steps
ALIKE = 3.0  # rows count as alike when the constant step is at most so many times that of a middling row

SENSITIVITY_ROWS = 16  # rows that tell how much one layer's rounding matters

Logits = list[list[np.ndarray]]  # by output, by row


@dataclass(frozen=True)
class Choice:
    """A recipe and what it would do: `changes` is the expected share of changed decisions, `error` the relative RMS."""

    recipe: Recipe
    changes: float
    error: float

    @property
    def good(self) -> bool:
        return self.changes <= LARGEST_CHANGE and self.error <= LARGEST_ERROR

    def as_dict(self) -> dict[str, Any]:
        scalings = self.recipe.scalings.values()
        return {
            "static_steps": sum(scaling.alike for scaling in scalings) if self.recipe.static else 0,
            "steps": len(scalings),
            "fp32_layers": list(self.recipe.kept),
            "expected_changes": round(self.changes, 5),
            "relative_error": round(self.error, 5),
            "good": self.good,
        }


def choose(model: Any, rows: Sequence[Row], limit: int) -> Choice:
    """The fastest recipe for the FP32 `model` that changes few decisions on `rows`; the best one where none does."""
    products = find_products(model.graph)
    scalings = read_scalings(model, products, rows)
    wanted = _run(model, rows)

    def judge(recipe: Recipe) -> Choice:
        logits = _run(rewritten(model, recipe, limit), rows)
        return Choice(recipe, expected_changes(wanted, logits), relative_error(wanted, logits))

    choice = judge(Recipe(scalings))
    if choice.good:
        return choice
    choice = judge(Recipe(scalings, static=False))
    if choice.good:
        return choice
    few = rows[:: max(1, len(rows) // SENSITIVITY_ROWS)]
    known = _run(model, few)
    kept: tuple[str, ...] = ()

    def error_without(layers: tuple[str, ...]) -> float:
        return relative_error(known, _run(rewritten(model, Recipe(scalings, layers, static=False), limit), few))

    for layers in by_sensitivity(products, error_without):
        kept = (*kept, *layers)
        choice = judge(Recipe(scalings, kept, static=False))
        if choice.good:
            break
    return choice


def rewritten(model: Any, recipe: Recipe, limit: int) -> Any:
    """A copy of `model` in INT8."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    quantize(copy.graph, recipe, limit)
    copy.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return copy


def read_scalings(model: Any, products: Sequence[Product], rows: Sequence[Row]) -> dict[str, Scaling]:
    """The scaling of every product's x, over `rows`."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    readers: dict[str, list[str]] = {}
    for product in products:
        readers.setdefault(product.x, []).append(product.weight)
    seen = onnx.ModelProto()
    seen.CopyFrom(model)
    seen.graph.output.extend(onnx.ValueInfoProto(name=name) for name in readers)
    session = make_session(seen)

    def values() -> Iterator[tuple[str, np.ndarray]]:
        for row in rows:
            for name, value in zip(readers, session.run(list(readers), pad([row], 0)), strict=True):
                yield name, value.reshape(-1, value.shape[-1])

    high: dict[str, np.ndarray] = {}
    low: dict[str, np.ndarray] = {}
    for name, value in values():
        high[name] = np.maximum(high.get(name, np.zeros(1)), value.max(axis=0))
        low[name] = np.minimum(low.get(name, np.zeros(1)), value.min(axis=0))
    balances, factors, copied, outliers = {}, {}, {}, {}
    for name, weights in readers.items():
        magnitude = np.maximum(high[name], -low[name])
        balances[name] = balance(magnitude, [numpy_helper.to_array(constants[weight]) for weight in weights])
        counts = copies(magnitude * balances[name], len(magnitude) // EXTRA_COPIES)
        factors[name] = balances[name] / counts
        copied[name] = np.repeat(np.arange(len(counts)), counts - 1)
        outliers[name] = np.sort(np.argsort(-magnitude * balances[name])[: min(OUTLIERS, len(magnitude) // 8)])
    spans: dict[str, list[np.ndarray]] = {name: [] for name in readers}
    for name, value in values():
        scaled = value * factors[name]
        spans[name].append(scaled.max(axis=1) - np.minimum(scaled.min(axis=1), 0))
    found = {}
    for name in readers:
        lowest, highest = float((low[name] * factors[name]).min()), float((high[name] * factors[name]).max())
        span = max(highest - lowest, float(np.finfo(np.float32).tiny))
        middling = float(np.median(np.concatenate(spans[name])))
        others = balances[name].copy()
        others[outliers[name]] = 0
        found[name] = Scaling(
            balances[name],
            factors[name],
            copied[name],
            lowest,
            lowest + span,
            span <= ALIKE * middling,
            outliers[name],
            float((low[name] * others).min()),
            float((high[name] * others).max()),
        )
    return found


def by_sensitivity(
    products: Sequence[Product], error_without: Callable[[tuple[str, ...]], float]
) -> list[tuple[str, ...]]:
    """The layers that read the same x, those first whose step back to FP32 lowers the error most."""
    groups: dict[str, list[str]] = {}
    for product in products:
        groups.setdefault(product.x, []).append(product.layer)
    return sorted((tuple(layers) for layers in groups.values()), key=error_without)


def expected_changes(wanted: Logits, got: Logits) -> float:
    """The share of rows whose decision would change, with errors like those between `wanted` and `got`.

    A decision is the largest logit of an output's last axis. Counting changes needs thousands of rows to tell 1 % from
    2 %; the margins between the largest and the second, against the errors' spread, need a hundred: each decision
    changes with the probability that a normal error of this spread exceeds its margin.
    """
    chances = np.zeros(len(wanted[0]))
    for rows_wanted, rows_got in zip(wanted, got, strict=True):
        if rows_wanted[0].shape[-1] < 2:
            continue
        # what moves all logits of a decision alike changes nothing
        differences = [_centred(b - a) for a, b in zip(rows_wanted, rows_got, strict=True)]
        spread = math.sqrt(2 * np.concatenate([(d**2).ravel() for d in differences]).mean()) or 1e-12
        for i, logits in enumerate(rows_wanted):
            top = np.sort(logits.reshape(-1, logits.shape[-1]), axis=-1)[:, -2:]
            margins = (top[:, 1] - top[:, 0]) / spread
            chances[i] += sum(0.5 * math.erfc(margin / math.sqrt(2)) for margin in margins.tolist()) / len(margins)
    return float(np.minimum(chances, 1).mean())


def relative_error(wanted: Logits, got: Logits) -> float:
    """Root mean square of the differences over the logits' standard deviation; the worst of the outputs."""
    worst = 0.0
    for rows_wanted, rows_got in zip(wanted, got, strict=True):
        a, b = (np.concatenate([row.ravel() for row in rows]).astype(np.float64) for rows in (rows_wanted, rows_got))
        worst = max(worst, float(np.sqrt(np.mean((a - b) ** 2)) / max(a.std(), 1e-12)))
    return worst


def _centred(values: np.ndarray) -> np.ndarray:
    return values - values.mean(axis=-1, keepdims=True)


def _run(model: Any, rows: Sequence[Row]) -> Logits:
    session = make_session(model)
    results = [session.run(None, pad([row], 0)) for row in rows]
    return [[result[k][0] for result in results] for k in range(len(results[0]))]


def make_session(model: Any) -> onnxruntime.InferenceSession:
    """`model` in memory on ONNX Runtime's CPU provider, with every core that there is."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = available_threads()
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
