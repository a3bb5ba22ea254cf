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
from export.int8 import DOMAIN, Product, Recipe, Scaling, balance, find_products, quantize

LARGEST_CHANGE = 0.012  # share of the decisions; the gate allows 0.02, on text that the model was not trained on
LARGEST_ERROR = 0.05  # root mean square, as a share of the logits' own spread: for tasks that decide nothing
OUTLIERS = 16  # units of an x in FP32
APART = 1.5  # with a static step, where the span of all units is so many times that of the others
ALIKE = 3.0  # rows count as alike when the constant step is at most so many times that of a middling row

SENSITIVITY_ROWS = 16  # rows that tell how much the rounding of a layer matters
CANDIDATES = 5  # logits of a decision that might become the largest

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

    def keep(count: int) -> Choice:
        return judge(Recipe(scalings, tuple(layer for layers in order[:count] for layer in layers), static=False))

    choice = judge(Recipe(scalings))
    if choice.good:
        return choice
    choice = judge(Recipe(scalings, static=False))
    if choice.good:
        return choice
    few = slice(None, None, max(1, len(rows) // SENSITIVITY_ROWS))

    def error_with(kept: tuple[str, ...]) -> float:
        logits = _run(rewritten(model, Recipe(scalings, kept, static=False), limit), rows[few])
        return relative_error([output[few] for output in wanted], logits)

    order = by_sensitivity(model, products, error_with)
    fewest, most = 0, len(order)  # `fewest` are too few
    choice = keep(most)
    while most - fewest > 1:
        middle = (fewest + most) // 2
        tried = keep(middle)
        if tried.good:
            most, choice = middle, tried
        else:
            fewest = middle
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
    if not readers:  # a head of few labels on embeddings alone
        return {}
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
    balances, units, apart, factors, bounds = {}, {}, {}, {}, {}
    for name, weights in readers.items():
        magnitude = np.maximum(high[name], -low[name])
        balances[name] = balance(magnitude, [numpy_helper.to_array(constants[weight]) for weight in weights])
        sizes = magnitude * balances[name]
        units[name] = np.sort(np.argsort(-sizes)[: min(OUTLIERS, len(sizes) // 8)])
        others = balances[name].copy()
        others[units[name]] = 0
        bounds[name] = [(float((low[name] * v).min()), float((high[name] * v).max())) for v in (balances[name], others)]
        apart[name] = bounds[name][0][1] - bounds[name][0][0] > APART * (bounds[name][1][1] - bounds[name][1][0])
        factors[name] = others if apart[name] else balances[name]
    spans: dict[str, list[np.ndarray]] = {name: [] for name in readers}
    for name, value in values():
        scaled = value * factors[name]
        spans[name].append(scaled.max(axis=1) - np.minimum(scaled.min(axis=1), 0))
    found = {}
    for name in readers:
        lowest, highest = bounds[name][1 if apart[name] else 0]
        span = max(highest - lowest, float(np.finfo(np.float32).tiny))
        alike = span <= ALIKE * float(np.median(np.concatenate(spans[name])))
        found[name] = Scaling(balances[name], units[name], apart[name], lowest, lowest + span, alike, *bounds[name][1])
    return found


def by_sensitivity(
    model: Any, products: Sequence[Product], error_with: Callable[[tuple[str, ...]], float]
) -> list[tuple[str, ...]]:
    """The layers that read the same x, in the order in which they should go back to FP32.

    `error_with` gives the error with the given layers in FP32. Errors of layers add up as squares, so
    each group's is found with all others in FP32; first comes what takes away most for the work that it costs.
    """
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in model.graph.initializer}
    groups: dict[str, list[Product]] = {}
    for product in products:
        groups.setdefault(product.x, []).append(product)
    worth = {}
    for x, members in groups.items():
        others = tuple(product.layer for product in products if product.x != x)
        worth[x] = error_with(others) ** 2 / sum(sizes[product.weight] for product in members)
    return [tuple(p.layer for p in groups[x]) for x in sorted(groups, key=lambda x: -worth[x])]


def expected_changes(wanted: Logits, got: Logits) -> float:
    """The share of rows whose decision would change, with errors like those between `wanted` and `got`.

    A decision is the largest logit of an output's last axis. Counting changes needs thousands of rows to tell 1 % from
    2 %; margins against errors need a hundred: a decision changes with the probability that a normal error, as large as
    the candidates' errors against each other are over all rows, exceeds the margin to the second. A row changes with
    any of its decisions, of each token and of each output.
    """
    chances = np.zeros(len(wanted[0]))
    for rows_wanted, rows_got in zip(wanted, got, strict=True):
        found = [_candidates(a, b) for a, b in zip(rows_wanted, rows_got, strict=True)]
        errors = np.concatenate([error.ravel() for _, error in found])
        if not errors.size:
            continue  # a number: nothing is decided
        spread = max(float(np.sqrt(np.mean(errors**2))), 1e-12)
        for i, (margins, _) in enumerate(found):
            if margins.size:
                chances[i] += sum(0.5 * math.erfc(m / spread / math.sqrt(2)) for m in margins.tolist())
    return float(np.minimum(chances, 1).mean())


def relative_error(wanted: Logits, got: Logits) -> float:
    """Root mean square of the candidates' errors against each other over the logits' spread; the worst output's.

    Where a logit stands alone, its own error.
    """
    worst = 0.0
    for rows_wanted, rows_got in zip(wanted, got, strict=True):
        pairs = list(zip(rows_wanted, rows_got, strict=True))
        errors = np.concatenate([_candidates(a, b)[1].ravel() for a, b in pairs])
        if not errors.size:
            errors = np.concatenate([(b - a).ravel() for a, b in pairs])
        deviation = float(np.concatenate([a.ravel() for a, _ in pairs]).std())
        worst = max(worst, float(np.sqrt(np.mean(errors.astype(np.float64) ** 2))) / max(deviation, 1e-12))
    return worst


def _candidates(wanted: np.ndarray, got: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each decision, the margin between the two largest logits, and the errors of the next ones against the first.

    Errors elsewhere decide nothing; those of the candidates are larger than the mean.
    """
    width = wanted.shape[-1]
    if width < 2:
        return np.empty(0), np.empty(0)
    flat, other = wanted.reshape(-1, width), got.reshape(-1, width)
    top = np.argsort(-flat, axis=-1)[:, :CANDIDATES]
    logits = np.take_along_axis(flat, top, -1)
    errors = np.take_along_axis(other, top, -1) - logits
    return logits[:, 0] - logits[:, 1], errors[:, 1:] - errors[:, :1]


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
