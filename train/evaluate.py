"""A fine-tuned model's metrics, through the same pipeline that serves it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertship.artifacts import read_manifest
from bertship.errors import InputError
from bertship.pipeline import Pipeline, Runner
from bertship.tasks import Example, Task
from bertship.tasks.base import Answers
from bertship.tokenization import Tokenizer
from train.checkpoint import load_model
from train.heads import HEADS
from train.torch_runner import TorchRunner


def columns_of(task: Task, examples: Sequence[Example], annotations: bool = False) -> dict[str, list[Any]]:
    """The examples' texts by tensor name; with what only labelled data has where `annotations` is set."""
    names = task.behaviour.inputs + (task.behaviour.annotations if annotations else ())
    return {name: [example.columns[name] for example in examples] for name in names}


def evaluate(
    task: Task, tokenizer: Tokenizer, runner: Runner, examples: Sequence[Example]
) -> tuple[dict[str, float], Answers]:
    """Metrics (shares are 0..1) and the answers that they judge.

    Where the data says more than a request would (the words of a CoNLL file), the metrics use it, as is usual, and
    `served_*` are those of the plain texts.
    """
    pipeline = Pipeline(task, tokenizer, runner)
    answers = pipeline(columns_of(task, examples, annotations=True))
    metrics = task.behaviour.score(task, examples, answers)
    if task.behaviour.annotations:
        served = task.behaviour.score(task, examples, pipeline(columns_of(task, examples)))
        metrics |= {f"served_{name}": value for name, value in served.items()}
    return metrics, answers


def load_finetuned(run_dir: Path) -> tuple[Task, Tokenizer, Any]:
    """Task, tokenizer and PyTorch model of a fine-tuning run. Raises InputError when it is none."""
    read_manifest(run_dir, "finetune")
    if not (run_dir / "task.json").is_file():
        raise InputError(f"{run_dir} has no task.json; fine-tune again")
    task = Task.from_file(run_dir / "task.json")
    model, report = load_model(HEADS[task.behaviour.head], run_dir / "model", task.behaviour.width(task))
    if not report.complete:
        raise InputError(f"{run_dir}/model lacks weights ({report.describe()}); fine-tune again")
    return task, Tokenizer.from_dir(run_dir / "model"), model


def evaluate_run(run_dir: Path, examples: Sequence[Example]) -> dict[str, float]:
    """Metrics of a fine-tuning run on `examples`."""
    task, tokenizer, model = load_finetuned(run_dir)
    metrics, _ = evaluate(task, tokenizer, TorchRunner(model, tokenizer.pad_id), examples)
    return metrics
