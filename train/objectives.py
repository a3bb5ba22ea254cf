"""What pre-training asks of the model, its losses, and how well a model does on held-out documents."""

import contextlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from train.batches import Batch, Updates, iterate, where_of
from train.distributed import Processes
from train.heads import IS_NEXT, MaskedLanguageModel, PretrainingModel


@dataclass(frozen=True)
class Objective:
    """`model`: the class with the heads it needs; `causal`: whether a token sees those before it alone."""

    model: type[MaskedLanguageModel]
    causal: bool = False

    @property
    def nsp(self) -> bool:
        """Whether next sentence prediction is part of it."""
        return issubclass(self.model, PretrainingModel)


# The rows of the paper's section 5.1: BERT, "No NSP", "LTR & No NSP".
OBJECTIVES = {
    "mlm+nsp": Objective(PretrainingModel),
    "mlm": Objective(MaskedLanguageModel),
    "ltr": Objective(MaskedLanguageModel, causal=True),
}


def forward(model: nn.Module, batch: Batch, precision: torch.dtype | None) -> tuple[Tensor, ...]:
    """Logits in FP32: [M, V] at the predicted positions and, with NSP, [B, 2]."""
    device_type = batch["input_ids"].device.type
    with torch.autocast(device_type, precision) if precision else contextlib.nullcontext():
        outputs = model(
            batch["input_ids"],
            batch["attention_mask"],
            batch["token_type_ids"],
            batch["predicted_positions"],
            where_of(batch),
        )
    return tuple(output.float() for output in outputs)


def loss_sums(outputs: tuple[Tensor, ...], batch: Batch) -> tuple[Tensor, Tensor]:
    """The sums, in nats, of the language model's loss over predicted tokens and of NSP's over pairs (0 without NSP).

    Sums, for what they are to be divided by are counts over all microbatches and processes: a mean of means would
    depend on how the samples were dealt.
    """
    mlm = F.cross_entropy(outputs[0], batch["mlm_labels"], reduction="sum")
    if len(outputs) == 1:
        return mlm, torch.zeros_like(mlm)
    return mlm, F.cross_entropy(outputs[1], batch["nsp_labels"], reduction="sum")


@torch.no_grad()
def evaluate(
    model: MaskedLanguageModel, updates: Updates, precision: torch.dtype | None, processes: Processes | None = None
) -> dict[str, float]:
    """Losses in nats and accuracies over all `updates` of held-out documents, the same whenever this is called.

    `mlm_loss` and `mlm_accuracy` are means over predicted tokens, `perplexity` is exp(mlm_loss); with NSP,
    `nsp_loss` and `nsp_accuracy` are means over pairs, of which `is_next_share` are IsNext. A small held-out part is
    gone through again with other masks. All `processes` share the work and get the same result.
    """
    processes = processes or Processes(0, 1, next(model.parameters()).device)
    training = model.training
    model.eval()
    totals = torch.zeros(7, dtype=torch.float64, device=processes.device)
    for _, microbatches in iterate(updates, 0, 0, processes.device):
        for batch in microbatches:
            outputs = forward(model, batch, precision)
            labels, pairs = batch["mlm_labels"], batch["nsp_labels"]
            mlm, nsp = loss_sums(outputs, batch)
            right = (outputs[0].argmax(-1) == labels).sum()
            nsp_right = (outputs[-1].argmax(-1) == pairs).sum() if len(outputs) > 1 else torch.zeros_like(right)
            counts = (right, torch.tensor(len(labels)), nsp_right, torch.tensor(len(pairs)), (pairs == IS_NEXT).sum())
            totals += torch.stack([value.double().to(totals.device) for value in (mlm, nsp, *counts)])
    model.train(training)
    mlm_sum, nsp_sum, mlm_right, predicted, pairs_right, pair_count, is_next = processes.sum(*totals.tolist())
    mlm_loss = mlm_sum / max(predicted, 1)
    found = {
        "mlm_loss": mlm_loss,
        "mlm_accuracy": mlm_right / max(predicted, 1),
        "perplexity": math.exp(mlm_loss) if mlm_loss < 700 else math.inf,  # beyond, exp overflows
    }
    if isinstance(model, PretrainingModel):
        pair_count = max(pair_count, 1)
        found |= {
            "nsp_loss": nsp_sum / pair_count,
            "nsp_accuracy": pairs_right / pair_count,
            "is_next_share": is_next / pair_count,
        }
    return found


def describe(metrics: dict[str, float]) -> str:
    """The metrics of `evaluate` in one line."""
    line = (
        f"MLM loss {metrics['mlm_loss']:.3f}, accuracy {metrics['mlm_accuracy']:.1%}, perplexity "
        f"{metrics['perplexity']:,.0f}"
    )
    if "nsp_loss" in metrics:
        line += f"; NSP loss {metrics['nsp_loss']:.3f}, accuracy {metrics['nsp_accuracy']:.1%}"
    return line
