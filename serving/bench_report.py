"""What `serving.bench` has measured, as a table for people, as CSV and as a plot."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def lines(result: Mapping[str, Any]) -> list[str]:
    """The result as a plain-text table, and what one client's time goes to."""
    columns = ("p50 ms", "p90 ms", "p99 ms", "mean batch", "padding")
    head = f"{'protocol':<10}{'load':>12}{'texts/s':>10}" + "".join(f"{name:>12}" for name in columns)
    table = [
        f"{row['protocol']:<10}{_load(row):>12}{row['throughput_per_s']:>10.1f}{row['p50_ms']:>12.2f}"
        f"{row['p90_ms']:>12.2f}{row['p99_ms']:>12.2f}{row['mean_batch']:>12.2f}{_share(row['padding_share']):>12}"
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
    memory = result["memory"]
    resident = [
        "resident memory, MiB: " + ", ".join(f"{model} {size['rss_mib']:.0f}" for model, size in memory.items())
    ]
    return [head, *table, *alone, *(resident if memory else []), where]


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
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


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Latency over throughput, a line for each protocol and kind of load, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for protocol in dict.fromkeys(row["protocol"] for row in result["rows"]):
        for kind, marker in (("concurrency", "o"), ("rate_per_s", "s")):
            rows = [row for row in result["rows"] if row["protocol"] == protocol and row[kind]]
            rows.sort(key=lambda row: row[kind])
            for percentile, style in (("p50_ms", "-"), ("p99_ms", ":")):
                axes.plot(
                    [row["throughput_per_s"] for row in rows],
                    [row[percentile] for row in rows],
                    style,
                    marker=marker,
                    label=f"{protocol}, {_KINDS[kind]}, {percentile[:3]}" if rows else None,
                )
            for row in rows:
                axes.annotate(_load(row), (row["throughput_per_s"], row["p50_ms"]), fontsize=7)
    axes.set(xlabel="texts a second", ylabel="latency, ms", yscale="log")
    precision = f", {result['precision'].upper()}" if result["precision"] else ""
    axes.set_title(f"{result['task']}{precision}, {result['machine']['cores']} cores, one text a request", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


_KINDS = {"concurrency": "clients", "rate_per_s": "Poisson arrivals"}


def _load(row: Mapping[str, Any]) -> str:
    return f"{row['concurrency']} at once" if row["concurrency"] else f"{row['rate_per_s']:g}/s"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
