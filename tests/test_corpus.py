"""Documents to memory-mapped tokens: readers, vocabulary, held-out split, round trip, and every kind of bad input."""

import bz2
import gzip
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bertship import artifacts
from bertship.config import CorpusConfig
from bertship.errors import InputError
from bertship.tokenization import SPECIAL_TOKENS, Tokenizer, read_vocab
from train import vocabulary
from train.corpus import SPLITS, Corpus, build_corpus, fingerprint_of, read_documents, sentences_of, train_vocabulary
from train.wikitext import prose

ROOT = Path(__file__).parents[1]
CONFIG = CorpusConfig(vocab_size=256, heldout_share=0.2)


def quiet(line: str) -> None:
    assert "\n" not in line


def texts(count: int = 30) -> list[str]:
    rng = np.random.default_rng(0)
    words = ["river", "stone", "walks", "over", "naïve", "the", "green", "seven", "lamp", "old", "singing", "houses"]
    return [
        "\n".join(
            f"{' '.join(rng.choice(words, 8))} number {document}. It is {' '.join(rng.choice(words, 5))}!"
            for _ in range(rng.integers(1, 6))
        )
        for document in range(count)
    ]


def jsonl(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), "utf-8")
    return path


def dump(*pages: str) -> str:
    return f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">{"".join(pages)}</mediawiki>'


def page(text: str, ns: int = 0, redirect: str = "") -> str:
    return f"<page><title>T</title><ns>{ns}</ns>{redirect}<revision><text>{text}</text></revision></page>"


# readers


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2"])
def test_text_documents_are_parted_by_blank_lines(tmp_path: Path, suffix: str) -> None:
    raw = "\ufeffOne.\r\nStill one.\r\n\r\n \t\r\nTwo caf\u00e9.\n\n\n\nThree".encode()
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes({"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}[suffix](raw))
    assert list(read_documents(path)) == ["One.\nStill one.", "Two café.", "Three"]


def test_faulty_bytes_blank_lines_and_a_giant_line_are_read_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    giant = ("wort " * 300_000 + "é" * 1_500_001).encode()
    path.write_bytes(b"caf\xe9 ol\xff\n\n\n\n   \n" + giant + b"\n\n")
    skipped: Counter[str] = Counter()
    first, second = read_documents(path, skipped)
    assert first == "caf\ufffd ol\ufffd"
    assert second.count("wort") == 300_000
    assert second.count("é") == 1_500_001, "a piece was cut within a character"
    assert skipped == {"lines of invalid UTF-8 (bytes replaced)": 1, "empty documents": 3}


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "One.", "id": 3}\r\n\n{"text": "a\\ud800b"}\n{"text": ""}', "utf-8")
    skipped: Counter[str] = Counter()
    assert list(read_documents(path, skipped)) == ["One.", "a?b", ""]
    assert skipped == {
        "blank lines": 1,
        "line ends of CR LF (read as LF)": 1,
        "texts with half surrogate pairs (replaced)": 1,
    }


def test_dump_gives_articles_as_prose(tmp_path: Path) -> None:
    xml = dump(
        page("'''Stone''' is [[rock (geology)|rock]] &amp;amp; old.&lt;ref&gt;No&lt;/ref&gt; {{cite|x}}"),
        page("Talk.", ns=1),
        page("", redirect='<redirect title="A"/>'),
        page("#REDIRECT [[B]]"),
        page("== Only ==\n=== Headings ===\n[[Category:C]]"),
    )
    # known by its content where the suffix is that of a part of a published dump
    for name in ("a.xml", "a.xml-p10p30.bz2", "a.xml.gz"):
        path = tmp_path / name
        pack = {".bz2": bz2.compress, ".gz": gzip.compress}.get(path.suffix, bytes)
        path.write_bytes(pack(xml.encode()))
        skipped: Counter[str] = Counter()
        assert list(read_documents(path, skipped)) == ["Stone is rock & old."]
        assert skipped == {"pages that are no articles": 1, "redirects": 2, "articles without prose": 1}


@pytest.mark.parametrize(
    ("wikitext", "expected"),
    [
        ("''Emma'' ({{IPA|x}}; born 1815) is a [[novel]]s.", "Emma (born 1815) is a novels."),
        ("A ({{IPA|x}}) b [http://x.y label] c [http://x.y].", "A b label c ."),
        ("[[File:x.jpg|thumb|A [[stone]].]]Text.[[de:Stein]] [[War: a history]]", "Text. War: a history"),
        ("{| class=x\n|-\n| cell\n|}\nAfter.<!-- no --> <math>x</math>", "After."),
        ("Lead.\n== See also ==\n* [[A]]\n=== more ===\nB\n== Life ==\n* He lived.", "Lead.\nHe lived."),
        ("One.<br/>Two &ndash; three. __NOTOC__", "One.\nTwo – three."),
        ("{{Infobox\n| a = b\n}}\n== References ==\n{{reflist}}", ""),
        ("unclosed {{x and [[y and <ref>z", "unclosed {{x and [[y and <ref>z"),
    ],
)
def test_wikitext(wikitext: str, expected: str) -> None:
    assert prose(wikitext) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pdf", b"x", "unknown suffix '.pdf'; known are .txt, .jsonl, .parquet, .xml, each also with .gz, .bz2 or"),
        ("a", b"x", "unknown suffix ''"),
        ("a.jsonl", b'{"text": "x"}\n{oops\n', "a.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'{"body": "x"}\n', "line 1 has no string \"text\" (keys ['body'])"),
        ("a.jsonl", b'{"text": 3}\n', 'line 1 has no string "text"'),
        ("a.jsonl", b"[1]\n", "(a list)"),
        ("a.xml", b"this is no XML", "a.xml is no complete XML at line 1"),
        ("a.xml", b"<mediawiki><page>", "a.xml is no complete XML"),
        ("a.xml", b"<html></html>", "its root is <html>, <mediawiki> is needed"),
        ("a.xml", b"", "a.xml is no complete XML"),
        ("a.txt.gz", b"x", "a.txt.gz is a damaged or truncated archive"),
        ("a.txt.bz2", b"x", "a.txt.bz2 is a damaged or truncated archive"),
        ("a.txt.gz", gzip.compress(b"x" * 99)[:-9], "damaged or truncated"),
        ("a.xml.bz2", bz2.compress(dump(page("x")).encode())[:-9], "damaged or truncated"),
        ("a.foo.bz2", bz2.compress(b"x")[:9], "damaged or truncated"),
    ],
)
def test_bad_files_are_one_line_errors(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        list(read_documents(tmp_path / name))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files(tmp_path: Path) -> None:
    for read in (lambda p: list(read_documents(p)), lambda p: build_corpus([p], tmp_path / "out", CONFIG)):
        with pytest.raises(InputError, match=r"no such file: .*a\.txt"):
            read(tmp_path / "a.txt")
    with pytest.raises(InputError, match="no source files"):
        build_corpus([], tmp_path / "out", CONFIG)
    assert not list(tmp_path.iterdir())


def test_a_line_break_ends_a_sentence() -> None:
    assert sentences_of("A stone. It rolls\r\nover Mr. Hill.\n \n\u2028End") == [
        "A stone.",
        "It rolls",
        "over Mr. Hill.",
        "End",
    ]
    assert sentences_of(" \n\t\n") == []


# vocabulary


def test_vocabulary_layout() -> None:
    tokenizer = train_vocabulary(texts(), 128, lowercase=True)
    vocab = tokenizer.backend.get_vocab()
    pieces = sorted(vocab, key=vocab.__getitem__)
    assert tuple(pieces[:5]) == SPECIAL_TOKENS
    assert tokenizer.pad_id == 0
    assert tokenizer.vocab_size == 128
    assert "naive" in vocab
    assert sum(tokenizer.unk_id in tokens.ids for tokens in tokenizer.tokenize(texts())) == 0


def test_vocabulary_of_little_text_is_filled_to_a_multiple_of_eight() -> None:
    tokenizer = train_vocabulary(["aba aba c"], 512, lowercase=False)
    vocab = tokenizer.backend.get_vocab()
    assert tokenizer.vocab_size % 8 == 0
    assert tokenizer.vocab_size < 32
    assert "[unused0]" in vocab and "aba" in vocab
    assert train_vocabulary([], 64, lowercase=True).vocab_size == 8


def test_vocabulary_keeps_to_its_size_in_a_text_of_many_characters() -> None:
    text = "".join(chr(0x4E00 + i) for i in range(300)) + " abc" * 50
    assert train_vocabulary([text], 64, lowercase=True).vocab_size <= 64
    assert "abc" in train_vocabulary([text], 64, lowercase=True).backend.get_vocab()


def test_counting_words_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_MOST_WORDS", 100)
    monkeypatch.setattr(vocabulary, "_MOST_TRAINED", 20)
    words: Counter[str] = Counter()
    for number in range(50):
        vocabulary.count_more(words, Counter(["common", "words", *(f"rare{number}x{i}" for i in range(9))]))
        assert len(words) <= 111
    assert words["common"] == words["words"] == 50
    for number in range(50):
        vocabulary.count_more(words, Counter({f"twice{number}x{i}": 2 for i in range(9)}))
        assert len(words) <= 111
    pieces = vocabulary.vocabulary_of(words, 64, lowercase=True).backend.get_vocab()
    assert {"common", "words"} <= pieces.keys()


def test_a_cased_vocabulary_keeps_accents() -> None:
    assert "naïve" in train_vocabulary(texts(), 256, lowercase=False).backend.get_vocab()


def test_vocabulary_is_the_same_in_every_process(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", texts())
    program = (
        "import sys; from pathlib import Path; from train.corpus import *; out = Path(sys.argv[2]); out.mkdir()\n"
        "train_vocabulary(read_documents(Path(sys.argv[1])), 200, True).save(out)"
    )
    for name in ("one", "two"):
        subprocess.run([sys.executable, "-c", program, str(source), str(tmp_path / name)], check=True, cwd=ROOT)
    train_vocabulary(texts(), 200, True).save((tmp_path / "three").mkdir() or tmp_path / "three")
    for file in ("vocab.txt", "tokenizer.json"):
        assert len({(tmp_path / name / file).read_bytes() for name in ("one", "two", "three")}) == 1


# corpus


def test_round_trip(tmp_path: Path) -> None:
    documents = [*texts(), "", "Typed [MASK] and [SEP] are text. \x00\x01", "\x00"]
    source, out = jsonl(tmp_path / "a.jsonl", documents), tmp_path / "corpus"
    manifest = build_corpus([source], out, CONFIG, report=quiet)
    tokenizer = Tokenizer.from_dir(out)
    expected = [
        [tokens.ids.tolist() for tokens in tokenizer.tokenize(sentences_of(text)) if len(tokens)] for text in documents
    ]
    sides = {split: Corpus.open(out, split) for split in SPLITS}
    found = [
        [ids.tolist() for ids in corpus.document(index)] for corpus in sides.values() for index in range(len(corpus))
    ]
    assert sorted(found) == sorted(document for document in expected if document)
    metrics = manifest["metrics"]
    assert metrics["documents"] == len(found) == 31
    assert metrics["sentences"] == sum(map(len, found))
    assert metrics["tokens"] == sum(len(ids) for document in found for ids in document)
    assert metrics["skipped"] == {"empty documents": 2, "sentences without a token": 2}
    assert all(len(corpus) for corpus in sides.values())
    assert sides["train"].tokens.dtype == np.uint16
    for ids in (side.tokens for side in sides.values()):
        assert not {tokenizer.mask_id, tokenizer.sep_id} & set(ids.tolist())
    assert read_vocab(out / "vocab.txt")[0] == "[PAD]"
    assert not list(out.glob("*.jsonl"))


def test_same_input_gives_the_same_files_and_a_current_fingerprint(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", texts())
    one, two = (build_corpus([source], tmp_path / name, CONFIG, report=quiet) for name in ("one", "two"))
    assert one["files"] == two["files"]
    assert artifacts.is_current(tmp_path / "one", fingerprint_of([source], CONFIG))
    other = CONFIG.model_copy(update={"seed": 1})
    assert build_corpus([source], tmp_path / "three", other, report=quiet)["files"] != one["files"]
    assert fingerprint_of([source], other) != one["fingerprint"]
    jsonl(source, [*texts(), "More."])
    assert not artifacts.is_current(tmp_path / "one", fingerprint_of([source], CONFIG))


def test_a_given_tokenizer_is_used(tmp_path: Path) -> None:
    tokenizer = train_vocabulary(texts(), 96, lowercase=False)
    source = jsonl(tmp_path / "a.jsonl", texts(5))
    manifest = build_corpus([source], tmp_path / "out", CONFIG, tokenizer, quiet)
    assert manifest["vocab_size"] == 96
    assert Tokenizer.from_dir(tmp_path / "out").lowercase is False
    assert manifest["fingerprint"] != fingerprint_of([source], CONFIG)


@pytest.mark.parametrize("share", [0.0001, 0.9999])
@pytest.mark.parametrize("count", [2, 3])
def test_both_sides_get_a_document(tmp_path: Path, share: float, count: int) -> None:
    config = CONFIG.model_copy(update={"heldout_share": share})
    metrics = build_corpus([jsonl(tmp_path / "a.jsonl", texts(count))], tmp_path / "out", config, report=quiet)[
        "metrics"
    ]
    assert metrics["heldout_by"] == "documents"
    assert sorted(side["documents"] for side in metrics["splits"].values()) == [1, count - 1]
    assert sum(side["tokens"] for side in metrics["splits"].values()) == metrics["tokens"]


def test_one_document_is_parted_by_sentences(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["A stone. A hill. A lamp. A house. A river."])
    said: list[str] = []
    metrics = build_corpus([source], tmp_path / "out", CONFIG, report=said.append)["metrics"]
    assert metrics["heldout_by"] == "sentences"
    assert [side["sentences"] for side in metrics["splits"].values()] == [4, 1]
    assert any("one document only" in line for line in said)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "empty corpus"),
        (["", " \n "], "empty corpus: no document with a sentence"),
        (["One."], "a single sentence"),
    ],
)
def test_too_little_text(tmp_path: Path, documents: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_corpus([jsonl(tmp_path / "a.jsonl", documents)], tmp_path / "out", CONFIG, report=quiet)
    assert not (tmp_path / "out").exists()


def test_a_directory_that_is_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no manifest\.json"):
        Corpus.open(tmp_path)
    out = tmp_path / "out"
    build_corpus([jsonl(tmp_path / "a.jsonl", texts())], out, CONFIG, report=quiet)
    with pytest.raises(InputError, match="unknown split 'test' of a corpus; splits are train, heldout"):
        Corpus.open(out, "test")
    with (out / "train" / "tokens.bin").open("ab") as file:
        file.write(b"xx")
    with pytest.raises(InputError, match=r"tokens\.bin is \d+ bytes long, its manifest says \d+"):
        Corpus.open(out)
    (out / "heldout" / "documents.bin").unlink()
    with pytest.raises(InputError, match=r"documents\.bin is missing"):
        Corpus.open(out, "heldout")


@pytest.mark.parametrize("raw", [b"PK\x03\x04\x00\x00binary", "A sentence. Another.".encode("utf-16")])
def test_binary_and_utf16_files_are_refused(tmp_path, raw):
    (tmp_path / "documents.txt").write_bytes(raw)
    with pytest.raises(InputError, match="NUL bytes: it is binary, or UTF-16"):
        list(read_documents(tmp_path / "documents.txt"))
