"""The gate: an artifact is compared with PyTorch FP32 on real text, and is not published when it departs.

Compared are finiteness, the largest difference of a logit and where it is, the decisions, and the task's metric; on
rows alone, and padded to every bucket in batches of several sizes and mixed lengths. What is allowed is in
`export.tolerances`. `export.judge` adds what takes PyTorch, which this module does without.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Protocol

import numpy as np

from bertship.errors import CheckFailed, InputError
from bertship.progress import progress, to_stderr
from bertship.runners import OnnxRunner
from bertship.tasks import Task
from bertship.tasks.base import Logits
from bertship.tokenization import Row, pad
from bertship.triton_limits import PLAN_MAX_BATCH
from export.reference import Departure, Reference
from export.tolerances import METRIC_DROP, METRIC_EXAMPLES, NEIGHBOUR, TOLERANCES

BATCH_SIZES = (1, 3, 16, PLAN_MAX_BATCH)  # rows of a padded batch
UNTRACED_SHAPES = ((1, 1), (1, 7), (3, 33), (5, 128), (2, 512))  # exp.1: unlike the traced one
RANGE_ROWS = 32  # rows whose values between the nodes are looked at
ALONE = "alone"


class Engine(Protocol):
    """What is judged: an artifact behind the call of `bertship.runners`."""

    @property
    def outputs(self) -> Sequence[str]: ...

    def run(self, feeds: dict[str, np.ndarray]) -> list[np.ndarray]: ...

    def __call__(self, rows: Sequence[Row]) -> Logits: ...

    def close(self) -> None: ...


@dataclass
class Parity:
    """One artifact's comparison in one mode, and why it failed where it did."""

    precision: str
    engine: str  # what ran it
    mode: str  # rows "alone", "padded to" a bucket, or the model itself in "torch half"
    examples: int
    rows: int
    max_difference: float
    mean_difference: float
    where: str
    agreement: float
    metric: str
    reference_metric: float | None  # None where the text has no labels
    artifact_metric: float | None
    limits: dict[str, float]
    failures: list[str]
    batches: list[dict[str, Any]] = field(default_factory=list)  # rows and largest difference by length and batch size
    worst: dict[str, np.ndarray] = field(default_factory=dict)  # the feeds of the largest difference

    @property
    def passed(self) -> bool:
        return not self.failures

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN: a difference that is not finite is None."""
        values = dataclasses.asdict(dataclasses.replace(self, worst={}))
        del values["worst"]
        for facts in (values, *values["batches"]):
            for name, value in facts.items():
                if isinstance(value, float) and not isfinite(value):
                    facts[name] = None
        return {**values, "passed": self.passed}


@dataclass
class Padded:
    """Logits of padded batches, cut to each row's tokens, and the batch that each row was in."""

    logits: dict[str, list[Any]]
    batches: list[tuple[tuple[int, ...], int]]  # for each row its batch's rows and length

    def feeds(self, rows: Sequence[Row], w: int, pad_id: int) -> dict[str, np.ndarray]:
        chosen, length = self.batches[w]
        return pad([rows[i] for i in chosen], pad_id, length)


def run_padded(
    task: Task, engine: Engine, rows: Sequence[Row], pad_id: int, bucket: int, larger: Padded | None = None
) -> Padded:
    """Rows padded to `bucket`, longer ones to the next that they fit, in mixed batches of BATCH_SIZES in turn.

    `larger` is what the next bucket gave: the rows that are too long for this one are the same there.
    """
    specs = {spec.name: spec for spec in task.behaviour.logits(task)}
    lengths = [next(b for b in task.buckets if b >= max(len(row), bucket)) for row in rows]
    found: dict[str, list[Any]] = {name: [None] * len(rows) for name in engine.outputs}
    batches: list[tuple[tuple[int, ...], int]] = [((), 0)] * len(rows)
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    turn = 0
    for length in sorted(set(lengths)):
        group = [i for i in order if lengths[i] == length]
        if larger is not None and length > bucket:
            for i in group:
                batches[i] = larger.batches[i]
                for name in found:
                    found[name][i] = larger.logits[name][i]
            continue
        start = 0
        while start < len(group):
            chosen = group[start : start + BATCH_SIZES[turn % len(BATCH_SIZES)]]
            start, turn = start + len(chosen), turn + 1
            outputs = engine.run(pad([rows[i] for i in chosen], pad_id, length))
            for place, i in enumerate(chosen):
                batches[i] = (tuple(chosen), length)
                for name, output in zip(engine.outputs, outputs, strict=True):
                    tokenwise = specs[name].dims[0] == -1
                    found[name][i] = output[place, : len(rows[i])] if tokenwise else output[place]
    return Padded(found, batches)


def compare(reference: Reference, precision: str, engine: Engine, name: str) -> list[Parity]:
    """The artifact on rows padded to every bucket, and on rows alone; every mode has to pass."""
    buckets = sorted(set(reference.task.buckets), reverse=True)
    with progress(f"comparing {precision} on {name}", len(buckets) + 1, to_stderr, rated=False) as advance:
        return _compare(reference, precision, engine, name, buckets, advance)


def _compare(
    reference: Reference,
    precision: str,
    engine: Engine,
    name: str,
    buckets: Sequence[int],
    advance: Callable[[str], None],
) -> list[Parity]:
    task, rows, pad_id = reference.task, reference.rows, reference.tokenizer.pad_id
    found: list[Parity] = []
    larger: Padded | None = None
    for bucket in buckets:
        padded = run_padded(task, engine, rows, pad_id, bucket, larger)
        departure = reference.departure(padded.logits)
        result = assess(reference, precision, name, f"padded to {bucket}", padded.logits, departure)
        result.batches = _by_batch(padded, departure)
        result.worst = padded.feeds(rows, departure.worst, pad_id)
        found.insert(0, result)
        larger = padded
        advance(result.mode)
    logits = engine(rows)
    departure = reference.departure(logits)
    result = assess(reference, precision, name, ALONE, logits, departure)
    result.worst = pad([rows[departure.worst]], pad_id)
    advance(ALONE)
    return [*found, result]


def _by_batch(padded: Padded, departure: Departure) -> list[dict[str, Any]]:
    cells: dict[tuple[int, int], list[int]] = {}
    for w, (chosen, length) in enumerate(padded.batches):
        cells.setdefault((length, len(chosen)), []).append(w)
    return [
        {"tokens": length, "batch": size, "rows": len(ws), "max_difference": float(departure.by_row[ws].max())}
        for (length, size), ws in sorted(cells.items())
    ]


def assess(
    reference: Reference, precision: str, engine: str, mode: str, logits: Logits, departure: Departure
) -> Parity:
    """Hold logits against the precision's tolerances."""
    limits = TOLERANCES[precision]
    drop = max(METRIC_DROP, METRIC_EXAMPLES / len(reference.examples))
    failures = []
    agreement, score = 0.0, None if reference.score is None else 0.0
    if not np.isfinite(departure.largest):
        failures.append(f"not finite {departure.where}")
    else:
        answers = reference.decode(logits)
        agreement, score = reference.agreement(answers), reference.score_of(answers)
        if departure.largest > limits.max_difference:
            failures.append(
                f"a logit departs by {departure.largest:.2g} of the largest, {limits.max_difference:g} allowed, "
                f"{departure.where}"
            )
        if agreement < limits.agreement:
            failures.append(f"{agreement:.2%} of the decisions agree, {limits.agreement:.1%} needed")
        if score is not None and reference.score is not None and score < reference.score - drop:
            failures.append(f"{reference.metric} fell from {reference.score:.4f} to {score:.4f}, {drop:.4f} allowed")
    return Parity(
        precision,
        engine,
        mode,
        len(reference.examples),
        len(reference.rows),
        departure.largest,
        departure.mean,
        departure.where,
        agreement,
        reference.metric,
        reference.score,
        score,
        {"max_difference": limits.max_difference, "agreement": limits.agreement, "metric_drop": drop},
        failures,
    )


def check_shapes(engine: Engine, max_tokens: int) -> list[str]:
    """What goes wrong at shapes unlike the traced one, and with a fully padded row; an empty list when nothing does."""
    failures = []
    for batch, tokens in UNTRACED_SHAPES:
        tokens = min(tokens, max_tokens)
        feeds = {name: np.ones((batch, tokens), np.int64) for name in OnnxRunner.INPUTS}
        feeds["token_type_ids"][:] = 0
        others: list[list[np.ndarray]] = []
        for empty_row in (False, True):
            feeds["attention_mask"][0] = 0 if empty_row else 1
            case = f"{batch} x {tokens}{', one row all padding' if empty_row else ''}"
            try:
                outputs = engine.run(feeds)
            except Exception as error:  # ONNX Runtime's errors have no common base
                failures.append(f"shape {case} does not run: {str(error).splitlines()[0]}")
                continue
            if not all(np.isfinite(output).all() and output.shape[0] == batch for output in outputs):
                failures.append(f"shape {case} gives values that are not finite, or the wrong number of rows")
                continue
            others.append([output[1:] for output in outputs])
        if len(others) == 2 and not all(map(_close, *others)):
            failures.append(f"shape {batch} x {tokens}: a row of padding alone changes the rows beside it")
    return failures


def _close(wanted: np.ndarray, got: np.ndarray) -> bool:
    """Whether values agree as far as other kernels for another batch may round."""
    largest = max(float(np.abs(wanted).max(initial=0)), 1e-6)
    return bool((np.abs(got - wanted) <= NEIGHBOUR * largest).all())


def check_outputs(engine: Engine, task: Task) -> list[str]:
    """Outputs other than the task's: a graph returns its logits and nothing more."""
    wanted = [spec.name for spec in task.behaviour.logits(task)]
    return [] if list(engine.outputs) == wanted else [f"outputs are {list(engine.outputs)}, {wanted} are needed"]


def rows_of_all_lengths(rows: Sequence[Row], most: int = RANGE_ROWS) -> list[Row]:
    """At most `most` rows, evenly over their lengths."""
    by_length = sorted(rows, key=len)
    return [by_length[i] for i in np.unique(np.linspace(0, len(rows) - 1, most).round().astype(int))]


def judge_engine(
    reference: Reference,
    precision: str,
    name: str,
    open_engine: Callable[[], Engine],
    max_tokens: int,
    departing_layer: Callable[[dict[str, np.ndarray]], str] | None = None,
) -> list[Parity]:
    """Every comparison of one engine, which takes rows of up to `max_tokens`.

    Raises CheckFailed where it does not open, has other inputs or outputs, or does not run on the text.

    `departing_layer` finds the first layer that departs on a batch, where the engine can be looked into.
    """
    try:
        engine = open_engine()
    except InputError as error:
        raise CheckFailed(str(error)) from None
    try:
        if wrong := check_outputs(engine, reference.task):
            raise CheckFailed(wrong[0])
        found = compare(reference, precision, engine, name)
        if departing_layer is not None:
            for result in found:
                if result.failures:
                    result.failures[-1] += f"; the first to depart is {departing_layer(result.worst)}"
        found[0].failures += check_shapes(engine, max_tokens)
    except CheckFailed:
        raise
    except Exception as error:  # ONNX Runtime's errors have no common base
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckFailed(f"does not run: {reason}") from None
    finally:
        engine.close()
    return found


def reasons_of(results: Sequence[Parity]) -> str:
    """Why results failed, in one line; empty where none did."""
    return "; ".join(f"{r.precision} ({r.mode}): {failure}" for r in results for failure in r.failures)
