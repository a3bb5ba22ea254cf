"""Measure a running server with Triton's own perf_analyzer, on real texts with their real lengths.

    result = bench("sst2", samples, http_url=..., grpc_url=..., triton=environment.prepare(), out=Path("runs/bench"))
    print(*lines(result), sep="\n")

One text a request. For each protocol and load, closed loop (so many clients) or open loop (so many requests a second):
throughput and percentiles as the clients see them; from Triton's statistics what each step of the ensemble took and how
many rows its encoder ran at once; from the steps' own counters tokens and the share of padding.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import random
import re
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertship import artifacts
from bertship.client import Client
from bertship.errors import InputError, ServerUnavailable, seen
from bertship.processor import cpu_field
from bertship.progress import progress
from bertship.triton_limits import FLUSH_S
from serving.bench_report import lines, plot, to_csv, write_page
from serving.environment import TritonEnvironment
from serving.memory import memory_of
from serving.perf_analyzer import STRETCH, WINDOWS, Load, PerfAnalyzer
from serving.repository import STEPS

__all__ = ["bench", "lines"]

SEED = 0
MAX_ENTRIES = 1000  # different texts that are cycled through
WARM_UP_S = 1.0
WINDOW_LATENCIES = 4  # a window lasts at least this many 99th percentiles, else few requests would end in it

_TIMES = ("queue", "compute_input", "compute_infer", "compute_output")
_COUNTED = ("texts", "rows", "tokens", "padding_tokens", "truncated_texts", "executions", "execution_requests")


def bench(
    task_name: str,
    samples: Sequence[Mapping[str, Any]],
    *,
    http_url: str,
    grpc_url: str,
    triton: TritonEnvironment,
    out: Path,
    concurrencies: Sequence[int] = (1, 2, 4, 8, 16, 32),
    request_rates: Sequence[float] = (),
    protocols: Sequence[str] = ("http", "grpc"),
    seconds: float = 5.0,
    report: Callable[[str], None] = lambda line: None,
    precision: str | None = None,
    served_version: str = "",
    metrics_url: str | None = None,
    server_pid: int | None = None,
) -> dict[str, Any]:
    """Measure a served task; returns what bench.json holds.

    At the end bench.json, bench.csv, bench.png and report.html are written in `out`.

    `samples` are an export's: {"columns": {tensor name: text}, ...} each. `seconds` is what one run measures, longer
    where requests take longer than a window. `request_rates`, per second, are open-loop runs with Poisson arrivals.
    `precision` and `served_version` are recorded only. With `metrics_url` the share of padding is
    read, with `server_pid` the memory of each step's process.

    Raises InputError: nothing to ask, or a wrong setting; ServerUnavailable: no server, or the task is not served;
    CheckFailed: perf_analyzer failed, with its own reason. Nothing is written then.
    """
    addresses = {"http": http_url.rpartition("://")[2].rstrip("/"), "grpc": grpc_url.rpartition("://")[2].rstrip("/")}
    if unknown := [protocol for protocol in protocols if protocol not in addresses]:
        raise InputError(f"protocol {unknown[0]!r}: http or grpc is needed")
    loads = [*(Load(concurrency=n) for n in concurrencies), *(Load(rate_per_s=r) for r in request_rates)]
    if not protocols or not loads or min((*concurrencies, 1)) < 1 or not seconds > 0 or min((*request_rates, 1)) <= 0:
        raise InputError(
            f"protocols {list(protocols)}, concurrencies {list(concurrencies)}, rates {list(request_rates)}, {seconds} "
            "seconds: at least one protocol, one concurrency of 1 or more or one rate above 0, and more than 0 seconds "
            "are needed"
        )
    if not triton.perf_analyzer.exists():
        raise InputError(f"{triton.perf_analyzer} is missing: `make setup` brings it")
    with Client(f"http://{addresses['http']}") as client:
        served = [name for name in client.tasks() if client.ready(name)]
        if task_name not in served:
            raise ServerUnavailable(
                f"{task_name} is not served at {http_url}, which serves {', '.join(served) or 'no task'}"
            )
    statistics = _Statistics(addresses["http"], task_name, metrics_url)
    with _asking(addresses["http"]) as server:
        inputs = [tensor["name"] for tensor in server.get_model_metadata(task_name)["inputs"]]
        encoder = server.get_model_config(f"{task_name}_encode")
        version = server.get_server_metadata()["version"]
    entries = _entries(task_name, samples, inputs, report)
    result: dict[str, Any] = {
        "task": task_name,
        "precision": precision,
        "served_version": served_version,
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
            "perf_analyzer": list(PerfAnalyzer.settings),
        },
        "memory": {},
        "rows": [],
    }
    machine = result["machine"]
    if machine["load_at_start"] > machine["cores"] / 2:
        report(
            f"the machine is busy (load {machine['load_at_start']:.1f} on {machine['cores']} cores): "
            "what else runs takes part of what is measured"
        )
    with (
        tempfile.TemporaryDirectory(prefix="bertship-bench-") as folder,
        progress("bench", len(protocols) * len(loads), report) as advance,
    ):
        analyzer = PerfAnalyzer(triton.perf_analyzer, addresses, task_name, Path(folder), entries)
        for protocol in protocols:
            for load in loads:
                warm = analyzer.run(protocol, load, WARM_UP_S)
                needed_s = WINDOWS * WINDOW_LATENCIES * warm["p99_ms"] / 1e3
                before = statistics.read()
                measured = analyzer.run(protocol, load, max(seconds, needed_s))
                row = measured | _stages(before, statistics.read())
                asked = {"concurrency": load.concurrency, "rate_per_s": load.rate_per_s}
                result["rows"].append({"protocol": protocol, **asked, **row})
                report(
                    f"{protocol}, {load}: {row['throughput_per_s']:.0f} texts/s, "
                    f"p50 {row['p50_ms']:.2f} ms, p99 {row['p99_ms']:.2f} ms, {row['mean_batch']:.1f} rows a batch"
                )
                advance(f"{protocol}, {load}")
    if server_pid:
        result["memory"] = memory_of(server_pid)
    artifacts.write_text(out / "bench.csv", to_csv(result["rows"]))
    artifacts.write_text(out / "bench.json", json.dumps(result, indent=2) + "\n")
    plot(result, out / "bench.png")
    write_page(result, out)
    return result


def counted(metrics: str) -> dict[str, dict[str, int]]:
    """Per task, the counters of `bertship.triton_metrics` in the text of /metrics, over all versions and processes."""
    totals: dict[str, Counter[str]] = {}
    for name, labels, value in re.findall(r"^bertship_(\w+)_total\{([^}]*)\} (\S+)$", metrics, re.MULTILINE):
        if task := re.search(r'\btask="(\w+)"', labels):
            totals.setdefault(task[1], Counter())[name] += int(float(value))
    return {task: dict(total) for task, total in totals.items()}


class _Statistics:
    """Triton's counters of the ensemble's steps (counts, and nanoseconds in sum), and under "counted" our own."""

    def __init__(self, address: str, task_name: str, metrics_url: str | None) -> None:
        self._address, self._task_name, self._metrics_url = address, task_name, metrics_url

    def read(self) -> dict[str, dict[str, int]]:
        with _asking(self._address) as server:
            return {step: self._of(server, step) for step in STEPS} | {"counted": self._counted()}

    def _counted(self) -> dict[str, int]:
        """`bertship.triton_metrics` of the task; nothing where the server has no metrics, or the steps are others."""
        if not self._metrics_url:
            return {}
        time.sleep(4 * FLUSH_S)  # until the steps have told what they counted
        try:
            with urllib.request.urlopen(self._metrics_url, timeout=10) as reply:
                text = reply.read().decode("utf-8")
        except OSError as error:
            raise ServerUnavailable(f"no metrics at {self._metrics_url}: {error}") from None
        return counted(text).get(self._task_name, {})

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
    did = {name: after["counted"].get(name, 0) - before["counted"].get(name, 0) for name in _COUNTED}
    computed = did["tokens"] + did["padding_tokens"]
    return {
        "mean_batch": mean_batch,
        "requests_a_batch": round(did["execution_requests"] / did["executions"], 3) if did["executions"] else None,
        "padding_share": round(did["padding_tokens"] / computed, 4) if computed else None,
        "tokens": did["tokens"],
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
        raise InputError(f"{where} is {seen(value)}, a string or a list of strings is needed")
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


def _machine() -> dict[str, Any]:
    return {
        "cpu": cpu_field("model name") or platform.machine(),
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
