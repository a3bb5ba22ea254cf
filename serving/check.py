"""Whether a server answers what `predict` answers: to the last bit, on real texts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertship.client import Client
from bertship.errors import CheckFailed, InputError, seen
from bertship.pipeline import Pipeline
from bertship.runners import OnnxRunner
from bertship.tasks.base import Task
from bertship.tokenization import Tokenizer
from serving.repository import served_version

BATCH = 50  # texts a request


def served_pipeline(repository: Path, task: str, threads: int | None = None) -> Pipeline:
    """The pipeline of what a repository serves of `task`, in this process. Raises InputError when it is not there."""
    version = served_version(repository, task)
    tokenize, encode = (repository / f"{task}_{step}" / version for step in ("tokenize", "encode"))
    if not (encode / "model.onnx").is_file():
        raise InputError(f"{repository} does not serve {task}: run `bertship repository --task {task}` first")
    return Pipeline(
        Task.from_file(tokenize / "task.json"),
        Tokenizer.from_file(tokenize / "tokenizer.json"),
        OnnxRunner(encode / "model.onnx", threads),
    )


def check_answers(pipeline: Pipeline, url: str, samples: Sequence[dict[str, Any]], model: str = "") -> int:
    """Ask the server at `url` for every sample, many in one request, and compare each tensor with `pipeline`'s.

    `model` is asked where it is given, else the task. Returns how many were compared. Raises CheckFailed at the first
    answer that differs.
    """
    task = pipeline.task
    with Client(url, timeout_s=120) as client:
        for start in range(0, len(samples), BATCH):
            part = samples[start : start + BATCH]
            columns = {name: [sample["columns"][name] for sample in part] for name in task.behaviour.inputs}
            expected, served = pipeline(columns), client.infer(model or task.name, columns)
            for name, values in expected.items():
                for i, (wanted, got) in enumerate(zip(values, served[name], strict=True)):
                    if not np.array_equal(wanted, got):
                        raise CheckFailed(
                            f"{task.name} at {url}: {name} of sample {start + i} is {seen(got, 80)}, "
                            f"`predict` gives {seen(wanted, 80)}"
                        )
    return len(samples)
