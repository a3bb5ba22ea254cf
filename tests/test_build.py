"""train/corpus.py's build: the same bytes whoever builds, however often it was killed, and in bounded memory."""

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from documents import WORDS, files_of, write_sources
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, normalizers

from bertship.config import CorpusConfig
from bertship.errors import CheckFailed, InputError
from bertship.tokenization import Tokenizer
from train import corpus as builder
from train import plan as planner
from train.chunks import Chunk
from train.corpus import Corpus, build_corpus, sentences_of, train_vocabulary
from train.encode import Encoder
from train.inputs import find_inputs
from train.readers import read_documents

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data" / "corpus"
CONFIG = CorpusConfig(vocab_size=512, heldout_share=0.2)


def quiet(line: str) -> None:
    assert "\n" not in line


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many units, shards and chunks of little text."""
    monkeypatch.setattr("train.readers.UNIT_BYTES", 1 << 16)
    monkeypatch.setattr(builder, "UNIT_BYTES", 1 << 16)
    monkeypatch.setattr(planner, "CHUNK_BYTES", 1 << 13)


def documents_of(out: Path) -> list[list[list[int]]]:
    sides = [Corpus.open(out, split) for split in ("train", "heldout")]
    return sorted([ids.tolist() for ids in side.document(i)] for side in sides for i in range(len(side)))


@pytest.mark.usefixtures("small_parts")
def test_every_token_of_every_document_is_in_the_corpus(tmp_path: Path) -> None:
    sources = write_sources(tmp_path / "in")
    manifest = build_corpus(sources, tmp_path / "out", CONFIG, report=quiet, workers=0)
    tokenizer = Tokenizer.from_dir(tmp_path / "out")
    texts = [text for source in sources for text in read_documents(source)]
    expected = [[t.ids.tolist() for t in tokenizer.tokenize(sentences_of(text))] for text in texts]
    assert documents_of(tmp_path / "out") == sorted(expected)
    assert manifest["metrics"]["documents"] == len(texts) == 600
    assert manifest["metrics"]["tokens"] == sum(len(ids) for document in expected for ids in document)
    assert max(map(len, expected)) == 8000


@pytest.mark.usefixtures("small_parts")
def test_the_number_of_processes_changes_no_byte(tmp_path: Path) -> None:
    """pre.7, tok.6: and processes started after this one has tokenized do not hang."""
    sources = write_sources(tmp_path / "in")
    train_vocabulary(["used before"], 64, True).tokenize(["used before"] * 100)
    for workers in (0, 1, 3):
        build_corpus(sources, tmp_path / str(workers), CONFIG, report=quiet, workers=workers)
    assert files_of(tmp_path / "0") == files_of(tmp_path / "1") == files_of(tmp_path / "3")
    assert not [process for process in psutil.Process().children() if "train.workers" in " ".join(process.cmdline())]


PROGRAM = """
import sys; from pathlib import Path; from bertship.config import CorpusConfig
from train import corpus, readers, shards
readers.UNIT_BYTES = corpus.UNIT_BYTES = 1 << 16
close = shards.ShardWriter.close
def counted(self, *arguments):
    done = close(self, *arguments); print("shard", flush=True); return done
corpus.ShardWriter.close = counted
if __name__ == "__main__":
    config = CorpusConfig(vocab_size=512, heldout_share=0.2)
    corpus.build_corpus(sys.argv[3:], Path(sys.argv[1]), config, workers=int(sys.argv[2]))
"""


def start_build(folder: Path, out: Path, workers: int, sources: list[Path]) -> "subprocess.Popen[str]":
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(folder / "program.py"), str(out), str(workers), *map(str, sources)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_and_started_again_it_goes_on_and_gives_the_same_bytes(tmp_path: Path, workers: int) -> None:
    sources = write_sources(tmp_path / "in", 900)
    whole = start_build(tmp_path, tmp_path / "whole", workers, sources)
    lines, said = whole.communicate()
    assert whole.returncode == 0, said
    total = lines.count("shard")
    assert total > 8
    ready = [0]
    for after in (1, 3, 2):
        build = start_build(tmp_path, tmp_path / "killed", workers, sources)
        assert build.stdout
        for _ in range(after):
            assert build.stdout.readline() == "shard\n"
        children = psutil.Process(build.pid).children(recursive=True)
        assert bool(children) == bool(workers)
        build.send_signal(signal.SIGKILL)
        build.communicate()
        assert not (tmp_path / "killed").exists()
        ready.append(len(list((tmp_path / ".killed.building" / "shards").glob("[0-9]*"))))
        assert ready[-1] >= ready[-2] + after
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive, "a process outlived the one that it worked for"
    again = start_build(tmp_path, tmp_path / "killed", workers, sources)
    lines, said = again.communicate()
    assert again.returncode == 0, said
    assert f"going on with a build that was interrupted: {ready[-1]} parts" in said
    assert lines.count("shard") == total - ready[-1], "what was finished was done again"
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "killed", "program.py", "whole"]


@pytest.mark.usefixtures("small_parts")
def test_interrupted_behind_every_shard_it_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also within a document that is longer than several shards."""
    sources = write_sources(tmp_path / "in")
    manifest = build_corpus(sources, tmp_path / "whole", CONFIG, report=quiet, workers=0)
    close, joins = builder.ShardWriter.close, []

    def stop(*arguments: object) -> None:
        joins.append(close(*arguments).joins)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(builder.ShardWriter, "close", stop)
    while True:
        try:
            again = build_corpus(sources, tmp_path / "stopped", CONFIG, report=quiet, workers=0)
            break
        except KeyboardInterrupt:
            continue
    assert len(joins) > 12 and any(joins)
    assert files_of(tmp_path / "stopped") == files_of(tmp_path / "whole")
    assert again["metrics"] == manifest["metrics"]


def test_a_changed_source_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "a.txt"
    source.write_text("One. Two.\n\nThree.", "utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(builder, "merge", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build_corpus([source], tmp_path / "out", CONFIG, report=quiet)
    assert (tmp_path / ".out.building" / "shards" / "000000-0000").is_dir()
    source.write_text("Four four. Four.\n\nSix.", "utf-8")
    said: list[str] = []
    build_corpus([source], tmp_path / "out", CONFIG, report=said.append)
    assert not any("going on" in line for line in said)
    assert "four" in Tokenizer.from_dir(tmp_path / "out").backend.get_vocab()


def test_two_builders_of_one_corpus(tmp_path: Path) -> None:
    sources = write_sources(tmp_path / "in")
    first = start_build(tmp_path, tmp_path / "out", 0, sources)
    assert first.stdout and first.stdout.readline()
    with pytest.raises(InputError, match=r"another process is building this corpus, in .*\.out\.building"):
        build_corpus(sources, tmp_path / "out", CONFIG, report=quiet)
    first.communicate()
    assert first.returncode == 0


def test_a_bad_record_is_named_whoever_reads_it(tmp_path: Path) -> None:
    good = json.dumps({"text": "Good text. " * 20}) + "\n"
    (tmp_path / "a.jsonl").write_text(good * 9000 + "{oops\n" + good + "{oops\n")
    for workers in (0, 2):
        with pytest.raises(InputError, match=r"a\.jsonl, line 9001 is not JSON") as caught:
            build_corpus([tmp_path / "a.jsonl"], tmp_path / "out", CONFIG, report=quiet, workers=workers)
        assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_killed_process_is_said_in_one_line(tmp_path: Path) -> None:
    sources = write_sources(tmp_path / "in", 3000)
    killed = False

    def kill() -> None:
        nonlocal killed
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if "train.workers" in " ".join(child.cmdline()):
                    child.kill()
                    killed = True

    step = builder.ShardWriter.add

    def add(*arguments: object) -> None:
        kill()
        step(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder.ShardWriter, "add", add)
        with pytest.raises(CheckFailed, match=r"tokenizing process was killed.*--workers"):
            build_corpus(sources, tmp_path / "out", CONFIG, report=quiet, workers=2)
    assert killed


def test_the_command(tmp_path: Path, bertship: Callable[..., tuple[int, str, str]]) -> None:
    write_sources(tmp_path / "in", 60)
    common = ("corpus", tmp_path / "in", f"{tmp_path}/in/*.txt", "--runs", tmp_path / "runs", "--workers", 1)
    code, out, err = bertship(*common, "--set", "vocab_size=101", "--json")
    assert code == 0, err
    manifest = json.loads(out)
    assert manifest["vocab_size"] == 104 and len(manifest["inputs"]) == 3 and manifest["metrics"]["documents"] == 60
    assert f"{tmp_path / 'in' / 'a.txt'} is named twice; it is taken once" in err
    code, _, err = bertship(*common, "--set", "vocab_size=101")
    assert code == 0 and "runs/corpus/default is up to date" in err
    made = tmp_path / "runs" / "corpus" / "default"
    code, out, err = bertship(*common, "--tokenizer", made, "--name", "b", "--json")
    assert code == 0 and json.loads(out)["vocab_size"] == 104
    assert (made / "train" / "tokens.bin").read_bytes() == (made.parent / "b" / "train" / "tokens.bin").read_bytes()
    code, out, err = bertship(*common, "--tokenizer", tmp_path / "in")
    assert (code, out) == (2, "") and err.startswith("error: no tokenizer in") and err.count("\n") == 1


def test_equal_documents_are_on_one_side(tmp_path: Path) -> None:
    texts = [f"Text number {number}. It is one." for number in range(60)]
    (tmp_path / "a.txt").write_text("\n\n".join(texts * 3), "utf-8")
    build_corpus([tmp_path / "a.txt"], tmp_path / "out", CONFIG, report=quiet)
    train, heldout = (Corpus.open(tmp_path / "out", split) for split in ("train", "heldout"))
    sides = [{train_or.tokens[a:b].tobytes() for a, b in _bounds(train_or)} for train_or in (train, heldout)]
    assert len(train) + len(heldout) == 180
    assert sides[0] and sides[1] and not sides[0] & sides[1]


def _bounds(corpus: Corpus) -> list[tuple[int, int]]:
    edges = np.asarray(corpus.sentences)[np.asarray(corpus.documents)]
    return list(itertools.pairwise(edges))


def test_a_large_source_gives_a_sample_to_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.readers.UNIT_BYTES", 1 << 18)
    rng = random.Random(2)
    early, late = ("".join(rng.choices("abcdefgh", k=6)) for _ in range(2))
    text = f"{early} stone.\n\n" * 150_000 + f"{late} lamp.\n\n" * 150_000
    (tmp_path / "a.txt").write_text(text, "utf-8")
    said: list[str] = []
    small = CONFIG.model_copy(update={"vocabulary_sample_mib": 1})
    plan = builder.prepare([tmp_path / "a.txt"], tmp_path / "work", small, report=said.append, workers=0)
    vocabulary = Tokenizer.from_dir(plan.tokenizer_dir).backend.get_vocab()
    assert {early, late, "stone", "lamp"} <= vocabulary.keys()
    assert any("trained on 1 MiB, spread over all of the text" in line for line in said)
    read = sum(chunk.size for _, chunk in planner._sample(plan, 1 << 20))
    assert 0.9 < read / (1 << 20) < 1.3


# the fast way to ids


TEXTS = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("aé ßŚ.,-'\u00a0\u2028\u3000四\u0301🙂\x1c\x85\u200b[MASK]"),
    )
)
VOCABULARY = train_vocabulary(["the quick brown fox — 四 [MASK] é ß ' - naïve"] * 9, 128, lowercase=True)
CASED = train_vocabulary(["The Quick Brown Fox — 四 [MASK] é ß ' - naïve"] * 9, 128, lowercase=False)


@settings(max_examples=500, deadline=None)
@given(texts=st.lists(TEXTS, max_size=5), lowercase=st.booleans())
def test_looking_words_up_gives_what_the_tokenizer_gives(texts: list[str], lowercase: bool) -> None:
    tokenizer = VOCABULARY if lowercase else CASED
    encoder = Encoder(tokenizer, "en", "text", 0)
    assert encoder._by_words
    for _ in range(2):  # the second time all words are known
        found = [np.frombuffer(ids, encoder.dtype).tolist() for ids in encoder.sentence_ids(texts)]
        assert found == [tokens.ids.tolist() for tokens in tokenizer.tokenize(texts)]


def test_tok_1_special_tokens_in_text_are_text() -> None:
    encoder = Encoder(VOCABULARY, "en", "text", 0)
    (ids,) = encoder.sentence_ids(["[MASK] [SEP] the"])
    assert not set(np.frombuffer(ids, "<u2").tolist()) & {VOCABULARY.mask_id, VOCABULARY.sep_id}


def test_other_tokenizers_are_called_for_whole_sentences() -> None:
    backend = train_vocabulary(["a b ab ab"], 64, lowercase=True).backend
    backend.normalizer = normalizers.Replace(Regex("a b"), "ab")
    encoder = Encoder(Tokenizer(backend), "en", "text", 0)
    assert not encoder._by_words
    (ids,) = encoder.sentence_ids(["a b"])
    assert len(np.frombuffer(ids, "<u2")) == len(backend.encode("a b", add_special_tokens=False).ids) == 1


def test_the_cache_of_words_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.encode._CACHED_WORDS", 50)
    encoder = Encoder(VOCABULARY, "en", "text", 0)
    for start in range(0, 500, 20):
        sentence = " ".join(f"the{number}" for number in range(start, start + 40)) + " " + "x" * 300
        (ids,) = encoder.sentence_ids([sentence])
        assert np.frombuffer(ids, "<u2").tolist() == VOCABULARY.tokenize([sentence])[0].ids.tolist()
        assert len(encoder._cache) <= 90


def test_a_text_that_goes_on_is_one_document() -> None:
    encoder = Encoder(VOCABULARY, "en", "text", 0)
    chunk = Chunk("text", b"the fox\n\nthe quick fox. the fox.", 0, 32, 32, 0, joins=True)
    encoded = encoder.encode(chunk)
    assert (encoded.joins, encoded.documents.tolist(), encoded.counts["sentences"]) == (True, [1, 2], 3)


@pytest.mark.slow
def test_memory_stays_bounded(tmp_path: Path) -> None:
    """Under 1 GiB, all processes together, on text of 300 MB; and no more than on a third of it, where its words are
    the same ones (the distinct words are what a vocabulary is counted from, and they have a limit of their own)."""
    peaks = []
    for copies in (20, 60):
        source = tmp_path / f"{copies}.jsonl"
        with source.open("w", encoding="utf-8") as file:
            for copy in range(copies):
                for number in range(1000):
                    words = " ".join(random.Random(copy * 1000 + number).choices(WORDS, k=700))
                    file.write(json.dumps({"text": f"{words}."}) + "\n")
        build = start_build(tmp_path, tmp_path / f"out{copies}", 2, [source])
        peak = 0
        while build.poll() is None:
            peak = max(peak, _memory(psutil.Process(build.pid)))
            time.sleep(0.05)
        assert build.returncode == 0
        peaks.append(peak)
    assert peaks[1] < 1 << 30
    assert peaks[1] < 1.2 * peaks[0]


def _memory(process: psutil.Process) -> int:
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_full_info().pss
        except psutil.Error:
            continue
    return total


@pytest.mark.parametrize("name", ["austen", "wikipedia"])
def test_real_documents(tmp_path: Path, name: str) -> None:
    if not DATA.is_dir():
        pytest.skip(f"no {DATA}")
    metrics = build_corpus([DATA / f"{name}.jsonl"], tmp_path / "out", CorpusConfig(), report=quiet)["metrics"]
    assert metrics["documents"] == {"austen": 269, "wikipedia": 103}[name]
    assert metrics["unknown_share"] < 0.001
    (item,) = find_inputs([DATA / f"{name}.jsonl"])
    assert sum(side["tokens"] for side in metrics["splits"].values()) == metrics["tokens"] > 500_000
    assert item.size


def test_runs_among_the_documents_are_left_out(tmp_path: Path) -> None:
    """What a folder holds does not change by what is made of it: its vocabulary and logs are no documents."""
    write_sources(tmp_path)
    training = tmp_path / "runs" / "pretrain" / "run.training"
    training.mkdir(parents=True)
    for name, text in (("recipe.json", "{}"), ("metrics.jsonl", '{"step": 1}\n')):
        (training / name).write_text(text)
    (tmp_path / "manifest.json").write_text('{"files": ["a.txt"]}')  # somebody else's
    said: list[str] = []
    found = []
    for source in (tmp_path, f"{tmp_path}/**/*.txt"):
        build_corpus([source], tmp_path / "runs" / "corpus" / "default", CONFIG, report=said.append, workers=0)
        found.append([Path(item.name).name for item in find_inputs([source], said.append)])
    assert found == [["a.txt", "b.jsonl", "c.txt.gz"], ["a.txt"]]
    assert f"{tmp_path}: 2 files in runs of bertship are left out, the first is {training / 'metrics.jsonl'}" in said
    assert any(line.startswith(f"{tmp_path}/**/*.txt: 1 files in runs of bertship") for line in said)
    with pytest.raises(InputError, match=r"no documents in .*: all of its files are in runs of bertship"):
        find_inputs([tmp_path / "runs" / "corpus" / "default"])


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("touched_alone", [False, True])
def test_a_source_that_is_written_to_while_it_is_read(tmp_path: Path, touched_alone: bool) -> None:
    """Half of it would be in the corpus, and the hash of the whole in its manifest."""
    sources = write_sources(tmp_path / "in")
    text = sources[0].read_bytes()
    out, work = tmp_path / "out", tmp_path / ".out.building"

    def change(line: str) -> None:
        if "trained a vocabulary" in line:
            sources[0].write_bytes(text if touched_alone else text[: len(text) // 2])

    if touched_alone:
        build_corpus(sources, out, CONFIG, report=change, workers=0)
    else:
        with pytest.raises(InputError, match=r"a\.txt has changed while it was read; start again"):
            build_corpus(sources, out, CONFIG, report=change, workers=0)
        assert not out.exists()
        assert {path.name[:6] for path in (work / "shards").iterdir()}.isdisjoint({"000000", "000001"})
        sources[0].write_bytes(text)  # as it was: nothing of the half is taken for it
        build_corpus(sources, out, CONFIG, report=quiet, workers=0)
    build_corpus(sources, tmp_path / "again", CONFIG, report=quiet, workers=0)
    assert files_of(out) == files_of(tmp_path / "again")


@pytest.mark.parametrize("text", ["", "One sentence alone"])
def test_too_little_text_leaves_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(InputError, match=r"empty corpus|a single sentence"):
        build_corpus([tmp_path / "a.txt"], tmp_path / "out", CONFIG, report=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
