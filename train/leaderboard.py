"""GLUE's leaderboard file: a zip of one tab-separated file a task, under the names that its server looks for."""

import dataclasses
import io
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertship.errors import InputError
from bertship.tasks import TASKS, Example, Task
from bertship.tasks.readers import read_split
from train.finetuned import load_finetuned
from train.scoring import answer, columns_of
from train.torch_runner import TorchRunner

Report = Callable[[str], None]
_FROM = {"ax": "mnli"}  # the diagnostics are answered by another task's model


def write_leaderboard(target: Path, data: Path, runs: Path, name: str, report: Report) -> dict[str, int]:
    """Write the zip; returns the rows of each file in it. Raises InputError where no task has a run."""
    files: dict[str, str] = {}
    lacking = []
    for task in (task for task in TASKS.values() if task.submission):
        run = runs / "finetune" / task.name / name
        if not run.is_dir() and task.name in _FROM:
            run = runs / "finetune" / _FROM[task.name] / name
        if not run.is_dir():
            lacking.append(task.name)
            continue
        trained, tokenizer, model = load_finetuned(run)
        runner = TorchRunner(model, tokenizer.pad_id)
        for file, split in task.submission.items():
            # the archive has one folder a task, a plain folder of one task's files is taken too
            examples = read_split(task, data, split, report)
            if set(trained.labels) != set(task.labels):
                raise InputError(f"{run} has the labels {', '.join(trained.labels)}, {task.name} needs {task.labels}")
            definition = dataclasses.replace(trained, files=task.files)
            answers = answer(definition, tokenizer, runner, columns_of(definition, examples), report, file)
            files[file] = predictions(task, examples, answers)
    if not files:
        raise InputError(f"no GLUE task has a run {name!r} in {runs}/finetune; fine-tune one first")
    if lacking:
        report(f"WARNING: without a run, and left out: {', '.join(lacking)}; the server wants all of its files")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, text in files.items():
            # a fixed time: the same predictions make the same file
            archive.writestr(zipfile.ZipInfo(file, (1980, 1, 1, 0, 0, 0)), text)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        staging.write_bytes(packed.getvalue())
        staging.replace(target)
    finally:
        staging.unlink(missing_ok=True)
    return {file: text.count("\n") - 1 for file, text in files.items()}


def predictions(task: Task, examples: Sequence[Example], answers: dict[str, np.ndarray]) -> str:
    """A header and a row a text: its own index, and the label as the official files write it, or the score."""
    written = {name: label for label, name in task.files.labels.items()}
    values: Sequence[Any] = (
        [written.get(label, label) for label in answers["LABEL"]]
        if "LABEL" in answers
        else [f"{min(max(float(score), 0.0), 5.0):.3f}" for score in answers["SCORE"]]
    )
    rows = (f"{e.id or i}\t{value}\n" for i, (e, value) in enumerate(zip(examples, values, strict=True)))
    return "".join(["index\tprediction\n", *rows])
