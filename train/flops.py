"""Floating point operations of a training step, and the rate that the machine's matrix product reaches."""

import time
from collections.abc import Iterable

import torch

from bertship.config import EncoderConfig


def training_flops(config: EncoderConfig, lengths: Iterable[int], predicted: int, nsp: bool = True) -> float:
    """Operations that one forward and backward pass needs: two a multiplication with addition, three passes' worth.

    `lengths`: tokens of each sequence, padding apart, as what padding costs is no use; `predicted`: positions that
    are projected on the vocabulary. Matrix products alone are counted (Narayanan et al. 2021, appendix), and nothing
    that activation checkpointing computes twice.
    """
    lengths = list(lengths)
    hidden, tokens = config.hidden_size, sum(lengths)
    weights = config.num_hidden_layers * (4 * hidden * hidden + 2 * hidden * config.intermediate_size)
    attention = config.num_hidden_layers * 2 * hidden * sum(length * length for length in lengths)
    head = predicted * hidden * (hidden + config.vocab_size)
    pooler = len(lengths) * hidden * (hidden + 2) if nsp else 0
    return 3.0 * 2.0 * (tokens * weights + attention + head + pooler)


def matrix_product_rate(device: torch.device, precision: torch.dtype | None, budget_s: float = 0.3) -> float:
    """Operations a second of a square matrix product in the precision of the training: the best of several."""
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device, dtype=precision or torch.float32) for _ in range(2))
    best, until = 0.0, time.perf_counter() + budget_s
    for attempt in range(50):
        started = _now(device)
        left @ right
        seconds = _now(device) - started
        if attempt:  # the first one sets things up
            best = max(best, 2 * size**3 / seconds)
        if attempt >= 3 and time.perf_counter() > until:
            break
    return best


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
