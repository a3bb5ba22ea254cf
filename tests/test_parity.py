"""export/parity.py: each way to spoil a graph closes the gate, and nothing is published."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from small_bert import CONFIG, TASKS_BY_HEAD, TOKENIZER, make_examples, make_model, make_run

from bertship.errors import CheckFailed, InputError
from bertship.runners import OnnxRunner
from bertship.tasks import Example
from export import precision, publish
from export.onnx_graph import export_onnx
from export.parity import check_shapes, compare
from export.reference import Reference, spread
from train.torch_runner import TorchRunner


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A fine-tuning run of each head, and its graph: exporting takes longer than spoiling."""
    found = {}
    for head in TASKS_BY_HEAD:
        run = make_run(tmp_path_factory.mktemp(head) / "run", head)
        export_onnx(make_model(head), run.parent / "model.onnx")
        found[head] = (run, run.parent / "model.onnx")
    return found


@pytest.fixture
def gate(runs, tmp_path, monkeypatch):
    """Publish a head's graph, then try it spoilt: what the gate says, once nothing of it was found on disk."""

    def spoilt(head, spoil, name="fp32"):
        run, graph = runs[head]
        out = tmp_path / "export"
        monkeypatch.setattr(publish, "export_onnx", lambda model, path: shutil.copy2(graph, path))
        publish.export_run(run, out, ["fp32"], make_examples(head), lambda line: None)
        before = {path.name: path.read_bytes() for path in out.iterdir()}

        settings = precision.PRECISIONS[name]

        def make(source: Path, target: Path, *rows) -> None:
            if settings.make is not None:
                settings.make(source, target, *rows)
            model = onnx.load(target)
            spoil(model.graph)
            onnx.save(model, target)

        monkeypatch.setitem(precision.PRECISIONS, name, dataclasses.replace(settings, make=make, attempts=None))
        with pytest.raises(CheckFailed, match="nothing was published") as caught:
            publish.export_run(run, out, [name], make_examples(head), lambda line: None)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        assert [path.name for path in tmp_path.iterdir()] == ["export"]
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return spoilt


def edit(tensor, change):
    value = numpy_helper.to_array(tensor).copy()
    change(value)
    tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))


def held(graph, name):
    return next(tensor for tensor in graph.initializer if tensor.name == name)


def matrices(graph):
    """The weights of the encoder's layers, in order."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    return [constants[n.input[1]] for n in graph.node if n.op_type == "MatMul" and n.input[1] in constants]


def rewire(graph, name, *steps):
    """Let every reader of the input `name` read what `steps` make of it: (kind, inputs, attributes)."""
    for node in graph.node:
        node.input[:] = ["step0" if x == name else x for x in node.input]
    made = []
    for i, (kind, inputs, attributes) in enumerate(steps):
        names = []
        for k, x in enumerate(inputs):
            if not isinstance(x, str):
                graph.initializer.append(numpy_helper.from_array(np.array(x, np.int64), f"constant{i}_{k}"))
                x = f"constant{i}_{k}"
            names.append(x)
        made.append(helper.make_node(kind, names, [f"step{i}"], **attributes))
    readers = list(graph.node)
    del graph.node[:]
    graph.node.extend([*made[::-1], *readers])


def flip_a_weight(graph):
    edit(matrices(graph)[3], lambda w: w.__setitem__((5, 5), -w[5, 5] - 0.1))


def flip_a_later_weight(graph):
    edit(matrices(graph)[6 + 4], lambda w: w.__setitem__((5, 5), -w[5, 5] - 0.1))


def negate_a_row(graph):
    edit(matrices(graph)[0], lambda w: np.negative(w[:, 3], out=w[:, 3]))


def not_a_number(graph):
    edit(matrices(graph)[-1], lambda w: w.__setitem__((0, 0), np.nan))


def infinite(graph):
    edit(matrices(graph)[-1], lambda w: w.__setitem__((0, 0), np.inf))


def swap_labels(graph):
    for name in ("classifier.weight", "classifier.bias"):
        edit(held(graph, name), lambda w: w.__setitem__(slice(0, 2), w[1::-1].copy()))


def ignore_segments(graph):
    rewire(graph, "token_type_ids", ("Mul", ["token_type_ids", 0], {}))


def hide_the_last_token(graph):
    pads = [0, -1, 0, 1]  # off the front, onto the end
    rewire(graph, "attention_mask", ("Pad", ["attention_mask", pads], {}))


def hide_all_but_the_first(graph):
    rewire(graph, "attention_mask", ("Mul", ["step1", 0], {}), ("Identity", ["attention_mask"], {}))


def see_one_padding(graph):
    """The mask moved to the right by one, a 1 before it: rows without padding do not show it."""
    rewire(graph, "attention_mask", ("Pad", ["attention_mask", [0, 1, 0, -1], 1], {}))


def swap_outputs(graph):
    first, second = (output.name for output in graph.output)
    for node in graph.node:
        node.output[:] = [{first: second, second: first}.get(x, x) for x in node.output]


# where the last matrix product is; the sentence head's own are Gemm
LAST = {"sentence": "encoder.blocks.1", "span": "the head", "token": "the head"}


@pytest.mark.parametrize("head", TASKS_BY_HEAD)
@pytest.mark.parametrize(
    ("spoil", "says", "layer"),
    [
        (flip_a_weight, "departs by", "encoder.blocks.0"),
        (negate_a_row, "departs by", "encoder.blocks.0"),
        (flip_a_later_weight, "departs by", "encoder.blocks.1"),
        (not_a_number, "not finite in", LAST),
        (infinite, "not finite in", LAST),
        (hide_the_last_token, "(alone)", "encoder.blocks.0"),
        (see_one_padding, "(padded to ", "encoder.blocks.0"),
    ],
)
def test_a_spoilt_graph_closes_the_gate(gate, head, spoil, says, layer):
    message = gate(head, spoil)
    assert f"the parity gate refused {TASKS_BY_HEAD[head].name}: fp32" in message
    assert says in message
    assert f"the first to depart is {layer if layer is not LAST else LAST[head]}" in message


def test_one_padding_seen_shows_only_in_padded_batches(gate):
    message = gate("token", see_one_padding)
    assert "fp32 (padded to " in message
    assert "fp32 (alone)" not in message


def test_labels_in_another_order_close_the_gate(gate):
    message = gate("sentence", swap_labels)
    assert "departs by" in message
    assert "of the decisions agree, 100.0% needed" in message


def test_segments_ignored_close_the_gate(gate):
    message = gate("span", ignore_segments)
    assert "departs by" in message and "the first to depart is encoder.embeddings" in message


def test_start_and_end_exchanged_close_the_gate(gate):
    message = gate("span", swap_outputs)
    assert "of the decisions agree" in message and "the first to depart is the head" in message


def test_an_input_dropped_closes_the_gate(gate):
    def drop(graph):
        ignore_segments(graph)
        graph.node[0].input[:] = ["input_ids", graph.node[0].input[1]]
        del graph.input[[tensor.name for tensor in graph.input].index("token_type_ids")]

    assert "has inputs ['attention_mask', 'input_ids']" in gate("sentence", drop)


def test_an_output_too_many_closes_the_gate(gate):
    def expose(graph):
        graph.output.append(onnx.ValueInfoProto(name=next(n for n in graph.node if n.op_type == "Softmax").output[0]))

    assert "outputs are ['logits', " in gate("sentence", expose)


def test_a_sequence_baked_in_closes_the_gate(gate):
    def bake(graph):
        for tensor in graph.input:
            tensor.type.tensor_type.shape.dim[1].dim_value = 7

    message = gate("token", bake)
    assert "does not run" in message


def test_an_output_of_one_row_closes_the_gate(runs, tmp_path):
    graph = onnx.load(runs["sentence"][1])
    name = graph.graph.output[0].name
    graph.graph.node[-1].output[0] = "all"
    for label, value in (("zero", [0]), ("one", [1])):
        graph.graph.initializer.append(numpy_helper.from_array(np.array(value), label))
    graph.graph.node.append(helper.make_node("Slice", ["all", "zero", "one"], [name]))
    onnx.save(graph, tmp_path / "model.onnx")
    failures = check_shapes(OnnxRunner(tmp_path / "model.onnx"), CONFIG.max_position_embeddings)
    assert [failure.partition(" gives")[0] for failure in failures[:2]] == [
        "shape 3 x 33",
        "shape 3 x 33, one row all padding",
    ]


def test_a_row_of_padding_that_reaches_its_neighbours_closes_the_gate(gate):
    """The smallest count of tokens in the batch is added to every logit, where it is 0: real text has no such row."""

    def reach(graph):
        last = graph.node[-1]
        name, last.output[0] = last.output[0], "own"
        for label, value in (("axis", np.array([1])), ("one", np.array(1.0, np.float32))):
            graph.initializer.append(numpy_helper.from_array(value, f"reach_{label}"))
        graph.node.extend(
            [
                helper.make_node("ReduceSum", ["attention_mask", "reach_axis"], ["counts"], keepdims=0),
                helper.make_node("ReduceMin", ["counts"], ["fewest"], keepdims=0),
                helper.make_node("Cast", ["fewest"], ["few"], to=onnx.TensorProto.FLOAT),
                helper.make_node("Min", ["few", "reach_one"], ["any"]),
                helper.make_node("Sub", ["any", "reach_one"], ["empty"]),
                helper.make_node("Add", ["own", "empty"], [name]),
            ]
        )

    message = gate("sentence", reach)
    assert "a row of padding alone changes the rows beside it" in message and "departs by" not in message


@pytest.mark.parametrize("name", ["fp16", "int8"])
@pytest.mark.parametrize("spoil", [swap_labels, hide_all_but_the_first])
def test_other_precisions_have_their_gate(gate, name, spoil):
    assert f"{name} (padded to " in gate("sentence", spoil, name)


def test_what_int8_would_forgive_is_found_in_the_graph_that_it_is_made_of(runs, tmp_path, monkeypatch):
    run, graph = runs["sentence"]
    model = onnx.load(graph)
    hide_the_last_token(model.graph)
    onnx.save(model, tmp_path / "spoilt.onnx")
    monkeypatch.setattr(publish, "export_onnx", lambda model, path: shutil.copy2(tmp_path / "spoilt.onnx", path))
    with pytest.raises(CheckFailed, match=r"fp32 \(padded to \d+\)"):
        publish.export_run(run, tmp_path / "out", ["int8"], make_examples("sentence"), lambda line: None)
    assert not (tmp_path / "out").exists()


def test_only_what_was_asked_for_is_listed(runs, tmp_path, monkeypatch):
    run, graph = runs["sentence"]
    monkeypatch.setattr(publish, "export_onnx", lambda model, path: shutil.copy2(graph, path))
    manifest = publish.export_run(run, tmp_path / "out", ["fp16"], make_examples("sentence"), lambda line: None)
    assert manifest["graphs"] == {"fp16": "model.fp16.onnx"}
    assert {result["precision"] for result in manifest["metrics"]["parity"]} == {"fp16"}
    assert manifest["serve"] == "fp16"


def test_an_overflow_between_nodes_closes_the_gate_of_fp16(tmp_path):
    """No weight is too large, and the CPU's answer is right: on a GPU it would be NaN."""

    def outliers(model):
        model.encoder.blocks[0].feed_forward.expand.weight.mul_(2000)
        model.encoder.blocks[0].feed_forward.contract.weight.mul_(50)

    run = make_run(tmp_path / "run", "sentence", outliers)
    with pytest.raises(CheckFailed, match=r"fp16 \(padded to \d+\): \S+ leaves FP16's range on a row of \d+ tokens"):
        publish.export_run(run, tmp_path / "out", ["fp32", "fp16"], make_examples("sentence"), lambda line: None)
    assert not (tmp_path / "out").exists()


def test_weights_beyond_fp16_close_its_gate(tmp_path):
    def outlier(model):
        model.encoder.blocks[1].attention.value.weight[0, 0] = 1e6

    run = make_run(tmp_path / "run", "token", outlier)
    with pytest.raises(CheckFailed, match="reaches 1e"):
        publish.export_run(run, tmp_path / "out", ["fp16"], make_examples("token"), lambda line: None)
    assert not (tmp_path / "out").exists()


def test_a_faithful_artifact_passes_with_its_figures(runs):
    task, examples = TASKS_BY_HEAD["token"], make_examples("token")
    reference = Reference(task, TOKENIZER, TorchRunner(make_model("token"), TOKENIZER.pad_id), examples)
    results = compare(reference, "fp32", OnnxRunner(runs["token"][1]), "onnxruntime")
    assert [result.mode for result in results] == [*(f"padded to {n}" for n in task.buckets), "alone"]
    for result in results:
        assert result.passed
        assert 0 < result.mean_difference < result.max_difference < 1e-5
        assert result.agreement == 1.0
        assert result.artifact_metric == result.reference_metric
        assert (result.examples, result.rows) == (len(examples), len(reference.rows))
        assert result.rows > result.examples  # long texts have several


def test_the_gate_needs_text_and_takes_all_lengths():
    task = TASKS_BY_HEAD["sentence"]
    with torch.no_grad(), pytest.raises(InputError, match="needs examples"):
        Reference(task, TOKENIZER, TorchRunner(make_model("sentence"), 0), [])
    examples = [Example({"TEXT": "a" * n}, "good") for n in range(1000)]
    assert [len(e.columns["TEXT"]) for e in spread(examples, 5)] == [0, 250, 500, 749, 999]
    assert spread(examples[:4], 5) == examples[:4]
