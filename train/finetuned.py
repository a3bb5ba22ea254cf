"""A fine-tuning run's directory read back: its task, tokenizer and model."""

import dataclasses
from pathlib import Path
from typing import Any

from bertship.artifacts import read_manifest
from bertship.errors import InputError
from bertship.tasks import Task
from bertship.tokenization import Tokenizer
from train.checkpoint import labels_of, load_model
from train.features import model_class


def load_finetuned(run_dir: Path) -> tuple[Task, Tokenizer, Any]:
    """Task, tokenizer and PyTorch model of a fine-tuning run.

    Raises InputError when it is none, or when what the task says and what its model says contradict each other.
    """
    read_manifest(run_dir, "finetune")
    if not (run_dir / "task.json").is_file():
        raise InputError(f"{run_dir} has no task.json; fine-tune again")
    task = Task.from_file(run_dir / "task.json")
    stated = labels_of(run_dir / "model") if task.labels else ()
    if stated and stated != task.labels:
        raise InputError(
            f"{run_dir}: task.json has the labels {', '.join(task.labels)}, model/config.json has {', '.join(stated)}; "
            "an answer would carry another label's name: fine-tune again"
        )
    model, report = load_model(model_class(task), run_dir / "model", task.behaviour.width(task))
    if not report.complete:
        raise InputError(f"{run_dir}/model lacks weights ({report.describe()}); fine-tune again")
    if task.max_tokens > model.config.max_position_embeddings:
        raise InputError(
            f"{run_dir}: task.json uses {task.max_tokens} tokens, its model has positions for "
            f"{model.config.max_position_embeddings}; fine-tune again"
        )
    return task, Tokenizer.from_dir(run_dir / "model"), model


def task_of_run(task: Task, run: Path) -> Task:
    """The run's own task, with the files as `task` has them today. Raises InputError where the two do not fit."""
    trained = Task.from_file(run / "task.json")
    if trained.kind != task.kind:
        raise InputError(f"{run} was trained as {trained.kind!r}, task {task.name} is {task.kind!r}; fine-tune again")
    if task.labels and set(task.labels) != set(trained.labels):
        raise InputError(
            f"{run} was trained on the labels {', '.join(trained.labels)}, task {task.name} has "
            f"{', '.join(task.labels)}; fine-tune again"
        )
    files = dataclasses.replace(task.files, documents=trained.files.documents)
    return dataclasses.replace(trained, files=files, hub=task.hub, more_splits=task.more_splits)
