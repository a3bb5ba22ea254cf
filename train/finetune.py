"""Fine-tune a head with its encoder (Devlin et al. 2019, sections 3.2 and A.3), or on a frozen one (section 5.3)."""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from bertship.tasks.base import Answers
from bertship.tasks.ner import IGNORED
from bertship.tokenization import Row, Tokenizer, pad
from train.bert_adam import BertAdam
from train.checkpoint import LoadReport, check_vocabulary, labels_of, load_model, save_model
from train.evaluate import answer, columns_of, evaluate, served
from train.features import FeatureModel, cache_features, model_class
from train.finetune_report import write_report
from train.heads import HeadedModel
from train.model import init_weights
from train.optim import build_optimizer, clip_and_step, linear_schedule, pick_precision
from train.progress import progress
from train.torch_runner import TorchRunner
from train.used_pieces import UsedPieces

Report = Callable[[str], None]
Targets = Sequence[Any]
SORTED_BATCHES = 32  # batches among which rows are sorted by length: little padding, still well shuffled
_CODE = (
    "bertship/metrics.py",
    "bertship/tasks/*.py",
    "bertship/tokenization.py",
    "train/bert_adam.py",
    *(
        f"train/{name}.py"
        for name in ("checkpoint", "evaluate", "features", "finetune", "heads", "model", "optim", "used_pieces")
    ),
)
SKIPPED_IN_A_ROW = 10  # non-finite updates after which a run stops


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


def fingerprint_of(
    task: Task, init: Path, config: FinetuneConfig, train: Sequence[Example], dev: Sequence[Example]
) -> str:
    """Changes when anything that the run's result depends on does."""
    root = Path(__file__).parents[1]
    weights = {path.name: sha256_file(path) for path in sorted(init.iterdir()) if path.is_file()}
    data = [[dict(e.columns), e.target] for examples in (train, dev) for e in examples]
    code = code_digest(root, _CODE)
    return sha256_json([task.to_json(), weights, config.model_dump(), data, code])


@dataclass
class _Best:
    """The best evaluation so far, and the weights that it judged."""

    step: int
    task: Task
    metrics: dict[str, float]
    answers: Answers
    weights: dict[str, Tensor]


@dataclass
class _Data:
    """Training rows, the units that a loss sees together, and each unit's target."""

    rows: list[Row]
    units: list[list[int]]
    targets: list[Any]

    def lengths(self) -> list[int]:
        return [max(len(self.rows[i]) for i in unit) for unit in self.units]


class _Run:
    """One training: the model, its optimizer, and what was counted on the way."""

    def __init__(
        self,
        task: Task,
        init: Path,
        out: Path,
        config: FinetuneConfig,
        train: Sequence[Example],
        report: Report,
    ) -> None:
        self.task, self.config, self.report = task, config, report
        self.kind = task.behaviour
        torch.manual_seed(config.seed)
        self.tokenizer = Tokenizer.from_dir(init)
        self.model, loaded = load_model(model_class(task), init, self.kind.width(task))
        report(loaded.describe())
        check_vocabulary(self.tokenizer, self.model.config, str(init))
        check_casing(self.tokenizer, str(init))
        if task.max_tokens > self.model.config.max_position_embeddings:
            raise InputError(
                f"task {task.name} uses {task.max_tokens} tokens, {init} has positions for "
                f"{self.model.config.max_position_embeddings}; lower max_tokens or take another INIT"
            )
        _order_labels(self.model, loaded, task, init, report)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model.to(self.device)
        self.runner = TorchRunner(self.model, self.tokenizer.pad_id)

        rows = self.kind.encode(task, self.tokenizer, columns_of(task, train, annotations=True)).rows
        self.data = _Data(rows, self.kind.units(rows), self.kind.targets(task, rows, train))
        assert len(self.data.units) == len(self.data.targets)
        self.cache = self.pieces = None
        if isinstance(self.model, FeatureModel):
            folder = out.parent / ".features"
            self.cache = cache_features(self.model, rows, self.tokenizer.pad_id, folder, init, report)
        else:
            self.pieces = UsedPieces(self.model.encoder, rows, self.tokenizer.pad_id)
            self.pieces.shrink()
        self.steps = max(config.min_updates, round(len(self.data.units) * config.epochs / config.batch_size))
        self.optimizer = _optimizer(self.model, config)
        self.schedule = linear_schedule(self.optimizer, round(self.steps * config.warmup_share), self.steps)
        self.precision = pick_precision(config.precision, self.device)
        self.tokens = self.padded = self.skipped = 0
        self.seconds = 0.0
        self.history: list[dict[str, Any]] = []
        report(
            f"{len(train):,} examples, {len(rows):,} rows, {self.steps:,} updates of {config.batch_size} in "
            f"{'fp32' if self.precision is None else str(self.precision).removeprefix('torch.')} on {self.device.type}"
        )

    def train(self, dev: Sequence[Example], log: Path) -> _Best:
        """All updates, the dev split evaluated on the way; returns the best. `log` gets a line an update.

        Raises CheckFailed when training diverges.
        """
        config = self.config
        stops = {round(self.steps * (k + 1) / config.evaluations) for k in range(config.evaluations)} | {self.steps}
        best: _Best | None = None
        in_a_row = worse = 0
        self.model.train()
        with log.open("w", encoding="utf-8") as file, progress("fine-tuning", self.steps, self.report) as advance:
            started = time.monotonic()
            for step, chosen in zip(range(1, self.steps + 1), batches(self.data.lengths(), config), strict=False):
                loss, norm, applied = self.update(chosen.tolist())
                self.skipped, in_a_row = (self.skipped, 0) if applied else (self.skipped + 1, in_a_row + 1)
                if in_a_row >= SKIPPED_IN_A_ROW:
                    raise CheckFailed(
                        f"fine-tuning {self.task.name} diverged: {in_a_row} updates in a row had non-finite gradients "
                        f"at step {step}; lower learning_rate {config.learning_rate:g}"
                    )
                rate = float(self.schedule.get_last_lr()[0])
                facts = {"step": step, "loss": _number(loss), "lr": rate, "norm": _number(norm)}
                self.history.append(facts)
                file.write(json.dumps(facts) + "\n")
                seconds = self.seconds + time.monotonic() - started
                advance(f"loss {loss:.3f}, {self.tokens / seconds:,.0f} tokens/s")
                if step in stops:
                    self.seconds += time.monotonic() - started
                    if self.skipped == step == self.steps:
                        break
                    found = self.judge(step, dev)
                    file.write(json.dumps({"step": step, "dev": found.metrics}) + "\n")
                    self.history.append({"step": step, "dev": found.metrics})
                    metric = self.task.metrics[0]
                    worse += 1
                    if best is None or found.metrics[metric] > best.metrics[metric]:
                        best, worse = found, 0
                    if config.evaluations > 1:
                        self.report(
                            f"step {step}: {metric} {found.metrics[metric]:.4f}, best {best.metrics[metric]:.4f}"
                        )
                    if config.patience and worse >= config.patience:
                        self.report(f"no better {metric} in {worse} evaluations: stopping at step {step}")
                        break
                    if step < self.steps:
                        self.resume()
                    started = time.monotonic()
        if best is None:
            raise CheckFailed(f"fine-tuning {self.task.name} made no update: every gradient was non-finite; check INIT")
        if best.weights:
            self.model.load_state_dict(best.weights)
        self.model.eval()
        return best

    def resume(self) -> None:
        """Back to training after `judge`."""
        if self.pieces is not None:
            self.pieces.shrink()
        self.model.train()

    def update(self, chosen: Sequence[int]) -> tuple[float, float, bool]:
        """One update on the chosen units: loss, the gradient's norm before clipping, and whether it was applied.

        The loss is a mean over all targets of the batch, however many parts it is computed in.
        """
        total = counted(self.kind.loss, [self.data.targets[i] for i in chosen])
        value = 0.0
        for part in np.array_split(np.asarray(chosen), min(self.config.accumulation, len(chosen))):
            targets = [self.data.targets[i] for i in part]
            outputs, mask = self.forward([i for unit in part for i in self.data.units[unit]])
            share = counted(self.kind.loss, targets) / max(total, 1)
            loss = LOSSES[self.kind.loss](outputs, targets, mask) * share
            loss.backward()
            value += loss.item()
        norm, applied = clip_and_step(self.optimizer, self.schedule, self.model.parameters(), self.config.clip_norm)
        return value, norm, applied

    def forward(self, rows: Sequence[int]) -> tuple[Sequence[Tensor], Tensor]:
        """The head's outputs for these rows, and their attention mask."""
        autocast = torch.autocast(self.device.type, self.precision) if self.precision else contextlib.nullcontext()
        if self.cache is not None and isinstance(self.model, FeatureModel):
            features, mask = (tensor.to(self.device) for tensor in self.cache.batch(rows))
            self._count(mask.numpy(force=True))
            with autocast:
                return self.model.head(features, mask), mask
        feeds = pad([self.data.rows[i] for i in rows], self.tokenizer.pad_id)
        self._count(feeds["attention_mask"])
        tensors = {name: torch.from_numpy(values).to(self.device) for name, values in feeds.items()}
        if self.pieces is not None:
            tensors["input_ids"] = self.pieces.places(tensors["input_ids"])
        with autocast:
            return self.model(**tensors), tensors["attention_mask"]

    def _count(self, mask: np.ndarray) -> None:
        self.tokens += int(mask.sum())
        self.padded += mask.size

    def judge(self, step: int, dev: Sequence[Example]) -> _Best:
        """The dev split under the model as it is, and what is chosen on it; the model is then whole, to be saved."""
        if self.pieces is not None:
            self.pieces.restore()
        self.model.eval()
        columns = columns_of(self.task, dev, annotations=True)
        answers = answer(self.task, self.tokenizer, self.runner, columns, self.report, "evaluating")
        task, answers = self.kind.tune(self.task, dev, answers)
        metrics = self.kind.score(task, dev, answers)
        weights = {}
        if self.config.evaluations > 1:
            weights = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        return _Best(step, task, metrics, answers, weights)


def finetune(
    task: Task,
    init: Path,
    out: Path,
    config: FinetuneConfig,
    train: Sequence[Example],
    dev: Sequence[Example],
    report: Report,
    init_name: str = "",
    data: str | None = None,
    more: Mapping[str, Sequence[Example]] | None = None,
    init_task: str = "",
) -> dict[str, Any]:
    """Train `task` from the model directory `init`, evaluate on `dev`, publish the run at `out`.

    `init_name` and `data` are what a person called the warm start and the data's folder; export and evaluation look
    for the dev split there again. `more`: further labelled splits to evaluate, by the prefix of their metrics.
    `init_task`: the task that the warm start was fine-tuned on before. The run holds `model/` (Hugging Face layout),
    `task.json`, `metrics.jsonl`, `report.html` and `manifest.json`, which is returned.
    Raises InputError for unfit input and CheckFailed when training diverges; then nothing is published.
    """
    if task.behaviour.needs_labels and not task.labels:
        raise InputError(f"task {task.name} has no labels")
    task = with_features(task, config)
    fingerprint = fingerprint_of(task, init, config, train, dev)
    run = _Run(task, init, out, config, train, report)
    with publish(out) as staging:
        best = run.train(dev, staging / "metrics.jsonl")
        task = best.task
        metrics = best.metrics | served(task, run.tokenizer, run.runner, dev, report)
        for prefix, examples in (more or {}).items():
            found, _ = evaluate(task, run.tokenizer, run.runner, examples, report)
            metrics |= {f"{prefix}_{name}": value for name, value in found.items()}
        degenerate = task.behaviour.degenerate(task, dev, best.answers)
        if degenerate:
            report(f"WARNING: a degenerate run (seed {config.seed}): {degenerate}; try another SEED or learning rate")
        (staging / "model").mkdir()
        save_model(run.model, run.tokenizer, staging / "model", task.labels, **task.behaviour.config)
        (staging / "task.json").write_text(task.to_json(), encoding="utf-8")
        facts = {
            "init": init_name or str(init),
            "init_task": init_task,
            "data": _place(data),
            "train_examples": len(train),
            "dev_examples": len(dev),
        }
        measured = {
            **metrics,
            "best_step": best.step,
            "train_seconds": round(run.seconds, 1),
            "tokens_per_second": round(run.tokens / run.seconds) if run.seconds else 0,
            "padding_share": round(1 - run.tokens / run.padded, 4),
            "skipped_updates": run.skipped,
        }
        write_report(
            staging / "report.html", task, config, dev, best.answers, metrics, facts, measured, run.history, degenerate
        )
        return write_manifest(
            staging,
            "finetune",
            fingerprint=fingerprint,
            config=config.model_dump(),
            inputs=facts,
            metrics=measured,
            task=task.name,
            degenerate=degenerate,
        )


def with_features(task: Task, config: FinetuneConfig) -> Task:
    """The task with the head that `config` asks for."""
    return dataclasses.replace(task, layers=config.layers, top=config.head)


def _number(value: float) -> float | None:
    """NaN and infinity are not JSON."""
    return value if math.isfinite(value) else None


def _place(data: str | None) -> str | None:
    """The data's folder from anywhere; a name on the hub stays one."""
    return str(Path(data).absolute()) if data and Path(data).exists() else data


def check_casing(tokenizer: Tokenizer, where: str) -> None:
    """Refuse a tokenizer that lowercases beside a cased vocabulary, where every capital would be lost: InputError.

    A vocabulary counts as cased where one in a hundred of its pieces has a capital letter, special tokens apart.
    """
    pieces = [piece for piece in tokenizer.backend.get_vocab(with_added_tokens=True) if not piece.startswith("[")]
    capitals = sum(piece != piece.lower() for piece in pieces)
    if tokenizer.lowercase and capitals > len(pieces) / 100:
        raise InputError(
            f"{where}: the tokenizer lowercases, and {capitals:,} of the vocabulary's {len(pieces):,} pieces have "
            "capitals; take the tokenizer's files from the checkpoint itself (do_lower_case in tokenizer_config.json)"
        )


def _order_labels(model: HeadedModel, loaded: LoadReport, task: Task, init: Path, report: Report) -> None:
    """A checkpoint's head has its own order of labels: put it into the task's, or start afresh with other labels."""
    classifier = getattr(model, "classifier", None)
    if not task.labels or classifier is None or any(name.startswith("classifier") for name in loaded.fresh):
        return
    names = labels_of(init)
    if names == task.labels:
        return
    if sorted(names) == sorted(task.labels):
        order = [names.index(label) for label in task.labels]
        with torch.no_grad():
            classifier.weight.copy_(classifier.weight[order].clone())
            classifier.bias.copy_(classifier.bias[order].clone())
        report(f"the head of {init} has its labels in the order {', '.join(names)}: put into that of {task.name}")
        return
    init_weights(classifier, model.config.initializer_range)
    report(f"the head of {init} has other labels ({', '.join(names) or 'unnamed'}): the new one starts afresh")


def _optimizer(model: HeadedModel, config: FinetuneConfig) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = build_optimizer(model, config.learning_rate, config.weight_decay)
    if config.bias_correction:
        return optimizer
    groups = [{name: group[name] for name in ("params", "weight_decay")} for group in optimizer.param_groups]
    return BertAdam(groups, lr=config.learning_rate)


def batches(lengths: Sequence[int], config: FinetuneConfig) -> Iterator[np.ndarray]:
    """Endless batches of units, by number, each epoch in a new order; units of like length share a batch."""
    sizes = np.asarray(lengths)
    epoch = 0
    while True:
        rng = np.random.default_rng([config.seed, epoch])
        order = rng.permutation(len(sizes))
        made = []
        for start in range(0, len(order), config.batch_size * SORTED_BATCHES):
            group = order[start : start + config.batch_size * SORTED_BATCHES]
            group = group[np.argsort(sizes[group], kind="stable")]
            made += [group[i : i + config.batch_size] for i in range(0, len(group), config.batch_size)]
        for i in rng.permutation(len(made)):
            yield made[i]
        epoch += 1
