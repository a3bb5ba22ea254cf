"""Fine-tune a head with its encoder (Devlin et al. 2019, sections 3.2 and A.3), or on a frozen one (section 5.3).

While a training runs, its snapshots and log are in `NAME.training` beside its place; whatever ends it, an error, a
signal or the power, the same command goes on from the last snapshot. `NAME` appears when all is done, whole.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertship import artifacts
from bertship.config import FINETUNE_MACHINE_FIELDS, FinetuneConfig
from bertship.errors import InputError
from bertship.tasks import Example, Task
from train.checkpoint import save_model
from train.distributed import Processes, alone, device_name
from train.finetune_report import write_report
from train.finetune_start import Report
from train.finetune_training import Best, Training
from train.memory import kept_memory
from train.snapshots import link_tree
from train.watch import read_log

_MODULES = (
    *("attention", "bert_adam", "checkpoint", "dropout", "features", "finetune", "finetune_batches"),
    *("finetune_learner", "finetune_start", "finetune_training", "heads", "losses", "model", "optim"),
    *("scoring", "used_pieces", "value_scale"),
)
_CODE = (
    *("bertship/metrics.py", "bertship/tasks/*.py", "bertship/tokenization.py"),
    *(f"train/{name}.py" for name in _MODULES),
)


def recipe_of(
    task: Task, init: Path, config: FinetuneConfig, train: Sequence[Example], dev: Sequence[Example]
) -> dict[str, Any]:
    """All but the code that decides what is learnt; an interrupted training goes on under an equal one alone."""
    return {
        "task": json.loads(task.to_json()),
        "init": {path.name: artifacts.sha256_file(path) for path in sorted(init.iterdir()) if path.is_file()},
        "finetune": config.model_dump(mode="json", exclude=set(FINETUNE_MACHINE_FIELDS)),
        "data": artifacts.sha256_json(
            [[dict(e.columns), e.target] for examples in (train, dev) for e in examples] + [len(train)]
        ),
    }


def code_of() -> str:
    """Hash of the source files that a result depends on."""
    return artifacts.code_digest(Path(__file__).parents[1], _CODE)


def fingerprint_of(
    task: Task, init: Path, config: FinetuneConfig, train: Sequence[Example], dev: Sequence[Example]
) -> str:
    """Changes when anything that the run's result depends on does."""
    return _fingerprint(recipe_of(task, init, config, train, dev), code_of())


def _fingerprint(recipe: Mapping[str, Any], code: str) -> str:
    return artifacts.sha256_json([recipe, code])


def with_features(task: Task, config: FinetuneConfig) -> Task:
    """The task with the head that `config` asks for."""
    return dataclasses.replace(task, layers=config.layers, top=config.head)


def finetune(
    task: Task,
    init: Path,
    out: Path,
    config: FinetuneConfig,
    train: Sequence[Example],
    dev: Sequence[Example],
    report: Report,
    init_name: str = "",
    data: str | None = None,
    more: Mapping[str, Sequence[Example]] | None = None,
    init_task: str = "",
    restart: bool = False,
    processes: Processes | None = None,
) -> dict[str, Any]:
    """Train `task` from the model directory `init`, evaluate on `dev`, publish the run at `out`.

    `init_name` and `data` are what a person called the warm start and the data's folder; export and evaluation look
    for the dev split there again. `more`: further labelled splits to evaluate, by the prefix of their metrics.
    `init_task`: the task that the warm start was fine-tuned on before. `restart` forgets an interrupted training
    instead of going on with it. `processes`: those of `train.distributed.join`, all of which call this; None is this
    one alone. The run holds `model/` (Hugging Face layout), `task.json`, `metrics.jsonl` (one object an update, one an
    evaluation), `report.html` and `manifest.json`, which is returned.

    On one machine, equal inputs, seed, processes and threads give equal losses and weights, interrupted or not.
    Raises InputError for unfit input, also where an interrupted training has other settings or another process trains
    for the same run, and CheckFailed when training diverges; then nothing is published.
    """
    if task.behaviour.needs_labels and not task.labels:
        raise InputError(f"task {task.name} has no labels")
    processes = processes or alone()
    facts = {
        "init": init_name or str(init),
        "init_task": init_task,
        "data": _place(data),
        "task_file": _place(task.source or None),
        "train_examples": len(train),
        "dev_examples": len(dev),
        "dev_share": task.files.dev_share or None,
    }
    task = with_features(task, config)
    say: Report = report if processes.main else lambda line: None
    recipe, code = recipe_of(task, init, config, train, dev), code_of()
    with kept_memory(), contextlib.ExitStack() as stack:
        training = Training(task, init, out, config, train, dev, say, recipe, code, restart, processes, stack)
        best, metrics = training.run(more or {})
        if processes.main:
            _publish(training, out, best, metrics, facts)
        training.forget()
        processes.wait()
    return artifacts.read_manifest(out, "finetune")


def _publish(training: Training, out: Path, best: Best, metrics: Mapping[str, float], facts: Mapping[str, Any]) -> None:
    task, config, done, dev = best.task, training.config, training.done, training.dev
    assert best.answers is not None
    degenerate = task.behaviour.degenerate(task, dev, best.answers)
    if degenerate:
        training.report(
            f"WARNING: a degenerate run (seed {config.seed}): {degenerate}; try another SEED or learning rate"
        )
    measured = {
        **metrics,
        "best_step": best.step,
        "updates": done.update,
        "epochs_run": round(training.epochs_of(done.update), 2),
        "train_seconds": round(done.seconds, 1),
        "tokens_per_second": round(done.tokens / done.seconds) if done.seconds else 0,
        "padding_share": round(1 - done.tokens / max(done.computed, 1), 4),
        "skipped_updates": done.skipped,
    }
    with artifacts.publish(out) as staging:
        (staging / "model").mkdir()
        save_model(training.model, training.tokenizer, staging / "model", task.labels, **task.behaviour.config)
        (staging / "task.json").write_text(task.to_json(), encoding="utf-8")
        link_tree(training.log_path, staging / "metrics.jsonl")
        history = read_log(training.log_path)
        write_report(
            staging / "report.html", task, config, dev, best.answers, metrics, facts, measured, history, degenerate
        )
        artifacts.write_manifest(
            staging,
            "finetune",
            fingerprint=_fingerprint(training.recipe, training.code),
            config=config.model_dump(),
            inputs=facts,
            metrics=measured,
            task=task.name,
            degenerate=degenerate,
            device=device_name(training.processes.device),
            processes=training.processes.count,
        )


def _place(data: str | None) -> str | None:
    """The data's folder from anywhere; a name on the hub stays one."""
    return os.path.normpath(Path(data).absolute()) if data and Path(data).exists() else data
