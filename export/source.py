"""What is exported: a fine-tuning run, or a model directory that transformers or anybody else wrote."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bertship.artifacts import read_manifest, sha256_file
from bertship.errors import InputError
from bertship.tasks import Task
from bertship.tokenization import Tokenizer
from train.checkpoint import check_vocabulary, labels_of, load_model
from train.finetuned import load_finetuned
from train.heads import HEADS, HeadedModel

_NAMELESS = re.compile(r"LABEL_\d+")  # what transformers writes where nobody gave names
_FILES = ("config.json", "tokenizer.json", "vocab.txt", "model.safetensors", "model-*.safetensors")


@dataclass(frozen=True)
class Source:
    """A fine-tuned model with its task; `where` is what the user named, `data` the run's own."""

    task: Task
    tokenizer: Tokenizer
    model: HeadedModel
    where: Path
    model_dir: Path
    data: str | None = None


def from_run(run: Path) -> Source:
    """A fine-tuning run. Raises InputError when it is none."""
    task, tokenizer, model = load_finetuned(run)
    return Source(task, tokenizer, model, run, run / "model", read_manifest(run)["inputs"].get("data"))


def from_model_dir(task: Task, model_dir: Path) -> Source:
    """A BERT with `task`'s head in Hugging Face layout; its labels are the task's by name, in the order of its logits.

    Raises InputError where the directory is no BERT, its head is not the task's, or its labels are others.
    """
    task = labels_by_name(task, model_dir)
    model, report = load_model(HEADS[task.behaviour.head], model_dir, task.behaviour.width(task))
    if not report.complete:
        raise InputError(
            f"{model_dir} is not fine-tuned for {task.name} ({report.describe()}); "
            f"fine-tune it first: bertship finetune --task {task.name} --init {model_dir}"
        )
    tokenizer = Tokenizer.from_dir(model_dir)
    check_vocabulary(tokenizer, model.config, str(model_dir))
    if model.config.max_position_embeddings < task.max_tokens:
        raise InputError(
            f"{model_dir} takes {model.config.max_position_embeddings} tokens (max_position_embeddings), the rows of "
            f"{task.name} have up to {task.max_tokens}; give a task file with fewer max_tokens"
        )
    return Source(task, tokenizer, model, model_dir, model_dir)


def labels_by_name(task: Task, model_dir: Path) -> Task:
    """`task` with its labels in the order of the checkpoint's logits, by `id2label` of its config.

    Names are compared without regard to case; a task that leaves its labels open takes the checkpoint's.
    """
    if not task.behaviour.needs_labels:
        return task
    stated = labels_of(model_dir)
    where = f"{model_dir}/config.json"
    if not stated or all(_NAMELESS.fullmatch(label) for label in stated):
        wanted = f"those of {task.name} ({', '.join(task.labels)})" if task.labels else "their names"
        raise InputError(
            f"{where}: id2label names no labels ({_shown(stated)}); write {wanted} there, in the order of the logits"
        )
    if not task.labels:
        return task.with_labels(stated)
    known = {label.casefold(): label for label in task.labels}
    folded = [label.casefold() for label in stated]
    if sorted(folded) != sorted(known):
        raise InputError(f"{where}: its labels are {_shown(stated)}; {task.name} has {', '.join(task.labels)}")
    return task.with_labels([known[label] for label in folded])


def digest_of(model_dir: Path) -> dict[str, str]:
    """SHA-256 of the files that a model is made of, by name."""
    return {path.name: sha256_file(path) for pattern in _FILES for path in sorted(model_dir.glob(pattern))}


def _shown(labels: Sequence[str], most: int = 8) -> str:
    return (", ".join(labels[:most]) + (", ..." if len(labels) > most else "")) or "none"
