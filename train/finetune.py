"""Fine-tune a task's head and the whole encoder (Devlin et al. 2019, sections 3.2 and A.3)."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bertship.artifacts import code_digest, publish, sha256_file, sha256_json, write_manifest
from bertship.config import FinetuneConfig
from bertship.errors import CheckFailed, InputError
from bertship.tasks import Example, Task
from bertship.tasks.ner import IGNORED
from bertship.tokenization import Row, Tokenizer, pad
from train.checkpoint import check_vocabulary, load_model, save_model
from train.evaluate import columns_of, evaluate
from train.heads import HEADS
from train.optim import build_optimizer, clip_and_step, linear_schedule, pick_precision
from train.progress import progress
from train.torch_runner import TorchRunner

Targets = Sequence[Any]
SORTED_BATCHES = 32  # batches among which rows are sorted by length: little padding, still well shuffled
_CODE = (
    "bertship/metrics.py",
    "bertship/tasks/*.py",
    "bertship/tokenization.py",
    *(f"train/{name}.py" for name in ("checkpoint", "evaluate", "finetune", "heads", "model", "optim")),
)
SKIPPED_IN_A_ROW = 10  # non-finite updates after which a run stops


def cross_entropy(outputs: Sequence[Tensor], targets: Targets) -> Tensor:
    """Mean over texts; targets are label indices."""
    return functional.cross_entropy(outputs[0].float(), torch.tensor(targets, device=outputs[0].device))


def mean_squared_error(outputs: Sequence[Tensor], targets: Targets) -> Tensor:
    """Mean over texts; targets are numbers."""
    predicted = outputs[0].float().squeeze(1)
    wanted = torch.tensor(targets, dtype=torch.float32, device=predicted.device)
    assert predicted.shape == wanted.shape  # (N, 1) against (N,) would broadcast in silence
    return functional.mse_loss(predicted, wanted)


def span_loss(outputs: Sequence[Tensor], targets: Targets) -> Tensor:
    """Mean of the start's and the end's cross-entropy over windows; targets are (first, last) tokens."""
    places = torch.tensor(targets, device=outputs[0].device)
    start, end = (functional.cross_entropy(o.float(), places[:, i]) for i, o in enumerate(outputs))
    return (start + end) / 2


def token_loss(outputs: Sequence[Tensor], targets: Targets) -> Tensor:
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


LOSSES: dict[str, Callable[[Sequence[Tensor], Targets], Tensor]] = {
    "cross_entropy": cross_entropy,
    "mean_squared_error": mean_squared_error,
    "span": span_loss,
    "token": token_loss,
}


def fingerprint_of(
    task: Task, init: Path, config: FinetuneConfig, train: Sequence[Example], dev: Sequence[Example]
) -> str:
    """Changes when anything that the run's result depends on does."""
    root = Path(__file__).parents[1]
    weights = {path.name: sha256_file(path) for path in sorted(init.iterdir()) if path.is_file()}
    data = [[dict(e.columns), e.target] for examples in (train, dev) for e in examples]
    code = code_digest(root, _CODE)
    return sha256_json([task.to_json(), weights, config.model_dump(), data, code])


def finetune(
    task: Task,
    init: Path,
    out: Path,
    config: FinetuneConfig,
    train: Sequence[Example],
    dev: Sequence[Example],
    report: Callable[[str], None],
    init_name: str = "",
    data: str | None = None,
) -> dict[str, Any]:
    """Train `task` from the model directory `init`, evaluate on `dev`, publish the run at `out`.

    `init_name` and `data` are what a person called the warm start and the data's folder; export and evaluation look
    for the dev split there again. The run holds `model/` (Hugging Face layout), `task.json`, `metrics.jsonl` and
    `manifest.json`, which is returned.
    Raises InputError for unfit input and CheckFailed when training diverges; then nothing is published.
    """
    torch.manual_seed(config.seed)
    kind = task.behaviour
    if kind.needs_labels and not task.labels:
        raise InputError(f"task {task.name} has no labels")
    tokenizer = Tokenizer.from_dir(init)
    model, loaded = load_model(HEADS[kind.head], init, kind.width(task))
    report(loaded.describe())
    check_vocabulary(tokenizer, model.config, str(init))
    if task.max_tokens > model.config.max_position_embeddings:
        raise InputError(
            f"task {task.name} uses {task.max_tokens} tokens, {init} has positions for "
            f"{model.config.max_position_embeddings}; lower max_tokens or take another INIT"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    fingerprint = fingerprint_of(task, init, config, train, dev)

    rows = kind.encode(task, tokenizer, columns_of(task, train, annotations=True)).rows
    targets = kind.targets(task, rows, train)
    steps = max(config.min_updates, round(len(rows) * config.epochs / config.batch_size))
    optimizer = build_optimizer(model, config.learning_rate, config.weight_decay)
    schedule = linear_schedule(optimizer, round(steps * config.warmup_share), steps)
    precision = pick_precision(config.precision, device)
    report(
        f"{len(train):,} examples, {len(rows):,} rows, {steps:,} updates of {config.batch_size} in "
        f"{'fp32' if precision is None else str(precision).removeprefix('torch.')} on {device.type}"
    )
    with publish(out) as staging:
        started, tokens, padded, skipped = time.monotonic(), 0, 0, 0
        model.train()
        with (
            (staging / "metrics.jsonl").open("w", encoding="utf-8") as log,
            progress("fine-tuning", steps, report) as advance,
        ):
            in_a_row = 0
            for step, chosen in zip(range(1, steps + 1), batches(rows, config), strict=False):
                feeds = pad([rows[i] for i in chosen], tokenizer.pad_id)
                tensors = {name: torch.from_numpy(values).to(device) for name, values in feeds.items()}
                autocast = torch.autocast(device.type, precision) if precision else contextlib.nullcontext()
                with autocast:
                    outputs = model(**tensors)
                loss = LOSSES[kind.loss](outputs, [targets[i] for i in chosen])
                loss.backward()
                norm, applied = clip_and_step(optimizer, schedule, model.parameters(), config.clip_norm)
                skipped, in_a_row = (skipped, 0) if applied else (skipped + 1, in_a_row + 1)
                if in_a_row >= SKIPPED_IN_A_ROW:
                    raise CheckFailed(
                        f"fine-tuning {task.name} diverged: {in_a_row} updates in a row had non-finite gradients at "
                        f"step {step}; lower learning_rate {config.learning_rate:g}"
                    )
                tokens += int(feeds["attention_mask"].sum())
                padded += feeds["attention_mask"].size
                value = loss.item()
                facts = {"step": step, "loss": value, "lr": schedule.get_last_lr()[0], "norm": norm}
                # NaN is not JSON
                log.write(json.dumps({k: v if math.isfinite(v) else None for k, v in facts.items()}) + "\n")
                advance(f"loss {value:.3f}, {tokens / (time.monotonic() - started):,.0f} tokens/s")
        if skipped == steps:
            raise CheckFailed(
                f"fine-tuning {task.name} made no update: every gradient was non-finite; check INIT {init}"
            )
        seconds = time.monotonic() - started
        model.eval()
        metrics, _ = evaluate(task, tokenizer, TorchRunner(model, tokenizer.pad_id), dev)
        (staging / "model").mkdir()
        extra = {"problem_type": "regression"} if not kind.needs_labels and kind.head == "sentence" else {}
        save_model(model, tokenizer, staging / "model", task.labels, **extra)
        (staging / "task.json").write_text(task.to_json(), encoding="utf-8")
        return write_manifest(
            staging,
            "finetune",
            fingerprint=fingerprint,
            config=config.model_dump(),
            inputs={
                "init": init_name or str(init),
                "data": str(Path(data).absolute()) if data else None,
                "train_examples": len(train),
                "dev_examples": len(dev),
            },
            metrics={
                **metrics,
                "train_seconds": round(seconds, 1),
                "tokens_per_second": round(tokens / seconds),
                "padding_share": round(1 - tokens / padded, 4),
                "skipped_updates": skipped,
            },
            task=task.name,
        )


def batches(rows: Sequence[Row], config: FinetuneConfig) -> Iterator[np.ndarray]:
    """Endless batches of row indices, each epoch in a new order; rows of like length share a batch."""
    lengths = np.array([len(row) for row in rows])
    epoch = 0
    while True:
        rng = np.random.default_rng([config.seed, epoch])
        order = rng.permutation(len(rows))
        made = []
        for start in range(0, len(order), config.batch_size * SORTED_BATCHES):
            group = order[start : start + config.batch_size * SORTED_BATCHES]
            group = group[np.argsort(lengths[group], kind="stable")]
            made += [group[i : i + config.batch_size] for i in range(0, len(group), config.batch_size)]
        for i in rng.permutation(len(made)):
            yield made[i]
        epoch += 1
