"""Document readers: plain text, JSON Lines and MediaWiki dumps, compressed or not, to one text a document.

Faulty bytes and empty documents are part of any large collection: they are read around and counted. A file that is
not what its name says, or that ends too soon, is an error, because a corpus that silently lacks half of its text
looks like a good one.
"""

import bz2
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree

from bertship.errors import InputError
from train.wikitext import prose

_COMPRESSIONS: dict[str, Callable[[Path], Any]] = {".gz": gzip.GzipFile, ".bz2": bz2.BZ2File}
_PIECE_BYTES = 1 << 20  # a longer line of plain text is read in pieces
_DOCUMENT_CHARACTERS = 1 << 23  # a longer plain-text document is cut, so that a file without blank lines fits in memory
_HEAD_BYTES = 4096  # enough to find the root element of a dump
_REDIRECT = re.compile(r"\s*#redirect\b", re.IGNORECASE)


def read_documents(path: Path, skipped: Counter[str] | None = None) -> Iterator[str]:
    """Texts of the documents in `path`, by its suffix.

    `.txt`: documents parted by blank lines. `.jsonl`: one object a line with a string `"text"`. `.xml`: a MediaWiki
    dump, of which articles (namespace 0, no redirects) are taken as prose. Each may end in `.gz` or `.bz2`; a dump
    is also known by its content, since published parts of dumps carry page numbers behind `.xml`.

    Adds to `skipped` what was left out or repaired, by reason. Raises InputError for a missing file, an unknown
    suffix, a damaged archive, a line that is no such object, and XML that is no dump.
    """
    path = Path(path)
    counts = Counter() if skipped is None else skipped
    kind, reader = _reader_of(path)
    try:
        with _open(path) as file:
            yield from reader(file, path, counts)
    except ElementTree.ParseError as error:
        raise InputError(f"{path} is no complete {kind} at line {error.position[0]}: {error}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is a damaged or truncated archive: {error}") from None
    except OSError as error:
        if error.errno is None:  # bz2 reports bad data as a plain OSError
            raise InputError(f"{path} is a damaged or truncated archive: {error}") from None
        raise InputError(f"cannot read {path}: {error.strerror}") from None


_Reader = Callable[[IO[bytes], Path, Counter[str]], Iterator[str]]


def _open(path: Path) -> IO[bytes]:
    opener = _COMPRESSIONS.get(path.suffix.lower())
    return opener(path) if opener else path.open("rb")


def _reader_of(path: Path) -> tuple[str, _Reader]:
    if path.is_dir():
        raise InputError(f"{path} is a directory; name its files")
    if not path.is_file():
        raise InputError(f"no such file: {path}")
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    suffix = suffixes[-1] if suffixes else ""
    if suffix in _READERS:
        return _READERS[suffix]
    try:
        with _open(path) as file:
            if b"<mediawiki" in file.read(_HEAD_BYTES):
                return _READERS[".xml"]
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is a damaged or truncated archive: {error}") from None
    raise InputError(
        f"{path}: unknown suffix {suffix or path.suffix!r}; known are {', '.join(_READERS)}, each also with "
        f"{' or '.join(_COMPRESSIONS)}"
    )


def _decode(raw: bytes, counts: Counter[str]) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        counts["invalid UTF-8 (bytes replaced)"] += 1
        return raw.decode("utf-8", "replace")


def _without_bom(lines: Iterator[bytes]) -> Iterator[bytes]:
    for number, line in enumerate(lines):
        yield line if number else line.removeprefix(b"\xef\xbb\xbf")


def _read_text(file: IO[bytes], path: Path, counts: Counter[str]) -> Iterator[str]:
    lines: list[str] = []
    characters = 0
    blank = False
    for raw in _without_bom(_pieces(file)):
        if b"\0" in raw:
            raise InputError(f"{path} holds NUL bytes: it is binary, or UTF-16; convert it to UTF-8 text")
        line = _decode(raw, counts).strip()
        too_long = characters + len(line) > _DOCUMENT_CHARACTERS
        if lines and (not line or too_long):
            counts["cuts in overlong documents"] += bool(line)
            yield "\n".join(lines)
            lines, characters = [], 0
        if line:
            lines.append(line)
            characters += len(line)
        elif blank:
            # a run of blank lines parts documents once; what is between them is an empty document
            counts["empty documents"] += 1
        blank = not line
    if lines:
        yield "\n".join(lines)


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    """Lines, overlong ones in pieces that end at a space or at least between characters."""
    rest = b""
    while piece := file.readline(_PIECE_BYTES):
        piece, rest = rest + piece, b""
        if not piece.endswith(b"\n") and len(piece) >= _PIECE_BYTES:
            cut = piece.rfind(b" ") + 1
            if not cut:
                cut = len(piece)
                while cut > len(piece) - 4 and piece[cut - 1] & 0xC0 == 0x80:
                    cut -= 1
                cut -= piece[cut - 1] >= 0xC0
            piece, rest = piece[:cut], piece[cut:]
        yield piece
    if rest:
        yield rest


def _read_jsonl(file: IO[bytes], path: Path, counts: Counter[str]) -> Iterator[str]:
    for number, raw in enumerate(_without_bom(iter(file)), 1):
        line = _decode(raw, counts).strip()
        if not line:
            counts["blank lines"] += 1
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {number} is not JSON: {str(error)[:200]}") from None
        text = value.get("text") if isinstance(value, dict) else None
        if not isinstance(text, str):
            seen = f"keys {list(value)}"[:200] if isinstance(value, dict) else f"a {type(value).__name__}"
            raise InputError(f'{path}, line {number} has no string "text" ({seen}); write {{"text": "..."}} a line')
        # half of a surrogate pair is legal JSON and no character
        yield text.encode("utf-8", "replace").decode("utf-8")


def _read_dump(file: IO[bytes], path: Path, counts: Counter[str]) -> Iterator[str]:
    events = ElementTree.iterparse(file, events=("start", "end"))
    _, root = next(events)
    if _tag(root) != "mediawiki":
        raise InputError(f"{path} is XML but no MediaWiki dump: its root is <{_tag(root)}>, <mediawiki> is needed")
    for event, element in events:
        if event != "end" or _tag(element) != "page":
            continue
        fields = {_tag(child): child.text or "" for child in element.iter()}
        text = fields.get("text", "")
        if fields.get("ns", "0").strip() != "0":
            counts["pages that are no articles"] += 1
        elif "redirect" in fields or _REDIRECT.match(text):
            counts["redirects"] += 1
        elif article := prose(text):
            yield article
        else:
            counts["articles without prose"] += 1
        root.clear()  # or the tree of the whole dump would grow in memory


def _tag(element: ElementTree.Element) -> str:
    """The name without its namespace, which differs between versions of the export format."""
    return element.tag.rpartition("}")[2]


_READERS: dict[str, tuple[str, _Reader]] = {
    ".txt": ("text", _read_text),
    ".jsonl": ("JSON Lines", _read_jsonl),
    ".xml": ("XML", _read_dump),
}
