"""The page about a fine-tuned model: curves, where it errs, how sure it is, and how to do it again."""

import itertools
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest

from bertship.artifacts import published, versions
from bertship.config import FinetuneConfig
from bertship.metrics import calibration_error
from bertship.next_steps import next_steps, task_file, where_to
from bertship.report import Curve, Report
from bertship.shell import place, shown, shown_places
from bertship.tasks import Example, Task
from bertship.tasks.base import Answers, Judged, nested

WORST = 25  # mistakes shown with their texts
_BINS = 10
_COUNTED = ("accuracy", "exact_match")  # shares of the examples
_SHOWN = 300  # characters of a text


def write_report(
    path: Path,
    task: Task,
    config: FinetuneConfig,
    examples: Sequence[Example],
    answers: Answers,
    metrics: Mapping[str, float],
    inputs: Mapping[str, Any],
    measured: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    degenerate: str,
) -> None:
    """Write `path`; `history` holds the training's lines, `answers` those to `examples`, with the kind's details."""
    page = Report(
        f"{task.name}: a fine-tuned model",
        f"{f'{task.description}; ' if task.description else ''}{inputs['train_examples']:,} training and "
        f"{inputs['dev_examples']:,} dev examples{_held_out(inputs)}, started from {shown(inputs['init'])}.",
    )
    page.text("Conclusion", *_conclusion(task, metrics, measured, inputs, degenerate))
    page.facts("Metrics on the dev split", {named_metric(task, name): value for name, value in metrics.items()})
    updates = [line for line in history if "loss" in line]
    losses = Curve("training loss", [line["step"] for line in updates], [line["loss"] for line in updates])
    page.curves("Loss", [losses.smoothed()], "update", "loss")
    judged = [line for line in history if "dev" in line]
    if len(judged) > 1:
        curves = [
            Curve(name, [line["step"] for line in judged], [line["dev"][name] for line in judged])
            for name in task.metrics
        ]
        page.curves("Dev split while training", curves, "update", "metric")
    add_errors(page, task, examples, answers)
    page.facts("Settings", config.model_dump())
    if config.min_updates > 1:
        page.text("", "Epochs are gone through as often as min_updates asks for, where they alone make fewer updates.")
    page.facts("Data", shown_places(inputs))
    page.facts("Measured", {name: value for name, value in measured.items() if name not in metrics})
    page.facts("Versions", versions())
    page.command("Reproduce", training_command(task, config, inputs, published(path.parent)))
    page.command("Next", *next_steps("finetune", path.parent))
    page.write(path)


def named_metric(task: Task, name: str) -> str:
    """A metric's name with what it is of, where the name alone leaves that open."""
    note = task.behaviour.metric_note(task, name)
    return f"{name} ({note})" if note else name


def _held_out(inputs: Mapping[str, Any]) -> str:
    share = inputs.get("dev_share")
    return f" (held out of the training file by their texts, dev = {share:g})" if share else ""


def training_command(task: Task, config: FinetuneConfig, inputs: Mapping[str, Any], run: Path) -> str:
    """What makes the run `run` again; `inputs` are those of its manifest."""
    usual = FinetuneConfig.model_validate(dict(task.training)).model_dump()
    changed = [
        f"--set {shlex.quote(f'{name}={value}')}" for name, value in config.model_dump().items() if value != usual[name]
    ]
    data = [f"--data {place(inputs['data'])}"] if inputs["data"] else []
    started = f"--task {task_file(task, inputs['task_file'] or '')}{where_to(run)} --init {place(inputs['init'])}"
    return " ".join(["bertship finetune", started, *data, *changed])


def add_errors(page: Report, task: Task, examples: Sequence[Example], answers: Answers) -> None:
    """The kind's own tables, mistakes by the texts' length, calibration, and the worst mistakes."""
    for heading, columns, rows in task.behaviour.tables(task, examples, answers):
        page.table(heading, columns, rows)
    judged = task.behaviour.judged(task, examples, answers)
    errors = np.array([found.error for found in judged])
    _add_lengths(page, task, examples, errors)
    _add_calibration(page, *task.behaviour.confidences(task, examples, answers))
    if (errors > 0).any():
        _add_worst(page, task, examples, judged, errors)


def _add_lengths(page: Report, task: Task, examples: Sequence[Example], errors: np.ndarray) -> None:
    words = np.array([_words(task, example) for example in examples])
    edges = np.unique(np.quantile(words, np.linspace(0, 1, 6)).round())
    scored = task.behaviour.loss == "mean_squared_error"  # a number is never without any error
    rows = []
    for low, high in itertools.pairwise([*(edges[:-1] if len(edges) > 1 else edges), edges[-1] + 1]):
        chosen = (words >= low) & (words < high)
        if chosen.any():
            found = errors[chosen] if scored else errors[chosen] == 0
            span = f"{low:.0f}" if high == low + 1 else f"{low:.0f} to {high - 1:.0f}"
            rows.append((span, int(chosen.sum()), float(found.mean())))
    measure = "mean absolute error" if scored else "share without any error"
    page.table("By the texts' length", ("words", "examples", measure), rows)


def _add_calibration(page: Report, scores: np.ndarray, right: np.ndarray) -> None:
    if len(scores):
        page.table(
            "Calibration",
            ("stated probability", "answers", "mean of it", "share that is right"),
            _bins(scores, right),
            f"Expected calibration error {calibration_error(scores, right):.4f} over {_BINS} bins of equal width.",
        )


def _add_worst(
    page: Report, task: Task, examples: Sequence[Example], judged: Sequence[Judged], errors: np.ndarray
) -> None:
    wrong = [i for i in np.argsort(-errors, kind="stable").tolist() if errors[i] > 0]
    page.table(
        f"The worst of {len(wrong):,} mistakes",
        ("where", "text", "wanted", "answered", "probability"),
        [
            (
                examples[i].where.rpartition("/")[2],
                _short(" ¦ ".join(t for name in task.behaviour.inputs for t in nested(examples[i].columns[name]))),
                _short(judged[i].gold),
                _short(judged[i].predicted),
                "" if judged[i].score is None else float(judged[i].score or 0),
            )
            for i in wrong[:WORST]
        ],
    )


def _conclusion(
    task: Task, metrics: Mapping[str, float], measured: Mapping[str, Any], inputs: Mapping[str, Any], degenerate: str
) -> list[str]:
    metric = task.metrics[0]
    said = [
        f"{named_metric(task, metric)} {metrics[metric]:.4f} on the dev split, after {measured['updates']:,} updates "
        f"(about {measured['epochs_run']:.3g} epochs) in {measured['train_seconds']:,.0f} s of training."
    ]
    if metric in _COUNTED:
        count = inputs["dev_examples"]
        low, high = binomtest(round(metrics[metric] * count), count).proportion_ci(method="wilson")
        said.append(
            f"Another {count:,} examples of the same kind might give {low:.4f} to {high:.4f} (95 % by Wilson's score)."
        )
    if degenerate:
        said.append(f"This run is degenerate: {degenerate}. Its metrics say nothing about the task.")
    if inputs.get("init_task"):
        said.append(f"It started from a model of {inputs['init_task']}: not comparable with runs that did not.")
    if task.options.get("null_threshold") is not None:
        said.append(
            f"No answer is given where the null odds exceed {task.options['null_threshold']:.4g}, chosen on dev."
        )
    return said


def _words(task: Task, example: Example) -> int:
    return sum(len(text.split()) for name in task.behaviour.inputs for text in nested(example.columns[name]))


def _bins(scores: np.ndarray, right: np.ndarray) -> list[tuple[Any, ...]]:
    place = np.minimum((scores * _BINS).astype(int), _BINS - 1)
    return [
        (
            f"{b / _BINS:.1f} to {(b + 1) / _BINS:.1f}",
            int((place == b).sum()),
            float(scores[place == b].mean()),
            float(right[place == b].mean()),
        )
        for b in np.unique(place)
    ]


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
