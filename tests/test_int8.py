"""export/int8*.py and export/calibration.py: what INT8 computes, and which of its recipes a model gets."""

import itertools
import json

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from small_bert import CONFIG, TASKS_BY_HEAD, make_model
from test_onnx_graph import feeds_of

from bertship import processor
from bertship.runners import OnnxRunner
from bertship.tokenization import Row, pad
from export import int8_recipe, precision
from export.calibration import calibrate, make_session
from export.int8 import Recipe, Scaling, find_products, quantize, weights_by_input
from export.int8_recipe import Search, expected_changes, relative_error, rewritten
from export.int8_rounding import Rounding, round_by_moments
from export.int8_ways import error_of, scaling_of, ways_of
from export.onnx_graph import export_onnx
from export.parity import check_shapes

LENGTHS = (1, 1, 2, 2, 2, 7, 7, 7, 16, 16, 16, 16, 16, 31, 31, 64, 64, 128, 333)  # of some, several run together


def rows_of(lengths, seed=1) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [Row(rng.integers(5, CONFIG.vocab_size, n), rng.integers(0, 2, n), i) for i, n in enumerate(lengths)]


@pytest.fixture(scope="module", params=TASKS_BY_HEAD)
def made(request, tmp_path_factory):
    """A model's FP32 graph, and what text puts into its products."""
    path = tmp_path_factory.mktemp("int8") / "model.onnx"
    export_onnx(make_model(request.param), path)
    model = onnx.load(path)
    names = list(dict.fromkeys(product.x for product in find_products(model.graph)))
    return path, model, calibrate(model, names, rows_of(LENGTHS * 3), moments=True)


def head_of(request) -> str:
    """Of which head `made` is."""
    return request.node.callspec.params["made"]


def layers_of(model) -> list[str]:
    return [product.layer for product in find_products(model.graph)]


def scalings_of(made, outliers=0, static=True) -> dict[str, Scaling]:
    _, model, activity = made
    weights = weights_by_input(model.graph)
    return {x: scaling_of(activity[x], weight, 0.7, outliers, static) for x, weight in weights.items()}


# with 8 bits, sums would saturate on a processor without VNNI: a relative error of 0.06 instead of below 0.02
LIMIT = 127 if processor.has_vnni() else 63
RECIPES = {
    "plain": lambda made: Recipe(),
    "static": lambda made: Recipe(scalings_of(made)),
    "static and outliers": lambda made: Recipe(scalings_of(made, outliers=4), half_embeddings=True),
    "rows": lambda made: Recipe(scalings_of(made, static=False), half_embeddings=True),
    "rows and outliers": lambda made: Recipe(scalings_of(made, outliers=4, static=False), half_embeddings=True),
    "rounded": lambda made: Recipe(scalings_of(made), rounding=Rounding(made[2])),
    "kept": lambda made: Recipe(scalings_of(made), tuple(layers_of(made[1])[3:9])),
}


@pytest.fixture(params=RECIPES)
def recipe(request, made):
    return RECIPES[request.param](made)


def save(model, folder):
    onnx.save(model, folder / "model.int8.onnx")
    return folder / "model.int8.onnx"


def test_every_recipe_is_near_to_fp32_and_free_in_its_shapes(made, recipe, tmp_path):
    path, model, _ = made
    runner = OnnxRunner(save(rewritten(model, recipe, LIMIT), tmp_path))
    assert check_shapes(runner, CONFIG.max_position_embeddings) == []
    feeds = feeds_of(3, 20)
    allowed = 0.05 * 127 / LIMIT  # a weight of 7 bits has steps twice as wide
    for got, wanted in zip(runner.run(feeds), OnnxRunner(path).run(feeds), strict=True):
        assert np.sqrt(np.mean((got - wanted) ** 2)) < allowed * np.sqrt(np.mean(wanted**2))


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
    assert {str(table.dtype) for table in wide} == {"float16" if recipe.half_embeddings else "int8"}


def test_a_row_has_the_same_bits_alone_among_others_and_in_any_order(made, recipe, tmp_path):
    path, rows = save(rewritten(made[1], recipe, LIMIT), tmp_path), rows_of(LENGTHS)
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
    runner, rows = OnnxRunner(save(rewritten(made[1], recipe, LIMIT), tmp_path)), rows_of((40,) * 6)
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
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    bear_anything(monkeypatch)  # as random weights bear no rounding; here it is about its bits
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
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    v = np.sqrt(np.abs(weight).max(axis=1) / np.abs(x).max(axis=0))
    others = np.where(np.arange(64) == 7, 0, v)
    span = float((x * others).min()), float((x * others).max())
    wanted = x @ weight

    def error(recipe):
        session = make_session(rewritten(model, recipe, LIMIT))
        (got,) = session.run(None, {"x": x.astype(np.float32)})
        return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)

    assert error(Recipe()) > 0.3
    for static in (True, False):
        assert error(Recipe({"x": Scaling(v, np.array([7]), *span, static)})) < 0.02


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
    assert expected_changes(2 * wanted, 2 * got) == expected_changes(wanted, got)  # a span's start and end go together
    moved = [[row + 3 for row in wanted[0]]]
    assert expected_changes(wanted, moved) < 1e-6  # all logits alike: no decision changes
    assert relative_error(wanted, moved) < 1e-6
    spread = np.std(np.concatenate(wanted[0]))
    assert relative_error(wanted, got) == pytest.approx(0.1 * np.sqrt(2) / spread, rel=0.05)
    assert relative_error([[np.ones(1), -np.ones(1)]], [[np.ones(1), -0.5 * np.ones(1)]]) == pytest.approx(0.5**1.5)
    assert expected_changes([[np.ones(1)]], [[np.zeros(1)]]) == 0  # a number decides nothing


def test_the_fastest_recipe_that_holds_is_taken(made, monkeypatch):
    _, model, _ = made
    search = Search(model, rows_of(LENGTHS * 2), LIMIT)
    bear_anything(monkeypatch)
    first = search.find()
    assert first.good and not first.recipe.kept and not first.recipe.half_embeddings
    assert all(scaling.static and not len(scaling.outliers) for scaling in first.recipe.scalings.values())
    found = [first]
    for share in (0.6, 0.4, 0.2):
        monkeypatch.setattr(int8_recipe, "LARGEST_ERROR", first.error * share)
        found.append(search.find())
        assert found[-1].good and found[-1].error <= first.error * share
    cost = [cost_of(search, choice) for choice in found]
    assert cost == sorted(cost) and cost[-1] > 0
    assert found[-1].recipe.kept and found[-1].recipe.half_embeddings
    assert search.find(allowed=2).error > found[-1].error  # asked for less again, it gives less
    monkeypatch.setattr(int8_recipe, "LARGEST_ERROR", 0)  # nothing rounds to nothing: embeddings are FP16
    last = search.find()
    assert not last.good and set(last.recipe.kept) == set(layers_of(model))


def bear_anything(monkeypatch):
    monkeypatch.setattr(int8_recipe, "LARGEST_CHANGE", 10)
    monkeypatch.setattr(int8_recipe, "LARGEST_ERROR", 10)


def cost_of(search, choice) -> float:
    return sum(
        next(way.cost for way in ways if way.scaling is choice.recipe.scalings.get(x))
        for x, ways in search.ways.items()
    )


def test_each_attempt_has_less_error_and_the_same_recipe_is_not_tried_twice(made, tmp_path, monkeypatch):
    bear_anything(monkeypatch)
    target, rows = tmp_path / "model.int8.onnx", rows_of(LENGTHS)
    assert len(list(precision.int8_attempts(made[0], target, rows))) == 1  # the cheapest holds at every limit
    first = precision.read_recipe(target)
    monkeypatch.setattr(int8_recipe, "LARGEST_ERROR", first["relative_error"] * 1.01)
    found = [precision.read_recipe(target) for _ in precision.int8_attempts(made[0], target, rows)]
    allowed = [recipe["allowed_changes"] / 10 for recipe in found]
    assert len(allowed) > 2 and allowed == [share for share in precision.ALLOWED if share in allowed]
    errors = [recipe["relative_error"] for recipe in found]
    assert errors == sorted(set(errors), reverse=True) and errors[-1] < errors[0] / 2


def test_ways_lead_from_the_cheapest_to_fp32_and_their_errors_are_what_happens(made):
    _, model, activity = made
    for x, weight in weights_by_input(model.graph).items():
        ways = ways_of(activity[x], weight, 127)
        assert ways[0].cost == 0 and ways[-1].scaling is None and ways[-1].error == 0
        assert all(a.cost < b.cost and a.error > b.error for a, b in itertools.pairwise(ways))
    # of the last product, whose input is GELU's
    tokens, weight = activity[x].tokens, weight.astype(np.float64)
    for way in ways[:-1]:
        happened = np.mean((product_of(tokens, weight, way.scaling) - tokens @ weight) ** 2) * weight.shape[1]
        expected = error_of(tokens, weight, way.scaling, 127)
        assert expected / 2 < happened < expected * 4  # `expected` counts on rounding by moments


def product_of(x, weight, scaling):
    """x W as the integers give it."""
    others = scaling.others
    if scaling.static:
        step = (scaling.high - scaling.low) / 255
        rounded = np.rint(x * others / step) * step
    else:
        low, levels = (scaling.low, 255) if scaling.shifted else (0.0, 127)
        step = np.abs(x * others - low).max(axis=1, keepdims=True) / levels
        rounded = np.rint((x * others - low) / step) * step + low
    balanced = weight / scaling.balance[:, None]
    balanced[scaling.outliers] = 0
    columns = np.abs(balanced).max(axis=0) / 127
    apart = x[:, scaling.outliers] @ weight[scaling.outliers]
    return rounded @ (np.rint(balanced / columns) * columns) + apart


def test_rounding_by_moments_has_less_error_on_what_it_saw_and_on_more_of_the_kind():
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((12, 96))
    draw = lambda n: rng.standard_normal((n, 12)) @ mixing + 0.1 * rng.standard_normal((n, 96))  # noqa: E731
    weight, x = rng.uniform(-127, 127, (96, 40)), draw(500)
    integers = round_by_moments(weight, (x.T @ x).astype(np.float32), 127)
    np.testing.assert_array_equal(integers, np.rint(integers))
    assert np.abs(integers).max() <= 127 and np.abs(integers - weight).max() < 8
    for text in (x, draw(500)):
        nearest = np.linalg.norm(text @ (np.rint(weight) - weight))
        assert np.linalg.norm(text @ (integers - weight)) < nearest / 2
    np.testing.assert_array_equal(round_by_moments(weight, np.zeros((96, 96)), 127), np.rint(weight))


def test_weights_of_zeros_are_zeros_in_int8(made, tmp_path):
    model = onnx.load(made[0])
    products = find_products(model.graph)
    for tensor in model.graph.initializer:
        if tensor.name in {product.weight for product in products}:
            tensor.CopyFrom(numpy_helper.from_array(0 * numpy_helper.to_array(tensor), tensor.name))
    onnx.save(model, tmp_path / "zeros.onnx")
    target = tmp_path / "model.int8.onnx"
    precision.to_int8(tmp_path / "zeros.onnx", target, rows_of(LENGTHS))
    assert precision.read_recipe(target)["good"]
    feeds = feeds_of(2, 9)
    for got, wanted in zip(OnnxRunner(target).run(feeds), OnnxRunner(tmp_path / "zeros.onnx").run(feeds), strict=True):
        np.testing.assert_allclose(got, wanted, atol=0.05 * np.abs(wanted).max())


def test_calibration_reads_every_row_and_draws_tokens_evenly(made, request):
    _, model, activity = made
    rows = rows_of(LENGTHS * 3)
    all_tokens = sum(min(len(row), -(-512 // len(rows))) for row in rows)
    drawn = [seen.tokens.shape[0] for seen in activity.values()]
    # of one decision a text, the last layer has the first token alone
    assert drawn.count(len(rows)) == (4 if head_of(request) == "sentence" else 0)
    assert set(drawn) - {len(rows)} == {all_tokens}
    for seen in activity.values():
        assert (seen.tokens >= seen.low).all() and (seen.tokens <= seen.high).all()
        # the moments are those of all tokens: at least those of the drawn ones
        assert (np.diag(seen.moments) >= (seen.tokens**2).sum(axis=0) * (1 - 1e-5)).all()
    assert calibrate(model, [], rows) == {}


def test_the_graph_says_how_it_was_made(made, tmp_path):
    target = tmp_path / "model.int8.onnx"
    precision.to_int8(made[0], target, rows_of(LENGTHS))
    facts = precision.read_recipe(target)
    assert facts["calibration_rows"] == len(LENGTHS)
    assert set(facts) >= {"weight_bits", "inputs", "static_steps", "fp32_layers", "expected_changes", "good"}
    assert facts == json.loads(json.dumps(facts))
    precision.to_int8(made[0], target)
    assert precision.read_recipe(target) == {"calibration_rows": 0, "weight_bits": facts["weight_bits"]}
    assert precision.read_recipe(made[0]) == {}


def test_query_key_and_value_share_their_bytes(made, request):
    graph = rewritten(made[1], Recipe(scalings_of(made, static=False)), 127).graph
    apart = head_of(request) == "sentence"  # the last query, of the first token alone
    assert sum(node.op_type == "QuantizeLinear" for node in graph.node) == 4 * CONFIG.num_hidden_layers + apart


def test_quantize_needs_no_bias_and_leaves_narrow_heads(made):
    model = onnx.ModelProto()
    model.CopyFrom(made[1])
    narrow = [n for n in model.graph.node if n.op_type in ("Gemm", "MatMul")][-1].output[0]
    quantize(model.graph, Recipe(), 127)
    assert [node.op_type for node in model.graph.node if node.output[0] == narrow] != ["MatMulIntegerToFloat"]
