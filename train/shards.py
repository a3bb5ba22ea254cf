"""Shards: what one part of an input became, complete or not there; and how they become a corpus.

A shard is a folder with, for each split, the ids (`SPLIT.tokens`), the tokens of each sentence (`SPLIT.sentences`,
uint32) and the sentences of each document (`SPLIT.documents`, uint32), and `shard.json` with its counts and the place
where reading goes on behind it. It appears by a rename, so a build that was killed finds whole shards alone.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from train.encode import Encoded

SPLITS = ("train", "heldout")
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class Shard:
    """A finished shard. `after`: where reading goes on; `last`: there is no more in its unit. `joins`: its first
    document goes on with the last one of the shard before; `open_side`: its own last one may go on, on this side."""

    folder: Path
    after: int
    last: bool
    joins: bool
    open_side: str | None
    size: int
    counts: dict[str, int]
    skipped: dict[str, int]


def shard_folder(root: Path, unit: int, number: int) -> Path:
    return root / f"{unit:06}-{number:04}"


def finished_shards(root: Path, unit: int) -> list[Shard]:
    """The shards of a unit that are there, from the first on."""
    found: list[Shard] = []
    while (folder := shard_folder(root, unit, len(found))).is_dir():
        facts = json.loads((folder / "shard.json").read_text(encoding="utf-8"))
        found.append(Shard(folder, **facts))
        if found[-1].last:
            break
    return found


class ShardWriter:
    """Takes the chunks of a shard in order; `close` makes it appear. `open_side`: that of the shard before."""

    def __init__(self, folder: Path, heldout_share: float, open_side: str | None = None) -> None:
        self._folder, self._share = folder, heldout_share
        self._staging = folder.with_name(f".{folder.name}")
        shutil.rmtree(self._staging, ignore_errors=True)
        self._staging.mkdir(parents=True)
        self._files = {
            split: {
                name: (self._staging / f"{split}.{name}").open("wb") for name in ("tokens", "sentences", "documents")
            }
            for split in SPLITS
        }
        # the last document's side and sentences in this shard; it may go on
        self._open = (open_side, 0) if open_side else None
        self._joins = False
        self.counts: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.size = 0

    def add(self, encoded: Encoded, size: int) -> None:
        """Append a chunk that was read from `size` bytes of text."""
        self.size += size
        self.skipped.update(encoded.skipped)
        if not len(encoded.documents):
            return
        heldout = encoded.ranks < self._share
        documents = encoded.documents.astype(np.int64)
        joined = encoded.joins and self._open is not None
        if joined and self._open is not None:
            heldout[0] = self._open[0] == "heldout"
            self._joins = self._joins or not self._open[1]
            documents[0] += self._open[1]
        else:
            self._flush()
        self.counts.update(encoded.counts)
        self.counts["documents"] += len(documents) - joined
        heldout_sentence = np.repeat(heldout, encoded.documents)
        heldout_token = np.repeat(heldout_sentence, encoded.sentences)
        for split, of_sentence, of_token in (
            ("train", ~heldout_sentence, ~heldout_token),
            ("heldout", heldout_sentence, heldout_token),
        ):
            self._write(split, "tokens", encoded.tokens[of_token])
            self._write(split, "sentences", encoded.sentences[of_sentence])
        self._write("train", "documents", documents[:-1][~heldout[:-1]].astype("<u4"))
        self._write("heldout", "documents", documents[:-1][heldout[:-1]].astype("<u4"))
        self._open = (SPLITS[int(heldout[-1])], int(documents[-1]))

    def close(self, after: int, last: bool, within: bool = False) -> Shard:
        """`within`: the place `after` lies within a document."""
        open_side = self._open[0] if within and self._open else None
        self._flush()
        for files in self._files.values():
            for file in files.values():
                file.close()
        facts: dict[str, Any] = {
            "after": after,
            "last": last,
            "joins": self._joins,
            "open_side": open_side,
            "size": self.size,
            "counts": dict(sorted(self.counts.items())),
            "skipped": dict(sorted(self.skipped.items())),
        }
        (self._staging / "shard.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        self._staging.rename(self._folder)
        return Shard(self._folder, **facts)

    def _flush(self) -> None:
        if self._open and self._open[1]:
            self._write(self._open[0], "documents", np.array([self._open[1]], "<u4"))
        self._open = None

    def _write(self, split: str, name: str, values: np.ndarray) -> None:
        self._files[split][name].write(values.tobytes())


def merge_shards(shards: Iterable[Shard], out: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Put shards end to end as the three files of each split below `out`; returns summed counts and skips."""
    counts: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    ends = {(split, name): 0 for split in SPLITS for name in ("sentences", "documents")}
    for split in SPLITS:
        (out / split).mkdir()
        for name in ("sentences", "documents"):
            (out / split / f"{name}.bin").write_bytes(np.zeros(1, "<i8").tobytes())
        (out / split / "tokens.bin").touch()
    before: Shard | None = None
    for shard in shards:
        counts.update(shard.counts)
        skipped.update(shard.skipped)
        if shard.joins and before and before.open_side:
            with (out / before.open_side / "documents.bin").open("r+b") as file:
                file.truncate(file.seek(0, 2) - 8)  # its last document does not end there
        before = shard
        for split in SPLITS:
            with (
                (shard.folder / f"{split}.tokens").open("rb") as source,
                (out / split / "tokens.bin").open("ab") as target,
            ):
                shutil.copyfileobj(source, target, _BLOCK_BYTES)
            for name in ("sentences", "documents"):
                with (
                    (shard.folder / f"{split}.{name}").open("rb") as source,
                    (out / split / f"{name}.bin").open("ab") as target,
                ):
                    ends[split, name] = _append_offsets(source, target, ends[split, name])
    return dict(counts), dict(sorted(skipped.items()))


def _append_offsets(source: IO[bytes], target: IO[bytes], end: int) -> int:
    """Lengths, uint32, as offsets, int64, that go on from `end`; returns the last one."""
    while block := source.read(_BLOCK_BYTES):
        offsets = end + np.cumsum(np.frombuffer(block, "<u4"), dtype=np.int64)
        target.write(offsets.astype("<i8").tobytes())
        end = int(offsets[-1])
    return end
