"""Plain text and JSON Lines: files that can be entered at any byte, each document read once whoever reads what."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import IO

from bertship.errors import InputError
from train.chunks import CHUNK_BYTES, BadRecord, Chunk, Unit, without_surrogates
from train.inputs import Input

_LONGEST_LINE = 1 << 26  # bytes of a line of JSON
_BOM = b"\xef\xbb\xbf"
_BINARY = "holds NUL bytes: it is binary, or UTF-16; convert it to UTF-8 text"
_JSON = json.JSONDecoder(parse_int=lambda digits: int(digits[:20]))  # of 5,000 digits, too: nothing is wanted of it


def text_chunks(
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


def jsonl_chunks(
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


def decode_text(raw: bytes, chunk: Chunk, counts: Counter[str]) -> tuple[list[str], bool]:
    if (nul := raw.find(b"\0")) >= 0:
        raise BadRecord(chunk.offset + nul, _BINARY)
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


def decode_jsonl(raw: bytes, chunk: Chunk, text_field: str, counts: Counter[str]) -> list[str]:
    _count_line_ends(raw, counts)
    texts = []
    offset = chunk.offset
    for raw_line, line in zip(raw.split(b"\n"), _decoded_lines(raw, counts), strict=False):
        if not (line := line.strip()):
            counts["blank lines"] += 1
        else:
            text = _text_in(line, text_field, offset)
            if text is None:
                counts["rows without a text"] += 1
            else:
                texts.append(without_surrogates(text, counts))
        offset += len(raw_line) + 1
    return texts


def _text_in(line: str, text_field: str, offset: int) -> str | None:
    """The text of a row; None where it is null."""
    try:
        value = _JSON.decode(line)
    except (ValueError, RecursionError) as error:
        if "\0" in line:
            raise BadRecord(offset, _BINARY) from None
        raise BadRecord(offset, f"is not JSON: {str(error)[:200]}") from None
    text = value.get(text_field, 0) if isinstance(value, dict) else 0
    if not isinstance(text, str | None):
        seen = f"a {type(value).__name__}"
        if isinstance(value, dict):
            seen = f"it is {text!r:.60}" if text_field in value else f"keys {list(value)}"[:200]
        raise BadRecord(offset, f'has no string "{text_field}" ({seen}); write {{"{text_field}": "..."}} a line')
    return text
