"""The export stage as commands use it: skip what is up to date, make what is not."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bertship.artifacts import is_current, read_manifest
from bertship.tasks.base import Task
from export.precision import PRECISIONS
from export.publish import export_run, fingerprint_of
from train.data import load_examples

Report = Callable[[str], None]


def make_export(
    run: Path, out: Path, precisions: Sequence[str] | None, data: str | None, report: Report, force: bool = False
) -> dict[str, Any]:
    """Export the fine-tuning run at `run` to `out` through the parity gate.

    The gate's texts are the task's dev split, of the data that the run was trained on if no `data` is given.
    `precisions` None makes every precision and keeps those that pass; named ones all have to pass.
    """
    lenient = precisions is None
    precisions = tuple(PRECISIONS) if precisions is None else precisions
    data = data or read_manifest(run, "finetune")["inputs"].get("data")
    task = Task.from_file(run / "task.json")
    examples = load_examples(task, data, "dev", report)
    if not force and is_current(out, fingerprint_of(run, precisions, examples, lenient)):
        report(f"{out} is up to date")
        return read_manifest(out, "export")
    return export_run(run, out, precisions, examples, report, lenient)
