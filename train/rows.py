"""Parquet files and data sets of the Hugging Face hub: a column of texts, row by row."""

import contextlib
import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

from bertship.errors import InputError
from train.chunks import CHUNK_BYTES, PACKING, Chunk, Unit, size_of
from train.inputs import Input, hub_parts, need_extra

_ROWS = 128  # of a Parquet file, held at once


def open_parquet(file: IO[bytes], item: Input, text_field: str) -> Any:
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


def row_group_units(opened: Any, text_field: str, unit_bytes: int) -> list[Unit]:
    """Row groups in a row that hold `unit_bytes` of text together."""
    column = opened.schema_arrow.names.index(text_field)
    leaves = [opened.metadata.schema.column(i).path for i in range(len(opened.metadata.schema))]
    column = leaves.index(text_field) if text_field in leaves else column
    units: list[Unit] = []
    start = weight = 0
    groups = opened.metadata.num_row_groups
    for group in range(groups):
        weight += opened.metadata.row_group(group).column(column).total_uncompressed_size
        if weight >= unit_bytes or group == groups - 1:
            units.append(Unit(start, group + 1, weight))
            start, weight = group + 1, 0
    return units or [Unit(0, 0, 0)]


def parquet_chunks(
    file: IO[bytes],
    item: Input,
    unit: Unit,
    text_field: str,
    resume: int | None,
    chunk_bytes: int,
    rows_per_document: int,
) -> Iterator[Chunk]:
    """Places are rows within the unit."""
    with tempfile.TemporaryFile() if item.compression else contextlib.nullcontext() as scratch:
        if scratch is not None:  # Parquet is read from its end, which a packed stream cannot be
            shutil.copyfileobj(file, scratch, CHUNK_BYTES)
        opened = open_parquet(scratch or file, item, text_field)
        groups = range(unit.start, opened.num_row_groups if unit.end is None else unit.end)
        batches = opened.iter_batches(_ROWS, row_groups=groups, columns=[text_field], use_threads=False)
        rows = (row for batch in batches for row in batch.column(0).to_pylist())
        behind = 0
        for chunk in _row_chunks(rows, item.name, resume or 0, chunk_bytes, rows_per_document):
            behind += chunk.size
            chunk.stored = behind if scratch is None else behind // PACKING
            yield chunk


def hub_chunks(item: Input, text_field: str, resume: int, chunk_bytes: int, rows_per_document: int) -> Iterator[Chunk]:
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
    for chunk in _row_chunks(texts, item.name, 0, chunk_bytes, int(parts["rows"] or rows_per_document)):
        chunk.offset += resume
        chunk.after += resume
        yield chunk


def _row_chunks(
    rows: Iterator[Any], name: str, resume: int, chunk_bytes: int, rows_per_document: int
) -> Iterator[Chunk]:
    """Rows of text as chunks, so many of them a document; those without a text are counted."""
    place = start = resume
    texts: list[str] = []
    document: list[str] = []
    size = 0
    counts: Counter[str] = Counter()

    def end_document() -> None:
        if document:
            texts.append("\n".join(document))
            document.clear()

    for row in itertools.islice(rows, resume, None):
        place += 1
        if row is None:
            counts["rows without a text"] += 1
        elif not isinstance(row, str):
            raise InputError(f"{name}, row {place}: a {type(row).__name__} where a text is needed")
        else:
            document.append(row)
            size += size_of(row)
        if place % rows_per_document == 0:
            end_document()
            if size >= chunk_bytes:
                yield Chunk("texts", texts, start, place, size, 0, counts=counts)
                texts, size, counts, start = [], 0, Counter(), place
    end_document()
    if texts or counts:
        yield Chunk("texts", texts, start, place, size, 0, counts=counts)
