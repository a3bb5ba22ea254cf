"""export/int8.py and export/int8_recipe.py: what INT8 computes, and which of its recipes a model gets."""

import dataclasses
import json

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from small_bert import CONFIG, TASKS_BY_HEAD, make_model
from test_onnx_graph import feeds_of

from bertship.runners import OnnxRunner
from bertship.tokenization import Row, pad
from export import int8, int8_recipe, precision
from export.int8 import Recipe, find_products, quantize
from export.int8_recipe import expected_changes, read_scalings, relative_error, rewritten
from export.onnx_graph import export_onnx
from export.parity import check_shapes

LENGTHS = (1, 1, 2, 2, 2, 7, 7, 7, 16, 16, 16, 16, 16, 31, 31, 64, 64, 128, 333)  # of some, several run together


def rows_of(lengths, seed=1) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [Row(rng.integers(5, CONFIG.vocab_size, n), rng.integers(0, 2, n), i) for i, n in enumerate(lengths)]


@pytest.fixture(scope="module", params=TASKS_BY_HEAD)
def made(request, tmp_path_factory):
    """A model's FP32 graph and its scalings over text."""
    path = tmp_path_factory.mktemp("int8") / "model.onnx"
    export_onnx(make_model(request.param), path)
    model = onnx.load(path)
    return path, model, read_scalings(model, find_products(model.graph), rows_of(LENGTHS * 3))


def layers_of(model) -> list[str]:
    return [product.layer for product in find_products(model.graph)]


RECIPES = {
    "plain": lambda scalings, layers: Recipe(),
    "static": lambda scalings, layers: Recipe(all_static(scalings)),
    "rows": lambda scalings, layers: Recipe(scalings, static=False),
    "kept": lambda scalings, layers: Recipe(scalings, tuple(layers[3:9]), static=False),
}


def all_static(scalings):
    return {x: dataclasses.replace(scaling, alike=True) for x, scaling in scalings.items()}


@pytest.fixture(params=RECIPES)
def recipe(request, made):
    return RECIPES[request.param](made[2], layers_of(made[1]))


def save(model, folder):
    onnx.save(model, folder / "model.int8.onnx")
    return folder / "model.int8.onnx"


def test_every_recipe_is_near_to_fp32_and_free_in_its_shapes(made, recipe, tmp_path):
    path, model, _ = made
    runner = OnnxRunner(save(rewritten(model, recipe, 127), tmp_path))
    assert check_shapes(runner, CONFIG.max_position_embeddings) == []
    feeds = feeds_of(3, 20)
    for got, wanted in zip(runner.run(feeds), OnnxRunner(path).run(feeds), strict=True):
        assert np.sqrt(np.mean((got - wanted) ** 2)) < 0.05 * np.sqrt(np.mean(wanted**2))


def test_every_product_is_in_int8_but_what_is_kept(made, recipe):
    graph = rewritten(made[1], recipe, 127).graph
    integer = [node for node in graph.node if node.op_type == "MatMulIntegerToFloat"]
    assert len(integer) == 6 * CONFIG.num_hidden_layers - len(recipe.kept)
    assert [p.layer for p in find_products(graph) if not p.weight.endswith("_outliers")] == list(recipe.kept)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    assert {constants[node.input[1]].dtype for node in integer} == {np.dtype(np.int8)}
    tables = [
        constants[node.input[0]] for node in graph.node if node.op_type == "Gather" and node.input[0] in constants
    ]
    wide = [table for table in tables if table.ndim == 2 and table.shape[1] == CONFIG.hidden_size]
    assert {str(table.dtype) for table in wide} == {"int8" if recipe.static else "float16"}


def test_a_row_has_the_same_bits_alone_among_others_and_in_any_order(made, recipe, tmp_path):
    path, rows = save(rewritten(made[1], recipe, 127), tmp_path), rows_of(LENGTHS)
    wanted = OnnxRunner(path, threads=1)(rows)
    two = OnnxRunner(path, threads=2)
    for order in (range(len(rows)), range(len(rows) - 1, -1, -1), (5, 0, 3)):
        for output, values in two([rows[i] for i in order]).items():
            for i, value in zip(order, values, strict=True):
                np.testing.assert_array_equal(value, wanted[output][i], err_msg=f"{len(rows[i])} tokens")
    for i, row in enumerate(rows):
        for output, values in two([row]).items():
            np.testing.assert_array_equal(values[0], wanted[output][i], err_msg=f"{len(row)} tokens, alone")


def test_neighbours_of_a_padded_batch_of_one_length_change_no_bit(made, recipe, tmp_path):
    """The same shape, other neighbours: even then only the row itself counts."""
    runner, rows = OnnxRunner(save(rewritten(made[1], recipe, 127), tmp_path)), rows_of((40,) * 6)
    first = runner.run(pad(rows[:3], 0))
    other = runner.run(pad([rows[0], *rows[4:6]], 0))
    for a, b in zip(first, other, strict=True):
        np.testing.assert_array_equal(a[0], b[0])


@pytest.mark.parametrize("limit", [127, 63])
def test_weights_stay_within_their_bits(made, recipe, limit):
    graph = rewritten(made[1], recipe, limit).graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    weights = [constants[n.input[1]] for n in graph.node if n.op_type == "MatMulIntegerToFloat"]
    assert {int(np.abs(weight.astype(int)).max()) for weight in weights} == {limit}


@pytest.mark.parametrize("vnni", [True, False])
def test_a_processor_without_vnni_gets_weights_of_7_bits(made, tmp_path, monkeypatch, vnni):
    flags = "flags\t\t: fpu avx2 avx512f" + (" avx512_vnni" if vnni else "")
    (tmp_path / "cpuinfo").write_text(flags, encoding="utf-8")
    monkeypatch.setattr(precision, "CPUINFO", tmp_path / "cpuinfo")
    for limit in ("LARGEST_CHANGE", "LARGEST_ERROR"):
        monkeypatch.setattr(int8_recipe, limit, 1.0)  # random weights bear no rounding; here it is about its bits
    target = tmp_path / "model.int8.onnx"
    precision.to_int8(made[0], target, rows_of(LENGTHS))
    assert precision.read_recipe(target)["weight_bits"] == (8 if vnni else 7)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(target).graph.initializer}
    weights = [value for name, value in constants.items() if value.dtype == np.int8 and name.startswith("val_")]
    assert {int(np.abs(weight.astype(int)).max()) for weight in weights} == {127 if vnni else 63}


def test_one_large_unit_costs_the_others_nothing(made):
    """A unit of x a thousand times the others', which one scale a row could not bear."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((50, 64)), rng.standard_normal((64, 48))
    x[:, 7] *= 1000
    weight[7] /= 1000
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "one",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["rows", 64])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["rows", 48])],
        [numpy_helper.from_array(weight.astype(np.float32), "w")],
    )
    v = int8.balance(np.abs(x).max(axis=0), [weight])
    others = np.where(np.arange(64) == 7, 0, v)
    span = float((x * others).min()), float((x * others).max())
    scaling = int8.Scaling(v, np.array([7]), True, *span, True, *span)
    wanted = x @ weight

    def error(recipe):
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
        session = int8_recipe.make_session(rewritten(model, recipe, 127))
        (got,) = session.run(None, {"x": x.astype(np.float32)})
        return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)

    assert error(Recipe()) > 0.3
    assert error(Recipe({"x": scaling})) < 0.02
    assert error(Recipe({"x": scaling}, static=False)) < 0.02


def test_expected_changes_are_those_that_happen():
    """Normal errors on decisions of known margins, counted over many draws."""
    rng = np.random.default_rng(0)
    wanted = [[rng.standard_normal(5) * 2 for _ in range(4000)]]
    got = [[row + rng.standard_normal(5) * 0.1 for row in wanted[0]]]
    happened = np.mean([a.argmax() != b.argmax() for a, b in zip(wanted[0], got[0], strict=True)])
    assert happened > 0.01
    assert expected_changes(wanted, got) == pytest.approx(happened, rel=0.25)
    assert expected_changes(wanted, wanted) == 0
    by_token = [[np.stack(rows[i : i + 4]) for i in range(0, 4000, 4)] for rows in (wanted[0], got[0])]
    assert expected_changes([by_token[0]], [by_token[1]]) == pytest.approx(4 * happened, rel=0.25)  # any token's counts
    moved = [[row + 3 for row in wanted[0]]]
    assert expected_changes(wanted, moved) < 1e-6  # all logits alike: no decision changes
    assert relative_error(wanted, moved) < 1e-6
    spread = np.std(np.concatenate(wanted[0]))
    assert relative_error(wanted, got) == pytest.approx(0.1 * np.sqrt(2) / spread, rel=0.05)
    assert relative_error([[np.ones(1), -np.ones(1)]], [[np.ones(1), -0.5 * np.ones(1)]]) == pytest.approx(0.5**1.5)
    assert expected_changes([[np.ones(1)]], [[np.zeros(1)]]) == 0  # a number decides nothing


def test_the_fastest_recipe_that_holds_is_taken(made, monkeypatch):
    _, model, _ = made
    rows = rows_of(LENGTHS * 2)
    monkeypatch.setattr(int8_recipe, "LARGEST_CHANGE", 1.0)
    monkeypatch.setattr(int8_recipe, "LARGEST_ERROR", 1.0)
    first = int8_recipe.choose(model, rows, 127)
    assert first.good and first.recipe.static and not first.recipe.kept
    monkeypatch.setattr(int8_recipe, "LARGEST_ERROR", first.error * 0.999)
    second = int8_recipe.choose(model, rows, 127)
    assert second.good and not second.recipe.static and second.error < first.error
    monkeypatch.setattr(int8_recipe, "LARGEST_ERROR", first.error / 4)
    third = int8_recipe.choose(model, rows, 127)
    assert third.good and third.recipe.kept
    assert set(third.recipe.kept) < set(layers_of(model))
    monkeypatch.setattr(int8_recipe, "LARGEST_ERROR", 0)  # nothing rounds to nothing: embeddings are FP16
    last = int8_recipe.choose(model, rows, 127)
    assert not last.good and set(last.recipe.kept) == set(layers_of(model))


def test_the_graph_says_how_it_was_made(made, tmp_path):
    target = tmp_path / "model.int8.onnx"
    precision.to_int8(made[0], target, rows_of(LENGTHS))
    facts = precision.read_recipe(target)
    assert facts["calibration_rows"] == len(LENGTHS)
    assert set(facts) >= {"weight_bits", "fp32_layers", "expected_changes", "relative_error", "good"}
    assert facts == json.loads(json.dumps(facts))
    precision.to_int8(made[0], target)
    assert precision.read_recipe(target) == {"calibration_rows": 0, "weight_bits": facts["weight_bits"]}
    assert precision.read_recipe(made[0]) == {}


def test_query_key_and_value_share_their_bytes(made):
    graph = rewritten(made[1], Recipe(made[2], static=False), 127).graph
    assert sum(node.op_type == "QuantizeLinear" for node in graph.node) == 4 * CONFIG.num_hidden_layers


def test_quantize_needs_no_bias_and_leaves_narrow_heads(made):
    model = onnx.ModelProto()
    model.CopyFrom(made[1])
    narrow = [n for n in model.graph.node if n.op_type in ("Gemm", "MatMul")][-1].output[0]
    quantize(model.graph, Recipe(), 127)
    assert [node.op_type for node in model.graph.node if node.output[0] == narrow] != ["MatMulIntegerToFloat"]
