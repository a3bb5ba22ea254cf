"""Check a task's rendered configurations without a server: what Triton says late, vaguely or not at all.

Each of the three worlds (`config.pbtxt`, `configs/onnxruntime.pbtxt`, `configs/embedded.pbtxt`) is checked as the set
of four configurations that Triton would read there.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from bertship.errors import InputError
from serving.plan import Plan
from serving.warmup import warmed_shapes

WORLDS = ("", "onnxruntime", "embedded")  # what --model-config-name says; empty: nothing
STEPS = ("tokenize", "encode", "decode")
_AUTO_DELAY = "leave max_queue_delay_microseconds at 0: while one execution runs, the queue itself makes the next batch"


class _Tensor(NamedTuple):
    """What an ensemble passes on: Triton's type, and all dimensions, a batch's included."""

    kind: int
    dims: tuple[int, ...]
    source: str


def lint(files: Mapping[str, str], task_name: str, plan: Plan | None = None) -> list[str]:
    """Faults of the configurations in `files` (path below the repository: text); empty where there is none.

    `plan`: what the plan beside them takes, to hold the configuration against.
    """
    found: dict[str, None] = {}  # in order, each once: worlds share configurations
    for world in WORLDS:
        try:
            configs = {name: read_config(files, name, world) for name in models_of(task_name)}
        except InputError as error:
            found[str(error)] = None
            continue
        for fault in _faults(configs, task_name, world, plan):
            found[fault] = None
    return list(found)


def lint_repository(repository: Path, task_name: str, plan: Plan | None = None) -> list[str]:
    """`lint` for the files of a repository on disk, and whether each model's code and weights are there."""
    files = {
        path.relative_to(repository).as_posix(): path.read_text(encoding="utf-8")
        for name in models_of(task_name)
        for path in sorted((repository / name).rglob("*.pbtxt"))
    }
    faults = lint(files, task_name, plan)
    for step in STEPS:
        folder = repository / f"{task_name}_{step}"
        versions = [path for path in folder.glob("*") if path.name.isdigit() and path.name != "0"]
        if not versions:
            faults.append(f"{folder}: no version folder such as {folder / '1'}")
        needed = {"tokenize": ["tokenizer.json"], "encode": ["model.onnx"], "decode": []}[step]
        for version in versions:
            faults += [
                f"{version / name} is missing"
                for name in ("model.py", "task.json", *needed)
                if not (version / name).is_file()
            ]
    return faults


def models_of(task_name: str) -> list[str]:
    return [task_name, *(f"{task_name}_{step}" for step in STEPS)]


def read_config(files: Mapping[str, str], model: str, world: str) -> Any:
    """The configuration that Triton reads in a world, as protobuf. Raises InputError for none, or a malformed one."""
    named = f"{model}/configs/{world}.pbtxt"
    path = named if world and named in files else f"{model}/config.pbtxt"
    if path not in files:
        raise InputError(f"{path} is missing")
    try:
        return text_format.Parse(files[path], pb.ModelConfig())
    except text_format.ParseError as error:
        raise InputError(f"{path}: {' '.join(str(error).split())}") from None


def _faults(configs: Mapping[str, Any], task_name: str, world: str, plan: Plan | None) -> Iterator[str]:
    ensemble = configs[task_name]
    tokenize, encode, decode = (configs[f"{task_name}_{step}"] for step in STEPS)
    for name, config in configs.items():
        if config.name != name:
            yield f"{name}: its configuration is named {config.name!r}; the folder's name is needed"
        if config.dynamic_batching.max_queue_delay_microseconds:
            yield f"{name}: {_AUTO_DELAY}"
    yield from _ensemble_faults(ensemble, configs)
    for config in (tokenize, encode, decode):
        yield from _step_faults(config)
    yield from _ragged_faults(ensemble, configs)
    yield from _size_faults(tokenize, encode, world)
    if plan and encode.platform == "tensorrt_plan":
        yield from _plan_faults(tokenize, encode, plan)


def _ensemble_faults(ensemble: Any, configs: Mapping[str, Any]) -> Iterator[str]:
    """Wiring, shapes and types from the ensemble's inputs through its steps to its outputs."""
    name = ensemble.name
    if ensemble.platform != "ensemble" or ensemble.max_batch_size:
        yield f"{name}: platform {ensemble.platform!r}, max_batch_size {ensemble.max_batch_size}: an ensemble of 0"
    if ensemble.model_warmup:
        yield f"{name}: Triton refuses warm-up of an ensemble; give it to the steps"
    known = {tensor.name: _Tensor(tensor.data_type, tuple(tensor.dims), name) for tensor in ensemble.input}
    for step in ensemble.ensemble_scheduling.step:
        model = configs.get(step.model_name)
        if model is None:
            yield f"{name}: step {step.model_name} is no model of this task"
            continue
        inputs = {tensor.name: _whole(tensor, model) for tensor in model.input}
        outputs = {tensor.name: _whole(tensor, model) for tensor in model.output}
        for missing in sorted(inputs.keys() - step.input_map.keys()):
            yield f"{name}: input {missing} of {step.model_name} gets nothing"
        for given, tensor in sorted(step.input_map.items()):
            if given not in inputs:
                yield f"{name}: {step.model_name} has no input {given}"
            elif tensor not in known:
                yield f"{name}: {tensor}, for input {given} of {step.model_name}, comes from no earlier step"
            else:
                yield from _unlike(f"{step.model_name}'s input {given}", inputs[given], known[tensor])
        for made, tensor in sorted(step.output_map.items()):
            if made not in outputs:
                yield f"{name}: {step.model_name} has no output {made}"
            elif tensor in known:
                yield f"{name}: {tensor} is made twice, by {known[tensor].source} and by {step.model_name}"
            else:
                known[tensor] = outputs[made]
    for tensor in ensemble.output:
        if tensor.name not in known:
            yield f"{name}: no step makes output {tensor.name}"
        else:
            yield from _unlike(f"output {tensor.name}", _whole(tensor, ensemble), known[tensor.name])


def _whole(tensor: Any, model: Any) -> _Tensor:
    dims = tuple(tensor.dims)
    return _Tensor(tensor.data_type, (-1, *dims) if model.max_batch_size else dims, model.name)


def _unlike(what: str, wanted: _Tensor, given: _Tensor) -> Iterator[str]:
    if wanted.kind != given.kind:
        kinds = [pb.DataType.Name(kind) for kind in (wanted.kind, given.kind)]
        yield f"{what} is {kinds[0]}, {given.source} gives {kinds[1]}"
    fits = len(wanted.dims) == len(given.dims) and all(
        a == b or -1 in (a, b) for a, b in zip(wanted.dims, given.dims, strict=True)
    )
    if not fits:
        yield f"{what} has the shape {list(wanted.dims)}, {given.source} gives {list(given.dims)}"


def _step_faults(config: Any) -> Iterator[str]:
    if not config.model_warmup:
        yield f"{config.name}: no warm-up, so its first requests would be slow"
    counts = [group.count for group in config.instance_group]
    if counts != [1]:
        yield f"{config.name}: {counts or 'no'} instances are named; one of count 1 is needed, Triton's default is more"
    if config.backend == "python" and config.platform:
        yield f"{config.name}: both backend and platform are named"
    if not config.backend and not config.platform:
        yield f"{config.name}: neither backend nor platform is named"


def _ragged_faults(ensemble: Any, configs: Mapping[str, Any]) -> Iterator[str]:
    for tensor in ensemble.input:
        if tensor.allow_ragged_batch:
            yield f"{ensemble.name}: allow_ragged_batch of input {tensor.name} is ignored on an ensemble; remove it"
    for name, config in configs.items():
        ragged = [tensor.name for tensor in config.input if tensor.allow_ragged_batch]
        if not ragged or config is ensemble:
            continue
        if not config.max_batch_size or not config.HasField("dynamic_batching"):
            yield f"{name}: ragged inputs without dynamic batching and a max_batch_size are never batched"
        if config.backend != "python":
            yield f"{name}: ragged inputs reach a native backend as one concatenated row; pad to buckets instead"
        if ragged != [tensor.name for tensor in config.input]:
            yield f"{name}: only {', '.join(ragged)} may be ragged; rows need all inputs to be"


def _size_faults(tokenize: Any, encode: Any, world: str) -> Iterator[str]:
    """Whether the encoder takes what the tokenizer may send, in every length it may have, and is warm in each."""
    where = f"{tokenize.name} and {encode.name}{f' ({world})' if world else ''}"
    most = _number(tokenize.parameters["max_rows"].string_value)
    if most is None or most > encode.max_batch_size:
        yield (
            f"{where}: requests of up to {tokenize.parameters['max_rows'].string_value or 'any number of'} rows meet "
            f"a max_batch_size of {encode.max_batch_size}"
        )
    if not encode.HasField("dynamic_batching"):
        yield f"{where}: no dynamic_batching, so requests are never batched"
    if encode.backend == "python":
        if not all(tensor.allow_ragged_batch for tensor in encode.input):
            yield f"{where}: without ragged inputs a batch ends at the first request of another length"
        return
    parts = tokenize.parameters["pad_to"].string_value.split(",")
    buckets = [int(part) for part in parts if part.isdigit()]
    if len(buckets) < len(parts) or buckets != sorted(set(buckets)):
        yield f"{where}: pad_to {tokenize.parameters['pad_to'].string_value!r}: ascending lengths are needed"
        return
    warmed = warmed_shapes(encode)
    for shape in [(rows, bucket) for bucket in buckets for rows in (1, encode.max_batch_size)]:
        if shape not in warmed:
            yield f"{where}: no warm-up at {shape[0]} rows of {shape[1]} tokens"


def _plan_faults(tokenize: Any, encode: Any, plan: Plan) -> Iterator[str]:
    name = encode.name
    if encode.max_batch_size > plan.max_batch:
        yield f"{name}: max_batch_size {encode.max_batch_size}, the plan takes {plan.max_batch} rows"
    if tokenize.parameters["pad_to"].string_value != ",".join(map(str, plan.buckets)):
        yield (
            f"{name}: {tokenize.name} pads to {tokenize.parameters['pad_to'].string_value}, the plan's rows have "
            f"{', '.join(map(str, plan.buckets))} tokens"
        )
    listed = [profile for group in encode.instance_group for profile in group.profile]
    if listed != [str(i) for i in range(plan.profiles)]:
        yield f"{name}: profiles {', '.join(listed) or 'none'} are listed, the plan has {plan.profiles}, from 0"
    for tensor in encode.input:
        kind = pb.DataType.Name(tensor.data_type).removeprefix("TYPE_")
        if kind != plan.input_types.get(tensor.name):
            yield f"{name}: input {tensor.name} is {kind}, the plan's is {plan.input_types.get(tensor.name)}"


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def describe(task_name: str) -> str:
    """What `lint` has passed, in a line."""
    return f"{task_name}: wiring, shapes, types, batches, ragged inputs and warm-up fit together in all variants"
