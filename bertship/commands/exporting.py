"""From a fine-tuned model to graphs behind the gate, and answers from them."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

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
    parse_numbers,
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
    precision: PrecisionOption = "auto",
    runs: RunsOption = RUNS,
) -> None:
    """Answer without a server.

    With the exported graph, and the code that the server runs.
    """
    export = runs / "export" / get_task(task).name
    need(export, f"bertship export --task {task}")
    pipeline = load("bertship.pipeline:from_export")(export, None if precision == "auto" else precision)
    answers = pipeline.ask(parse_columns(text, text_pair, question, context))
    show({"answers": answers}, [json.dumps(answer, ensure_ascii=False) for answer in answers])


def bench_engine(
    export_dir: Annotated[Path, typer.Argument(metavar="EXPORT_DIR", help="A directory that `bertship export` made.")],
    batch: Annotated[str, typer.Option(help="Rows a batch, parted by commas.")] = "1,8",
    length: Annotated[
        str, typer.Option(help="Tokens a row, parted by commas; auto: 16, 64, 128, the longest.")
    ] = "auto",
    precision: Annotated[str, typer.Option(help="auto, or of fp32, bf16, fp16, int8.")] = "auto",
    seconds: Annotated[float, typer.Option(help="What an engine gets for each batch and length.")] = 1.0,
    threads: Annotated[int | None, typer.Option(min=1, help="Cores to use; all by default.")] = None,
    mixed: Annotated[bool, typer.Option(help="Also the task's own texts in their own lengths.")] = True,
    runs: RunsOption = RUNS,
) -> None:
    """Measure an export's engines against each other and the machine.

    PyTorch and ONNX Runtime in every precision: median, 99th percentile, tokens a second, and the share of what a
    large matrix product reaches here; runs/bench-engine/TASK.
    """
    batches = parse_numbers("--batch", batch)
    lengths = () if length == "auto" else parse_numbers("--length", length)
    precisions = () if precision == "auto" else tuple(name.strip() for name in precision.split(","))
    task = load("bertship.artifacts:read_manifest")(export_dir, "export")["task"]
    out = runs / "bench-engine" / task
    result = load("export.bench_engine:bench_engines")(
        export_dir,
        out,
        batches=batches,
        lengths=lengths,
        precisions=precisions,
        seconds=seconds,
        threads=threads,
        mixed=mixed,
        report=report,
    )
    show({"files": str(out), **result}, [*load("export.bench_report:lines")(result), f"files: {out}"])


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
