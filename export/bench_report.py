"""What `bertship bench-engine` found, as lines of text, a CSV file and a picture."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


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
