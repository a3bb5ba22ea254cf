"""From a fine-tuned model to graphs behind the gate, and answers from them."""

import json
from pathlib import Path
from typing import Any

from bertship.commands.options import (
    RUNS,
    BringOption,
    DataOption,
    ForceOption,
    InitOption,
    NameOption,
    PrecisionOption,
    PresetOption,
    RunsOption,
    TaskOption,
    TextOption,
    get_task,
    need,
    parse_columns,
    parse_precisions,
)
from bertship.commands.training import run_finetuning
from bertship.console import load, parity_lines, report, show


def export(
    task: TaskOption = "sst2",
    precision: PrecisionOption = "auto",
    init: InitOption = "",
    preset: PresetOption = "tiny",
    data: DataOption = None,
    runs: RunsOption = RUNS,
    name: NameOption = "default",
    force: ForceOption = False,
    bring: BringOption = False,
) -> None:
    """ONNX, through the gate: runs/export/TASK.

    Each precision is compared with PyTorch on real text; what departs is not published. auto makes all of them.
    """
    out, manifest = run_export(task, precision, init, preset, data, runs, name, force, bring)
    show(manifest, [str(out), *parity_lines(manifest)])


def predict(
    task: TaskOption = "sst2",
    text: TextOption = None,
    text_pair: TextOption = None,
    question: TextOption = None,
    context: TextOption = None,
    choice: TextOption = None,
    precision: PrecisionOption = "auto",
    runs: RunsOption = RUNS,
) -> None:
    """Answer without a server.

    With the exported graph, and the code that the server runs.
    """
    export = runs / "export" / get_task(task).name
    need(export, f"bertship export --task {task}")
    pipeline = load("bertship.pipeline:from_export")(export, None if precision == "auto" else precision)
    answers = pipeline.ask(parse_columns(text, text_pair, question, context, choice))
    show({"answers": answers}, [json.dumps(answer, ensure_ascii=False) for answer in answers])


def run_export(
    task: str,
    precision: str,
    init: str,
    preset: str,
    data: str | None,
    runs: Path,
    name: str,
    force: bool,
    bring: bool,
) -> tuple[Path, dict[str, Any]]:
    precisions = None if precision == "auto" else parse_precisions(precision)
    definition = get_task(task)
    run = runs / "finetune" / definition.name / name
    if bring and not run.is_dir():
        run_finetuning(task, init, preset, data, runs, name, {}, False)
    need(run, f"bertship finetune --task {task}")
    out = runs / "export" / definition.name
    return out, load("export.stages:make_export")(run, out, precisions, data, report, force)
