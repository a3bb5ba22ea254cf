"""What a fine-tuning run starts from: the settings, and the labelled splits with the labels that they hold."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertship.config import FinetuneConfig, parse
from bertship.errors import InputError
from bertship.tasks import Example, Task
from train import finetune
from train.data import has_split, load_examples
from train.distributed import Processes

Report = Callable[[str], None]


@dataclass(frozen=True)
class TrainingData:
    """A task whose labels are known, its settings and its splits; `more` by the prefix of their metrics."""

    task: Task
    config: FinetuneConfig
    train: Sequence[Example]
    dev: Sequence[Example]
    data: str | None = None
    more: Mapping[str, Sequence[Example]] = field(default_factory=dict)

    def fingerprint(self, init: Path) -> str:
        """Of the run that `finetune` would make."""
        task = finetune.with_features(self.task, self.config)
        return finetune.fingerprint_of(task, init, self.config, self.train, self.dev)

    def finetune(
        self,
        init: tuple[Path, str],
        out: Path,
        report: Report,
        restart: bool = False,
        processes: Processes | None = None,
    ) -> dict[str, Any]:
        """The run; its manifest. `restart`, `processes`: as `train.finetune.finetune` has them."""
        directory, name = init
        return finetune.finetune(
            self.task,
            directory,
            out,
            self.config,
            self.train,
            self.dev,
            report,
            name,
            self.data,
            self.more,
            init_task_of(directory),
            restart,
            processes,
        )

    def changed(self, settings: Mapping[str, Any]) -> "TrainingData":
        """The same data under other settings."""
        values = self.config.model_dump() | dict(settings)
        return dataclasses.replace(self, config=parse(FinetuneConfig, values, f"settings of task {self.task.name}"))


def read_training_data(task: Task, data: str | None, settings: Mapping[str, Any], report: Report) -> TrainingData:
    """The splits of `task`; labels that it leaves open are taken from the training examples. Raises InputError."""
    values = {**task.training, **settings}
    if "epochs" in settings and "min_updates" not in settings:  # said outright, they count
        values["min_updates"] = 1
    config = parse(FinetuneConfig, values, f"settings of task {task.name}")
    if config.document_context:
        if task.behaviour.loss != "token" or task.files.format != "conll":
            raise InputError(f"document_context is for CoNLL files; task {task.name} reads {task.files.format}")
        task = dataclasses.replace(task, files=dataclasses.replace(task.files, documents=True))
    train = load_examples(task, data, "train", report)
    if task.behaviour.needs_labels and not task.labels:
        task = task.with_labels(task.behaviour.labels_in(train))
        report(f"{len(task.labels)} labels of {task.name}, from the training data: {_some(task.labels)}")
        if len(task.labels) < 2:
            raise InputError(f"the training data of {task.name} has one label alone; two or more are needed")
    dev = load_examples(task, data, "dev", report)
    task.behaviour.check(task, dev)
    more = {
        split.removeprefix("dev_"): load_examples(task, data, split, report)
        for split in task.more_splits
        if has_split(task, data, split)
    }
    return TrainingData(task, config, train, dev, data, more)


def init_task_of(directory: Path) -> str:
    """The task that the model directory of a fine-tuning run was trained on; "" for any other model."""
    definition = directory.parent / "task.json"
    return Task.from_file(definition).name if directory.name == "model" and definition.is_file() else ""


def _some(names: Sequence[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")
