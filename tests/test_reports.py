"""Pages of runs: what the load test's says, how bars are drawn, and that each run ends with what to do next."""

import html
import re

import pytest

from bertship.report import Report
from serving.bench_report import conclusions, write_page

STAGES = {
    step: {"requests": 9, "executions": 8, "queue_ms": 0.1, "compute_ms": 0.5, "compute_input_ms": 0.1,
           "compute_infer_ms": 0.4, "compute_output_ms": 0.0}
    for step in ("tokenize", "encode", "decode")
}  # fmt: skip


def row(protocol, throughput, p50, clients=None, rate=None):
    return {
        "protocol": protocol, "concurrency": clients, "rate_per_s": rate, "throughput_per_s": throughput, "p50_ms": p50, "mean_ms": p50 * 1.2,
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
    assert re.findall(r'<i style="width: ([\d.]+)%"', drawn) == ["50.0", "100.0", "0.0"] and "a &lt;b&gt;" in drawn
    used = Report("t", "w").bars("Used", [("in", 0.5), ("over", 2.0)], full=1.0, note="of it").html()
    assert re.findall(r'<i style="width: ([\d.]+)%"( class=over)?', used) == [("50.0", ""), ("100.0", " class=over")]
    assert "of it" in used
    assert "<h2>" not in Report("t", "w").bars("Nothing", []).command("Nothing").html()
