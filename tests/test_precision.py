"""export/precision.py: FP16 stays finite, INT8 keeps to its bits and never depends on neighbours."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from small_bert import CONFIG, TASKS_BY_HEAD, make_model
from test_onnx_graph import feeds_of

from bertship.errors import CheckFailed
from bertship.runners import OnnxRunner
from bertship.tokenization import Row, pad
from export import precision
from export.onnx_graph import export_onnx
from export.parity import check_shapes
from train.model import MASK_BIAS

LENGTHS = (1, 1, 2, 2, 2, 7, 7, 7, 16, 16, 16, 16, 16, 31, 31, 64, 64, 128, 333)  # of some, several run together


@pytest.fixture(scope="module", params=TASKS_BY_HEAD)
def graphs(request, tmp_path_factory):
    """One model's graph in every precision, by name."""
    folder = tmp_path_factory.mktemp("graphs")
    paths = {name: folder / settings.file for name, settings in precision.PRECISIONS.items()}
    export_onnx(make_model(request.param), paths["fp32"])
    precision.to_fp16(paths["fp32"], paths["fp16"])
    precision.to_int8(paths["fp32"], paths["int8"])
    return paths


def constants_of(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def rows_of(lengths) -> list[Row]:
    rng = np.random.default_rng(1)
    return [Row(rng.integers(5, CONFIG.vocab_size, n), rng.integers(0, 2, n), i) for i, n in enumerate(lengths)]


def test_fp16_is_fp16_inside_and_finite_with_padding(graphs):
    constants = constants_of(graphs["fp16"])
    assert not [name for name, value in constants.items() if value.ndim > 1 and value.dtype != np.float16]
    assert any(
        value.dtype == np.float16 and value.size == 1 and value.item() == MASK_BIAS for value in constants.values()
    )
    assert np.isfinite(np.float16(MASK_BIAS))
    runner = OnnxRunner(graphs["fp16"])
    assert check_shapes(runner, CONFIG.max_position_embeddings) == []
    feeds = feeds_of(4, 40)
    feeds["attention_mask"][3] = 0
    for got, wanted in zip(runner.run(feeds), OnnxRunner(graphs["fp32"]).run(feeds), strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, wanted, atol=1e-2 * np.abs(wanted).max())


def test_fp16_refuses_weights_that_it_cannot_hold(graphs, tmp_path):
    graph = onnx.load(graphs["fp32"])
    tensor = next(t for t in graph.graph.initializer if len(t.dims) == 2)
    value = numpy_helper.to_array(tensor).copy()
    value[1, 1] = -7e4
    tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    onnx.save(graph, tmp_path / "large.onnx")
    with pytest.raises(CheckFailed, match="reaches 7e"):
        precision.to_fp16(tmp_path / "large.onnx", tmp_path / "model.fp16.onnx")
    assert not (tmp_path / "model.fp16.onnx").exists()


def test_int8_holds_every_matrix_of_the_encoder_in_int8(graphs):
    large = [
        n for n, v in constants_of(graphs["int8"]).items() if v.ndim == 2 and min(v.shape) > 3 and v.dtype != np.int8
    ]
    assert [name for name in large if "pooler" not in name] == []
    assert graphs["int8"].stat().st_size < graphs["fp32"].stat().st_size / 1.5
    feeds = feeds_of(3, 20)
    for got, wanted in zip(OnnxRunner(graphs["int8"]).run(feeds), OnnxRunner(graphs["fp32"]).run(feeds), strict=True):
        assert np.abs(got - wanted).max() < 0.1 * np.abs(wanted).max()


@pytest.mark.parametrize("name", [name for name, p in precision.PRECISIONS.items() if not p.needs_tensorrt])
def test_a_row_has_the_same_bits_in_any_order_and_with_any_number_of_threads(graphs, name):
    rows = rows_of(LENGTHS)
    wanted = OnnxRunner(graphs[name], threads=1)(rows)
    two = OnnxRunner(graphs[name], threads=2)
    for output, values in two(rows[::-1]).items():
        for row, value, expected in zip(rows, values[::-1], wanted[output], strict=True):
            np.testing.assert_array_equal(value, expected, err_msg=f"{name}, {len(row)} tokens, among others")
    for i, row in enumerate(rows):
        for output, values in two([row]).items():
            np.testing.assert_array_equal(values[0], wanted[output][i], err_msg=f"{name}, {len(row)} tokens, alone")


def test_int8_rows_of_a_padded_batch_do_not_change_each_other(graphs):
    """One scale a token: a neighbour with the largest values leaves all others as they were."""
    rows = rows_of((20, 9, 14))
    runner = OnnxRunner(graphs["int8"])
    alone = runner(rows)
    for output, batch in zip(runner.outputs, runner.run(pad(rows, 0)), strict=True):
        for row, value, expected in zip(rows, batch, alone[output], strict=True):
            value = value[: len(row)] if expected.shape[:1] == (len(row),) and value.shape != expected.shape else value
            np.testing.assert_allclose(value, expected, atol=1e-5 * np.abs(expected).max())
