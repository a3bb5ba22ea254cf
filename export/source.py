"""What is exported: a fine-tuning run, or a model directory that transformers or anybody else wrote."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertship.artifacts import MANIFEST, read_manifest, sha256_file
from bertship.errors import InputError
from bertship.tasks import Task
from bertship.tokenization import Tokenizer
from train.checkpoint import check_vocabulary, labels_of, load_model
from train.features import model_class
from train.finetuned import load_finetuned
from train.heads import HEADS, HeadedModel

_NAMELESS = re.compile(r"LABEL_\d+")  # what transformers writes where nobody gave names
_WEIGHTS = ".safetensors"
_FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"),
    *("model.safetensors.index.json", f"*{_WEIGHTS}"),
)
# what an encoder was pre-trained with, and a pooler under a head that reads every token
_HARMLESS = ("cls.", "bert.pooler.", "pooler.", "bert.embeddings.position_ids", "embeddings.position_ids")


@dataclass(frozen=True)
class Source:
    """A fine-tuned model with its task; `where` is what the user named, `data` the run's own."""

    task: Task
    tokenizer: Tokenizer
    model: HeadedModel
    where: Path
    model_dir: Path
    data: str | None = None
    degenerate: str = ""  # why its training did not learn, where it did not


def from_run(run: Path) -> Source:
    """A fine-tuning run. Raises InputError when it is none."""
    task, tokenizer, model = load_finetuned(run)
    made = read_manifest(run)
    degenerate = str(made.get("degenerate") or "")
    return Source(task, tokenizer, model, run, run / "model", made["inputs"].get("data"), degenerate)


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
    if (
        model.config.is_decoder
    ):  # ours read the last token then, models from elsewhere the first, which sees itself alone
        raise InputError(
            f"{model_dir}/config.json: is_decoder is true: its tokens see those before them alone; give the run that "
            "made it where that is one of `bertship finetune`, else a model that reads in both directions"
        )
    if lost := [name for name in report.unused if not name.startswith(_HARMLESS)]:
        raise InputError(
            f"{model_dir} has weights that {task.name} would not use ({', '.join(lost[:3])}"
            f"{', ...' if len(lost) > 3 else ''}): what is exported would be another model; set config.json right, "
            "or give the run that made it"
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


def model_of(export: Path, manifest: Mapping[str, Any], task: Task, given: Path | None = None) -> HeadedModel:
    """The PyTorch model that the export was made from; `given` is where it is now, if it moved.

    Raises InputError where it is not there, has changed, or lacks weights.
    """
    inputs = manifest["inputs"]
    stated = inputs.get("model") or inputs.get("run")
    if given is None and not stated:
        raise InputError(f"{export}/{MANIFEST} does not say which model it was made from; give --model")
    model_dir = given or Path(str(stated))
    if (model_dir / "model" / "config.json").is_file():  # a run
        model_dir = model_dir / "model"
    if not model_dir.is_dir():
        raise InputError(f"{export} was made from {model_dir}, which is not there; give --model")
    made_from = inputs.get("model_files")
    if made_from is not None:
        # an older export did not note every file; more weights would be other weights
        now = {name: d for name, d in digest_of(model_dir).items() if name in made_from or name.endswith(_WEIGHTS)}
        if now != made_from:
            raise InputError(f"{model_dir} is not the model that {export} was made from; export again, or give --model")
    model, report = load_model(model_class(task), model_dir, task.behaviour.width(task))
    if not report.complete:
        raise InputError(f"{model_dir} lacks weights ({report.describe()}); give the model of {export} by --model")
    return model


def digest_of(model_dir: Path) -> dict[str, str]:
    """SHA-256 of the files that a model is made of, by name."""
    return {path.name: sha256_file(path) for pattern in _FILES for path in sorted(model_dir.glob(pattern))}


def _shown(labels: Sequence[str], most: int = 8) -> str:
    return (", ".join(labels[:most]) + (", ..." if len(labels) > most else "")) or "none"
