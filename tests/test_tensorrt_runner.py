"""bertship/tensorrt_runner.py and bertship/cuda.py against stand-ins: the calls and their order, not a GPU."""

import numpy as np
import pytest
from fake_tensorrt import FakeCuda, fake_tensorrt, write_plan
from small_bert import TASKS_BY_HEAD, TOKENIZER, make_examples, make_model
from test_onnx_graph import feeds_of

from bertship.artifacts import sha256_file
from bertship.cuda import Device, Stream, find_device
from bertship.errors import InputError
from bertship.runners import OnnxRunner
from bertship.tensorrt_runner import TensorRTRunner, check_plan
from bertship.tokenization import Row
from export.fp16 import to_fp16
from export.onnx_graph import export_onnx
from export.parity import judge_engine, reasons_of
from export.reference import Reference
from export.tensorrt_engine import profiles_of
from train.torch_runner import TorchRunner


@pytest.fixture(scope="module", params=TASKS_BY_HEAD)
def made(request, tmp_path_factory):
    """A head's task and model, its FP16 graph, a stand-in plan of it and the plan's facts."""
    folder, task, model = tmp_path_factory.mktemp("plan"), TASKS_BY_HEAD[request.param], make_model(request.param)
    export_onnx(model, folder / "model.onnx")
    to_fp16(folder / "model.onnx", folder / "model.fp16.onnx")
    write_plan(folder / "model.plan", folder / "model.fp16.onnx", profiles_of(task))
    facts = {
        "file": "model.plan",
        "sha256": sha256_file(folder / "model.plan"),
        "version": "10.16.1.11",
        "compute_capabilities": ["9.0"],
        "gpu": "NVIDIA H200",
        "driver_cuda": "12.8",
        "outputs": [spec.name for spec in task.behaviour.logits(task)],
    }
    return request.param, task, model, folder, facts


def open_plan(made, cuda=None, trt=None):
    _, _, _, folder, facts = made
    return TensorRTRunner(folder / "model.plan", facts, trt=trt or fake_tensorrt(), cuda=cuda or FakeCuda())


def test_a_plan_answers_as_its_graph_does_and_passes_the_gate(made):
    head, task, model, folder, _ = made
    reference = Reference(task, TOKENIZER, TorchRunner(model, TOKENIZER.pad_id), make_examples(head))
    results = judge_engine(reference, "fp16", "tensorrt", lambda: open_plan(made), task.max_tokens)
    assert reasons_of(results) == ""
    assert {result.engine for result in results} == {"tensorrt"}
    feeds = feeds_of(5, task.max_tokens)
    with_graph = OnnxRunner(folder / "model.fp16.onnx", threads=1).run(feeds)
    for got, wanted in zip(open_plan(made).run(feeds), with_graph, strict=True):
        np.testing.assert_array_equal(got, wanted)
        assert got.dtype == np.float32


def test_each_profile_has_one_context_and_memory_for_its_largest_batch(made):
    _, task, _, _, _ = made
    cuda = FakeCuda()
    runner = open_plan(made, cuda)
    assert (runner.buckets, runner.max_batch) == (task.buckets, 32)
    for shape in ((1, 1), (32, task.buckets[0]), (3, task.buckets[0])):
        runner.run(feeds_of(*shape))
    one = len(cuda.live)
    assert one == len(runner.inputs) + len(runner.outputs)
    runner.run(feeds_of(2, task.max_tokens))
    assert len(cuda.live) == 2 * one
    runner.close()
    assert cuda.live == {}
    runner.close()
    assert cuda.calls.count("cuStreamDestroy_v2") == cuda.calls.count("cuStreamCreate") == 1


def test_a_batch_that_fits_no_profile_is_refused_with_what_there_is(made):
    _, task, _, _, _ = made
    with pytest.raises(InputError, match=r"no profile for a batch of \[33, 4\]; it has \[1, 1\] to"):
        open_plan(made).run(feeds_of(33, 4))
    long = Row(np.zeros(task.max_tokens + 1, np.int64), np.zeros(task.max_tokens + 1, np.int64))
    with pytest.raises(InputError, match="longer than the engine takes"):
        open_plan(made)([long])


def test_the_shortest_texts_fit_the_smallest_profile(made):
    """exp.5: `""` and "hi", and a row alone has the answer that it has in a batch."""
    _, task, _, folder, _ = made
    columns = {name: ["", "hi"] for name in task.behaviour.inputs}
    rows = task.behaviour.encode(task, TOKENIZER, columns).rows
    wanted = OnnxRunner(folder / "model.fp16.onnx", threads=1)(rows)
    runner = open_plan(made)
    for name, values in runner(rows).items():
        for row, value, expected in zip(rows, values, wanted[name], strict=True):
            np.testing.assert_allclose(value, expected, atol=2e-2 * np.abs(expected).max())
            np.testing.assert_allclose(runner([row])[name][0], value, atol=2e-2 * np.abs(value).max())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"trt": fake_tensorrt("11.4.0")}, "was built by TensorRT 10.16.1.11, here is 11.4.0; build it here: bertship"),
        (
            {"cuda": FakeCuda((8, 6), b"NVIDIA A10", 12040)},
            r"built for compute capability 9.0 \(NVIDIA H200, driver for CUDA 12.8\), here is 8.6 \(NVIDIA A10, driver",
        ),
    ],
)
def test_a_plan_of_another_machine_is_refused_with_the_command(made, change, says):
    """exp.6"""
    with pytest.raises(InputError, match=says) as caught:
        open_plan(made, **change)
    assert "bertship plan" in str(caught.value) and "\n" not in str(caught.value)


def test_a_changed_or_broken_plan_is_refused(made, tmp_path):
    _, _, _, _, facts = made
    other = tmp_path / "model.plan"
    device = Device("NVIDIA H200", "9.0", "12.8")
    other.write_bytes(b"not a plan")
    with pytest.raises(InputError, match="missing or has changed"):
        check_plan(other, facts, facts["version"], device, "bertship plan x")
    with pytest.raises(InputError, match="does not load in TensorRT"):
        TensorRTRunner(other, facts | {"sha256": sha256_file(other)}, trt=fake_tensorrt(), cuda=FakeCuda())


def test_without_tensorrt_one_line_says_so(made):
    _, _, _, folder, facts = made
    with pytest.raises(InputError, match=r"needs the Python package tensorrt 10\.16\.1\.11"):
        TensorRTRunner(folder / "model.plan", facts, cuda=FakeCuda())


def test_the_device_is_what_the_driver_says():
    assert find_device(FakeCuda()) == Device("NVIDIA H200", "9.0", "12.8")
    cuda = FakeCuda()

    def cuInit(flags):
        return 100

    cuda.cuInit = cuInit
    with pytest.raises(InputError, match=r"the GPU cannot be used: cuInit says 100"):
        find_device(cuda)


def test_copies_are_there_after_the_wait():
    cuda = FakeCuda()
    stream = Stream(cuda)
    sent, got = np.arange(6, dtype=np.int64).reshape(2, 3), np.zeros((2, 3), np.int64)
    address = stream.allocate(sent.nbytes)
    stream.upload(address, sent)
    stream.download(got, address)
    assert not got.any()
    stream.wait()
    np.testing.assert_array_equal(got, sent)
