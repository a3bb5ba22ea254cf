"""Measure an export's engines: batches of one length each, and the task's own texts in their own lengths.

    result = bench_engines(Path("runs/export/sst2"), Path("runs/bench-engine/sst2"))

The engines of a cell take turns, so that whatever else the machine does meanwhile falls on all of them alike and their
ratios hold. Every time is that of the call that serves: rows in, logits out.
"""

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from bertship.artifacts import check_files, publish, read_manifest, versions
from bertship.console import read_samples
from bertship.errors import InputError
from bertship.pipeline import encode
from bertship.processor import cpu_field
from bertship.progress import progress
from bertship.runners import available_threads
from bertship.tasks.base import Task
from bertship.tokenization import Row, Tokenizer, pad
from export.bench_report import draw, write_csv, write_page
from export.engines import Engine, Work, find_engines, max_positions, work_of

Report = Callable[[str], None]
PAUSE_S = 0.01  # a library's threads go on spinning for some time, which the next one would pay for
MOST_TOKENS = 1 << 19  # of a batch: 1,024 rows of 512
WARM_UP = 2  # calls of each engine before a cell is measured
FEWEST = 5  # calls of each engine in a cell, however long they take
MIXED_ROWS = 128  # of the task's own texts, evenly over their lengths
MIXED_CALLS = 3
PADDED_BATCHES = (8, 32)  # rows


def bench_engines(
    export: Path,
    out: Path,
    *,
    batches: Sequence[int] = (1, 8),
    lengths: Sequence[int] = (),
    precisions: Iterable[str] = (),
    seconds: float = 1.0,
    threads: int | None = None,
    mixed: bool = True,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Measure every engine that the export at `export` has here; `out` appears whole, with what is returned.

    `lengths` are tokens of a row, by default 16, 64, 128 and the task's longest; `seconds` is what an engine gets for
    each batch and length. Raises InputError for a directory that is no export and for lengths that the model cannot
    take.
    """
    manifest = read_manifest(export, "export")
    check_files(export, manifest, ("task.json", "tokenizer.json", "samples.jsonl", *manifest["graphs"].values()))
    task, tokenizer = Task.from_file(export / "task.json"), Tokenizer.from_file(export / "tokenizer.json")
    threads = threads or available_threads()
    if unknown := set(precisions) - {*manifest["graphs"], "fp32", "bf16"}:
        raise InputError(f"the export has no {unknown.pop()}; it has {', '.join(manifest['graphs'])}")
    graph = onnx.load(export / next(iter(manifest["graphs"].values()))).graph
    lengths = tuple(lengths) or tuple(sorted({16, 64, 128, task.max_tokens}))
    _check(batches, lengths, seconds, threads, max_positions(graph))
    rows = own_rows(export, task, tokenizer)
    result: dict[str, Any] = {
        "task": task.name,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(threads),
        "versions": versions(),
        "settings": {
            "seconds": seconds,
            "warm_up": WARM_UP,
            "fewest": FEWEST,
            "turns": "the engines of a cell in turn",
        },
        "export": {"path": str(export), "fingerprint": manifest["fingerprint"]},
    }
    if result["machine"]["load_at_start"] > threads / 2:
        report(f"the machine is busy (load {result['machine']['load_at_start']:.1f}): compare the ratios alone")
    engines = find_engines(export, manifest, threads, report, precisions)
    try:
        ceilings = {}
        for engine in engines:
            ceilings[engine.name] = engine.ceiling()
            report(f"{engine.name}: large products at {ceilings[engine.name] / 1e9:.0f} G operations/s")
        result["ceilings_gops"] = {name: round(value / 1e9, 1) for name, value in ceilings.items()}
        result["rows"] = []
        with progress("bench-engine", len(lengths) * len(batches), report) as advance:
            for length in lengths:
                for batch in batches:
                    cell = _cell(engines, _rows_of(rows, batch, length), work_of(graph), ceilings, seconds)
                    result["rows"] += [{"batch": batch, "length": length, **line} for line in cell]
                    medians = (f"{line['runner']} {line['precision']} {line['median_ms']:.1f} ms" for line in cell)
                    report(f"{batch} x {length}: {', '.join(medians)}")
                    advance(f"{batch} x {length}")
        result["mixed"] = _mixed(engines, rows, tokenizer.pad_id, report) if mixed else []
    finally:
        for engine in engines:
            engine.close()
    with publish(out) as staging:
        (staging / "engines.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        write_csv(result["rows"], staging / "engines.csv")
        if result["mixed"]:
            write_csv(result["mixed"], staging / "mixed.csv")
        draw(result, staging / "engines.png")
        write_page(result, staging)
    return result


def take_turns(calls: Sequence[Callable[[], Any]], seconds: float, fewest: int = FEWEST) -> list[list[float]]:
    """Seconds of each call's runs, one of each in turn, until every call has had `seconds` and `fewest` runs."""
    for call in calls:
        for _ in range(WARM_UP):
            call()
    times: list[list[float]] = [[] for _ in calls]
    while len(times[0]) < fewest or min(sum(spent) for spent in times) < seconds:
        if len(times[0]) >= fewest and sum(sum(spent) for spent in times) > seconds * len(calls):
            break  # the slow ones have had the time of the fast
        for call, spent in zip(calls, times, strict=True):
            time.sleep(PAUSE_S)
            start = time.perf_counter()
            call()
            spent.append(time.perf_counter() - start)
    return times


def paired_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Median of the ratios of runs that came one after the other."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def own_rows(export: Path, task: Task, tokenizer: Tokenizer) -> list[Row]:
    """Rows of the export's own texts, at most MIXED_ROWS, evenly over their lengths and in an order without a rule."""
    samples = read_samples(export)
    columns = {name: [sample["columns"][name] for sample in samples] for name in task.behaviour.inputs}
    by_length = sorted(encode(task, tokenizer, columns).rows, key=len)
    places = np.unique(np.linspace(0, len(by_length) - 1, MIXED_ROWS).round().astype(int))
    return [by_length[place] for place in np.random.default_rng(0).permutation(places)]


def machine(threads: int) -> dict[str, Any]:
    return {
        "cpu": cpu_field("model name") or platform.machine(),
        "threads": threads,
        "cores": available_threads(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
    }


def _check(batches: Sequence[int], lengths: Sequence[int], seconds: float, threads: int, longest: int) -> None:
    if not batches or min(batches) < 1 or not lengths or min(lengths) < 1 or not 0 < seconds < math.inf or threads < 1:
        raise InputError(
            f"batches {list(batches)}, lengths {list(lengths)}, {seconds} seconds, {threads} threads: whole numbers of "
            "1 or more, and more than 0 seconds, are needed"
        )
    if threads > available_threads():  # each engine would start so many, and they would wait for each other
        raise InputError(f"{threads} threads: this process has {available_threads()} cores; give so many or fewer")
    if max(lengths) > longest:
        raise InputError(f"a length of {max(lengths)} tokens: this model takes at most {longest}")
    if max(batches) * max(lengths) > MOST_TOKENS:
        raise InputError(
            f"a batch of {max(batches)} rows of {max(lengths)} tokens: at most {MOST_TOKENS:,} tokens a batch"
        )


def _rows_of(rows: Sequence[Row], batch: int, length: int) -> list[Row]:
    """`batch` rows of exactly `length` tokens, cut from the task's own texts one after the other."""
    ids = np.concatenate([row.ids for row in rows])
    stream = np.resize(ids, batch * length).reshape(batch, length)
    return [Row(part, np.zeros(length, np.int64), i) for i, part in enumerate(stream)]


def _cell(
    engines: Sequence[Engine], rows: Sequence[Row], work: Work, ceilings: dict[str, float], seconds: float
) -> list[dict[str, Any]]:
    times = take_turns([partial(engine.run, rows) for engine in engines], seconds)
    operations = work.of(len(rows[0]), len(rows))
    baseline = next((t for e, t in zip(engines, times, strict=True) if e.name == "onnxruntime fp32"), None)
    lines = []
    for engine, spent in zip(engines, times, strict=True):
        median = statistics.median(spent)
        lines.append(
            {
                "runner": engine.runner,
                "precision": engine.precision,
                "runs": len(spent),
                "median_ms": round(median * 1e3, 3),
                "p99_ms": round(percentile(spent, 99) * 1e3, 3),
                "tokens_per_s": round(len(rows) * len(rows[0]) / median, 1),
                "gops": round(operations / median / 1e9, 1),
                "share_of_ceiling": round(operations / median / ceilings[engine.name], 3),
                "to_onnxruntime_fp32": None if baseline is None else round(paired_ratio(spent, baseline), 3),
            }
        )
    return lines


def percentile(values: Sequence[float], share: int) -> float:
    """The smallest value that at least `share` per cent of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * share / 100) - 1)]


def _run_all(engine: Engine, batches: Sequence[dict[str, np.ndarray]]) -> None:
    for batch in batches:
        engine.padded(batch)


def _mixed(engines: Sequence[Engine], rows: Sequence[Row], pad_id: int, report: Report) -> list[dict[str, Any]]:
    """The task's own texts: rows as the engine serves them against padded batches, in turns."""
    with progress("own texts", len(engines), report) as advance:
        found = []
        for engine in engines:
            found += _mixed_of(engine, rows, pad_id, report)
            advance(engine.name)
    return found


def _mixed_of(engine: Engine, rows: Sequence[Row], pad_id: int, report: Report) -> list[dict[str, Any]]:
    tokens = sum(map(len, rows))
    found = []
    ways: dict[str, Callable[[], Any]] = {}
    if engine.runner == "onnxruntime":
        ways["unpadded rows"] = partial(engine.run, rows)
    for size in PADDED_BATCHES:
        for order, ordered in (("as they come", rows), ("sorted by length", sorted(rows, key=len))):
            feeds = [pad(ordered[i : i + size], pad_id) for i in range(0, len(rows), size)]
            ways[f"padded batches of {size}, {order}"] = partial(_run_all, engine, feeds)
    times = take_turns(list(ways.values()), 0, MIXED_CALLS)
    for way, spent in zip(ways, times, strict=True):
        found.append(
            {
                "runner": engine.runner,
                "precision": engine.precision,
                "way": way,
                "texts": len(rows),
                "mean_tokens": round(tokens / len(rows), 1),
                "ms_per_text": round(statistics.median(spent) / len(rows) * 1e3, 3),
                "tokens_per_s": round(tokens / statistics.median(spent), 1),
                "to_first": round(paired_ratio(spent, times[0]), 3),
            }
        )
        report(f"{engine.name}, {way}: {found[-1]['ms_per_text']:.2f} ms a text")
    return found
