"""`bertship export MODEL_DIR` and `bertship parity`: models from elsewhere, judged again, and what is refused."""

import html
import json
import shutil

import numpy as np
import onnx
import pytest
import torch
import transformers
from test_parity import edit, flip_a_later_weight, matrices

from bertship import artifacts
from bertship.errors import InputError
from bertship.tasks import TASKS
from bertship.tasks.base import softmax
from bertship.tokenization import Tokenizer, pad
from export import stages
from export.source import from_model_dir, labels_by_name


def saved(folder, warm_start, kind=transformers.BertForSequenceClassification, **config):
    """A model with random weights, saved by transformers, with the vocabulary of the tests' data."""
    torch.manual_seed(3)
    config = transformers.BertConfig.from_pretrained(warm_start, initializer_range=0.2, **config)
    kind(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy2(warm_start / name, folder / name)
    return folder


def names_of(*labels):
    return {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, warm_start):
    """Sentiment with the labels the other way round, and in capitals."""
    return saved(tmp_path_factory.mktemp("model"), warm_start, **names_of("POSITIVE", "NEGATIVE"))


@pytest.fixture(scope="module")
def made(tmp_path_factory, model_dir, data, bertship):
    """What the command says and where it put the export."""
    runs = tmp_path_factory.mktemp("runs")
    arguments = ("--task", "sst2", "--data", data / "sst2", "--precision", "fp32,fp16", "--runs", runs, model_dir)
    code, out, err = bertship("--json", "export", *arguments)
    assert code == 0, err
    return runs / "export" / "sst2", json.loads(out), err


@pytest.fixture
def export(made, tmp_path):
    """A copy that may be spoilt."""
    return shutil.copytree(made[0], tmp_path / "sst2")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_labels_go_by_name_and_answers_are_those_of_transformers(made, model_dir, bertship):
    out, manifest, err = made
    assert json.loads((out / "task.json").read_text("utf-8"))["labels"] == ["positive", "negative"]
    assert "is best here: " in err and manifest["best"]["why"] in err
    theirs = transformers.BertForSequenceClassification.from_pretrained(model_dir).eval()
    tokenizer = Tokenizer.from_dir(model_dir)
    for text in ("a lovely film about the river", "a dull film"):
        rows = TASKS["sst2"].behaviour.encode(TASKS["sst2"], tokenizer, {"TEXT": [text]}).rows
        with torch.inference_mode():
            logits = theirs(**{k: torch.from_numpy(v) for k, v in pad(rows, tokenizer.pad_id).items()}).logits.numpy()
        arguments = ("predict", "--task", "sst2", "--precision", "fp32", "--runs", out.parents[1], "--text", text)
        code, answered, err = bertship("--json", *arguments)
        assert code == 0, err
        (answer,) = json.loads(answered)["answers"]
        wanted = theirs.config.id2label[int(logits.argmax())]
        assert answer["LABEL"] == wanted.lower()
        assert answer["SCORE"] == pytest.approx(float(softmax(logits).max()), abs=1e-5)


def test_what_is_up_to_date_is_not_made_again(made, model_dir, data, bertship):
    out = made[0]
    arguments = ("--task", "sst2", "--data", data / "sst2", "--precision", "fp32,fp16", "--runs", out.parents[1])
    code, _, err = bertship("export", *arguments, model_dir)
    assert code == 0 and "is up to date" in err


@pytest.mark.parametrize(
    ("task", "kind", "config", "says"),
    [
        ("sst2", transformers.BertForSequenceClassification, {}, "id2label names no labels .*negative, positive"),
        ("sst2", transformers.BertForSequenceClassification, names_of("bad", "good"), "its labels are bad, good; sst2"),
        ("sst2", transformers.BertForSequenceClassification, names_of("negative", "positive", "odd"), "its labels are"),
        ("mnli", transformers.BertForSequenceClassification, names_of("negative", "positive"), "its labels are"),
        ("squad", transformers.BertForMaskedLM, {}, "is not fine-tuned for squad .*qa_outputs.*bertship finetune"),
        ("ner", transformers.BertForTokenClassification, {}, "id2label names no labels .*write their names"),
    ],
)
def test_other_models_are_refused(tmp_path, warm_start, data, bertship, task, kind, config, says):
    folder = saved(tmp_path / "model", warm_start, kind, **config)
    with pytest.raises(InputError, match=says):
        from_model_dir(TASKS[task], folder)
    code, _, err = bertship(
        "export", "--task", task, "--data", data / task, "--runs", tmp_path / "runs", folder, "--precision", "fp32"
    )
    assert code == 2 and err.count("\n") == 1 and err.startswith("error: ")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("task", "kind", "config"),
    [
        ("squad", transformers.BertForQuestionAnswering, {}),
        ("stsb", transformers.BertForSequenceClassification, {"num_labels": 1}),
        ("ner", transformers.BertForTokenClassification, names_of("O", "B-person", "I-person", "B-place", "I-place")),
    ],
)
def test_every_head_of_transformers_exports(tmp_path, warm_start, data, bertship, task, kind, config):
    folder = saved(tmp_path / "model", warm_start, kind, **config)
    (folder / "tokenizer.json").unlink()  # old directories have the vocabulary alone
    arguments = ("--task", task, "--data", data / task, "--runs", tmp_path, "--precision", "fp32", folder)
    code, out, err = bertship("--json", "export", *arguments)
    assert code == 0, err
    assert list(json.loads(out)["graphs"]) == ["fp32"]
    assert Tokenizer.from_file(tmp_path / "export" / task / "tokenizer.json").lowercase


def test_open_labels_are_the_checkpoints(tmp_path, warm_start):
    folder = saved(tmp_path, warm_start, transformers.BertForTokenClassification, **names_of("O", "B-X", "I-X"))
    assert labels_by_name(TASKS["ner"], folder).labels == ("O", "B-X", "I-X")


def test_no_directory_is_one_line(bertship, tmp_path):
    code, _, err = bertship("export", "--task", "sst2", tmp_path / "none")
    assert (code, err) == (2, f"error: no model directory at {tmp_path / 'none'}\n")


def test_an_export_is_judged_again(made, data, bertship, monkeypatch, tmp_path):
    out, manifest, _ = made
    before = contents(out)
    asked = ("--data", data / "sst2", "--runs", tmp_path)
    code, shown, err = bertship("--json", "parity", out, *asked)
    assert code == 0, err
    found = json.loads(shown)
    assert found["passed"] and found["parity"] == manifest["metrics"]["parity"]
    monkeypatch.setattr(stages, "MAX_EXAMPLES", 10)
    counts = {}
    for arguments in ((), ("--full",)):
        code, shown, err = bertship("--json", "parity", out, *asked, *arguments)
        assert code == 0, err
        counts[arguments] = {result["examples"] for result in json.loads(shown)["parity"]}
    assert counts == {(): {10}, ("--full",): {40}}
    assert contents(out) == before
    page = (tmp_path / "parity" / "sst2" / "report.html").read_text("utf-8")
    assert "<h2>Conclusions</h2>" in page and f"bertship parity {out} --full --engine cpu --data" in page
    kept = json.loads((tmp_path / "parity" / "sst2" / "manifest.json").read_text("utf-8"))
    assert kept["stage"] == "parity" and kept["passed"] and {r["examples"] for r in kept["metrics"]["parity"]} == {40}


def test_an_export_leaves_a_page(made):
    out, manifest, _ = made
    page = html.unescape((out / "report.html").read_text("utf-8"))
    for heading in ("Conclusions", "Artifacts", "Comparisons", "Versions", "Reproduce", "Next"):
        assert f"<h2>{heading}</h2>" in page, heading
    for name in manifest["graphs"]:
        assert f"{name} on onnxruntime passes" in page
    assert "FAILS" not in page and f"bertship bench-engine {out}" in page


def test_every_bucket_and_several_batch_sizes_are_judged(made):
    for result in made[1]["metrics"]["parity"]:
        if result["mode"].startswith("padded"):
            cells = result["batches"]
            assert sum(cell["rows"] for cell in cells) == result["rows"]
            assert {cell["batch"] for cell in cells} >= {1, 3, 16}
            assert max(cell["max_difference"] for cell in cells) == result["max_difference"]
            assert {f"padded to {cell['tokens']}" for cell in cells} == {result["mode"]}
    modes = [result["mode"] for result in made[1]["metrics"]["parity"] if result["precision"] == "fp16"]
    assert modes == [*(f"padded to {n}" for n in TASKS["sst2"].buckets), "alone", "torch half"]


def spoil(export, change, file="model.onnx"):
    """Change a graph and let the manifest agree with it, as if it had been made so."""
    graph = onnx.load(export / file)
    change(graph.graph)
    onnx.save(graph, export / file)
    manifest = artifacts.read_manifest(export)
    facts = {"bytes": (export / file).stat().st_size, "sha256": artifacts.sha256_file(export / file)}
    manifest["files"][file] = facts
    (export / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


@pytest.mark.parametrize("file", ["model.onnx", "model.fp16.onnx"])
def test_a_departure_exits_1_with_the_layer_and_writes_nothing(export, data, bertship, file):
    """exp.3: the gate closes, and says where."""

    def halve(graph):
        edit(matrices(graph)[8], lambda w: np.multiply(w, 0.5, out=w))  # the second block's values

    spoil(export, halve, file)
    before = contents(export)
    code, shown, err = bertship("parity", export, "--data", data / "sst2")
    assert code == 1
    assert "FAILED" in shown
    assert "error: the parity gate refuses sst2: " in err and "the first to depart is encoder.blocks.1" in err
    assert contents(export) == before


def test_a_flipped_weight_is_found_by_the_command(export, data, bertship):
    spoil(export, flip_a_later_weight)
    code, _, err = bertship("parity", export, "--data", data / "sst2")
    assert code == 1 and "fp32 (padded to 32)" in err


def test_what_cannot_be_judged_is_one_line(export, data, bertship, tmp_path):
    common = ("parity", export, "--data", data / "sst2")
    for arguments, says in (
        (("--engine", "gpu"), "unknown engine 'gpu'; engines are cpu, onnxruntime-cuda"),
        (("--engine", "tensorrt"), f"has no TensorRT plan; build one: bertship plan {export}"),
        (("--engine", "onnxruntime-cuda"), "install onnxruntime-gpu"),
        (("--model", tmp_path), "is not the model that"),
    ):
        code, _, err = bertship(*common, *arguments)
        assert code in (1, 2) and says in err and err.rstrip("\n").rpartition("\n")[2].startswith("error: ")
    (export / "model.onnx").write_bytes(b"other")
    code, _, err = bertship(*common)
    assert code == 2 and "model.onnx has changed since it was made" in err
    code, _, err = bertship("parity", tmp_path / "none")
    assert code == 2 and "no manifest.json" in err


def test_a_model_that_changed_is_not_the_reference(export, model_dir, data, bertship, tmp_path):
    moved = shutil.copytree(model_dir, tmp_path / "moved")
    common = ("parity", export, "--data", data / "sst2", "--model", moved)
    assert bertship(*common)[0] == 0
    (moved / "config.json").write_text((moved / "config.json").read_text("utf-8") + " ", "utf-8")
    code, _, err = bertship(*common)
    assert code == 2 and f"{moved} is not the model that {export} was made from" in err
