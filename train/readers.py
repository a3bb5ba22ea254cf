"""Document readers: plain text, JSON Lines, Parquet, MediaWiki dumps and hub data sets, in chunks of documents.

Reading is parted in two. `read_chunks` runs in one process and only parts an input into chunks of about a megabyte,
without decoding what need not be decoded; `decode` turns a chunk into texts and runs wherever there is a core.

Faulty bytes and empty documents are part of any large collection: they are read around and counted. A file that is
not what its name says, or that ends too soon, is an error, because a corpus that silently lacks half of its text
looks like a good one.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import IO
from xml.etree import ElementTree

from bertship.errors import InputError
from train.chunks import CHUNK_BYTES, PACKING, UNIT_BYTES, BadRecord, Chunk, Unit, size_of, without_surrogates
from train.inputs import Input, Source, faults_named, find_inputs, open_input
from train.lines import decode_jsonl, decode_text, jsonl_chunks, text_chunks
from train.rows import hub_chunks, open_parquet, parquet_chunks, row_group_units
from train.wikitext import prose

_REDIRECT = re.compile(r"\s*#redirect\b", re.IGNORECASE)


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
            return row_group_units(open_parquet(file, item, text_field), text_field, UNIT_BYTES)
    return [Unit(0, None, size * PACKING if item.compression else size)]


def read_chunks(
    item: Input,
    unit: Unit,
    text_field: str = "text",
    resume: int | None = None,
    within: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    rows_per_document: int = 1,
) -> Iterator[Chunk]:
    """The documents that begin in `unit`, or what is left of them from the place `resume` on, which may lie `within`
    a document. Raises InputError."""
    with faults_named(item):
        if item.kind == "hub":
            yield from hub_chunks(item, text_field, resume or 0, chunk_bytes, rows_per_document)
            return
        unpacked, stored = open_input(item)
        with stored, unpacked:
            if item.kind == "text":
                yield from text_chunks(unpacked, stored, unit, resume, within, chunk_bytes)
            elif item.kind == "jsonl":
                yield from jsonl_chunks(unpacked, stored, item, unit, resume, chunk_bytes)
            elif item.kind == "dump":
                yield from _dump_chunks(unpacked, stored, item, resume or 0, chunk_bytes)
            else:
                yield from parquet_chunks(unpacked, item, unit, text_field, resume, chunk_bytes, rows_per_document)


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
            texts, joins = decode_text(chunk.payload, chunk, found)
        else:
            texts = decode_jsonl(chunk.payload, chunk, text_field, found)
    elif chunk.kind == "wikitext":
        articles = [prose(text) for text in chunk.payload]
        texts = [without_surrogates(article, found) for article in articles if article]  # from entities
        found["articles without prose"] += len(articles) - len(texts)
    else:
        texts = [without_surrogates(text, found) for text in chunk.payload]
    counts.update(+found)  # none of what did not occur
    return texts, joins


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
                size += size_of(text)
        root.clear()  # or the tree of the whole dump would grow in memory
        if size >= chunk_bytes:
            yield Chunk("wikitext", texts, start, pages, size, stored.tell(), counts=counts)
            texts, size, counts, start = [], 0, Counter(), pages
    if texts or counts:
        yield Chunk("wikitext", texts, start, pages, size, stored.tell(), counts=counts)


def _tag(element: ElementTree.Element) -> str:
    """The name without its namespace, which differs between versions of the export format."""
    return element.tag.rpartition("}")[2]


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
