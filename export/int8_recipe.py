"""Which INT8 a model bears, found on real text: as it comes, or with some inputs in dearer ways or in FP32.

Every input of products begins in its cheapest way. From there a ladder leads up to FP32, a way of one input a rung,
those first that take away most of the logits' error for what they cost. The lowest rung is taken that holds: by how
many decisions it would change (`expected_changes`) on real text that no range, step or weight was taken from.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from onnx import helper

from bertship.progress import progress, to_stderr
from bertship.tokenization import Row, pad
from export.calibration import calibrate, make_session
from export.int8 import DOMAIN, Product, Recipe, find_products, quantize, weights_by_input
from export.int8_rounding import Rounding
from export.int8_ways import Way, slope, ways_of
from export.tolerances import TOLERANCES

LARGEST_CHANGE = 1 - TOLERANCES["int8"].agreement  # share of the decisions: as the gate asks; it has the last word
LARGEST_ERROR = 0.05  # root mean square, as a share of the logits' own spread: for tasks that decide nothing

SENSITIVITY_ROWS = 16  # rows that tell how much the rounding of a layer matters
CANDIDATES = 5  # logits of a decision that might become the largest
ALIKE = 25  # decisions of nearly the same margin, whose errors are taken together

Logits = list[list[np.ndarray]]  # by output, by row


@dataclass(frozen=True)
class Choice:
    """A recipe and what it would do: `changes` is the expected share of changed decisions, `error` the relative RMS.

    `allowed`: the share of LARGEST_CHANGE and LARGEST_ERROR that it was held against.
    """

    recipe: Recipe
    changes: float
    error: float
    allowed: float

    @property
    def good(self) -> bool:
        return self.changes <= self.allowed * LARGEST_CHANGE and self.error <= self.allowed * LARGEST_ERROR

    def as_dict(self) -> dict[str, Any]:
        scalings = self.recipe.scalings.values()
        return {
            "inputs": len(scalings),
            "static_steps": sum(scaling.static for scaling in scalings),
            "with_outliers": sum(len(scaling.outliers) > 0 for scaling in scalings),
            "fp16_embeddings": self.recipe.half_embeddings,
            "fp32_layers": list(self.recipe.kept),
            "allowed_changes": round(self.allowed * LARGEST_CHANGE, 5),
            "expected_changes": round(self.changes, 5),
            "relative_error": round(self.error, 5),
            "good": self.good,
        }


class Search:
    """What `rows` of real text tell about the FP32 `model`: `find` may be asked again, for less error."""

    def __init__(self, model: Any, rows: Sequence[Row], limit: int, judged: Sequence[Row] = ()) -> None:
        """`rows` give ranges and moments; recipes are judged on `judged`, or else on every other one of `rows`.

        Weights' integers are within +-`limit`.
        """
        self.model, self.limit = model, limit
        if not judged:
            rows, judged = rows[::2], rows[1::2] or rows
        self.judged = judged
        self.groups: dict[str, list[Product]] = {}
        for product in find_products(model.graph):
            self.groups.setdefault(product.x, []).append(product)
        activity = calibrate(model, list(self.groups), rows, moments=True)
        self.ways = {x: ways_of(activity[x], weight, limit) for x, weight in weights_by_input(model.graph).items()}
        self.rounding = Rounding(activity)
        self.wanted = _run(model, self.judged)
        self.ladder: list[tuple[str, Way]] = []  # found when its foot does not hold
        self.rungs: dict[int, tuple[Recipe, float, float]] = {}  # recipes with their changes and errors, once judged

    def find(self, allowed: float = 1.0) -> Choice:
        """The fastest recipe that changes few decisions; the best one where none does.

        `allowed` is the share of LARGEST_CHANGE and LARGEST_ERROR that it has to keep.
        """
        choice = self._judge(-1, allowed)
        if choice.good:
            return choice
        self.ladder = self.ladder or self._find_ladder()
        few, enough = -1, len(self.ladder)  # `few` rungs do not hold
        while enough - few > 1:
            middle = (few + enough) // 2
            if self._judge(middle, allowed).good:
                enough = middle
            else:
                few = middle
        return self._judge(enough, allowed)

    def _judge(self, count: int, allowed: float) -> Choice:
        """What `count` rungs of the ladder give; -1 is before it, with embeddings in INT8."""
        if count not in self.rungs:
            ways = {x: ways[0] for x, ways in self.ways.items()} | dict(self.ladder[: max(count, 0)])
            recipe = self._recipe(ways, half_embeddings=count >= 0)
            logits = _run(rewritten(self.model, recipe, self.limit), self.judged)
            self.rungs[count] = recipe, expected_changes(self.wanted, logits), relative_error(self.wanted, logits)
        return Choice(*self.rungs[count], allowed)

    def _recipe(self, ways: Mapping[str, Way], half_embeddings: bool = True) -> Recipe:
        """Embeddings are FP16 from the ladder's foot on, which takes space but no time."""
        scalings = {x: way.scaling for x, way in ways.items() if way.scaling is not None}
        kept = tuple(p.layer for x, products in self.groups.items() if x not in scalings for p in products)
        return Recipe(scalings, kept, half_embeddings, self.rounding)

    def _find_ladder(self) -> list[tuple[str, Way]]:
        """Every dearer way, in the order in which they pay.

        Errors of layers add up as squares: what an input's error does to the logits is measured with all others in
        FP32, for its second way, as that of the cheapest may be beyond any proportion; and taken as the same for all.
        """
        some = slice(None, None, max(1, len(self.judged) // SENSITIVITY_ROWS))
        wanted = [output[some] for output in self.wanted]
        rungs = []
        with progress("int8: what each layer's rounding does", len(self.ways), to_stderr) as advance:
            for x, ways in self.ways.items():
                way = ways[1 if len(ways) > 2 else 0]
                logits = _run(rewritten(self.model, self._recipe({x: way}), self.limit), self.judged[some])
                weight = relative_error(wanted, logits) ** 2 / max(way.error, float(np.finfo(np.float64).tiny))
                rungs += [(weight * slope(a, b), x, b) for a, b in pairwise(ways)]
                advance(self.groups[x][0].layer)
        return [(x, way) for _, x, way in sorted(rungs, key=lambda rung: -rung[0])]


def rewritten(model: Any, recipe: Recipe, limit: int) -> Any:
    """A copy of `model` in INT8."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    quantize(copy.graph, recipe, limit)
    copy.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return copy


def expected_changes(wanted: Logits, got: Logits) -> float:
    """The share of rows whose decision would change, with errors like those between `wanted` and `got`.

    A decision is the largest logit of an output's last axis. Counting changes needs thousands of rows to tell 1 % from
    2 %; margins against errors need a hundred: a decision changes with the probability that a normal error, as large as
    the candidates' errors against each other are where the model is as sure (ALIKE decisions), exceeds the margin to
    the second. A sentence in doubt moves by more than a clear one, a text without any answer by less. A row changes
    with any of its tokens' decisions; a span's outputs, start and end, change together, so the worse counts.
    """
    chances = np.zeros(len(wanted[0]))
    for rows_wanted, rows_got in zip(wanted, got, strict=True):
        found = [_candidates(a, b) for a, b in zip(rows_wanted, rows_got, strict=True)]
        margins = np.concatenate([margin for margin, _ in found])
        if not margins.size:
            continue  # a number: nothing is decided
        squares = np.concatenate([(error**2).mean(axis=-1) for _, error in found if error.size])
        of_decision = margins / np.maximum(np.sqrt(2 * _among_alike(margins, squares)), 1e-12)
        chance = np.array([0.5 * math.erfc(share) for share in of_decision.tolist()])
        owners = np.repeat(np.arange(len(found)), [len(margin) for margin, _ in found])
        of_row = np.bincount(owners, weights=chance, minlength=len(found))
        chances = np.maximum(chances, np.minimum(of_row, 1))
    return float(chances.mean())


def _among_alike(margins: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Of each decision, the mean of `squares` over the ALIKE of the nearest margins."""
    order = np.argsort(margins, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(squares[order])])
    first = np.clip(np.arange(len(margins)) - ALIKE // 2, 0, max(0, len(margins) - ALIKE))
    last = np.minimum(first + ALIKE, len(margins))
    means = np.empty(len(margins))
    means[order] = (sums[last] - sums[first]) / (last - first)
    return means


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
