"""A task's official set, or a user's, from the Hugging Face hub through `datasets` (extra `hub`)."""

import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from bertship.errors import InputError
from bertship.tasks.base import Example, Hub, Task
from bertship.tasks.holdout import part_of

# what hubs call a split of ours
_SPLITS = {"train": ("train",), "dev": ("validation", "dev", "test"), "test": ("test",)}
_PROBE_S = 3.0


def read_hub(task: Task, name: str, split: str, report: Callable[[str], None]) -> list[Example]:
    """One split of the data set `name`, which may end in `:CONFIG`; the task's own where it is the task's `hub.path`.

    Raises InputError in one line where `datasets` is not installed, the hub cannot be reached or has no such data.
    """
    datasets = _datasets()
    path, _, config = name.partition(":")
    hub = _layout_of(task, path, config)
    kept = "train" if split == "dev" and task.files.dev_share else split
    wanted = hub.splits.get(kept)
    if wanted is None and hub.splits:
        raise InputError(f"{name} on the hub has no {split} split for task {task.name}; give DATA= a folder")
    try:
        loaded = datasets.load_dataset(path, hub.config or None, revision=hub.revision or None)
    except Exception as error:  # the library raises errors of many families
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"cannot get {name!r} from the Hugging Face hub ({type(error).__name__}: {reason}); check the name and the "
            "network, or give DATA= a folder"
        ) from None
    chosen = next((known for known in ((wanted,) if wanted else _SPLITS.get(kept, (kept,))) if known in loaded), None)
    if chosen is None:
        raise InputError(f"{name} on the hub has no {split} split; it has {', '.join(loaded)}")
    report(f"{split} is the split {chosen!r} of {name} on the hub: {len(loaded[chosen]):,} rows")
    return part_of(task, examples_of(task, hub, loaded[chosen], f"{name}, {chosen}", report), split)


def examples_of(
    task: Task, hub: Hub, rows: Any, name: str, report: Callable[[str], None] = lambda line: None
) -> list[Example]:
    """A `datasets.Dataset` as examples; its class labels go by name, and -1 is no label.

    Raises InputError for a column that is not there.
    """
    wanted = [c for column in hub.columns.values() for c in (column if isinstance(column, tuple) else (column,))]
    for column in (*wanted, *([hub.prefix] if hub.prefix else [])):
        if column not in rows.column_names:
            raise InputError(f"{name} has no column {column!r}; its columns are {', '.join(rows.column_names)}")
    names = _label_names(rows.features.get(hub.target))
    examples, unlabelled = [], 0
    for number, row in enumerate(rows):
        where = f"{name}, row {number}"
        before = f"{row[hub.prefix]} " if hub.prefix else ""
        columns = {
            tensor: [f"{before}{row[c]}" for c in column] if isinstance(column, tuple) else row[column]
            for tensor, column in hub.columns.items()
        }
        target = _target(row.get(hub.target), names)
        unlabelled += target is None
        if isinstance(target, str):
            target = hub.labels.get(target, target)
        examples.append(
            task.behaviour.example(task, columns, target, where, str(row.get("id", row.get("idx", number))))
        )
    if unlabelled and unlabelled < len(examples):
        report(f"WARNING: {name}: {unlabelled:,} rows without a label are left out")
        examples = [example for example in examples if example.target is not None]
    return examples


@cache
def reachable() -> bool:
    """Whether `datasets` is installed and the hub answers, asked once and for no longer than _PROBE_S seconds."""
    import os

    try:
        _datasets()
    except InputError:
        return False
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") or os.environ.get("HF_DATASETS_OFFLINE", "0") not in (
        "",
        "0",
    ):
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_PROBE_S):
            return True
    except urllib.error.HTTPError:  # an answer, if not a welcome
        return True
    except (OSError, ValueError):
        return False


def _datasets() -> Any:
    try:
        import datasets
    except ModuleNotFoundError:
        raise InputError(
            "there is no such folder, and a data set's name on the hub needs `datasets`, which is not installed: "
            "`pip install -e '.[hub]'` in .venv, or give DATA= a folder"
        ) from None
    return datasets


def _layout_of(task: Task, path: str, config: str) -> Hub:
    """The task's own layout for its own set; else the columns and the target of its files."""
    if path == task.hub.path and config in ("", task.hub.config):
        return task.hub
    files = task.files
    if task.hub.path:  # another set with the official one's columns
        return Hub(
            path,
            config,
            "",
            {},
            task.hub.columns,
            task.hub.target,
            {**task.hub.labels, **files.labels},
            task.hub.prefix,
        )
    columns = files.columns or ({"WORDS": "tokens"} if task.behaviour.loss == "token" else {})
    return Hub(path, config, "", {}, columns, str(files.target), files.labels, files.prefix)


def _label_names(feature: Any) -> list[str]:
    """The names of a ClassLabel, or of a sequence of them; empty for anything else."""
    inner = getattr(feature, "feature", None)
    return list(getattr(inner if inner is not None else feature, "names", None) or [])


def _target(value: Any, names: list[str]) -> Any:
    if isinstance(value, bool) or value is None:
        return None if value is None else str(value)
    if isinstance(value, list):
        return [names[item] if names and isinstance(item, int) else item for item in value]
    if names and isinstance(value, int):
        return names[value] if value >= 0 else None
    if isinstance(value, Mapping):
        return dict(value)
    return None if value == -1 else str(value)
