"""Pages of runs: what the load test's says, how bars are drawn, and that each run ends with what to do next."""

import html
import re

import numpy as np
import pytest

from bertship.report import Curve, Report
from bertship.tasks import Example, get_task
from export import gate_report
from serving.bench_report import conclusions, write_page
from train.finetune_report import add_errors

STAGES = {
    step: {"requests": 9, "executions": 8, "queue_ms": 0.1, "compute_ms": 0.5, "compute_input_ms": 0.1,
           "compute_infer_ms": 0.4, "compute_output_ms": 0.0}
    for step in ("tokenize", "encode", "decode")
}  # fmt: skip


def row(protocol, throughput, p50, clients=None, rate=None):
    return {
        "protocol": protocol, "concurrency": clients, "rate_per_s": rate, "throughput_per_s": throughput, "p50_ms": p50,
        "mean_ms": p50 * 1.2,
        "p90_ms": p50 * 2, "p99_ms": p50 * 3, "mean_batch": 1.5, "padding_share": None, "queue_ms": 0.3,
        "compute_ms": 1.5, "steps_ms": 1.4, "stages": STAGES,
    }  # fmt: skip


@pytest.fixture
def result():
    rows = [row("http", 100.0, 9.0, 1), row("http", 180.0, 11.0, 2), row("http", 185.0, 22.0, 4)]
    rows += [row("grpc", 50.0, 8.0, rate=50.0), row("grpc", 150.0, 80.0, rate=300.0)]
    return {
        "task": "sst2",
        "precision": "int8",
        "machine": {"cores": 2, "cpu": "a processor", "load_at_start": 0.1},
        "versions": {"tritonserver": "2.51.0"},
        "encoder": {"backend": "python", "platform": ""},
        "settings": {"texts": 200, "seconds": 5.0, "perf_analyzer": ["--sync"]},
        "memory": {"sst2_encode": {"rss_mib": 210.0}},
        "rows": rows,
    }


def test_the_page_of_a_load_test(result, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "runs" / "bench" / "sst2"
    directory.mkdir(parents=True)
    (directory / "bench.json").write_text('{"task": "sst2"}')
    write_page(result, directory)
    page = html.unescape((directory / "report.html").read_text("utf-8"))
    for heading in ("Conclusions", "Measured", "Steps", "Resident memory, MiB", "Versions", "Reproduce", "Next"):
        assert f"<h2>{heading}</h2>" in page, heading
    assert page.count("<svg") == 4, "latency and throughput, closed and open loop"
    assert (
        "bertship bench --task sst2 --seconds 5 --concurrency 1,2,4 --request-rate 50,300 --protocol http,grpc" in page
    )
    assert "bertship compare runs/bench/sst2.before runs/bench/sst2" in page
    assert "prefers-color-scheme: dark" in page and not re.search(r'(?:src|href)="http', page)


def test_what_the_load_test_says_is_what_was_measured(result):
    said = "\n".join(conclusions(result))
    assert "http: one client waits 9.00 ms in the median and 27.00 ms" in said
    assert (
        "http: one client waits 9.00 ms in the median and 27.00 ms in the 99th percentile; 10.80 ms on average, of"
        in said
    )
    assert "which the steps compute 1.40 ms." in said
    assert "at most 185 texts a second; 2 at once reach that within 5%, 1.8 times what 1 at once does" in said
    assert "grpc: of 300 requests asked for a second only 150 were answered" in said
    assert "of 50 requests" not in said and "busy" not in said
    result["machine"]["load_at_start"] = 1.5
    assert "The machine was busy at the start (load 1.5 on 2 cores)" in "\n".join(conclusions(result))


def test_a_mean_is_held_against_a_mean(result):
    """A median below what the steps compute on average is no contradiction, and a mean below it is not called one."""
    first = result["rows"][0]
    first |= {"p50_ms": 5.16, "mean_ms": 6.0, "steps_ms": 5.72}
    said = conclusions(result)[0]
    assert "5.16 ms in the median" in said and "6.00 ms on average, of which the steps compute 5.72 ms" in said
    first["steps_ms"] = 6.1
    said = conclusions(result)[0]
    assert "of which" not in said and "6.00 ms on average in the windows; the steps compute 6.10 ms over all" in said


def test_bars_are_as_wide_as_their_values():
    drawn = Report("t", "w").bars("Sizes", [("a <b>", 2.0), ("c", 4.0), ("none", 0.0)]).html()
    assert re.findall(r'<i style="width: ([\d.]+)%"', drawn) == ["50.0", "100.0"] and "a &lt;b&gt;" in drawn
    used = Report("t", "w").bars("Used", [("in", 0.5), ("over", 2.0)], full=1.0, note="of it").html()
    assert re.findall(r'<i style="width: ([\d.]+)%"( class=over)?', used) == [("50.0", ""), ("100.0", " class=over")]
    assert "of it" in used
    assert "<h2>" not in Report("t", "w").bars("Nothing", []).command("Nothing").html()


def test_the_highest_load_tried_is_not_called_too_much(result):
    said = "\n".join(conclusions(result))
    assert "more of them wait longer" in said and "most that were tried" not in said
    closed = [row for row in result["rows"] if row["concurrency"]]
    closed[-1]["throughput_per_s"] *= 2
    assert f"that is with {closed[-1]['concurrency']} at once, the most that were tried" in "\n".join(
        conclusions(result)
    )


def test_nothing_has_no_bar():
    drawn = Report("t", "w").bars("Share", [("none", 0.0), ("some", 2.0)]).html()
    assert len(re.findall("<i style", drawn)) == 1


def cells(drawn, heading):
    """The table below a heading: the rows' cells as (class, text), the first row with the headings."""
    table = drawn.partition(f"<h2>{heading}</h2>")[2].partition("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", table)
    return [re.findall(r"<t[dh](?: class=\"(\w+)\")?>(.*?)</t[dh]>", row) for row in rows]


def test_a_column_has_one_number_of_digits_and_one_alignment():
    rows = [("a", 0.963, 34.5847, 3, "100%", "x", 1e-5), ("b", 1, 180.1, 12000, "99.10%", 2, 3e-5)]
    drawn = Report("t", "w").table("T", ("n", "share", "ms", "count", "same", "mixed", "rate"), rows).html()
    head, first, second = cells(drawn, "T")
    assert [kind for kind, _ in head] == ["", "number", "number", "number", "number", "", "number"]
    assert [kind for kind, _ in first] == [kind for kind, _ in second] == [kind for kind, _ in head]
    assert [text for _, text in first] == ["a", "0.9630", "34.6", "3", "100%", "x", "1e-05"]
    assert [text for _, text in second] == ["b", "1.0000", "180.1", "12,000", "99.10%", "2", "3e-05"]
    wide = Report("t", "w").table("T", ("v",), [(30000.5,), (0.53125,), (float("inf"),)]).html()
    assert [text for ((_, text),) in cells(wide, "T")[1:]] == ["30,000", "0.5312", "inf"]


def test_facts_are_in_words_and_empty_ones_are_left_out():
    facts = {
        "init": "", "task": None, "files": [], "of": {}, "seed": 0, "quiet": False, "names": ["a", "b"],
        "group": [{"kind": "KIND_CPU", "gpus": []}], "many": [{"n": 1}, {"n": 2}],
    }  # fmt: skip
    drawn = Report("t", "w").facts("F", facts).facts("None", {"a": ""}).html()
    shown = [[text for _, text in row] for row in cells(drawn, "F")]
    assert shown == [
        ["seed", "0"], ["quiet", "False"], ["names", "a, b"], ["group.kind", "KIND_CPU"], ["many.0.n", "1"],
        ["many.1.n", "2"],
    ]  # fmt: skip
    assert {kind for row in cells(drawn, "F") for kind, _ in row} == {""} and "<h2>None</h2>" not in drawn


def test_the_page_of_a_load_test_has_no_python_in_it(result, tmp_path):
    result["encoder"] |= {
        "dynamic_batching": {"preferred_batch_size": [64], "priority_queue_policy": {}},
        "instance_group": [{"name": "encode_0", "count": 2, "gpus": []}],
    }
    (tmp_path / "bench.json").write_text('{"task": "sst2"}')
    write_page(result, tmp_path)
    page = html.unescape((tmp_path / "report.html").read_text("utf-8"))
    shown = {row[0][1]: row[1][1] for row in cells(page, "Encoder")}
    assert shown == {
        "backend": "python", "dynamic_batching.preferred_batch_size": "64", "instance_group.name": "encode_0",
        "instance_group.count": "2",
    }  # fmt: skip
    assert not re.search(r"<td[^>]*>[\[{]", page)


def comparison(agreement, mode):
    return {
        "precision": "int8", "engine": "onnxruntime", "mode": mode, "examples": 9, "rows": 9, "max_difference": 1e-3,
        "mean_difference": 1e-4, "agreement": agreement, "metric": "f1", "artifact_metric": 0.5,
        "reference_metric": 0.5, "limits": {"max_difference": 1e-2, "agreement": 0.9}, "passed": True, "failures": [],
        "where": "in logits, of /far/dev.tsv, line 3", "batches": [],
    }  # fmt: skip


def test_the_gate_says_all_where_it_is_all_and_explains_its_columns():
    all_same = gate_report.conclusions([comparison(1.0, "alone")])[0]
    assert "all decisions are PyTorch's" in all_same and "at least" not in all_same
    nearly = gate_report.conclusions([comparison(0.99999, "alone")])[0]
    assert "at least 99.99% of the decisions are PyTorch's" in nearly
    page = Report("t", "w")
    gate_report.add_comparisons(page, [comparison(1.0, "alone"), comparison(0.99999, "padded to 32")])
    drawn = html.unescape(page.html())
    head, *rows = cells(drawn, "Comparisons")
    same = [text for _, text in head].index("same")
    assert [row[same][1] for row in rows] == ["100%", "99.99%"] and head[same][0] == "number"
    for name in ("largest, mean", "same", "alone", "torch half"):
        assert f"{name}: " in drawn, name
    assert "padded to N: " in drawn and "of /far/dev.tsv, line 3" in drawn


@pytest.mark.parametrize("lengths", [[3] * 9, [1, 2, 2, 3, 5, 8, 13, 21, 34, 55], list(range(1, 101))])
def test_lengths_are_parted_without_a_gap_or_an_overlap(lengths):
    task = get_task("sst2")
    examples = [Example({"TEXT": "w " * n}, "positive", f"line {i}") for i, n in enumerate(lengths)]
    label = np.array(["positive" if i % 3 else "negative" for i in range(len(lengths))], object)
    answers = {"LABEL": label, "SCORE": np.full(len(lengths), 0.8)}
    page = Report("t", "w")
    add_errors(page, task, examples, answers)
    _, *rows = cells(page.html(), "By the texts&#x27; length")
    spans = [[int(end) for end in row[0][1].split(" to ")] for row in rows]
    assert [n for low, *high in spans for n in range(low, (high or [low])[0] + 1)] == list(
        range(min(lengths), max(lengths) + 1)
    )
    assert sum(int(row[1][1]) for row in rows) == len(lengths)


def test_a_noisy_curve_is_smoothed_into_means_of_windows_in_order():
    few = Curve("loss", [1, 2, 3], [3.0, None, 1.0]).smoothed()
    assert (few.x, few.y) == ([1, 3], [3.0, 1.0])
    many = Curve("loss", list(range(1, 1001)), [float(i % 2) for i in range(1000)]).smoothed()
    assert len(many.x) == 50 and many.x[-1] == 1000 and set(many.y) == {0.5}
    assert Curve("loss", [], []).smoothed().x == []
