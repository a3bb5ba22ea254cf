"""The export stage as commands use it: skip what is up to date, make what is not, and judge again what was made."""

import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bertship.artifacts import check_files, is_current, publish, read_manifest, write_manifest
from bertship.errors import CheckFailed, InputError
from bertship.onnx_gpu import PROVIDERS, OnnxGpuRunner
from bertship.tasks import Example, Task
from bertship.tensorrt_runner import TensorRTRunner
from bertship.tokenization import Tokenizer
from export.gate_report import REPORT, parity_page, write_export_report
from export.judge import judge
from export.machine import find_machine
from export.parity import Engine, Parity, judge_engine, reasons_of
from export.plan import rebuild_command
from export.precision import PRECISIONS
from export.publish import export_source, fingerprint_of
from export.reference import MAX_EXAMPLES, Reference
from export.source import Source, digest_of, from_model_dir, from_run
from train.checkpoint import load_model
from train.data import load_examples
from train.heads import HEADS, HeadedModel
from train.torch_runner import TorchRunner

Report = Callable[[str], None]
ENGINES = ("cpu", *(f"onnxruntime-{name}" for name in PROVIDERS), "tensorrt")
NARROW_ENGINES = ("fp16", "fp32")  # what ONNX Runtime's GPU providers are asked to run


def make_export(
    run: Path, out: Path, precisions: Sequence[str] | None, data: str | None, report: Report, force: bool = False
) -> dict[str, Any]:
    """Export the fine-tuning run at `run` to `out` through the parity gate.

    The gate's texts are the task's dev split, of the data that the run was trained on if no `data` is given.
    `precisions` None makes every precision and keeps those that pass; named ones all have to pass.
    """
    return _make(from_run(run), out, precisions, data, report, force)


def make_model_export(
    task: Task,
    model_dir: Path,
    out: Path,
    precisions: Sequence[str] | None,
    data: str | None,
    report: Report,
    force: bool = False,
) -> dict[str, Any]:
    """Export a model directory that was fine-tuned elsewhere, or a run, as `make_export` does."""
    if (model_dir / "task.json").is_file():
        return make_export(model_dir, out, precisions, data, report, force)
    return _make(from_model_dir(task, model_dir), out, precisions, data, report, force)


def _make(
    source: Source, out: Path, precisions: Sequence[str] | None, data: str | None, report: Report, force: bool
) -> dict[str, Any]:
    lenient = precisions is None
    machine = find_machine()
    if precisions is None:
        precisions = tuple(name for name, p in PRECISIONS.items() if machine.builds_plans or not p.needs_tensorrt)
    data = data or source.data
    examples = load_examples(source.task, data, "dev", report)
    calibration: list[Example] = []
    if any(PRECISIONS[name].calibrated for name in precisions if name in PRECISIONS):
        try:
            calibration = load_examples(source.task, data, "train", report)
        except InputError as error:
            report(f"no training texts to take ranges from ({error}); the gate's own serve")
    fingerprint = fingerprint_of(source, precisions, examples, calibration, lenient, machine)
    if not force and is_current(out, fingerprint):
        report(f"{out} is up to date")
        manifest = read_manifest(out, "export")
    else:
        manifest = export_source(source, out, precisions, examples, report, lenient, calibration, machine, data)
    if not (out / REPORT).is_file():
        write_export_report(out)
    return manifest


def check_parity(
    export: Path,
    data: str | None,
    report: Report,
    full: bool = False,
    engine: str = "cpu",
    model_dir: Path | None = None,
) -> dict[str, Any]:
    """Judge every artifact of an export directory again, against the model that it was made from.

    `full` takes the whole dev split; `engine` is one of ENGINES; `model_dir` is where the model is now, if it moved.
    Nothing is written. Returns the manifest with these comparisons as its parity, and "passed".
    Raises InputError where the model or the engine is not there, or the model has changed.
    """
    if engine not in ENGINES:
        raise InputError(f"unknown engine {engine!r}; engines are {', '.join(ENGINES)}")
    manifest = read_manifest(export, "export")
    graphs = manifest["graphs"]
    check_files(export, manifest, ("task.json", "tokenizer.json", *graphs.values()))
    task, tokenizer = Task.from_file(export / "task.json"), Tokenizer.from_file(export / "tokenizer.json")
    model = model_of(export, manifest, task, model_dir)
    examples = load_examples(task, data or manifest["inputs"].get("data"), "dev", report)
    report(f"PyTorch FP32 on {len(examples) if full else min(len(examples), MAX_EXAMPLES)} examples")
    runner = TorchRunner(model, tokenizer.pad_id)
    reference = Reference(task, tokenizer, runner, examples, None if full else MAX_EXAMPLES)
    results: list[Parity] = []
    for precision, open_engine in _engines(export, manifest, task, engine).items():
        report(f"{precision} on {engine}: {len(reference.rows)} rows")
        try:
            if open_engine is None:
                results += judge(reference, precision, export / graphs[precision], model)
            else:
                results += judge_engine(reference, precision, engine, open_engine, task.max_tokens)
        except CheckFailed as error:
            raise CheckFailed(f"the parity gate refused {task.name}: {precision}: {error}") from None
    parity = [result.as_dict() for result in results]
    reasons = reasons_of(results)
    return manifest | {"metrics": {"parity": parity}, "passed": not reasons, "reasons": reasons}


def make_parity(
    export: Path,
    out: Path,
    data: str | None,
    report: Report,
    full: bool = False,
    engine: str = "cpu",
    model_dir: Path | None = None,
) -> tuple[dict[str, Any], Path]:
    """`check_parity`, kept: the task's folder in `out` gets the comparisons and a page. Returns both."""
    judged = check_parity(export, data, report, full, engine, model_dir)
    options = {"--engine": engine, "--data": data, "--model": model_dir}
    given = [f"{name} {shlex.quote(str(value))}" for name, value in options.items() if value]
    command = " ".join([f"bertship parity {shlex.quote(str(export))}", *(["--full"] if full else []), *given])
    place = out / judged["task"]
    with publish(place) as staging:
        parity_page(export, judged, command).write(staging / REPORT)
        write_manifest(
            staging,
            "parity",
            config={"full": full, "engine": engine},
            inputs={"export": str(export), "fingerprint": judged["fingerprint"], "data": data},
            metrics={"parity": judged["metrics"]["parity"]},
            task=judged["task"],
            graphs=judged["graphs"],
            passed=judged["passed"],
        )
    return judged, place


def _engines(export: Path, manifest: dict[str, Any], task: Task, engine: str) -> dict[str, Callable[[], Engine] | None]:
    """What is to be judged, by precision: how to open it, None for a graph on the CPU."""
    graphs = manifest["graphs"]
    if engine == "cpu":
        return dict.fromkeys(graphs)
    if engine == "tensorrt":
        plans = manifest.get("plans") or {}
        if not plans:
            raise InputError(f"{export} has no TensorRT plan; build one: {rebuild_command(export)}")
        rebuild = rebuild_command(export)
        return {name: partial(TensorRTRunner, export / f["file"], f, rebuild) for name, f in plans.items()}
    provider = engine.removeprefix("onnxruntime-")
    judged = [name for name in NARROW_ENGINES if name in graphs]
    if not judged:
        raise InputError(f"{export} has none of {', '.join(NARROW_ENGINES)}, which {engine} runs; export one of them")
    return {name: partial(OnnxGpuRunner, export / graphs[name], provider, task.buckets) for name in judged}


def model_of(export: Path, manifest: dict[str, Any], task: Task, given: Path | None) -> HeadedModel:
    """The PyTorch model that the export was made from."""
    inputs = manifest["inputs"]
    model_dir = given or Path(inputs.get("model") or Path(inputs["run"]) / "model")
    if (model_dir / "model" / "config.json").is_file():  # a run
        model_dir = model_dir / "model"
    if not model_dir.is_dir():
        raise InputError(f"{export} was made from {model_dir}, which is not there; give --model")
    made_from = inputs.get("model_files")
    if made_from is not None and digest_of(model_dir) != made_from:
        raise InputError(f"{model_dir} is not the model that {export} was made from; export again, or give --model")
    model, report = load_model(HEADS[task.behaviour.head], model_dir, task.behaviour.width(task))
    if not report.complete:
        raise InputError(f"{model_dir} lacks weights ({report.describe()}); give the model of {export} by --model")
    return model
