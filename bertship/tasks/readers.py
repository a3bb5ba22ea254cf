"""Labelled data files as examples, one reader a format; a fault names the file, the line and what stands there."""

import contextlib
import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertship.errors import InputError, counted, seen
from bertship.tasks.base import KINDS, Example, Task, nested
from bertship.tasks.holdout import part_of
from bertship.tasks.ner import words_example
from bertship.tasks.squad import Gold

# Every reader: `left_out` gets a line for each row without an example; with `faults` a row that cannot be read is named
# there and passed over, instead of ending the reading.
Lines = list[str] | None


@contextlib.contextmanager
def _named(faults: Lines) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        if faults is None:
            raise
        faults.append(str(error))


def read_split(
    task: Task, folder: Path, split: str, report: Callable[[str], None] = lambda line: None
) -> list[Example]:
    """The examples of one split of a task's official files; `report` is told what was left out, and of odd counts.

    Raises InputError when they are not there or not right.
    """
    path = find_split(task, folder, split)
    left_out: list[str] = []
    examples = list(READERS[task.files.format](task, path, not is_test(split), left_out))
    if left_out:
        named = "; ".join(left_out[:3]) + (" ..." if len(left_out) > 3 else "")
        report(f"WARNING: {path}: {counted(len(left_out), 'row')} left out: {named}")
    if not examples:
        raise InputError(f"{path} holds no examples")
    whole = len(examples)
    examples = part_of(task, examples, split)
    if len(examples) < whole:
        part = f"{len(examples):,} of {counted(whole, 'example')} in {path}"
        report(f"{split}: {part}, parted by text (dev = {task.files.dev_share:g})")
    official = task.files.rows.get(split, 0)
    if official and len(examples) != official:
        report(f"{path} holds {len(examples):,} examples of {task.name}; the official {split} split has {official:,}")
    for example in examples:
        for text in (text for name in task.behaviour.inputs for text in nested(example.columns[name])):
            if not _encodable(text):
                raise InputError(f"{example.where}: a lone surrogate stands in {seen(text)}; repair the text")
    return examples


def is_test(split: str) -> bool:
    """Whether a split's labels are somebody else's secret."""
    return split.startswith("test")


def find_split(task: Task, folder: Path, split: str) -> Path:
    """The split's file, in `folder` or in the official archive's folder below it. Raises InputError."""
    if folder.is_file():
        raise InputError(
            f"{folder} is a file, the folder that holds the task's files is needed: give {folder.parent}, and the "
            f"file's name in the task's [files] (train = \"{folder.name}\")"
        )
    if not folder.is_dir():
        raise InputError(f"no such data folder: {folder}")
    names = task.files.splits.get("train" if split == "dev" and task.files.dev_share else split, ())
    for place in (folder, *(folder / name for name in task.files.folders)):
        for name in names:
            if (place / name).is_file():
                return place / name
    looked_for = ", ".join(names) or "nothing: the task has no such split"
    raise InputError(f"no {split} file for task {task.name} in {folder}; looked for {looked_for}")


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 at byte {error.start}; convert it to UTF-8") from None


def _tsv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """GLUE's own form: tabs, no quoting; a quote is a character like any other, so it can never merge rows."""
    for number, line in enumerate(_text(path).split("\n"), 1):
        line = line.removesuffix("\r")
        if line:
            yield number, line.split("\t")


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(2**31 - 1)  # texts may be long; the request's own limit is the task's
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: {error}") from None


@dataclass(frozen=True)
class _Layout:
    """Where the fields of a row stand; a list of places for several choices; None where a file has no such field."""

    columns: Mapping[str, Any]
    target: Any
    prefix: Any
    start: Any
    id: Any


def _layout(task: Task, labelled: bool, place: Callable[[Any], Any], optional: Callable[[str], Any]) -> _Layout:
    files = task.files
    columns = files.columns if labelled or not files.test_columns else files.test_columns
    return _Layout(
        {
            name: [place(c) for c in column] if isinstance(column, tuple) else place(column)
            for name, column in columns.items()
        },
        place(files.target) if labelled else None,
        place(files.prefix) if files.prefix else None,
        place(files.start) if files.start and labelled else None,
        None if labelled else next((at for name in _IDS if (at := optional(name)) is not None), None),
    )


_IDS = ("index", "id", "pairID")  # what unlabelled files call a row's number


def _record(task: Task, layout: _Layout, row: Any, where: str) -> Example | None:
    """A row as an example; None where it is said to have no label. `row` is indexed by the layout's places."""
    before = "" if layout.prefix is None else f"{row[layout.prefix]} "

    def text(place: Any, name: str) -> Any:
        value = [row[p] for p in place] if isinstance(place, list) else row[place]
        parts = [value] if isinstance(value, str) else value
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
            raise InputError(f"{where}: the field for {name} is {seen(value)}, a string is needed")
        wanted = _RANKS[task.kind][name]
        if (wanted == 1) != isinstance(value, str):
            raise InputError(f"{where}: the field for {name} is {seen(value)}, {_SHAPES[wanted]} needed")
        return value if wanted == 1 else [f"{before}{part}" for part in parts]

    columns = {name: text(place, name) for name, place in layout.columns.items()}
    target: Any = None
    if layout.target is not None:
        target = row[layout.target]
        if isinstance(target, str) and task.behaviour.loss != "span":
            target = _stripped(target, where)
        if target in task.files.unlabelled:
            return None
        if isinstance(target, int | float):
            target = str(target)
        if not isinstance(target, str) and task.behaviour.loss not in ("token", "span"):
            raise InputError(f"{where}: field {task.files.target!r} is {seen(target)}, a string or a number is needed")
    start = None if layout.start is None else row[layout.start]
    return task.behaviour.example(task, columns, target, where, "" if layout.id is None else str(row[layout.id]), start)


_RANKS = {name: {spec.name: len(spec.dims) for spec in kind.request()} for name, kind in KINDS.items()}
_SHAPES = {1: "a string is", 2: "a list of strings is"}


def _tabular(
    task: Task, path: Path, rows: Iterator[tuple[int, list[str]]], labelled: bool, left_out: Lines, faults: Lines
) -> Iterator[Example]:
    has_header = task.files.header or (not labelled and bool(task.files.test_columns))
    header = next(rows, (0, None))[1] if has_header else None
    if has_header and header is None:
        raise InputError(f"{path} is empty; a header and rows are needed")
    places: list[int] = []

    def place(column: Any) -> int:
        if isinstance(column, int):
            found = column
        elif header is None:
            raise InputError(f"task {task.name}: column {column!r} needs a header, and files.header is false")
        else:
            known = [name for name in (column, *task.files.aliases.get(column, ())) if name in header]
            if not known:
                raise InputError(f"{path}: no column {column!r}; its columns are {', '.join(header)}")
            found = header.index(known[0])
        places.append(found)
        return found

    layout = _layout(task, labelled, place, lambda name: header.index(name) if header and name in header else None)
    width = len(header) if header else max(places) + 1
    passed_over = [] if left_out is None else left_out
    for number, row in rows:
        where, example = f"{path}, line {number}", None
        fault = f"{counted(len(row), 'column')}, {width} expected"
        odd = len(row) < width or (header is not None and len(row) > width)
        if odd and task.files.ragged:
            passed_over.append(f"line {number} has {fault}")
            continue
        with _named(faults):
            if odd:
                raise InputError(f"{where}: {fault}: {seen(row, 120)}")
            example = _record(task, layout, row, where)
            if example is None:
                passed_over.append(f"line {number} has no agreed label ({row[layout.target]})")
        if example is not None:
            yield example


def _stripped(target: str, where: str) -> str:
    """A label or a score without outer white space, which nobody means; an empty one is refused."""
    target = target.strip()
    if not target:
        raise InputError(f"{where}: the label is empty; give one or take the row out")
    return target


def read_tsv(
    task: Task, path: Path, labelled: bool = True, left_out: Lines = None, faults: Lines = None
) -> Iterator[Example]:
    """Tab-separated columns without quoting."""
    return _tabular(task, path, _tsv_rows(path), labelled, left_out, faults)


def read_csv(
    task: Task, path: Path, labelled: bool = True, left_out: Lines = None, faults: Lines = None
) -> Iterator[Example]:
    """Comma-separated columns with the usual quoting."""
    return _tabular(task, path, _csv_rows(path), labelled, left_out, faults)


def read_jsonl(
    task: Task, path: Path, labelled: bool = True, left_out: Lines = None, faults: Lines = None
) -> Iterator[Example]:
    """One JSON object a line."""
    layout = _layout(task, labelled, str, lambda name: None)
    wanted = [name for place in layout.columns.values() for name in (place if isinstance(place, list) else [place])]
    wanted += [name for name in (layout.prefix, layout.target, layout.start) if name is not None]
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        example = None
        with _named(faults):
            example = _json_record(task, layout, wanted, line, f"{path}, line {number}")
            if example is None and left_out is not None:
                left_out.append(f"line {number} has no agreed label")
        if example is not None:
            yield example


def _json_record(task: Task, layout: _Layout, wanted: list[str], line: str, where: str) -> Example | None:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON: {error}") from None
    missing = [name for name in wanted if not isinstance(record, dict) or name not in record]
    if missing:
        raise InputError(f"{where}: no field {missing[0]!r} in {seen(line, 120)}")
    return _record(task, layout, record, where)


def read_conll(
    task: Task, path: Path, labelled: bool = True, left_out: Lines = None, faults: Lines = None
) -> Iterator[Example]:
    """CoNLL columns: a word and its tag a line (first and last column), sentences parted by blank lines.

    With `files.documents` what stands between two -DOCSTART- lines is one example.
    """
    whole = task.files.documents
    sentences: list[tuple[list[str], list[str]]] = []
    words: list[str] = []
    tags: list[str] = []
    first, marks = 1, 0
    for number, line in enumerate([*_text(path).split("\n"), "-DOCSTART-"], 1):
        # at spaces and tabs alone: a word may hold U+00A0 and the like
        parts = re.findall(r"[^ \t\r]+", line)
        mark = line.startswith("-DOCSTART-")
        if parts and not mark:
            with _named(faults):
                if len(parts) < 2:
                    raise InputError(f"{path}, line {number}: a word and a tag are needed, {seen(line, 80)} is there")
                if not re.fullmatch(r"O|[BI]-.+", parts[-1]):
                    raise InputError(f"{path}, line {number}: tag {parts[-1]!r} is neither O nor B-… nor I-…")
            if len(parts) < 2:  # named above
                continue
            if not words and not sentences:
                first = number
            words.append(parts[0])
            tags.append(parts[-1])
            continue
        if words:
            sentences.append((words, tags))
            words, tags = [], []
        if sentences and (mark or not whole):
            yield words_example(sentences, f"{path}, line {first}")
            sentences = []
        marks += mark
    if whole and marks < 2:  # the last one is our own
        raise InputError(f"{path} has no -DOCSTART- line, so its documents are unknown; leave document context out")


def read_squad(
    task: Task, path: Path, labelled: bool = True, left_out: Lines = None, faults: Lines = None
) -> Iterator[Example]:
    """SQuAD 1.1 and 2.0 JSON: articles of paragraphs of questions."""
    where = str(path)
    try:
        for article in json.loads(_text(path))["data"]:
            where = f"{path}, article {seen(article.get('title', '?'), 60)}"
            for paragraph in article["paragraphs"]:
                if not isinstance(paragraph["context"], str):
                    raise TypeError(f"context {seen(paragraph['context'])} is no string")
                for question in paragraph["qas"]:
                    where = f"{path}, question {question['id']}"
                    yield _squad_example(paragraph["context"], question, where)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where} is not in SQuAD's JSON format: {type(error).__name__} {error}") from None


def _squad_example(context: str, question: dict[str, Any], where: str) -> Example:
    answers = [] if question.get("is_impossible") else question["answers"]
    for answer in answers:
        if not isinstance(answer["text"], str) or type(answer["answer_start"]) is not int:
            raise TypeError(f"answer {seen(answer, 80)}: text must be a string, answer_start a whole number")
    gold = Gold(str(question["id"]), tuple((answer["text"], answer["answer_start"]) for answer in answers))
    return Example({"QUESTION": question["question"].strip(), "CONTEXT": context}, gold, where)


READERS: dict[str, Callable[..., Iterator[Example]]] = {
    "tsv": read_tsv,
    "csv": read_csv,
    "jsonl": read_jsonl,
    "conll": read_conll,
    "squad": read_squad,
}
