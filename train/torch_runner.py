"""The PyTorch model behind the same call as every other engine: rows in, logits out."""

from collections.abc import Sequence

import numpy as np
import torch

from bertship.tasks.base import Logits
from bertship.tokenization import Row, pad
from train.heads import HeadedModel


class TorchRunner:
    """Runs a head of `train.heads` in evaluation mode, in its own precision, rows of like length together."""

    def __init__(self, model: HeadedModel, pad_id: int, batch_size: int = 32) -> None:
        self.model, self.pad_id, self.batch_size = model, pad_id, batch_size
        self.outputs: tuple[str, ...] = model.OUTPUTS

    def run(self, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """One padded batch by input name, each int64 [B, S]; outputs as float32 in the head's order."""
        device = next(self.model.parameters()).device
        was_training = self.model.training
        self.model.eval()
        with torch.inference_mode():
            tensors = {name: torch.from_numpy(values).to(device) for name, values in feeds.items()}
            outputs = self.model(**tensors)
        self.model.train(was_training)
        return [output.float().cpu().numpy() for output in outputs]

    def __call__(self, rows: Sequence[Row]) -> Logits:
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        results: list[list[np.ndarray]] = [[] for _ in rows]
        for start in range(0, len(rows), self.batch_size):
            chosen = order[start : start + self.batch_size]
            outputs = self.run(pad([rows[i] for i in chosen], self.pad_id))
            for place, i in enumerate(chosen):
                tokens = len(rows[i]) if self.model.PER_TOKEN else None
                results[i] = [output[place, :tokens] for output in outputs]
        return {name: [result[k] for result in results] for k, name in enumerate(self.outputs)}
