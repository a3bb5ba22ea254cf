"""The TensorRT plans of an export: built from its graphs, judged, and published with what a loader has to know.

`add_plan` is a step of `bertship export` on the GPU's machine. `make_plans` adds plans to an export that was made
elsewhere: in NVIDIA's container, where PyTorch is not needed, they are held against the FP32 graph, which has passed
against PyTorch, on the texts that the export kept.
"""

import importlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bertship.artifacts import MANIFEST, check_files, publish, read_manifest, sha256_file
from bertship.console import read_samples
from bertship.cuda import find_device
from bertship.errors import CheckFailed, InputError
from bertship.runners import OnnxRunner
from bertship.tasks import Example, Task
from bertship.tensorrt_runner import TensorRTRunner
from bertship.tokenization import Tokenizer
from export.gate_report import write_export_report
from export.parity import Parity, judge_engine, reasons_of
from export.reference import Reference
from export.tensorrt_engine import build_engine

Report = Callable[[str], None]
PLANS = {"fp16": "model.plan", "int8_qdq": "model.int8.plan"}  # by the precision of the graph


def rebuild_command(export: Path) -> str:
    """What builds the plans of `export` again, here."""
    return f"bertship plan {export}"


def timing_cache_of(export: Path) -> Path:
    """Beside the export: it speeds the next build up, and belongs to the machine, not to what is published."""
    return export.with_name(f"{export.name}.timing.cache")


def add_plan(
    graph: Path,
    precision: str,
    reference: Reference,
    report: Report,
    *,
    trt: Any = None,
    cuda: Any = None,
    timing_cache: Path | None = None,
    workspace_mib: int = 1024,
) -> tuple[dict[str, Any], list[Parity]]:
    """Build `graph`'s plan beside it and hold it against `reference`: its facts, and the comparisons.

    Raises InputError where it cannot be built, CheckFailed where it does not run.
    """
    plan, task = graph.with_name(PLANS[precision]), reference.task
    facts = build_engine(graph, plan, task, trt, timing_cache=timing_cache, workspace_mib=workspace_mib, report=report)
    report(f"{plan.name}: comparing on {len(reference.rows)} rows")

    def open_plan() -> TensorRTRunner:
        return TensorRTRunner(plan, facts, trt=trt, cuda=cuda)

    return facts, judge_engine(reference, precision, "tensorrt", open_plan, task.max_tokens)


def _link(source: Path, target: Path) -> None:
    """A second name for the file, or a copy where the file system has no such names."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def need_tensorrt(export: Path) -> None:
    """Raise InputError where this machine lacks TensorRT, of which plans are served, or a GPU."""
    try:
        importlib.import_module("tensorrt")
    except ImportError:
        raise InputError(
            "a plan is built by TensorRT, whose Python package tensorrt is not installed here; in NVIDIA's container, "
            f"on the GPU's machine: make plan CONTAINER=..., which runs `{rebuild_command(export)}` (docs/export.md)"
        ) from None
    find_device()


def make_plans(
    export: Path, report: Report, workspace_mib: int = 1024, *, trt: Any = None, cuda: Any = None
) -> dict[str, Any]:
    """Build the plans of the export directory's graphs on this machine and publish them there; returns the manifest.

    Raises InputError where there is no graph to build from or no TensorRT and GPU, CheckFailed where a plan departs;
    then the export is left as it was.
    """
    if workspace_mib < 1:
        raise InputError(f"a workspace of {workspace_mib} MiB is too small; give 1 or more")
    manifest = read_manifest(export, "export")
    made = (export / MANIFEST).read_bytes()
    graphs = {name: file for name, file in manifest["graphs"].items() if name in PLANS}
    if not graphs:
        raise InputError(f"{export} has no graph for TensorRT; export it with --precision fp32,fp16")
    # the FP32 graph is there whether or not it is served: the others are made from it
    check_files(export, manifest, ("model.onnx", "task.json", "tokenizer.json", "samples.jsonl", *graphs.values()))
    if trt is None:
        need_tensorrt(export)  # before minutes are spent on what it is compared with
    task = Task.from_file(export / "task.json")
    tokenizer = Tokenizer.from_file(export / "tokenizer.json")
    examples = [Example(sample["columns"], None, f"sample {i}") for i, sample in enumerate(read_samples(export))]
    runner = OnnxRunner(export / "model.onnx")
    try:
        reference = Reference(task, tokenizer, runner, examples, labelled=False)
    finally:
        runner.close()
    plans, results = {}, []
    with publish(export) as staging:
        for path in sorted(export.iterdir()):
            if path.is_file() and path.name not in (MANIFEST, *PLANS.values()):
                _link(path, staging / path.name)
        for precision, file in graphs.items():
            plans[precision], judged = add_plan(
                staging / file,
                precision,
                reference,
                report,
                trt=trt,
                cuda=cuda,
                timing_cache=timing_cache_of(export),
                workspace_mib=workspace_mib,
            )
            results += judged
        if reasons := reasons_of(results):
            raise CheckFailed(f"the parity gate refused {task.name}: {reasons}; {export} is as it was")
        kept = {name: facts for name, facts in manifest["files"].items() if name not in PLANS.values()}
        for facts in plans.values():
            plan = staging / facts["file"]
            kept[plan.name] = {"bytes": plan.stat().st_size, "sha256": sha256_file(plan)}
        parity = [result.as_dict() for result in results]
        if "fp16" in plans:
            why = f"TensorRT {plans['fp16']['version']} built a plan for {plans['fp16']['gpu']}"
            manifest["best"] = {"precision": "fp16", "engine": "tensorrt", "why": why}
        manifest |= {"plans": plans, "plan_parity": parity, "files": dict(sorted(kept.items()))}
        if (export / MANIFEST).read_bytes() != made:
            raise InputError(f"{export} was made again while its plan was built; run `{rebuild_command(export)}` again")
        (staging / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        write_export_report(staging)
    return read_manifest(export)
