"""Labelled data looked through before an hour is spent on training: what would spoil it, and what is only odd."""

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bertship.errors import InputError, counted
from bertship.tasks.base import Example, Task, nested
from bertship.tasks.holdout import part_of, text_key
from bertship.tasks.readers import READERS, find_split
from bertship.tokenization import Tokenizer

LEAK_SHARE = 0.01  # of the dev examples; more than that in the training split spoils what dev says
_SHOWN = 10  # places named of one kind of finding


@dataclass
class Findings:
    """`faults` would spoil training, `warnings` may; `splits` are the facts of each split."""

    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    splits: dict[str, dict[str, Any]] = field(default_factory=dict)
    labels: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {"faults": self.faults, "warnings": self.warnings, "labels": self.labels, "splits": self.splits}

    def lines(self) -> list[str]:
        """The findings for people."""
        said = []
        for split, facts in self.splits.items():
            held = " (held out)" if facts["held_out"] else ""
            said.append(f"{split}: {counted(facts['rows'], 'row')} of {facts['file']}{held}")
            for name, quantiles in facts["lengths"].items():
                said.append(f"  {name}: " + ", ".join(f"{key} {value:,}" for key, value in quantiles.items()))
            for label, count in facts["labels"].items():
                said.append(f"  {label:<24} {count:>8,}  {count / max(sum(facts['labels'].values()), 1):6.1%}")
        said += [f"fault: {fault}" for fault in self.faults]
        said += [f"warning: {warning}" for warning in self.warnings]
        return [*said, "nothing that would spoil training" if not self.faults else counted(len(self.faults), "fault")]


def check_data(task: Task, folder: Path, tokenizer: Tokenizer | None = None) -> Findings:
    """Read the task's labelled splits in `folder` and judge them; with `tokenizer` lengths are in tokens too.

    Raises InputError where a file is missing or cannot be read at all.
    """
    findings = Findings()
    splits: dict[str, list[Example]] = {}
    for split in ("train", "dev", *task.more_splits):
        if split in ("train", "dev") or _has(task, folder, split):
            splits[split] = _read(task, folder, split, findings)
    if task.behaviour.needs_labels and not task.labels:
        labels = task.behaviour.labels_in(splits["train"])
        task = task.with_labels(labels)
        if len([label for label in labels if label != "O"]) < (1 if task.behaviour.loss == "token" else 2):
            findings.faults.append(f"the training split has too few labels ({', '.join(labels) or 'none'})")
    findings.labels = list(task.labels)
    for split, examples in splits.items():
        _check_targets(task, split, examples, findings)
        _facts(task, folder, split, examples, tokenizer, findings)
        _duplicates(split, [(text_key(task, e), e) for e in examples], findings)
    _leaks(task, splits, findings)
    _labels(task, findings)
    return findings


def _has(task: Task, folder: Path, split: str) -> bool:
    try:
        find_split(task, folder, split)
    except InputError:
        return False
    return True


def _read(task: Task, folder: Path, split: str, findings: Findings) -> list[Example]:
    path = find_split(task, folder, split)
    left_out: list[str] = []
    faults: list[str] = []
    examples = list(READERS[task.files.format](task, path, True, left_out, faults))
    parted = split == "dev" and task.files.dev_share  # of the training file, whose rows have been judged
    if not parted:
        findings.faults += _some(faults, "rows that cannot be read", lambda fault: fault)
    if left_out and not parted:
        findings.warnings.append(f"{path}: {counted(len(left_out), 'row')} left out: {'; '.join(left_out[:_SHOWN])}")
    if not examples:
        raise InputError(
            f"{path} holds 0 examples that can be read"
            + (f"; {faults[0]}" if faults else "; it needs rows, with a label each, after its header")
        )
    return part_of(task, examples, split)


def _check_targets(task: Task, split: str, examples: Sequence[Example], findings: Findings) -> None:
    faults = []
    for example in examples:
        try:
            # beside the first one, as what has to be the same everywhere is compared with it
            task.behaviour.check(task, [examples[0], example])
        except InputError as error:
            faults.append(str(error))
    findings.faults += _some(list(dict.fromkeys(faults)), f"{split} rows with a target that does not fit", lambda f: f)
    empty = [e for e in examples if any(not t.strip() for n in task.behaviour.inputs for t in nested(e.columns[n]))]
    if empty:
        findings.warnings += _some(empty, f"{split} rows with an empty text", lambda e: e.where)


def _facts(
    task: Task,
    folder: Path,
    split: str,
    examples: Sequence[Example],
    tokenizer: Tokenizer | None,
    findings: Findings,
) -> None:
    texts = [" ".join(t for n in task.behaviour.inputs for t in nested(e.columns[n])) for e in examples]
    lengths = {"words": _quantiles([len(text.split()) for text in texts])}
    if tokenizer is not None:
        columns = {
            name: [e.columns[name] for e in examples] for name in (*task.behaviour.inputs, *task.behaviour.annotations)
        }
        encoded = task.behaviour.encode(task, tokenizer, columns)
        lengths["tokens a row"] = _quantiles([len(row) for row in encoded.rows])
        cut = [e for e, truncated in zip(examples, encoded.truncated, strict=True) if truncated]
        if cut:
            share = len(cut) / len(examples)
            findings.warnings += _some(
                cut, f"{split} rows ({share:.1%}) cut to max_tokens = {task.max_tokens}", lambda e: e.where
            )
    findings.splits[split] = {
        "file": str(find_split(task, folder, split)),
        "rows": len(examples),
        "held_out": split == "dev" and task.files.dev_share > 0,
        "lengths": lengths,
        "labels": _counts(task, examples),
    }


def _counts(task: Task, examples: Sequence[Example]) -> dict[str, int]:
    """How often each label occurs: of classes, entities, choices, or of answered and unanswerable questions."""
    loss = task.behaviour.loss
    if loss == "token":
        found = collections.Counter(entity.label for e in examples for entity in e.target)
    elif loss == "span":
        found = collections.Counter("answer" if e.target.answers else "no answer" for e in examples)
    elif loss == "mean_squared_error":
        return {}
    else:
        found = collections.Counter(str(e.target) for e in examples)
    return dict(found.most_common())


def _duplicates(split: str, keyed: Sequence[tuple[str, Example]], findings: Findings) -> None:
    seen: dict[str, list[Example]] = collections.defaultdict(list)
    for key, example in keyed:
        seen[key].append(example)
    same = [group for group in seen.values() if len(group) > 1]
    clashing = [group for group in same if len({str(e.target) for e in group}) > 1]
    places = lambda group: f"{group[0].where} and {_line(group[1].where)}"  # noqa: E731
    if same:
        findings.warnings += _some(same, f"{split} texts met more than once, case and punctuation apart", places)
    if clashing:
        findings.warnings += _some(clashing, f"{split} texts with different labels", places)


def _leaks(task: Task, splits: dict[str, list[Example]], findings: Findings) -> None:
    trained = {text_key(task, example): example for example in splits["train"]}
    for split, examples in splits.items():
        if split == "train":
            continue
        leaked = [example for example in examples if text_key(task, example) in trained]
        if leaked:
            share = len(leaked) / len(examples)
            found = _some(
                leaked,
                f"{split} texts ({share:.1%}) found in the training split too",
                lambda e: f"{e.where} is {_line(trained[text_key(task, e)].where)} of train",
            )
            (findings.faults if share > LEAK_SHARE else findings.warnings).extend(found)


def _labels(task: Task, findings: Findings) -> None:
    train = findings.splits["train"]["labels"]
    if task.behaviour.loss == "cross_entropy":
        if len(train) < 2:
            findings.faults.append(f"the training split has one label alone: {', '.join(train)}")
        for label in task.labels:
            if not train.get(label):
                findings.faults.append(f"label {label!r} does not occur in the training split")
            elif train[label] < 8:
                findings.warnings.append(
                    f"label {label!r} occurs {counted(train[label], 'time')} in the training split: hardly learnt"
                )
    for split, facts in findings.splits.items():
        for label in facts["labels"]:
            if label not in train:
                findings.faults.append(f"{label!r} occurs in {split} and not in the training split")


def _quantiles(lengths: Sequence[int]) -> dict[str, int]:
    values = np.quantile(lengths, [0, 0.5, 0.95, 1]).round().astype(int).tolist()
    return dict(zip(("least", "median", "95 %", "most"), values, strict=True))


def _line(where: str) -> str:
    return where.rpartition(", ")[2]


def _some(items: Sequence[Any], what: str, place: Callable[[Any], str]) -> list[str]:
    """One finding a kind: how many, and where the first ones are."""
    if not items:
        return []
    more = f"; and {len(items) - _SHOWN:,} more" if len(items) > _SHOWN else ""
    if len(items) == 1:
        what = what.replace("rows", "row", 1).replace("texts", "text", 1)
    return [f"{len(items):,} {what}: {'; '.join(place(item) for item in items[:_SHOWN])}{more}"]
