"""export/bench_engine.py: every engine is measured on the same rows, and what is written says what was measured."""

import csv
import json

import numpy as np
import onnx
import pytest
import torch
from small_bert import CONFIG, TASKS_BY_HEAD, make_examples, make_model, make_run

from bertship.errors import InputError
from export import bench_engine, engines, precision, publish
from export.bench_report import lines
from export.onnx_graph import export_onnx
from train.optim import pick_precision

LAYER, HEADED = 2 * (4 * CONFIG.hidden_size**2 + 2 * CONFIG.hidden_size * 64), 4 * CONFIG.hidden_size
WORK_TOKEN, WORK_PAIR = CONFIG.num_hidden_layers * LAYER, CONFIG.num_hidden_layers * HEADED
# of one decision a text: keys, values and one token's attention in the last layer
WORK_ONCE = (WORK_TOKEN - LAYER + 4 * CONFIG.hidden_size**2 + HEADED, WORK_PAIR - HEADED)

NATIVE_BF16 = pick_precision("auto", "cpu") is not None


def silent(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    run = make_run(folder / "run", "sentence")
    publish.export_run(run, folder / "export", ["fp32", "fp16", "int8"], make_examples("sentence"), silent)
    return folder / "export"


@pytest.fixture(scope="module")
def measured(export, tmp_path_factory):
    said: list[str] = []
    out = tmp_path_factory.mktemp("measured") / "bench"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "CEILING_SIZE", 64)
        patch.setattr(engines, "CEILING_S", 0.01)
        result = bench_engine.bench_engines(
            export, out, batches=(1, 3), lengths=(5, 9), seconds=0.001, threads=1, report=said.append
        )
    return result, out, said


def test_every_engine_is_measured_at_every_batch_and_length(export, measured):
    result, out, said = measured
    names = {"onnxruntime fp32", "onnxruntime int8", "torch fp32"} | ({"torch bf16"} if NATIVE_BF16 else set())
    cells = [(row["batch"], row["length"], f"{row['runner']} {row['precision']}") for row in result["rows"]]
    assert sorted(cells) == sorted((b, n, name) for b in (1, 3) for n in (5, 9) for name in names)
    assert set(result["ceilings_gops"]) == names
    assert any("onnxruntime fp16 is left out" in line for line in said)
    assert any("torch bf16 is left out" in line for line in said) is not NATIVE_BF16
    for row in result["rows"]:
        assert 0 < row["median_ms"] <= row["p99_ms"]
        assert row["runs"] >= bench_engine.FEWEST
        seconds = row["median_ms"] / 1e3
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * row["length"] / seconds, rel=0.01)
        work = row["batch"] * row["length"] * (WORK_ONCE[0] + row["length"] * WORK_ONCE[1])
        assert row["gops"] == pytest.approx(work / seconds / 1e9, abs=0.06)
        if f"{row['runner']} {row['precision']}" == "onnxruntime fp32":
            assert row["to_onnxruntime_fp32"] == 1
    assert {line["way"] for line in result["mixed"]} == {
        "unpadded rows",
        *(f"padded batches of {n}, {order}" for n in (8, 32) for order in ("as they come", "sorted by length")),
    }
    assert {path.name for path in out.iterdir()} == {
        "engines.json",
        "engines.csv",
        "mixed.csv",
        "engines.png",
        "report.html",
    }


def test_files_say_what_was_measured_and_where(export, measured):
    result, out, _ = measured
    assert json.loads((out / "engines.json").read_text("utf-8")) == json.loads(json.dumps(result))
    with (out / "engines.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    assert [float(row["median_ms"]) for row in table] == [row["median_ms"] for row in result["rows"]]
    assert result["versions"]["torch"] == torch.__version__.partition("+")[0] or torch.__version__
    assert result["versions"]["onnxruntime"]
    assert result["machine"]["cpu"] and result["machine"]["threads"] == 1
    page = (out / "report.html").read_text("utf-8")
    for heading in ("Conclusions", "One row at a time", "Batches of 3 rows", "All", "Reproduce"):
        assert f"<h2>{heading}</h2>" in page, heading
    assert page.count("<svg") == 2 and f"bertship bench-engine {export} --batch 1,3 --length 5,9" in page
    assert (out / "engines.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = "\n".join(lines(result))
    assert result["machine"]["cpu"] in text and "own texts" in text


def test_without_the_fine_tuned_model_torch_is_left_out_and_said(export, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "CEILING_SIZE", 64)
    monkeypatch.setattr(engines, "CEILING_S", 0.01)
    said: list[str] = []
    manifest = json.loads((export / "manifest.json").read_text("utf-8"))
    manifest["inputs"]["model"] = str(tmp_path / "gone")
    found = engines.find_engines(export, manifest, 1, said.append, ["fp32"])
    assert [engine.name for engine in found] == ["onnxruntime fp32"]
    assert said == [f"torch is left out: {export} was made from {tmp_path / 'gone'}, which is not there; give --model"]
    with pytest.raises(InputError, match="nothing here runs bf16"):
        engines.find_engines(export, manifest, 1, said.append, ["bf16"])


@pytest.mark.parametrize("native", [True, False])
def test_bf16_that_a_processor_emulates_is_measured_where_it_is_asked_for(export, monkeypatch, native):
    monkeypatch.setattr(engines, "pick_precision", lambda *_: torch.bfloat16 if native else None)
    manifest = json.loads((export / "manifest.json").read_text("utf-8"))
    said: list[str] = []
    found = [engine.name for engine in engines.find_engines(export, manifest, 1, said.append)]
    assert ("torch bf16" in found) is native
    assert any("torch bf16 is left out: this processor emulates it" in line for line in said) is not native
    assert [engine.name for engine in engines.find_engines(export, manifest, 1, silent, ["bf16"])] == ["torch bf16"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"threads": 100_000}, "100000 threads: this process has"),
        ({"seconds": float("inf")}, "inf seconds"),
        ({"batches": (10**9,)}, "a batch of 1000000000 rows of 5 tokens"),
    ],
)
def test_what_would_never_end_or_fit_is_refused_before_anything_starts(export, tmp_path, monkeypatch, asked, says):
    monkeypatch.setattr(bench_engine, "find_engines", lambda *_: pytest.fail("engines were opened"))
    with pytest.raises(InputError, match=says):
        bench_engine.bench_engines(export, tmp_path / "bench", **{"batches": (1,), "lengths": (5,), **asked})


@pytest.mark.parametrize("head", ["sentence", "span"])
def test_the_work_is_the_same_in_every_precision(head, tmp_path):
    paths = [tmp_path / name for name in ("fp32.onnx", "fp16.onnx", "int8.onnx")]
    export_onnx(make_model(head), paths[0])
    precision.to_fp16(paths[0], paths[1])
    precision.to_int8(paths[0], paths[2])
    graphs = [onnx.load(path).graph for path in paths]
    # a span task's head computes two logits a token
    work = WORK_ONCE if head == "sentence" else (WORK_TOKEN + 4 * CONFIG.hidden_size, WORK_PAIR)
    assert {engines.work_of(graph) for graph in graphs} == {engines.Work(*work)}
    assert {engines.max_positions(graph) for graph in graphs} == {CONFIG.max_position_embeddings}


def test_wrong_settings_are_refused_before_anything_is_measured(export, tmp_path):
    def refused(says: str, **settings):
        with pytest.raises(InputError, match=says):
            bench_engine.bench_engines(export, tmp_path / "out", **settings)

    refused(r"batches \[0\]", batches=(0,))
    refused(r"lengths \[-1\]", lengths=(-1,))
    refused("0 seconds", seconds=0)
    refused("this model takes at most 512", lengths=(513,))
    refused("has no fp8; it has fp32, fp16, int8", precisions=("fp8",))
    with pytest.raises(InputError, match=r"no manifest\.json"):
        bench_engine.bench_engines(tmp_path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_when_an_engine_fails(export, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "CEILING_SIZE", 64)
    monkeypatch.setattr(engines, "CEILING_S", 0.01)
    monkeypatch.setattr(engines.OnnxRunner, "__call__", lambda self, rows: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench_engine.bench_engines(export, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_calls_take_turns_and_slow_ones_do_not_hold_up_the_rest():
    order: list[str] = []
    times = bench_engine.take_turns([lambda: order.append("a"), lambda: order.append("b")], 0, 4)
    assert order == ["a"] * 2 + ["b"] * 2 + ["a", "b"] * 4
    assert [len(spent) for spent in times] == [4, 4]


def test_figures_are_those_of_their_definitions():
    assert [bench_engine.percentile(range(1, 101), share) for share in (50, 99, 100)] == [50, 99, 100]
    assert bench_engine.percentile([3.0, 1.0], 99) == 3.0
    assert bench_engine.paired_ratio([1.0, 2.0, 9.0], [2.0, 4.0, 3.0]) == 0.5


def test_rows_have_the_asked_length_and_real_pieces(export):
    task_rows = bench_engine.own_rows(
        export, TASKS_BY_HEAD["sentence"], bench_engine.Tokenizer.from_file(export / "tokenizer.json")
    )
    pieces = set(np.concatenate([row.ids for row in task_rows]).tolist())
    rows = bench_engine._rows_of(task_rows, 3, 500)
    assert [len(row) for row in rows] == [500] * 3
    assert set(np.concatenate([row.ids for row in rows]).tolist()) <= pieces
    assert len(task_rows) == len({id(row) for row in task_rows}) <= bench_engine.MIXED_ROWS
