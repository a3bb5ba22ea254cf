"""The ways in which one input of products may become bytes: what each costs in time, and what error it makes.

Both are estimates that put the ways in an order; `export.int8_recipe` judges what is made of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from export.calibration import Activity
from export.int8 import LEVELS, Scaling

MIGRATIONS = (0.5, 0.6, 0.7, 0.8, 0.9)  # alpha of SmoothQuant: the share of the difficulty that goes to the weights
OUTLIERS = (0, 16, 64)  # units in FP32
SILENT = 1e-3  # of the largest unit: what one that is all but silent counts as
ROUNDED = 0.4  # what `export.int8_rounding` leaves of the squared error of rounding to the nearest

# Times of one token, in multiply-adds of ONNX Runtime's integer product (AMD EPYC, Zen 5; docs/performance.md)
FP32 = 3.4  # a multiply-add in FP32
PASS = 50.0  # reading and writing a value once
BYTES, BYTES_BY_ROW = 2 * PASS, 5 * PASS  # from a value to its byte
RESULT_BY_ROW = PASS  # a result by its row's step


@dataclass(frozen=True, eq=False)
class Way:
    """`scaling` None is FP32. `cost` is beyond the plain product's; `error` of all outputs, squared, a token's mean."""

    scaling: Scaling | None
    cost: float
    error: float


def ways_of(activity: Activity, weight: np.ndarray, limit: int) -> list[Way]:
    """The ways worth taking for an x that `weight`, [K, N], reads: from the cheapest to FP32.

    Those on the lower convex hull: each next one takes away less error for its cost than the one before.
    """
    units, results = weight.shape
    ways: list[Way] = []
    for count in sorted({min(count, units // 8) for count in OUTLIERS}):
        for static in (True, False):
            found = [scaling_of(activity, weight, migration, count, static) for migration in MIGRATIONS]
            errors = [error_of(activity.tokens, weight, scaling, limit) for scaling in found]
            best = int(np.argmin(errors))
            cost = results * (FP32 * count + 2 * PASS) if count else 0.0
            if not static:
                cost += (BYTES_BY_ROW - BYTES) * units + RESULT_BY_ROW * results
            ways.append(Way(found[best], cost, errors[best]))
    in_fp32 = (FP32 - 1) * units * results - BYTES * units
    dearest = max(way.cost for way in ways)  # FP32 comes last even where it is as fast: its weights are four times
    return _hull([*ways, Way(None, max(in_fp32, dearest + 1), 0.0)])


def scaling_of(activity: Activity, weight: np.ndarray, migration: float, outliers: int, static: bool) -> Scaling:
    """Balance with `migration` (Xiao et al. 2023, SmoothQuant, equation 4), `outliers` units beside."""
    largest, of_weights = _heard(activity.largest), _heard(np.abs(weight).max(axis=1))
    balance = of_weights ** (1 - migration) / largest**migration
    apart = np.sort(np.argsort(-largest * balance)[:outliers])
    others = balance.copy()
    others[apart] = 0
    low, high = min(float((activity.low * others).min()), 0.0), max(float((activity.high * others).max()), 0.0)
    return Scaling(balance, apart, low, max(high, low + float(np.finfo(np.float32).tiny)), static)


def _heard(largest: np.ndarray) -> np.ndarray:
    return np.maximum(largest.astype(np.float64), max(float(largest.max()) * SILENT, float(np.finfo(np.float32).tiny)))


def error_of(tokens: np.ndarray, weight: np.ndarray, scaling: Scaling, limit: int) -> float:
    """The squared error of x W, a token's mean, from the rounding of both, as if each value's were by chance."""
    x = tokens * scaling.others.astype(np.float32)
    if scaling.static:
        step = (scaling.high - scaling.low) / LEVELS
        least = round(scaling.low / step)
        rounded = np.clip(np.rint(x / step), least, least + LEVELS) * step
    else:
        low, levels = (scaling.low, LEVELS) if scaling.shifted else (0.0, LEVELS // 2)
        steps = np.maximum(np.abs(x - low).max(axis=1, keepdims=True), np.finfo(np.float32).tiny) / levels
        rounded = np.rint((x - low) / steps) * steps + low
    balanced = (weight / scaling.balance[:, None]).astype(np.float32)
    balanced[scaling.outliers] = 0
    columns = np.maximum(np.abs(balanced).max(axis=0) / limit, np.finfo(np.float32).tiny)
    of_weights = ((np.rint(balanced / columns) * columns - balanced) ** 2).sum(axis=1)
    of_x = ((rounded - x) ** 2).mean(axis=0)
    return float(of_x @ (balanced**2).sum(axis=1) + ROUNDED * ((x**2).mean(axis=0) @ of_weights))


def _hull(ways: Sequence[Way]) -> list[Way]:
    hull: list[Way] = []
    for way in sorted(ways, key=lambda way: (way.cost, way.error)):
        if hull and way.error >= hull[-1].error:
            continue
        while len(hull) > 1 and slope(hull[-2], hull[-1]) <= slope(hull[-1], way):
            hull.pop()
        hull.append(way)
    return hull


def slope(a: Way, b: Way) -> float:
    """The error that `b` takes away for what it costs more than `a`."""
    return (a.error - b.error) / (b.cost - a.cost)
