"""`demo`, and from documents and labels to a fine-tuned model."""

from pathlib import Path
from typing import Annotated, Any

import typer

from bertship.commands.options import (
    RUNS,
    BringOption,
    DataOption,
    ForceOption,
    InitOption,
    NameOption,
    PresetOption,
    RunsOption,
    SetOption,
    TaskOption,
    get_task,
    parse_settings,
    plain_name,
)
from bertship.console import load, metric_lines, report, show


def demo(
    runs: RunsOption = RUNS,
    force: ForceOption = False,
) -> None:
    """The whole line on real text, in minutes.

    Corpus, pre-training, fine-tuning, export, the real Triton server, questions over HTTP and gRPC.
    """
    from bertship.demo import run_demo, summary_lines

    result = run_demo(runs / "demo", force)
    show(result, summary_lines(result))


def corpus(
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="Files, folders, globs, URLs or hub:NAME data sets; a Wikipedia sample if none."),
    ] = None,
    runs: RunsOption = RUNS,
    name: NameOption = "default",
    settings: SetOption = None,
    force: ForceOption = False,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=0, help="Tokenizing processes; one a core, four at most, if not given."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="A directory with a tokenizer, in place of a new vocabulary.")
    ] = None,
) -> None:
    """Documents to tokens: runs/corpus/NAME.

    Sentences, a WordPiece vocabulary, and ids in memory-mapped files. An interrupted build goes on where it was.
    """
    out = runs / "corpus" / name
    make = load("train.corpus:make_corpus")
    manifest = make(sources or [], out, parse_settings(settings), report, force, workers, tokenizer)
    show(manifest, [str(out), *metric_lines(manifest["metrics"])])


def pretrain(
    preset: PresetOption = "tiny",
    corpus_name: Annotated[
        str, typer.Option("--corpus", help="The corpus run's name.", callback=plain_name)
    ] = "default",
    runs: RunsOption = RUNS,
    name: NameOption = "default",
    settings: SetOption = None,
    force: ForceOption = False,
    bring: BringOption = False,
) -> None:
    """A BERT from scratch: runs/pretrain/NAME.

    Masked LM + next sentence prediction on a corpus, with a held-out evaluation before and after.
    """
    source = runs / "corpus" / corpus_name
    if bring and not source.is_dir():
        load("train.stages:make_corpus")([], source, {}, report)
    out = runs / "pretrain" / name
    manifest = load("train.stages:make_pretraining")(source, out, preset, parse_settings(settings), report, force)
    show(manifest, [str(out), *metric_lines(manifest["metrics"])])


def finetune(
    task: TaskOption = "sst2",
    init: InitOption = "",
    preset: PresetOption = "tiny",
    data: DataOption = None,
    runs: RunsOption = RUNS,
    name: NameOption = "default",
    settings: SetOption = None,
    force: ForceOption = False,
) -> None:
    """A task on a warm start: runs/finetune/TASK/NAME."""
    out, manifest = run_finetuning(task, init, preset, data, runs, name, parse_settings(settings), force)
    show(manifest, [str(out), *metric_lines(manifest["metrics"])])


def evaluate(
    task: TaskOption = "sst2",
    data: DataOption = None,
    runs: RunsOption = RUNS,
    name: NameOption = "default",
) -> None:
    """A run's metrics on the dev split."""
    definition = get_task(task)
    run = runs / "finetune" / definition.name / name
    metrics = load("train.stages:make_evaluation")(definition, run, data, report)
    show({"task": definition.name, "run": str(run), "metrics": metrics}, metric_lines(metrics))


def run_finetuning(
    task: str, init: str, preset: str, data: str | None, runs: Path, name: str, settings: dict[str, str], force: bool
) -> tuple[Path, dict[str, Any]]:
    definition = get_task(task)
    start = load("train.stages:find_init")(init, runs, preset, report)
    out = runs / "finetune" / definition.name / name
    manifest = load("train.stages:make_finetuning")(definition, start, out, data, settings, report, force)
    return out, manifest
