"""train/features.py: frozen encoders, their layers, the heads on them, the cache, and the export of all that."""

import json

import numpy as np
import onnx
import pytest
import torch
from small_bert import CONFIG, TASKS_BY_HEAD, TOKENIZER, make_examples, make_model

from bertship.artifacts import read_manifest
from bertship.config import FinetuneConfig
from bertship.errors import CheckFailed, InputError
from bertship.pipeline import from_export
from bertship.runners import OnnxRunner
from bertship.tasks.base import Task
from bertship.tokenization import pad
from export import stages
from export.onnx_graph import export_onnx
from export.publish import export_run
from train import features, finetune
from train.checkpoint import load_model, save_model
from train.features import LAYERS, model_class
from train.finetuned import load_finetuned
from train.scoring import columns_of, evaluate
from train.torch_runner import TorchRunner

SHAPES = [(head, layers, "linear") for head in TASKS_BY_HEAD for layers in ("last", "concat_two", "weighted_all")]
SHAPES += [("token", "concat_two", "bilstm"), ("span", "weighted_all", "bilstm")]


@pytest.fixture(autouse=True)
def two_blocks(monkeypatch):
    """The tests' encoder has two blocks: a pair of layers in the place of four."""
    monkeypatch.setitem(LAYERS, "concat_two", (slice(-2, None), "concatenate"))


def task_of(head, layers, top="linear") -> Task:
    return Task(**{**TASKS_BY_HEAD[head].__dict__, "layers": layers, "top": top})


@pytest.fixture
def init(tmp_path):
    folder = tmp_path / "init"
    folder.mkdir()
    save_model(make_model("token"), TOKENIZER, folder)
    return folder


def batch(head, count=5):
    task = TASKS_BY_HEAD[head]
    rows = task.behaviour.encode(task, TOKENIZER, columns_of(task, make_examples(head, count), True)).rows
    return rows, {name: torch.from_numpy(v) for name, v in pad(rows, TOKENIZER.pad_id).items()}


def made(head, layers, top="linear"):
    torch.manual_seed(5)
    task = task_of(head, layers, top)
    return model_class(task)(CONFIG, task.behaviour.width(task)).eval()


@torch.no_grad()
def test_layers_are_the_encoders_own():
    rows, feeds = batch("token")
    model = made("token", "weighted_all")
    hidden = [model.encoder.embeddings(feeds["input_ids"], feeds["token_type_ids"])]
    mask = (1 - feeds["attention_mask"][:, None, None, :]).float() * -1e4
    for block in model.encoder.blocks:
        hidden.append(block(hidden[-1], mask))
    wanted = {"embeddings": [0], "second_to_last": [1], "last": [2], "concat_two": [1, 2], "weighted_all": [1, 2]}
    for layers, numbers in wanted.items():
        model.chosen = LAYERS[layers][0]
        found = model.features(**feeds)
        torch.testing.assert_close(found, torch.stack([hidden[i] for i in numbers], 2))
    assert len(rows) == len(found)


@torch.no_grad()
def test_a_weighted_sum_is_one_and_its_weights_are_learnt():
    mix = features.Mix(3)
    x = torch.randn(2, 5, 3, 4)
    torch.testing.assert_close(mix(x), x.mean(-2))
    mix.weight.copy_(torch.tensor([50.0, 0.0, 0.0]))
    mix.scale.copy_(torch.tensor([2.0]))
    torch.testing.assert_close(mix(x), 2 * x[:, :, 0])


@torch.no_grad()
def test_padding_changes_nothing_in_a_bilstm_which_agrees_with_torchs_own():
    torch.manual_seed(1)
    ours = features.BiLstm(6, 4, 0.0).eval()
    theirs = torch.nn.LSTM(6, 4, num_layers=2, bidirectional=True, batch_first=True).eval()
    for layer, (ahead, behind) in enumerate(((ours.forward_1, ours.backward_1), (ours.forward_2, ours.backward_2))):
        for suffix, part in (("", ahead), ("_reverse", behind)):
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                getattr(part, f"{name}_l0").copy_(getattr(theirs, f"{name}_l{layer}{suffix}"))
    x = torch.randn(3, 9, 6)
    lengths = torch.tensor([9, 1, 5])
    mask = (torch.arange(9) < lengths[:, None]).long()
    found = ours(x, mask)
    for i, n in enumerate(lengths.tolist()):
        alone, _ = theirs(x[i : i + 1, :n])
        torch.testing.assert_close(found[i, :n], alone[0])


@pytest.mark.parametrize(("head", "layers", "top"), SHAPES)
def test_only_the_head_trains_and_the_cache_changes_nothing(head, layers, top, init, tmp_path):
    """trn.8: frozen features are deterministic, dropout or not; cached ones are the same."""
    task, examples = task_of(head, layers, top), make_examples(head, 12)
    rows, feeds = batch(head, 12)
    torch.manual_seed(5)
    model, _ = load_model(model_class(task), init, task.behaviour.width(task))
    model.train()
    assert torch.equal(model.features(**feeds), model.features(**feeds))
    assert not any(p.requires_grad for p in model.encoder.parameters())
    cache = features.cache_features(model, rows, 0, tmp_path / "cache", init, lambda line: None)
    model.eval()
    with torch.no_grad():
        from_cache = model.head(*cache.batch(range(len(rows))))
        for output, again in zip(model(**feeds), from_cache, strict=True):
            for i, row in enumerate(rows):
                torch.testing.assert_close(output[i][: len(row)], again[i][: len(row)], atol=1e-5, rtol=0)
    config = (
        FinetuneConfig(min_updates=4, batch_size=4, precision="fp32", layers=task.layers, head=top)
        if (layers in FinetuneConfig.model_fields["layers"].annotation.__args__)
        else FinetuneConfig(min_updates=4, batch_size=4, precision="fp32")
    )
    if config.layers:
        finetune.finetune(TASKS_BY_HEAD[head], init, tmp_path / "out", config, examples, examples, lambda line: None)
        loaded, tokenizer, trained = load_finetuned(tmp_path / "out")
        assert (loaded.layers, loaded.top) == (layers, top)
        before = load_model(type(make_model("token")), init, 3)[0].encoder.state_dict()
        for name, tensor in trained.encoder.state_dict().items():
            assert torch.equal(tensor, before[name]), name
        metrics, _ = evaluate(loaded, tokenizer, TorchRunner(trained, 0), examples)
        manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
        assert metrics[loaded.metrics[0]] == manifest["metrics"][loaded.metrics[0]]


def test_the_cache_is_used_again_by_another_head_and_not_by_other_rows(init, tmp_path):
    said = []
    examples = make_examples("token", 8)
    settings = {"min_updates": 2, "batch_size": 4, "precision": "fp32", "layers": "weighted_all"}
    for name, head, used in (("a", "linear", examples), ("b", "bilstm", examples), ("c", "linear", examples[:6])):
        config = FinetuneConfig(**settings, head=head)
        finetune.finetune(TASKS_BY_HEAD["token"], init, tmp_path / name, config, used, used, said.append)
    assert len([line for line in said if line.startswith("features of")]) == 2
    assert len(list((tmp_path / ".features").iterdir())) == 2


@pytest.mark.parametrize(
    ("head", "settings", "says"),
    [
        ("token", {"layers": "", "head": "bilstm"}, "head 'bilstm' reads a frozen encoder: choose its layers"),
        ("sentence", {"layers": "last", "head": "bilstm"}, "a BiLSTM reads tokens; task moods has one decision a text"),
        ("token", {"layers": "concat_last_four"}, "'concat_last_four' need four blocks; the encoder has 2"),
    ],
)
def test_what_does_not_fit_is_refused(head, settings, says, init, tmp_path):
    examples = make_examples(head, 8)
    with pytest.raises(InputError, match=says):
        finetune.finetune(
            TASKS_BY_HEAD[head],
            init,
            tmp_path / "out",
            FinetuneConfig(**settings),
            examples,
            examples,
            lambda line: None,
        )


@pytest.mark.parametrize(("head", "top"), [("token", "bilstm"), ("token", "linear"), ("sentence", "linear")])
def test_a_frozen_encoders_model_passes_the_gate_like_any_other(head, top, init, tmp_path, monkeypatch):
    examples = make_examples(head, 30)
    config = FinetuneConfig(
        min_updates=20, batch_size=8, precision="fp32", layers="weighted_all", head=top, learning_rate=5e-3
    )
    finetune.finetune(TASKS_BY_HEAD[head], init, tmp_path / "out", config, examples, examples, lambda line: None)
    export_run(tmp_path / "out", tmp_path / "export", ("fp32", "fp16"), examples, lambda line: None)
    task, tokenizer, trained = load_finetuned(tmp_path / "out")
    monkeypatch.setattr(stages, "load_examples", lambda *_: examples)
    again = stages.check_parity(tmp_path / "export", None, lambda line: None)
    assert again["passed"] and again["metrics"] == read_manifest(tmp_path / "export")["metrics"]
    columns = columns_of(task, examples)
    pipeline = from_export(tmp_path / "export", "fp32")
    wanted = evaluate(task, tokenizer, TorchRunner(trained, 0), examples)[1]
    if head == "sentence":
        np.testing.assert_allclose(pipeline(columns)["PROBABILITIES"], wanted["PROBABILITIES"], atol=1e-5)
    else:
        assert len(pipeline(columns)["ENTITIES"]) == len(examples)


INT8 = [("token", "weighted_all", "bilstm"), ("token", "embeddings", "bilstm"), ("token", "embeddings", "linear")]
INT8 += [("sentence", "weighted_all", "linear"), ("span", "last", "bilstm")]


@pytest.mark.parametrize(("head", "layers", "top"), INT8)
def test_a_frozen_encoders_model_is_quantized_behind_the_gate_or_refused_in_a_line(head, layers, top, init, tmp_path):
    """Embeddings alone have no product to quantize but the head's; an LSTM's weights stay in FP32."""
    examples, said = make_examples(head, 30), []
    config = FinetuneConfig(min_updates=20, batch_size=8, precision="fp32", layers=layers, head=top, learning_rate=5e-3)
    finetune.finetune(TASKS_BY_HEAD[head], init, tmp_path / "out", config, examples, examples, lambda line: None)
    try:
        manifest = export_run(tmp_path / "out", tmp_path / "export", ("fp32", "int8"), examples, said.append)
    except CheckFailed as refused:
        assert "refused" in str(refused) and "int8 (" in str(refused) and "\n" not in str(refused)
        assert not (tmp_path / "export").exists()
        manifest = export_run(tmp_path / "out", tmp_path / "export", ("fp32", "int8"), examples, said.append, True)
        assert manifest["refused"].keys() == {"int8"} and any("WARNING" in line and "int8" in line for line in said)
        return
    graph = onnx.load(tmp_path / "export" / manifest["graphs"]["int8"]).graph
    kinds = {node.op_type for node in graph.node}
    narrow = {onnx.TensorProto.INT8} | ({onnx.TensorProto.FLOAT16} if layers == "embeddings" else set())  # second try
    assert any(tensor.data_type in narrow for tensor in graph.initializer)
    assert ("MatMulIntegerToFloat" in kinds) is (layers != "embeddings") and ("LSTM" in kinds) is (top == "bilstm")
    answers = from_export(tmp_path / "export", "int8")(columns_of(TASKS_BY_HEAD[head], examples))
    assert all(len(values) == len(examples) for values in answers.values())


@pytest.mark.parametrize("layers", ["weighted_all", "embeddings"])
def test_an_lstms_graph_runs_at_any_length_however_often_one_is_made(layers, tmp_path):
    model = made("token", layers, "bilstm")
    for number in range(2):
        path = tmp_path / f"{number}.onnx"
        export_onnx(model, path)
        dims = [[dim.dim_param for dim in value.type.tensor_type.shape.dim] for value in onnx.load(path).graph.input]
        assert dims == [["batch", "sequence"]] * 3
        runner = OnnxRunner(path)
        for count in (1, 5):
            rows, feeds = batch("token", count)
            with torch.no_grad():
                (wanted,) = model(**feeds)
            found = runner(rows)["logits"]
            for place, row in enumerate(rows):
                np.testing.assert_allclose(found[place], wanted[place][: len(row)].numpy(), atol=1e-5)
