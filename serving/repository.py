"""Render a task's Triton repository: four model folders, from the task's definition and an export's artifacts.

`TASK` is the ensemble of `TASK_tokenize`, `TASK_encode` and `TASK_decode`. Two worlds share the folders: the embedded
server reads `configs/embedded.pbtxt` where there is one, NVIDIA's container reads `config.pbtxt`, which serves the
TensorRT plan. The configurations and the adapters depend on the task alone, so they can be kept under version control;
weights and tokenizers come from the export.
"""

import shutil
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from bertship.artifacts import check_files, publish, read_manifest, write_text
from bertship.errors import InputError
from bertship.pipeline import graph_of
from bertship.runners import OnnxRunner
from bertship.tasks import TASKS
from bertship.tasks.base import Task, TensorSpec
from bertship.triton_limits import MAX_ROWS, PLAN_MAX_BATCH

VERSION = "1"
ENCODER_INPUTS = tuple(TensorSpec(name, "INT64", (-1, -1)) for name in OnnxRunner.INPUTS)
TRUNCATED = TensorSpec("TRUNCATED", "BOOL")
COMMITTED = ("sst2", "mnli", "stsb", "squad", "ner")  # built-in tasks whose configurations version control holds
STEPS = {"tokenize": "TokenizeStep", "encode": "EncodeStep", "decode": "DecodeStep"}


def render_files(task: Task) -> dict[str, str]:
    """Every configuration and adapter of the task's four models by path: what version control holds."""
    files = {
        f"{task.name}/config.pbtxt": _text(_ensemble(task)),
        f"{task.name}/{VERSION}/.gitkeep": "",
        f"{task.name}_tokenize/config.pbtxt": _text(_tokenize(task, _plan_parameters(task))),
        f"{task.name}_tokenize/configs/embedded.pbtxt": _text(_tokenize(task, {"max_rows": str(MAX_ROWS)})),
        f"{task.name}_encode/config.pbtxt": _text(_encode_plan(task)),
        f"{task.name}_encode/configs/embedded.pbtxt": _text(_encode_embedded(task)),
        f"{task.name}_decode/config.pbtxt": _text(_decode(task)),
    }
    for step in STEPS:
        files[f"{task.name}_{step}/{VERSION}/model.py"] = _adapter(task, step)
    return files


def render(export: Path, repository: Path, precision: str | None = None) -> list[Path]:
    """Put the export's task into `repository`, each model folder appearing whole; returns the folders.

    `precision` is one of those exported; None takes what the export found best for this machine. Raises InputError.
    """
    manifest = read_manifest(export, "export")
    graph = graph_of(manifest, precision)
    check_files(export, manifest, ("task.json", "tokenizer.json", graph))
    task = Task.from_file(export / "task.json")
    weights = {
        f"{task.name}_tokenize/{VERSION}/tokenizer.json": export / "tokenizer.json",
        f"{task.name}_encode/{VERSION}/model.onnx": export / graph,
        **{f"{task.name}_{step}/{VERSION}/task.json": export / "task.json" for step in STEPS},
    }
    # a built-in task whose labels come from the data is rendered as it is committed, for any number of them
    files = render_files(TASKS.get(task.name, task))
    folders = []
    for model in (f"{task.name}_encode", f"{task.name}_tokenize", f"{task.name}_decode", task.name):
        with publish(repository / model) as staging:
            for name, text in files.items():
                if name.startswith(f"{model}/"):
                    path = staging / name.removeprefix(f"{model}/")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text, encoding="utf-8")
            for name, source in weights.items():
                if name.startswith(f"{model}/"):
                    shutil.copyfile(source, staging / name.removeprefix(f"{model}/"))
        folders.append(repository / model)
    return folders


def ready_models(repository: Path) -> list[str]:
    """The models of every task whose weights are there. Raises InputError when there is none.

    Version control holds the configurations of all built-in tasks; only an export brings what they serve.
    """
    tasks = sorted(
        path.parents[1].name.removesuffix("_encode") for path in repository.glob(f"*_encode/{VERSION}/model.onnx")
    )
    if not tasks:
        raise InputError(f"nothing to serve in {repository}: run `bertship repository --task TASK` for an export first")
    return [model for task in tasks for model in (task, *(f"{task}_{step}" for step in STEPS))]


def render_configurations(repository: Path) -> None:
    """Write what version control holds, and nothing else."""
    for task in COMMITTED:
        for name, text in render_files(TASKS[task]).items():
            write_text(repository / name, text)


def _plan_parameters(task: Task) -> dict[str, str]:
    """A TensorRT plan has few, coarse shapes: requests are padded to them and no larger than its largest batch."""
    return {"max_rows": str(PLAN_MAX_BATCH), "pad_to": ",".join(map(str, task.buckets))}


def _ensemble(task: Task) -> Any:
    config = pb.ModelConfig(name=task.name, platform="ensemble", max_batch_size=0)
    kind = task.behaviour
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
            model_name=f"{task.name}_{step}", model_version=-1, input_map=inputs, output_map=outputs
        )
    return config


def _tokenize(task: Task, parameters: dict[str, str]) -> Any:
    config = _python_step(task, "tokenize")
    config.input.extend(_input(spec) for spec in _requests(task))
    config.output.extend(_output(spec) for spec in (*ENCODER_INPUTS, *task.behaviour.row_tensors, TRUNCATED))
    for name, value in sorted(parameters.items()):
        config.parameters[name].string_value = value
    return config


def _encode_embedded(task: Task) -> Any:
    config = _python_step(task, "encode")
    config.max_batch_size = MAX_ROWS
    # ragged: requests of unlike row lengths reach one execution, where rows run unpadded anyway
    for spec in ENCODER_INPUTS:
        config.input.append(_input(TensorSpec(spec.name, spec.datatype, spec.dims[1:]), allow_ragged_batch=True))
    config.output.extend(_output(spec) for spec in task.behaviour.logits(task))
    # no delay: while one execution runs, the queue itself makes the next batch
    config.dynamic_batching.max_queue_delay_microseconds = 0
    return config


def _encode_plan(task: Task) -> Any:
    config = pb.ModelConfig(name=f"{task.name}_encode", platform="tensorrt_plan", max_batch_size=PLAN_MAX_BATCH)
    config.default_model_filename = "model.plan"
    config.input.extend(_input(TensorSpec(spec.name, spec.datatype, spec.dims[1:])) for spec in ENCODER_INPUTS)
    config.output.extend(_output(spec) for spec in task.behaviour.logits(task))
    # only profile 0 would be used if they were not listed
    profiles = [str(i) for i in range(len(task.buckets))]
    config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_GPU, profile=profiles)
    config.dynamic_batching.max_queue_delay_microseconds = 0
    return config


def _decode(task: Task) -> Any:
    kind = task.behaviour
    config = _python_step(task, "decode")
    texts = _requests(task) if kind.row_tensors else ()
    logits = [TensorSpec(spec.name, spec.datatype, (-1, *spec.dims)) for spec in kind.logits(task)]
    config.input.extend(_input(spec) for spec in (*texts, *kind.row_tensors, *logits))
    config.output.extend(_output(spec) for spec in kind.outputs(task))
    return config


def _python_step(task: Task, step: str) -> Any:
    config = pb.ModelConfig(name=f"{task.name}_{step}", backend="python", max_batch_size=0)
    # said outright: left out, Triton would start more than one
    config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_CPU)
    return config


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
