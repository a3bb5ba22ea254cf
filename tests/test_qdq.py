"""export/qdq.py and export/fp16.py: ranges from text, islands where they are needed, INT8 that TensorRT can read."""

import numpy as np
import onnx
import pytest
import torch
from small_bert import CONFIG, TASKS_BY_HEAD, make_model
from test_onnx_graph import feeds_of
from test_precision import constants_of, rows_of

from bertship.errors import CheckFailed, InputError
from bertship.runners import OnnxRunner
from export import fp16, qdq
from export.calibration import Activity, calibrate
from export.fp16 import deviations, fp32_norms, to_fp16
from export.onnx_graph import export_onnx
from export.parity import check_shapes
from export.qdq import linear_layers, to_int8_qdq
from export.tolerances import TOLERANCES

ROWS = rows_of((1, 4, 9, 17, 32, 48))


@pytest.fixture(scope="module", params=TASKS_BY_HEAD)
def graphs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    export_onnx(make_model(request.param), folder / "model.onnx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qdq, "LARGEST_ERROR", 0.1)  # every layer of a model with random weights
        to_int8_qdq(folder / "model.onnx", folder / "qdq.onnx", ROWS)
    return folder / "model.onnx", folder / "qdq.onnx"


def test_every_linear_layer_of_the_encoder_is_int8_with_fixed_scales(graphs):
    _, path = graphs
    graph = onnx.load(path).graph
    constants = constants_of(path)
    makers = {output: node for node in graph.node for output in node.output}
    layers = [
        node
        for node in graph.node
        if node.op_type == "MatMul" and all(makers[x].op_type == "DequantizeLinear" for x in node.input)
    ]
    assert len(layers) == 6 * CONFIG.num_hidden_layers
    for node in layers:
        weight, scale, zero = (constants[name] for name in makers[node.input[1]].input)
        assert weight.dtype == zero.dtype == np.int8 and not zero.any()  # TensorRT's are symmetric
        assert scale.dtype == np.float16 and scale.shape == (weight.shape[1],)
        assert int(np.abs(weight.astype(int)).max()) == 127
        pair = makers[node.input[0]]
        quantize = makers[pair.input[0]]
        assert quantize.op_type == "QuantizeLinear" and quantize.input[1] == pair.input[1]
        assert constants[pair.input[1]].shape == () and constants[pair.input[1]].dtype == np.float16
    assert {opset.version for opset in onnx.load(path).opset_import if opset.domain == ""} == {20}


def test_int8_runs_at_any_shape_and_stays_near_fp32(graphs):
    source, path = graphs
    runner = OnnxRunner(path)
    assert check_shapes(runner, CONFIG.max_position_embeddings) == []
    feeds = feeds_of(3, 20)
    for got, wanted in zip(runner.run(feeds), OnnxRunner(source).run(feeds), strict=True):
        assert got.dtype == np.float32
        assert 0 < np.abs(got - wanted).max() < TOLERANCES["int8_qdq"].max_difference * np.abs(wanted).max()


def test_a_row_does_not_change_with_its_neighbours(graphs):
    """Fixed scales: a neighbour with the largest values leaves all others as they were."""
    runner = OnnxRunner(graphs[1])
    feeds = feeds_of(3, 16)
    alone = runner.run({name: values[:1] for name, values in feeds.items()})
    for got, wanted in zip(runner.run(feeds), alone, strict=True):
        np.testing.assert_allclose(got[0], wanted[0], atol=2e-3 * np.abs(wanted).max())


def test_ranges_are_the_largest_of_each_channel_over_all_rows(graphs):
    source, _ = graphs
    model = onnx.load(source)
    names = list(linear_layers(model.graph))
    both, first = calibrate(model, names, ROWS), calibrate(model, names, ROWS[:1])
    assert set(both) == set(names)
    assert all((both[name].largest >= first[name].largest).all() for name in both)
    assert any((both[name].largest > first[name].largest).any() for name in both)
    assert all((np.abs(values.tokens) <= values.largest).all() for values in both.values())
    widths = {len(values.largest) for values in both.values()}
    assert widths == {CONFIG.hidden_size, CONFIG.intermediate_size}


def activity_of(tokens) -> Activity:
    return Activity(tokens.min(axis=0), tokens.max(axis=0), tokens, None)


def test_a_layer_that_one_token_spoils_for_the_others_stays_in_fp16(graphs, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    tokens, matrix = rng.normal(size=(64, 32)).astype(np.float32), rng.normal(size=(32, 48)).astype(np.float32)
    calm = activity_of(tokens)
    assert qdq.smoothing_of(calm, [matrix])[1] < qdq.LARGEST_ERROR
    tokens[5] *= 1000  # in every channel: no factor a channel can help
    wild = activity_of(tokens)
    assert qdq.smoothing_of(wild, [matrix])[1] > 0.5
    tokens[5] /= 1000
    tokens[:, 3] *= 1000  # in one channel: that is what the factors are for
    channel = activity_of(tokens)
    assert qdq.smoothing_of(channel, [matrix])[1] < qdq.LARGEST_ERROR
    monkeypatch.setattr(qdq, "LARGEST_ERROR", 0.0)
    with pytest.raises(CheckFailed, match=r"no layer of model\.onnx bears INT8"):
        to_int8_qdq(graphs[0], tmp_path / "qdq.onnx", ROWS)


def test_int8_needs_text(graphs, tmp_path):
    with pytest.raises(InputError, match="takes its scales from real text"):
        to_int8_qdq(graphs[0], tmp_path / "qdq.onnx", [])
    assert not (tmp_path / "qdq.onnx").exists()


def outlier_model(head, size):
    model = make_model(head)
    with torch.no_grad():
        model.encoder.blocks[0].attention_norm.weight[3] = size
    return model


@pytest.mark.parametrize("head", TASKS_BY_HEAD)
def test_norms_stay_in_fp32_where_fp16_cannot_square_and_nowhere_else(tmp_path, head):
    found = {}
    for size in (1, 300):
        source, half = tmp_path / f"{size}.onnx", tmp_path / f"{size}.fp16.onnx"
        export_onnx(outlier_model(head, size), source)
        wide = fp32_norms(source, ROWS)
        assert wide == [n for n, largest in deviations(source, ROWS).items() if largest > fp16.LARGEST_DEVIATION]
        to_fp16(source, half, ROWS)
        graph = onnx.shape_inference.infer_shapes(onnx.load(half)).graph
        types = {info.name: info.type.tensor_type.elem_type for info in graph.value_info}
        norms = {n.name: n for n in graph.node if n.op_type == fp16.NORM}
        in_fp32 = [name for name, node in norms.items() if types[node.input[0]] == onnx.TensorProto.FLOAT]
        assert in_fp32 == wide
        found[size] = len(wide)
        feeds = feeds_of(4, 30)
        for got, wanted in zip(OnnxRunner(half).run(feeds), OnnxRunner(source).run(feeds), strict=True):
            np.testing.assert_allclose(got, wanted, atol=2e-2 * np.abs(wanted).max())
    assert found[1] == 0 and 0 < found[300] < 2 * CONFIG.num_hidden_layers + 1


def test_a_square_that_fp16_cannot_hold_is_why():
    assert np.isinf(np.square(np.float16(fp16.LARGEST_DEVIATION * fp16.HEADROOM * 1.01)))
    assert np.isfinite(np.square(np.float16(fp16.LARGEST_DEVIATION)))
