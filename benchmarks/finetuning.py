"""Fine-tuning beside the usual recipe of transformers: the same data, warm start, threads and machine, in turns.

    python benchmarks/finetuning.py DATA [--init DIR] [--sets sst2,cola,stsb,wnut17,squad] [--seeds 42,43] [--out FILE]

DATA has glue/CoLA, glue/SST-2, glue/STS-B, ner/wnut17 and squad in their official layouts. Three sides take turns, so
that a machine that slows down slows all of them: `ours`, the defaults of `bertship finetune` with the recipe's number
of epochs; `recipe`, the usual recipe (AdamW 5e-5, no warm-up, linear decay, 32 examples (16 windows) a batch, 3 epochs
(1 for SQuAD), FP32); and `best`, the same recipe at its best settings: bf16 where the processor has it, and examples of
like length together. Each run is a process of its own and its training alone is timed, our snapshots included. SQuAD's
dev split is thinned to every fifth question, and it is run with the first seed alone. Results, with machine and
versions, go to FILE as JSON lines, a line a run as soon as it ends, and a table to stdout. Runs that FILE already has
from a processor with the same instructions, of the same code where they are ours, are not made again: it can be run in
pieces, as `--sets cola --seeds 42`, and stopped at any time. `--since` leaves out runs of another day, when it may have
been a faster machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

# our task, the folder in DATA, every side's epochs, the recipe's batch, and the metrics compared
SETS: dict[str, dict[str, Any]] = {
    "sst2": {"task": "sst2", "folder": "glue/SST-2", "epochs": 3, "batch": 32, "metrics": ["accuracy"]},
    "cola": {"task": "cola", "folder": "glue/CoLA", "epochs": 3, "batch": 32, "metrics": ["mcc"]},
    "stsb": {"task": "stsb", "folder": "glue/STS-B", "epochs": 3, "batch": 32, "metrics": ["pearson", "spearman"]},
    "wnut17": {"task": "ner", "folder": "ner/wnut17", "epochs": 3, "batch": 32, "metrics": ["f1"]},
    "squad": {"task": "squad", "folder": "squad", "epochs": 1, "batch": 16, "metrics": ["f1", "exact_match"]},
}
SIDES = ("ours", "recipe", "best")
SORTED_BATCHES = 50  # the batches among which transformers' own sampler sorts by length
DEV_EVERY = {"squad": 5}
ONE_SEED = ("squad",)


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.child:
        sys.stdout.write(json.dumps(_child(arguments)) + "\n")
        return
    names, seeds = arguments.sets.split(","), _numbers(arguments.seeds)
    if unknown := set(names) - SETS.keys():
        sys.exit(f"unknown set {unknown.pop()!r}; sets are {', '.join(SETS)}")
    sides = arguments.sides.split(",")
    if unknown := set(sides) - set(SIDES):
        sys.exit(f"unknown side {unknown.pop()!r}; sides are {', '.join(SIDES)}")
    from benchmarks.machine import instructions
    from bertship.artifacts import write_text

    code, here = _code(), instructions()
    made = read_results(arguments.out)
    wanted = {"limit": arguments.limit, "init": arguments.init, "threads": arguments.threads}
    known = [
        r
        for r in made
        if wanted.items() <= r.items()
        and r["code"] in ("", code)
        and r["machine"]["instructions"] == here
        and r["when"] >= arguments.since
    ]
    for name in names:
        for seed in seeds[:1] if name in ONE_SEED else seeds:
            for side in sides:
                if any((r["set"], r["seed"], r["side"]) == (name, seed, side) for r in known):
                    continue
                result = _run(arguments, name, seed, side) | wanted | {"code": code if side == "ours" else ""}
                known.append(result)
                made.append(result)
                write_text(arguments.out, "".join(json.dumps(r) + "\n" for r in made))
                print(f"{name} {side} seed {seed}: {result['metrics']}, {result['seconds']:.0f} s", file=sys.stderr)
    for line in table([r for r in known if r["set"] in names]):
        print(line)


def read_results(path: Path) -> list[dict[str, Any]]:
    """The runs in a file of results."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def _numbers(text: str) -> list[int]:
    if not all(part.isdecimal() for part in text.split(",")):
        sys.exit(f"--seeds {text!r}: whole numbers parted by commas are needed, such as 42,43,44")
    return [int(part) for part in text.split(",")]


def _utc(text: str) -> str:
    """A time as the results spell it."""
    try:
        return f"{datetime.fromisoformat(text):%Y-%m-%dT%H:%M:%SZ}"
    except ValueError:
        sys.exit(f"--since {text!r}: a time such as 2026-12-31T08:00 is needed, in UTC")


def _code() -> str:
    """What our runs depend on: those of other code are no results of this one."""
    from train.finetune import code_of

    return code_of()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--init", default="minilm", help="a model directory, or minilm, the packaged warm start")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--seeds", default="42,43,44", help="each a run of every side")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit", type=int, default=0, help="examples of each split: a trial of the script, no result")
    parser.add_argument(
        "--since", type=_utc, default="1970-01-01", metavar="TIME", help="earlier runs do not count (UTC)"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/finetuning.jsonl"))
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=42, help=argparse.SUPPRESS)
    return parser


def _run(arguments: argparse.Namespace, name: str, seed: int, side: str) -> dict[str, Any]:
    """One training in a process of its own, with the same threads for every side."""
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, str(arguments.data), "--init", arguments.init, "--child", f"{side}:{name}"]
    command += ["--seed", str(seed), "--threads", str(arguments.threads), "--limit", str(arguments.limit)]
    environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    load = os.getloadavg()[0]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}, {side}, seed {seed} failed:\n{done.stderr[-3000:]}")
    from benchmarks.machine import describe_machine

    result = json.loads(done.stdout.splitlines()[-1])
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    facts = {"set": name, "side": side, "seed": seed, "when": when, "load_before": load}
    return facts | result | {"machine": describe_machine()}


def _child(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    from train.stages import find_init

    torch.set_num_threads(arguments.threads)
    side, _, name = arguments.child.partition(":")
    init, _ = find_init(arguments.init, Path("runs"), "tiny", _say)
    train, dev, task = _examples(arguments, name)
    if side == "ours":
        return _ours(task, init, train, dev, seed=arguments.seed, epochs=SETS[name]["epochs"], min_updates=1)
    return _recipe(name, task, init, train, dev, arguments.seed, best=side == "best")


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _examples(arguments: argparse.Namespace, name: str) -> tuple[list[Any], list[Any], Any]:
    """Both sides get the same examples, read once by our readers."""
    from bertship.tasks import TASKS
    from bertship.tasks.readers import read_split

    task = TASKS[SETS[name]["task"]]
    train, dev = (read_split(task, arguments.data / SETS[name]["folder"], split, _say) for split in ("train", "dev"))
    dev = dev[:: DEV_EVERY.get(name, 1)]
    if arguments.limit:
        train, dev = train[: arguments.limit], dev[: arguments.limit]
    if task.behaviour.needs_labels and not task.labels:
        task = task.with_labels(task.behaviour.labels_in(train))
    return train, dev, task


def _ours(task: Any, init: Path, train: list[Any], dev: list[Any], **fixed: int) -> dict[str, Any]:
    from bertship.config import FinetuneConfig
    from train.finetune import finetune

    config = FinetuneConfig(**{**task.training, **fixed})
    with tempfile.TemporaryDirectory() as folder:
        manifest = finetune(task, init, Path(folder) / "run", config, train, dev, _say)
    found = manifest["metrics"]
    metrics = {metric: found[metric] for metric in task.metrics}
    settings = {name: value for name, value in config.model_dump().items() if value != ""}
    return {"metrics": metrics, "seconds": found["train_seconds"], "settings": settings}


def _recipe(
    name: str, task: Any, init: Path, train: list[Any], dev: list[Any], seed: int, best: bool
) -> dict[str, Any]:
    """transformers' model and tokenizer in the usual loop; judged by our metrics, which are the libraries' own."""
    import numpy as np
    import torch
    from transformers import AutoTokenizer, get_linear_schedule_with_warmup, set_seed

    from train.optim import pick_precision

    set_seed(seed)
    facts = SETS[name]
    rows, model, score = _theirs(task, init, AutoTokenizer.from_pretrained(init), train, dev)
    precision = pick_precision("auto", "cpu") if best else None
    batch, epochs = facts["batch"], facts["epochs"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)
    steps = epochs * -(-len(rows) // batch)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, steps)
    rng = np.random.default_rng(seed)
    model.train()
    started = time.monotonic()
    for _ in range(epochs):
        for chosen in _order([len(row["input_ids"]) for row in rows], batch, rng, best):
            with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
                loss = model(**_collate([rows[i] for i in chosen])).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    seconds = time.monotonic() - started
    model.eval()
    settings = {"learning_rate": 5e-5, "epochs": epochs, "batch_size": batch, "precision": str(precision or "fp32")}
    return {"metrics": score(model), "seconds": seconds, "settings": settings | {"grouped": best}}


def _order(lengths: list[int], batch: int, rng: Any, grouped: bool) -> list[list[int]]:
    """Batches of one epoch; grouped, as transformers does it: sorted inside random groups, the longest first."""
    order = rng.permutation(len(lengths)).tolist()
    if grouped:
        size = batch * SORTED_BATCHES
        order = [i for k in range(0, len(order), size) for i in sorted(order[k : k + size], key=lambda i: -lengths[i])]
    return [order[k : k + batch] for k in range(0, len(order), batch)]


def _collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Padded to the longest row; token labels with -100, what the loss leaves out."""
    import torch

    longest = max(len(row["input_ids"]) for row in rows)
    made = {}
    for key in rows[0]:
        if isinstance(rows[0][key], list):
            fill = -100 if key == "labels" else 0
            made[key] = torch.tensor([row[key] + [fill] * (longest - len(row[key])) for row in rows])
        else:
            made[key] = torch.tensor([row[key] for row in rows])
    return made


def _theirs(task: Any, init: Path, tokenizer: Any, train: list[Any], dev: list[Any]) -> tuple[list[Any], Any, Any]:
    """Training rows, the model, and a function from the trained model to metrics."""
    import transformers

    from train.scoring import evaluate

    kind = task.behaviour.loss
    if kind == "token":
        model = transformers.AutoModelForTokenClassification.from_pretrained(init, num_labels=len(task.labels))
        rows = [_token_row(tokenizer, task, example) for example in train]
    elif kind == "span":
        model = transformers.AutoModelForQuestionAnswering.from_pretrained(init)
        rows = [row for example in train for row in _span_rows(tokenizer, task, example)]
    else:
        count = max(len(task.labels), 1)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(init, num_labels=count)
        rows = [_sentence_row(tokenizer, task, example) for example in train]

    def score(trained: Any) -> dict[str, float]:
        from bertship.tokenization import Tokenizer

        ours = Tokenizer.from_dir(init)
        metrics, _ = evaluate(task, ours, _TheirRunner(trained, ours.pad_id, task), dev)
        return {name: metrics[name] for name in task.metrics}

    return rows, model, score


def _sentence_row(tokenizer: Any, task: Any, example: Any) -> dict[str, Any]:
    texts = [example.columns[name] for name in task.behaviour.inputs]
    row = dict(tokenizer(*texts, truncation=True, max_length=task.max_tokens))
    row["labels"] = task.labels.index(example.target) if task.labels else float(example.target)
    return row


def _token_row(tokenizer: Any, task: Any, example: Any) -> dict[str, Any]:
    from bertship.tasks.ner import tag_words

    text, places = example.columns["TEXT"], example.columns["WORDS"]
    words = [text[start:end] for start, end in places]
    tags = [tag for _, tag in tag_words(places, example.target)]
    encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=task.max_tokens)
    labels, last = [], None
    for word in encoded.word_ids():
        labels.append(-100 if word is None or word == last else task.labels.index(tags[word]))
        last = word
    return {**dict(encoded), "labels": labels}


def _span_rows(tokenizer: Any, task: Any, example: Any) -> list[dict[str, Any]]:
    encoded = tokenizer(
        example.columns["QUESTION"],
        example.columns["CONTEXT"],
        truncation="only_second",
        max_length=task.max_tokens,
        stride=task.overlap,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    text, first = example.target.answers[0]
    last = first + len(text)
    rows = []
    for k, offsets in enumerate(encoded["offset_mapping"]):
        inside = [j for j, part in enumerate(encoded.sequence_ids(k)) if part == 1]
        start = end = 0
        if inside and offsets[inside[0]][0] <= first and offsets[inside[-1]][1] >= last:
            start = max(j for j in inside if offsets[j][0] <= first)
            end = min(j for j in inside if offsets[j][1] >= last)
        names = ("input_ids", "attention_mask", "token_type_ids")
        rows.append({n: encoded[n][k] for n in names} | {"start_positions": start, "end_positions": end})
    return rows


class _TheirRunner:
    """Rows through a transformers model, for our decoding and metrics: both sides are judged alike."""

    def __init__(self, model: Any, pad_id: int, task: Any) -> None:
        self.model, self.pad_id = model, pad_id
        self.names = [spec.name for spec in task.behaviour.logits(task)]
        self.tokenwise = task.behaviour.loss in ("token", "span")

    def __call__(self, rows: Any) -> dict[str, list[Any]]:
        import torch

        from bertship.tokenization import pad

        found: dict[str, list[Any]] = {name: [] for name in self.names}
        with torch.inference_mode():
            for k in range(0, len(rows), 32):
                part = rows[k : k + 32]
                output = self.model(**{n: torch.from_numpy(v) for n, v in pad(part, self.pad_id).items()})
                for name in self.names:
                    for place, row in enumerate(part):
                        values = output[name][place].float().numpy()
                        found[name].append(values[: len(row)] if self.tokenwise else values)
        return found


def table(results: list[dict[str, Any]]) -> list[str]:
    """Markdown: mean, deviation and time of each side, and our time as a share of the others'."""
    lines = ["| set | metric | " + " | ".join(f"{s}, s" for s in SIDES) + " | time of recipe | time of best |"]
    lines.append("|---|---|" + "---|" * 5)
    for name in dict.fromkeys(r["set"] for r in results):
        sides = {side: [r for r in results if r["set"] == name and r["side"] == side] for side in SIDES}
        seconds = {side: statistics.mean(r["seconds"] for r in found) for side, found in sides.items() if found}
        for metric in SETS[name]["metrics"]:
            cells = []
            for side in SIDES:
                values = [100 * r["metrics"][metric] for r in sides[side]]
                spread = f" +- {statistics.stdev(values):.1f}" if len(values) > 1 else ""
                cells.append(f"{statistics.mean(values):.1f}{spread}, {seconds[side]:.0f}" if values else "")
            shares = [
                f"{seconds['ours'] / seconds[side]:.2f}" if {"ours", side} <= seconds.keys() else ""
                for side in SIDES[1:]
            ]
            lines.append(f"| {name} | {metric} | " + " | ".join([*cells, *shares]) + " |")
    return lines


if __name__ == "__main__":
    main()
