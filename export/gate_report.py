"""The page about an export, or about a parity run: what the gate compared, how much of what it allows was used.

Of the manifest alone, so it is made anywhere, NVIDIA's container included. No picture in it takes a library.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertship.artifacts import read_manifest
from bertship.console import difference
from bertship.next_steps import next_steps
from bertship.report import Report
from bertship.shell import place, shown, shown_places
from bertship.tasks import Task

REPORT = "report.html"
SHOWN = 5e-5  # a smaller change of a metric is none in four digits
CLOSE = 0.5  # of what is allowed: beyond, an artifact passes without much room
EXPLAINED = (  # the table of comparisons
    "largest, mean: the largest and the mean absolute difference of a logit from PyTorch's in FP32, as a share of the "
    "largest logit that PyTorch gives; allowed: the most that the largest may be.",
    "same: the share of decisions that are PyTorch's.",
    "metric and change: the artifact's own on the labelled texts, and its difference to PyTorch's.",
    "alone: rows as long as they are, without any padding.",
    "padded to N: rows filled up to N tokens, longer ones to the next such length, in batches of mixed sizes.",
    "torch half: no artifact but PyTorch itself in half precision, to tell what the precision costs by itself.",
)


def write_export_report(export: Path) -> None:
    """Write `report.html` into an export's directory, from its manifest."""
    manifest = read_manifest(export, "export")
    task = Task.from_file(export / "task.json")
    inputs = manifest["inputs"]
    told = shown_places({name: value for name, value in inputs.items() if not isinstance(value, Mapping)})
    page = Report(
        f"{task.name}: an export behind the gate",
        f"{told['model']} as {', '.join(manifest['graphs'])}, compared with PyTorch FP32 on "
        f"{inputs['parity_examples']:,} texts of {told.get('data') or 'the default data'}.",
    )
    results = [*manifest["metrics"]["parity"], *manifest.get("plan_parity", [])]
    best = manifest["best"]
    refused = [f"{name} was refused and is not here: {reason}" for name, reason in manifest["refused"].items()]
    page.text(
        "Conclusions",
        *conclusions(results),
        *refused,
        f"Best on the machine that exported: {best['precision']} on {best['engine']}, as {best['why']}.",
    )
    page.table("Artifacts", ("precision", "file", "MB", "times smaller than FP32"), _artifacts(manifest))
    add_comparisons(page, results)
    if manifest.get("recipes"):
        page.facts("How INT8 was made", {name: _shown(recipe) for name, recipe in manifest["recipes"].items()})
    if manifest.get("plans"):
        page.facts("Plans", {name: _shown(facts) for name, facts in manifest["plans"].items()})
    page.facts("Inputs", told)
    page.facts("Versions", manifest["versions"])
    asked = f" --precision {','.join(manifest['config']['precisions'])}"
    data = f" --data {place(inputs['data'])}" if inputs.get("data") else ""
    page.command("Reproduce", f"bertship export {place(inputs['run'])} --task {task.name}{asked}{data}")
    page.command("Next", *next_steps("export", export))
    page.write(export / REPORT)


def parity_page(export: Path, judged: Mapping[str, Any], command: str) -> Report:
    """The page about `bertship parity` of `export`; `judged` is what `check_parity` returned."""
    results = judged["metrics"]["parity"]
    page = Report(
        f"{judged['task']}: the gate once more",
        f"Every artifact of {shown(export)} compared with PyTorch FP32 on {results[0]['examples']:,} texts.",
    )
    verdict = [] if judged["passed"] else [f"The gate refuses this export: {judged['reasons']}."]
    page.text("Conclusions", *verdict, *conclusions(results))
    add_comparisons(page, results)
    page.facts("Of the export", {"made": judged["created"], "versions": judged["versions"]})
    page.command("Reproduce", command)
    again = f"bertship export {place(judged['inputs']['run'])} --task {judged['task']}"
    page.command("Next", f"bertship bench-engine {place(export)}" if judged["passed"] else again)
    return page


def conclusions(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each artifact: whether it passed, with how much room, and what it changes."""
    said = []
    for name, engine in dict.fromkeys((r["precision"], r["engine"]) for r in results):
        own = [r for r in results if (r["precision"], r["engine"]) == (name, engine)]
        used = max(map(_used, own))
        least = min(r["agreement"] for r in own)
        worst = max(own, key=_used)
        verdict = "passes" if all(r["passed"] for r in own) else "FAILS"
        size = (
            f"the largest difference of a logit is {difference(worst['max_difference'])} of the largest "
            f"({worst['mode']}), {used:.0%} of what is allowed"
            + (", which leaves little room" if CLOSE < used <= 1 else "")
            if worst["max_difference"] is not None
            else f"logits are not finite ({worst['mode']})"
        )
        sentence = f"{name} on {engine} {verdict}: {_decisions(least)} PyTorch's, and {size}."
        scored = [r for r in own if r["artifact_metric"] is not None]
        if scored:
            change = min(r["artifact_metric"] - r["reference_metric"] for r in scored)
            by = f"changes by {change:+.4f} at worst" if abs(change) >= SHOWN else "does not change"
            sentence += f" The metric, {scored[0]['metric']}, {by}."
        said.append(sentence)
    return said


def add_comparisons(page: Report, results: Sequence[Mapping[str, Any]]) -> None:
    """Bars of what was used of what is allowed, and every comparison."""
    page.bars(
        "How much of the allowed difference was used",
        [(f"{r['precision']}, {r['engine']}, {r['mode']}", _used(r)) for r in results],
        full=1.0,
        note="The largest difference of a logit over the one that is allowed: beyond 1 the gate closes.",
    )
    page.bars(
        "Decisions that differ, of a hundred",
        [(f"{r['precision']}, {r['engine']}, {r['mode']}", 100 * (1 - r["agreement"])) for r in results],
        full=100 * max(1 - min(r["limits"]["agreement"] for r in results), 0.01),
        note="A full bar is what the most lenient of these precisions may change.",
    )
    columns = ("precision", "engine", "mode", "rows", "largest", "allowed", "mean", "same", "metric", "", "change")
    page.table(
        "Comparisons",
        (*columns, "passed"),
        [
            (
                *(r[name] for name in ("precision", "engine", "mode", "rows")),
                difference(r["max_difference"]),
                f"{r['limits']['max_difference']:.0e}",
                difference(r["mean_difference"]),
                _share(r["agreement"]),
                *_metric(r),
                "yes" if r["passed"] else "; ".join(r["failures"]),
            )
            for r in results
        ],
        "\n".join(EXPLAINED),
    )
    page.table(
        "Where the largest differences are", ("precision", "mode", "where"),
        [(r["precision"], r["mode"], r["where"]) for r in results],
    )  # fmt: skip
    cells = [
        (r["precision"], r["mode"], b["tokens"], b["batch"], b["rows"], difference(b["max_difference"]))
        for r in results
        for b in r["batches"]
    ]
    if cells:
        page.table(
            "By length and batch", ("precision", "mode", "tokens", "rows a batch", "rows", "largest difference"), cells
        )


def _share(agreement: float) -> str:
    """In percent, rounded down: 100% is all and no less."""
    return "100%" if agreement >= 1 else f"{math.floor(1e4 * agreement) / 100:.2f}%"


def _decisions(least: float) -> str:
    return "all decisions are" if least >= 1 else f"at least {_share(least)} of the decisions are"


def _used(result: Mapping[str, Any]) -> float:
    if result["max_difference"] is None:
        return math.inf
    return float(result["max_difference"]) / float(result["limits"]["max_difference"])


def _metric(result: Mapping[str, Any]) -> tuple[Any, ...]:
    if result["artifact_metric"] is None:
        return ("no labels", "", "")
    change = result["artifact_metric"] - result["reference_metric"]
    return (result["metric"], float(result["artifact_metric"]), f"{change:+.4f}" if abs(change) >= SHOWN else "0")


def _artifacts(manifest: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    files = manifest["files"]
    found = {**manifest["graphs"], **{f"{n}, plan": f["file"] for n, f in manifest.get("plans", {}).items()}}
    full = files.get("model.onnx", {}).get("bytes")
    return [
        (name, file, files[file]["bytes"] / 1e6, full / files[file]["bytes"] if full else "")
        for name, file in found.items()
    ]


def _shown(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts for a table: lists as words."""
    return {
        name: _shown(v) if isinstance(v, Mapping) else ", ".join(map(str, v)) if isinstance(v, list | tuple) else v
        for name, v in facts.items()
    }
