"""Pre-training from scratch: masked LM and next sentence prediction (Devlin et al. 2019, sections 3.1 and A.2)."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bertship import artifacts
from bertship.config import EncoderConfig, PretrainConfig
from bertship.errors import CheckFailed, InputError
from bertship.tokenization import Tokenizer
from train.checkpoint import check_vocabulary, save_model
from train.corpus import Corpus
from train.dataset import PretrainingDataset
from train.heads import IS_NEXT, PretrainingModel
from train.optim import build_optimizer, clip_and_step, linear_schedule, pick_precision
from train.progress import progress, to_stderr

SKIPS_IN_A_ROW = 10  # one bad batch is an accident, ten are a diverged run
_CODE = (
    "bertship/tokenization.py",
    *(f"train/{name}.py" for name in ("checkpoint", "dataset", "heads", "masking", "model", "optim", "pretrain")),
)
_ENCODER_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "predicted_positions")


def fingerprint_of(corpus_dir: Path, model_config: EncoderConfig, config: PretrainConfig) -> str:
    """What `pretrain` would record: the corpus's files, both configurations, code and torch's version. InputError."""
    return artifacts.sha256_json(
        {
            "corpus": artifacts.read_manifest(corpus_dir, "corpus")["files"],
            "model": model_config.model_dump(),
            "pretrain": config.model_dump(),
            "code": artifacts.code_digest(Path(__file__).parents[1], _CODE),
            "torch": artifacts.versions().get("torch"),
        }
    )


def pretrain(
    corpus_dir: Path,
    out_dir: Path,
    model_config: EncoderConfig,
    config: PretrainConfig,
    report: Callable[[str], None] = to_stderr,
) -> dict[str, Any]:
    """Train a model from random weights on a corpus directory, write `out_dir` and return its manifest.

    `out_dir` gets `model/` (Hugging Face layout), `metrics.jsonl` (one object an update) and `manifest.json`, whose
    metrics are those of `evaluate` before and after, and:

        tokens_per_s       real tokens, padding apart, a second of training
        padding_share      of the positions that were computed
        order_hash         SHA-256 of the first epoch's order: equal for equal data, seed and length
        is_next_share      measured over the samples of the training
        skipped_updates    whose gradient was not finite

    On one machine, equal inputs, seed and number of threads give equal losses. Raises InputError where configuration
    and corpus do not fit, CheckFailed when SKIPS_IN_A_ROW updates in a row were not finite; nothing is written then.
    """
    fingerprint = fingerprint_of(corpus_dir, model_config, config)
    if config.sequence_length > model_config.max_position_embeddings:
        raise InputError(
            f"sequence_length {config.sequence_length} is above the model's max_position_embeddings "
            f"{model_config.max_position_embeddings}"
        )
    tokenizer = Tokenizer.from_dir(corpus_dir)
    check_vocabulary(tokenizer, model_config, str(corpus_dir))
    train, heldout = (
        PretrainingDataset(Corpus.open(corpus_dir, split), config.sequence_length, config, tokenizer)
        for split in ("train", "heldout")
    )
    torch.manual_seed(config.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = pick_precision(config.precision, device)
    model = PretrainingModel(model_config).to(device)
    report(
        f"pre-training {sum(p.numel() for p in model.parameters()):,} parameters on {device.type}, "
        f"{str(precision or torch.float32).removeprefix('torch.')}: {config.steps} updates of {config.batch_size} x "
        f"{config.sequence_length} tokens, {config.steps * config.batch_size / len(train):.1f} epochs"
    )
    with artifacts.publish(out_dir) as staging:
        before = evaluate(model, heldout, config, precision)
        report(f"held out before: {_describe(before)}")
        facts = _train(model, train, config, precision, staging / "metrics.jsonl", report)
        after = evaluate(model, heldout, config, precision)
        report(f"held out after:  {_describe(after)}")
        (staging / "model").mkdir()
        save_model(model, tokenizer, staging / "model")
        return artifacts.write_manifest(
            staging,
            "pretrain",
            fingerprint=fingerprint,
            config={"model": model_config.model_dump(), "pretrain": config.model_dump()},
            inputs={"corpus": str(corpus_dir)},
            metrics={"before": before, "after": after, "order_hash": train.order_hash(), **facts},
            device=str(device),
            precision=str(precision or torch.float32).removeprefix("torch."),
        )


@torch.inference_mode()
def evaluate(
    model: PretrainingModel, heldout: PretrainingDataset, config: PretrainConfig, precision: torch.dtype | None
) -> dict[str, float]:
    """Losses in nats and accuracies over `heldout_batches` fixed batches, the same whenever this is called.

    `mlm_loss` and `mlm_accuracy` are means over predicted tokens, `perplexity` is exp(mlm_loss), `nsp_loss` and
    `nsp_accuracy` are means over pairs, of which `is_next_share` are IsNext. A small held-out part is gone through
    again with other masks.
    """
    training = model.training
    model.eval()
    totals: dict[str, float] = dict.fromkeys(
        ("mlm_loss", "mlm_right", "predicted", "nsp_loss", "nsp_right", "pairs"), 0
    )
    is_next = 0
    for number in range(config.heldout_batches):
        batch = _to_torch(heldout.batch_at(number, config.batch_size), model)
        mlm_MV, nsp_B2 = _forward(model, batch, precision)
        totals["mlm_loss"] += F.cross_entropy(mlm_MV, batch["mlm_labels"], reduction="sum").item()
        totals["mlm_right"] += (mlm_MV.argmax(-1) == batch["mlm_labels"]).sum().item()
        totals["predicted"] += len(batch["mlm_labels"])
        totals["nsp_loss"] += F.cross_entropy(nsp_B2, batch["nsp_labels"], reduction="sum").item()
        totals["nsp_right"] += (nsp_B2.argmax(-1) == batch["nsp_labels"]).sum().item()
        totals["pairs"] += len(batch["nsp_labels"])
        is_next += int((batch["nsp_labels"] == IS_NEXT).sum())
    model.train(training)
    predicted, pairs = max(totals["predicted"], 1), max(totals["pairs"], 1)
    mlm_loss = totals["mlm_loss"] / predicted
    return {
        "mlm_loss": mlm_loss,
        "mlm_accuracy": totals["mlm_right"] / predicted,
        "perplexity": math.exp(mlm_loss) if mlm_loss < 700 else math.inf,  # beyond, exp overflows
        "nsp_loss": totals["nsp_loss"] / pairs,
        "nsp_accuracy": totals["nsp_right"] / pairs,
        "is_next_share": is_next / pairs,
    }


def losses(mlm_MV: Tensor, nsp_B2: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Masked LM: the sum over predicted tokens by their count, 0 where there is none; NSP: the mean over pairs."""
    mlm = F.cross_entropy(mlm_MV, batch["mlm_labels"], reduction="sum") / max(len(batch["mlm_labels"]), 1)
    return mlm, F.cross_entropy(nsp_B2, batch["nsp_labels"])


@dataclass
class _Counts:
    real: int = 0  # tokens
    computed: int = 0  # positions, padding included
    is_next: int = 0
    skipped: int = 0  # updates
    in_a_row: int = 0  # of them, up to now
    started: float = field(default_factory=time.perf_counter)

    def rate(self) -> float:
        return self.real / max(time.perf_counter() - self.started, 1e-9)


def _train(
    model: PretrainingModel,
    dataset: PretrainingDataset,
    config: PretrainConfig,
    precision: torch.dtype | None,
    log: Path,
    report: Callable[[str], None],
) -> dict[str, Any]:
    optimizer = build_optimizer(model, config.learning_rate, config.weight_decay, config.adam_betas, config.adam_eps)
    scheduler = linear_schedule(optimizer, config.warmup_steps, config.steps)
    counts = _Counts()
    model.train()
    with log.open("w", encoding="utf-8") as lines, progress("pre-training", config.steps, report) as advance:
        for step, arrays in enumerate(_batches(dataset, config)):
            counts.real += int(arrays["attention_mask"].sum())
            counts.computed += arrays["attention_mask"].size
            counts.is_next += int((arrays["nsp_labels"] == IS_NEXT).sum())
            batch = _to_torch(arrays, model)
            learning_rate = scheduler.get_last_lr()[0]
            mlm, nsp = losses(*_forward(model, batch, precision), batch)
            (mlm + nsp).backward()
            norm, applied = clip_and_step(optimizer, scheduler, model.parameters(), config.clip_norm)
            facts = {
                "step": step + 1,
                "loss": mlm.item() + nsp.item(),
                "mlm_loss": mlm.item(),
                "nsp_loss": nsp.item(),
                "lr": learning_rate,
                "grad_norm": norm,
                "tokens_per_s": round(counts.rate()),
            }
            # NaN and infinity are no JSON
            finite = {name: value if math.isfinite(value) else None for name, value in facts.items()}
            lines.write(json.dumps(finite) + "\n")
            counts.in_a_row = 0 if applied else counts.in_a_row + 1
            counts.skipped += not applied
            if counts.in_a_row == SKIPS_IN_A_ROW:
                raise CheckFailed(_diagnosis(model, facts))
            advance(f"loss {facts['loss']:.3f}, {counts.rate():,.0f} tokens/s")
    return {
        "tokens_per_s": counts.rate(),
        "padding_share": 1 - counts.real / counts.computed,
        "is_next_share": counts.is_next / (config.steps * config.batch_size),
        "skipped_updates": counts.skipped,
    }


def _batches(dataset: PretrainingDataset, config: PretrainConfig) -> Iterator[dict[str, np.ndarray]]:
    for step in range(config.steps):
        yield dataset.batch_at(step, config.batch_size)


def _forward(model: PretrainingModel, batch: dict[str, Tensor], precision: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Logits in FP32: [M, V] at the predicted positions and [B, 2]."""
    device_type = batch["input_ids"].device.type
    with torch.autocast(device_type, precision) if precision else contextlib.nullcontext():
        mlm_MV, nsp_B2 = model(*(batch[name] for name in _ENCODER_INPUTS))
    return mlm_MV.float(), nsp_B2.float()


def _to_torch(batch: dict[str, np.ndarray], model: PretrainingModel) -> dict[str, Tensor]:
    device = next(model.parameters()).device
    return {name: torch.from_numpy(array).to(device) for name, array in batch.items()}


def _diagnosis(model: PretrainingModel, facts: dict[str, Any]) -> str:
    broken = [name for name, weight in model.named_parameters() if not bool(torch.isfinite(weight).all())]
    where = f"weights are not finite, first {broken[0]}" if broken else "all weights are still finite"
    return (
        f"pre-training stopped at update {facts['step']}: {SKIPS_IN_A_ROW} gradients in a row were not finite "
        f"(masked LM loss {facts['mlm_loss']:.4g}, NSP loss {facts['nsp_loss']:.4g}, learning rate {facts['lr']:.3g}; "
        f'{where}); lower learning_rate, lengthen warmup_steps, or take precision = "fp32"'
    )


def _describe(metrics: dict[str, float]) -> str:
    return (
        f"MLM loss {metrics['mlm_loss']:.3f}, accuracy {metrics['mlm_accuracy']:.1%}, perplexity "
        f"{metrics['perplexity']:,.0f}; NSP loss {metrics['nsp_loss']:.3f}, accuracy {metrics['nsp_accuracy']:.1%}"
    )
