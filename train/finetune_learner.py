"""A task's model with its optimizer: one call an update, whatever the number of parts and processes."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bertship.config import FinetuneConfig
from bertship.tasks import Task
from bertship.tokenization import pad
from train.bert_adam import BertAdam
from train.distributed import Processes
from train.dropout import update_seed
from train.features import CachedFeatures, FeatureModel
from train.finetune_batches import Units
from train.heads import HeadedModel
from train.losses import LOSSES, counted
from train.optim import build_optimizer, clip_and_step, linear_schedule, pick_precision
from train.used_pieces import UsedPieces
from train.value_scale import ValueScale, value_head


@dataclass(frozen=True)
class Outcome:
    """An update over all processes: its loss, the gradient's norm before clipping, the learning rate it was made with,
    whether it was made, and the tokens and positions (padding included) that were computed."""

    loss: float
    norm: float
    lr: float
    applied: bool
    tokens: int
    computed: int


class FinetuneLearner:
    """Trains `model` in place for `steps` updates; with `cache`, its head alone.

    While it trains, the model has word embeddings of the training's pieces alone (`train.used_pieces`), and answers
    a regression in units of its values' spread (`train.value_scale`): `whole` and `training` go from one form to the
    other.
    """

    def __init__(
        self,
        task: Task,
        model: HeadedModel,
        units: Units,
        config: FinetuneConfig,
        processes: Processes,
        pad_id: int,
        cache: CachedFeatures | None = None,
    ) -> None:
        self.model, self.units, self.config, self.processes = model, units, config, processes
        self.loss, self.pad_id, self.cache = task.behaviour.loss, pad_id, cache
        self.asked = max(1, round(len(units.units) * config.epochs / config.batch_size))  # updates that epochs make
        self.steps = max(config.min_updates, self.asked)
        self.precision = pick_precision(config.precision, processes.device)
        self.pieces = UsedPieces(model.encoder, units.rows, pad_id) if cache is None else None
        self.values = ValueScale(value_head(model), units.targets) if self.loss == "mean_squared_error" else None
        self.training()
        self.optimizer = build_finetune_optimizer(model, config)
        self.schedule = linear_schedule(self.optimizer, round(self.steps * config.warmup_share), self.steps)
        self.shared = processes.share(_HeadAlone(model) if isinstance(model, FeatureModel) else model)

    def training(self) -> None:
        """The model as it trains."""
        for form in self._forms():
            form.shrink()
        self.model.train()

    def whole(self) -> None:
        """The model as it is judged and saved."""
        for form in self._forms():
            form.restore()
        self.model.eval()

    def _forms(self) -> list[UsedPieces | ValueScale]:
        return [form for form in (self.pieces, self.values) if form is not None]

    def update(self, number: int, chosen: Sequence[int]) -> Outcome:
        """One update, the `number`-th of the training, on the chosen units, which the processes share.

        A gradient that is not finite is cleared, and nothing changes.
        """
        torch.manual_seed(update_seed(self.config.seed, number, self.processes.rank))
        value, tokens, computed = self.backward(chosen)
        lr = float(self.schedule.get_last_lr()[0])
        norm, applied = clip_and_step(self.optimizer, self.schedule, self.model.parameters(), self.config.clip_norm)
        loss, all_tokens, all_computed = self.processes.sum(value, tokens, computed)
        return Outcome(loss, norm, lr, applied, int(all_tokens), int(all_computed))

    def backward(self, chosen: Sequence[int]) -> tuple[float, int, int]:
        """Add the gradient of the update's loss over all processes; this one's share of the loss, tokens, positions.

        The loss is a mean over all targets of `chosen`, however many parts and processes it is computed in.
        """
        count, rank = self.processes.count, self.processes.rank
        total = max(counted(self.loss, [self.units.targets[i] for i in chosen]), 1)
        mine = np.asarray(chosen)[rank::count]
        # a process without a unit of its own takes part with a gradient of 0, or the others would wait for ever
        parts = (
            np.array_split(mine, min(self.config.accumulation, len(mine))) if len(mine) else [np.asarray(chosen)[:1]]
        )
        value, tokens, computed = 0.0, 0, 0
        for place, part in enumerate(parts):
            if isinstance(self.shared, DistributedDataParallel):
                self.shared.require_backward_grad_sync = place == len(parts) - 1
            targets = [self.units.targets[i] for i in part]
            outputs, mask = self._forward([row for unit in part for row in self.units.units[unit]])
            share = counted(self.loss, targets) / total if len(mine) else 0.0
            if self.values is not None:
                targets = self.values.scaled(targets)
            loss = LOSSES[self.loss](outputs, targets, mask) * share
            (loss * count).backward()  # gradients are averaged over the processes
            if len(mine):
                value, tokens, computed = value + loss.item(), tokens + int(mask.sum()), computed + mask.numel()
        return value, tokens, computed

    def _forward(self, rows: Sequence[int]) -> tuple[Sequence[Tensor], Tensor]:
        """The head's outputs for these rows, and their attention mask."""
        device = self.processes.device
        autocast = torch.autocast(device.type, self.precision) if self.precision else contextlib.nullcontext()
        if self.cache is not None:
            features, mask = (tensor.to(device) for tensor in self.cache.batch(rows))
            with autocast:
                return self.shared(features, mask), mask
        feeds = pad([self.units.rows[i] for i in rows], self.pad_id)
        tensors = {name: torch.from_numpy(values).to(device) for name, values in feeds.items()}
        if self.pieces is not None:
            tensors["input_ids"] = self.pieces.places(tensors["input_ids"])
        with autocast:
            return self.shared(**tensors), tensors["attention_mask"]


class _HeadAlone(nn.Module):
    """What trains on cached features, as a module of its own whose gradients can be shared."""

    def __init__(self, model: FeatureModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        return self.model.head(features, attention_mask)


def build_finetune_optimizer(model: HeadedModel, config: FinetuneConfig) -> torch.optim.Optimizer:
    """AdamW, or without bias correction the paper's Adam."""
    optimizer: torch.optim.Optimizer = build_optimizer(model, config.learning_rate, config.weight_decay)
    if config.bias_correction:
        return optimizer
    groups: list[dict[str, Any]] = [
        {name: group[name] for name in ("params", "weight_decay")} for group in optimizer.param_groups
    ]
    return BertAdam(groups, lr=config.learning_rate)
