"""A run judged on every labelled split, and what is written for others: their scripts' files, a page of mistakes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertship.artifacts import publish, read_manifest, versions, write_manifest
from bertship.errors import counted
from bertship.next_steps import next_steps, of_run
from bertship.report import Report as Page
from bertship.shell import place, shown, shown_places
from bertship.tasks import Example, Task
from bertship.tasks.base import Answers
from train.data import has_split
from train.finetune_report import add_errors, named_metric
from train.finetuned import load_finetuned
from train.scoring import evaluate
from train.torch_runner import TorchRunner

Report = Callable[[str], None]


def dev_splits(task: Task, data: str | None) -> list[str]:
    """`dev`, and the further labelled splits that the data has."""
    return ["dev", *(split for split in task.more_splits if has_split(task, data, split))]


def evaluate_splits(
    run: Path,
    examples: Mapping[str, Sequence[Example]],
    report: Report,
    out: Path | None = None,
    data: str | None = None,
) -> dict[str, float]:
    """Metrics on each split, those but of `dev` under the split's name; see `train.stages.make_evaluation`.

    `data` is where the examples are from, where that is not what the run was trained on.
    """
    task, tokenizer, model = load_finetuned(run)
    runner = TorchRunner(model, tokenizer.pad_id)
    metrics: dict[str, float] = {}
    answered: dict[str, Answers] = {}
    for split, chosen in examples.items():
        found, answered[split] = evaluate(task, tokenizer, runner, chosen, report)
        prefix = "" if split == "dev" else f"{split.removeprefix('dev_')}_"
        metrics |= {f"{prefix}{name}": value for name, value in found.items()}
    if out is not None:
        _publish(task, run, examples, answered, metrics, out, data)
    return metrics


def _publish(
    task: Task,
    run: Path,
    examples: Mapping[str, Sequence[Example]],
    answered: Mapping[str, Answers],
    metrics: dict[str, Any],
    out: Path,
    data: str | None,
) -> None:
    with publish(out) as staging:
        for split, answers in answered.items():
            folder = staging if split == "dev" else staging / split
            folder.mkdir(exist_ok=True)
            for name, text in task.behaviour.official(task, examples[split], answers).items():
                (folder / name).write_text(text, encoding="utf-8")
        counts = ", ".join(counted(len(e), f"{split} example") for split, e in examples.items())
        page = Page(f"{task.name}: an evaluation", f"{shown(run)} on {counts}.")
        first = task.metrics[0]
        page.text("Conclusion", f"{named_metric(task, first)} {metrics[first]:.4f} on the dev split.")
        page.facts("Metrics", {named_metric(task, name): value for name, value in metrics.items()})
        add_errors(page, task, examples["dev"], answered["dev"])
        page.facts("Run", shown_places(read_manifest(run, "finetune")["inputs"]))
        page.facts("Versions", versions())
        given = f" --data {place(data)}" if data else ""
        page.command("Reproduce", f"bertship evaluate{of_run(run)}{given}")
        page.command("Next", *next_steps("finetune", run)[1:])  # what comes after the evaluation
        page.write(staging / "report.html")
        write_manifest(staging, "evaluate", inputs={"run": str(run)}, metrics=metrics, task=task.name)
