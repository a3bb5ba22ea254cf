"""Runs of one kind side by side: the settings in which they differ, what came out, their curves over each other.

    result = compare([Path("runs/finetune/sst2/default"), Path("runs/finetune/sst2/other")])

A run's kind is what its directory holds: `bench.json`, `engines.json`, or the stage in its `manifest.json`.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertship.artifacts import read_manifest
from bertship.errors import InputError
from bertship.report import Curve, Report
from bertship.shell import place

FILES = {"bench.json": "bench", "engines.json": "bench-engine"}  # kinds that are told by a file of their own
_NOT_SETTINGS = {"model_files", "fingerprint"}  # hashes, which say nothing to people
# of a training: what it did, not how good it became
_COURSE = {
    *("best_step", "updates", "epochs_run", "train_seconds", "tokens_per_second", "padding_share", "skipped_updates"),
}
Axes = tuple[str, str, str]  # a chart's heading, and the names of its axes


@dataclass(frozen=True)
class Run:
    """What one directory holds: settings and metrics by dotted name, curves by their chart and name."""

    name: str
    directory: Path
    kind: str
    settings: Mapping[str, Any]
    metrics: Mapping[str, float]
    curves: Mapping[Axes, Mapping[str, Curve]] = field(default_factory=dict)


def compare(directories: Sequence[Path]) -> list[Run]:
    """The runs, read. Raises InputError for less than two, for what is no run, and for runs of different kinds."""
    if len(directories) < 2:
        raise InputError(f"{len(directories)} run given: two or more directories are needed to compare")
    resolved = [directory.resolve() for directory in directories]
    if len(set(resolved)) < len(resolved):
        twice = next(d for d, r in zip(directories, resolved, strict=True) if resolved.count(r) > 1)
        raise InputError(f"{twice} is given twice: different runs are needed to compare")
    kinds = {directory: kind_of(directory) for directory in directories}
    if len(set(kinds.values())) > 1:
        named = ", ".join(f"{directory} is of {kind}" for directory, kind in kinds.items())
        raise InputError(f"runs of different kinds cannot be compared: {named}; give runs of one kind")
    names = _names(resolved)
    return [read_run(directory, name) for directory, name in zip(directories, names, strict=True)]


def kind_of(directory: Path) -> str:
    """`corpus`, `pretrain`, `finetune`, `sweep`, `evaluate`, `export`, `parity`, `bench` or `bench-engine`."""
    if not directory.is_dir():
        raise InputError(f"no directory {directory}; give a run's, such as runs/finetune/sst2/default")
    for file, kind in FILES.items():
        if (directory / file).is_file():
            return kind
    if not (directory / "manifest.json").is_file():
        raise InputError(f"{directory} is no run: it has none of manifest.json, {', '.join(FILES)}")
    stage = read_manifest(directory).get("stage")
    if not isinstance(stage, str):
        raise InputError(f"{directory}/manifest.json names no stage; make the directory again")
    return stage


def read_run(directory: Path, name: str) -> Run:
    """One run. Raises InputError where its files are damaged."""
    kind = kind_of(directory)
    try:
        settings, metrics, curves = _READERS.get(kind, _read_stage)(directory)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{directory} cannot be read as a run of {kind} ({error!r}); make it again") from None
    return Run(name, directory, kind, settings, metrics, curves)


def as_dict(runs: Sequence[Run]) -> dict[str, Any]:
    """The comparison as JSON: differences are to the first run."""
    return {
        "kind": runs[0].kind,
        "runs": {run.name: str(run.directory) for run in runs},
        "differing_settings": {name: list(values) for name, values in _settings(runs, True)},
        "metrics": {
            name: {"values": list(values), "differences": [_difference(values[0], value) for value in values[1:]]}
            for name, values in _metrics(runs)
        },
    }


def lines(runs: Sequence[Run]) -> list[str]:
    """The comparison as plain text: first the settings that differ, then the metrics."""
    head = ["", *(run.name for run in runs)]
    differing = [[name, *map(_shown, values)] for name, values in _settings(runs, True)]
    same = sum(1 for _ in _settings(runs, False))
    found = [[name, *cells] for name, cells in _with_differences(runs)]
    said = [*_columns([head, *differing], left=len(head))] if differing else ["no setting differs"]
    return [*said, f"{same} settings are the same", "", *_columns([head, *found], left=1)]


def page(runs: Sequence[Run]) -> Report:
    """The comparison as a page."""
    names = [run.name for run in runs]
    made = Report(
        f"{len(runs)} runs of {runs[0].kind}", "; ".join(f"{run.name}: {run.directory}" for run in runs) + "."
    )
    made.text("Conclusions", *conclusions(runs))
    differing = list(_settings(runs, True))
    if differing:
        rows = [[name, *(_shown(value) for value in values)] for name, values in differing]
        made.table("Settings that differ", ("", *names), rows)
    made.table(
        "Metrics",
        ("", *names),
        [[name, *cells] for name, cells in _with_differences(runs)],
        f"In brackets the difference to {names[0]}, and its share of it.",
    )
    for axes in dict.fromkeys(axes for run in runs for axes in run.curves):
        drawn = [
            Curve(f"{run.name}{', ' + name if name else ''}", curve.x, curve.y)
            for run in runs
            for name, curve in run.curves.get(axes, {}).items()
        ]
        made.curves(axes[0], drawn, axes[1], axes[2])
    made.table("Settings that are the same", ("", ""), [[name, _shown(v[0])] for name, v in _settings(runs, False)])
    made.command("Reproduce", f"bertship compare {' '.join(place(run.directory) for run in runs)}")
    return made


def conclusions(runs: Sequence[Run]) -> list[str]:
    """How much differs in what the runs were given, and which metrics differ most; how good they are comes first."""
    differing = [name for name, _ in _settings(runs, True)]
    shown = ", ".join(differing[:6]) + (f" and {len(differing) - 6} more" if len(differing) > 6 else "")
    said = [f"They differ in {shown}." if differing else "No recorded setting differs."]
    changed = []
    for name, values in _metrics(runs):
        found = [v for v in values if v is not None]
        if len(found) == len(runs) and min(found) != max(found) and found[0]:
            changed.append((max(abs(value / found[0] - 1) for value in found), name, found))
    if not changed:
        return [*said, "No metric that all of them have differs."]
    for share, name, found in sorted(changed, key=lambda c: (c[1] in _COURSE, -c[0]))[:3]:
        least, most = (runs[found.index(pick(found))].name for pick in (min, max))
        low, high = _alike([min(found), max(found)])
        said.append(f"{name} differs by up to {share:.1%}: {low} ({least}) to {high} ({most}).")
    said.append("One run each says nothing about chance: --seeds, or a measurement repeated, does.")
    return said


# ---- what the kinds hold


def _read_stage(directory: Path) -> tuple[dict[str, Any], dict[str, float], dict[Axes, dict[str, Curve]]]:
    manifest = read_manifest(directory)
    settings = {
        **_flat(manifest.get("config") or {}),
        **_flat({"inputs": manifest.get("inputs") or {}, "versions": manifest.get("versions") or {}}),
        **_flat({n: manifest[n] for n in ("task", "device", "processes", "precision", "layout") if n in manifest}),
    }
    return settings, _numbers(manifest.get("metrics") or {}), {}


def _read_pretrain(directory: Path) -> tuple[dict[str, Any], dict[str, float], dict[Axes, dict[str, Curve]]]:
    settings, metrics, _ = _read_stage(directory)
    updates, heldout = (_read_log(directory / f"{name}.jsonl") for name in ("metrics", "heldout"))
    before = read_manifest(directory)["metrics"]["before"]
    heldout = [{"step": 0, **before}, *heldout]
    curves = {
        ("Language model loss in training", "update", "nats"): {"": _curve(updates, "mlm_loss").smoothed()},
        ("Language model loss on held-out text", "update", "nats"): {"": _curve(heldout, "mlm_loss")},
        ("Next sentence accuracy on held-out text", "update", "share"): {"": _curve(heldout, "nsp_accuracy")},
        ("Learning rate", "update", ""): {"": _curve(updates, "lr")},
        ("Speed", "update", "tokens/s"): {"": _curve(updates, "tokens_per_s").smoothed()},
    }
    return settings, metrics, curves


def _read_finetune(directory: Path) -> tuple[dict[str, Any], dict[str, float], dict[Axes, dict[str, Curve]]]:
    settings, metrics, _ = _read_stage(directory)
    log = _read_log(directory / "metrics.jsonl")
    curves = {("Loss in training", "update", "loss"): {"": _curve(log, "loss").smoothed()}}
    judged = [{"step": line["step"], **line["dev"]} for line in log if "dev" in line]
    for name in judged[0] if len(judged) > 1 else ():
        if name != "step":
            curves[(f"{name} on the dev split", "update", name)] = {"": _curve(judged, name)}
    return settings, metrics, curves


def _read_gate(directory: Path) -> tuple[dict[str, Any], dict[str, float], dict[Axes, dict[str, Curve]]]:
    """An export or a parity run: of each artifact and engine its worst comparison."""
    manifest = read_manifest(directory)
    settings, _, _ = _read_stage(directory)
    metrics: dict[str, float] = {}
    for name, file in (manifest.get("graphs") or {}).items():
        if file in manifest["files"]:
            metrics[f"{name}: MB"] = manifest["files"][file]["bytes"] / 1e6
    results = [*manifest["metrics"]["parity"], *(manifest.get("plan_parity") or [])]
    for name, engine in dict.fromkeys((r["precision"], r["engine"]) for r in results):
        own = [r for r in results if (r["precision"], r["engine"]) == (name, engine)]
        metrics[f"{name}, {engine}: largest difference"] = max(
            float("inf") if r["max_difference"] is None else r["max_difference"] for r in own
        )
        metrics[f"{name}, {engine}: same decisions"] = min(r["agreement"] for r in own)
        scored = [r for r in own if r["artifact_metric"] is not None]
        if scored:
            metrics[f"{name}, {engine}: {scored[0]['metric']}"] = min(r["artifact_metric"] for r in scored)
    return settings, metrics, {}


def _read_bench(directory: Path) -> tuple[dict[str, Any], dict[str, float], dict[Axes, dict[str, Curve]]]:
    result = json.loads((directory / "bench.json").read_text(encoding="utf-8"))
    chosen = ("task", "precision", "settings", "encoder", "machine", "versions")
    settings = _flat({name: result[name] for name in chosen})
    metrics: dict[str, float] = {}
    curves: dict[Axes, dict[str, Curve]] = {}
    for row in result["rows"]:
        load = f"{row['concurrency']} at once" if row["concurrency"] else f"{row['rate_per_s']:g}/s"
        for name, unit in (("throughput_per_s", "texts/s"), ("p50_ms", "p50 ms"), ("p99_ms", "p99 ms")):
            metrics[f"{row['protocol']}, {load}: {unit}"] = row[name]
    for name, value in result["memory"].items():
        metrics[f"{name}: resident MiB"] = value["rss_mib"]
    for kind, what in (("concurrency", "clients"), ("rate_per_s", "random arrivals")):
        rows = sorted((row for row in result["rows"] if row[kind]), key=lambda row: row[kind])
        for latency in ("p50_ms", "p99_ms"):
            axes = (f"{latency[:3]} over throughput, {what}", "texts/s", "ms")
            for protocol in dict.fromkeys(row["protocol"] for row in rows):
                own = [row for row in rows if row["protocol"] == protocol]
                curve = Curve(protocol, [r["throughput_per_s"] for r in own], [r[latency] for r in own])
                curves.setdefault(axes, {})[protocol] = curve
    return settings, metrics, curves


def _read_engines(directory: Path) -> tuple[dict[str, Any], dict[str, float], dict[Axes, dict[str, Curve]]]:
    result = json.loads((directory / "engines.json").read_text(encoding="utf-8"))
    settings = _flat({name: result[name] for name in ("task", "settings", "export", "machine", "versions")})
    metrics: dict[str, float] = {}
    curves: dict[Axes, dict[str, Curve]] = {}
    for row in result["rows"]:
        engine = f"{row['runner']} {row['precision']}"
        where = f"{engine}, {row['batch']} x {row['length']}"
        metrics[f"{where}: median ms"], metrics[f"{where}: p99 ms"] = row["median_ms"], row["p99_ms"]
        axes = (f"Batches of {row['batch']}", "tokens a row", "tokens/s")
        curve = curves.setdefault(axes, {}).setdefault(engine, Curve(engine, [], []))
        curve.x.append(row["length"])  # type: ignore[attr-defined]
        curve.y.append(row["tokens_per_s"])  # type: ignore[attr-defined]
    for row in result["mixed"]:
        metrics[f"{row['runner']} {row['precision']}, own texts, {row['way']}: ms"] = row["ms_per_text"]
    return settings, metrics, curves


_READERS: dict[str, Callable[[Path], tuple[dict[str, Any], dict[str, float], dict[Axes, dict[str, Curve]]]]] = {
    "pretrain": _read_pretrain,
    "finetune": _read_finetune,
    "export": _read_gate,
    "parity": _read_gate,
    "bench": _read_bench,
    "bench-engine": _read_engines,
}


# ---- tables


def _settings(runs: Sequence[Run], differing: bool) -> Iterable[tuple[str, list[Any]]]:
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        values = [run.settings.get(name) for run in runs]
        if differing is any(value != values[0] for value in values[1:]):
            yield name, values


def _metrics(runs: Sequence[Run]) -> Iterable[tuple[str, list[float | None]]]:
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        yield name, [run.metrics.get(name) for run in runs]


def _with_differences(runs: Sequence[Run]) -> Iterable[tuple[str, list[str]]]:
    for name, (first, *others) in _metrics(runs):
        shown_first, *shown_others = _alike([first, *others])
        cells = [shown_first]
        for value, shown in zip(others, shown_others, strict=True):
            difference = _difference(first, value)
            share = f", {difference / first:+.1%}" if difference and first else ""
            cells.append(
                shown if difference is None else f"{shown} ({difference:+.4g}{share})" if difference else shown
            )
        yield name, cells


def _alike(values: Sequence[float | None]) -> list[str]:
    """Values of one metric: shares among them with one number of decimals; empty for one that is not there."""
    numbers = [value for value in values if value is not None]
    shares = any(isinstance(value, float) for value in numbers) and all(0.01 <= abs(v) <= 1 for v in numbers if v)
    return ["" if v is None else f"{v:.4f}" if shares else _shown(v) for v in values]


def _difference(first: float | None, value: float | None) -> float | None:
    return None if first is None or value is None else value - first


def _columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Rows as text; the first `left` columns to the left, the others to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _names(directories: Sequence[Path]) -> list[str]:
    """What tells the directories apart: their paths without the parts that all begin with."""
    parts = [directory.parts for directory in directories]
    shared = 0
    while shared < min(map(len, parts)) - 1 and len({part[shared] for part in parts}) == 1:
        shared += 1
    return ["/".join(part[shared:]) for part in parts]


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tables.items():
        if name in _NOT_SETTINGS:
            continue
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _numbers(tables: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in _flat(tables).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _read_log(path: Path) -> list[dict[str, Any]]:
    """A log of JSON lines; a last line that was left half written is left out."""
    if not path.is_file():
        return []
    written = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in written if line.endswith("\n")]


def _curve(log: Sequence[Mapping[str, Any]], name: str) -> Curve:
    rows = [line for line in log if name in line]
    return Curve(name, [line["step"] for line in rows], [line[name] for line in rows])
