"""From a fine-tuned model to graphs behind the gate, and answers from them."""

from pathlib import Path
from typing import Annotated, Any

import typer

from bertship.commands.options import (
    RUNS,
    BringOption,
    ChoiceOption,
    ContextOption,
    DataOption,
    ForceOption,
    InitOption,
    NameOption,
    ParameterOption,
    PrecisionOption,
    PresetOption,
    QuestionOption,
    RunsOption,
    TaskOption,
    TextOption,
    TextPairOption,
    find_task,
    need,
    need_run,
    parse_columns,
    parse_numbers,
    parse_parameters,
    parse_precisions,
)
from bertship.commands.training import run_finetuning
from bertship.console import answer_lines, load, parity_lines, report, show
from bertship.errors import CheckFailed, InputError
from bertship.next_steps import ending
from bertship.shell import shown


def export(
    model_dir: Annotated[
        Path | None, typer.Argument(metavar="[MODEL_DIR]", help="A model fine-tuned elsewhere, in Hugging Face layout.")
    ] = None,
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

    Each precision is compared with PyTorch on real text; what departs is not published. auto makes all that this
    machine has a use for, and says which is best here. Without MODEL_DIR the task's own run is exported.
    """
    if model_dir is None:
        out, manifest = run_export(task, precision, init, preset, data, runs, name, force, bring)
    else:
        if not model_dir.is_dir():
            raise InputError(f"no model directory at {model_dir}")
        kept = model_dir / "task.json"
        own = load("bertship.tasks:Task").from_file(kept) if kept.is_file() else None
        definition = own if own and own.name == task else find_task(task, runs)
        out = runs / "export" / definition.name
        precisions = None if precision == "auto" else parse_precisions(precision)
        make = load("export.stages:make_model_export")
        manifest = make(definition, model_dir, out, precisions, data, report, force)
    best = manifest["best"]
    chosen = f"  best here: {best['precision']} on {best['engine']}, as {best['why']}"
    show(manifest, [str(out), *parity_lines(manifest), chosen, *ending("export", out)])


def parity(
    export_dir: Annotated[Path, typer.Argument(metavar="EXPORT_DIR", help="What `bertship export` wrote.")],
    full: Annotated[bool, typer.Option("--full", help="The whole dev split instead of 500 examples.")] = False,
    data: DataOption = None,
    model: Annotated[Path | None, typer.Option("--model", help="The model it was made from, where it moved.")] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="cpu, onnxruntime-cuda, onnxruntime-tensorrt or tensorrt.")
    ] = "cpu",
    runs: RunsOption = RUNS,
) -> None:
    """Judge an export again.

    Compares every artifact with PyTorch FP32 on the task's dev texts: finite values, the largest difference and its
    place, decisions, the metric. Exit 1 where one departs, with the first layer that does. The export stays as it is;
    runs/parity/TASK gets the comparisons and a report.html.
    """
    found, out = load("export.stages:make_parity")(export_dir, runs / "parity", data, report, full, engine, model)
    parity = found["metrics"]["parity"]
    result = {"export": str(export_dir), "written": str(out), "passed": found["passed"], "parity": parity}
    show(result, [*parity_lines(found), f"report: {shown(out / 'report.html')}"])
    if not found["passed"]:
        raise CheckFailed(f"the parity gate refuses {found['task']}: {found['reasons']}")


def plan(
    export_dir: Annotated[Path, typer.Argument(metavar="EXPORT_DIR", help="What `bertship export` wrote.")],
    workspace_mib: Annotated[int, typer.Option("--workspace-mib", help="Memory a kernel may take, in MiB.")] = 1024,
) -> None:
    """A TensorRT plan for this machine's GPU, into an export.

    Runs where TensorRT and the GPU are, such as NVIDIA's container, without PyTorch; the plan is held against the FP32
    graph and is not published where it departs.
    """
    manifest = load("export.plan:make_plans")(export_dir, report, workspace_mib)
    found = manifest | {"metrics": {"parity": manifest["plan_parity"]}}
    lines = [f"{export_dir}: {', '.join(facts['file'] for facts in manifest['plans'].values())}", *parity_lines(found)]
    show({"plans": manifest["plans"], "parity": manifest["plan_parity"]}, lines)


def predict(
    task: TaskOption = "sst2",
    text: TextOption = None,
    text_pair: TextPairOption = None,
    question: QuestionOption = None,
    context: ContextOption = None,
    parameter: ParameterOption = None,
    choice: ChoiceOption = None,
    precision: PrecisionOption = "auto",
    runs: RunsOption = RUNS,
) -> None:
    """Answer without a server.

    With the exported graph, and the code that the server runs.
    """
    export = runs / "export" / find_task(task, runs).name
    need(export, f"bertship export --task {task}")
    pipeline = load("bertship.pipeline:from_export")(export, None if precision == "auto" else precision)
    columns = parse_columns(text, text_pair, question, context, choice)
    answers = pipeline.ask(columns, parse_parameters(parameter))
    labels = list(pipeline.task.labels) if any("PROBABILITIES" in answer for answer in answers) else []
    show({"answers": answers, "labels": labels}, answer_lines(answers, labels))


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
    show(
        {"files": str(out), **result},
        [*load("export.bench_report:lines")(result), f"files: {out}", *ending("bench-engine", out)],
    )


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
    definition = find_task(task, runs)
    run = runs / "finetune" / definition.name / name
    if bring and not run.is_dir():
        run_finetuning(task, init, preset, data, runs, name, {}, False)
    need_run(run, definition)
    out = runs / "export" / definition.name
    return out, load("export.stages:make_export")(run, out, precisions, data, report, force)
