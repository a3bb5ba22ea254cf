"""What a TensorRT plan takes, as the repository's configuration has to promise it.

The facts come from the export's manifest, where the engine's builder wrote them; before there is a plan, from the
task's defaults, which the builder follows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bertship.errors import InputError, seen
from bertship.runners import OnnxRunner
from bertship.tasks.base import Task
from bertship.triton_limits import PLAN_MAX_BATCH

PLAN_FILE = "model.plan"  # its name in the repository
MAX_BUCKETS = 3  # the batcher merges equal shapes only, so every further bucket makes batches smaller
REBUILD = "build the plan again"


@dataclass(frozen=True)
class Plan:
    """A plan's promises: rows of one execution, row lengths in tokens, and the number of its optimization profiles.

    `input_types` maps each input's name to its Triton data type; `file` is the plan's name in the export.
    """

    max_batch: int
    buckets: tuple[int, ...]
    profiles: int
    input_types: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(OnnxRunner.INPUTS, "INT64"))
    file: str = PLAN_FILE


def default_plan(task: Task) -> Plan:
    """What the builder makes of the task where nothing else is asked for."""
    return Plan(PLAN_MAX_BATCH, task.buckets, len(task.buckets))


def plan_of(manifest: Mapping[str, Any], task: Task, precision: str | None = None) -> Plan | None:
    """The plan that an export's manifest describes, None where it has none that Triton loads.

    `manifest["plans"]` maps a precision to facts: `module`, `file`, `inputs`, `outputs` (names, or names with their
    types) and `profiles`, each with `smallest`, `usual` and `largest` (rows, tokens). Taken is the plan of `precision`
    where there is one, else the one that the export found best, else the first. Raises InputError where it could not
    keep what the configuration would promise.
    """
    plans = {
        name: facts
        for name, facts in (manifest.get("plans") or {}).items()
        if facts.get("module", "tensorrt") == "tensorrt"
    }
    best = (manifest.get("best") or {}).get("precision")
    chosen = next((name for name in (precision, best, *plans) if name in plans), None)
    return None if chosen is None else read_plan(plans[chosen], task)


def read_plan(facts: Mapping[str, Any], task: Task) -> Plan:
    """The facts as promises, held against the task. Raises InputError."""
    where = f"{facts.get('file', PLAN_FILE)} of {task.name}"
    inputs, outputs = _types(facts.get("inputs"), "INT64"), _types(facts.get("outputs"), "FP32")
    if set(inputs) != set(OnnxRunner.INPUTS) or not set(inputs.values()) <= {"INT32", "INT64"}:
        raise InputError(
            f"{where}: its inputs are {_shown(inputs)}; {', '.join(OnnxRunner.INPUTS)}, INT64 or INT32, are needed: "
            f"{REBUILD}"
        )
    wanted = {spec.name: spec.datatype for spec in task.behaviour.logits(task)}
    if outputs != wanted:
        raise InputError(f"{where}: its outputs are {_shown(outputs)}; {_shown(wanted)} are needed: {REBUILD}")
    profiles = facts.get("profiles") or []
    try:
        shapes = [[tuple(map(int, profile[name])) for name in ("smallest", "largest")] for profile in profiles]
        bounds = [(rows, tokens) for rows, tokens in (shape for pair in shapes for shape in pair)]
    except (KeyError, TypeError, ValueError):
        raise InputError(
            f"{where}: its profiles are {seen(profiles, 100)}; (rows, tokens) are needed: {REBUILD}"
        ) from None
    if not bounds:
        raise InputError(f"{where}: it lists no profile: {REBUILD}")
    buckets = tuple(sorted({tokens for _, (_, tokens) in shapes}))
    if len(buckets) > MAX_BUCKETS:
        raise InputError(f"{where}: rows of {_listed(buckets)} tokens are too many buckets; {MAX_BUCKETS} are allowed")
    if buckets[-1] < task.max_tokens:
        raise InputError(
            f"{where}: its longest rows have {buckets[-1]} tokens, the task's have up to {task.max_tokens}: {REBUILD}"
        )
    for (fewest, shortest), (_, longest) in shapes:
        if fewest > 1 or shortest > longest:
            raise InputError(
                f"{where}: a profile begins at {fewest} rows of {shortest} tokens; a single row of {longest} tokens "
                f"has to fit: {REBUILD}"
            )
    most = min(rows for _, (rows, _) in shapes)
    return Plan(most, buckets, len(shapes), inputs, str(facts.get("file", PLAN_FILE)))


def _types(given: Mapping[str, str] | Sequence[str] | None, usual: str) -> dict[str, str]:
    if isinstance(given, Mapping):
        return {str(name): str(kind).upper().removeprefix("TYPE_") for name, kind in given.items()}
    return dict.fromkeys(given or (), usual)


def _shown(types: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in sorted(types.items())) or "none"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
