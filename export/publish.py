"""Export a fine-tuned run: make each precision, hold it against PyTorch, publish what passes, whole or not at all."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertship.artifacts import code_digest, publish, read_manifest, sha256_json, write_manifest
from bertship.errors import CheckFailed, InputError
from bertship.pipeline import Pipeline, Runner
from bertship.tasks import Example
from export.onnx_graph import OPSET, export_onnx
from export.parity import Parity, Reference, judge
from export.precision import PRECISIONS, best_for_cpu
from train.evaluate import load_finetuned
from train.heads import HeadedModel
from train.torch_runner import TorchRunner

SAMPLES = "samples.jsonl"  # real texts with PyTorch's answers: for checking and loading a server


def fingerprint_of(run: Path, precisions: Sequence[str], examples: Sequence[Example], lenient: bool = False) -> str:
    """Changes when anything that the artifacts or their gate depend on does."""
    root = Path(__file__).parents[1]
    core = ("metrics", "pipeline", "runners", "tasks/*", "tokenization")
    model = ("checkpoint", "evaluate", "features", "heads", "model", "torch_runner")
    code = code_digest(root, [*(f"bertship/{n}.py" for n in core), *(f"train/{n}.py" for n in model), "export/*.py"])
    data = [[dict(e.columns), e.target] for e in examples]
    files = read_manifest(run, "finetune")["files"]
    return sha256_json([files, sorted(precisions), lenient, data, best_for_cpu(), code])


def export_run(
    run: Path,
    out: Path,
    precisions: Sequence[str],
    examples: Sequence[Example],
    report: Callable[[str], None],
    lenient: bool = False,
) -> dict[str, Any]:
    """Export the fine-tuning run at `run` to `out`; `examples` are the gate's texts. Returns the manifest.

    Every precision has to pass the gate; where `lenient`, one that does not is left out, with a warning and its reasons
    in the manifest, as long as FP32 passes. Raises InputError for an unknown precision or a directory that is no run,
    CheckFailed when the gate refuses; then `out` is left as it was.
    """
    unknown = [name for name in precisions if name not in PRECISIONS]
    if unknown or not precisions:
        raise InputError(f"unknown precision {', '.join(unknown) or 'none'}; precisions are {', '.join(PRECISIONS)}")
    task, tokenizer, model = load_finetuned(run)
    fingerprint = fingerprint_of(run, precisions, examples, lenient)
    runner = TorchRunner(model, tokenizer.pad_id)
    reference = Reference(task, tokenizer, runner, examples)
    with publish(out) as staging:
        results, refused = _make(model, reference, precisions, staging, report)
        if refused and not (lenient and "fp32" not in refused):
            reasons = "; ".join(refused.values())
            raise CheckFailed(f"the parity gate refused {task.name}: {reasons}; nothing was published")
        for name, reason in refused.items():
            report(f"WARNING: {name} is left out, the parity gate refused it: {reason}")
            (staging / PRECISIONS[name].file).unlink(missing_ok=True)
        kept = [name for name in precisions if name not in refused]
        parity = [result.as_dict() for result in results if result.precision in kept]
        (staging / "parity.json").write_text(json.dumps(parity, indent=2) + "\n", "utf-8")
        (staging / "task.json").write_text(task.to_json(), encoding="utf-8")
        shutil.copy2(run / "model" / "tokenizer.json", staging / "tokenizer.json")
        _write_samples(reference, runner, staging / SAMPLES)
        return write_manifest(
            staging,
            "export",
            fingerprint=fingerprint,
            config={"precisions": list(precisions), "opset": OPSET},
            inputs={"run": str(run), "parity_examples": len(reference.examples)},
            metrics={"parity": parity},
            task=task.name,
            graphs={name: PRECISIONS[name].file for name in kept},
            refused=refused,
            # what was not asked for, or did not pass, is not served
            serve=best_for_cpu() if best_for_cpu() in kept else kept[0],
        )


def _make(
    model: HeadedModel, reference: Reference, precisions: Sequence[str], staging: Path, report: Callable[[str], None]
) -> tuple[list[Parity], dict[str, str]]:
    """Every precision's comparisons, and the reasons against those that did not pass.

    FP32 is judged even where it is not asked for: the others are made from it.
    """
    source = staging / PRECISIONS["fp32"].file
    export_onnx(model, source)
    results: list[Parity] = []
    refused = {}
    for name in dict.fromkeys(("fp32", *precisions)):
        make = PRECISIONS[name].make
        path = staging / PRECISIONS[name].file
        try:
            if make is not None:
                make(source, path)
            report(f"{name}: {path.stat().st_size / 1e6:.1f} MB, comparing with PyTorch on {len(reference.rows)} rows")
            judged = judge(reference, name, path, model.config.max_position_embeddings)
        except CheckFailed as error:
            refused[name] = f"{name}: {error}"
            continue
        results += judged
        reasons = [f"{name} ({result.mode}): {failure}" for result in judged for failure in result.failures]
        if reasons:
            refused[name] = "; ".join(reasons)
    return results, refused


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
