"""Word embeddings cut down, while training lasts, to the pieces that the training rows hold.

A piece that never occurs gets no gradient, yet its row costs the optimizer, the gradient's norm and its clearing as
much as any other; in a small encoder the vocabulary is half of all parameters. Training on the rows that occur alone
gives the same weights, but for decoupled weight decay, which would shrink the others towards 0 for nothing.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from bertship.tokenization import Row
from train.model import BertEncoder


class UsedPieces:
    """Puts a small table in the place of `encoder.embeddings.word`, and the whole one back."""

    def __init__(self, encoder: BertEncoder, rows: Sequence[Row], pad_id: int) -> None:
        self.encoder = encoder
        self.whole: nn.Embedding = encoder.embeddings.word
        self.used = torch.from_numpy(np.unique(np.concatenate([[pad_id], *(row.ids for row in rows)])))
        self.small = nn.Embedding(len(self.used), self.whole.embedding_dim)
        with torch.no_grad():
            self.small.weight.copy_(self.whole.weight[self.used])
        place_of = torch.zeros(self.whole.num_embeddings, dtype=torch.int64)
        place_of[self.used] = torch.arange(len(self.used))
        device = self.whole.weight.device
        self.place_of, self.used = place_of.to(device), self.used.to(device)
        self.small.to(device)

    def shrink(self) -> None:
        """Train on the small table from here on; ids go through `places`."""
        self.encoder.embeddings.word = self.small

    def places(self, input_ids: Tensor) -> Tensor:
        """Pieces' rows in the small table, of the ids' shape. A piece that is not in it would be another one's."""
        return self.place_of[input_ids]

    @torch.no_grad()
    def restore(self) -> None:
        """The whole table again, with what the small one has learnt."""
        self.whole.weight[self.used] = self.small.weight
        self.encoder.embeddings.word = self.whole
