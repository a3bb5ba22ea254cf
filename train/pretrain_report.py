"""The page about a pre-training run: its curves, what it reached, how to do it again."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertship.artifacts import versions
from bertship.next_steps import next_steps
from bertship.report import Curve, Report
from train.watch import read_log


def write_report(directory: Path, facts: Mapping[str, Any]) -> None:
    """Write `report.html` into a run's `directory`, from its logs there and the `facts` of its manifest."""
    updates, heldout = (read_log(directory / f"{name}.jsonl") for name in ("metrics", "heldout"))
    metrics, config = facts["metrics"], facts["config"]["pretrain"]
    before, after = metrics["before"], metrics["after"]
    start = facts["inputs"]["init"] or "random weights"
    heldout = [{"step": 0, **before}, *heldout]
    report = Report(
        "Pre-training",
        f"{facts['parameters']:,} parameters, objective {config['objective']}, from {start}, on "
        f"{facts['inputs']['corpus']}: {len(updates):,} updates in {facts['precision']} on {facts['processes']} x "
        f"{facts['device']}.",
    )
    rows = [[name, before[name], after[name]] for name in after]
    report.table("Held out", ("", "before", "after"), rows, "Losses in nats. 0.5 is chance for NSP.")
    report.text("Conclusions", *conclusions(metrics, config))
    steps = [line["step"] for line in updates]
    held_at = [line["step"] for line in heldout]
    losses = [
        Curve("training, language model", steps, [line["mlm_loss"] for line in updates]).smoothed(),
        Curve("held out, language model", held_at, [line["mlm_loss"] for line in heldout]),
    ]
    report.curves("Language model loss", losses, "update", "nats")
    if "nsp_loss" in after:
        nsp = [Curve("held out", held_at, [line["nsp_accuracy"] for line in heldout])]
        report.curves("Next sentence accuracy", nsp, "update", "share")
    report.curves("Perplexity", [Curve("held out", held_at, [x["perplexity"] for x in heldout])], "update", "", True)
    report.curves("Learning rate", [Curve("rate", steps, [line["lr"] for line in updates])], "update", "")
    norms = [Curve("norm", steps, [line["grad_norm"] for line in updates]).smoothed()]
    report.curves("Gradient norm before clipping", norms, "update", "", True)
    speed = [Curve("speed", steps, [line["tokens_per_s"] for line in updates]).smoothed()]
    report.curves("Speed", speed, "update", "tokens/s")
    cost = ("tokens_per_s", "padding_share", "mfu", "matrix_product_tflops", "is_next_share", "skipped_updates")
    report.facts("Cost and counts", {name: metrics[name] for name in (*cost, "best_checkpoint", "order_hash")})
    report.facts("Settings", facts["config"])
    report.facts("Versions", versions())
    start_option = f" --init {shlex.quote(facts['inputs']['init'])}" if facts["inputs"]["init"] else ""
    corpus = shlex.quote(Path(facts["inputs"]["corpus"]).name)
    again = ["cat >again.toml <<'END'", *toml_lines(facts["config"]), "END"]
    report.command("Again", *again, f"bertship pretrain --preset again.toml --corpus {corpus}{start_option}")
    report.command("Next", *next_steps("pretrain", directory))
    report.write(directory / "report.html")


def conclusions(metrics: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """What the figures say and what they do not."""
    before, after = metrics["before"], metrics["after"]
    said = [
        f"The held-out language model loss went from {before['mlm_loss']:.3f} to {after['mlm_loss']:.3f} nats, "
        f"perplexity from {before['perplexity']:,.0f} to {after['perplexity']:,.1f}."
    ]
    if "nsp_accuracy" in after:
        learnt = after["nsp_accuracy"] > 0.6
        said.append(
            f"Next sentences are told from random ones in {after['nsp_accuracy']:.1%} of the held-out pairs"
            + ("." if learnt else ", which is hardly above chance: NSP was not learnt in this time.")
        )
    if metrics["skipped_updates"]:
        said.append(f"{metrics['skipped_updates']} updates were skipped, as their gradient was not finite.")
    said.append(
        f"{metrics['padding_share']:.1%} of the computed positions were padding; the rest reached "
        f"{metrics['mfu']:.0%} of the machine's measured matrix-product rate."
    )
    return said


def toml_lines(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Tables of plain values as TOML, those that are None left out."""
    lines = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items() if value is not None]
    return lines
