"""What `serving.bench` has measured, as a table for people, as CSV, as a plot and as a page."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertship.next_steps import next_steps
from bertship.report import COLOURS, Curve, Report, plain_numbers

GAIN = 1.05  # clients that bring less than this are too many


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
        f"{row['protocol']}, one at a time: {_mean(row)} ("
        + ", ".join(f"{step} {times['compute_input_ms'] + times['compute_infer_ms']:.2f}" for step, times in stages)
        + ")"
        for row in result["rows"]
        if row["concurrency"] == 1 and (stages := list(row["stages"].items()))
    ]
    machine = result["machine"]
    where = (
        f"{_what(result)}, one text a request, on {machine['cores']} "
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
    for place, protocol in enumerate(dict.fromkeys(row["protocol"] for row in result["rows"])):
        for kind, marker in (("concurrency", "o"), ("rate_per_s", "s")):
            rows = [row for row in result["rows"] if row["protocol"] == protocol and row[kind]]
            rows.sort(key=lambda row: row[kind])
            colour = COLOURS[place + (2 if kind == "rate_per_s" else 0)]
            for percentile, style in (("p50_ms", "-"), ("p99_ms", ":")):
                axes.plot(
                    [row["throughput_per_s"] for row in rows],
                    [row[percentile] for row in rows],
                    style,
                    marker=marker,
                    markersize=5,
                    color=colour,
                    label=f"{protocol}, {_KINDS[kind]}, {percentile[:3]}" if rows else None,
                )
            for row in rows:
                axes.annotate(
                    f"{row[kind]:g}{'' if kind == 'concurrency' else '/s'}",
                    (row["throughput_per_s"], row["p50_ms"]),
                    (0, 6 if place else -12),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                    color=colour,
                )
    axes.set(xlabel="texts a second", ylabel="latency, ms", yscale="log")
    precision = f", {result['precision'].upper()}" if result["precision"] else ""
    title = f"{result['task']}{precision}, {result['machine']['cores']} cores, one text a request"
    axes.set_title(f"{title}; numbers: clients at once, or requests a second", fontsize=10)
    axes.grid(alpha=0.3)
    plain_numbers(axes.yaxis)
    axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


_KINDS = {"concurrency": "clients", "rate_per_s": "Poisson arrivals"}


def _what(result: Mapping[str, Any]) -> str:
    """The task, its precision, and the version that answered."""
    served = result.get("served_version")
    return ", ".join(
        [
            result["task"],
            *([result["precision"].upper()] if result["precision"] else []),
            *([f"version {served}"] if served else []),
        ]
    )


def _load(row: Mapping[str, Any]) -> str:
    return f"{row['concurrency']} at once" if row["concurrency"] else f"{row['rate_per_s']:g}/s"


def _mean(row: Mapping[str, Any]) -> str:
    """Mean latency beside mean computing; of few requests the steps' own mean can be the greater, as it is of more."""
    waited, computed = row["mean_ms"], row["steps_ms"]
    if computed <= waited:
        return f"{waited:.2f} ms on average, of which the steps compute {computed:.2f} ms"
    return f"{waited:.2f} ms on average in the windows; the steps compute {computed:.2f} ms over all of the run"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def write_page(result: Mapping[str, Any], directory: Path) -> None:
    """Write `report.html` into the run's directory, which holds `bench.json` already."""
    machine, rows = result["machine"], result["rows"]
    page = Report(
        f"{result['task']}: the server under load",
        f"{_what(result)} on Triton "
        f"{result['versions']['tritonserver']}, one text a request, {result['settings']['texts']:,} different texts, "
        f"on {machine['cores']} cores of {machine['cpu']}, which the client shares.",
    )
    page.text("Conclusions", *conclusions(result))
    for kind, heading, unit in (
        ("concurrency", "Clients that wait for their answers", "clients"),
        ("rate_per_s", "Requests that arrive at random", "requests asked for a second"),
    ):
        chosen = sorted((row for row in rows if row[kind]), key=lambda row: row[kind])
        protocols = list(dict.fromkeys(row["protocol"] for row in chosen))
        by = {protocol: [row for row in chosen if row["protocol"] == protocol] for protocol in protocols}
        latency = [
            Curve(f"{protocol}, {name[:3]}", [row["throughput_per_s"] for row in own], [row[name] for row in own])
            for protocol, own in by.items()
            for name in ("p50_ms", "p99_ms")
        ]
        page.curves(f"{heading}: latency over throughput", latency, "texts/s", "ms", logarithmic=True)
        through = [
            Curve(protocol, [row[kind] for row in own], [row["throughput_per_s"] for row in own])
            for protocol, own in by.items()
        ]
        page.curves(f"{heading}: throughput", through, unit, "texts/s")
    page.table(
        "Measured",
        (
            "protocol",
            "load",
            "texts/s",
            "p50 ms",
            "p90 ms",
            "p99 ms",
            "mean batch",
            "padding",
            "queue ms",
            "compute ms",
        ),
        [
            (
                row["protocol"],
                _load(row),
                *(row[name] for name in ("throughput_per_s", "p50_ms", "p90_ms", "p99_ms", "mean_batch")),
                _share(row["padding_share"]),
                row["queue_ms"],
                row["compute_ms"],
            )
            for row in rows
        ],
        "Queue and compute are Triton's own sums over the three steps, a request on average.",
    )
    page.table(
        "Steps", ("protocol", "load", "step", "queue ms", "compute ms", "executions", "requests"),
        [
            (row["protocol"], _load(row), step, *(t[n] for n in ("queue_ms", "compute_ms", "executions", "requests")))
            for row in rows
            for step, t in row["stages"].items()
        ],
    )  # fmt: skip
    page.bars("Resident memory, MiB", [(name, size["rss_mib"]) for name, size in result["memory"].items()])
    page.facts("Settings", {**result["settings"], "perf_analyzer": " ".join(result["settings"]["perf_analyzer"])})
    page.facts("Encoder", result["encoder"])
    page.facts("Machine", machine)
    page.facts("Versions", result["versions"])
    after = next_steps("bench", directory)
    again = after[1].partition("    #")[0] if after else f"bertship bench --task {result['task']}"
    options = [f"--seconds {result['settings']['seconds']:g}"]
    for option, kind in (("concurrency", "concurrency"), ("request-rate", "rate_per_s")):
        if loads := list(dict.fromkeys(row[kind] for row in rows if row[kind])):
            options.append(f"--{option} {','.join(f'{load:g}' for load in loads)}")
    options.append(f"--protocol {','.join(dict.fromkeys(row['protocol'] for row in rows))}")
    page.command("Reproduce", " ".join([again, *options]))
    page.command("Next", *after)
    page.write(directory / "report.html")


def conclusions(result: Mapping[str, Any]) -> list[str]:
    """What one client waits, where more clients bring no more, and what may be doubted."""
    said = []
    rows = result["rows"]
    for protocol in dict.fromkeys(row["protocol"] for row in rows):
        own = [row for row in rows if row["protocol"] == protocol]
        closed = sorted((row for row in own if row["concurrency"]), key=lambda row: row["concurrency"])
        if closed and closed[0]["concurrency"] == 1:
            first = closed[0]
            said.append(
                f"{protocol}: one client waits {first['p50_ms']:.2f} ms in the median and {first['p99_ms']:.2f} ms in "
                f"the 99th percentile; {_mean(first)}."
            )
        if len(closed) > 1:
            most = max(row["throughput_per_s"] for row in closed)
            enough = next(row for row in closed if row["throughput_per_s"] * GAIN >= most)
            gain = enough["throughput_per_s"] / closed[0]["throughput_per_s"]
            reached = (
                f"{_load(enough)} reach that within {GAIN - 1:.0%}, {gain:.1f} times what {_load(closed[0])} does, at "
                f"a median of {enough['p50_ms']:.2f} ms; more of them wait longer."
                if enough is not closed[0]
                else f"{_load(enough)} reaches that within {GAIN - 1:.0%}, and more of them wait longer."
            )
            if enough is closed[-1]:
                reached = f"that is with {_load(enough)}, the most that were tried, and may not be all."
            said.append(f"{protocol}: at most {most:,.0f} texts a second; {reached}")
        said += [
            f"{protocol}: of {row['rate_per_s']:g} requests asked for a second only {row['throughput_per_s']:.0f} were "
            "answered: more than this machine can do."
            for row in own
            if row["rate_per_s"] and row["throughput_per_s"] * GAIN < row["rate_per_s"]
        ]
    machine = result["machine"]
    if machine["load_at_start"] > machine["cores"] / 2:
        said.append(
            f"The machine was busy at the start (load {machine['load_at_start']:.1f} on {machine['cores']} cores): "
            "what else ran took part of what is shown here."
        )
    return said
