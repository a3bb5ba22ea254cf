"""The paper's ablations (Devlin et al. 2019, section 5 and C), each row with several seeds, at a size for two cores.

    make ablation                                         # pre-training tasks: three rows, three seeds, an hour
    python -m benchmarks.ablation --rows mask --seeds 1   # the mask mixes; --rows size: layers, width, heads

Every row is pre-trained from scratch on the same text for the same number of updates, then fine-tuned on one task with
the same settings. What is done is kept under runs/ablation and not done again. The page is runs/ablation/ROWS.html, the
figures go to benchmarks/results/ablation.json.
"""

import argparse
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine, save_result
from bertship.artifacts import read_manifest, versions, write_text
from bertship.console import report as say
from bertship.report import Curve, Report
from bertship.tasks import get_task
from train.stages import make_corpus, make_finetuning, make_pretraining
from train.watch import read_log

MODEL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
STEPS = (
    800  # updates of pre-training a run, of 32 x 64 tokens: nine runs and their fine-tuning are an hour on two cores
)
PRETRAIN = {"batch_size": 32, "sequence_length": 64, "learning_rate": 1e-3, "heldout_batches": 20}
FINETUNE = {"epochs": 2, "learning_rate": 2e-4}


@dataclass(frozen=True)
class Arm:
    """A row: what differs from the others, and the paper's figures for it by the name of the task they are of."""

    name: str
    pretrain: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    paper: Mapping[str, float] = field(default_factory=dict)


def _tasks(*scores: float) -> dict[str, float]:
    return dict(zip(("MNLI-m", "QNLI", "MRPC", "SST-2", "SQuAD F1"), scores, strict=True))


def _masks(name: str, rates: tuple[float, float, float], *scores: float) -> Arm:
    paper = dict(zip(("MNLI", "NER fine-tuned", "NER frozen"), scores, strict=True))
    return Arm(f"{name} mask/same/random", {"mask_rates": rates}, paper=paper)


def _size(layers: int, hidden: int, heads: int, paper_size: str, *scores: float) -> Arm:
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
    }
    paper = dict(zip(("perplexity", "MNLI-m", "MRPC", "SST-2"), scores, strict=True))
    return Arm(f"{layers}/{hidden}/{heads} (paper {paper_size})", model=sizes, paper=paper)


ROWS: dict[str, tuple[Arm, ...]] = {
    # table 5
    "tasks": (
        Arm("MLM + NSP", {"objective": "mlm+nsp"}, paper=_tasks(84.4, 88.4, 86.7, 92.7, 88.5)),
        Arm("no NSP", {"objective": "mlm"}, paper=_tasks(83.9, 84.9, 86.5, 92.6, 87.9)),
        Arm("left to right, no NSP", {"objective": "ltr"}, paper=_tasks(82.1, 84.3, 77.5, 92.1, 77.8)),
    ),
    # table 8; `mask_rates` are [MASK], random, unchanged
    "mask": (
        _masks("80/10/10", (0.8, 0.1, 0.1), 84.2, 95.4, 94.9),
        _masks("100/0/0", (1.0, 0.0, 0.0), 84.3, 94.9, 94.0),
        _masks("80/0/20", (0.8, 0.2, 0.0), 84.1, 95.2, 94.6),
        _masks("80/20/0", (0.8, 0.0, 0.2), 84.4, 95.2, 94.7),
        _masks("0/20/80", (0.0, 0.8, 0.2), 83.7, 94.8, 94.6),
        _masks("0/0/100", (0.0, 1.0, 0.0), 83.6, 94.9, 94.6),
    ),
    # table 6, each row a third of the paper's width
    "size": (
        _size(3, 256, 4, "3/768/12", 5.84, 77.9, 79.8, 88.4),
        _size(6, 256, 1, "6/768/3", 5.24, 80.6, 82.2, 90.7),
        _size(6, 256, 4, "6/768/12", 4.68, 81.9, 84.8, 91.3),
        _size(12, 256, 4, "12/768/12", 3.99, 84.4, 86.7, 92.9),
    ),
}


def run_arm(arm: Arm, seed: int, steps: int, task_name: str, home: Path, small: bool) -> dict[str, Any]:
    """Pre-train and fine-tune one row with one seed, or find that done; its curve and its scores."""
    name = "-".join("".join(c if c.isalnum() else " " for c in arm.name).split()) + f"-{seed}"
    sizes = {**MODEL, **arm.model}
    preset = home / "presets" / f"{name}.toml"
    write_text(preset, "[model]\n" + "".join(f"{field} = {value}\n" for field, value in sizes.items()))
    settings = {**PRETRAIN, "steps": steps, "warmup_steps": steps // 10, "checkpoint_every": max(1, steps // 10)}
    settings |= {"keep_checkpoints": 1, "seed": seed, **arm.pretrain}
    settings |= {"batch_size": 8, "heldout_batches": 2} if small else {}
    task = get_task(task_name)
    say(f"--- {arm.name}, seed {seed}")
    out = home / "pretrain" / name
    pretrained = make_pretraining(home / "corpus", out, str(preset), settings, say)
    tuning = {**FINETUNE, "seed": seed} | ({"min_updates": 5, "epochs": 0.05} if small else {})
    tuned = make_finetuning(task, (out / "model", str(out)), home / "finetune" / name, None, tuning, say)
    return {
        "seed": seed,
        "held_out": pretrained["metrics"]["after"],
        "curve": [(line["step"], line["mlm_loss"]) for line in read_log(out / "heldout.jsonl")],
        "accuracy": [(line["step"], line["mlm_accuracy"]) for line in read_log(out / "heldout.jsonl")],
        "task": {k: v for k, v in tuned["metrics"].items() if k in task.metrics},
    }


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan


def conclude(rows: str, results: Mapping[str, list[dict[str, Any]]], metric: str, steps: int) -> list[str]:
    """What the figures say, in proportion to their spread, and what a run of this size cannot."""
    scores = {name: [run["task"][metric] for run in runs] for name, runs in results.items()}
    said = []
    first, *others = scores
    for other in others:
        (a, spread_a), (b, spread_b) = mean_and_spread(scores[first]), mean_and_spread(scores[other])
        noise = math.sqrt((spread_a**2 + spread_b**2) / len(scores[first]))  # of the difference of the means
        if math.isnan(noise):
            said.append(
                f"{first} against {other}: {a - b:+.1%} in {metric}, from one seed each, which decides nothing."
            )
        else:
            sure = "more than" if abs(a - b) > 2 * noise else "within"
            said.append(
                f"{first} against {other}: {a - b:+.1%} in {metric}, {sure} twice the standard error of the difference "
                f"({noise:.1%}) over {len(scores[first])} seeds."
            )
    said.append(
        f"This is a model of a few million parameters after {steps} updates on a few megabytes; the paper's has "
        "110 million after a million updates on 3.3 billion words. At such a size the order of rows that lie close "
        "together is chance; it can show how fast each objective's loss falls and that each trains and fine-tunes."
    )
    if rows == "tasks":
        said.append(
            "The losses of masked and left-to-right models are not of the same question: the one predicts 15 % of the "
            "tokens from both sides, the other every token from its left. The paper's figure 5 compares them after "
            "fine-tuning, which is the last column here."
        )
    return said


def write_page(rows: str, results: Mapping[str, list[dict[str, Any]]], home: Path, facts: Mapping[str, Any]) -> Path:
    """The page: scores beside the paper's, curves, conclusions."""
    metric = facts["metric"]
    arms = [arm for arm in ROWS[rows] if arm.name in results]
    paper_columns = list(arms[0].paper)
    page = Report(
        f"Ablation: {rows}",
        f"{len(arms)} rows x {facts['seeds']} seeds, {facts['steps']} updates of pre-training, then {facts['task']}.",
    )
    table = []
    for arm in arms:
        runs = results[arm.name]
        loss, _ = mean_and_spread([run["held_out"]["mlm_loss"] for run in runs])
        score, spread = mean_and_spread([run["task"][metric] for run in runs])
        nsp = [run["held_out"]["nsp_accuracy"] for run in runs if "nsp_accuracy" in run["held_out"]]
        shown = f"{score:.1%} ± {spread:.1%}" if len(runs) > 1 else f"{score:.1%}"
        table.append([arm.name, loss, math.exp(loss), f"{statistics.fmean(nsp):.1%}" if nsp else "", shown])
    columns = ("", "held-out loss", "perplexity", "NSP accuracy", f"{facts['task']} {metric}")
    page.table("Here", columns, table, "Means over the seeds, ± the standard deviation between them; loss in nats.")
    page.table("In the paper", ("", *paper_columns), [[arm.name, *arm.paper.values()] for arm in arms], "Dev sets.")
    page.text("Conclusions", *conclude(rows, results, metric, facts["steps"]))
    for heading, key, unit in (("Loss", "curve", "nats"), ("Accuracy of predictions", "accuracy", "share")):
        curves = []
        for arm in arms:
            lines: list[list[tuple[int, float]]] = [run[key] for run in results[arm.name]]
            steps = [step for step, _ in lines[0]]
            curves.append(
                Curve(arm.name, steps, [statistics.fmean(line[i][1] for line in lines) for i in range(len(steps))])
            )
        page.curves(f"{heading}, held out", curves, "update", unit)
    page.facts("Settings", {"model": MODEL, "pretrain": PRETRAIN, "finetune": FINETUNE, "steps": facts["steps"]})
    page.facts("Machine", {k: v for k, v in describe_machine().items() if k != "versions"})
    page.facts("Versions", versions())
    page.command("Again", f"python -m benchmarks.ablation --rows {rows} --steps {facts['steps']}")
    path = home / f"{rows}.html"
    page.write(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", choices=ROWS, default="tasks")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS, help="Updates of pre-training a run.")
    parser.add_argument("--task", default="sst2")
    parser.add_argument("--home", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--small", action="store_true", help="Hardly any training: to see that it runs.")
    options = parser.parse_args()
    started = time.monotonic()
    make_corpus([], options.home / "corpus", {}, say)
    results: dict[str, list[dict[str, Any]]] = {}
    for seed in range(1, options.seeds + 1):  # a seed's rows after each other: stopped early, the rows are equal
        for arm in ROWS[options.rows]:
            run = run_arm(arm, seed, options.steps, options.task, options.home, options.small)
            results.setdefault(arm.name, []).append(run)
    corpus = read_manifest(options.home / "corpus", "corpus")["metrics"]
    facts = {
        "rows": options.rows,
        "seeds": options.seeds,
        "steps": options.steps,
        "task": options.task,
        "metric": get_task(options.task).metrics[0],
        "corpus_tokens": corpus["tokens"],
        "seconds": time.monotonic() - started,
    }
    page = write_page(options.rows, results, options.home, facts)
    save_result("ablation", options.rows, {**facts, "results": results, "machine": describe_machine()})
    for line in conclude(options.rows, results, facts["metric"], options.steps):
        print(line)
    print(f"{page} ({facts['seconds'] / 60:.0f} min)")


if __name__ == "__main__":
    main()
