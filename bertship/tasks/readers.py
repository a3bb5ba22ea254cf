"""Labelled data files as examples, one reader a format; a fault names the file, the line and what stands there."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bertship.errors import InputError
from bertship.tasks.base import Example, Task
from bertship.tasks.ner import entities_of
from bertship.tasks.squad import Gold


def read_split(task: Task, folder: Path, split: str) -> list[Example]:
    """The examples of one split of a task's official files. Raises InputError when they are not there or not right."""
    if not folder.is_dir():
        raise InputError(f"no such data folder: {folder}")
    names = task.files.splits.get(split, ())
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        looked_for = ", ".join(names) or "nothing: the task has no such split"
        raise InputError(f"no {split} file for task {task.name} in {folder}; looked for {looked_for}")
    examples = list(READERS[task.files.format](task, path))
    if not examples:
        raise InputError(f"{path} holds no examples")
    for example in examples:
        for text in example.columns.values():
            if isinstance(text, str) and not _encodable(text):
                raise InputError(f"{example.where}: a lone surrogate stands in {text!r:.60}; repair the text")
    return examples


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


def _columns_of(task: Task, path: Path, header: list[str] | None) -> dict[str, int]:
    """Where each tensor and the target stand in a row; refuses a header that lacks one of them."""
    wanted = {**task.files.columns, "": task.files.target}
    places = {}
    for tensor, column in wanted.items():
        if isinstance(column, int):
            places[tensor] = column
        elif header is None:
            raise InputError(f"task {task.name}: column {column!r} needs a header, and files.header is false")
        elif column not in header:
            raise InputError(f"{path}: no column {column!r}; its columns are {', '.join(header)}")
        else:
            places[tensor] = header.index(column)
    return places


def _tabular(task: Task, path: Path, rows: Iterator[tuple[int, list[str]]]) -> Iterator[Example]:
    header = next(rows, (0, None))[1] if task.files.header else None
    if task.files.header and header is None:
        raise InputError(f"{path} is empty; a header and rows are needed")
    places = _columns_of(task, path, header)
    width = len(header) if header else max(places.values()) + 1
    for number, row in rows:
        if len(row) < width or (header and len(row) > width):
            raise InputError(f"{path}, line {number}: {len(row)} columns, {width} expected: {row!r:.120}")
        target = _stripped(row[places[""]], f"{path}, line {number}")
        columns = {tensor: row[place] for tensor, place in places.items() if tensor}
        yield Example(columns, task.files.labels.get(target, target), f"{path}, line {number}")


def _stripped(target: str, where: str) -> str:
    """A label or a score without outer white space, which nobody means; an empty one is refused."""
    target = target.strip()
    if not target:
        raise InputError(f"{where}: the label is empty; give one or take the row out")
    return target


def read_tsv(task: Task, path: Path) -> Iterator[Example]:
    """Tab-separated columns without quoting."""
    return _tabular(task, path, _tsv_rows(path))


def read_csv(task: Task, path: Path) -> Iterator[Example]:
    """Comma-separated columns with the usual quoting."""
    return _tabular(task, path, _csv_rows(path))


def read_jsonl(task: Task, path: Path) -> Iterator[Example]:
    """One JSON object a line."""
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InputError(f"{where}: not JSON: {error}") from None
        wanted = [str(column) for column in (*task.files.columns.values(), task.files.target)]
        missing = [name for name in wanted if not isinstance(record, dict) or name not in record]
        if missing:
            raise InputError(f"{where}: no field {missing[0]!r} in {line!r:.120}")
        columns = {tensor: record[str(name)] for tensor, name in task.files.columns.items()}
        for name, value in columns.items():
            if not isinstance(value, str):
                raise InputError(f"{where}: the field for {name} is {value!r:.60}, a string is needed")
        given = record[str(task.files.target)]
        if not isinstance(given, str | int | float):
            raise InputError(f"{where}: field {task.files.target!r} is {given!r:.60}, a string or a number is needed")
        target = _stripped(str(given), where)
        yield Example(columns, task.files.labels.get(target, target), where)


def read_conll(task: Task, path: Path) -> Iterator[Example]:
    """CoNLL columns: a word and its tag a line (first and last column), sentences parted by blank lines."""
    words: list[str] = []
    tags: list[str] = []
    first = 1
    for number, line in enumerate([*_text(path).split("\n"), ""], 1):
        # at spaces and tabs alone: a word may hold U+00A0 and the like
        parts = re.findall(r"[^ \t\r]+", line)
        if parts and not line.startswith("-DOCSTART-"):
            if len(parts) < 2:
                raise InputError(f"{path}, line {number}: a word and a tag are needed, {line!r:.80} is there")
            if not re.fullmatch(r"O|[BI]-.+", parts[-1]):
                raise InputError(f"{path}, line {number}: tag {parts[-1]!r} is neither O nor B-… nor I-…")
            if not words:
                first = number
            words.append(parts[0])
            tags.append(parts[-1])
        elif words:
            yield _conll_example(words, tags, f"{path}, line {first}")
            words, tags = [], []


def _conll_example(words: list[str], tags: list[str], where: str) -> Example:
    spans, start = [], 0
    for word in words:
        spans.append((start, start + len(word)))
        start += len(word) + 1
    return Example({"TEXT": " ".join(words), "WORDS": spans}, entities_of(spans, tags), where)


def read_squad(task: Task, path: Path) -> Iterator[Example]:
    """SQuAD 1.1 and 2.0 JSON: articles of paragraphs of questions."""
    where = str(path)
    try:
        for article in json.loads(_text(path))["data"]:
            where = f"{path}, article {article.get('title', '?')!r:.60}"
            for paragraph in article["paragraphs"]:
                if not isinstance(paragraph["context"], str):
                    raise TypeError(f"context {paragraph['context']!r:.60} is no string")
                for question in paragraph["qas"]:
                    where = f"{path}, question {question['id']}"
                    yield _squad_example(paragraph["context"], question, where)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where} is not in SQuAD's JSON format: {type(error).__name__} {error}") from None


def _squad_example(context: str, question: dict[str, Any], where: str) -> Example:
    answers = [] if question.get("is_impossible") else question["answers"]
    for answer in answers:
        if not isinstance(answer["text"], str) or type(answer["answer_start"]) is not int:
            raise TypeError(f"answer {answer!r:.80}: text must be a string, answer_start a whole number")
    gold = Gold(str(question["id"]), tuple((answer["text"], answer["answer_start"]) for answer in answers))
    return Example({"QUESTION": question["question"].strip(), "CONTEXT": context}, gold, where)


Reader = Callable[[Task, Path], Iterator[Any]]
READERS: dict[str, Reader] = {
    "tsv": read_tsv,
    "csv": read_csv,
    "jsonl": read_jsonl,
    "conll": read_conll,
    "squad": read_squad,
}
