"""One optimizer update: the optimizer, the schedule of the learning rate, the number format, the clipped step."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bertship.errors import InputError
from bertship.processor import cpu_field
from train.bert_adam import BertAdam


def build_optimizer(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    kind: str = "adamw",
    bias_correction: bool = True,
    sharded: bool = False,
) -> Optimizer:
    """AdamW over the parameters of `model` that train (Loshchilov and Hutter 2019; Devlin et al. 2019, section A.2).

    The first group decays, the second, biases and LayerNorm, does not. Bias correction is on: without it, as in the
    paper, small data sets diverge (Mosbach et al. 2021, section 5). `kind` "lamb" scales each tensor's update to the
    tensor's norm, for batches of many thousand sequences (You et al. 2020). `sharded`: each process of a running
    process group keeps the moments of its share of the parameters alone (Rajbhandari et al. 2020, stage 1).
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise InputError("nothing to train: every parameter of the model is frozen")
    if kind not in ("adamw", "lamb"):
        raise InputError(f"unknown optimizer {kind!r}; it is adamw or lamb")
    # Biases and LayerNorm's two vectors are all that has one axis; matrices and embeddings have two.
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]] if sharded else groups
    settings: dict[str, Any] = {"lr": learning_rate, "betas": betas, "eps": eps}
    made_by: type[Optimizer] = BertAdam
    if kind == "lamb":
        settings |= {"bias_correction": bias_correction, "trust_ratio": True}
    elif bias_correction:
        made_by = AdamW
        settings["fused"] = all(parameter.device.type in ("cpu", "cuda") for parameter in trained)
    if sharded:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # scripts optimizers when it is imported

        return ZeroRedundancyOptimizer(groups, optimizer_class=made_by, **settings)
    return made_by(groups, **settings)


def linear_schedule(optimizer: Optimizer, warmup_steps: int, total_steps: int) -> LambdaLR:
    """Linear from 0 at update 0 to the peak at update `warmup_steps`, then linear to 0 at `total_steps`.

    Raises InputError where the warm-up is longer than the training.
    """
    return _schedule(optimizer, warmup_steps, total_steps, total_steps - warmup_steps)


def stable_schedule(optimizer: Optimizer, warmup_steps: int, total_steps: int, decay_steps: int) -> LambdaLR:
    """As `linear_schedule`, but the peak is held until `decay_steps` updates before the end (Hu et al. 2024, WSD).

    Raises InputError where warm-up and decay are longer than the training.
    """
    return _schedule(optimizer, warmup_steps, total_steps, decay_steps)


SCHEDULES: dict[str, Callable[[Optimizer, int, int, float], LambdaLR]] = {
    "linear": lambda optimizer, warmup, total, share: linear_schedule(optimizer, warmup, total),
    "wsd": lambda optimizer, warmup, total, share: stable_schedule(optimizer, warmup, total, round(share * total)),
}


def _schedule(optimizer: Optimizer, warmup_steps: int, total_steps: int, decay_steps: int) -> LambdaLR:
    if not 0 <= warmup_steps <= total_steps or total_steps < 1:
        raise InputError(
            f"a warm-up of {warmup_steps} updates does not fit into a training of {total_steps}; set warmup_steps (of "
            "the second phase, long_warmup_steps) to fewer"
        )
    if warmup_steps + decay_steps > total_steps:
        raise InputError(
            f"a warm-up of {warmup_steps} and a decay of {decay_steps} updates do not fit into a training of "
            f"{total_steps}; shorten one of them"
        )

    def share_of_peak(step: int) -> float:
        if step < warmup_steps:
            return step / warmup_steps
        return min(1.0, max(0.0, (total_steps - step) / max(1, decay_steps)))

    return LambdaLR(optimizer, share_of_peak)


def schedule_state(schedule: LambdaLR) -> dict[str, Any]:
    """How far a schedule is, as JSON, for `restore_schedule`."""
    state = {name: value for name, value in schedule.state_dict().items() if name != "lr_lambdas"}
    return state | {"lr_lambdas": [None for _ in schedule.optimizer.param_groups]}


def restore_schedule(schedule: LambdaLR, state: dict[str, Any]) -> None:
    """Go on where `schedule_state` was asked, the optimizer's learning rates included."""
    schedule.load_state_dict(state)
    for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate


def pick_precision(name: str, device: torch.device | str) -> torch.dtype | None:
    """The type for `torch.autocast` on `device`, None for FP32 throughout.

    `auto` is bf16 where the hardware multiplies it natively, else FP32: emulated bf16 is slower than FP32. `bf16` is
    taken at its word. Raises InputError for another name.
    """
    if name not in ("auto", "fp32", "bf16"):
        raise InputError(f"unknown precision {name!r}; it is auto, fp32 or bf16")
    if name == "bf16" or (name == "auto" and _has_native_bf16(torch.device(device).type)):
        return torch.bfloat16
    return None


def clip_and_step(
    optimizer: Optimizer, scheduler: LambdaLR, parameters: Iterable[Tensor], clip_norm: float
) -> tuple[float, bool]:
    """Scale the gradient to a norm of at most `clip_norm`, update, advance the schedule, and clear the gradient.

    Returns the norm before clipping and whether the update was made. A norm that is not finite skips the update and
    the schedule, so that one bad batch costs itself alone; its gradient is cleared too.
    """
    held = [parameter for parameter in parameters if parameter.grad is not None]
    total = nn.utils.get_total_norm([parameter.grad for parameter in held if parameter.grad is not None])
    norm = float(total)
    applied = math.isfinite(norm)
    if applied:
        if norm > clip_norm:  # most gradients late in a training need no pass over them
            nn.utils.clip_grads_with_norm_(held, clip_norm, total)
        optimizer.step()
        scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, applied


def _has_native_bf16(device_type: str) -> bool:
    if device_type == "cuda":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type == "cpu":
        return not _cpu_features().isdisjoint({"avx512_bf16", "amx_bf16"})
    return False


def _cpu_features() -> set[str]:
    """Names of the instruction sets, as Linux spells them, from torch or, where it is too old to say, the kernel."""
    if hasattr(torch.cpu, "get_capabilities"):
        return {name for name, present in torch.cpu.get_capabilities().items() if present is True}
    return set(cpu_field("flags").split())
