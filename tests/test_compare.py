"""bertship/compare.py: runs side by side, by what their directories hold."""

import copy
import json
import re

import pytest

from bertship import artifacts
from bertship.compare import as_dict, compare, conclusions, lines, page
from bertship.errors import InputError

BENCH = {
    "task": "sst2",
    "precision": "int8",
    "settings": {"seconds": 5.0, "windows": 3},
    "encoder": {"backend": "python"},
    "machine": {"cpu": "a processor", "cores": 2},
    "versions": {"bertship": "0.1.0"},
    "memory": {"encode": {"rss_mib": 100.0}},
    "rows": [
        {"protocol": "http", "concurrency": n, "rate_per_s": None, "throughput_per_s": 100.0 * n, "p50_ms": 4.0 + n,
         "p99_ms": 9.0}
        for n in (1, 2)
    ],
}  # fmt: skip
ENGINES = {
    "task": "sst2",
    "settings": {"seconds": 1.0},
    "export": {"path": "runs/export/sst2", "fingerprint": "x"},
    "machine": {"threads": 2},
    "versions": {"onnxruntime": "1"},
    "rows": [
        {"runner": "onnxruntime", "precision": "int8", "batch": 1, "length": n, "median_ms": n / 10, "p99_ms": n / 5,
         "tokens_per_s": 10.0 * n}
        for n in (16, 64)
    ],
    "mixed": [{"runner": "onnxruntime", "precision": "int8", "way": "unpadded", "ms_per_text": 1.5}],
}  # fmt: skip
PARITY = {
    "precision": "fp32", "engine": "onnxruntime", "mode": "alone", "max_difference": 1e-6, "agreement": 1.0,
    "metric": "f1", "reference_metric": 0.5, "artifact_metric": 0.5,
}  # fmt: skip


def stage(folder, kind, config, metrics, log=(), **facts):
    folder.mkdir(parents=True)
    for name, rows in log:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    artifacts.write_manifest(folder, kind, config=config, metrics=metrics, **facts)
    return folder


def finetune(folder, seed, accuracy):
    rows = [{"step": n, "loss": 1 / (n + seed)} for n in range(1, 9)]
    rows[3] |= {"dev": {"accuracy": accuracy / 2}}
    rows[7] |= {"dev": {"accuracy": accuracy}}
    config = {"seed": seed, "epochs": 3.0}
    metrics = {"accuracy": accuracy, "train_seconds": 10.0}
    return stage(folder, "finetune", config, metrics, [("metrics.jsonl", rows)], task="sst2")


def pretrain(folder, seed):
    before = {"mlm_loss": 9.0, "perplexity": 8000.0, "nsp_accuracy": 0.5}
    after = {"mlm_loss": 7.0 - seed, "perplexity": 1000.0, "nsp_accuracy": 0.5 + seed / 10}
    updates = [{"step": n, "mlm_loss": 9 - n / 10, "lr": 1e-4, "tokens_per_s": 100} for n in range(1, 301)]
    heldout = [{"step": 300, **after}]
    log = [("metrics.jsonl", updates), ("heldout.jsonl", heldout)]
    return stage(folder, "pretrain", {"pretrain": {"seed": seed}}, {"before": before, "after": after}, log)


def export(folder, size):
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"x" * size)
    worse = {**PARITY, "mode": "padded to 32", "max_difference": size / 1e9, "agreement": 0.99}
    metrics = {"parity": [PARITY, worse]}
    artifacts.write_manifest(folder, "export", metrics=metrics, graphs={"fp32": "model.onnx"}, plans={})
    return folder


def measured(folder, file, result):
    folder.mkdir(parents=True)
    (folder / file).write_text(json.dumps(result))
    return folder


def made(tmp_path, kind):
    """Two runs of a kind, a metric's name, its two values, how many charts there are, and a setting that differs."""
    one, two = tmp_path / "one", tmp_path / "two"
    if kind == "finetune":
        return [finetune(one, 1, 0.5), finetune(two, 2, 0.6)], "accuracy", [0.5, 0.6], 2, "seed"
    if kind == "pretrain":
        return [pretrain(one, 1), pretrain(two, 2)], "after.mlm_loss", [6.0, 5.0], 5, "pretrain.seed"
    if kind == "export":
        return [export(one, 1000), export(two, 3000)], "fp32: MB", [0.001, 0.003], 0, None
    other = copy.deepcopy(BENCH if kind == "bench" else ENGINES)
    other["settings"]["seconds"] = 2.0
    if kind == "bench":
        other["rows"][1]["p50_ms"] = 3.0
        files = [measured(one, "bench.json", BENCH), measured(two, "bench.json", other)]
        return files, "http, 2 at once: p50 ms", [6.0, 3.0], 2, "settings.seconds"
    other["rows"][1]["median_ms"] = 3.2
    files = [measured(one, "engines.json", ENGINES), measured(two, "engines.json", other)]
    return files, "onnxruntime int8, 1 x 64: median ms", [6.4, 3.2], 1, "settings.seconds"


KINDS = ["pretrain", "finetune", "export", "bench", "bench-engine"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_side_by_side(bertship, tmp_path, kind):
    directories, metric, values, charts, setting = made(tmp_path, kind)
    code, out, err = bertship("--json", "compare", *directories, "--runs", tmp_path / "runs")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["kind"] == kind and found["runs"] == {"one": str(directories[0]), "two": str(directories[1])}
    assert found["metrics"][metric]["values"] == values
    assert found["metrics"][metric]["differences"] == [pytest.approx(values[1] - values[0])]
    if setting:
        assert setting in found["differing_settings"]
    text = (tmp_path / "runs" / "compare" / kind / "report.html").read_text("utf-8")
    assert text.count("<svg") == charts and "<h2>Metrics</h2>" in text and "prefers-color-scheme: dark" in text
    assert not re.search(r'(?:src|href)="http', text)


@pytest.mark.parametrize("kind", ["corpus", "sweep", "evaluate", "a-stage-to-come"])
def test_a_kind_without_curves_has_settings_and_metrics(tmp_path, kind):
    folders = [
        stage(tmp_path / str(n), kind, {"seed": n}, {"documents": 10 + n, "deep": {"share": 0.5}}) for n in (1, 2)
    ]
    found = as_dict(compare(folders))
    assert found["kind"] == kind and found["differing_settings"] == {"seed": [1, 2]}
    assert found["metrics"]["documents"] == {"values": [11, 12], "differences": [1]}
    assert found["metrics"]["deep.share"]["differences"] == [0]


def test_curves_of_all_runs_are_in_one_chart(tmp_path):
    runs = compare([finetune(tmp_path / "one", 1, 0.5), finetune(tmp_path / "two", 2, 0.6)])
    chart = page(runs).html().partition("<h2>Loss in training</h2>")[2].partition("</figure>")[0]
    assert "one" in chart and "two" in chart and chart.count("#0072b2") and chart.count("#e69f00")


def test_settings_that_differ_come_first_and_the_others_are_counted(tmp_path):
    one, two = finetune(tmp_path / "one", 1, 0.5), finetune(tmp_path / "two", 2, 0.6)
    text = lines(compare([one, two]))
    assert text[0].split() == ["one", "two"] and text[1].split() == ["seed", "1", "2"]
    assert re.fullmatch(r"\d+ settings are the same", text[2])
    (row,) = [line for line in text if line.startswith("accuracy")]
    assert row.split() == ["accuracy", "0.5000", "0.6000", "(+0.1,", "+20.0%)"]
    assert not any(line.endswith("()") or "(+0" in line for line in text if line.startswith("train_seconds"))


def test_a_metric_that_one_run_lacks_is_left_open(tmp_path):
    one, two = finetune(tmp_path / "one", 1, 0.5), finetune(tmp_path / "two", 2, 0.6)
    manifest = json.loads((two / "manifest.json").read_text())
    del manifest["metrics"]["accuracy"]
    (two / "manifest.json").write_text(json.dumps(manifest))
    found = as_dict(compare([one, two]))["metrics"]["accuracy"]
    assert found == {"values": [0.5, None], "differences": [None]}
    assert "accuracy" in page(compare([one, two])).html()


def test_three_runs_and_names_that_tell_them_apart(tmp_path):
    folders = [finetune(tmp_path / "finetune" / name, n, 0.5) for n, name in enumerate(("a/x", "b/x", "b/y"))]
    runs = compare(folders)
    assert [run.name for run in runs] == ["a/x", "b/x", "b/y"]
    assert [run.settings["seed"] for run in runs] == [0, 1, 2]


def test_what_cannot_be_compared_is_one_clear_line(bertship, tmp_path):
    one, other = finetune(tmp_path / "one", 1, 0.5), export(tmp_path / "export", 10)
    (tmp_path / "empty").mkdir()

    def refused(says, *directories):
        code, out, err = bertship("compare", *directories, "--runs", tmp_path / "runs")
        assert (code, out, err.count("\n")) == (2, "", 1) and re.search(says, err), err
        assert not (tmp_path / "runs").exists()

    refused("1 run given: two or more", one)
    refused("one is given twice", one, one)
    refused(r"different kinds .*one is of finetune, .*export is of export; give runs of one kind", one, other)
    refused("no directory .*none", one, tmp_path / "none")
    refused(r"empty is no run: it has none of manifest.json, bench.json, engines.json", one, tmp_path / "empty")
    broken = measured(tmp_path / "broken", "bench.json", {"task": "sst2"})
    whole = measured(tmp_path / "whole", "bench.json", BENCH)
    refused(r"broken cannot be read as a run of bench \(KeyError\('precision'\)\); make it again", whole, broken)
    with pytest.raises(InputError, match="0 run given"):
        compare([])


def test_how_good_runs_are_is_said_before_how_long_they_took(tmp_path):
    for name, accuracy in (("a", 1.0), ("b", 0.8136)):
        finetune(tmp_path / name, 1, accuracy)
    manifest = tmp_path / "b" / "manifest.json"
    facts = json.loads(manifest.read_text())
    facts["metrics"]["train_seconds"] = 200.0
    manifest.write_text(json.dumps(facts))
    runs = compare([tmp_path / "a", tmp_path / "b"])
    said = [line for line in conclusions(runs) if "differs by" in line]
    assert said[0] == "accuracy differs by up to 18.6%: 0.8136 (b) to 1.0000 (a)."
    assert said[1].startswith("train_seconds differs by")
    assert any(line.startswith("accuracy") and "1.0000" in line and "0.8136 (" in line for line in lines(runs))
