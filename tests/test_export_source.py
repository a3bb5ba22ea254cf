"""`bertship export MODEL_DIR` and `bertship parity`: models from elsewhere, judged again, and what is refused."""

import html
import json
import shutil

import numpy as np
import onnx
import pytest
import safetensors.torch
import torch
import transformers
from small_bert import make_run
from test_parity import edit, flip_a_later_weight, matrices

from bertship import artifacts, processor
from bertship.errors import InputError
from bertship.tasks import TASKS
from bertship.tasks.base import softmax
from bertship.tokenization import Tokenizer, pad
from export import engines, stages
from export.source import from_model_dir, labels_by_name
from train.optim import pick_precision


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
        assert code == 2 and says in err and err.rstrip("\n").rpartition("\n")[2].startswith("error: ")
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


def reexported(folder, data, bertship, runs):
    arguments = ("--task", "sst2", "--data", data / "sst2", "--precision", "fp32", "--runs", runs, folder)
    return bertship("export", *arguments)


def test_another_casing_is_another_model(tmp_path, model_dir, data, bertship):
    """Of a directory with vocab.txt alone, tokenizer_config.json says how it is read."""
    folder = shutil.copytree(model_dir, tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    for lowercase in (True, False):
        settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"do_lower_case": lowercase}), "utf-8")
        code, _, err = reexported(folder, data, bertship, tmp_path)
        assert code == 0 and "is up to date" not in err
        assert Tokenizer.from_file(tmp_path / "export" / "sst2" / "tokenizer.json").lowercase is lowercase


def test_weights_that_would_not_be_used_are_refused(tmp_path, model_dir, data, bertship):
    """They are another model's: config.json says one block, the file has two; or a head has more than ours."""
    config = json.loads((model_dir / "config.json").read_text("utf-8"))
    fewer = shutil.copytree(model_dir, tmp_path / "fewer")
    (fewer / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}), "utf-8")
    mixed = shutil.copytree(model_dir, tmp_path / "mixed")
    tensors = safetensors.torch.load_file(mixed / "model.safetensors")
    safetensors.torch.save_file(tensors | {"mix.weight": torch.zeros(2)}, mixed / "model.safetensors")
    for folder, name in ((fewer, "bert.encoder.layer.1."), (mixed, "mix.weight")):
        code, _, err = reexported(folder, data, bertship, tmp_path / "runs")
        assert code == 2 and f"has weights that sst2 would not use ({name}" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"is_decoder": True}, "is_decoder is true"),
        ({"architectures": 5}, "architectures is 5, a list of classes is needed"),
    ],
)
def test_configurations_of_other_models_are_one_line(tmp_path, model_dir, data, bertship, change, says):
    folder = shutil.copytree(model_dir, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | change), "utf-8")
    code, _, err = reexported(folder, data, bertship, tmp_path / "runs")
    assert code == 2 and says in err and err.count("\n") == 1


def test_a_run_of_another_task_is_not_exported_as_this_one(tmp_path, data, bertship):
    run = make_run(tmp_path / "run", "sentence")
    code, _, err = reexported(run, data, bertship, tmp_path / "runs")
    assert (code, err) == (2, f"error: {run} is a run of moods, not of sst2; give --task moods\n")


def test_what_is_no_export_is_not_replaced(tmp_path, model_dir, data, bertship):
    """Publishing replaces a directory as a whole: a model kept there would be lost."""
    folder = shutil.copytree(model_dir, tmp_path / "export" / "sst2")
    before = contents(folder)
    code, _, err = reexported(folder, data, bertship, tmp_path)
    assert code == 2 and f"{folder} is not empty and no export" in err
    assert contents(folder) == before
    (tmp_path / "runs" / "export" / "sst2").mkdir(parents=True)
    (tmp_path / "runs" / "export" / "sst2" / "manifest.json").write_text('{"stage": "export", "files"', "utf-8")
    assert reexported(model_dir, data, bertship, tmp_path / "runs")[0] == 0  # an export cut short is


def test_without_vnni_fp32_is_best_and_int8_has_seven_bits(tmp_path, model_dir, data, bertship, monkeypatch):
    """exp.8, by what the processor says of itself."""
    (tmp_path / "cpuinfo").write_text("model name\t: Old\nflags\t\t: fpu sse2 avx2 avx512f\n", "utf-8")
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    arguments = ("--task", "sst2", "--data", data / "sst2", "--runs", tmp_path, model_dir)
    code, out, err = bertship("--json", "export", *arguments)
    assert code == 0, err
    manifest = json.loads(out)
    assert manifest["best"]["precision"] == manifest["serve"] == "fp32" and "VNNI" in manifest["best"]["why"]
    assert manifest["recipes"]["int8"]["weight_bits"] == 7


@pytest.mark.parametrize("command", ["parity", "plan", "bench-engine"])
def test_a_manifest_that_lacks_something_is_one_line(export, bertship, tmp_path, command):
    whole = json.loads((export / "manifest.json").read_text("utf-8"))
    names = ("graphs", "files", "inputs", "task", "fingerprint", "created", "versions")
    spoilt = [({name: value for name, value in whole.items() if name != lacking}, lacking) for lacking in names]
    spoilt += [
        (whole | {"graphs": []}, "graphs is [], an object is needed"),
        (whole | {"graphs": {"fp32": 5}}, "the graph of fp32 is 5, a file is needed"),
        (whole | {"inputs": None}, "inputs is None"),
        (whole | {"files": {"model.onnx": 5}}, "files has no size and hash of model.onnx"),
        (whole | {"files": {"model.onnx": {"bytes": 5}}}, "files has no size and hash of model.onnx"),
    ]
    for manifest, says in spoilt:
        (export / "manifest.json").write_text(json.dumps(manifest), "utf-8")
        code, out, err = bertship(command, export, *(() if command == "plan" else ("--runs", tmp_path / "runs")))
        assert code == 2 and says in err and "make the directory again" in err and out == ""
    assert not (tmp_path / "runs").exists()


def test_unknown_precisions_in_a_manifest_are_one_line(export, data, bertship, tmp_path):
    manifest = json.loads((export / "manifest.json").read_text("utf-8"))
    for graphs, says in (({"fp64": "model.onnx"}, "a graph of unknown precision 'fp64'"), ({}, "has no graph")):
        (export / "manifest.json").write_text(json.dumps(manifest | {"graphs": graphs}), "utf-8")
        code, _, err = bertship("parity", export, "--data", data / "sst2", "--runs", tmp_path)
        assert code == 2 and says in err


def test_plans_that_the_manifest_says_too_little_of_are_one_line(export, data, bertship, tmp_path):
    manifest = json.loads((export / "manifest.json").read_text("utf-8"))
    for plans, says in (
        ({"fp16": {"file": "model.plan"}}, "does not say version, compute_capabilities, sha256, outputs of"),
        ({"fp16": {}}, "does not say version"),
        ({"fp16": 5}, "has no facts of a plan 'fp16'"),
    ):
        (export / "manifest.json").write_text(json.dumps(manifest | {"plans": plans}), "utf-8")
        code, _, err = bertship("parity", export, "--data", data / "sst2", "--runs", tmp_path, "--engine", "tensorrt")
        assert code == 2 and says in err and f"bertship plan {export}" in err


def test_values_that_are_not_finite_are_null_in_json_and_named_in_the_page(export, data, bertship, tmp_path):
    """JSON has no NaN; and a maximum over NaN would name any of them."""
    spoil(export, lambda graph: edit(matrices(graph)[8], lambda w: w.__setitem__((0, 0), np.nan)))

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    code, out, _ = bertship("--json", "parity", export, "--data", data / "sst2", "--runs", tmp_path)
    found = json.loads(out, parse_constant=refuse)
    assert code == 1 and not found["passed"] and found["parity"][0]["max_difference"] is None
    kept = (tmp_path / "parity" / "sst2" / "manifest.json").read_text("utf-8")
    assert json.loads(kept, parse_constant=refuse)["metrics"]["parity"] == found["parity"]
    page = html.unescape((tmp_path / "parity" / "sst2" / "report.html").read_text("utf-8"))
    assert "fp32 on onnxruntime FAILS" in page and "logits are not finite (padded to 32)" in page
    code, out, _ = bertship("parity", export, "--data", data / "sst2", "--runs", tmp_path)
    assert code == 1 and "nan" in out


def test_engines_are_asked_for_before_anything_is_computed(export, data, bertship, tmp_path, monkeypatch):
    """An engine that this machine lacks is no verdict on the export: exit 2, at once."""
    monkeypatch.setattr(stages, "load_examples", lambda *_: pytest.fail("texts were read"))
    for engine in ("onnxruntime-cuda", "onnxruntime-tensorrt", "tensorrt"):
        code, _, err = bertship("parity", export, "--data", data / "sst2", "--runs", tmp_path, "--engine", engine)
        assert code == 2 and "refused" not in err


def test_an_export_of_a_model_from_elsewhere_is_measured_beside_pytorch(export, bertship, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "CEILING_SIZE", 64)
    monkeypatch.setattr(engines, "CEILING_S", 0.01)
    small = ("--batch", "1", "--length", "4", "--seconds", "0.01", "--no-mixed", "--runs", tmp_path)
    code, out, err = bertship("--json", "bench-engine", export, *small)
    assert code == 0, err
    names = {f"{row['runner']} {row['precision']}" for row in json.loads(out)["rows"]}
    assert names == {"onnxruntime fp32", "torch fp32"} | ({"torch bf16"} if pick_precision("auto", "cpu") else set())
