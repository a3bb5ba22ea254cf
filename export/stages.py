"""The export stage as commands use it: skip what is up to date, make what is not, and judge again what was made."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bertship.artifacts import MANIFEST, check_files, is_current, publish, read_manifest, write_manifest
from bertship.errors import CheckFailed, InputError
from bertship.onnx_gpu import PROVIDERS, OnnxGpuRunner
from bertship.shell import place
from bertship.tasks import Example, Task
from bertship.tensorrt_runner import TensorRTRunner
from bertship.tokenization import Tokenizer
from export.gate_report import REPORT, parity_page, write_export_report
from export.judge import judge
from export.machine import find_machine
from export.parity import Engine, Parity, judge_engine, reasons_of
from export.plan import PLANS, rebuild_command
from export.precision import PRECISIONS
from export.publish import export_source, fingerprint_of
from export.reference import MAX_EXAMPLES, Reference
from export.source import Source, from_model_dir, from_run, model_of
from train.data import load_examples
from train.heads import HeadedModel
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
        source = from_run(model_dir)
        if source.task.name != task.name:
            raise InputError(
                f"{model_dir} is a run of {source.task.name}, not of {task.name}; give --task {source.task.name}"
            )
        return _make(source, out, precisions, data, report, force)
    return _make(from_model_dir(task, model_dir), out, precisions, data, report, force)


def _make(
    source: Source, out: Path, precisions: Sequence[str] | None, data: str | None, report: Report, force: bool
) -> dict[str, Any]:
    lenient = precisions is None
    check_replaceable(out)
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
        report(f"{out} is up to date: nothing was made again (--force does), this is its result")
        manifest = read_manifest(out, "export")
    else:
        _say_what_goes(source, out, report)
        manifest = export_source(source, out, precisions, examples, report, lenient, calibration, machine, data)
    if not (out / REPORT).is_file():
        write_export_report(out)
    return manifest


def _say_what_goes(source: Source, out: Path, report: Report) -> None:
    """An export of another run is replaced: there is one export of a task."""
    with contextlib.suppress(InputError):
        before = read_manifest(out, "export")["inputs"]
        name = before.get("run") or before.get("model")
        if name and Path(name).absolute() != source.where.absolute():
            report(f"{out} holds the export of {name}; that of {source.where} takes its place")


def check_replaceable(out: Path) -> None:
    """Refuse to put an export in the place of anything but an older one: publishing replaces a directory as a whole."""
    if not out.is_dir() or not any(out.iterdir()):
        return
    ours = (out / MANIFEST).is_file()
    with contextlib.suppress(InputError):  # cut short, it is still an export's
        ours = ours and read_manifest(out).get("stage", "export") == "export"
    if not ours:
        raise InputError(f"{out} is not empty and no export: it would be lost; move it away, or give other --runs")


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
    check_files(export, manifest, ("task.json", "tokenizer.json", *manifest["graphs"].values()))
    task, tokenizer = Task.from_file(export / "task.json"), Tokenizer.from_file(export / "tokenizer.json")
    model = model_of(export, manifest, task, model_dir)
    with contextlib.ExitStack() as stack:
        # opened before anything is computed: an engine that is not here is no verdict on the export
        engines: dict[str, Engine | None] = {}
        for name, open_engine in _engines(export, manifest, task, engine).items():
            engines[name] = opened = open_engine() if open_engine is not None else None
            if opened is not None:
                stack.callback(opened.close)
        return _judge_again(export, manifest, task, tokenizer, model, engines, engine, data, report, full)


def _judge_again(
    export: Path,
    manifest: dict[str, Any],
    task: Task,
    tokenizer: Tokenizer,
    model: HeadedModel,
    engines: dict[str, Engine | None],
    engine: str,
    data: str | None,
    report: Report,
    full: bool,
) -> dict[str, Any]:
    """`check_parity` with everything at hand; `engines` by precision, None for a graph on the CPU."""
    examples = load_examples(task, data or manifest["inputs"].get("data"), "dev", report)
    report(f"PyTorch FP32 on {len(examples) if full else min(len(examples), MAX_EXAMPLES)} examples")
    runner = TorchRunner(model, tokenizer.pad_id)
    reference = Reference(task, tokenizer, runner, examples, None if full else MAX_EXAMPLES)
    results: list[Parity] = []
    for precision, opened in engines.items():
        report(f"{precision} on {engine}: {len(reference.rows)} rows")
        try:
            if opened is None:
                results += judge(reference, precision, export / manifest["graphs"][precision], model)
            else:
                results += judge_engine(reference, precision, engine, partial(_given, opened), task.max_tokens)
        except CheckFailed as error:
            raise CheckFailed(f"the parity gate refused {task.name}: {precision}: {error}") from None
    parity = [result.as_dict() for result in results]
    reasons = reasons_of(results)
    return manifest | {"metrics": {"parity": parity}, "passed": not reasons, "reasons": reasons}


def _given(engine: Engine) -> Engine:
    return engine


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
    places = {"--data": data, "--model": model_dir}
    given = [f"{name} {place(value)}" for name, value in places.items() if value]
    command = " ".join(
        [f"bertship parity {place(export)}", *(["--full"] if full else []), f"--engine {engine}", *given]
    )
    kept = out / judged["task"]
    with publish(kept) as staging:
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
    return judged, kept


def _engines(export: Path, manifest: dict[str, Any], task: Task, engine: str) -> dict[str, Callable[[], Engine] | None]:
    """What is to be judged, by precision: how to open it, None for a graph on the CPU."""
    graphs = manifest["graphs"]
    if unknown := [name for name in graphs if name not in PRECISIONS]:
        raise InputError(f"{export} has a graph of unknown precision {unknown[0]!r}; export again")
    if not graphs:
        raise InputError(f"{export} has no graph; export again")
    if engine == "cpu":
        return dict.fromkeys(graphs)
    if engine == "tensorrt":
        plans = manifest.get("plans") or {}
        if not plans:
            raise InputError(f"{export} has no TensorRT plan; build one: {rebuild_command(export)}")
        rebuild = rebuild_command(export)
        if unnamed := [name for name, facts in plans.items() if name not in PLANS or not isinstance(facts, dict)]:
            raise InputError(f"{export}/{MANIFEST} has no facts of a plan {unnamed[0]!r}; build it again: {rebuild}")
        return {
            name: partial(TensorRTRunner, export / str(facts.get("file", PLANS[name])), facts, rebuild)
            for name, facts in plans.items()
        }
    provider = engine.removeprefix("onnxruntime-")
    judged = [name for name in NARROW_ENGINES if name in graphs]
    if not judged:
        raise InputError(f"{export} has none of {', '.join(NARROW_ENGINES)}, which {engine} runs; export one of them")
    return {name: partial(OnnxGpuRunner, export / graphs[name], provider, task.buckets) for name in judged}
