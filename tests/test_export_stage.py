"""export/publish.py and export/stages.py: whole or not at all, and what is up to date is not made again."""

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper
from small_bert import TASKS_BY_HEAD, make_examples, make_model, make_run

from bertship import artifacts
from bertship.errors import CheckFailed, InputError
from bertship.pipeline import from_export
from bertship.runners import OnnxRunner
from export import machine, onnx_graph, publish, stages
from export.onnx_graph import export_onnx
from export.source import from_run
from export.tolerances import TOLERANCES
from serving.repository import render


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of one head and its graph."""
    folder = tmp_path_factory.mktemp("made")
    export_onnx(make_model("sentence"), folder / "model.onnx")
    return make_run(folder / "run", "sentence"), folder / "model.onnx"


@pytest.fixture
def quick(made, monkeypatch):
    """Exporting without the exporter: the graph is there already."""
    monkeypatch.setattr(publish, "export_onnx", lambda model, path: shutil.copy2(made[1], path))
    return made[0]


def silent(line: str) -> None:
    pass


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("head", TASKS_BY_HEAD)
def test_an_export_holds_what_it_says_and_answers_as_pytorch_does(tmp_path, head):
    run, examples = make_run(tmp_path / "run", head), make_examples(head)
    out = tmp_path / "export"
    manifest = publish.export_run(run, out, ["fp32", "fp16"], examples, silent)
    assert manifest == artifacts.read_manifest(out, "export")
    assert set(manifest["files"]) == {path.name for path in out.iterdir()} - {"manifest.json", "report.html"}
    assert artifacts.is_current(out, manifest["fingerprint"])
    assert (manifest["task"], manifest["serve"]) == (TASKS_BY_HEAD[head].name, "fp32")
    assert json.loads((out / "parity.json").read_text()) == manifest["metrics"]["parity"]
    modes = [*(f"padded to {n}" for n in TASKS_BY_HEAD[head].buckets), "alone"]
    assert [r["mode"] for r in manifest["metrics"]["parity"]] == [*modes, *modes, "torch half"]
    pipeline = from_export(out)
    for line in (out / "samples.jsonl").read_text("utf-8").splitlines():
        sample = json.loads(line)
        answer = pipeline({name: [text] for name, text in sample["columns"].items()})
        for name, wanted in sample["answer"].items():
            got = answer[name][0]
            if name in ("ENTITIES", "CANDIDATES"):
                got, wanted = json.loads(got), json.loads(wanted)
                assert [{k: v for k, v in g.items() if k != "score"} for g in got] == [
                    {k: v for k, v in w.items() if k != "score"} for w in wanted
                ]
            elif name in ("SCORE", "PROBABILITIES"):
                assert got == pytest.approx(wanted, abs=1e-5)
            else:
                assert got == wanted


def test_unknown_precisions_and_directories_that_are_no_run_are_refused(quick, tmp_path):
    for names in ([], ["fp64"]):
        with pytest.raises(InputError, match="precisions are fp32, fp16, int8"):
            publish.export_run(quick, tmp_path / "out", names, make_examples("sentence"), silent)
    with pytest.raises(InputError, match=r"no manifest\.json"):
        publish.export_run(tmp_path, tmp_path / "out", ["fp32"], make_examples("sentence"), silent)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "victim", ["model.onnx", "model.fp16.onnx", "model.int8.onnx", "parity.json", "manifest.json", "report.html"]
)
def test_a_disk_that_fills_up_leaves_nothing_new_and_the_old_in_place(quick, tmp_path, monkeypatch, victim):
    out, precisions, examples = tmp_path / "export", ["fp32", "fp16", "int8"], make_examples("sentence")
    graph = quick.parent / "model.onnx"

    def full(path):
        if Path(path).name in (victim, f".{victim}.partial-{os.getpid()}"):
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    save, write_text = onnx.save, Path.write_text

    def export() -> None:
        with monkeypatch.context() as patch, pytest.raises(InputError, match="no space left"):
            patch.setattr(onnx, "save", lambda model, path, **more: full(path) or save(model, path, **more))
            patch.setattr(Path, "write_text", lambda path, *a, **k: full(path) or write_text(path, *a, **k))
            patch.setattr(publish, "export_onnx", lambda model, path: full(path) or shutil.copy2(graph, path))
            publish.export_run(quick, out, precisions, examples, silent)

    export()
    assert list(tmp_path.iterdir()) == []
    publish.export_run(quick, out, ["fp32"], examples, silent)
    before = contents(out)
    export()
    assert contents(out) == before
    assert list(tmp_path.iterdir()) == [out]


def test_an_invalid_graph_is_one_line_and_publishes_nothing(quick, tmp_path, monkeypatch):
    def refuse(path, full_check):
        raise onnx.checker.ValidationError("Field 'name' is required\n\n==> Context: Bad node spec")

    monkeypatch.setattr(onnx_graph.onnx.checker, "check_model", refuse)
    for name in ("fp16", "int8"):
        with pytest.raises(
            CheckFailed, match="is not a valid ONNX graph: Field 'name' is required ==> Context"
        ) as caught:
            publish.export_run(quick, tmp_path / "out", [name], make_examples("sentence"), silent)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_is_up_to_date_is_not_made_again(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "load_examples", lambda task, data, split, report: make_examples("sentence"))
    out, lines = tmp_path / "export", []
    first = stages.make_export(quick, out, ["fp32"], None, lines.append)
    assert stages.make_export(quick, out, ["fp32"], None, lines.append) == first
    assert lines[-1].startswith(f"{out} is up to date: nothing was made again")
    (out / "model.onnx").write_bytes(b"damaged")
    stages.make_export(quick, out, ["fp32"], None, lines.append)
    assert "is up to date" not in lines[-1]
    OnnxRunner(out / "model.onnx")
    again = stages.make_export(quick, out, ["fp32", "fp16"], None, lines.append)
    assert set(again["graphs"]) == {"fp32", "fp16"}
    vnni = machine.find_machine().vnni
    monkeypatch.setattr(stages, "find_machine", lambda: machine.Machine(not vnni))  # for which another one may be best
    stages.make_export(quick, out, ["fp32", "fp16"], None, lines.append)
    assert "is up to date" not in lines[-1]


@pytest.mark.parametrize("vnni", [True, False])
def test_the_served_precision_is_the_best_of_those_that_passed(quick, tmp_path, vnni):
    found = machine.Machine(vnni)
    arguments = (from_run(quick), tmp_path / "export", ["fp32", "fp16", "int8"], make_examples("sentence"), silent)
    manifest = publish.export_source(*arguments, machine=found)
    assert manifest["serve"] == manifest["best"]["precision"] == ("int8" if vnni else "fp32")
    assert manifest["best"]["engine"] == "onnxruntime cpu" and "VNNI" in manifest["best"]["why"]


def test_auto_keeps_what_passes_and_says_what_does_not(quick, tmp_path, monkeypatch):
    def spoilt(source: Path, target: Path, rows: object) -> None:
        raise CheckFailed("spoilt on purpose")

    int8 = dataclasses.replace(publish.PRECISIONS["int8"], make=spoilt, attempts=None)
    monkeypatch.setitem(publish.PRECISIONS, "int8", int8)
    said: list[str] = []
    examples, out = make_examples("sentence"), tmp_path / "export"
    with pytest.raises(CheckFailed, match="int8: spoilt on purpose; nothing was published"):
        publish.export_run(quick, out, ["fp32", "int8"], examples, said.append)
    assert not out.exists()
    manifest = publish.export_run(quick, out, ["fp32", "fp16", "int8"], examples, said.append, lenient=True)
    assert list(manifest["graphs"]) == ["fp32", "fp16"] and manifest["serve"] == "fp32"
    assert manifest["refused"] == {"int8": "int8: spoilt on purpose"}
    assert any("WARNING" in line and "int8" in line for line in said)
    assert not (out / "model.int8.onnx").exists()
    monkeypatch.setitem(TOLERANCES, "fp16", dataclasses.replace(TOLERANCES["fp16"], max_difference=0))
    manifest = publish.export_run(quick, out, ["fp32", "fp16"], examples, said.append, lenient=True)
    assert list(manifest["graphs"]) == ["fp32"] and not (out / "model.fp16.onnx").exists()


def test_int8_is_judged_on_what_the_gate_leaves_out_where_that_is_enough(quick, tmp_path, monkeypatch):
    def attempts(source: Path, target: Path, rows: list, judged: list) -> Iterator[None]:
        shutil.copy2(source, target)
        seen.append(len(judged))
        yield

    seen: list[int] = []
    monkeypatch.setitem(publish.PRECISIONS, "int8", dataclasses.replace(publish.PRECISIONS["int8"], attempts=attempts))
    examples = make_examples("sentence")
    publish.export_run(quick, tmp_path / "export", ["int8"], examples, silent)
    assert seen == [0]  # few examples: the gate counts them all
    many = [dataclasses.replace(example) for _ in range(40) for example in examples][:700]
    publish.export_run(quick, tmp_path / "export", ["int8"], many, silent)
    assert seen == [0, publish.JUDGED_ROWS]
    publish.export_run(quick, tmp_path / "export", ["int8"], many[:627], silent)
    assert seen == [0, publish.JUDGED_ROWS, 0]  # 127 are too few


def test_int8_is_tried_again_nearer_to_fp32_where_the_gate_refuses(quick, tmp_path, monkeypatch):
    def attempts(source: Path, target: Path, rows: object, judged: object) -> Iterator[None]:
        for sign in (-1, -1, 1, 1):
            model = onnx.load(source)
            for tensor in model.graph.initializer:
                if tensor.name.startswith("classifier."):
                    values = numpy_helper.to_array(tensor)
                    tensor.CopyFrom(numpy_helper.from_array(sign * values, tensor.name))
            onnx.save(model, target)
            made.append(sign)
            yield

    made: list[int] = []
    monkeypatch.setitem(publish.PRECISIONS, "int8", dataclasses.replace(publish.PRECISIONS["int8"], attempts=attempts))
    said: list[str] = []
    manifest = publish.export_run(quick, tmp_path / "export", ["fp32", "int8"], make_examples("sentence"), said.append)
    assert made == [-1, -1, 1] and "int8" in manifest["graphs"] and not manifest["refused"]
    assert {result["agreement"] for result in manifest["metrics"]["parity"]} == {1.0}
    assert sum("int8: once more, with less error" in line for line in said) == 2
    assert sum("int8: the gate refuses this one: int8 (padded to " in line for line in said) == 2


@pytest.mark.parametrize("name", ["model.onnx", "task.json", "tokenizer.json"])
def test_what_changed_after_the_gate_is_neither_used_nor_served(quick, tmp_path, name):
    out, repository = tmp_path / "export", tmp_path / "repository"
    publish.export_run(quick, out, ["fp32"], make_examples("sentence"), silent)
    render(out, repository)
    served = contents(repository / "moods_encode" / "1")
    whole = (out / name).read_bytes()
    for spoilt, says in (
        (whole[:-1] + bytes([whole[-1] ^ 1]), "has changed"),
        (whole[:10], "has changed"),
        (None, "is missing"),
    ):
        if spoilt is None:
            (out / name).unlink()
        else:
            (out / name).write_bytes(spoilt)
        for use in (from_export, lambda export: render(export, repository)):
            with pytest.raises(InputError, match=f"{name} {says}"):
                use(out)
    assert contents(repository / "moods_encode" / "1") == served
