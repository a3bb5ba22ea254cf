"""What readers and tokenizing processes pass on: chunks of documents, and the units of an input that hold them."""

from collections import Counter
from dataclasses import dataclass, field

CHUNK_BYTES = 1 << 20  # of text, decoded and tokenized in one call
UNIT_BYTES = 1 << 26  # of a file that can be entered anywhere, so that many machines can share it
PACKING = 4  # by which text shrinks when it is packed, about


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


def size_of(text: str) -> int:
    """Bytes as UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def without_surrogates(text: str, counts: Counter[str]) -> str:
    """Half of a surrogate pair is legal JSON and no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        counts["texts with half surrogate pairs (replaced)"] += 1
        return text.encode("utf-8", "replace").decode("utf-8")
    return text
