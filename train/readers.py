"""Document readers: plain text, JSON Lines, Parquet, MediaWiki dumps and hub data sets, in chunks of documents.

Reading is parted in two. `read_chunks` runs in one process and only parts an input into chunks of about a megabyte,
without decoding what need not be decoded; `decode` turns a chunk into texts and runs wherever there is a core.

Faulty bytes and empty documents are part of any large collection: they are read around and counted. A file that is
not what its name says, or that ends too soon, is an error, because a corpus that silently lacks half of its text
looks like a good one.
"""

import contextlib
import itertools
import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any
from xml.etree import ElementTree

from bertship.errors import InputError
from train.inputs import Input, Source, faults_named, find_inputs, hub_parts, need_extra, open_input
from train.wikitext import prose

CHUNK_BYTES = 1 << 20  # of text, decoded and tokenized in one call
UNIT_BYTES = 1 << 26  # of a file that can be entered anywhere, so that many machines can share it
PACKING = 4  # by which text shrinks when it is packed, about
_LONGEST_LINE = 1 << 26  # bytes of a line of JSON
_ROWS = 128  # of a Parquet file, held at once
_BOM = b"\xef\xbb\xbf"
_REDIRECT = re.compile(r"\s*#redirect\b", re.IGNORECASE)


@dataclass(frozen=True)
class Unit:
    """A part of an input that is read without the others: bytes [start, end) of a plain text or JSON Lines file, row
    groups [start, end) of a Parquet file. `end` is None where an input can only be read from its beginning. `weight`:
    bytes of text in it, as far as that can be told beforehand."""

    start: int
    end: int | None
    weight: int


@dataclass
class Chunk:
    """Documents in a row, as they stand in the input.

    `payload` is raw lines, or texts. `offset` and `after` are places in the unpacked input, in the reader's own
    measure (bytes, pages, rows): reading can go on from `after`. `size`: bytes of text. `stored`: place in the file
    as it is stored. `joins`: the first document may be the rest of the last one before. `follows_blank`: the line
    before was blank. `counts`: what was left out.
    """

    kind: str
    payload: bytes | list[str]
    offset: int
    after: int
    size: int
    stored: int
    joins: bool = False
    follows_blank: bool = False
    counts: Counter[str] = field(default_factory=Counter)


class BadRecord(Exception):
    """A record that cannot be read: `offset` in bytes of the unpacked input, or None, and what is wrong with it."""

    def __init__(self, offset: int | None, what: str) -> None:
        super().__init__(offset, what)
        self.offset, self.what = offset, what


def read_documents(path: Source, skipped: Counter[str] | None = None, text_field: str = "text") -> Iterator[str]:
    """Texts of the documents in a source, one after another, however long they are.

    `.txt`: documents parted by blank lines. `.jsonl` and `.parquet`: the field or column `text_field`. `.xml`: a
    MediaWiki dump, of which articles (namespace 0, no redirects) are taken as prose. Each may end in `.gz`, `.bz2`
    or `.zst`; a dump is also known by its content, since published parts carry page numbers behind `.xml`.

    Adds to `skipped` what was left out or repaired, by reason. Raises InputError for a missing file, an unknown
    suffix, a damaged archive, a record without text, and XML that is no dump.
    """
    counts = Counter() if skipped is None else skipped
    for item in find_inputs([path]):
        pending: str | None = None
        for unit in units_of(item, text_field):
            for chunk in read_chunks(item, unit, text_field):
                with records_named(item):
                    documents, joins = decode(chunk, text_field, counts)
                for number, document in enumerate(documents):
                    if pending is not None and number == 0 and joins:
                        pending += "\n" + document
                        continue
                    if pending is not None:
                        yield pending
                    pending = document
        if pending is not None:
            yield pending


def units_of(item: Input, text_field: str = "text") -> list[Unit]:
    """How an input is parted, which depends on the input alone, never on who reads it."""
    size = item.size or 0
    if item.kind in ("text", "jsonl") and not item.compression and size:
        starts = range(0, size, UNIT_BYTES)
        return [Unit(start, min(start + UNIT_BYTES, size), min(UNIT_BYTES, size - start)) for start in starts]
    if item.kind == "parquet" and not item.compression:
        with faults_named(item), open_input(item)[0] as file:
            return _row_group_units(_parquet(file, item, text_field), text_field)
    return [Unit(0, None, size * PACKING if item.compression else size)]


def read_chunks(
    item: Input,
    unit: Unit,
    text_field: str = "text",
    resume: int | None = None,
    within: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[Chunk]:
    """The documents that begin in `unit`, or what is left of them from the place `resume` on, which may lie `within`
    a document. Raises InputError."""
    with faults_named(item):
        if item.kind == "hub":
            yield from _hub_chunks(item, text_field, resume or 0, chunk_bytes)
            return
        unpacked, stored = open_input(item)
        with stored, unpacked:
            if item.kind == "text":
                yield from _text_chunks(unpacked, stored, unit, resume, within, chunk_bytes)
            elif item.kind == "jsonl":
                yield from _jsonl_chunks(unpacked, stored, item, unit, resume, chunk_bytes)
            elif item.kind == "dump":
                yield from _dump_chunks(unpacked, stored, item, resume or 0, chunk_bytes)
            else:
                yield from _parquet_chunks(unpacked, item, unit, text_field, resume, chunk_bytes)


@contextlib.contextmanager
def records_named(item: Input) -> Iterator[None]:
    """BadRecord as an InputError that names the input and the line."""
    try:
        yield
    except BadRecord as error:
        line = "" if error.offset is None else f"line {_line_at(item, error.offset)} "
        raise InputError(f"{item.name}, {line}{error.what}") from None


def decode(chunk: Chunk, text_field: str, counts: Counter[str]) -> tuple[list[str], bool]:
    """The chunk's documents as texts, and whether the first is the rest of the last one of the chunk before.

    A text may be empty. Raises BadRecord.
    """
    found = Counter(chunk.counts)
    joins = False
    if isinstance(chunk.payload, bytes):
        if chunk.kind == "text":
            texts, joins = _decode_text(chunk.payload, chunk, found)
        else:
            texts = _decode_jsonl(chunk.payload, chunk, text_field, found)
    elif chunk.kind == "wikitext":
        articles = [prose(text) for text in chunk.payload]
        texts = [_without_surrogates(article, found) for article in articles if article]  # from entities
        found["articles without prose"] += len(articles) - len(texts)
    else:
        texts = [_without_surrogates(text, found) for text in chunk.payload]
    counts.update(+found)  # none of what did not occur
    return texts, joins


# plain text and JSON Lines


def _text_chunks(
    file: IO[bytes], stored: IO[bytes], unit: Unit, resume: int | None, within: bool, chunk_bytes: int
) -> Iterator[Chunk]:
    """A document belongs to the unit in which the blank line before it begins, the first one to the first unit."""
    place = _enter(file, unit, resume)
    if place and resume is None:
        place = _to_blank_line(file, place, chunk_bytes)
    open_ended = within
    follows_blank = resume is not None and not within
    blocks = _blocks(file, place, unit.end, chunk_bytes, resume is not None, whole_documents=True)
    for raw in _cut_blocks(blocks, chunk_bytes, lambda buffer, window: _text_cut(buffer, window, chunk_bytes)):
        start = place
        place += len(raw)
        if not start:
            raw = raw.removeprefix(_BOM)
        yield Chunk("text", raw, start, place, len(raw), stored.tell(), open_ended, follows_blank)
        open_ended = bool(raw.removesuffix(b"\n").rpartition(b"\n")[2].strip())
        follows_blank = not open_ended


def _jsonl_chunks(
    file: IO[bytes], stored: IO[bytes], item: Input, unit: Unit, resume: int | None, chunk_bytes: int
) -> Iterator[Chunk]:
    """A line belongs to the unit in which it begins."""
    place = _enter(file, unit, resume)
    blocks = _blocks(file, place, unit.end, chunk_bytes, resume is not None, whole_documents=False)
    for raw in _cut_blocks(blocks, chunk_bytes, lambda buffer, window: _line_cut(buffer, window, item.name)):
        start = place
        place += len(raw)
        if not start:
            raw = raw.removeprefix(_BOM)
            start = place - len(raw)
        yield Chunk("jsonl", raw, start, place, len(raw), stored.tell())


def _enter(file: IO[bytes], unit: Unit, resume: int | None) -> int:
    """Go to the place where reading resumes, or to the first line that begins in the unit; returns that place."""
    if resume is not None:
        if unit.end is None:  # packed: everything before is unpacked again, which costs little beside tokenizing
            left = resume
            while left and (block := file.read(min(left, CHUNK_BYTES))):
                left -= len(block)
        else:
            file.seek(resume)
        return resume
    if not unit.start:
        return 0
    file.seek(unit.start - 1)
    place = unit.start - 1
    while line := file.readline(CHUNK_BYTES):
        place += len(line)
        if line.endswith(b"\n"):
            break
    return place


def _to_blank_line(file: IO[bytes], place: int, chunk_bytes: int) -> int:
    """Pass over the rest of a document that began before, up to the next blank line."""
    while line := file.readline(chunk_bytes):
        if not line.strip():
            file.seek(place)
            break
        place += len(line)
        while not line.endswith(b"\n") and (line := file.readline(chunk_bytes)):
            place += len(line)
    return place


def _blocks(
    file: IO[bytes], place: int, end: int | None, size: int, resumed: bool, whole_documents: bool
) -> Iterator[bytes]:
    """Bytes from `place` to the end of the line, or document, that `end` lies in.

    Reading is resumed where there is more of the unit, be it a last document that lies behind `end`; else nothing
    begins in a unit whose first line does behind it.
    """
    block = b"\n"
    while end is None or place < end:
        block = file.read(size if end is None else min(size, end - place))
        if not block:
            return
        place += len(block)
        yield block
    if end is None or (place > end and not resumed):
        return
    while not block.endswith(b"\n") and (block := file.readline(size)):
        yield block
    while whole_documents and (line := file.readline(size)) and line.strip():
        yield line
        while not line.endswith(b"\n") and (line := file.readline(size)):
            yield line


def _cut_blocks(blocks: Iterator[bytes], chunk_bytes: int, cut: Callable[..., int]) -> Iterator[bytes]:
    """The same bytes in chunks that end where `cut` says, within as many of `chunk_bytes` as it needs.

    Each chunk depends on the bytes from its beginning on alone, so reading that goes on behind one gives the same.
    """
    buffer = bytearray()
    window = chunk_bytes
    for block in blocks:
        buffer += block
        while len(buffer) >= window:
            if end := cut(buffer, window):
                yield bytes(buffer[:end])
                del buffer[:end]
                window = chunk_bytes
            else:
                window += chunk_bytes
    if buffer:
        yield bytes(buffer)


def _text_cut(buffer: bytearray, window: int, chunk_bytes: int) -> int:
    """Behind a blank line, else behind any line; a line of many chunks is cut at a space, or between characters."""
    blank, blank_crlf = buffer.rfind(b"\n\n", 0, window), buffer.rfind(b"\n\r\n", 0, window)
    if blank > 0 or blank_crlf > 0:
        return max(blank + 2, blank_crlf + 3)
    if behind_line := buffer.rfind(b"\n", 0, window) + 1:
        return behind_line
    if window < 4 * chunk_bytes:
        return 0
    if behind_space := buffer.rfind(b" ", 0, window) + 1:
        return behind_space
    end = window
    while end > window - 4 and buffer[end - 1] & 0xC0 == 0x80:
        end -= 1
    return end - (buffer[end - 1] >= 0xC0)


def _line_cut(buffer: bytearray, window: int, name: str) -> int:
    end = buffer.rfind(b"\n", 0, window) + 1
    if not end and window >= _LONGEST_LINE:
        raise InputError(f"{name}: a line of JSON is longer than {_LONGEST_LINE >> 20} MiB; part its document")
    return end


def _decode_text(raw: bytes, chunk: Chunk, counts: Counter[str]) -> tuple[list[str], bool]:
    if (nul := raw.find(b"\0")) >= 0:
        raise BadRecord(chunk.offset + nul, "holds NUL bytes: it is binary, or UTF-16; convert it to UTF-8 text")
    _count_line_ends(raw, counts)
    documents: list[str] = []
    lines: list[str] = []
    blank = chunk.follows_blank
    joins = chunk.joins
    for number, line in enumerate(_decoded_lines(raw, counts)):
        if line := line.strip():
            lines.append(line)
        elif lines:
            documents.append("\n".join(lines))
            lines = []
        else:
            joins = joins and number > 0
            # a run of blank lines parts documents once; what is between them is an empty document
            counts["empty documents"] += blank
        blank = not line
    if lines:
        documents.append("\n".join(lines))
    return documents, joins


def _decoded_lines(raw: bytes, counts: Counter[str]) -> list[str]:
    try:
        lines = raw.decode("utf-8").split("\n")
    except UnicodeDecodeError:
        lines = [_decoded(line, counts) for line in raw.split(b"\n")]
    if not lines[-1]:
        lines.pop()  # what follows the last line break is no line
    return lines


def _decoded(line: bytes, counts: Counter[str]) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        counts["lines of invalid UTF-8 (bytes replaced)"] += 1
        return line.decode("utf-8", "replace")


def _count_line_ends(raw: bytes, counts: Counter[str]) -> None:
    counts["line ends of CR LF (read as LF)"] += raw.count(b"\r\n")


def _decode_jsonl(raw: bytes, chunk: Chunk, text_field: str, counts: Counter[str]) -> list[str]:
    _count_line_ends(raw, counts)
    texts = []
    offset = chunk.offset
    for raw_line, line in zip(raw.split(b"\n"), _decoded_lines(raw, counts), strict=False):
        if not (line := line.strip()):
            counts["blank lines"] += 1
        else:
            texts.append(_without_surrogates(_text_in(line, text_field, offset), counts))
        offset += len(raw_line) + 1
    return texts


def _text_in(line: str, text_field: str, offset: int) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRecord(offset, f"is not JSON: {str(error)[:200]}") from None
    text = value.get(text_field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        seen = f"keys {list(value)}"[:200] if isinstance(value, dict) else f"a {type(value).__name__}"
        raise BadRecord(offset, f'has no string "{text_field}" ({seen}); write {{"{text_field}": "..."}} a line')
    return text


def _without_surrogates(text: str, counts: Counter[str]) -> str:
    """Half of a surrogate pair is legal JSON and no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        counts["texts with half surrogate pairs (replaced)"] += 1
        return text.encode("utf-8", "replace").decode("utf-8")
    return text


def _line_at(item: Input, offset: int) -> int:
    """The number of the line that the byte `offset` of the unpacked input is in, from 1."""
    line = 1
    with faults_named(item):
        unpacked, stored = open_input(item)
        with stored, unpacked:
            while offset > 0 and (block := unpacked.read(min(offset, CHUNK_BYTES))):
                line += block.count(b"\n")
                offset -= len(block)
    return line


# MediaWiki dumps


def _dump_chunks(file: IO[bytes], stored: IO[bytes], item: Input, resume: int, chunk_bytes: int) -> Iterator[Chunk]:
    """Places are pages; those before `resume` are parsed as XML and passed over."""
    events = ElementTree.iterparse(file, events=("start", "end"))
    _, root = next(events)
    if _tag(root) != "mediawiki":
        raise InputError(f"{item.name} is XML but no MediaWiki dump: its root is <{_tag(root)}>, <mediawiki> is needed")
    pages, start = 0, resume
    texts: list[str] = []
    size = 0
    counts: Counter[str] = Counter()
    for event, element in events:
        if event != "end" or _tag(element) != "page":
            continue
        pages += 1
        if pages > resume:
            fields = {_tag(child): child.text or "" for child in element.iter()}
            text = fields.get("text", "")
            if fields.get("ns", "0").strip() != "0":
                counts["pages that are no articles"] += 1
            elif "redirect" in fields or _REDIRECT.match(text):
                counts["redirects"] += 1
            else:
                texts.append(text)
                size += _size(text)
        root.clear()  # or the tree of the whole dump would grow in memory
        if size >= chunk_bytes:
            yield Chunk("wikitext", texts, start, pages, size, stored.tell(), counts=counts)
            texts, size, counts, start = [], 0, Counter(), pages
    if texts or counts:
        yield Chunk("wikitext", texts, start, pages, size, stored.tell(), counts=counts)


def _size(text: str) -> int:
    """Bytes as UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def _tag(element: ElementTree.Element) -> str:
    """The name without its namespace, which differs between versions of the export format."""
    return element.tag.rpartition("}")[2]


# Parquet and the hub


def _parquet(file: IO[bytes], item: Input, text_field: str) -> Any:
    """The open Parquet file, once its column is known to be one of texts."""
    parquet = need_extra("pyarrow.parquet", "train", "a .parquet file")
    arrow = need_extra("pyarrow", "train", "a .parquet file")
    opened = parquet.ParquetFile(file, buffer_size=1 << 20)  # or a column of a row group would be read whole
    schema = opened.schema_arrow
    if text_field not in schema.names:
        raise InputError(
            f"{item.name} has no column {text_field!r}; its columns are {', '.join(schema.names)[:200]}; name one by "
            "--set text_field=..."
        )
    kind = schema.field(text_field).type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_string_view(kind)):
        raise InputError(f"{item.name}: column {text_field!r} holds {kind}, strings are needed")
    return opened


def _row_group_units(opened: Any, text_field: str) -> list[Unit]:
    """Row groups in a row that hold UNIT_BYTES of text together."""
    column = opened.schema_arrow.names.index(text_field)
    leaves = [opened.metadata.schema.column(i).path for i in range(len(opened.metadata.schema))]
    column = leaves.index(text_field) if text_field in leaves else column
    units: list[Unit] = []
    start = weight = 0
    groups = opened.metadata.num_row_groups
    for group in range(groups):
        weight += opened.metadata.row_group(group).column(column).total_uncompressed_size
        if weight >= UNIT_BYTES or group == groups - 1:
            units.append(Unit(start, group + 1, weight))
            start, weight = group + 1, 0
    return units or [Unit(0, 0, 0)]


def _parquet_chunks(
    file: IO[bytes], item: Input, unit: Unit, text_field: str, resume: int | None, chunk_bytes: int
) -> Iterator[Chunk]:
    """Places are rows within the unit."""
    with tempfile.TemporaryFile() if item.compression else contextlib.nullcontext() as scratch:
        if scratch is not None:  # Parquet is read from its end, which a packed stream cannot be
            shutil.copyfileobj(file, scratch, CHUNK_BYTES)
        opened = _parquet(scratch or file, item, text_field)
        groups = range(unit.start, opened.num_row_groups if unit.end is None else unit.end)
        batches = opened.iter_batches(_ROWS, row_groups=groups, columns=[text_field], use_threads=False)
        rows = (row for batch in batches for row in batch.column(0).to_pylist())
        behind = 0
        for chunk in _row_chunks(rows, item.name, resume or 0, chunk_bytes):
            behind += chunk.size
            chunk.stored = behind if scratch is None else behind // PACKING
            yield chunk


def _hub_chunks(item: Input, text_field: str, resume: int, chunk_bytes: int) -> Iterator[Chunk]:
    """Places are rows."""
    datasets = need_extra("datasets", "hub", f"{item.name}:")
    parts = hub_parts(item.name)
    rows = datasets.load_dataset(
        parts["name"], parts["config"], split=parts["split"] or "train", revision=parts["revision"], streaming=True
    )
    if rows.column_names and text_field not in rows.column_names:
        raise InputError(
            f"{item.name} has no column {text_field!r}; its columns are {', '.join(rows.column_names)[:200]}; name one "
            "by --set text_field=..."
        )
    # the rows before `resume` are passed over by `datasets`, without being decoded where it can
    texts = (row.get(text_field) for row in (rows.skip(resume) if resume else rows))
    for chunk in _row_chunks(texts, item.name, 0, chunk_bytes):
        chunk.offset += resume
        chunk.after += resume
        yield chunk


def _row_chunks(rows: Iterator[Any], name: str, resume: int, chunk_bytes: int) -> Iterator[Chunk]:
    """Rows of text as chunks; those without a text are counted."""
    place = start = resume
    texts: list[str] = []
    size = 0
    counts: Counter[str] = Counter()
    for row in itertools.islice(rows, resume, None):
        place += 1
        if row is None:
            counts["rows without a text"] += 1
        elif not isinstance(row, str):
            raise InputError(f"{name}, row {place}: a {type(row).__name__} where a text is needed")
        else:
            texts.append(row)
            size += _size(row)
        if size >= chunk_bytes:
            yield Chunk("texts", texts, start, place, size, 0, counts=counts)
            texts, size, counts, start = [], 0, Counter(), place
    if texts or counts:
        yield Chunk("texts", texts, start, place, size, 0, counts=counts)
