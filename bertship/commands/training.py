"""`demo`, and from documents and labels to a fine-tuned model."""

import os
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
    TaskToTrainOption,
    find_task,
    need_run,
    parse_settings,
    plain_name,
    task_to_train,
)
from bertship.console import load, metric_lines, report, show
from bertship.next_steps import ending
from bertship.shell import shown
from bertship.tasks.base import Task


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
    show(manifest, [str(out), *metric_lines(manifest["metrics"]), *ending("corpus", out)])


def pretrain(
    preset: PresetOption = "tiny",
    corpus_name: Annotated[
        str, typer.Option("--corpus", help="The corpus run's name.", callback=plain_name)
    ] = "default",
    runs: RunsOption = RUNS,
    name: NameOption = "default",
    settings: SetOption = None,
    force: ForceOption = False,
    init: InitOption = "",
    bring: BringOption = False,
) -> None:
    """A BERT from scratch, or from --init on: runs/pretrain/NAME.

    Masked LM + next sentence prediction on a corpus, with held-out evaluations. Interrupted, the same command goes on
    from the last checkpoint. Under torchrun, one process a GPU.
    """
    source = runs / "corpus" / corpus_name
    if bring and not source.is_dir():
        load("train.stages:make_corpus")([], source, {}, report)
    out = runs / "pretrain" / name
    make_pretraining = load("train.stages:make_pretraining")
    manifest = make_pretraining(source, out, preset, parse_settings(settings), report, force, init)
    if os.environ.get("RANK", "0") == "0":  # torchrun's other processes have the same result
        show(manifest, [str(out), *metric_lines(manifest["metrics"]), *ending("pretrain", out)])


def params(
    preset: Annotated[str, typer.Argument(help="A size (tiny, mini, ..., large), or a .toml file.")] = "base",
    vocab_size: Annotated[int, typer.Option(help="Pieces of the vocabulary.")] = 30522,
) -> None:
    """How many parameters a preset has: the estimate V x H + L x 12 H^2, and the exact counts."""
    counts = load("train.stages:count_preset")(preset, vocab_size)
    show(counts, [f"{name:<24} {value:>15,}" for name, value in counts.items() if isinstance(value, int)])


def finetune(
    task: TaskToTrainOption = "sst2",
    init: InitOption = "",
    preset: PresetOption = "tiny",
    data: DataOption = None,
    runs: RunsOption = RUNS,
    name: NameOption = "default",
    settings: SetOption = None,
    force: ForceOption = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Try the paper's grid; the best run is kept.")] = False,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs that differ in their seed alone.")] = 1,
) -> None:
    """A task on a warm start: runs/finetune/TASK/NAME.

    With --sweep or --seeds many runs are made; their mean, spread and degenerate ones are in NAME.sweep, the best one
    is NAME. A start from another task's model is a run of its own, NAME-from-TASK. Interrupted, the same command goes
    on from the last snapshot. Under torchrun, one process a GPU.
    """
    changes = parse_settings(settings)
    out, manifest = run_finetuning(task, init, preset, data, runs, name, changes, force, sweep, seeds)
    many = manifest["stage"] == "sweep"
    if many:
        said = [
            *load("train.sweep:lines")(manifest),
            f"report: {shown(out.with_name(f'{out.name}.sweep'))}/report.html",
        ]
    else:
        said = metric_lines(manifest["metrics"], notes=_notes(out))
    said = [str(out), *said, *ending("finetune", out)]
    if os.environ.get("RANK", "0") == "0":  # torchrun's other processes have the same result
        show(manifest, said)


def evaluate(
    task: TaskOption = "sst2",
    data: DataOption = None,
    runs: RunsOption = RUNS,
    name: NameOption = "default",
) -> None:
    """A run's metrics on the dev split, and on what other labelled splits there are.

    runs/evaluate/TASK/NAME gets report.html and what others' scripts read: SQuAD predictions, n-best lists and null
    odds, CoNLL columns.
    """
    definition = find_task(task, runs)
    run = runs / "finetune" / definition.name / name
    need_run(run, definition)
    out = runs / "evaluate" / definition.name / name
    metrics = load("train.stages:make_evaluation")(definition, run, data, report, out)
    result = {"task": definition.name, "run": str(run), "written": str(out), "metrics": metrics}
    show(result, [*metric_lines(metrics, notes=_notes(run)), str(out), f"report: {shown(out / 'report.html')}"])


def _notes(run: Path) -> dict[str, str]:
    """What a run's metrics are of, where their names leave that open."""
    task = Task.from_file(run / "task.json")
    return {name: task.behaviour.metric_note(task, name) for name in task.metrics}


def run_folder(runs: Path, task: str, name: str, init: Path) -> Path:
    """Where a run goes: one that starts from another task's model is kept apart."""
    before = load("train.training_data:init_task_of")(init)
    return runs / "finetune" / task / (f"{name}-from-{before}" if before and before != task else name)


def run_finetuning(
    task: str,
    init: str,
    preset: str,
    data: str | None,
    runs: Path,
    name: str,
    settings: dict[str, str],
    force: bool,
    sweep: bool = False,
    seeds: int = 1,
) -> tuple[Path, dict[str, Any]]:
    """One run, or many for a sweep or seeds, by all processes that torchrun started; where it is, and its manifest."""
    definition = task_to_train(task, runs)
    with load("train.distributed:join")() as processes:
        say = report if processes.main else lambda line: None
        with processes.main_first():
            start = load("train.stages:find_init")(init, runs, preset, say)
        out = run_folder(runs, definition.name, name, start[0])
        if sweep or seeds > 1:
            make_sweep = load("train.sweep:make_sweep")
            manifest = make_sweep(definition, start, out, data, settings, sweep, seeds, say, force, processes)
        else:
            make_finetuning = load("train.stages:make_finetuning")
            manifest = make_finetuning(definition, start, out, data, settings, say, force, processes)
    return out, manifest
