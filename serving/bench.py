"""Measure a running server with Triton's own perf_analyzer, on real texts with their real lengths.

    result = bench("sst2", samples, http_url=..., grpc_url=..., triton=environment.prepare(), out=Path("runs/bench"))
    print(*lines(result), sep="\\n")

One text a request. For each protocol and number of concurrent clients: throughput and percentiles as the clients see
them, and from Triton's statistics what each step of the ensemble took and how many rows its encoder ran at once.

perf_analyzer measures in windows and by default goes on until three of them in a row agree; on a shared machine they
may never, and then it writes nothing. Here it takes exactly three windows, whatever they are, and reports all their
requests together; the throughput of each window is kept, so that a reader of the figures sees how steady they are.
`--request-count` would be simpler, but its figures are wrong.
"""

import contextlib
import csv
import importlib.metadata
import io
import json
import os
import platform
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertship import artifacts
from bertship.client import Client
from bertship.errors import CheckFailed, InputError, ServerUnavailable
from serving.environment import TritonEnvironment
from serving.repository import STEPS

SEED = 0
MAX_ENTRIES = 1000  # different texts that are cycled through
WINDOWS = 3  # perf_analyzer judges the last three and reports them together; with fewer it reports nothing
STRETCH = 1.2  # it takes windows longer than asked, by this factor
ANY_DEVIATION = 1_000_000  # per cent: every measurement is stable enough
WARM_UP_S = 1.0
WINDOW_LATENCIES = 4  # a window lasts at least this many 99th percentiles, else few requests would end in it
MAX_WINDOW_S = 60.0
PERCENTILES = (50, 90, 95, 99)

_CSV_COLUMNS = {
    "Inferences/Second": ("throughput_per_s", 1.0),
    "Avg latency": ("mean_ms", 1e-3),
    **{f"p{p} latency": (f"p{p}_ms", 1e-3) for p in PERCENTILES},
}
_TIMES = ("queue", "compute_input", "compute_infer", "compute_output")
_NO_REQUESTS = "No valid requests recorded"


def bench(
    task_name: str,
    samples: Sequence[Mapping[str, Any]],
    *,
    http_url: str,
    grpc_url: str,
    triton: TritonEnvironment,
    out: Path,
    concurrencies: Sequence[int] = (1, 2, 4, 8, 16, 32),
    protocols: Sequence[str] = ("http", "grpc"),
    seconds: float = 5.0,
    report: Callable[[str], None] = lambda line: None,
    precision: str | None = None,
) -> dict[str, Any]:
    """Measure a served task; writes `out`/bench.json and `out`/bench.csv at the end and returns what bench.json holds.

    `samples` are an export's: {"columns": {tensor name: text}, ...} each. `seconds` is what one run measures, longer
    where requests take longer than a window. `precision` is recorded only: the server does not tell.

    Raises InputError: nothing to ask, or a wrong setting; ServerUnavailable: no server, or the task is not served;
    CheckFailed: perf_analyzer failed, with its own reason. Nothing is written then.
    """
    addresses = {"http": http_url.rpartition("://")[2].rstrip("/"), "grpc": grpc_url.rpartition("://")[2].rstrip("/")}
    if unknown := [protocol for protocol in protocols if protocol not in addresses]:
        raise InputError(f"protocol {unknown[0]!r}: http or grpc is needed")
    if not protocols or not concurrencies or min(concurrencies) < 1 or not seconds > 0:
        raise InputError(
            f"protocols {list(protocols)}, concurrencies {list(concurrencies)}, {seconds} seconds: at least one "
            "protocol, one concurrency of 1 or more, and more than 0 seconds are needed"
        )
    if not triton.perf_analyzer.exists():
        raise InputError(f"{triton.perf_analyzer} is missing: `make setup` brings it")
    with Client(f"http://{addresses['http']}") as client:
        served = [name for name in client.tasks() if client.ready(name)]
        if task_name not in served:
            raise ServerUnavailable(
                f"{task_name} is not served at {http_url}, which serves {', '.join(served) or 'no task'}"
            )
    statistics = _Statistics(addresses["http"], task_name)
    with _asking(addresses["http"]) as server:
        inputs = [tensor["name"] for tensor in server.get_model_metadata(task_name)["inputs"]]
        encoder = server.get_model_config(f"{task_name}_encode")
        version = server.get_server_metadata()["version"]
    entries = _entries(task_name, samples, inputs, report)
    result: dict[str, Any] = {
        "task": task_name,
        "precision": precision,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": _machine(),
        "versions": artifacts.versions() | _served_versions(triton) | {"tritonserver": version},
        "encoder": {
            name: encoder.get(name)
            for name in ("backend", "platform", "max_batch_size", "dynamic_batching", "instance_group")
        },
        "settings": {
            "texts": len(entries),
            "texts_per_request": 1,
            "seed": SEED,
            "seconds": seconds,
            "windows": WINDOWS,
            "warm_up_s": WARM_UP_S,  # before each run
            "window_stretch": STRETCH,
            "client": "perf_analyzer on the server's machine, one synchronous thread a concurrent request",
            "perf_analyzer": list(_PerfAnalyzer.settings),
        },
        "rows": [],
    }
    machine = result["machine"]
    if machine["load_at_start"] > machine["cores"] / 2:
        report(
            f"the machine is busy (load {machine['load_at_start']:.1f} on {machine['cores']} cores): "
            "what else runs takes part of what is measured"
        )
    with tempfile.TemporaryDirectory(prefix="bertship-bench-") as folder:
        analyzer = _PerfAnalyzer(triton.perf_analyzer, addresses, task_name, Path(folder), entries)
        for protocol in protocols:
            for concurrency in concurrencies:
                warm = analyzer.run(protocol, concurrency, WARM_UP_S)
                needed_s = WINDOWS * WINDOW_LATENCIES * warm["p99_ms"] / 1e3
                before = statistics.read()
                measured = analyzer.run(protocol, concurrency, max(seconds, needed_s))
                row = measured | _stages(before, statistics.read())
                result["rows"].append({"protocol": protocol, "concurrency": concurrency, **row})
                report(
                    f"{protocol}, {concurrency} at once: {row['throughput_per_s']:.0f} texts/s, "
                    f"p50 {row['p50_ms']:.2f} ms, p99 {row['p99_ms']:.2f} ms, {row['mean_batch']:.1f} rows a batch"
                )
    artifacts.write_text(out / "bench.csv", _csv(result["rows"]))
    artifacts.write_text(out / "bench.json", json.dumps(result, indent=2) + "\n")
    return result


def lines(result: Mapping[str, Any]) -> list[str]:
    """The result as a plain-text table, and what one client's time goes to."""
    head = f"{'protocol':<10}{'at once':>8}{'texts/s':>10}{'p50 ms':>10}{'p90 ms':>10}{'p99 ms':>10}{'mean batch':>12}"
    table = [
        f"{row['protocol']:<10}{row['concurrency']:>8}{row['throughput_per_s']:>10.1f}{row['p50_ms']:>10.2f}"
        f"{row['p90_ms']:>10.2f}{row['p99_ms']:>10.2f}{row['mean_batch']:>12.2f}"
        for row in result["rows"]
    ]
    alone = [
        f"{row['protocol']}, one at a time: p50 {row['p50_ms']:.2f} ms, of which steps compute "
        f"{row['steps_ms']:.2f} ms on average ("
        + ", ".join(f"{step} {times['compute_input_ms'] + times['compute_infer_ms']:.2f}" for step, times in stages)
        + ")"
        for row in result["rows"]
        if row["concurrency"] == 1 and (stages := list(row["stages"].items()))
    ]
    machine, precision = result["machine"], result["precision"]
    where = (
        f"{result['task']}{', ' + precision.upper() if precision else ''}, one text a request, on {machine['cores']} "
        f"cores of {machine['cpu']} shared with the client (load at the start: {machine['load_at_start']:.1f})"
    )
    return [head, *table, *alone, where]


def parse_csv(text: str) -> dict[str, float]:
    """Throughput and latencies of perf_analyzer's report of one run. Raises CheckFailed where it is no such report."""
    rows = list(csv.DictReader(io.StringIO(text)))
    try:
        (row,) = rows
        return {name: round(float(row[column]) * scale, 6) for column, (name, scale) in _CSV_COLUMNS.items()}
    except (KeyError, TypeError, ValueError):
        wanted = ", ".join(_CSV_COLUMNS)
        raise CheckFailed(f"perf_analyzer's report is {text!r:.200}: one row with {wanted} was expected") from None


class _PerfAnalyzer:
    """The program with the texts that it sends, both in `folder`, which is the caller's to remove."""

    settings = ("-s", str(ANY_DEVIATION), "-r", str(WINDOWS), "--verbose-csv", "-v")

    def __init__(
        self,
        program: Path,
        addresses: Mapping[str, str],
        model: str,
        folder: Path,
        entries: Sequence[Mapping[str, Any]],
    ) -> None:
        self._program, self._addresses, self._model = program, addresses, model
        self._input, self._report = folder / "input.json", folder / "report.csv"
        self._input.write_text(json.dumps({"data": entries}), encoding="utf-8")
        # libcurl and gRPC would ask a proxy for the server
        self._variables = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}

    def run(self, protocol: str, concurrency: int, seconds: float) -> dict[str, Any]:
        """Measure for `seconds`, doubled while no request ends in a window. Raises CheckFailed, ServerUnavailable."""
        window_s = seconds / WINDOWS
        where = f"{self._model} over {protocol} at {self._addresses[protocol]}, {concurrency} at once"
        while True:
            status, output, errors = self._call(protocol, concurrency, window_s, where)
            if status == 0 and self._report.exists():
                break
            said = [line.strip() for line in (output + "\n" + errors).splitlines() if line.strip()]
            reason = said[-1] if said else f"ended with status {status}"
            if _NO_REQUESTS not in errors:
                with Client(f"http://{self._addresses['http']}") as client:
                    kind = CheckFailed if client.ready(self._model) else ServerUnavailable
                raise kind(f"perf_analyzer on {where}: {reason}")
            window_s *= 2
            if window_s > MAX_WINDOW_S:
                raise CheckFailed(f"perf_analyzer on {where}: no answer within {window_s / 2:.0f} s")
        return {
            **parse_csv(self._report.read_text(encoding="utf-8")),
            "requests": int(_found(r"^ *Request count: (\d+)", output)[0]),
            "seconds": round(window_s * WINDOWS, 3),
            "windows_per_s": [float(rate) for rate in _found(r"Pass \[\d+\] throughput: ([\d.]+)", output)],
        }

    def _call(self, protocol: str, concurrency: int, window_s: float, where: str) -> tuple[int, str, str]:
        self._report.unlink(missing_ok=True)
        command = [
            *(str(self._program), "-m", self._model, "-i", protocol, "-u", self._addresses[protocol]),
            *("--input-data", str(self._input), "-f", str(self._report), "--concurrency-range", str(concurrency)),
            *("-p", str(max(1, round(window_s * 1e3 / STRETCH))), *self.settings),
        ]
        timeout_s = 60 + 3 * WINDOWS * window_s
        try:
            process = subprocess.Popen(
                command,
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            raise InputError(f"{self._program} does not run: {error.strerror}; `make setup` makes it anew") from None
        with process:
            try:
                output, errors = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                raise CheckFailed(f"perf_analyzer on {where}: not done after {timeout_s:.0f} s") from None
            finally:
                # interrupted: it is gone before its files are removed
                process.kill()
                process.wait()
        return process.returncode, output, errors


class _Statistics:
    """Triton's counters of the ensemble's steps: counts, and nanoseconds in sum."""

    def __init__(self, address: str, task_name: str) -> None:
        self._address, self._task_name = address, task_name

    def read(self) -> dict[str, dict[str, int]]:
        with _asking(self._address) as server:
            return {step: self._of(server, step) for step in STEPS}

    def _of(self, server: Any, step: str) -> dict[str, int]:
        versions = server.get_inference_statistics(f"{self._task_name}_{step}")["model_stats"]

        def total(*path: str) -> int:
            values = versions
            for name in path:
                values = [value.get(name, {}) for value in values]
            return sum(int(value or 0) for value in values)

        return {
            "rows": total("inference_count"),
            "executions": total("execution_count"),
            "requests": total("inference_stats", "success", "count"),
            **{name: total("inference_stats", name, "ns") for name in _TIMES},
        }


def _stages(before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """What each step did between two readings: mean milliseconds of a request, and rows of an execution."""
    stages: dict[str, dict[str, float]] = {}
    mean_batch = 0.0
    for step in STEPS:
        did = {name: after[step][name] - before[step][name] for name in after[step]}
        times = {f"{name}_ms": round(did[name] / 1e6 / max(did["requests"], 1), 4) for name in _TIMES}
        compute_ms = round(sum(value for name, value in times.items() if name != "queue_ms"), 4)
        stages[step] = {"requests": did["requests"], "executions": did["executions"], **times, "compute_ms": compute_ms}
        if step == "encode":
            mean_batch = round(did["rows"] / max(did["executions"], 1), 3)
    return {
        "mean_batch": mean_batch,
        "queue_ms": round(sum(times["queue_ms"] for times in stages.values()), 4),
        "compute_ms": round(sum(times["compute_ms"] for times in stages.values()), 4),
        # A step's response leaves before its compute_output ends, and the next step begins meanwhile: with it the sum
        # can exceed what the client waited.
        "steps_ms": round(sum(t["compute_input_ms"] + t["compute_infer_ms"] for t in stages.values()), 4),
        "stages": stages,
    }


def _entries(
    task_name: str, samples: Sequence[Mapping[str, Any]], inputs: Sequence[str], report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """perf_analyzer's input: different samples in an order that the seed fixes, each a request of one element."""
    entries: dict[str, dict[str, Any]] = {}
    cut = 0
    for i, sample in enumerate(samples):
        columns = sample.get("columns") or {}
        if missing := [name for name in inputs if name not in columns]:
            raise InputError(f"sample {i} has no {missing[0]}, and {task_name} takes {', '.join(inputs)}")
        key = json.dumps([columns[name] for name in inputs])
        if "\\u0000" in key:
            cut += 1
            continue
        entries[key] = {name: _tensor(columns[name], f"sample {i}, {name}") for name in inputs}
    if cut:
        report(f"{cut} samples with a NUL character are left out: perf_analyzer would cut them there")
    if not entries:
        raise InputError(f"no samples to ask {task_name}: give some of an export's samples.jsonl")
    chosen = list(entries.values())
    random.Random(SEED).shuffle(chosen)
    return chosen[:MAX_ENTRIES]


def _tensor(value: Any, where: str) -> dict[str, Any]:
    """One element of a list input: a text, or the list of its choices."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{where} is {value!r:.60}, a string or a list of strings is needed")
    return {"content": texts, "shape": [1] if isinstance(value, str) else [1, len(texts)]}


@contextlib.contextmanager
def _asking(address: str) -> Iterator[Any]:
    """tritonclient's HTTP client; its errors, and those of its connection, as ServerUnavailable."""
    import tritonclient.http

    with tritonclient.http.InferenceServerClient(address, connection_timeout=10, network_timeout=10) as server:
        try:
            yield server
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ServerUnavailable(f"the server at http://{address} does not tell its state: {reason}") from None


def _found(pattern: str, text: str) -> list[str]:
    found = re.findall(pattern, text, re.MULTILINE)
    if not found:
        raise CheckFailed(f"perf_analyzer said {text[-200:]!r}: {pattern!r} was expected in it")
    return found


def _machine() -> dict[str, Any]:
    cpu = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_at_start": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
    }


def _served_versions(triton: TritonEnvironment) -> dict[str, str]:
    """Versions of what the server's own environment runs, which is not this one."""
    names = {"numpy", "onnxruntime", "tokenizers", "nvidia-pytriton", "tritonclient"}
    found = importlib.metadata.distributions(path=[str(triton.site_packages)])
    return {f"server {item.name}": item.version for item in sorted(found, key=lambda i: i.name) if item.name in names}


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows, flat: a step's times as columns of their own."""
    flat = []
    for row in rows:
        plain = {name: value for name, value in row.items() if not isinstance(value, dict | list)}
        steps = {f"{step}_{name}": value for step, times in row["stages"].items() for name, value in times.items()}
        flat.append(plain | steps)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()
