"""Many runs of one task: the paper's grid, several seeds; what they spread over, and which of them learnt nothing.

(Devlin et al. 2019, section A.3, names the grid. Small sets have seeds from which training fails: Mosbach et al. 2021.)
"""

import glob
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertship.artifacts import publish, read_manifest, versions, write_manifest, write_text
from bertship.next_steps import next_steps
from bertship.report import Report as Page
from bertship.tasks import Task
from train.distributed import Processes, alone
from train.finetune_report import training_command
from train.training_data import Report, TrainingData, init_task_of, read_training_data

GRID: dict[str, Sequence[Any]] = {
    "batch_size": (16, 32),
    "learning_rate": (5e-5, 3e-5, 2e-5),
    "epochs": (2.0, 3.0, 4.0),
}


def make_sweep(
    task: Task,
    init: tuple[Path, str],
    out: Path,
    data: str | None,
    settings: Mapping[str, Any],
    grid: bool,
    seeds: int,
    report: Report,
    force: bool = False,
    processes: Processes | None = None,
) -> dict[str, Any]:
    """Run every point of the paper's grid (or the one that `settings` say) with `seeds` seeds, from the set seed on.

    The best run on the dev split, degenerate ones apart, becomes `out`. `out`.sweep holds `results.jsonl`, a line a
    run as soon as it ends, so that an interrupted sweep goes on where it stopped, in the midst of a run too;
    `report.html` and `manifest.json`, which is returned. A field in `settings` is not swept. `processes`: all of them
    call this. Raises InputError.
    """
    processes = processes or alone()
    with processes.main_first():
        found = read_training_data(task, data, settings, report)
    points = [
        dict(zip(names, values, strict=True))
        for names in [[name for name in GRID if grid and name not in settings]]
        for values in itertools.product(*(GRID[name] for name in names))
    ]
    journal = out.with_name(f".{out.name}.sweep-results.jsonl")
    if force and processes.main:
        journal.unlink(missing_ok=True)
        _remove_candidates(out)
    processes.wait()
    known = _read(journal)
    results = []
    best: dict[str, Any] | None = None
    runs = [{**point, "seed": found.config.seed + k} for point in points for k in range(seeds)]
    for number, changes in enumerate(runs, 1):
        data_of_run = found.changed(changes)
        fingerprint = data_of_run.fingerprint(init[0])
        report(f"run {number} of {len(runs)}: {', '.join(f'{name} {value:g}' for name, value in changes.items())}")
        result = known.get(fingerprint)
        # a known result without its model counts again, unless it is the best: then it has to be there
        needed = result is None or (_better(result, best, task) and _model_of(out) != fingerprint)
        if processes.agree("needed" if needed else ""):
            candidate = _candidate(out, fingerprint)
            result = _run(data_of_run, init, candidate, fingerprint, changes, report, processes)
            known[fingerprint] = result
            if processes.main:
                write_text(journal, "".join(json.dumps(r) + "\n" for r in known.values()))
                if _better(result, best, task):
                    _keep(candidate, out)
        else:
            assert result is not None
            report("known from before")
        if _better(result, best, task):
            best = result
        results.append(result)
        processes.wait()  # all have read the run
        if processes.main:
            shutil.rmtree(_candidate(out, fingerprint), ignore_errors=True)
    assert best is not None
    summary = summarise(task, results)
    summary |= {"best": best, "init": init[1], "init_task": init_task_of(init[0])}
    if processes.main:
        options = [*(["--sweep"] if grid else []), *([f"--seeds {seeds}"] if seeds > 1 else [])]
        _publish(task, out, found, init[1], summary, results, options)
        journal.unlink()
        _remove_candidates(out)  # what other settings began and never ended
    processes.wait()
    return read_manifest(out.with_name(f"{out.name}.sweep"), "sweep")


def _publish(
    task: Task,
    out: Path,
    found: TrainingData,
    init: str,
    summary: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    options: Sequence[str],
) -> None:
    with publish(out.with_name(f"{out.name}.sweep")) as staging:
        (staging / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in results), encoding="utf-8")
        inputs = {"init": init, "data": found.data, "task_file": task.source}
        again = " ".join([training_command(task, found.config, inputs, out), *options])
        page = _page(task, found, summary, results)
        page.command("Reproduce", again)
        page.command("Next", *next_steps("finetune", out))
        page.write(staging / "report.html")
        write_manifest(
            staging,
            "sweep",
            config=found.config.model_dump(),
            inputs={"init": init},
            metrics=summary,
            task=task.name,
        )


def summarise(task: Task, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each metric: mean, sample standard deviation, least and most over the runs that learnt; and how many did not.

    Degenerate runs are counted and named, and the mean over all runs is given beside.
    """
    learnt = [r for r in results if not r["degenerate"]]
    summary: dict[str, Any] = {
        "runs": len(results),
        "degenerate_runs": [{"changes": r["changes"], "reason": r["degenerate"]} for r in results if r["degenerate"]],
    }
    for metric in task.metrics:
        values = [r["metrics"][metric] for r in learnt]
        summary[metric] = {
            "mean": float(np.mean(values)) if values else None,
            "standard_deviation": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0,
            "least": min(values, default=None),
            "most": max(values, default=None),
            "mean_with_degenerate": float(np.mean([r["metrics"][metric] for r in results])),
        }
    return summary


def lines(manifest: Mapping[str, Any]) -> list[str]:
    """The summary for people."""
    summary = manifest["metrics"]
    degenerate = summary["degenerate_runs"]
    said = [f"{summary['runs']} runs, {len(degenerate)} degenerate, started from {summary['init']}"]
    if summary["init_task"]:
        said.append(f"started from a model of {summary['init_task']}: not comparable with runs that did not")
    for name, values in summary.items():
        if isinstance(values, dict) and values.get("mean") is not None:
            said.append(
                f"  {name:<20} {values['mean']:.4f} +- {values['standard_deviation']:.4f} "
                f"({values['least']:.4f} to {values['most']:.4f})"
            )
    said += [f"  degenerate: {_named(run['changes'])}: {run['reason']}" for run in degenerate]
    return [*said, f"  best: {_named(summary['best']['changes'])}"]


def _named(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in changes.items())


def _run(
    data: TrainingData,
    init: tuple[Path, str],
    out: Path,
    fingerprint: str,
    changes: Mapping[str, Any],
    report: Report,
    processes: Processes,
) -> dict[str, Any]:
    manifest = data.finetune(init, out, report, processes=processes)
    return {
        "fingerprint": fingerprint,
        "changes": dict(changes),
        "metrics": manifest["metrics"],
        "degenerate": manifest["degenerate"],
    }


def _better(result: Mapping[str, Any], best: Mapping[str, Any] | None, task: Task) -> bool:
    """A run that learnt beats one that did not; of two such the first metric decides, the earlier on a tie."""
    if best is None:
        return True
    metric = task.metrics[0]
    return (not result["degenerate"], result["metrics"][metric]) > (not best["degenerate"], best["metrics"][metric])


def _model_of(out: Path) -> str:
    return str(read_manifest(out).get("fingerprint", "")) if (out / "manifest.json").is_file() else ""


def _candidate(out: Path, fingerprint: str) -> Path:
    """Where a run is made: each has a place of its own, so that an interrupted one goes on as none but itself."""
    return out.with_name(f"{out.name}.candidate-{fingerprint[:12]}")


def _remove_candidates(out: Path) -> None:
    for folder in out.parent.glob(f"{glob.escape(out.name)}.candidate-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _keep(candidate: Path, out: Path) -> None:
    with publish(out) as staging:
        shutil.copytree(candidate, staging, dirs_exist_ok=True)


def _read(journal: Path) -> dict[str, dict[str, Any]]:
    if not journal.is_file():
        return {}
    found = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    return {result["fingerprint"]: result for result in found}


def _page(
    task: Task,
    found: TrainingData,
    summary: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
) -> Page:
    metric = task.metrics[0]
    values = summary[metric]
    page = Page(
        f"{task.name}: {summary['runs']} runs",
        f"{len(found.train):,} training and {len(found.dev):,} dev examples, started from {summary['init']}.",
    )
    degenerate = summary["degenerate_runs"]
    said = f"{len(degenerate)} of {summary['runs']} runs were degenerate."
    if values["mean"] is not None:
        said = f"{metric} {values['mean']:.4f} +- {values['standard_deviation']:.4f} (mean and deviation). {said}"
    if summary["init_task"]:
        said += f" They started from a model of {summary['init_task']}: not comparable with runs that did not."
    page.text("Conclusion", said, "The best run was chosen on the dev split, so its own dev metric is flattering.")
    names = list(results[0]["changes"])
    page.table(
        "Runs",
        (*names, *task.metrics, "training, s", "degenerate"),
        [
            (
                *(f"{r['changes'][name]:g}" for name in names),
                *(r["metrics"][m] for m in task.metrics),
                r["metrics"]["train_seconds"],
                r["degenerate"],
            )
            for r in results
        ],
    )
    page.facts(
        "Summary", {name: value for name, value in summary.items() if isinstance(value, dict) and name != "best"}
    )
    page.facts("Settings of all", found.config.model_dump())
    page.facts("Versions", versions())
    return page
