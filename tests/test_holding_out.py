"""bertship/tasks/holding_out.py: a dev split out of the training file, the same one each time it is read."""

import json
from collections import Counter
from pathlib import Path

import pytest

from bertship.errors import InputError
from bertship.tasks import Task, get_task
from bertship.tasks.checking import check_data
from bertship.tasks.holding_out import part, text_key
from bertship.tasks.readers import read_split
from train.data import has_split, load_examples

TABLE = """
name = "own"
kind = "sentence"
[files]
format = "csv"
train = "all.csv"
dev = {dev}
columns = {{ TEXT = "m" }}
"""


def task_of(folder: Path, dev: object = 0.2, toml: str = TABLE) -> Task:
    (folder / "own.toml").write_text(toml.format(dev=dev), encoding="utf-8")
    return get_task(str(folder / "own.toml"))


def rows(folder: Path, lines: list[str]) -> None:
    (folder / "all.csv").write_text("\n".join(["m,label", *lines]) + "\n", encoding="utf-8")


def both(task: Task, folder: Path) -> tuple[list[str], list[str]]:
    return tuple([e.columns["TEXT"] for e in read_split(task, folder, s)] for s in ("train", "dev"))


MANY = [f"text number {i},{'common' if i % 4 else 'rare'}" for i in range(200)]


def test_both_sides_are_the_file_and_the_same_each_time(tmp_path):
    rows(tmp_path, MANY)
    task, said = task_of(tmp_path), []
    train, dev = both(task, tmp_path)
    assert sorted(train + dev) == sorted(line.rpartition(",")[0] for line in MANY)
    assert (len(train), len(dev)) == (160, 40)
    labels = Counter(example.target for example in read_split(task, tmp_path, "dev", said.append))
    assert labels == {"common": 30, "rare": 10}, "each label's share"
    assert said == [f"dev is 40 of 200 examples, held out by their texts (dev = 0.2) of {tmp_path}/all.csv"]
    rows(tmp_path, MANY[::-1])
    assert sorted(both(task, tmp_path)[1]) == sorted(dev), "whatever the order of the file"
    more = [*MANY, "another,common"]
    rows(tmp_path, more)
    assert len(set(both(task, tmp_path)[1]) ^ set(dev)) <= 2, "a row more moves at most one"
    assert has_split(task, str(tmp_path), "dev") and load_examples(task, str(tmp_path), "dev", said.append)


def test_one_text_is_on_one_side(tmp_path):
    rows(
        tmp_path,
        [
            f"{'Text, number' if i % 2 else 'text number'} {i // 2 % 50}!,{i % 2}".replace(", n", " n")
            for i in range(200)
        ],
    )
    task = task_of(tmp_path, 0.3)
    train, dev = (read_split(task, tmp_path, split) for split in ("train", "dev"))
    assert dev and not {text_key(task, e) for e in train} & {text_key(task, e) for e in dev}
    assert check_data(task, tmp_path).faults == []


def test_a_text_that_is_everywhere_is_not_held_out(tmp_path):
    rows(tmp_path, ["the same,a"] * 90 + [f"other {i},a" for i in range(10)] + [f"more {i},b" for i in range(50)])
    train, dev = both(task_of(tmp_path), tmp_path)
    assert train.count("the same") == 90 and len(dev) == 10 + 9, "nine of ten others: one is left to learn from"


def test_questions_on_one_document_stay_together(tmp_path):
    toml = TABLE.replace("sentence", "span").replace('"csv"', '"jsonl"').replace("all.csv", "all.jsonl")
    task = task_of(tmp_path, 0.25, toml.replace('TEXT = "m"', 'QUESTION = "q", CONTEXT = "c"'))
    lines = [{"q": f"which {i}?", "c": f"document {i % 20} says x", "answer": "x"} for i in range(200)]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    train, dev = ({e.columns["CONTEXT"] for e in read_split(task, tmp_path, split)} for split in ("train", "dev"))
    assert len(dev) == 5 and not train & dev


def test_sentences_of_conll_are_parted_too(tmp_path):
    task = task_of(
        tmp_path, 0.5, 'name = "own"\nkind = "token"\n[files]\nformat = "conll"\ntrain = "all.txt"\ndev = {dev}\n'
    )
    (tmp_path / "all.txt").write_text("\n\n".join(f"w{i} B-X" for i in range(20)) + "\n", encoding="utf-8")
    assert [len(read_split(task, tmp_path, split)) for split in ("train", "dev")] == [10, 10]


@pytest.mark.parametrize("lines", [["a,x"], ["a,x", "b,y"], ["a,x", "A!,x", "b,y", "b.,y"]])
def test_too_little_to_part_is_said(tmp_path, lines):
    rows(tmp_path, lines)
    with pytest.raises(
        InputError, match=r"all.csv has too few different texts \(\d\) to hold out dev = 0.2; give more"
    ):
        read_split(task_of(tmp_path), tmp_path, "train")


@pytest.mark.parametrize("dev", ["0", "0.6", "1", "true", '["a"]', "-0.2"])
def test_a_share_out_of_bounds_is_refused(tmp_path, dev):
    with pytest.raises(InputError, match=r"files.dev .*: a file's name, or a share from 0.01 to 0.5"):
        task_of(tmp_path, dev)


def test_a_file_in_the_place_of_the_folder_is_named_as_one(tmp_path):
    rows(tmp_path, MANY)
    with pytest.raises(InputError, match=r'all.csv is a file, the folder .* is needed: give \S+, .*train = "all.csv"'):
        read_split(task_of(tmp_path), tmp_path / "all.csv", "train")


def test_the_check_says_what_is_held_out(tmp_path):
    rows(tmp_path, [*MANY, "a row of one field"])
    found = check_data(task_of(tmp_path), tmp_path)
    assert (found.splits["train"]["rows"], found.splits["dev"]["rows"]) == (160, 40)
    assert len(found.faults) == 1, "the file's faults once"
    assert any(
        line.startswith(f"dev: 40 rows of {tmp_path}/all.csv: 40 of 200 examples, held") for line in found.lines()
    )
    assert found.as_dict()["held_out"].startswith("40 of 200")


def test_what_is_kept_with_a_run_holds_the_share(tmp_path):
    task = task_of(tmp_path, 0.1)
    assert Task.from_json(task.to_json()).files.dev_share == 0.1
    assert "source" not in json.loads(task.to_json()), "where the file was is no part of the task"


def test_examples_keep_their_order(tmp_path):
    rows(tmp_path, MANY)
    task = task_of(tmp_path)
    every = read_split(task_of(tmp_path, '"all.csv"'), tmp_path, "train")
    places = [every.index(example) for example in part(task, every, "dev")]
    assert places == sorted(places)
