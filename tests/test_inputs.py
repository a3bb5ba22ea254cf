"""train/inputs.py, train/readers.py: what names documents, every format and packing, files that are read in parts."""

import bz2
import functools
import gzip
import http.server
import io
import itertools
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from bertship.errors import InputError
from train import lines, readers
from train.chunks import CHUNK_BYTES, Chunk, Unit
from train.inputs import find_inputs, hub_parts
from train.readers import decode, read_chunks, read_documents, units_of

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
DOCUMENTS = ["One. Two.", "Drei ß und é.", "四。", "Fünf\nsechs 🙂"]


def parquet(texts: list[str | None], column: str = "text", **options: object) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(texts)), column: texts}), out, **options)
    return out.getvalue()


def jsonl(texts: list[str], column: str = "text") -> bytes:
    return "".join(json.dumps({column: text}) + "\n" for text in texts).encode()


FORMATS = {".txt": lambda texts: "\n\n".join(texts).encode(), ".jsonl": jsonl, ".parquet": parquet}


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_in_every_packing(tmp_path: Path, suffix: str, packing: str) -> None:
    path = tmp_path / f"a{suffix}{packing}"
    path.write_bytes(PACK[packing](FORMATS[suffix](DOCUMENTS)))
    assert list(read_documents(path)) == DOCUMENTS
    (item,) = find_inputs([path])
    assert (item.name, item.size) == (str(path), path.stat().st_size)


@pytest.mark.parametrize("packing", [".gz", ".bz2", ".zst"])
def test_archives_of_several_members(tmp_path: Path, packing: str) -> None:
    path = tmp_path / f"a.txt{packing}"
    path.write_bytes(PACK[packing](b"One.\n\nTw") + PACK[packing](b"o.") + PACK[packing](b""))
    assert list(read_documents(path)) == ["One.", "Two."]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt.zst", b"x" * 50, "damaged or truncated archive"),
        ("a.txt.zst", PACK[".zst"](b"words " * 999)[:-5], "damaged or truncated archive"),
        ("a.parquet", b"x" * 50, r"cannot read .*a\.parquet: "),
        ("a.parquet", parquet(["x"] * 999)[:-9], r"cannot read .*a\.parquet: "),
        ("a.parquet", parquet(["x"], "body"), "a.parquet has no column 'text'; its columns are id, body; .*text_field"),
        ("a.parquet", parquet([3], "text"), "a.parquet: column 'text' holds int64, strings are needed"),  # type: ignore[list-item]
        ("a.parquet.gz", gzip.compress(b"x"), r"cannot read .*a\.parquet\.gz: "),
        ("a.jsonl", jsonl(["x"]) + b'{"text": 12}\n', 'a.jsonl, line 2 has no string "text" .it is 12.; write'),
        ("a.jsonl", '{"text": "x"}\n'.encode("utf-16"), "a.jsonl, line 1 holds NUL bytes: it is binary, or UTF-16"),
        ("a.jsonl.zst", PACK[".zst"](jsonl(["x"] * 70) + b"{\n"), "a.jsonl.zst, line 71 is not JSON"),
    ],
)
def test_bad_files_are_one_line_errors(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        list(read_documents(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_rows_without_a_text_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet(["x", None, "y", None], row_group_size=1))
    skipped: Counter[str] = Counter()
    assert list(read_documents(tmp_path / "a.parquet", skipped)) == ["x", "y"]
    assert skipped == {"rows without a text": 2}
    (tmp_path / "a.jsonl").write_bytes(b'{"text": null}\n{"text": "x", "number": ' + b"9" * 5000 + b"}\n")
    skipped.clear()
    assert list(read_documents(tmp_path / "a.jsonl", skipped)) == ["x"]
    assert skipped == {"rows without a text": 1}


def test_rows_of_single_sentences_make_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet(["a", "b", None, "c", "d", "e", "f"]))
    (item,) = find_inputs([path])
    (unit,) = units_of(item)
    chunks = list(read_chunks(item, unit, chunk_bytes=1, rows_per_document=2))
    assert [chunk.payload for chunk in chunks] == [["a\nb"], ["c"], ["d\ne"], ["f"]]
    rest = list(read_chunks(item, unit, resume=chunks[1].after, chunk_bytes=1, rows_per_document=2))
    assert [chunk.payload for chunk in rest] == [["d\ne"], ["f"]]


def test_another_field_may_hold_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet(["x"], "body"))
    (tmp_path / "a.jsonl").write_bytes(jsonl(["y"], "body"))
    assert [list(read_documents(tmp_path / f"a{s}", text_field="body")) for s in (".parquet", ".jsonl")] == [
        ["x"],
        ["y"],
    ]


def test_a_folder_and_a_glob_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.jsonl.gz", "a/B.TXT", ".hidden/c.txt", "a/.c.txt", "notes.pdf", "a/x.xml-p1p2"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"<mediawiki></mediawiki>" if "xml" in name else gzip.compress(b"") if "gz" in name else b"x")
    said: list[str] = []
    found = find_inputs([tmp_path], said.append)
    assert [Path(item.name).relative_to(tmp_path).as_posix() for item in found] == [
        "a/B.TXT",
        "a/x.xml-p1p2",
        "a/z.jsonl.gz",
        "b.txt",
    ]
    assert [(item.kind, item.compression) for item in found] == [
        ("text", ""),
        ("dump", ""),
        ("jsonl", ".gz"),
        ("text", ""),
    ]
    assert said == [f"{tmp_path}: 1 files of other kinds are left out, the first is {tmp_path / 'notes.pdf'}"]
    assert [item.name for item in find_inputs([f"{tmp_path}/**/*.txt"])] == [f"{tmp_path}/b.txt"]
    said.clear()
    assert len(find_inputs([f"{tmp_path}/b.txt", f"{tmp_path}/*.txt"], said.append)) == 1
    assert said == [f"{tmp_path}/b.txt is named twice; it is taken once"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{}/*.txt", "no file matches "),
        ("{}", "no documents in .*: none of its 1 files ends in .txt"),
        ("{}/none.txt", "no such file: "),
        ("owner/name", "no such file: owner/name; for a data set of the hub write hub:owner/name"),
        ("", "a source of the corpus has no name"),
        ("/dev/null", "/dev/null is a pipe or a device; a file is needed"),
        ("hub:", "'hub:' is no data set; hub:NAME"),
        ("nope://a/b.txt", "cannot read nope://a/b.txt: Protocol not known: nope"),
        ("file://{}/none.txt", "no such file: file://"),
        ("gs://bucket/a.txt", "cannot read gs://bucket/a.txt: .*gcsfs"),
    ],
)
def test_sources_that_are_not_there(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "a.pdf").write_bytes(b"x")
    with pytest.raises(InputError, match=message) as caught:
        find_inputs([source.format(tmp_path)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "source", "extra"),
    [
        ("zstandard", "a.txt.zst", "train"),
        ("pyarrow.parquet", "a.parquet", "train"),
        ("datasets", "hub:owner/name", "hub"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str, extra: str
) -> None:
    (tmp_path / "a.txt.zst").write_bytes(PACK[".zst"](b"x"))
    (tmp_path / "a.parquet").write_bytes(parquet(["x"]))
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    package = module.partition(".")[0]
    with pytest.raises(InputError, match=rf"needs the package {package}, .*'\.\[{extra}\]'") as caught:
        list(read_documents(source))
    assert "\n" not in str(caught.value)


def test_the_names_of_hub_data_sets() -> None:
    assert hub_parts("hub:wikimedia/wikipedia@v1:20231101.en:train") == {
        "name": "wikimedia/wikipedia",
        "revision": "v1",
        "config": "20231101.en",
        "split": "train",
        "rows": None,
    }
    assert hub_parts("hub:bookcorpus/bookcorpus@refs/convert/parquet#500") == {
        "name": "bookcorpus/bookcorpus",
        "revision": "refs/convert/parquet",
        "config": None,
        "split": None,
        "rows": "500",
    }


def test_a_hub_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.parquet").write_bytes(parquet([*DOCUMENTS, None]))
    (folder / "test.parquet").write_bytes(parquet(["Test."]))
    skipped: Counter[str] = Counter()
    assert list(read_documents(f"hub:{folder}", skipped)) == DOCUMENTS
    assert skipped == {"rows without a text": 1}
    assert list(read_documents(f"hub:{folder}:default:test")) == ["Test."]
    assert list(read_documents(f"hub:{folder}#3")) == ["\n".join(DOCUMENTS[:3]), DOCUMENTS[3]]
    (item,) = find_inputs([f"hub:{folder}"])
    (unit,) = units_of(item)
    assert [t for c in read_chunks(item, unit, resume=2) for t in c.payload] == DOCUMENTS[2:]
    with pytest.raises(InputError, match=r"has no column 'body'; its columns are id, text"):
        list(read_documents(f"hub:{folder}", text_field="body"))
    with pytest.raises(InputError, match=r"cannot read hub:.*:none:train"):
        list(read_documents(f"hub:{folder}:none:train"))


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("suffix", FORMATS)
def test_urls(tmp_path: Path, web: str, suffix: str) -> None:
    content = FORMATS[suffix](DOCUMENTS)
    (tmp_path / f"a{suffix}").write_bytes(content)
    (tmp_path / f"a{suffix}.gz").write_bytes(gzip.compress(content))
    for url in (f"{web}/a{suffix}.gz", f"file://{tmp_path}/a{suffix}", f"file://{tmp_path}/*{suffix}"):
        assert list(read_documents(url)) == DOCUMENTS
    (item,) = find_inputs([f"{web}/a{suffix}.gz"])
    assert item.remote and item.stamp
    with pytest.raises(InputError, match=r"(no such file: |cannot read )http://.*/none\.txt"):
        find_inputs([f"{web}/none.txt"])
    assert [Path(i.name).name for i in find_inputs([f"file://{tmp_path}"])] == [f"a{suffix}", f"a{suffix}.gz"]


# files that are read in parts


def whole(raw: bytes) -> list[str]:
    """Documents of plain text, by the definition."""
    documents: list[list[str]] = [[]]
    for line in raw.decode().split("\n"):
        if line.strip():
            documents[-1].append(line.strip())
        else:
            documents.append([])
    return ["\n".join(lines) for lines in documents if lines]


def joined(chunks: Iterator[Chunk]) -> list[str]:
    documents: list[str] = []
    for chunk in chunks:
        texts, joins = decode(chunk, "text", Counter())
        if joins and documents:
            documents[-1] += "\n" + texts.pop(0)
        documents += texts
    return documents


LINES = st.lists(st.sampled_from(["", " ", "a", "bc de", "fé 🙂", "x" * 30, "\t"]), max_size=40)


@settings(max_examples=300, deadline=None)
@given(lines=LINES, end=st.sampled_from(["\n", "\r\n"]), unit=st.integers(1, 60), chunk=st.integers(1, 40))
def test_each_document_of_a_text_is_read_once_whoever_reads_what(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: str, unit: int, chunk: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "parts.txt"
    raw = end.join(lines).encode()
    path.write_bytes(raw)
    (item,) = find_inputs([path])
    units = [Unit(start, min(start + unit, len(raw)), 0) for start in range(0, len(raw), unit)]
    # lines of many chunks are cut, which this text has none of
    chunks = [list(read_chunks(item, u, chunk_bytes=max(chunk, 12))) for u in units]
    assert [d for of_unit in chunks for d in joined(iter(of_unit))] == whole(raw)
    # and reading can go on behind any chunk
    for u, of_unit in zip(units, chunks, strict=True):
        for number in range(1, len(of_unit)):
            within = of_unit[number].joins
            rest = list(read_chunks(item, u, "text", of_unit[number - 1].after, within, max(chunk, 12)))
            assert [(c.payload, c.joins, c.follows_blank) for c in rest] == [
                (c.payload, c.joins, c.follows_blank) for c in of_unit[number:]
            ]
            assert joined(iter(rest)) == joined(iter(of_unit[number:]))


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(st.text(max_size=30), max_size=20), unit=st.integers(1, 99), chunk=st.integers(1, 99))
def test_each_line_of_json_is_read_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], unit: int, chunk: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "parts.jsonl"
    raw = jsonl(texts)
    path.write_bytes(raw)
    (item,) = find_inputs([path])
    units = [Unit(start, min(start + unit, len(raw)), 0) for start in range(0, len(raw), unit)]
    chunks = [c for u in units for c in read_chunks(item, u, chunk_bytes=chunk)]
    assert joined(iter(chunks)) == texts
    for chunk_before in chunks:
        rest = read_chunks(item, Unit(0, len(raw), 0), resume=chunk_before.after, chunk_bytes=chunk)
        assert joined(rest) == joined(c for c in chunks if c.offset >= chunk_before.after)


@pytest.mark.parametrize("packing", ["", ".gz"])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet", ".xml"])
def test_reading_goes_on_behind_any_chunk(tmp_path: Path, suffix: str, packing: str) -> None:
    texts = [f"Document {number}. It is {'long ' * number}." for number in range(40)]
    pages = "".join(f"<page><ns>0</ns><revision><text>{text}</text></revision></page>" for text in texts)
    raw = f"<mediawiki>{pages}</mediawiki>".encode() if suffix == ".xml" else FORMATS[suffix](texts)
    path = tmp_path / f"a{suffix}{packing}"
    path.write_bytes(PACK[packing](raw))
    (item,) = find_inputs([path])
    (unit,) = units_of(item)
    chunks = list(read_chunks(item, unit, chunk_bytes=500))
    assert len(chunks) > 5
    assert joined(iter(chunks)) == texts
    for number, (before, chunk) in enumerate(itertools.pairwise(chunks), 1):
        assert before.after == chunk.offset
        rest = list(read_chunks(item, unit, resume=before.after, chunk_bytes=500))
        assert [c.payload for c in rest] == [c.payload for c in chunks[number:]]


def test_row_groups_are_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "UNIT_BYTES", 2000)
    texts = [f"Document {number} " * 10 for number in range(100)]
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet(texts, row_group_size=7, use_dictionary=False))  # type: ignore[arg-type]
    (item,) = find_inputs([path])
    units = units_of(item)
    assert len(units) > 5
    assert [t for unit in reversed(units) for t in joined(read_chunks(item, unit))] != texts
    assert [t for unit in units for t in joined(read_chunks(item, unit))] == texts


def test_a_document_longer_than_any_chunk_is_whole(tmp_path: Path) -> None:
    long = [f"Line {number} of a very long document." for number in range(150_000)]
    path = tmp_path / "a.txt"
    path.write_text("First.\n\n" + "\n".join(long) + "\n\nLast.", "utf-8")
    assert path.stat().st_size > 5 * CHUNK_BYTES
    assert list(read_documents(path)) == ["First.", "\n".join(long), "Last."]


def test_a_line_of_json_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_LONGEST_LINE", 1 << 21)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "' + b"x" * (3 << 20))
    with pytest.raises(InputError, match=r"a\.jsonl: a line of JSON is longer than 2 MiB; part its document"):
        list(read_documents(tmp_path / "a.jsonl"))
