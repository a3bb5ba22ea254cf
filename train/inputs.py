"""What a corpus is made of: files, folders, globs, URLs and hub data sets, each known by its format and its contents.

A source is one of

    books/                          a folder: every file in it of a known kind, in the order of their names
    'wiki/*.jsonl.zst'              a glob, `**` for any depth
    s3://bucket/part-*.parquet      any address that fsspec knows
    hub:wikimedia/wikipedia:20231101.en     a data set on the Hugging Face hub:
                                    NAME[@REVISION][:CONFIG[:SPLIT]][#ROWS], so many rows making one document
"""

import bz2
import contextlib
import glob
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree

from bertship.artifacts import MANIFEST, sha256_file, sha256_json
from bertship.errors import BertshipError, InputError

KINDS = {".txt": "text", ".jsonl": "jsonl", ".parquet": "parquet", ".xml": "dump"}
COMPRESSIONS = (".gz", ".bz2", ".zst")
_HEAD_BYTES = 4096  # enough to find the root element of a dump
_BLOCK_BYTES = 1 << 20  # of a compressed file, taken at once
_BIGGEST_WINDOW_BYTES = 1 << 29  # of a Zstandard archive, held in memory while it is unpacked
_HUB = re.compile(
    r"hub:(?P<name>[^@:#]+)(@(?P<revision>[^:#]+))?(:(?P<config>[^:#]+))?(:(?P<split>[^:#]+))?(#(?P<rows>[1-9]\d*))?"
)

Source = str | Path


@dataclass(frozen=True)
class Input:
    """One file or data set. `name`: path, URL or `hub:...`; `kind`: text, jsonl, parquet, dump or hub; `compression`:
    a suffix or nothing; `size`: bytes as stored, None where unknown; `stamp`: what changes with the contents, the
    SHA-256 of a local file, else what the store says; `modified`: of a local file, in ns, before it was hashed."""

    name: str
    kind: str
    compression: str
    size: int | None
    stamp: str
    modified: int = 0

    @property
    def remote(self) -> bool:
        return "://" in self.name

    @property
    def identity(self) -> tuple[str, str]:
        """For fingerprints: a local file may be moved and is the same still."""
        return (self.name if self.remote or self.kind == "hub" else Path(self.name).name, self.stamp)


def find_inputs(sources: Sequence[Source | Input], report: Callable[[str], None] = lambda line: None) -> list[Input]:
    """The inputs that `sources` name, in their order; a folder's and a glob's in the order of their names.

    Files of other kinds in a folder are left out and counted, and so is what this project has written there, such as
    the vocabulary of a corpus; an input that is named twice is taken once; `report` is told. Raises InputError for
    what is missing, unknown, unreadable, and for an extra that is not installed.
    """
    if not sources:
        raise InputError("no source files for the corpus; name at least one")
    found: dict[str, Input] = {}
    for source in sources:
        for item in [source] if isinstance(source, Input) else _inputs_of(str(source), report):
            if item.name in found:
                report(f"{item.name} is named twice; it is taken once")
            found.setdefault(item.name, item)
    return list(found.values())


def open_input(item: Input) -> tuple[IO[bytes], IO[bytes]]:
    """The input's bytes, unpacked, and the file as it is stored, whose place tells how far the reading is."""
    stored = _open_stored(item.name)
    if item.compression == ".gz":
        return gzip.GzipFile(fileobj=stored), stored  # type: ignore[return-value]
    if item.compression == ".bz2":
        return bz2.BZ2File(stored), stored
    if item.compression == ".zst":
        return io.BufferedReader(_Zstandard(stored), _BLOCK_BYTES), stored
    return stored, stored


@contextlib.contextmanager
def faults_named(item: Input) -> Iterator[None]:
    """What goes wrong while an input is read, as one line that names it. Raises InputError."""
    try:
        yield
    except BertshipError:
        raise
    except ElementTree.ParseError as error:
        raise InputError(f"{item.name} is no complete XML at line {error.position[0]}: {error}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{item.name} is a damaged or truncated archive: {error}") from None
    except ImportError as error:
        raise InputError(f"cannot read {item.name}: {_one_line(error)}; see docs/corpus.md for extras") from None
    except OSError as error:
        if error.errno is None and item.compression:  # bz2 reports bad data as a plain OSError
            raise InputError(f"{item.name} is a damaged or truncated archive: {_one_line(error)}") from None
        raise InputError(f"cannot read {item.name}: {error.strerror or _one_line(error)}") from None
    except Exception as error:
        if not item.remote and item.kind != "hub" and item.kind != "parquet":
            raise  # a fault of this code, not of the input
        # stores, the hub and Arrow have exceptions of many families
        raise InputError(f"cannot read {item.name}: {type(error).__name__}: {_one_line(error)}") from None


def hub_parts(name: str) -> dict[str, str | None]:
    """`name`, `revision`, `config`, `split` and `rows` of a `hub:...` source. Raises InputError."""
    match = _HUB.fullmatch(name)
    if not match:
        raise InputError(f"{name!r} is no data set; hub:NAME[@REVISION][:CONFIG[:SPLIT]][#ROWS] is needed")
    return match.groupdict()


def need_extra(module: str, extra: str, what: str) -> Any:
    """Import an optional package, or raise InputError with the extra that brings it."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(
            f"{what} needs the package {module.partition('.')[0]}, which is not installed; `pip install -e "
            f"'.[{extra}]'` in the checkout brings it"
        ) from None


def _inputs_of(source: str, report: Callable[[str], None]) -> list[Input]:
    if source.startswith("hub:"):
        return [_hub_input(source)]
    if "://" in source:
        return _remote_inputs(source, report)
    if not source:
        raise InputError("a source of the corpus has no name; leave it out, or name a file, a folder or a glob")
    path = Path(source)
    if path.is_dir():
        files = sorted(
            file
            for file in path.rglob("*")
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        return _known(source, _not_ours(source, path, [str(file) for file in files], report), report)
    if path.is_file():
        return [_local_input(source)]
    if glob.has_magic(source):
        # not Path.glob: a pattern may be absolute
        matches = sorted(match for match in glob.glob(source, recursive=True) if Path(match).is_file())  # noqa: PTH207
        if not matches:
            raise InputError(f"no file matches {source}")
        fixed = itertools.takewhile(lambda part: not glob.has_magic(part), path.parts)
        return [_local_input(match) for match in _not_ours(source, Path(*fixed), matches, report)]
    if path.exists():
        raise InputError(f"{source} is a pipe or a device; a file is needed, as it is read more than once")
    hint = f"; for a data set of the hub write hub:{source}" if re.fullmatch(r"[\w.-]+/[\w.-]+", source) else ""
    raise InputError(f"no such file: {source}{hint}")


def _known(folder: str, names: list[str], report: Callable[[str], None]) -> list[Input]:
    """The files of a folder that are documents, by suffix or, for parts of dumps, by content."""
    taken, others = [], []
    for name in names:
        try:
            taken.append(_remote_input(name) if "://" in name else _local_input(name))
        except _UnknownKind:
            others.append(name)
    if not taken:
        raise InputError(
            f"no documents in {folder}: none of its {len(names)} files ends in {', '.join(KINDS)}, or that with "
            f"{', '.join(COMPRESSIONS)}"
        )
    if others:
        report(f"{folder}: {len(others)} files of other kinds are left out, the first is {others[0]}")
    return taken


def _not_ours(source: str, root: Path, names: list[str], report: Callable[[str], None]) -> list[str]:
    """`names` without what lies, at or below `root`, in a folder that this project has written: runs among documents
    would bring their vocabularies and logs into the next corpus."""
    written: dict[Path, bool] = {}

    def ours(folder: Path) -> bool:
        if folder not in written:
            written[folder] = _is_run(folder) or (folder != root and root in folder.parents and ours(folder.parent))
        return written[folder]

    taken = [name for name in names if not ours(Path(name).parent)]
    if left_out := [name for name in names if ours(Path(name).parent)]:
        report(f"{source}: {len(left_out)} files in runs of bertship are left out, the first is {left_out[0]}")
    if not taken and left_out:
        raise InputError(f"no documents in {source}: all of its files are in runs of bertship")
    return taken


def _is_run(folder: Path) -> bool:
    """Whether a stage has written `folder`, or a training in progress is there."""
    if folder.suffix == ".training" and (folder / "recipe.json").is_file():
        return True
    try:
        facts = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(facts, dict) and {"stage", "fingerprint", "versions", "files"} <= facts.keys()


class _UnknownKind(InputError):
    pass


def _local_input(name: str) -> Input:
    kind, compression = _kind_of(name)
    path = Path(name)
    try:
        facts = path.stat()
        return Input(name, kind, compression, facts.st_size, sha256_file(path), facts.st_mtime_ns)
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror}") from None


def has_changed(item: Input) -> bool:
    """Whether a local file is no longer what it was when it was hashed; a file that is gone has."""
    if item.remote or item.kind == "hub":
        return False
    path = Path(item.name)
    try:
        facts = path.stat()
        if (facts.st_size, facts.st_mtime_ns) == (item.size, item.modified):
            return False
        return sha256_file(path) != item.stamp
    except OSError:
        return True


def _kind_of(name: str) -> tuple[str, str]:
    path = Path(name.partition("?")[0] if "://" in name else name)
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    suffix = suffixes[-1] if suffixes else ""
    if suffix in KINDS:
        return KINDS[suffix], compression
    # published parts of dumps carry page numbers behind .xml
    probe = Input(name, "dump", compression, None, "")
    with faults_named(probe):
        unpacked, stored = open_input(probe)
        with stored, unpacked:
            if b"<mediawiki" in unpacked.read(_HEAD_BYTES):
                return "dump", compression
    raise _UnknownKind(
        f"{name}: unknown suffix {suffix or path.suffix!r}; known are {', '.join(KINDS)}, each also with "
        f"{', '.join(COMPRESSIONS[:-1])} or {COMPRESSIONS[-1]}"
    )


def _file_system(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:  # its message names the package that the protocol needs
        raise InputError(
            f"cannot read {url}: {_one_line(error)} (`pip install -e '.[scale]'` in the checkout brings s3fs)"
        ) from None
    except ValueError as error:
        raise InputError(f"cannot read {url}: {_one_line(error)}") from None


def _remote_inputs(url: str, report: Callable[[str], None]) -> list[Input]:
    probe = Input(url, "hub", "", None, "")
    with faults_named(probe):
        files, path = _file_system(url)
        if glob.has_magic(path) and "?" not in path:
            names = sorted(files.glob(path))
            if not names:
                raise InputError(f"no file matches {url}")
            return [_remote_input(files.unstrip_protocol(name)) for name in names]
        try:
            kind = files.info(path)["type"]
        except FileNotFoundError:
            raise InputError(f"no such file: {url}") from None
        if kind == "directory":
            names = [files.unstrip_protocol(name) for name in sorted(files.find(path))]
            return _known(url, [name for name in names if not name.rpartition("/")[2].startswith(".")], report)
    return [_remote_input(url)]


def _remote_input(url: str) -> Input:
    kind, compression = _kind_of(url)
    with faults_named(Input(url, kind, compression, None, "")):
        files, path = _file_system(url)
        facts = files.info(path)
    marks = ("ETag", "etag", "md5Hash", "crc32c", "LastModified", "last_modified", "mtime", "created", "size")
    stamp = " ".join(f"{mark}={facts[mark]}" for mark in marks if facts.get(mark) is not None)
    return Input(url, kind, compression, facts.get("size"), stamp)


def _hub_input(source: str) -> Input:
    parts = hub_parts(source)
    need_extra("datasets", "hub", f"{source}:")
    folder = Path(parts["name"] or "")
    if folder.is_dir():  # a data set that lies here in the hub's layout
        files = {str(file): sha256_file(file) for file in sorted(folder.rglob("*")) if file.is_file()}
        return Input(source, "hub", "", None, sha256_json(files))
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(str(parts["name"]), revision=parts["revision"]).sha
    except Exception as error:  # the hub's client raises errors of many families
        raise InputError(
            f"cannot get {source!r} from the Hugging Face hub ({type(error).__name__}); check the name and the network"
        ) from None
    return Input(source, "hub", "", None, str(commit))


def _open_stored(name: str) -> IO[bytes]:
    if "://" not in name:
        return Path(name).open("rb")
    files, path = _file_system(name)
    # the buffer brings `readline` with a limit, which a store's own files lack
    return io.BufferedReader(files.open(path, "rb"), _BLOCK_BYTES)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


class _Zstandard(io.RawIOBase):
    """A `.zst` file unpacked, frame after frame; one that ends within a frame is an EOFError."""

    def __init__(self, stored: IO[bytes]) -> None:
        self._library = need_extra("zstandard", "train", "a .zst file")
        self._stored = stored
        self._frame = self._new_frame()
        self._fresh = True  # nothing of the frame has been read
        self._rest = b""  # packed
        self._ready = memoryview(b"")  # unpacked

    def _new_frame(self) -> Any:
        return self._library.ZstdDecompressor(max_window_size=_BIGGEST_WINDOW_BYTES).decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._rest or self._stored.read(_BLOCK_BYTES // 8)
            if not packed:
                if self._fresh:
                    return 0
                raise EOFError("it ends within a Zstandard frame")
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except self._library.ZstdError as error:
                raise EOFError(str(error)) from None
            self._rest, self._fresh = b"", False
            if self._frame.eof:
                self._rest, self._frame, self._fresh = self._frame.unused_data, self._new_frame(), True
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
