"""Which of the two nearest integers a weight becomes: the one with which the product's error on real text is least.

Frantar et al. 2022, GPTQ, section 3: the inputs of a product are rounded one after the other, and what the rounding of
one does to the outputs is made good by the inputs that come after it, as the second moments of real text tell.
"""

import numpy as np

from export.calibration import Activity

DAMPING = 0.01  # of the mean second moment: units that text hardly moves would take on everything
BLOCK = 64  # inputs, whose corrections go to the others together


class Rounding:
    """Rounds the weights of products by their inputs' activity; what was found is kept for the next recipe."""

    def __init__(self, activity: dict[str, Activity]) -> None:
        self.activity = activity
        self.found: dict[tuple[str, bytes], np.ndarray] = {}

    def __call__(
        self, x: str, name: str, weight: np.ndarray, columns: np.ndarray, balance: np.ndarray, limit: int
    ) -> np.ndarray:
        """The weight `name`, float64 [K, N], in integers, int8 [K, N] within +-`limit`, of `columns` [N] each.

        `weight` is for x * `balance` [K]; its rows of zeros stay as they are.
        """
        kept = np.flatnonzero(np.abs(weight).any(axis=1))
        key = name, kept.tobytes() + balance.tobytes()
        if key not in self.found:
            moments = self.activity[x].moments
            assert moments is not None
            moments = moments[np.ix_(kept, kept)] * np.outer(balance[kept], balance[kept])
            integers = np.zeros(weight.shape, np.int8)
            integers[kept] = round_by_moments(weight[kept] / columns, moments, limit)
            self.found[key] = integers
        return self.found[key]


def round_by_moments(weight: np.ndarray, moments: np.ndarray, limit: int) -> np.ndarray:
    """`weight` [K, N] in integers within +-`limit`, as float64; `moments` [K, K] are those of its inputs."""
    # the largest inputs first, as those that come last have nobody left to make good what they lose
    order = np.argsort(-np.diag(moments), kind="stable")
    weight, moments = weight[order].astype(np.float64), moments[np.ix_(order, order)].astype(np.float64)
    mean = float(np.diag(moments).sum()) / max(1, len(moments))
    if not mean > 0:  # nothing was ever seen there
        moments, mean = np.eye(len(moments)), 1.0
    moments[np.diag_indices_from(moments)] += DAMPING * mean
    # the upper factor of the inverse holds, row by row, what is left to each input once those before it are fixed
    factor = np.linalg.cholesky(np.linalg.inv(moments)).T
    integers = np.empty_like(weight)
    for start in range(0, len(weight), BLOCK):
        end = min(start + BLOCK, len(weight))
        errors = np.empty((end - start, weight.shape[1]))
        for k in range(start, end):
            integers[k] = np.clip(np.rint(weight[k]), -limit, limit)
            errors[k - start] = (weight[k] - integers[k]) / factor[k, k]
            weight[k + 1 : end] -= np.outer(factor[k, k + 1 : end], errors[k - start])
        weight[end:] -= factor[start:end, end:].T @ errors
    return integers[np.argsort(order)]
