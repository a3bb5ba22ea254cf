"""The gate: an artifact is compared with PyTorch FP32 on real text, and is not published when it departs.

Compared are finiteness, the largest difference of a logit and where it is, the decisions, and the task's metric; on
padded batches of mixed lengths and on rows alone.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from bertship.errors import CheckFailed, InputError
from bertship.pipeline import Runner
from bertship.runners import OnnxRunner, available_threads
from bertship.tasks import Example, Task
from bertship.tasks.base import Answers, Logits, read_options, row_table
from bertship.tokenization import Row, Tokenizer, pad
from export.precision import PRECISIONS, Precision
from train.evaluate import columns_of

BATCH_SIZES = (1, 3, 16)  # rows of a padded batch
UNTRACED_SHAPES = ((1, 1), (1, 7), (3, 33), (5, 128), (2, 512))  # exp.1: unlike the traced one
METRIC_DROP = 0.005  # of a share; or two examples, whichever is more
MAX_EXAMPLES = 500
RANGE_ROWS = 32  # rows whose values between the nodes are looked at


@dataclass
class Parity:
    """One artifact's comparison, and why it failed where it did."""

    precision: str
    mode: str  # "padded" batches, or rows "alone"
    examples: int
    rows: int
    max_difference: float
    mean_difference: float
    where: str
    agreement: float
    metric: str
    reference_metric: float
    artifact_metric: float
    limits: dict[str, float]
    failures: list[str]

    @property
    def passed(self) -> bool:
        return not self.failures

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "passed": self.passed}


class Reference:
    """Real text of a task with what PyTorch FP32 says to it; made once, held against every artifact."""

    def __init__(self, task: Task, tokenizer: Tokenizer, runner: Runner, examples: Sequence[Example]) -> None:
        """`examples` beyond MAX_EXAMPLES are thinned out evenly over their lengths. Raises InputError for none."""
        if not examples:
            raise InputError(f"the parity gate of {task.name} needs examples; give DATA=")
        self.task, self.tokenizer = task, tokenizer
        self.examples = spread(examples, MAX_EXAMPLES)
        self.columns = columns_of(task, self.examples, annotations=True)
        self.rows = task.behaviour.encode(task, tokenizer, self.columns).rows
        self.logits = runner(self.rows)
        self.answers = self.decode(self.logits)
        self.metric = task.metrics[0]
        self.score = self._score(self.answers)

    def decode(self, logits: Logits) -> Answers:
        table = row_table(self.task.behaviour, self.rows)
        options = read_options(self.task, None)
        return self.task.behaviour.decode(self.task, self.columns, table, logits, options)

    def _score(self, answers: Answers) -> float:
        return self.task.behaviour.score(self.task, self.examples, answers)[self.metric]

    def compare(self, precision: str, runner: OnnxRunner) -> list[Parity]:
        """The artifact on padded batches and on rows alone; every mode has to pass."""
        padded = run_padded(self.task, runner, self.rows, self.tokenizer.pad_id)
        return [
            self._judge(precision, mode, logits) for mode, logits in (("padded", padded), ("alone", runner(self.rows)))
        ]

    def _judge(self, precision: str, mode: str, logits: Logits) -> Parity:
        limits = PRECISIONS[precision]
        failures = []
        largest, mean, where = self._difference(logits)
        if not np.isfinite(largest):
            failures.append(f"not finite {where}")
            agreement = score = 0.0
        else:
            answers = self.decode(logits)
            decisions = self.task.behaviour.decisions
            pairs = list(zip(decisions(self.answers), decisions(answers), strict=True))
            agreement = sum(a == b for a, b in pairs) / len(pairs)
            score = self._score(answers)
            failures += self._failures(limits, largest, where, agreement, score)
        return Parity(
            precision,
            mode,
            len(self.examples),
            len(self.rows),
            largest,
            mean,
            where,
            agreement,
            self.metric,
            self.score,
            score,
            {"max_difference": limits.max_difference, "agreement": limits.agreement, "metric_drop": self.metric_drop},
            failures,
        )

    @property
    def metric_drop(self) -> float:
        return max(METRIC_DROP, 2 / len(self.examples))

    def _failures(self, limits: Precision, largest: float, where: str, agreement: float, score: float) -> list[str]:
        failures = []
        if largest > limits.max_difference:
            failures.append(
                f"a logit departs by {largest:.2g} of the largest, {limits.max_difference:g} allowed, {where}"
            )
        if agreement < limits.agreement:
            failures.append(f"{agreement:.2%} of the decisions agree, {limits.agreement:.1%} needed")
        if score < self.score - self.metric_drop:
            failures.append(f"{self.metric} fell from {self.score:.4f} to {score:.4f}, {self.metric_drop:.4f} allowed")
        return failures

    def _difference(self, logits: Logits) -> tuple[float, float, str]:
        """Largest and mean difference as shares of the reference's largest magnitude, and the largest one's place."""
        largest, total, count, where = -1.0, 0.0, 0, ""
        for name, rows in self.logits.items():
            scale = max(float(np.abs(row).max()) for row in rows)
            for w, (wanted, got) in enumerate(zip(rows, logits[name], strict=True)):
                difference = np.abs(np.asarray(got, np.float64) - wanted) / scale
                if not np.isfinite(difference).all():
                    return (
                        float("nan"),
                        float("nan"),
                        self._place(name, w, int(np.flatnonzero(~np.isfinite(difference))[0])),
                    )
                total, count = total + float(difference.sum()), count + difference.size
                if difference.max() > largest:
                    largest, where = float(difference.max()), self._place(name, w, int(difference.argmax()))
        return largest, total / count, where

    def _place(self, name: str, w: int, index: int) -> str:
        return f"in {name}, element {index}, of {self.examples[self.rows[w].owner].where or f'row {w}'}"


def run_padded(task: Task, runner: OnnxRunner, rows: Sequence[Row], pad_id: int) -> Logits:
    """Rows in padded batches of mixed lengths, every size of BATCH_SIZES in turn; logits cut to each row's tokens."""
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    found: dict[str, list[Any]] = {name: [None] * len(rows) for name in runner.outputs}
    start = turn = 0
    specs = {spec.name: spec for spec in task.behaviour.logits(task)}
    while start < len(rows):
        chosen = order[start : start + BATCH_SIZES[turn % len(BATCH_SIZES)]]
        start, turn = start + len(chosen), turn + 1
        outputs = runner.run(pad([rows[i] for i in chosen], pad_id))
        for name, output in zip(runner.outputs, outputs, strict=True):
            for place, i in enumerate(chosen):
                tokenwise = specs[name].dims[0] == -1
                found[name][i] = output[place, : len(rows[i])] if tokenwise else output[place]
    return found


def check_shapes(runner: OnnxRunner, max_tokens: int) -> list[str]:
    """What goes wrong at shapes unlike the traced one, and with a fully padded row; an empty list when nothing does."""
    failures = []
    for batch, tokens in UNTRACED_SHAPES:
        tokens = min(tokens, max_tokens)
        feeds = {name: np.ones((batch, tokens), np.int64) for name in OnnxRunner.INPUTS}
        feeds["token_type_ids"][:] = 0
        for empty_row in (False, True):
            feeds["attention_mask"][0] = 0 if empty_row else 1
            case = f"{batch} x {tokens}{', one row all padding' if empty_row else ''}"
            try:
                outputs = runner.run(feeds)
            except Exception as error:  # ONNX Runtime's errors have no common base
                failures.append(f"shape {case} does not run: {str(error).splitlines()[0]}")
                continue
            if not all(np.isfinite(output).all() and output.shape[0] == batch for output in outputs):
                failures.append(f"shape {case} gives values that are not finite, or the wrong number of rows")
    return failures


def spread(examples: Sequence[Example], most: int) -> list[Example]:
    """At most `most` examples, evenly over the lengths of their texts, so that short and long ones are both judged."""
    if len(examples) <= most:
        return list(examples)
    by_length = sorted(examples, key=lambda e: sum(len(text) for text in e.columns.values() if isinstance(text, str)))
    return [by_length[i] for i in np.linspace(0, len(by_length) - 1, most).round().astype(int)]


def check_range(path: Path, rows: Sequence[Row], pad_id: int) -> list[str]:
    """What leaves FP16's range between the nodes, on RANGE_ROWS rows of all lengths; an empty list when nothing does.

    ONNX Runtime's CPU kernels compute in FP32 and drop the casts between them, so an overflow that a GPU would meet
    shows only in tensors that it has to hand out. Accumulation inside a node is FP32 on GPUs too.
    """
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    half = onnx.TensorProto.FLOAT16
    inner = [info for info in model.graph.value_info if info.type.tensor_type.elem_type == half]
    model.graph.output.extend(inner)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = available_threads()
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    by_length = sorted(rows, key=len)
    names = [info.name for info in inner]
    for place in np.unique(np.linspace(0, len(rows) - 1, RANGE_ROWS).round().astype(int)):
        row = by_length[place]
        for name, value in zip(names, session.run(names, pad([row], pad_id)), strict=True):
            if not np.isfinite(value).all():
                return [f"{name} leaves FP16's range on a row of {len(row)} tokens"]
    return []


def judge(reference: Reference, precision: str, path: Path, max_positions: int) -> list[Parity]:
    """Every comparison of the artifact at `path`; `max_positions` is the longest row that the model can take.

    Raises CheckFailed where the artifact does not load, has other inputs, or does not run on the text at all.
    """
    refused = f"the parity gate refused {reference.task.name}: {precision}"
    try:
        runner = OnnxRunner(path)
    except InputError as error:
        raise CheckFailed(f"{refused}: {error}; nothing was published") from None
    try:
        found = reference.compare(precision, runner)
        found[0].failures += check_shapes(runner, max_positions)
    except Exception as error:  # ONNX Runtime's errors have no common base
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckFailed(f"{refused} does not run: {reason}; nothing was published") from None
    finally:
        runner.close()
    if PRECISIONS[precision].narrow:
        found[0].failures += check_range(path, reference.rows, reference.tokenizer.pad_id)
    return found
