"""What `bertship bench-engine` found, as lines of text, a CSV file, a picture and a page."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertship.next_steps import next_steps
from bertship.report import Curve, Report
from bertship.shell import place


def lines(result: Mapping[str, Any]) -> list[str]:
    """The result as plain text: every cell, then the task's own texts, then where it was measured."""
    head = (
        f"{'runner':<12} {'precision':<10}{'batch':>6}{'tokens':>8}{'median ms':>11}{'p99 ms':>10}{'tokens/s':>11}"
        f"{'of ceiling':>12}{'/ ort fp32':>12}"
    )
    table = [
        f"{row['runner']:<12} {row['precision']:<10}{row['batch']:>6}{row['length']:>8}{row['median_ms']:>11.2f}"
        f"{row['p99_ms']:>10.2f}{row['tokens_per_s']:>11.0f}{row['share_of_ceiling']:>12.0%}"
        + ("" if row["to_onnxruntime_fp32"] is None else f"{row['to_onnxruntime_fp32']:>12.2f}")
        for row in result["rows"]
    ]
    mixed = []
    if result["mixed"]:
        first = result["mixed"][0]
        mixed = [
            "",
            f"{first['texts']} of {result['task']}'s own texts, {first['mean_tokens']} tokens on average",
            f"{'runner':<12} {'precision':<10}{'ms/text':>9}{'tokens/s':>11}  how",
            *(
                f"{row['runner']:<12} {row['precision']:<10}{row['ms_per_text']:>9.2f}{row['tokens_per_s']:>11.0f}"
                f"  {row['way']}"
                for row in result["mixed"]
            ),
        ]
    machine = result["machine"]
    ceilings = ", ".join(f"{name} {value:.0f}" for name, value in result["ceilings_gops"].items())
    where = [
        "",
        f"ceilings, G operations/s of a large matrix product: {ceilings}",
        f"{machine['threads']} threads on {machine['cores']} cores of {machine['cpu']} "
        f"(load at the start: {machine['load_at_start']:.1f})",
    ]
    return [head, *table, *mixed, *where]


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Tokens a second over the length, a panel a batch size; the figure has no display and no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    batches = sorted({row["batch"] for row in result["rows"]})
    names = list(result["ceilings_gops"])
    figure = Figure(figsize=(4.5 * len(batches) + 1, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    for panel, batch in zip(panels, batches, strict=True):
        for number, name in enumerate(names):
            cells = [
                row for row in result["rows"] if row["batch"] == batch and f"{row['runner']} {row['precision']}" == name
            ]
            lengths = [row["length"] for row in cells]
            colour = f"C{number}"
            panel.plot(lengths, [row["tokens_per_s"] for row in cells], "o-", color=colour, label=name)
            reachable = [row["tokens_per_s"] / row["share_of_ceiling"] for row in cells if row["share_of_ceiling"]]
            if len(reachable) == len(cells):
                panel.plot(lengths, reachable, ":", color=colour, linewidth=1)
        panel.set(title=f"batch {batch}", xlabel="tokens a row", xscale="log", yscale="log")
        panel.set_xticks(sorted({row["length"] for row in result["rows"]}))
        panel.xaxis.set_major_formatter("{x:.0f}")
        panel.xaxis.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("tokens/s (dotted: the machine's ceiling)")
    panels[0].legend(fontsize=8)
    machine = result["machine"]
    figure.suptitle(f"{result['task']}: {machine['threads']} threads, {machine['cpu']}", fontsize=10)
    figure.savefig(path, dpi=130)


def write_page(result: Mapping[str, Any], directory: Path) -> None:
    """Write `report.html` into the run's directory, which holds `engines.json` already."""
    machine, settings = result["machine"], result["settings"]
    names = list(result["ceilings_gops"])
    cells = [(row["batch"], row["length"], f"{row['runner']} {row['precision']}", row) for row in result["rows"]]
    page = Report(
        f"{result['task']}: engines measured",
        f"{', '.join(names)} of {result['export']['path']}, rows in, logits out, with {machine['threads']} threads on "
        f"{machine['cores']} cores of {machine['cpu']}.",
    )
    page.text("Conclusions", *conclusions(result))
    for batch in dict.fromkeys(row["batch"] for row in result["rows"]):
        curves = []
        for name in names:
            own = [row for b, _, n, row in cells if (b, n) == (batch, name)]
            curves.append(Curve(name, [r["length"] for r in own], [r["tokens_per_s"] for r in own]))
        heading = "One row at a time" if batch == 1 else f"Batches of {batch} rows"
        page.curves(heading, curves, "tokens a row", "tokens/s")
    columns = ("runs", "median_ms", "p99_ms", "tokens_per_s", "share_of_ceiling", "to_onnxruntime_fp32")
    page.table(
        "All",
        (
            "rows",
            "tokens",
            "engine",
            "runs",
            "median ms",
            "p99 ms",
            "tokens/s",
            "of the ceiling",
            "/ ONNX Runtime FP32",
        ),
        [
            (batch, length, name, *("" if row[column] is None else row[column] for column in columns))
            for batch, length, name, row in cells
        ],
        "The ceiling is a large matrix product in the same precision; the last column is the median of the ratios of "
        "runs that came one after the other.",
    )
    page.bars(
        "The task's own texts, milliseconds a text",
        [(f"{row['runner']} {row['precision']}, {row['way']}", row["ms_per_text"]) for row in result["mixed"]],
    )
    page.facts("Ceilings, G operations/s", result["ceilings_gops"])
    page.facts("Settings", {**settings, "export": result["export"]})
    page.facts("Machine", machine)
    page.facts("Versions", result["versions"])
    shapes = [
        f"--{option} {','.join(map(str, dict.fromkeys(row[option] for row in result['rows'])))}"
        for option in ("batch", "length")
    ]
    export, seconds = place(result["export"]["path"]), f"--seconds {settings['seconds']:g}"
    threads = f"--threads {machine['threads']}"
    page.command("Reproduce", " ".join(["bertship bench-engine", export, *shapes, seconds, threads]))
    page.command("Next", *next_steps("bench-engine", directory))
    page.write(directory / "report.html")


def conclusions(result: Mapping[str, Any]) -> list[str]:
    """Which engine was the fastest where, how near to the machine's own rate, and what may be doubted."""
    said = []
    machine = result["machine"]
    wins: dict[str, list[str]] = {}
    for batch, length in dict.fromkeys((row["batch"], row["length"]) for row in result["rows"]):
        cell = [row for row in result["rows"] if (row["batch"], row["length"]) == (batch, length)]
        best = min(cell, key=lambda row: row["median_ms"])
        wins.setdefault(f"{best['runner']} {best['precision']}", []).append(f"{batch} x {length}")
    said += [f"{name} was the fastest at {', '.join(shapes)} (rows x tokens)." for name, shapes in wins.items()]
    for name in result["ceilings_gops"]:
        own = [row for row in result["rows"] if f"{row['runner']} {row['precision']}" == name]
        ratios = [row["to_onnxruntime_fp32"] for row in own if row["to_onnxruntime_fp32"] is not None]
        shares = [row["share_of_ceiling"] for row in own]
        sentence = f"{name} reached {min(shares):.0%} to {max(shares):.0%} of a large product's rate"
        if ratios and name != "onnxruntime fp32":
            sentence += f" and took {min(ratios):.2f} to {max(ratios):.2f} times as long as ONNX Runtime in FP32"
        said.append(f"{sentence}.")
    if machine["load_at_start"] > machine["threads"] / 2:
        said.append(
            f"The machine was busy at the start (load {machine['load_at_start']:.1f}): the ratios hold, as the engines "
            "took turns; the times do not."
        )
    return said
