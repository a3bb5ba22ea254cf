"""What fine-tuning minimizes, by a task kind's `loss`: each a mean over the targets that `counted` counts."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bertship.tasks.ner import IGNORED

Targets = Sequence[Any]


def cross_entropy(outputs: Sequence[Tensor], targets: Targets, attention_mask: Tensor) -> Tensor:
    """Mean over texts; targets are label indices."""
    return functional.cross_entropy(outputs[0].float(), torch.tensor(targets, device=outputs[0].device))


def mean_squared_error(outputs: Sequence[Tensor], targets: Targets, attention_mask: Tensor) -> Tensor:
    """Mean over texts; targets are numbers."""
    predicted = outputs[0].float().squeeze(1)
    wanted = torch.tensor(targets, dtype=torch.float32, device=predicted.device)
    assert predicted.shape == wanted.shape  # (N, 1) against (N,) would broadcast in silence
    return functional.mse_loss(predicted, wanted)


def choice_loss(outputs: Sequence[Tensor], targets: Targets, attention_mask: Tensor) -> Tensor:
    """Mean over questions of the cross-entropy over each one's choices; targets are numbers of choices.

    The rows of a question follow one another, and all questions have the same number.
    """
    scores = outputs[0].float().view(len(targets), -1)
    return functional.cross_entropy(scores, torch.tensor(targets, device=scores.device))


def span_loss(outputs: Sequence[Tensor], targets: Targets, attention_mask: Tensor) -> Tensor:
    """Mean of the start's and the end's cross-entropy over windows; targets are (first, last) tokens.

    Padding has no share in the softmax, or a window's loss would depend on the longest one of its batch.
    """
    places = torch.tensor(targets, device=outputs[0].device)
    padding = attention_mask == 0
    start, end = (
        functional.cross_entropy(o.float().masked_fill(padding, -torch.inf), places[:, i])
        for i, o in enumerate(outputs)
    )
    return (start + end) / 2


def token_loss(outputs: Sequence[Tensor], targets: Targets, attention_mask: Tensor) -> Tensor:
    """Mean over labelled tokens; targets are label indices a token, IGNORED where there is none."""
    logits = outputs[0].float()
    labels = torch.full(logits.shape[:2], IGNORED)
    for i, row in enumerate(targets):
        labels[i, : len(row)] = torch.from_numpy(row)
    # a sum over a guarded count: a batch without any labelled token has loss 0, not NaN
    counted = (labels != IGNORED).sum().clamp(min=1)
    total = functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten().to(logits.device), ignore_index=IGNORED, reduction="sum"
    )
    return total / counted


# Each takes a head's outputs, the units' targets, and the rows' attention mask, int64 [B, S].
LOSSES: dict[str, Callable[[Sequence[Tensor], Targets, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy,
    "mean_squared_error": mean_squared_error,
    "choice": choice_loss,
    "span": span_loss,
    "token": token_loss,
}


def counted(loss: str, targets: Targets) -> int:
    """Over how many targets a loss is a mean: labelled tokens, or units."""
    if loss == "token":
        return sum(int((row != IGNORED).sum()) for row in targets)
    return len(targets)
