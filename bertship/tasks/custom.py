"""A user's own task from a TOML file: a few lines say its kind, its columns, its labels and its metric.

name = "tickets"
kind = "sentence"              # sentence, pair, regression, multiple_choice, span or token
labels = ["billing", "other"]  # leave it out to take the labels from the training data
metrics = ["f1"]

[files]
format = "csv"                 # tsv, csv or jsonl; token also conll, span also squad
train = "train.csv"
dev = "dev.csv"
target = "label"
columns = { TEXT = "message" }
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

from bertship.errors import InputError
from bertship.metrics import LABEL_METRICS, VALUE_METRICS
from bertship.tasks.base import KINDS, TASKS, Files, Task, read_options

_METRICS = {
    "cross_entropy": LABEL_METRICS,
    "mean_squared_error": VALUE_METRICS,
    "choice": ("accuracy",),
    "span": ("f1", "exact_match"),
    "token": ("f1", "precision", "recall"),
}
_TABLES = ("tsv", "csv", "jsonl")
_FORMATS = {"span": ("squad", *_TABLES), "token": ("conll", "jsonl")}  # by loss; the others are tables
_NUMBERS = {"max_tokens": (8, 512), "overlap": (0, 256), "max_characters": (1, 10_000_000)}


def task_from_toml(path: Path) -> Task:
    """The task that the file defines. Raises InputError that names the field, the value and what is accepted."""
    from bertship.config import FinetuneConfig, parse, read_toml  # pydantic is not installed where the server runs

    values = read_toml(path)
    files = values.pop("files", {})
    known = {"name", "kind", "description", "labels", "metrics", "options", "training", *_NUMBERS}
    _refuse_unknown(path, values, known, "")
    name = values.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", name):
        raise InputError(f"{path}: name {name!r}: lower-case letters, digits and _ are needed, a letter first")
    if name.endswith(("_tokenize", "_encode", "_decode")):
        raise InputError(f"{path}: name {name!r} ends like a step of a served task; choose another")
    if name in TASKS:
        raise InputError(f"{path}: name {name!r} belongs to a built-in task; choose another")
    kind = values.get("kind")
    if kind == "regression" and isinstance(files, dict) and set(files.get("columns", {})) == {"TEXT"}:
        kind = "single_regression"
    if kind not in KINDS:
        raise InputError(f"{path}: kind {kind!r} is unknown; kinds are {', '.join(KINDS)}")
    behaviour = KINDS[kind]
    labels = _strings(path, "labels", values.get("labels", []))
    if labels and not behaviour.needs_labels:
        raise InputError(f"{path}: labels {list(labels)!r}: kind {values['kind']!r} has none; leave the field out")
    if labels and (len(set(labels)) < 2 or len(set(labels)) != len(labels)):
        raise InputError(f"{path}: labels {list(labels)!r}: at least two different ones are needed, each once")
    if labels and behaviour.loss == "token":
        kinds = {label[2:] for label in labels if re.fullmatch("[BI]-.+", label)}
        needed = {"O", *(f"{prefix}-{name}" for name in kinds for prefix in "BI")}
        if set(labels) != needed:
            raise InputError(f"{path}: labels {list(labels)!r}: O, and B-NAME and I-NAME for each entity, are needed")
    offered = _METRICS[behaviour.loss]
    metrics = _strings(path, "metrics", values.get("metrics", offered[:1]))
    if not metrics:
        raise InputError(f"{path}: metrics []: at least one of {', '.join(offered)} is needed")
    for metric in metrics:
        if metric not in offered:
            raise InputError(f"{path}: metric {metric!r} does not fit kind {kind!r}; it has {', '.join(offered)}")
    defaults = next((task for task in TASKS.values() if task.kind == kind), TASKS["sst2"])
    numbers = {
        field: _number(path, field, values.get(field, getattr(defaults, field)), *bounds)
        for field, bounds in _NUMBERS.items()
    }
    task = Task(
        name=name,
        kind=kind,
        description=_typed(path, "description", values.get("description", ""), str),
        labels=labels,
        metrics=metrics,
        max_tokens=numbers["max_tokens"],
        overlap=numbers["overlap"],
        max_characters=numbers["max_characters"],
        options=dict(defaults.options),
        files=_files(path, _typed(path, "files", files, dict), kind),
        training=_training(_typed(path, "training", values.get("training", {}), dict)),
        source=str(path),
    )
    parse(FinetuneConfig, dict(task.training), f"{path}, [training]")
    try:
        options = read_options(task, _typed(path, "options", values.get("options", {}), dict))
    except InputError as error:
        raise InputError(f"{path}, [options]: {error}") from None
    return dataclasses.replace(task, options=options)


def _training(fields: dict[str, Any]) -> dict[str, Any]:
    """Epochs that somebody asks for count: the least number of updates is for those who do not."""
    return {"min_updates": 1, **fields} if "epochs" in fields else fields


def _typed(path: Path, field: str, value: Any, needed: type) -> Any:
    if not isinstance(value, needed):
        name = {str: "a string", dict: "a table", bool: "true or false"}[needed]
        raise InputError(f"{path}: {field} {value!r}: {name} is needed")
    return value


def _number(path: Path, field: str, value: Any, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InputError(f"{path}: {field} {value!r}: a whole number from {low} to {high} is needed")
    return value


_FILES = (
    "format",
    "train",
    "dev",
    "test",
    "columns",
    "target",
    "header",
    "labels",
    "prefix",
    "start",
    "documents",
    "skip",
)


def _files(path: Path, values: dict[str, Any], kind: str) -> Files:
    from bertship.tasks.readers import READERS

    _refuse_unknown(path, values, set(_FILES), "files.")
    behaviour = KINDS[kind]
    formats = _FORMATS.get(behaviour.loss, _TABLES)
    form = values.get("format", formats[0])
    if form not in READERS:
        raise InputError(f"{path}: files.format {form!r} is unknown; formats are {', '.join(READERS)}")
    if form not in formats:
        raise InputError(f"{path}: files.format {form!r} does not fit kind {kind!r}; it has {', '.join(formats)}")
    columns = values.get("columns", {})
    wanted = set(behaviour.inputs) if form in _TABLES else set()
    if not isinstance(columns, dict) or set(columns) != wanted:
        raise InputError(
            f"{path}: files.columns {columns!r}: one for each of {', '.join(sorted(wanted)) or 'nothing'} is needed"
        )
    header = _typed(path, "files.header", values.get("header", True), bool)
    if form == "jsonl" and not header:
        raise InputError(f"{path}: files.header false: fields of jsonl have names; leave it out")
    dev = values.get("dev", "")
    share = 0.0 if isinstance(dev, str) else _share(path, dev)
    default = {"span": "answer", "token": "entities"}.get(behaviour.loss, "label")
    target = values.get("target", default)
    lists = {spec.name for spec in behaviour.request() if len(spec.dims) > 1}
    for name, column in {**columns, "target": target}.items():
        several = isinstance(column, list) and name in lists and len(column) > 1
        for one in column if several else [column]:
            negative = isinstance(one, int) and one < 0
            if not isinstance(one, str if header else int) or isinstance(one, bool) or negative:
                raise InputError(
                    f"{path}: files column for {name} is {column!r}; "
                    f"{'its name in the header' if header else 'its number, from 0, as header = false'} is needed"
                )
        if name in lists and not several and form != "jsonl":
            raise InputError(f"{path}: files column for {name} is {column!r}; a list of columns is needed")
    return Files(
        format=form,
        splits={
            split: (_typed(path, f"files.{split}", values.get(split, f"{split}.{form}"), str),)
            for split in ("train", *(() if share else ("dev",)), *({"test"} & values.keys()))
        },
        dev_share=share,
        columns={name: tuple(column) if isinstance(column, list) else column for name, column in columns.items()},
        target=target,
        prefix=_typed(path, "files.prefix", values.get("prefix", ""), str),
        start=_typed(path, "files.start", values.get("start", ""), str),
        documents=_typed(path, "files.documents", values.get("documents", False), bool),
        unlabelled=_strings(path, "files.skip", values.get("skip", [])),
        header=header,
        labels={
            key: _typed(path, f"files.labels.{key}", value, str)
            for key, value in _typed(path, "files.labels", values.get("labels", {}), dict).items()
        },
    )


def _share(path: Path, dev: Any) -> float:
    """Of the training file, to be held out."""
    if isinstance(dev, bool) or not isinstance(dev, int | float) or not 0 < dev < 1:
        raise InputError(
            f"{path}: files.dev {dev!r}: the name of a file, or a share of the training file such as 0.2, is needed"
        )
    return float(dev)


def _refuse_unknown(path: Path, values: dict[str, Any], known: set[str], prefix: str) -> None:
    for field in values:
        if field not in known:
            raise InputError(f"{path}: unknown field {prefix}{field}; known fields are {', '.join(sorted(known))}")


def _strings(path: Path, field: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
        raise InputError(f"{path}: {field} {value!r}: a list of strings is needed")
    return tuple(value)
