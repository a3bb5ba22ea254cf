"""What serving costs, and what it gains: the ensemble beside the bare engine, and beside other ways to serve.

    python -m benchmarks.serving ready     three tasks from start to warm, and each stage's memory
    python -m benchmarks.serving overhead  one client: the ensemble's p50 beside the engine's own, alternating
    python -m benchmarks.serving mixed     32 clients of mixed lengths: tokens a second beside the engine's best
    python -m benchmarks.serving load      our own client: closed loop, and open loop with Poisson arrivals
    python -m benchmarks.serving peers     other servers with the same weights and texts, alternating, answers first

Each takes less than five minutes and writes into benchmarks/results/serving.json. `--runs` holds exports (and for
`peers` the fine-tuned models); `--quick` only tries whether everything works. Measure on a machine that does nothing
else: the client always shares its cores, as everywhere here.

The peers are (a) a repository in transformer-deploy's manner on the same Triton, FP32, each request by itself, (b)
`transformers` behind FastAPI, FP32 and BF16, and (c) MLServer with its Hugging Face runtime, on PyTorch and through
optimum on ONNX Runtime. All may use all cores. `python -m benchmarks.peers --install` makes the environments of (b) and
(c); where (c) is missing or does not start, the result says so.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe_machine, save_result
from benchmarks.serving_systems import (
    ANY_PORTS,
    System,
    compare,
    fastapi_peer,
    mlserver_answer,
    mlserver_body,
    mlserver_peer,
    ours,
    triton_peer,
)
from bertship.artifacts import publish, write_manifest
from bertship.config import EncoderConfig, load_preset
from bertship.console import read_samples
from bertship.errors import CheckFailed
from bertship.pipeline import encode
from bertship.runners import OnnxRunner
from bertship.tasks import TASKS, Task
from bertship.tokenization import Row, Tokenizer
from serving import environment
from serving.bench import bench
from serving.memory import memory_of
from serving.repository import ready_models, render
from serving.server import TritonServer

ROOT = Path(__file__).parents[1]

LIMIT_S = 270  # a part takes at most so long


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def served(repository: Path) -> Iterator[TritonServer]:
    log = Path(tempfile.gettempdir()) / f"bertship-benchmark-{os.getpid()}.log"
    server = TritonServer(environment.prepare())
    with server.start(repository, models=ready_models(repository), log_path=log, **ANY_PORTS):
        yield server
    log.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------ what is served


def bert_base(home: Path, export: Path) -> Path:
    """A BERT-base of random weights with an export's vocabulary, sentences of up to 128 tokens, FP32 and INT8.

    Speed does not depend on what the weights are.
    """
    out = home / "bert-base"
    if (out / "manifest.json").is_file():
        return out
    import torch

    from export.onnx_graph import export_onnx
    from export.precision import to_int8
    from train.heads import HEADS

    tokenizer = Tokenizer.from_file(export / "tokenizer.json")
    preset = load_preset("base")["model"]
    torch.manual_seed(0)
    config = EncoderConfig(**{**preset, "vocab_size": tokenizer.vocab_size})
    task = dataclasses.replace(TASKS["sst2"], name="base", max_tokens=128)
    with publish(out) as staging:
        say("exporting a BERT-base of random weights")
        export_onnx(HEADS[task.behaviour.head](config, 2), staging / "model.onnx")
        to_int8(staging / "model.onnx", staging / "model.int8.onnx")
        shutil.copyfile(export / "tokenizer.json", staging / "tokenizer.json")
        (staging / "task.json").write_text(task.to_json(), encoding="utf-8")
        graphs = {"fp32": "model.onnx", "int8": "model.int8.onnx"}
        write_manifest(staging, "export", task=task.name, graphs=graphs, serve="int8")
    return out


def mixed_texts(runs: Path, count: int = 600) -> list[str]:
    """Real texts of mixed lengths: sentences of reviews, and paragraphs of encyclopaedia articles, one to one."""
    short = [sample["columns"]["TEXT"] for sample in read_samples(runs / "export" / "sst2")]
    long = list(dict.fromkeys(s["columns"]["CONTEXT"] for s in read_samples(runs / "export" / "squad")))
    return [text for pair in zip(short, long, strict=False) for text in pair][:count]


def rows_of(export: Path, texts: Sequence[str]) -> list[Row]:
    task, tokenizer = Task.from_file(export / "task.json"), Tokenizer.from_file(export / "tokenizer.json")
    return encode(task, tokenizer, {"TEXT": list(texts)}).rows


def text_of(export: Path, text: str, tokens: int) -> str:
    """The longest beginning of `text`, in whole words, that makes a row of at most so many tokens."""
    words = text.split(" ")
    task = dataclasses.replace(Task.from_file(export / "task.json"), max_tokens=10 * tokens)
    tokenizer = Tokenizer.from_file(export / "tokenizer.json")
    fits = [len(encode(task, tokenizer, {"TEXT": [" ".join(words[:n])]}).rows[0]) <= tokens for n in range(tokens)]
    return " ".join(words[: fits.index(False) - 1])


# ------------------------------------------------------------------------------------------------------------- parts


def ready(runs: Path, home: Path, quick: bool) -> dict[str, Any]:
    """Three tasks of MiniLM size: seconds from the start to ready and warm, and the memory of each stage."""
    names, seconds, memory = ("sst2", "squad", "ner"), [], {}
    for name in names:
        render(runs / "export" / name, home / "repository-three")
    for _ in range(1 if quick else 3):
        begun = time.monotonic()
        with served(home / "repository-three") as server:
            seconds.append(round(time.monotonic() - begun, 2))
            memory = memory_of(server.pid)
    return {"tasks": names, "seconds": seconds, "memory_mib": memory}


def overhead(runs: Path, home: Path, quick: bool) -> dict[str, Any]:
    """p50 of one client over HTTP beside p50 of the engine alone on the same row, alternating."""
    base = bert_base(home, runs / "export" / "sst2")
    long = text_of(runs / "export" / "sst2", " ".join(mixed_texts(runs)[:20]), 128)
    short = "an utterly compelling story of people who cannot say what they want from one another"
    cases = [("sst2", runs / "export" / "sst2", None, short), ("base", base, "int8", long)]
    result = {}
    for name, export, precision, text in cases:
        repository = home / f"repository-{name}"
        render(export, repository, precision)
        graph = repository / f"{name}_encode" / "1" / "model.onnx"
        (row,) = rows_of(export, [text])
        runner, engine, through = OnnxRunner(graph), list[float](), list[float]()
        runner.warm_up((len(row),))
        with served(repository) as server:
            for _ in range(1 if quick else 6):
                engine.append(p50_of(lambda: runner([row]), 0.5 if quick else 5))  # noqa: B023
                measured = bench(
                    name,
                    [{"columns": {"TEXT": text}}],
                    http_url=server.http_url,
                    grpc_url=server.grpc_url,
                    triton=environment.prepare(),
                    out=home / f"bench-{name}",
                    concurrencies=(1,),
                    protocols=("http",),
                    seconds=0.5 if quick else 5,
                    precision=precision,
                )
                through.append(measured["rows"][0]["p50_ms"])
        bare_ms, served_ms = statistics.median(engine), statistics.median(through)
        result[name] = {
            "tokens": len(row),
            "precision": precision or json.loads((export / "manifest.json").read_text())["serve"],
            "engine_p50_ms": [round(ms, 3) for ms in engine],
            "served_p50_ms": [round(ms, 3) for ms in through],
            "added_ms": round(served_ms - bare_ms, 3),
            "ratio": round(served_ms / bare_ms, 4),
            "stages": measured["rows"][0]["stages"],
        }
        say(f"{name}: engine {bare_ms:.2f} ms, served {served_ms:.2f} ms")
    return result


def mixed(runs: Path, home: Path, quick: bool) -> dict[str, Any]:
    """Tokens a second of BERT-base INT8 with 32 clients beside the engine's best on the same rows, alternating."""
    export = bert_base(home, runs / "export" / "sst2")
    repository = home / "repository-base"
    render(export, repository, "int8")
    texts = mixed_texts(runs, 40 if quick else 400)
    rows = rows_of(export, texts)
    runner = OnnxRunner(repository / "base_encode" / "1" / "model.onnx")
    runner.warm_up((8, 64, 128))
    bare, through, shares = list[float](), list[float](), list[dict[str, Any]]()
    chunk = rows[: max(1, len(rows) // 3)]
    with served(repository) as server:
        for _ in range(1 if quick else 3):
            begun = time.monotonic()
            runner(chunk)
            bare.append(sum(map(len, chunk)) / (time.monotonic() - begun))
            measured = bench(
                "base",
                [{"columns": {"TEXT": text}} for text in texts],
                http_url=server.http_url,
                grpc_url=server.grpc_url,
                triton=environment.prepare(),
                out=home / "bench-mixed",
                concurrencies=(32,),
                protocols=("http",),
                seconds=2 if quick else 25,
                precision="int8",
                metrics_url=server.metrics_url,
                server_pid=server.pid,
            )
            row = measured["rows"][0]
            mean_tokens = row["tokens"] / row["stages"]["tokenize"]["requests"]
            through.append(row["throughput_per_s"] * mean_tokens)
            shares.append({n: row[n] for n in ("padding_share", "mean_batch", "requests_a_batch", "p50_ms", "p99_ms")})
            say(f"engine {bare[-1]:.0f} tokens/s, served {through[-1]:.0f}")
    return {
        "precision": "int8",
        "clients": 32,
        "texts": len(texts),
        "row_tokens": {str(q): int(np.quantile([len(row) for row in rows], q)) for q in (0, 0.25, 0.5, 0.75, 1)},
        "engine_tokens_per_s": [round(value) for value in bare],
        "served_tokens_per_s": [round(value) for value in through],
        "ratio": round(statistics.median(through) / statistics.median(bare), 4),
        "runs": shares,
        "memory_mib": measured["memory"],
    }


def load(runs: Path, home: Path, quick: bool) -> dict[str, Any]:
    """`bertship.Client` in a process of its own: closed loop at several numbers of clients, then Poisson arrivals."""
    export = runs / "export" / "sst2"
    render(export, home / "repository-sst2")
    bodies = [{"TEXT": sample["columns"]["TEXT"]} for sample in read_samples(export)]
    result: dict[str, Any] = {}
    with served(home / "repository-sst2") as server:
        for url in (server.http_url, f"grpc://{server.grpc_url}"):
            protocol = url.partition("://")[0]
            job = {"url": url, "task": "sst2", "bodies": bodies, "seconds": 2 if quick else 10}
            for clients in (1, 8, 32):
                result[f"{protocol}, {clients} clients"] = summary(generate(job | {"clients": clients}))
            most = max(row["requests_per_s"] for name, row in result.items() if name.startswith(protocol))
            for share in (0.3, 0.6, 0.8):
                rate = round(share * most, 1)
                row = summary(generate(job | {"clients": 48, "rate_per_s": rate}))
                result[f"{protocol}, {rate:g}/s, Poisson"] = row | {"asked_per_s": rate}
    for name, row in result.items():
        say(f"{name}: {row['requests_per_s']:.0f}/s, p50 {row['p50_ms']:.1f} ms, p99 {row['p99_ms']:.1f} ms")
    return result


# ------------------------------------------------------------------------------------------------------------- peers


def peers(
    runs: Path, home: Path, quick: bool, task_name: str, precisions: Sequence[str], clients: int
) -> dict[str, Any]:
    """Requests a second of all systems, in rounds that alternate; before that, whether they answer the same.

    "absent" has the reasons of the peers that are not there; without (b), by whose answers all are judged, there is no
    comparison: CheckFailed.
    """
    export, run = runs / "export" / task_name, runs / "finetune" / task_name / "default"
    task = Task.from_file(export / "task.json")
    names = task.behaviour.inputs
    tokenizer = Tokenizer.from_file(export / "tokenizer.json")
    columns = [{n: s["columns"][n] for n in names} for s in read_samples(export)]
    # one row each: the peers know no windows
    columns = [c for c in columns if len(encode(task, tokenizer, {n: [c[n]] for n in names}).rows) == 1][:200]
    with contextlib.ExitStack() as stack:
        systems = []
        for precision in precisions:
            repository = home / f"repository-{task_name}-{precision}"
            render(export, repository, precision)
            server = stack.enter_context(served(repository))
            systems.append(ours(f"bertship {precision}", server.http_url, task))
        peer = stack.enter_context(triton_peer(home / f"peer-{task_name}", export, task))
        systems.append(
            dataclasses.replace(ours("(a) triton, unbatched fp32", peer, task), path="/v2/models/peer/infer")
        )
        for dtype in ("float32", "bfloat16"):
            url = stack.enter_context(fastapi_peer(run / "model", task, dtype))
            systems.append(System(f"(b) fastapi {dtype}", url, "/ask", json.dumps, lambda r: (r["answer"], r["score"])))
        absent = {}
        for name, optimum in (("(c) mlserver float32", False), ("(c) mlserver optimum float32", True)):
            try:
                url = stack.enter_context(mlserver_peer(home / f"mlserver-{optimum}", run / "model", task, optimum))
                systems.append(System(name, url, "/v2/models/peer/infer", mlserver_body, mlserver_answer))
            except CheckFailed as error:
                absent[name] = str(error)
                say(f"{name} is left out: {error}")
        agreement = compare(systems, columns[: 20 if quick else 100], "span" if len(names) > 1 else task.kind)
        rounds, seconds = (1, 1.0) if quick else (4, 8.0)
        rates: dict[str, list[float]] = {system.name: [] for system in systems}
        p50s: dict[str, list[float]] = {system.name: [] for system in systems}
        begun = time.monotonic()
        for i in range(rounds):
            if i and time.monotonic() - begun > LIMIT_S * i / (i + 1):
                break
            for system in systems:
                job = {"url": system.url, "path": system.path, "bodies": [system.body(c) for c in columns]}
                row = summary(generate(job | {"clients": clients, "seconds": seconds}))
                rates[system.name].append(row["requests_per_s"])
                p50s[system.name].append(row["p50_ms"])
                say(f"{system.name}: {row['requests_per_s']:.1f}/s, p50 {row['p50_ms']:.1f} ms")
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "task": task_name,
        "clients": clients,
        "texts": len(columns),
        "absent": absent,
        "agreement": agreement,
        "requests_per_s": {name: [round(v, 2) for v in values] for name, values in rates.items()},
        "p50_ms": {name: [round(v, 2) for v in values] for name, values in p50s.items()},
        "times_faster": {
            f"{mine} / {other}": round(medians[mine] / medians[other], 3)
            for mine in medians
            for other in medians
            if mine.startswith("bertship") and other.startswith("(")
        },
    }


# ------------------------------------------------------------------------------------------------------------- tools


def p50_of(call: Callable[[], Any], seconds: float) -> float:
    times, end = [], time.perf_counter() + seconds
    while (begun := time.perf_counter()) < end:
        call()
        times.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times)


def generate(job: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.serving_load"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    if result["failed"]:
        raise CheckFailed(f"{result['failed']} requests to {job['url']} failed: {result['errors'][0]}")
    return result


def summary(result: dict[str, Any]) -> dict[str, Any]:
    p50, p90, p99 = (float(value) for value in np.percentile(result["ms"], (50, 90, 99)))
    rate = result["requests"] / result["seconds"]
    return {"requests": result["requests"], "requests_per_s": rate, "p50_ms": p50, "p90_ms": p90, "p99_ms": p99}


PARTS = {"ready": ready, "overhead": overhead, "mixed": mixed, "load": load}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "peers", "prepare"])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--task", default="sst2", help="of `peers`: sst2 or squad")
    parser.add_argument("--precisions", default="fp32,int8", help="of `peers`: ours, parted by commas")
    parser.add_argument("--clients", type=int, default=16, help="of `peers`")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    home = (given.runs / "bench").absolute()
    runs = given.runs.absolute()
    environment.prepare()
    if given.part == "prepare":
        bert_base(home, runs / "export" / "sst2")
        return
    if given.part == "peers":
        name = f"peers {given.task}"
        result = peers(runs, home, given.quick, given.task, given.precisions.split(","), given.clients)
    else:
        name, result = given.part, PARTS[given.part](runs, home, given.quick)
    result["machine"] = describe_machine()
    result["load_before"] = round(os.getloadavg()[0], 2)
    if not given.quick:
        say(f"written to {save_result('serving', name, result)}")
    json.dump(result, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
