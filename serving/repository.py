"""Render a task's Triton repository: four model folders, from the task's definition and an export's artifacts.

`TASK` is the ensemble of `TASK_tokenize`, `TASK_encode` and `TASK_decode`. Three worlds share the folders. Triton reads
`config.pbtxt`, which serves the TensorRT plan, unless `--model-config-name` says otherwise: `onnxruntime` for NVIDIA's
container without TensorRT, `embedded` for the wheel's server; a model without a file of that name keeps `config.pbtxt`.
The configurations and the adapters depend on the task alone, or on the facts of its plan where an export has one, so
those of the built-in tasks are kept under version control; weights and tokenizers come from the export.
"""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from bertship.artifacts import check_files, publish, read_manifest, versions, write_text
from bertship.errors import CheckFailed, InputError
from bertship.pipeline import graph_of
from bertship.runners import OnnxRunner
from bertship.tasks import TASKS
from bertship.tasks.base import Task, TensorSpec
from bertship.triton_limits import CORES, MAX_QUEUE, MAX_ROWS, QUEUE_TIMEOUT_S
from bertship.wire import LABELS
from serving.plan import PLAN_FILE, Plan, default_plan, plan_of
from serving.repository_lint import lint
from serving.warmup import add_warmups

VERSION = "1"
ENCODER_INPUTS = tuple(TensorSpec(name, "INT64", (-1, -1)) for name in OnnxRunner.INPUTS)
TRUNCATED = TensorSpec("TRUNCATED", "BOOL")
SERVED = "served.json"  # beside the graph: what is served, of which run, and how good the gate found it
COMMITTED = ("sst2", "mnli", "stsb", "squad", "ner")  # built-in tasks whose configurations version control holds
STEPS = {"tokenize": "TokenizeStep", "encode": "EncodeStep", "decode": "DecodeStep"}


def render_files(task: Task, version: str = VERSION, *, plan: Plan | None = None) -> dict[str, str]:
    """Every configuration and adapter of the task's four models by path: what version control holds.

    The steps' files are those of `version`, and the ensemble names that version of each, so that several can be loaded
    side by side and none ever meets another's tokenization. `plan` None promises what the builder makes of the task by
    default.
    """
    plan = plan or default_plan(task)
    files = {
        f"{task.name}/config.pbtxt": _text(_ensemble(task, version)),
        f"{task.name}/{VERSION}/.gitkeep": "",
        f"{task.name}_tokenize/config.pbtxt": _text(_tokenize(task, _padding(plan), plan.input_types)),
        f"{task.name}_tokenize/configs/onnxruntime.pbtxt": _text(_tokenize(task, _padding(plan))),
        f"{task.name}_tokenize/configs/embedded.pbtxt": _text(_tokenize(task, {"max_rows": str(MAX_ROWS)})),
        f"{task.name}_encode/config.pbtxt": _text(_encode_plan(task, plan)),
        f"{task.name}_encode/configs/onnxruntime.pbtxt": _text(_encode_onnxruntime(task, plan)),
        f"{task.name}_encode/configs/embedded.pbtxt": _text(_encode_embedded(task)),
        f"{task.name}_decode/config.pbtxt": _text(_decode(task)),
    }
    for step in STEPS:
        files[f"{task.name}_{step}/{version}/model.py"] = _adapter(task, step)
    return files


def contents(
    export: Path, precision: str | None = None, version: str = VERSION
) -> tuple[dict[str, str], dict[str, Path]]:
    """What an export becomes in a repository as `version`, by path: texts to write, and its files to copy.

    `precision` is one of those exported; None takes what the export found best for this machine. Raises InputError
    for an export or a plan that will not do, CheckFailed where the configurations contradict each other.
    """
    manifest = read_manifest(export, "export")
    graph = graph_of(manifest, precision)
    check_files(export, manifest, ("task.json", "tokenizer.json", graph))
    task = Task.from_file(export / "task.json")
    if plan := plan_of(manifest, task, precision):
        check_files(export, manifest, (plan.file,))
    texts = render_files(as_committed(task), version, plan=plan)
    if faults := lint(texts, task.name, plan):
        raise CheckFailed(f"the configurations of {task.name} do not fit together: {'; '.join(faults)}")
    encode = f"{task.name}_encode/{version}"
    texts[f"{encode}/{SERVED}"] = json.dumps(facts_of(manifest, precision), indent=2) + "\n"
    return texts, {
        f"{task.name}_tokenize/{version}/tokenizer.json": export / "tokenizer.json",
        f"{encode}/model.onnx": export / graph,
        **({f"{encode}/{PLAN_FILE}": export / plan.file} if plan else {}),
        **{f"{task.name}_{step}/{version}/task.json": export / "task.json" for step in STEPS},
    }


def facts_of(manifest: Mapping[str, Any], precision: str | None) -> dict[str, Any]:
    """What is kept with a served version: the graph, its run, hashes of all that decides an answer, and its metric.

    `metric` is None where the gate's texts had no labels.
    """
    graph, precision = graph_of(manifest, precision), precision or str(manifest["serve"])
    inputs = manifest.get("inputs", {})
    names = sorted({graph, "task.json", "tokenizer.json", PLAN_FILE} & manifest["files"].keys())
    judged = [
        row for row in manifest.get("metrics", {}).get("parity", ())
        if row["precision"] == precision and row["artifact_metric"] is not None
    ]  # fmt: skip
    worst = min(judged, key=lambda row: row["artifact_metric"], default=None)
    metric = (
        {"name": worst["metric"], "value": worst["artifact_metric"], "examples": worst["examples"]} if worst else None
    )
    return {
        "precision": precision,
        "graph": graph,
        "bertship": versions()["bertship"],
        "run": inputs.get("run") or inputs.get("model"),
        "files": {name: manifest["files"][name]["sha256"] for name in names},
        "metric": metric,
        "degenerate": manifest.get("degenerate") or "",
    }


def render(export: Path, repository: Path, precision: str | None = None) -> list[Path]:
    """Put the export's task into `repository`, each model folder appearing whole; returns the folders.

    `precision` and errors are those of `contents`.
    """
    texts, brought = contents(export, precision)
    name = Task.from_file(export / "task.json").name
    folders = [repository / model for model in (*(f"{name}_{step}" for step in ("encode", "tokenize", "decode")), name)]
    for folder in folders:
        with publish(folder) as staging:
            copy_into(staging, f"{folder.name}/", texts, brought)
    return folders


def copy_into(folder: Path, prefix: str, texts: Mapping[str, str], brought: Mapping[str, Path]) -> None:
    """Write into `folder` what `contents` names under `prefix`."""
    for path, text in texts.items():
        if path.startswith(prefix):
            target = folder / path.removeprefix(prefix)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    for path, source in brought.items():
        if path.startswith(prefix):
            shutil.copyfile(source, folder / path.removeprefix(prefix))


def as_committed(task: Task) -> Task:
    """The task as it is rendered: a built-in one whose labels come from the data, for any number of them."""
    return dataclasses.replace(task, labels=TASKS[task.name].labels) if task.name in TASKS else task


def ready_models(repository: Path) -> list[str]:
    """The models of every task whose weights are there. Raises InputError when there is none.

    Version control holds the configurations of all built-in tasks; only an export brings what they serve.
    """
    tasks = sorted(
        {path.parents[1].name.removesuffix("_encode") for path in repository.glob("*_encode/[0-9]*/model.onnx")}
    )
    if not tasks:
        raise InputError(f"nothing to serve in {repository}: run `bertship repository --task TASK` for an export first")
    return [model for task in tasks for model in (task, *(f"{task}_{step}" for step in STEPS))]


def served_version(repository: Path, task: str) -> str:
    """The version of its steps that the task's ensemble names. Raises InputError where there is none."""
    path = repository / task / "config.pbtxt"
    try:
        config = text_format.Parse(path.read_text(encoding="utf-8"), pb.ModelConfig())
    except FileNotFoundError:
        raise InputError(f"{repository} has no task {task}: run `bertship repository --task {task}` first") from None
    except text_format.ParseError as error:
        raise InputError(f"{path} is no model configuration: {error}") from None
    versions = {step.model_version for step in config.ensemble_scheduling.step}
    if len(versions) != 1 or min(versions) < 1:
        raise InputError(f"{path} names no one version of its steps: run `bertship repository --task {task}` again")
    return str(versions.pop())


def served_precision(repository: Path, task_name: str) -> str | None:
    """The precision of the graph that is served of the task; None where it was not put there by `render`."""
    facts = served_facts(repository, task_name, served_version(repository, task_name))
    return str(facts["precision"]) if facts else None


def served_facts(repository: Path, task_name: str, version: str) -> dict[str, Any]:
    """`facts_of` the export that a version is from; empty where it was not put there by `render` or a deployment."""
    path = repository / f"{task_name}_encode" / version / SERVED
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def render_configurations(repository: Path) -> None:
    """Write what version control holds, and nothing else."""
    for task in COMMITTED:
        for name, text in render_files(TASKS[task]).items():
            write_text(repository / name, text)


def _padding(plan: Plan) -> dict[str, str]:
    """Native backends merge equal shapes only: requests are padded to few coarse ones, and no larger than a batch."""
    return {"max_rows": str(plan.max_batch), "pad_to": ",".join(map(str, plan.buckets))}


def _ensemble(task: Task, version: str) -> Any:
    config = pb.ModelConfig(name=task.name, platform="ensemble", max_batch_size=0)
    kind = task.behaviour
    if task.labels and any(spec.name == "PROBABILITIES" for spec in kind.outputs(task)):
        config.parameters[LABELS].string_value = json.dumps(task.labels, ensure_ascii=False)
    config.input.extend(_input(spec) for spec in _requests(task))
    config.output.extend(_output(spec) for spec in (*kind.outputs(task), TRUNCATED))
    texts = {name: name for name in kind.inputs}
    rows = {spec.name: spec.name for spec in ENCODER_INPUTS}
    known = {spec.name: spec.name for spec in kind.row_tensors}
    logits = {spec.name: spec.name for spec in kind.logits(task)}
    answers = {spec.name: spec.name for spec in kind.outputs(task)}
    wiring = {
        "tokenize": (texts, rows | known | {TRUNCATED.name: TRUNCATED.name}),
        "encode": (rows, logits),
        "decode": ((texts if known else {}) | known | logits, answers),
    }
    for step, (inputs, outputs) in wiring.items():
        config.ensemble_scheduling.step.add(
            model_name=f"{task.name}_{step}", model_version=int(version), input_map=inputs, output_map=outputs
        )
    return config


def _tokenize(task: Task, parameters: dict[str, str], types: Mapping[str, str] | None = None) -> Any:
    config = _python_step(task, "tokenize")
    config.input.extend(_input(spec) for spec in _requests(task))
    rows = [dataclasses.replace(spec, datatype=(types or {}).get(spec.name, spec.datatype)) for spec in ENCODER_INPUTS]
    config.output.extend(_output(spec) for spec in (*rows, *task.behaviour.row_tensors, TRUNCATED))
    for name, value in sorted(parameters.items()):
        config.parameters[name].string_value = value
    add_warmups(config, [{"tokens": 1}])
    return config


def _encode_embedded(task: Task) -> Any:
    config = _python_step(task, "encode")
    config.max_batch_size = MAX_ROWS
    # ragged: requests of unlike row lengths reach one execution, where rows run unpadded anyway
    config.input.extend(_rows(allow_ragged_batch=True))
    config.output.extend(_output(spec) for spec in task.behaviour.logits(task))
    # no delay: while one execution runs, the queue itself makes the next batch
    config.dynamic_batching.max_queue_delay_microseconds = 0
    _drop_what_nobody_waits_for(config)
    _take_turns(config)
    add_warmups(config, [{"tokens": task.max_tokens}, {"tokens": task.max_tokens, "rows": 2}])
    return config


def _drop_what_nobody_waits_for(config: Any) -> None:
    """Requests whose own timeout has passed leave the queue unanswered by the encoder, and the queue has an end."""
    policy = config.dynamic_batching.default_queue_policy
    policy.timeout_action = pb.ModelQueuePolicy.REJECT
    # a request's own timeout counts only where it is shorter than this one
    policy.default_timeout_microseconds = QUEUE_TIMEOUT_S * 1_000_000
    policy.allow_timeout_override = True
    policy.max_queue_size = MAX_QUEUE


def _encode_plan(task: Task, plan: Plan) -> Any:
    config = _encode_native(task, plan, "tensorrt_plan", PLAN_FILE, plan.input_types)
    # only profile 0 would be used if they were not listed
    config.instance_group[0].profile.extend(str(i) for i in range(plan.profiles))
    return config


def _encode_onnxruntime(task: Task, plan: Plan) -> Any:
    config = _encode_native(task, plan, "onnxruntime_onnx", "model.onnx", {})
    config.backend = "onnxruntime"
    _take_turns(config)
    return config


def _encode_native(task: Task, plan: Plan, platform: str, file: str, types: Mapping[str, str]) -> Any:
    config = pb.ModelConfig(name=f"{task.name}_encode", platform=platform, max_batch_size=plan.max_batch)
    config.default_model_filename = file
    config.version_policy.all.SetInParent()
    config.input.extend(_rows(types))
    config.output.extend(_output(spec) for spec in task.behaviour.logits(task))
    # automatic: the GPU where there is one
    config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_AUTO)
    config.dynamic_batching.max_queue_delay_microseconds = 0
    _drop_what_nobody_waits_for(config)
    add_warmups(config, [{"tokens": n, "rows": rows} for n in plan.buckets for rows in (1, plan.max_batch)])
    return config


def _take_turns(config: Any) -> None:
    """An execution keeps every core busy, so the encoders of several tasks run one after another."""
    config.instance_group[0].rate_limiter.resources.add(name=CORES, count=1, **{"global": True})


def _decode(task: Task) -> Any:
    kind = task.behaviour
    config = _python_step(task, "decode")
    texts = _requests(task) if kind.row_tensors else ()
    logits = [TensorSpec(spec.name, spec.datatype, (-1, *spec.dims)) for spec in kind.logits(task)]
    config.input.extend(_input(spec) for spec in (*texts, *kind.row_tensors, *logits))
    config.output.extend(_output(spec) for spec in kind.outputs(task))
    add_warmups(config, [{"tokens": 1}])
    return config


def _python_step(task: Task, step: str) -> Any:
    config = pb.ModelConfig(name=f"{task.name}_{step}", backend="python", max_batch_size=0)
    # a new version is loaded beside the one that serves, and the old one is kept
    config.version_policy.all.SetInParent()
    # said outright: left out, Triton would start more than one
    config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_CPU)
    return config


def _rows(types: Mapping[str, str] | None = None, **more: Any) -> list[Any]:
    """The encoder's inputs without the batch's dimension."""
    return [
        _input(TensorSpec(spec.name, (types or {}).get(spec.name, spec.datatype), spec.dims[1:]), **more)
        for spec in ENCODER_INPUTS
    ]


def _requests(task: Task) -> tuple[TensorSpec, ...]:
    return task.behaviour.request()


def _datatype(spec: TensorSpec) -> int:
    return int(pb.DataType.Value("TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"))


def _input(spec: TensorSpec, **more: Any) -> Any:
    return pb.ModelInput(name=spec.name, data_type=_datatype(spec), dims=spec.dims, **more)


def _output(spec: TensorSpec) -> Any:
    return pb.ModelOutput(name=spec.name, data_type=_datatype(spec), dims=spec.dims)


def _text(config: Any) -> str:
    return str(text_format.MessageToString(config))


def _adapter(task: Task, step: str) -> str:
    what = {
        "tokenize": "texts to rows",
        "encode": "rows to logits, where no native backend does it",
        "decode": "logits to answers",
    }
    return (
        f'"""{task.name}, step `{step}`: {what[step]}. The code is in bertship."""\n\n'
        f"from bertship.triton_steps import {STEPS[step]} as TritonPythonModel\n\n"
        '__all__ = ["TritonPythonModel"]\n'
    )


if __name__ == "__main__":  # `python -m serving.repository`, after a change of what is rendered
    render_configurations(Path(__file__).parents[1] / "model_repository")
