"""Export a fine-tuned model: make each precision, hold it against PyTorch, publish what passes, whole or not at all."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertship.artifacts import code_digest, publish, sha256_json, write_manifest
from bertship.errors import CheckFailed, InputError
from bertship.pipeline import Pipeline, Runner
from bertship.tasks import Example
from bertship.tokenization import Row
from export.gate_report import write_export_report
from export.judge import judge
from export.machine import Machine, choose, find_machine
from export.onnx_graph import OPSET, export_onnx
from export.parity import Parity, reasons_of, rows_of_all_lengths
from export.plan import PLANS, add_plan, timing_cache_of
from export.precision import PRECISIONS, read_recipe
from export.reference import Reference, spread
from export.source import Source, digest_of, from_run
from train.scoring import columns_of
from train.torch_runner import TorchRunner

SAMPLES = "samples.jsonl"  # real texts with PyTorch's answers: for checking and loading a server
CALIBRATION_ROWS = 256
JUDGED_ROWS = 128

Report = Callable[[str], None]


class Text(NamedTuple):
    """Rows of real text to take ranges from, and others, of which the gate counts none, to judge a recipe by."""

    calibration: Sequence[Row]
    judged: Sequence[Row]


def fingerprint_of(
    source: Source,
    precisions: Sequence[str],
    examples: Sequence[Example],
    calibration: Sequence[Example],
    lenient: bool,
    machine: Machine,
) -> str:
    """Changes when anything that the artifacts or their gate depend on does."""
    root = Path(__file__).parents[1]
    core = ("metrics", "pipeline", "runners", "tasks/*", "tokenization")
    model = ("checkpoint", "evaluate", "features", "heads", "model", "torch_runner")
    code = code_digest(root, [*(f"bertship/{n}.py" for n in core), *(f"train/{n}.py" for n in model), "export/*.py"])
    data = [[[dict(e.columns), e.target] for e in split] for split in (examples, spread(calibration, CALIBRATION_ROWS))]
    files = [digest_of(source.model_dir), source.task.to_json()]
    return sha256_json([files, sorted(precisions), lenient, data, machine.as_dict(), code])


def export_run(
    run: Path,
    out: Path,
    precisions: Sequence[str],
    examples: Sequence[Example],
    report: Report,
    lenient: bool = False,
) -> dict[str, Any]:
    """`export_source` of the fine-tuning run at `run`. Raises InputError for a directory that is none."""
    _check_precisions(precisions)
    return export_source(from_run(run), out, precisions, examples, report, lenient)


def export_source(
    source: Source,
    out: Path,
    precisions: Sequence[str],
    examples: Sequence[Example],
    report: Report,
    lenient: bool = False,
    calibration: Sequence[Example] = (),
    machine: Machine | None = None,
    data: str | None = None,
) -> dict[str, Any]:
    """Export `source` to `out`; `examples` are the gate's texts. Returns the manifest.

    Every precision has to pass the gate; where `lenient`, one that does not is left out, with a warning and its reasons
    in the manifest, as long as FP32 passes. `calibration` are texts from which ranges are taken, the gate's own where
    there are none. Where TensorRT and its GPU are, a plan is built and judged too. Raises InputError for an unknown
    precision, CheckFailed when the gate refuses; then `out` is left as it was. `data` is where the texts are from.
    """
    _check_precisions(precisions)
    machine = machine or find_machine()
    task = source.task
    fingerprint = fingerprint_of(source, precisions, examples, calibration, lenient, machine)
    runner = TorchRunner(source.model, source.tokenizer.pad_id)
    reference = Reference(task, source.tokenizer, runner, examples)
    text = Text(
        _rows_of(source, spread(calibration or reference.examples, CALIBRATION_ROWS), CALIBRATION_ROWS),
        _rows_of(source, _beside(reference, examples), JUDGED_ROWS),
    )
    if source.degenerate:
        report(f"WARNING: the model of {source.where} is degenerate ({source.degenerate}): its answers are of no use")
    with publish(out) as staging:
        results, refused, recipes = _make(source, reference, text, precisions, staging, report)
        kept = [name for name in precisions if name not in refused]
        plans, judged = _add_plans(kept, machine, reference, out, staging, refused, report)
        results += judged
        if refused and not (lenient and "fp32" not in refused):
            raise CheckFailed(
                f"the parity gate refused {task.name}: {'; '.join(refused.values())}; nothing was published"
            )
        for name, reason in refused.items():
            report(f"WARNING: {name} is left out, the parity gate refused it: {reason}")
            (staging / (PRECISIONS[name].file if name in PRECISIONS else name)).unlink(missing_ok=True)
        parity = [result.as_dict() for result in results if result.precision in kept]
        choice = choose(machine, kept, plans)
        report(f"{choice.precision} on {choice.engine} is best here: {choice.why}")
        (staging / "parity.json").write_text(json.dumps(parity, indent=2) + "\n", "utf-8")
        (staging / "task.json").write_text(task.to_json(), encoding="utf-8")
        source.tokenizer.backend.save(str(staging / "tokenizer.json"))
        _write_samples(reference, runner, staging / SAMPLES)
        manifest = write_manifest(
            staging,
            "export",
            fingerprint=fingerprint,
            config={"precisions": list(precisions), "opset": OPSET},
            inputs={
                "run": str(source.where),
                "model": str(source.model_dir),
                "model_files": digest_of(source.model_dir),
                "data": data or source.data,
                "parity_examples": len(reference.examples),
            },
            metrics={"parity": parity},
            task=task.name,
            degenerate=source.degenerate,
            graphs={name: PRECISIONS[name].file for name in kept},
            recipes={name: recipes[name] for name in kept if name in recipes},
            refused=refused,
            # the graph for an ONNX Runtime on this processor; what was not asked for, or did not pass, is not served
            serve=choose(machine.without_gpu(), kept, ()).precision,
            best=choice.as_dict(),
            plans=plans,
        )
        write_export_report(staging)
    return manifest


def _check_precisions(precisions: Sequence[str]) -> None:
    unknown = [name for name in precisions if name not in PRECISIONS]
    if unknown or not precisions:
        raise InputError(f"unknown precision {', '.join(unknown) or 'none'}; precisions are {', '.join(PRECISIONS)}")


def _beside(reference: Reference, examples: Sequence[Example]) -> list[Example]:
    """JUDGED_ROWS of the `examples` that the gate leaves out; none where there are fewer."""
    counted = {id(example) for example in reference.examples}
    others = [example for example in examples if id(example) not in counted]
    return spread(others, JUDGED_ROWS) if len(others) >= JUDGED_ROWS else []


def _rows_of(source: Source, examples: Sequence[Example], most: int) -> list[Row]:
    """Rows of all lengths of `examples`, at most `most`."""
    if not examples:
        return []
    columns = columns_of(source.task, examples, annotations=True)
    return rows_of_all_lengths(source.task.behaviour.encode(source.task, source.tokenizer, columns).rows, most)


def _make(
    source: Source,
    reference: Reference,
    text: Text,
    precisions: Sequence[str],
    staging: Path,
    report: Report,
) -> tuple[list[Parity], dict[str, str], dict[str, dict[str, Any]]]:
    """Every precision's comparisons, the reasons against those that did not pass, and the recipes of calibrated ones.

    FP32 is judged even where it is not asked for: the others are made from it.
    """
    original = staging / PRECISIONS["fp32"].file
    export_onnx(source.model, original)
    results: list[Parity] = []
    refused, recipes = {}, {}
    for name in dict.fromkeys(("fp32", *precisions)):
        precision = PRECISIONS[name]
        path = staging / precision.file
        try:
            for judged in _attempts(source, reference, text, name, original, path, report):
                if not (reasons := reasons_of(judged)):
                    break
                report(f"{name}: the gate refuses this one: {reasons.split('; ')[0]}")
            if precision.calibrated and (recipe := read_recipe(path)):
                recipes[name] = recipe
        except CheckFailed as error:
            refused[name] = f"{name}: {error}"
            continue
        results += judged
        if reasons:
            refused[name] = reasons
    return results, refused, recipes


def _attempts(
    source: Source,
    reference: Reference,
    text: Text,
    name: str,
    original: Path,
    path: Path,
    report: Report,
) -> Iterator[list[Parity]]:
    """The comparisons of each attempt at a precision, every one nearer to FP32 than that before."""
    precision = PRECISIONS[name]
    if precision.attempts is None and precision.make is not None:
        precision.make(original, path, *((text.calibration,) if precision.calibrated else ()))
    attempts = precision.attempts(original, path, *text) if precision.attempts else (None,)
    for attempt, _ in enumerate(attempts):
        if attempt:
            report(f"{name}: once more, with less error and less of its speed")
        if kept := read_recipe(path).get("fp32_layers"):
            report(f"{name}: {', '.join(kept)} stay in FP32, as INT8 would change too many decisions there")
        size = path.stat().st_size / 1e6
        report(f"{name}: {size:.1f} MB, comparing with PyTorch on {len(reference.rows)} rows")
        yield judge(reference, name, path, source.model)


def _add_plans(
    kept: Sequence[str],
    machine: Machine,
    reference: Reference,
    out: Path,
    staging: Path,
    refused: dict[str, str],
    report: Report,
) -> tuple[dict[str, Any], list[Parity]]:
    """Facts by precision, and comparisons, of the plans that passed; the others' reasons go into `refused` by file."""
    plans: dict[str, Any] = {}
    results: list[Parity] = []
    for name in kept if machine.builds_plans else ():
        if name not in PLANS:
            continue
        try:
            facts, judged = add_plan(
                staging / PRECISIONS[name].file, name, reference, report, timing_cache=timing_cache_of(out)
            )
        except (CheckFailed, InputError) as error:
            refused[PLANS[name]] = f"{PLANS[name]}: {error}"
            continue
        if reasons := reasons_of(judged):
            refused[PLANS[name]] = reasons
            continue
        plans[name] = facts
        results += judged
    return plans, results


def _write_samples(reference: Reference, runner: Runner, path: Path) -> None:
    """One JSON object a line: a text's columns and what PyTorch FP32 answers as a server would."""
    task = reference.task
    columns = {name: reference.columns[name] for name in task.behaviour.inputs}
    # a server is not given the annotations of labelled data, so what they changed is asked for again without them
    plain = Pipeline(task, reference.tokenizer, runner)(columns) if task.behaviour.annotations else reference.answers
    names = [spec.name for spec in task.behaviour.outputs(task)]
    with path.open("w", encoding="utf-8") as file:
        for i in range(len(reference.examples)):
            record = {
                "columns": {name: values[i] for name, values in columns.items()},
                "answer": {name: _plain(plain[name][i]) for name in names},
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
