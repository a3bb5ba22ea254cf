"""Regression in units of the values' own spread, from their mean.

A new head answers about 0, and an optimizer whose steps do not grow with the loss brings it to similarities around 2.6
or to prices around 20,000 slowly or never. So a new head answers the values' mean from the start and learns in units of
their standard deviation, rounded to a power of two: going from those units to the values' own is then exact, and a
training that goes on from a snapshot stays bitwise the same.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

LEAST, MOST = -100, 100  # exponents that leave FP32 room for weights and their gradients


def unit_of(values: Sequence[float]) -> float:
    """The power of two next to the standard deviation; 1 where there is none."""
    deviation = float(np.std(np.asarray(values, dtype=np.float64))) if len(values) else 0.0
    return 2.0 ** min(max(round(math.log2(deviation)), LEAST), MOST) if deviation > 0 else 1.0


def value_head(model: nn.Module) -> nn.Linear:
    """What a regression's model answers with."""
    head = model.classifier
    assert isinstance(head, nn.Linear)
    return head


@torch.no_grad()
def start_at_the_mean(head: nn.Linear, values: Sequence[float]) -> None:
    """Make a new head ([1, H]) answer the mean of `values`, give or take its own small weights in their unit."""
    head.weight.mul_(unit_of(values))
    head.bias.fill_(float(np.mean(np.asarray(values, dtype=np.float64))))


class ValueScale:
    """Puts `head` into the unit of `values` while it trains, and back into the values' own."""

    def __init__(self, head: nn.Linear, values: Sequence[float]) -> None:
        self.head, self.unit, self.in_units = head, unit_of(values), False

    def shrink(self) -> None:
        """Answer in units from here on."""
        self._turn(True)

    def restore(self) -> None:
        """Answer in the values' own scale again."""
        self._turn(False)

    def scaled(self, values: Sequence[float]) -> list[float]:
        """Targets in units."""
        return [value / self.unit for value in values]

    @torch.no_grad()
    def _turn(self, in_units: bool) -> None:
        if self.in_units != in_units:
            factor = 1 / self.unit if in_units else self.unit
            self.head.weight.mul_(factor)
            self.head.bias.mul_(factor)
            self.in_units = in_units
