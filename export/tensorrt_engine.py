"""A TensorRT engine from an exported FP16 graph: strongly typed, one optimization profile for each bucket of the task.

An engine belongs to the library's version and to the GPU's compute capability; `build_engine` returns both, and what
else a loader has to compare, as facts for the manifest.

Which profile runs: Triton takes, among the profiles that a batch fits, the one whose optimum shape is nearest. Were the
profiles to overlap, a row's engine code could then depend on how many rows it was batched with. So they part the row
lengths among them: 1 to the first bucket, then each from one more than the bucket before; all take 1 to
PLAN_MAX_BATCH rows, as the repository's configuration promises.

What was proven, and where: with TensorRT for RTX 1.7, which builds without a GPU, tests show that the graphs parse,
that their types are consistent, that the profiles are taken and that each layer's attention is fused in each profile.
TensorRT itself (10.x and 11.x) was not run: every name used here was found in the Python bindings of 10.16 and 11.4,
but nothing shows that a real driver answers, that a timing cache is of use (RTX ignores it), that TensorRT names its
fused attentions alike, what a plan answers or how fast. Triton's TensorRT backend loads plans of TensorRT, not of RTX.
"""

import contextlib
import importlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import onnx

from bertship.artifacts import sha256_file
from bertship.cuda import find_device
from bertship.errors import InputError
from bertship.runners import OnnxRunner
from bertship.tasks import Task
from bertship.triton_limits import PLAN_MAX_BATCH

PLAN = "model.plan"
MODULES = ("tensorrt", "tensorrt_rtx")  # in order of preference: only the first one's plans are served by Triton
USUAL_BATCH = 8  # rows that kernels are chosen for
PROGRESS_S = 1.0  # between two lines of progress
_FUSED_ATTENTION = re.compile(r"\bName: _gemm_mha_v2_myl(\d+)_\d+, LayerType")  # in the verbose list of layers

Report = Callable[[str], None]


class Shapes(NamedTuple):
    """A profile: smallest, usual and largest (rows, tokens)."""

    smallest: tuple[int, int]
    usual: tuple[int, int]
    largest: tuple[int, int]


def find_tensorrt() -> Any:
    """The TensorRT module of this environment. Raises InputError when there is none."""
    for name in MODULES:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise InputError(
        "a TensorRT plan needs the Python package tensorrt, which is not installed; on the GPU's machine: "
        "pip install tensorrt"
    )


def profiles_of(task: Task) -> list[Shapes]:
    """One profile a bucket, in the order of the buckets: the repository's configuration lists them by number."""
    starts = (1, *(bucket + 1 for bucket in task.buckets[:-1]))
    return [
        # equal buckets, of a task with very short rows, give a second profile of the one length
        Shapes((1, min(start, bucket)), (min(USUAL_BATCH, PLAN_MAX_BATCH), bucket), (PLAN_MAX_BATCH, bucket))
        for start, bucket in zip(starts, task.buckets, strict=True)
    ]


def build_engine(
    graph: Path,
    target: Path,
    task: Task,
    trt: Any = None,
    *,
    compute_capabilities: Sequence[str] = (),
    workspace_mib: int = 1024,
    timing_cache: Path | None = None,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Build the FP16 ONNX file `graph` of `task` into the plan `target`; returns the plan's facts.

    `trt` is the module to build with, None takes what is installed. TensorRT builds for the GPU that is there; RTX for
    `compute_capabilities` such as "8.6", with or without one. `timing_cache` is read where it exists and written back.
    An older `target` stays when building fails. Raises InputError, in one line, for a graph that is not ours, not FP16
    or refused by the parser, for a profile that does not fit it, and where no engine can be built.
    """
    trt = trt or find_tensorrt()
    check_fp16(graph)
    return _build(
        graph,
        target,
        task,
        trt,
        compute_capabilities=compute_capabilities,
        workspace_mib=workspace_mib,
        timing_cache=timing_cache,
        report=report,
    )


def check_fp16(graph: Path) -> None:
    """Refuse a graph that is not in FP16: precision lives in the graph, so FP32 would give an FP32 engine.

    Matrices are FP16, or INT8 beside FP16 ones, which then have scales in FP16.
    """
    try:
        model = onnx.load(graph)
    except FileNotFoundError:
        raise InputError(f"no such graph: {graph}; export with the precision fp16 first") from None
    except Exception as error:  # protobuf's error has no public base class
        raise InputError(f"{graph} is no ONNX graph: {_one_line(str(error))}; export it again") from None
    half, int8 = onnx.TensorProto.FLOAT16, onnx.TensorProto.INT8
    weights = [tensor for tensor in model.graph.initializer if len(tensor.dims) > 1]
    other = next((t for t in weights if t.data_type not in (half, int8)), None)
    if other is not None or not any(tensor.data_type == half for tensor in weights):
        found = f"weight {other.name} is {onnx.TensorProto.DataType.Name(other.data_type)}" if other else "no weights"
        raise InputError(
            f"{graph} is not in FP16 ({found}): its engine would not be either; give the graph of the precision fp16"
        )


def _build(
    graph: Path,
    target: Path,
    task: Task,
    trt: Any,
    *,
    compute_capabilities: Sequence[str] = (),
    workspace_mib: int = 1024,
    timing_cache: Path | None = None,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """`build_engine` for a graph in any precision. Everything made here is referenced until the plan is written."""
    name, version = trt.__name__, trt.__version__
    rtx = name == "tensorrt_rtx"
    if not rtx and int(version.split(".")[0]) < 10:
        raise InputError(f"TensorRT {version} has no INT64 inputs; version 10 or newer is needed")
    if rtx and not compute_capabilities:
        raise InputError('name the compute capabilities to build for, such as "8.6": TensorRT for RTX has to be told')
    if not rtx and compute_capabilities:
        raise InputError(
            "TensorRT builds for the GPU that is there; leave compute_capabilities out, and build on the serving GPU"
        )
    device = {"compute_capabilities": list(compute_capabilities)} if rtx else _device()

    log = _make_log(trt)
    try:
        builder = trt.Builder(log)
    except TypeError:  # pybind's way to say that the library made no builder
        raise InputError(f"{name} {version} does not start: {log.faults('no reason given')}") from None
    # always said: TensorRT 10 would otherwise choose types by itself, TensorRT 11 knows nothing else
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(graph)):
        errors = [_parser_error(parser.get_error(i)) for i in range(parser.num_errors)]
        raise InputError(f"{name} {version} cannot read {graph}: {'; '.join(errors) or log.faults('no reason given')}")
    inputs, outputs = _check_network(trt, network, task, graph)

    config = builder.create_builder_config()
    if workspace_mib < 1:
        raise InputError(f"a workspace of {workspace_mib} MiB is too small; give 1 or more")
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace_mib << 20)
    if config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) != workspace_mib << 20:
        raise InputError(f"a workspace of {workspace_mib} MiB was refused: {log.faults('no reason given')}")
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # the log then lists the layers
    if rtx:
        _set_compute_capabilities(trt, config, compute_capabilities)
    monitor = _make_monitor(trt, report)  # referenced until the plan is there
    config.progress_monitor = monitor
    profiles = profiles_of(task)
    kept = [_add_profile(builder, config, inputs, shapes, graph, log) for shapes in profiles]
    cache = None if timing_cache is None else _load_timing_cache(config, timing_cache, report)

    started = time.monotonic()
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise InputError(f"{name} {version} cannot build {graph}: {log.faults('no reason given')}")
    seconds = time.monotonic() - started
    _write(target, plan)
    if cache is not None and timing_cache is not None:
        _write(timing_cache, cache.serialize())
    regions = log.fused
    fused = [regions[i] for i in range(len(kept))]
    report(f"{target.name}: {plan.nbytes / 1e6:.1f} MB in {seconds:.0f} s, fused attentions by profile: {fused}")
    return {
        "file": target.name,
        "sha256": sha256_file(target),
        "bytes": plan.nbytes,
        "module": name,
        "version": version,
        **device,
        "graph": {"file": graph.name, "sha256": sha256_file(graph)},
        "inputs": inputs,
        "outputs": outputs,
        "profiles": [shapes._asdict() for shapes in profiles],
        "profile_inputs": "rows x tokens, the same for every input",
        "workspace_mib": workspace_mib,
        "fused_attentions": fused,
        "build_seconds": round(seconds, 1),
    }


def _make_log(trt: Any) -> Any:
    """A logger of the module: keeps errors, and counts fused attentions by region of the layer list."""

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self._names: dict[str, int] = {}

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                # a machine without a driver is told so at every step, whatever else is wrong
                if "catchCudaError" not in message:
                    self.errors.append(_one_line(message))
            elif "_gemm_mha_v2" in message:
                for match in _FUSED_ATTENTION.finditer(message):
                    self._names[match[0]] = int(match[1])

        @property
        def fused(self) -> Counter[int]:
            return Counter(self._names.values())

        def faults(self, otherwise: str) -> str:
            return "; ".join(self.errors) or otherwise

    return Log()


def _check_network(trt: Any, network: Any, task: Task, graph: Path) -> tuple[list[str], list[str]]:
    """Names of inputs and outputs, when they are what the repository's configuration says of `task`."""
    inputs = {(t := network.get_input(i)).name: t for i in range(network.num_inputs)}
    unfit = [
        name
        for name in OnnxRunner.INPUTS
        if name not in inputs or (inputs[name].dtype, len(inputs[name].shape)) != (trt.int64, 2)
    ]
    if unfit or len(inputs) != len(OnnxRunner.INPUTS):
        raise InputError(
            f"{graph} has inputs {sorted(inputs)}; {', '.join(OnnxRunner.INPUTS)}, INT64 [-1, -1], are needed"
        )
    outputs = {(t := network.get_output(i)).name: t for i in range(network.num_outputs)}
    wanted = {spec.name: (-1, *spec.dims) for spec in task.behaviour.logits(task)}
    for name, dims in wanted.items():
        shape = tuple(outputs[name].shape) if name in outputs else None
        fits = (
            shape is not None
            and len(shape) == len(dims)
            and all(d in (-1, s) for d, s in zip(dims, shape, strict=True))
        )
        if not fits or outputs[name].dtype != trt.float32:
            found = f"{outputs[name].dtype} {list(shape)}" if shape is not None else f"missing among {sorted(outputs)}"
            raise InputError(f"{graph}: output {name} is {found}; task {task.name} needs FP32 {list(dims)}")
    return list(OnnxRunner.INPUTS), list(wanted)


def _add_profile(builder: Any, config: Any, inputs: Sequence[str], shapes: Shapes, graph: Path, log: Any) -> Any:
    """Add a profile that gives each of `inputs` the same `shapes`. Raises InputError when it is refused."""
    profile = builder.create_optimization_profile()
    said = f"{graph}: the profile {shapes.smallest} to {shapes.largest}, rows and tokens, was refused"
    try:
        for name in inputs:
            profile.set_shape(name, *shapes)
    except (ValueError, RuntimeError) as error:
        raise InputError(f"{said}: {_one_line(str(error))}") from None
    if config.add_optimization_profile(profile) < 0:  # no exception: -1 is all that is said
        raise InputError(f"{said}: {log.faults('no reason given')}")
    return profile


def _set_compute_capabilities(trt: Any, config: Any, capabilities: Sequence[str]) -> None:
    config.num_compute_capabilities = len(capabilities)
    known = {
        f"{int(n[2:]) // 10}.{int(n[2:]) % 10}": n for n in dir(trt.ComputeCapability) if re.fullmatch(r"SM\d+", n)
    }
    for i, capability in enumerate(capabilities):
        fits = capability in known
        if not fits or not config.set_compute_capability(getattr(trt.ComputeCapability, known[capability]), i):
            offered = ", ".join(sorted(known, key=float))
            raise InputError(f"compute capability {capability!r} is not one of {trt.__name__}'s: {offered}")


def _load_timing_cache(config: Any, path: Path, report: Report) -> Any:
    """The cache at `path`, or an empty one where there is none or it belongs to another machine, which is reported."""
    if path.is_file():
        cache = config.create_timing_cache(path.read_bytes())
        if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
            return cache
        report(f"{path} was made with another GPU or TensorRT; starting an empty timing cache")
    cache = config.create_timing_cache(b"")
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        raise InputError(f"no timing cache could be made for {path}; build without one")
    return cache


def _parser_error(error: Any) -> str:
    node = error.node_name()
    place = f"node {node} ({error.node_operator()}): " if node else ""
    return place + _one_line(error.desc())


def _device() -> dict[str, Any]:
    """The GPU that TensorRT builds for, the first that the process sees, and the driver, as facts for the manifest."""
    device = find_device()
    return {
        "compute_capabilities": [device.compute_capability],
        "gpu": device.name,
        "driver_cuda": device.driver_cuda,
    }


def _make_monitor(trt: Any, report: Report) -> Any:
    """Tells how far the outermost phase of the build is, a line every PROGRESS_S at most."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._steps: dict[str, int] = {}
            self._said = time.monotonic()

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if not parent_phase:
                self._steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            total = self._steps.get(phase_name)
            if total and time.monotonic() - self._said >= PROGRESS_S:
                report(f"building: {phase_name}, {step} of {total}")
                self._said = time.monotonic()
            return True  # go on

        def phase_finish(self, phase_name: str) -> None:
            self._steps.pop(phase_name, None)

    return Monitor()


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _write(target: Path, data: Any) -> None:
    """A file from a buffer, beside its place and renamed there: whole or not at all."""
    with _beside(target) as staging:
        with staging.open("wb") as file:
            file.write(memoryview(data))
        staging.replace(target)


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    staging = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        yield staging
    finally:
        staging.unlink(missing_ok=True)
