"""bertship/tasks/holdout.py: one file parted into train and dev, the same way each time and no text on both sides."""

import random
from pathlib import Path

import pytest

from bertship.errors import InputError
from bertship.tasks import Example, get_task
from bertship.tasks.checking import check_data
from bertship.tasks.holdout import held_out, text_key
from bertship.tasks.readers import read_split
from train.training_data import read_training_data

TOML = 'name = "own"\nkind = "sentence"\n[files]\nformat = "csv"\ntrain = "all.csv"\ndev = {dev}\n{more}'


def own_task(folder: Path, dev="0.25"):
    path = folder / "own.toml"
    path.write_text(TOML.format(dev=dev, more='columns = { TEXT = "message" }\n'))
    return get_task(str(path))


def write_rows(folder: Path, rows) -> None:
    (folder / "all.csv").write_text("message,label\n" + "".join(f"{text},{label}\n" for text, label in rows))


def rows_of(count=400):
    return [(f"text {i} of many", "abcd"[i % 4] if i % 8 else "rare") for i in range(count)]


def texts_of(examples):
    return [example.columns["TEXT"] for example in examples]


def test_each_label_gives_its_share_and_no_row_is_lost(tmp_path):
    rows = rows_of()
    write_rows(tmp_path, rows)
    task, said = own_task(tmp_path), []
    train, dev = (read_split(task, tmp_path, split, said.append) for split in ("train", "dev"))
    assert sorted(texts_of(train) + texts_of(dev)) == sorted(text for text, _ in rows)
    for label in "abcd", "rare":
        of_label = [[e for e in side if e.target in label] for side in (train, dev)]
        assert len(of_label[1]) == pytest.approx(0.25 * len(of_label[0] + of_label[1]), abs=2)
    assert [line.split(" in ")[0] for line in said] == [
        f"train: {len(train)} of 400 examples",
        f"dev: {len(dev)} of 400 examples",
    ]


def test_a_text_is_on_one_side_however_often_it_occurs_and_in_whatever_order(tmp_path):
    rows = rows_of(100) * 3 + [("Text 5, of MANY!", "b")]
    task = own_task(tmp_path)
    sides = []
    for seed in range(2):
        random.Random(seed).shuffle(rows)
        write_rows(tmp_path, [(text.replace(",", ""), label) for text, label in rows])
        train, dev = (read_split(task, tmp_path, split) for split in ("train", "dev"))
        keys = [{text_key(task, example) for example in side} for side in (train, dev)]
        assert not keys[0] & keys[1]
        sides.append(keys[1])
    assert sides[0] == sides[1]


def test_questions_about_one_context_stay_together():
    task = get_task("squad")
    examples = [
        Example({"QUESTION": f"question {i}?", "CONTEXT": f"context {i % 10}"}, None, f"line {i}") for i in range(100)
    ]
    dev = held_out(task, examples, 0.3)
    contexts = [
        {e.columns["CONTEXT"] for e, held in zip(examples, dev, strict=True) if held is side} for side in (False, True)
    ]
    assert not contexts[0] & contexts[1]
    assert len(contexts[1]) == 3


def test_training_and_the_check_part_alike(tmp_path):
    write_rows(tmp_path, rows_of())
    task = own_task(tmp_path)
    found = read_training_data(task, str(tmp_path), {}, lambda line: None)
    findings = check_data(task, tmp_path)
    assert (findings.splits["train"]["rows"], findings.splits["dev"]["rows"]) == (len(found.train), len(found.dev))
    assert not findings.faults
    assert any(
        line.startswith(f"dev: {len(found.dev)} rows of") and line.endswith("(held out)") for line in findings.lines()
    )


@pytest.mark.parametrize("dev", ["0", "1.0", "1", "-0.5", "true", "[0.2]", "nan", "2"])
def test_no_share(tmp_path, dev):
    with pytest.raises(InputError, match=r"own.toml: files.dev .* a share of the training file such as 0.2"):
        own_task(tmp_path, dev)


def test_one_text_alone_is_refused(tmp_path):
    write_rows(tmp_path, [("the same", "a")] * 5)
    with pytest.raises(InputError, match=r"one text alone cannot be parted"):
        read_split(own_task(tmp_path), tmp_path, "train")


def test_few_rows_leave_one_on_each_side(tmp_path):
    write_rows(tmp_path, [("one", "a"), ("two", "b"), ("three", "b")])
    sizes = [len(read_split(own_task(tmp_path, "0.1"), tmp_path, split)) for split in ("train", "dev")]
    assert sizes == [2, 1]


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    write_rows(tmp_path, rows_of(8))
    with pytest.raises(InputError, match=r"all.csv is a file, the folder .* is needed: give \S+"):
        read_split(own_task(tmp_path), tmp_path / "all.csv", "train")


def test_sentences_of_conll_are_parted_too(tmp_path):
    toml = 'name = "own"\nkind = "token"\n[files]\nformat = "conll"\ntrain = "all.txt"\ndev = 0.5\n'
    (tmp_path / "own.toml").write_text(toml)
    (tmp_path / "all.txt").write_text("\n\n".join(f"w{i} B-X" for i in range(20)) + "\n")
    task = get_task(str(tmp_path / "own.toml"))
    assert [len(read_split(task, tmp_path, split)) for split in ("train", "dev")] == [10, 10]


def test_a_fault_of_the_file_is_found_once(tmp_path):
    write_rows(tmp_path, rows_of(40))
    with (tmp_path / "all.csv").open("a") as file:
        file.write("a row of one field\n")
    assert len(check_data(own_task(tmp_path), tmp_path).faults) == 1
