"""A model with its optimizer: one call an update, whatever the number of microbatches and processes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from bertship.config import PretrainConfig
from train.batches import Batch, Phase
from train.distributed import Processes
from train.dropout import update_seed
from train.heads import MaskedLanguageModel
from train.objectives import forward, loss_sums
from train.optim import SCHEDULES, build_optimizer, clip_and_step, restore_schedule, schedule_state
from train.snapshots import is_sharded


@dataclass(frozen=True)
class Outcome:
    """An update: losses in nats (of the language model a predicted token, of NSP a pair), the gradient's norm before
    clipping, the learning rate it was made with, and whether it was made."""

    mlm_loss: float
    nsp_loss: float
    grad_norm: float
    lr: float
    applied: bool

    @property
    def loss(self) -> float:
        return self.mlm_loss + self.nsp_loss


@dataclass
class Progress:
    """How far a training is and what it has counted, over all processes; its checkpoints save it."""

    update: int = 0  # done, over all phases
    phase: int = 0
    phase_update: int = 0  # done in the phase
    skipped: int = 0  # updates
    in_a_row: int = 0  # of them, up to now
    pairs: float = 0
    tokens: float = 0  # real ones
    computed: float = 0  # positions, padding included
    is_next: float = 0  # pairs
    flops: float = 0
    seconds: float = 0  # of updates alone

    def add(self, sums: list[float], seconds: float) -> None:
        """One update more; `sums`: pairs, tokens, positions computed, IsNext pairs and operations."""
        self.update, self.phase_update = self.update + 1, self.phase_update + 1
        for name, value in zip(("pairs", "tokens", "computed", "is_next", "flops"), sums, strict=True):
            setattr(self, name, getattr(self, name) + value)
        self.seconds += seconds


class Learner:
    """Trains `model` in place. `precision`: of autocast, None for FP32 throughout."""

    def __init__(
        self, model: MaskedLanguageModel, config: PretrainConfig, processes: Processes, precision: torch.dtype | None
    ) -> None:
        self.model, self.config, self.processes, self.precision = model, config, processes, precision
        model.encoder.checkpoint_activations = config.checkpoint_activations
        if config.compile == "on" or (config.compile == "auto" and processes.device.type == "cuda"):
            for part in (*model.encoder.blocks, model.mlm):
                part.compile()
        self.shared = processes.share(model)
        self.optimizer = build_optimizer(
            model,
            config.learning_rate,
            config.weight_decay,
            config.adam_betas,
            config.adam_eps,
            config.optimizer,
            config.bias_correction,
            config.sharded_optimizer and processes.count > 1,
        )
        self.schedule: LambdaLR

    def begin(self, phase: Phase, state: dict[str, Any] | None = None) -> None:
        """Start the schedule of a phase, or go on with its `state`; everything else stays as it is.

        Raises InputError where warm-up and decay do not fit into the phase.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = phase.learning_rate
        self.schedule = SCHEDULES[self.config.schedule](
            self.optimizer, phase.warmup_steps, phase.steps, self.config.decay_share
        )
        if state is not None:
            restore_schedule(self.schedule, state)

    def schedule_state(self) -> dict[str, Any]:
        """What `begin` takes, as JSON."""
        return schedule_state(self.schedule)

    def update(self, number: int, microbatches: list[Batch], predicted: float, pairs: float) -> Outcome:
        """One update, the `number`-th of the training: from it comes the seed of dropout, so that nothing depends on
        what ran before.

        `predicted`, `pairs`: counts over all microbatches of all processes, which make the loss a mean over tokens
        and over pairs, however they were dealt. A gradient that is not finite is cleared, and nothing changes.
        """
        torch.manual_seed(update_seed(self.config.seed, number, self.processes.rank))
        mlm_sum, nsp_sum = self.backward(microbatches, predicted, pairs)
        lr = float(self.schedule.get_last_lr()[0])
        norm, applied = clip_and_step(self.optimizer, self.schedule, self.model.parameters(), self.config.clip_norm)
        mlm_total, nsp_total = self.processes.sum(mlm_sum.item(), nsp_sum.item())
        return Outcome(mlm_total / max(predicted, 1), nsp_total / max(pairs, 1), norm, lr, applied)

    def backward(self, microbatches: list[Batch], predicted: float, pairs: float) -> tuple[Tensor, Tensor]:
        """Add the gradient of an update's loss, over all processes; the sums of this process's losses, in nats."""
        mlm_sum = nsp_sum = torch.zeros((), device=self.processes.device)
        scales = [self.processes.count / max(count, 1) for count in (predicted, pairs)]  # gradients are averaged
        for place, batch in enumerate(microbatches):
            if isinstance(self.shared, DistributedDataParallel):
                self.shared.require_backward_grad_sync = place == len(microbatches) - 1
            mlm, nsp = loss_sums(forward(self.shared, batch, self.precision), batch)
            (mlm * scales[0] + nsp * scales[1]).backward()
            mlm_sum, nsp_sum = mlm_sum + mlm.detach(), nsp_sum + nsp.detach()
        return mlm_sum, nsp_sum

    def consolidate(self) -> None:
        """Gather a sharded optimizer's state on the main process, before a checkpoint; all processes call it."""
        if is_sharded(self.optimizer):
            self.optimizer.consolidate_state_dict(to=0)  # type: ignore[attr-defined]
