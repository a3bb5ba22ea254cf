"""export/tensorrt_engine.py, built with TensorRT for RTX, which needs no GPU: parsing, types, profiles, fusion.

It says nothing of kernels, numerics, speed, or of TensorRT's own plans.
"""

import ctypes
import dataclasses
import types

import numpy as np
import onnx
import pytest
import torch
from fake_tensorrt import FakeCuda
from google.protobuf import text_format
from onnx import helper, numpy_helper
from small_bert import CONFIG, TASKS_BY_HEAD, make_model
from test_precision import rows_of
from tritonclient.grpc import model_config_pb2

from bertship import cuda
from bertship.errors import InputError
from bertship.tasks import TASKS, Task
from bertship.triton_limits import PLAN_MAX_BATCH
from export import qdq, tensorrt_engine
from export.fp16 import NORM, fp32_norms, to_fp16
from export.onnx_graph import export_onnx
from export.precision import to_int8
from export.qdq import to_int8_qdq
from export.tensorrt_engine import Shapes, build_engine, check_fp16, find_tensorrt, profiles_of
from serving.repository import render_files
from train.heads import HEADS

LAYERS = 2
WIDER = CONFIG.model_copy(update={"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS})
TARGETS = ("8.6", "8.9")


@pytest.fixture(scope="module")
def rtx():
    return pytest.importorskip("tensorrt_rtx", reason="pip install -c requirements/constraints.txt tensorrt-rtx-cu12")


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """Each head's graph in FP32 and FP16."""
    folder, found = tmp_path_factory.mktemp("graphs"), {}
    for head in TASKS_BY_HEAD:
        found[head] = folder / f"{head}.onnx", folder / f"{head}.fp16.onnx"
        export_onnx(make_model(head, WIDER), found[head][0])
        to_fp16(*found[head])
    return found


def refused(*arguments, **more) -> str:
    with pytest.raises(InputError) as caught:
        build_engine(*arguments, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("head", TASKS_BY_HEAD)
def test_every_profile_is_taken_and_every_attention_fused(rtx, graphs, tmp_path, head):
    task, lines = TASKS_BY_HEAD[head], []
    facts = build_engine(
        graphs[head][1], tmp_path / "model.plan", task, rtx, compute_capabilities=TARGETS, report=lines.append
    )
    assert facts["fused_attentions"] == [LAYERS] * len(task.buckets)
    assert [profile["largest"] for profile in facts["profiles"]] == [(PLAN_MAX_BATCH, n) for n in task.buckets]
    assert (facts["module"], facts["version"]) == ("tensorrt_rtx", rtx.__version__)
    assert facts["compute_capabilities"] == list(TARGETS)
    assert facts["bytes"] == (tmp_path / "model.plan").stat().st_size
    assert facts["graph"]["sha256"] != facts["sha256"]
    assert [path.name for path in tmp_path.iterdir()] == ["model.plan"]
    assert "fused attentions" in lines[-1]


def test_an_fp32_graph_is_refused_and_would_have_fused_nothing(rtx, graphs, tmp_path):
    task, (fp32, _) = TASKS_BY_HEAD["sentence"], graphs["sentence"]
    assert "is not in FP16" in refused(fp32, tmp_path / "model.plan", task, rtx, compute_capabilities=TARGETS)
    facts = tensorrt_engine._build(fp32, tmp_path / "model.plan", task, rtx, compute_capabilities=TARGETS)
    assert facts["fused_attentions"] == [0, 0]
    to_int8(fp32, tmp_path / "model.int8.onnx")
    with pytest.raises(InputError, match="is not in FP16"):
        check_fp16(tmp_path / "model.int8.onnx")


def test_broken_graphs_are_refused_in_one_line_with_the_node(rtx, graphs, tmp_path):
    task, (_, graph) = TASKS_BY_HEAD["token"], graphs["token"]
    plan, broken = tmp_path / "model.plan", tmp_path / "broken.onnx"
    plan.write_bytes(b"older")

    def spoil(change) -> str:
        model = onnx.load(graph)
        change(model.graph)
        onnx.save(model, broken)
        return refused(broken, plan, task, rtx, compute_capabilities=TARGETS)

    def unknown_operator(graph):
        next(node for node in graph.node if node.op_type == "Softmax").op_type = "Softmaximum"

    def mixed_types(graph):
        bias = next(t for t in graph.initializer if t.name.endswith("query.bias"))
        bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias).astype(np.float32), bias.name))

    def other_input(graph):
        graph.input.append(helper.make_tensor_value_info("position_ids", onnx.TensorProto.INT64, ["batch", "sequence"]))

    assert "Softmaximum" in (message := spoil(unknown_operator))
    assert "node node_Softmax" in message
    assert "types" in spoil(mixed_types).lower()
    assert "position_ids" in spoil(other_input)
    broken.write_bytes(graph.read_bytes()[:5000])
    assert "is no ONNX graph" in refused(broken, plan, task, rtx, compute_capabilities=TARGETS)
    assert "no such graph" in refused(tmp_path / "none.onnx", plan, task, rtx, compute_capabilities=TARGETS)
    assert plan.read_bytes() == b"older"


def test_a_graph_of_another_task_is_refused(rtx, graphs, tmp_path):
    other = dataclasses.replace(TASKS_BY_HEAD["sentence"], labels=("one", "two", "three", "four"))
    message = refused(graphs["sentence"][1], tmp_path / "p", other, rtx, compute_capabilities=TARGETS)
    assert "output logits is" in message
    message = refused(graphs["sentence"][1], tmp_path / "p", TASKS_BY_HEAD["span"], rtx, compute_capabilities=TARGETS)
    assert "start_logits is missing among ['logits']" in message


@pytest.mark.parametrize(
    "shapes",
    [
        Shapes((1, 5), (8, 4), (32, 4)),
        Shapes((2, 1), (1, 4), (32, 4)),
        Shapes((1, 1), (8, 4), (0, 4)),
        Shapes((1, -1), (8, 4), (32, 4)),
    ],
)
def test_a_bad_profile_is_refused(rtx, graphs, tmp_path, monkeypatch, shapes):
    monkeypatch.setattr(tensorrt_engine, "profiles_of", lambda task: [shapes])
    task = TASKS_BY_HEAD["sentence"]
    message = refused(graphs["sentence"][1], tmp_path / "model.plan", task, rtx, compute_capabilities=TARGETS)
    assert "was refused" in message
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_built_says_what_can(rtx, graphs, tmp_path):
    common = (graphs["sentence"][1], tmp_path / "model.plan", TASKS_BY_HEAD["sentence"])
    assert "name the compute capabilities" in refused(*common, rtx)
    assert "'9.0' is not one of tensorrt_rtx's: 7.5, 8.0" in refused(*common, rtx, compute_capabilities=["9.0"])
    assert "workspace of 0 MiB" in refused(*common, rtx, compute_capabilities=TARGETS, workspace_mib=0)
    full = types.SimpleNamespace(__name__="tensorrt", __version__="10.14.1")
    assert "leave compute_capabilities out" in refused(*common, full, compute_capabilities=TARGETS)
    full.__version__ = "8.6.1"
    assert "version 10 or newer" in refused(*common, full)


@pytest.mark.filterwarnings("ignore:.*Timing cache operations are no-ops")
def test_a_timing_cache_is_written_and_read_back(rtx, graphs, tmp_path):
    common = (graphs["sentence"][1], tmp_path / "model.plan", TASKS_BY_HEAD["sentence"], rtx)
    cache, lines = tmp_path / "timing.cache", []
    for _ in range(2):
        build_engine(*common, compute_capabilities=TARGETS, timing_cache=cache, report=lines.append)
        assert cache.stat().st_size > 0
    assert not any("another GPU" in line for line in lines)


@pytest.mark.parametrize("task", [*TASKS.values(), *(Task("t", "sentence", max_tokens=n) for n in (8, 9, 31, 512))])
def test_profiles_part_the_lengths_among_them_in_the_order_of_the_buckets(task):
    profiles = profiles_of(task)
    assert [shapes.largest for shapes in profiles] == [(PLAN_MAX_BATCH, bucket) for bucket in task.buckets]
    for tokens in range(1, task.max_tokens + 1):
        fits = [s for s in profiles if s.smallest[1] <= tokens <= s.largest[1]]
        assert len(fits) == 1 or len(set(task.buckets)) == 1
    for shapes in profiles:
        assert shapes.smallest[0] == 1
        assert all(a <= b <= c for a, b, c in zip(*shapes, strict=True))


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_the_repository_promises_what_the_profiles_hold(task):
    """exp.4"""
    files = render_files(task)
    encode = text_format.Parse(files[f"{task.name}_encode/config.pbtxt"], model_config_pb2.ModelConfig())
    tokenize = text_format.Parse(files[f"{task.name}_tokenize/config.pbtxt"], model_config_pb2.ModelConfig())
    profiles = profiles_of(task)
    assert {shapes.largest[0] for shapes in profiles} == {encode.max_batch_size}
    assert int(tokenize.parameters["max_rows"].string_value) <= encode.max_batch_size
    padded_to = [int(length) for length in tokenize.parameters["pad_to"].string_value.split(",")]
    assert [shapes.largest[1] for shapes in profiles] == padded_to
    assert list(encode.instance_group[0].profile) == [str(i) for i in range(len(profiles))]
    assert profiles[0].smallest == (1, 1)


def test_without_a_module_or_a_driver_one_line_says_so(monkeypatch):
    monkeypatch.setattr(tensorrt_engine, "MODULES", ("no_such_tensorrt",))
    with pytest.raises(InputError, match="pip install tensorrt"):
        find_tensorrt()

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(InputError, match="no NVIDIA driver here"):
        tensorrt_engine._device()


def test_the_device_goes_into_the_facts(monkeypatch):
    """A stand-in driver: not a real GPU."""
    monkeypatch.setattr(cuda, "load_driver", FakeCuda)
    assert tensorrt_engine._device() == {
        "compute_capabilities": ["9.0"],
        "gpu": "NVIDIA H200",
        "driver_cuda": "12.8",
    }


@pytest.fixture
def full(rtx, monkeypatch):
    """TensorRT's own path, with the builder of RTX behind its name and a stand-in GPU: the calls, not the library."""
    monkeypatch.setattr(cuda, "load_driver", FakeCuda)

    class Builder(rtx.Builder):
        def create_builder_config(self):
            config = super().create_builder_config()
            config.num_compute_capabilities = 1
            config.set_compute_capability(rtx.ComputeCapability.SM86, 0)
            return config

    return types.SimpleNamespace(**vars(rtx) | {"__name__": "tensorrt", "__version__": "10.16.1", "Builder": Builder})


def test_full_tensorrt_builds_for_the_gpu_that_is_there_and_says_which(full, graphs, tmp_path):
    task = TASKS_BY_HEAD["span"]
    facts = build_engine(graphs["span"][1], tmp_path / "model.plan", task, full)
    assert (facts["module"], facts["version"], facts["gpu"]) == ("tensorrt", "10.16.1", "NVIDIA H200")
    assert facts["compute_capabilities"] == ["9.0"]
    assert facts["fused_attentions"] == [LAYERS] * len(task.buckets)
    assert {"driver_cuda", "profiles", "sha256", "graph", "workspace_mib"} <= set(facts)


def test_progress_is_told_while_it_builds(rtx):
    said, clock = [], iter(range(0, 1000, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorrt_engine.time, "monotonic", lambda: next(clock))
        monitor = tensorrt_engine._make_monitor(rtx, said.append)
        monitor.phase_start("Building", None, 10)
        monitor.phase_start("Tactics", "Building", 500)
        assert monitor.step_complete("Tactics", 7) and monitor.step_complete("Building", 3)
        monitor.phase_finish("Tactics")
        monitor.phase_finish("Building")
        assert monitor.step_complete("Building", 4)
    assert said == ["building: Building, 3 of 10"]


def test_the_monitor_is_in_the_build(rtx, graphs, tmp_path, monkeypatch):
    seen = []
    make = tensorrt_engine._make_monitor

    def spying(trt, report):
        monitor = make(trt, report)
        seen.append(monitor)
        return monitor

    monkeypatch.setattr(tensorrt_engine, "_make_monitor", spying)
    monkeypatch.setattr(tensorrt_engine, "PROGRESS_S", 0)
    lines = []
    common = (graphs["sentence"][1], tmp_path / "model.plan", TASKS_BY_HEAD["sentence"], rtx)
    build_engine(*common, compute_capabilities=TARGETS, report=lines.append)
    assert len(seen) == 1
    assert any(line.startswith("building: ") for line in lines)


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_every_tasks_graph_builds_with_all_its_profiles(rtx, tmp_path, task):
    if task.behaviour.needs_labels and not task.labels:
        task = task.with_labels(("O", "B-X", "I-X"))
    torch.manual_seed(1)
    export_onnx(HEADS[task.behaviour.head](WIDER, task.behaviour.width(task)).eval(), tmp_path / "model.onnx")
    to_fp16(tmp_path / "model.onnx", tmp_path / "model.fp16.onnx")
    facts = build_engine(tmp_path / "model.fp16.onnx", tmp_path / "model.plan", task, rtx, compute_capabilities=TARGETS)
    assert facts["fused_attentions"] == [LAYERS] * len(task.buckets)
    assert [profile["largest"] for profile in facts["profiles"]] == [(PLAN_MAX_BATCH, n) for n in task.buckets]


def outliers(head):
    """A model whose second LayerNorm sees distances that FP16 cannot square."""
    model = make_model(head, WIDER)
    with torch.no_grad():
        model.encoder.blocks[0].attention_norm.weight[3] = 300
    return model


@pytest.mark.parametrize("head", TASKS_BY_HEAD)
def test_fp32_norms_and_int8_keep_every_attention_fused(rtx, tmp_path, monkeypatch, head):
    task, rows = TASKS_BY_HEAD[head], rows_of((3, 17, 32))
    export_onnx(outliers(head), tmp_path / "model.onnx")
    to_fp16(tmp_path / "model.onnx", tmp_path / "model.fp16.onnx", rows)
    monkeypatch.setattr(qdq, "LARGEST_ERROR", 0.1)  # every layer of a model with random weights
    to_int8_qdq(tmp_path / "model.onnx", tmp_path / "model.int8.qdq.onnx", rows)
    assert fp32_norms(tmp_path / "model.onnx", rows)
    # query, key and value share one; the last query of one decision a text is of the first token alone
    shared = 4 * LAYERS + (head == "sentence")
    for name, quantized in (("model.fp16.onnx", 0), ("model.int8.qdq.onnx", shared)):
        nodes = onnx.load(tmp_path / name).graph.node
        assert sum(node.op_type == "QuantizeLinear" for node in nodes) == quantized
        assert any(node.op_type == NORM and node.input[0].endswith("_cast_to_fp32") for node in nodes)
        facts = build_engine(tmp_path / name, tmp_path / "model.plan", task, rtx, compute_capabilities=TARGETS)
        assert facts["fused_attentions"] == [LAYERS] * len(task.buckets), name
