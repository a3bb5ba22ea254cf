"""serving/bench.py: perf_analyzer on the real server, with texts that reach the model as they are."""

import ast
import csv
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from bertship.errors import CheckFailed, InputError, ServerUnavailable
from serving import bench as bench_module
from serving import environment
from serving.bench import bench, lines
from serving.perf_analyzer import parse_csv
from serving.server import TritonServer

PROJECT = Path(__file__).resolve().parent.parent
STEP = """
backend: "python"
max_batch_size: {batch}
{batching}
input [ {inputs} ]
output [ {{ name: "{output}" data_type: TYPE_INT64 dims: {dims} }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
"""
TEXTS = ", ".join(f'{{ name: "{name}" data_type: TYPE_STRING dims: [ -1 ] }}' for name in ("QUESTION", "CONTEXT"))
ENSEMBLE = f"""
platform: "ensemble"
max_batch_size: 0
input [ {TEXTS} ]
output [ {{ name: "LENGTH" data_type: TYPE_INT64 dims: [ -1, 1 ] }} ]
ensemble_scheduling {{ step [
  {{ model_name: "toy_tokenize" model_version: -1
    input_map {{ key: "QUESTION" value: "QUESTION" }} input_map {{ key: "CONTEXT" value: "CONTEXT" }}
    output_map {{ key: "ROWS" value: "rows" }} }},
  {{ model_name: "toy_encode" model_version: -1
    input_map {{ key: "ROWS" value: "rows" }} output_map {{ key: "LOGITS" value: "logits" }} }},
  {{ model_name: "toy_decode" model_version: -1
    input_map {{ key: "LOGITS" value: "logits" }} output_map {{ key: "LENGTH" value: "LENGTH" }} }}
] }}
"""
# writes down what it was sent
TOKENIZE = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        replies = []
        for request in requests:
            names = ("QUESTION", "CONTEXT")
            pair = [pb_utils.get_input_tensor_by_name(request, name).as_numpy().tolist() for name in names]
            with open({seen!r}, "a") as file:
                file.write(repr(pair) + "\\n")
            if pair[0] == [b"slow"]:
                time.sleep(0.2)
            if pair[0] == [b"refuse"]:
                error = pb_utils.TritonError("QUESTION[0] is refused", pb_utils.TritonError.INVALID_ARG)
                replies.append(pb_utils.InferenceResponse(error=error))
                continue
            rows = np.array([[len(text)] for text in pair[0]], dtype=np.int64)
            replies.append(pb_utils.InferenceResponse([pb_utils.Tensor("ROWS", rows)]))
        return replies
"""
PASS_ON = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        rows = [pb_utils.get_input_tensor_by_name(request, "{input}").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("{output}", row)]) for row in rows]
"""
REPORT = """\
Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,\
Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,p99 latency,Avg latency,\
request/response,response wait
1,164.436,7,0,2,66,4969,1864,5,5927,7353,8168,9369,6041,12,5986
"""


@pytest.fixture(scope="module")
def triton():
    return environment.prepare()


@pytest.fixture(scope="module")
def served(triton, tmp_path_factory):
    """A running server of the task `toy`, whose tokenizing step writes what it gets to `served.seen`."""
    folder = tmp_path_factory.mktemp("bench")
    seen = folder / "seen"
    rows = '{{ name: "{}" data_type: TYPE_INT64 dims: {} }}'
    batching = "dynamic_batching { max_queue_delay_microseconds: 0 }"
    configs = {
        "toy": ENSEMBLE,
        "toy_tokenize": STEP.format(batch=0, batching="", inputs=TEXTS, output="ROWS", dims="[ -1, 1 ]"),
        "toy_encode": STEP.format(
            batch=8, batching=batching, inputs=rows.format("ROWS", "[ 1 ]"), output="LOGITS", dims="[ 1 ]"
        ),
        "toy_decode": STEP.format(
            batch=0, batching="", inputs=rows.format("LOGITS", "[ -1, 1 ]"), output="LENGTH", dims="[ -1, 1 ]"
        ),
    }
    code = {
        "toy_tokenize": TOKENIZE.format(seen=str(seen)),
        "toy_encode": PASS_ON.format(input="ROWS", output="LOGITS"),
        "toy_decode": PASS_ON.format(input="LOGITS", output="LENGTH"),
    }
    for name, config in configs.items():
        (folder / "repository" / name / "1").mkdir(parents=True)
        (folder / "repository" / name / "config.pbtxt").write_text(config)
        if name in code:
            (folder / "repository" / name / "1" / "model.py").write_text(code[name])
    server = TritonServer(triton)
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    with server.start(folder / "repository", log_path=folder / "log", **ports):
        server.seen = seen
        yield server


@pytest.fixture
def arguments(served, triton, tmp_path, monkeypatch):
    """What `bench` takes beside the task and its samples, quick; temporary files go to tmp_path/tmp."""
    monkeypatch.setattr(bench_module, "WARM_UP_S", 0.3)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return {
        "http_url": served.http_url,
        "grpc_url": served.grpc_url,
        "triton": triton,
        "out": tmp_path / "out",
        "concurrencies": (1,),
        "protocols": ("http",),
        "seconds": 0.5,
    }


def samples(*texts: str) -> list[dict]:
    return [{"columns": {"QUESTION": text, "CONTEXT": f"context of {text}"}, "answer": {}} for text in texts]


def nothing_written(tmp_path: Path) -> bool:
    # onnxruntime leaves a file `.ses` wherever it is imported
    return not (tmp_path / "out").exists() and list((tmp_path / "tmp").glob("[!.]*")) == []


def test_measures_and_writes_both_files(served, arguments, tmp_path):
    said = []
    texts = samples(*(f"text {i}" for i in range(300)))
    changes = {"concurrencies": (1, 4), "seconds": 1.0, "precision": "fp32"}
    result = bench("toy", texts, **arguments | changes, report=said.append)
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == result
    assert result["settings"]["texts"] == 300 and result["versions"]["tritonserver"] == "2.51.0"
    assert result["machine"]["cores"] >= 1 and result["encoder"]["backend"] == "python"
    assert [(row["protocol"], row["concurrency"]) for row in result["rows"]] == [("http", 1), ("http", 4)]
    for row in result["rows"]:
        assert row["throughput_per_s"] > 0 and 0 < row["p50_ms"] <= row["p90_ms"] <= row["p95_ms"] <= row["p99_ms"]
        assert len(row["windows_per_s"]) == 3 and 1 <= row["mean_batch"] <= row["concurrency"]
        for stage in row["stages"].values():
            # it also sends what its windows leave out
            assert stage["requests"] >= row["requests"] > 0 and stage["compute_infer_ms"] > 0
    assert result["rows"][0]["mean_batch"] == 1
    with (tmp_path / "out" / "bench.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [float(row["p50_ms"]) for row in table] == [row["p50_ms"] for row in result["rows"]]
    assert all(float(row["encode_compute_infer_ms"]) > 0 for row in table)
    measured = [line for line in said if not line.startswith("the machine is busy")]
    assert [line.split(":")[0] for line in measured] == ["http, 1 at once", "http, 4 at once"]
    head, one, four, alone, where = lines(result)
    assert head.split()[0] == "protocol" and one.split()[:2] == ["http", "1"] and four.split()[:2] == ["http", "4"]
    assert len(head) == len(one) == len(four) and re.match(r"http, one at a time: [\d.]+ ms on average", alone)
    assert where.startswith("toy, FP32, one text a request, on ")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_requests_at_a_rate_are_an_open_loop(served, arguments, tmp_path):
    """A Poisson process: no more a second than were asked for; with memory, and in the plot."""
    changes = {"concurrencies": (), "request_rates": (20.0, 40.0), "seconds": 3.0, "server_pid": served.pid}
    result = bench("toy", samples(*(f"text {i}" for i in range(50))), **arguments | changes)
    for row, rate in zip(result["rows"], (20, 40), strict=True):
        assert (row["concurrency"], row["rate_per_s"]) == (None, rate)
        # a closed loop would ask the toy hundreds of times a second; a busy machine answers fewer than are asked
        assert 0 < row["throughput_per_s"] < 1.5 * rate
    assert set(result["memory"]) == {"toy_tokenize", "toy_encode", "toy_decode", "tritonserver"}
    assert all(size["rss_mib"] >= size["pss_mib"] > 1 for size in result["memory"].values())
    _, first, second, memory, _ = lines(result)
    assert first.split()[:2] == ["http", "20/s"] and second.split()[:2] == ["http", "40/s"]
    assert memory.startswith("resident memory, MiB: toy_decode ")
    assert (tmp_path / "out" / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "out" / "bench.csv").read_text().splitlines()) == 3


def test_texts_arrive_as_they_are_one_a_request(served, arguments):
    texts = [
        'quo"te \\ back',
        "new\nline\ttab\r",
        "emoji 🎬👩‍👩‍👧 ümlaut 漢字",
        "",
        "\x01\x7f\u2028",
        "x" * 100_000,
        " lead",
    ]
    said = []
    served.seen.write_text("")
    bench(
        "toy",
        [*samples(*texts, *texts, "nul\0inside"), {"columns": {"QUESTION": "q", "CONTEXT": "c", "OTHER": "o"}}],
        **arguments | {"protocols": ("grpc",)},
        report=said.append,
    )
    got = {tuple(map(tuple, ast.literal_eval(line))) for line in served.seen.read_text().splitlines()}
    wanted = {((text.encode(),), (f"context of {text}".encode(),)) for text in texts}
    assert got == wanted | {((b"q",), (b"c",))}
    assert "1 samples with a NUL character are left out: perf_analyzer would cut them there" in said


def test_order_is_shuffled_alike_every_time():
    texts = samples(*(str(i) for i in range(2000)))
    chosen = [bench_module._entries("toy", texts, ["QUESTION"], print) for _ in range(2)]
    assert chosen[0] == chosen[1] and len(chosen[0]) == bench_module.MAX_ENTRIES
    assert chosen[0][:3] != [{"QUESTION": {"content": [str(i)], "shape": [1]}} for i in range(3)]
    choices = [{"columns": {"CHOICES": ["a", "b", "c"]}}]
    assert bench_module._entries("toy", choices, ["CHOICES"], print) == [
        {"CHOICES": {"content": ["a", "b", "c"], "shape": [1, 3]}}
    ]


def test_windows_grow_where_requests_take_longer(arguments):
    (row,) = bench("toy", samples("slow"), **arguments | {"seconds": 0.1})["rows"]
    assert row["requests"] >= 3 and row["seconds"] > 0.1


def test_what_cannot_be_measured_is_one_line(served, triton, arguments, tmp_path):
    def failure(error, task="toy", texts=None, **changes):
        with pytest.raises(error) as caught:
            bench(task, samples("a") if texts is None else texts, **arguments | changes)
        assert type(caught.value) is error and "\n" not in str(caught.value)
        return str(caught.value)

    assert failure(ServerUnavailable, "toys") == f"toys is not served at {served.http_url}, which serves toy"
    assert "make serve" in failure(ServerUnavailable, http_url="http://127.0.0.1:1")
    assert failure(InputError, texts=[]).startswith("no samples to ask toy")
    assert "sample 0 has no CONTEXT" in failure(InputError, texts=[{"columns": {"QUESTION": "a"}}])
    assert "a string or a list" in failure(InputError, texts=[{"columns": {"QUESTION": 1, "CONTEXT": "a"}}])
    assert failure(InputError, protocols=("https",)) == "protocol 'https': http or grpc is needed"
    assert "0 seconds" in failure(InputError, seconds=0)
    assert "[0]" in failure(InputError, concurrencies=(0,))
    assert "rates [-1]" in failure(InputError, request_rates=(-1,))
    assert "no metrics at http://127.0.0.1:1" in failure(ServerUnavailable, metrics_url="http://127.0.0.1:1")
    message = failure(CheckFailed, texts=samples("refuse"))
    assert message.startswith("perf_analyzer on toy over http at ") and message.endswith("QUESTION[0] is refused")
    message = failure(CheckFailed, protocols=("grpc",), grpc_url="grpc://127.0.0.1:1")
    assert "Connection refused" in message
    absent = dataclasses.replace(triton, runtime=tmp_path)
    assert failure(InputError, triton=absent).endswith("perf_analyzer is missing: `make setup` brings it")
    (tmp_path / "bin").mkdir()
    absent.perf_analyzer.write_text("not a program")
    assert "does not run: Permission denied" in failure(InputError, triton=absent)
    absent.perf_analyzer.write_text("#!/bin/sh\nexit 3\n")
    absent.perf_analyzer.chmod(0o755)
    assert failure(CheckFailed, triton=absent).endswith("1 at once: ended with status 3")
    assert nothing_written(tmp_path)


def test_a_stored_report_is_read_and_another_refused():
    assert parse_csv(REPORT) == {
        "throughput_per_s": 164.436,
        "mean_ms": 6.041,
        "p50_ms": 5.927,
        "p90_ms": 7.353,
        "p95_ms": 8.168,
        "p99_ms": 9.369,
    }
    head, row = REPORT.splitlines()
    for wrong in ("", head, f"{head}\n{row}\n{row}\n", REPORT.replace("p99", "p98"), REPORT.replace("9369", "fast")):
        with pytest.raises(CheckFailed, match=r"one row with Inferences/Second, .* was expected"):
            parse_csv(wrong)


def test_ctrl_c_ends_perf_analyzer_and_leaves_no_file(served, tmp_path):
    code = """
        import sys
        from pathlib import Path
        from serving import environment
        from serving.bench import bench
        samples = [{"columns": {"QUESTION": "q", "CONTEXT": "c"}}]
        http_url, grpc_url, out = sys.argv[1:]
        bench("toy", samples, http_url=http_url, grpc_url=grpc_url, triton=environment.prepare(), out=Path(out))
    """
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), served.http_url, served.grpc_url, str(tmp_path / "out")],
        cwd=PROJECT,
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline_s = time.monotonic() + 20
        while not (children := psutil.Process(process.pid).children()) or children[0].name() != "perf_analyzer":
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)  # to this process alone, as `kill` would
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in errors
    ended = not children[0].is_running() or children[0].status() == psutil.STATUS_ZOMBIE  # nobody has asked for its end
    assert ended
    assert nothing_written(tmp_path)
