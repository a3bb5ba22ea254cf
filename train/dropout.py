"""Dropout whose random numbers cost little on a CPU (Srivastava et al. 2014).

PyTorch draws a number an element there, which is an eighth of a training step of a small BERT. Here a 64-bit number
decides for four elements, at a rate that is that asked for to within 1e-5.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

_BITS = 1 << 16
_DROPOUT = 3  # keeps the seeds of dropout apart from those of data (train.dataset)


class Dropout(nn.Module):
    """In training, a share `p` of the elements is set to 0 and the others are scaled by 1 / (1 - p); else nothing."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """`x` of any shape and float type, to the same."""
        return drop(x, self.p) if self.training and self.p > 0 else x


def drop(x: Tensor, p: float) -> Tensor:
    """Dropout of the share 0 < `p` < 1, by the device's default generator."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    dropped = round(p * _BITS)
    # PyTorch's generator decides; NumPy's, begun from one number of it, is several times as fast
    seed = int(torch.empty((), dtype=torch.int64).random_())
    draws = torch.from_numpy(np.random.SFC64(seed).random_raw(-(-x.numel() // 4)).view(np.int16))
    kept = draws[: x.numel()] >= dropped - _BITS // 2
    scale = torch.tensor(_BITS / (_BITS - dropped), dtype=x.dtype)
    return x * kept.view(x.shape).to(x.dtype).mul_(scale)


def update_seed(seed: int, update: int, rank: int) -> int:
    """The seed for the dropout of an update: of a training, the update's number and the process alone, so that nothing
    depends on what ran before."""
    state = np.random.SeedSequence([seed, update, rank], spawn_key=(_DROPOUT,)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
