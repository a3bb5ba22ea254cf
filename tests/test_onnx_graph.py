"""export/onnx_graph.py: any shape, inputs by name, the mask's constant, and graphs that are not valid."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from small_bert import CONFIG, TASKS_BY_HEAD, make_model

from bertship.errors import CheckFailed
from bertship.runners import OnnxRunner
from export.onnx_graph import OPSET, check_graph, export_onnx
from export.parity import UNTRACED_SHAPES
from train.heads import HEADS
from train.model import MASK_BIAS
from train.torch_runner import TorchRunner


@pytest.fixture(scope="module", params=TASKS_BY_HEAD)
def exported(request, tmp_path_factory):
    model = make_model(request.param)
    path = tmp_path_factory.mktemp("graph") / "model.onnx"
    export_onnx(model, path)
    return model, path


def feeds_of(batch: int, tokens: int) -> dict[str, np.ndarray]:
    """Rows of random pieces and segments, the first one full, the others padded."""
    rng = np.random.default_rng(batch * 1000 + tokens)
    lengths = rng.integers(1, tokens + 1, batch)
    lengths[0] = tokens
    mask = (np.arange(tokens) < lengths[:, None]).astype(np.int64)
    return {
        "input_ids": rng.integers(0, CONFIG.vocab_size, (batch, tokens)) * mask,
        "attention_mask": mask,
        "token_type_ids": rng.integers(0, 2, (batch, tokens)) * mask,
    }


def test_shapes_unlike_the_traced_one_agree_with_pytorch(exported):
    """exp.1: nothing is baked in."""
    model, path = exported
    runner, torch_runner = OnnxRunner(path), TorchRunner(model, 0)
    for shape in UNTRACED_SHAPES:
        feeds = feeds_of(*shape)
        for got, wanted in zip(runner.run(feeds), torch_runner.run(feeds), strict=True):
            assert got.shape == wanted.shape
            np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max(), err_msg=str(shape))


def test_a_row_of_padding_alone_is_finite_and_changes_no_other(exported):
    model, path = exported
    feeds = feeds_of(3, 9)
    runner = OnnxRunner(path)
    before = runner.run(feeds)
    feeds["attention_mask"][2] = 0
    for output, wanted, plain in zip(runner.run(feeds), TorchRunner(model, 0).run(feeds), before, strict=True):
        assert np.isfinite(output).all()
        np.testing.assert_allclose(output, wanted, atol=2e-5 * np.abs(wanted).max())
        np.testing.assert_array_equal(output[:2], plain[:2])


def test_the_graph_states_its_contract(exported):
    """exp.2: the mask constant is finite in FP16, and the one of PyTorch."""
    model, path = exported
    graph = onnx.load(path)
    assert [opset.version for opset in graph.opset_import if opset.domain == ""] == [OPSET]
    assert {tensor.name for tensor in graph.graph.input} == {"input_ids", "attention_mask", "token_type_ids"}
    for tensor in graph.graph.input:
        assert tensor.type.tensor_type.elem_type == onnx.TensorProto.INT64
        assert all(dim.dim_param for dim in tensor.type.tensor_type.shape.dim)
    assert tuple(tensor.name for tensor in graph.graph.output) == model.OUTPUTS
    constants = [onnx.numpy_helper.to_array(tensor) for tensor in graph.graph.initializer]
    assert any(value.size == 1 and value.item() == MASK_BIAS for value in constants)
    assert not any(value.dtype.kind == "f" and (np.abs(value) > abs(MASK_BIAS)).any() for value in constants)


def test_inputs_go_by_name_in_any_order_and_each_of_them_counts(exported):
    """exp.7"""
    _, path = exported
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = feeds_of(2, 12)
    wanted = session.run(None, feeds)
    for got, output in zip(session.run(None, dict(reversed(feeds.items()))), wanted, strict=True):
        np.testing.assert_array_equal(got, output)
    for name, other in (("input_ids", 7), ("attention_mask", 1), ("token_type_ids", 1)):
        changed = session.run(None, feeds | {name: np.full_like(feeds[name], other)})
        assert any((a != b).any() for a, b in zip(changed, wanted, strict=True)), name


def test_gelu_is_in_the_order_that_onnx_runtime_fuses(exported, tmp_path):
    _, path = exported
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert sum(kind in ("Gelu", "BiasGelu") for kind in kinds) == CONFIG.num_hidden_layers
    assert "Erf" not in kinds


def test_keys_are_turned_in_one_step(exported):
    """Four turns a layer: query, key, value, and the sum over the values; no sizes found out anew on the way."""
    model, path = exported
    graph = onnx.load(path).graph
    turns = [list(node.attribute[0].ints) for node in graph.node if node.op_type == "Transpose"]
    layers = model.config.num_hidden_layers
    assert turns.count([0, 2, 3, 1]) == layers and turns.count([0, 2, 1, 3]) == 3 * layers
    read = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    assert all(read & set(node.output) for node in graph.node)
    # the exporter's own subgraph of sizes is of the whole graph, not of each layer
    assert sum(node.op_type in ("Slice", "Concat") for node in graph.node) < layers + 4


def test_a_model_that_reads_from_left_to_right_still_does(tmp_path):
    model = HEADS["token"](CONFIG.model_copy(update={"is_decoder": True}), 3).eval()
    export_onnx(model, tmp_path / "model.onnx")
    feeds = feeds_of(1, 12)
    (before,), (wanted,) = OnnxRunner(tmp_path / "model.onnx").run(feeds), TorchRunner(model, 0).run(feeds)
    np.testing.assert_allclose(before, wanted, atol=2e-5 * np.abs(wanted).max())
    feeds["input_ids"][0, -1] = (feeds["input_ids"][0, -1] + 1) % CONFIG.vocab_size
    (after,) = OnnxRunner(tmp_path / "model.onnx").run(feeds)
    np.testing.assert_array_equal(after[:, :-1], before[:, :-1])
    assert (after[:, -1] != before[:, -1]).any()


def test_a_graph_against_the_rules_is_refused_in_one_line(exported, tmp_path):
    _, path = exported
    graph = onnx.load(path)
    graph.graph.node[-1].input[0] = "nowhere"
    broken = tmp_path / "model.onnx"
    onnx.save(graph, broken)
    with pytest.raises(CheckFailed, match=r"model\.onnx is not a valid ONNX graph") as caught:
        check_graph(Path(broken))
    assert "\n" not in str(caught.value)
