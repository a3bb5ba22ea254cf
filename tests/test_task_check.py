"""`bertship task`: faults of labelled data by line number, before an hour is spent; lists, and GLUE's zip."""

import json
import zipfile

import pytest
from conftest import SETTINGS

from bertship.tasks import get_task
from bertship.tasks.checking import check_data

OWN = '[files]\nformat = "csv"\ncolumns = { TEXT = "message" }\n'
TOML = f'name = "own"\nkind = "sentence"\n{OWN}'
GOOD_TRAIN = "message,label\n" + "".join(f"text number {i},{'yes' if i % 2 else 'no'}\n" for i in range(40))
GOOD_DEV = "message,label\n" + "".join(f"other number {i},{'yes' if i % 2 else 'no'}\n" for i in range(20))


def check(tmp_path, train=GOOD_TRAIN, dev=GOOD_DEV, toml=TOML, suffix="csv"):
    (tmp_path / "own.toml").write_text(toml)
    (tmp_path / f"train.{suffix}").write_text(train)
    (tmp_path / f"dev.{suffix}").write_text(dev)
    return check_data(get_task(str(tmp_path / "own.toml")), tmp_path)


def test_good_data_has_neither_faults_nor_warnings(tmp_path):
    found = check(tmp_path)
    assert (found.faults, found.warnings) == ([], [])
    assert found.splits["train"]["rows"] == 40 and found.splits["train"]["labels"] == {"no": 20, "yes": 20}
    assert found.splits["dev"]["lengths"]["words"] == {"least": 3, "median": 3, "95 %": 3, "most": 3}
    assert found.lines()[-1] == "nothing that would spoil training"


@pytest.mark.parametrize(
    ("train", "dev", "says"),
    [
        (GOOD_TRAIN + "short\n", GOOD_DEV, r"1 row that cannot be read: .*train.csv, line 42: 1 column, 2 expected"),
        (GOOD_TRAIN + "a,\n", GOOD_DEV, "train.csv, line 42: the label is empty"),
        (GOOD_TRAIN, GOOD_DEV + "x,maybe\n", "dev.csv, line 22: label 'maybe' is unknown"),
        (GOOD_TRAIN, GOOD_TRAIN, r"40 dev texts \(100.0%\) found in the training split too: .*line 2 is line 2"),
        ("message,label\n" + "a b,yes\n" * 3, GOOD_DEV, "the training split has one label alone: yes"),
    ],
)
def test_what_spoils_training_is_a_fault_with_its_line(tmp_path, train, dev, says):
    import re

    found = check(tmp_path, train, dev)
    assert any(re.search(says, fault) for fault in found.faults), found.faults


@pytest.mark.parametrize(
    ("train", "says"),
    [
        (GOOD_TRAIN + "TEXT number 0!,no\n", "1 train text met more than once, case .*line 2 and line 42"),
        (GOOD_TRAIN + "text number 0,yes\n", "1 train text with different labels"),
        (GOOD_TRAIN + ",yes\n", "1 train row with an empty text: .*line 42"),
        (GOOD_TRAIN + "a new one,rare\n", "label 'rare' occurs 1 time in the training split"),
    ],
)
def test_what_is_odd_is_a_warning(tmp_path, train, says):
    import re

    found = check(tmp_path, train)
    assert found.faults == [] and any(re.search(says, line) for line in found.warnings), found.warnings


def test_every_odd_row_is_named_not_the_first_alone(tmp_path):
    found = check(tmp_path, GOOD_TRAIN + "x\n" * 12)
    assert found.faults[0].startswith("12 rows that cannot be read") and found.faults[0].endswith("; and 2 more")


def test_conll_regression_choices_and_spans(tmp_path):
    toml = 'name = "own"\nkind = "token"\n'
    found = check(tmp_path, "a B-X\nb I-X\nc o\n\nd O\n", "e B-Y\n", toml, "conll")
    assert any("line 3: tag 'o' is neither O" in fault for fault in found.faults)
    assert any("'Y' occurs in dev and not in the training split" in fault for fault in found.faults)
    toml = f'name = "own"\nkind = "regression"\n{OWN}'
    found = check(tmp_path, "message,label\na,1\nb,2\nc,x\n", "message,label\nd,1.5\n", toml)
    assert any("line 4: score 'x' is no finite number" in fault for fault in found.faults)
    toml = 'name = "own"\nkind = "multiple_choice"\n[files]\nformat = "jsonl"\n'
    toml += 'columns = { TEXT = "q", CHOICES = "a" }\n'
    rows = ['{"q": "x", "a": ["1", "2"], "label": 0}', '{"q": "y", "a": ["1"], "label": 0}']
    found = check(tmp_path, "\n".join(rows), rows[0].replace("x", "z"), toml, "jsonl")
    assert any("line 2: 1 choices, 2 are needed" in fault for fault in found.faults)
    toml = 'name = "own"\nkind = "span"\n[files]\nformat = "tsv"\ncolumns = { QUESTION = "q", CONTEXT = "c" }\n'
    found = check(
        tmp_path, "q\tc\tanswer\nwho\tan ox\tox\nwho\tan ox\tcow\n", "q\tc\tanswer\nwhy\tan ox\t\n", toml, "tsv"
    )
    assert any("line 3: answer 'cow' is not in its context" in fault for fault in found.faults)
    assert found.splits["dev"]["labels"] == {"no answer": 1}


def test_lengths_in_tokens_and_texts_that_are_cut(tmp_path, warm_start):
    from bertship.tokenization import Tokenizer

    (tmp_path / "own.toml").write_text(TOML.replace("[files]", "max_tokens = 8\n[files]"))
    (tmp_path / "train.csv").write_text(GOOD_TRAIN)
    (tmp_path / "dev.csv").write_text(GOOD_DEV)
    found = check_data(get_task(str(tmp_path / "own.toml")), tmp_path, Tokenizer.from_dir(warm_start))
    assert found.splits["train"]["lengths"]["tokens a row"]["most"] == 8
    assert any("cut to max_tokens = 8" in line for line in found.warnings)


def test_the_command_exits_with_1_on_a_fault(bertship, tmp_path):
    check(tmp_path)
    code, out, err = bertship("--json", "task", "check", tmp_path / "own.toml", tmp_path)
    assert code == 0 and json.loads(out)["faults"] == [], err
    (tmp_path / "dev.csv").write_text(GOOD_TRAIN)
    code, out, err = bertship("task", "check", tmp_path / "own.toml", tmp_path)
    assert code == 1 and "fault: 40 dev texts" in out and "would spoil a training of own: 1 fault, listed" in err
    code, _, err = bertship("task", "check", tmp_path / "own.toml", tmp_path / "none")
    assert code == 2 and "no such data folder" in err


def test_the_list(bertship):
    code, out, _ = bertship("--json", "task", "list")
    assert code == 0 and {"cola", "swag", "squad2", "ner"} < {task["name"] for task in json.loads(out)["tasks"]}


def test_glues_zip(bertship, data, warm_start, tmp_path):
    runs, glue = tmp_path / "runs", tmp_path / "glue"
    small = ("--init", warm_start, "--runs", runs, *SETTINGS, "--set", "epochs=0.1", "--set", "min_updates=2")
    for task in ("sst2", "mnli", "stsb"):
        code, _, err = bertship("finetune", "--task", task, "--data", data / task, *small)
        assert code == 0, err
    pairs = "index\tsentence1\tsentence2\n" + "".join(f"{i}\ta {i}\tb\n" for i in range(3))
    for name, content in {
        "SST-2/test.tsv": 'index\tsentence\n0\ta "warm film\n1\ta cold film\n',
        "MNLI/test_matched.tsv": pairs,
        "MNLI/test_mismatched.tsv": pairs,
        "diagnostic/diagnostic.tsv": pairs,
        "STS-B/test.tsv": pairs,
    }.items():
        (glue / name).parent.mkdir(parents=True, exist_ok=True)
        (glue / name).write_text(content)
    target = tmp_path / "out" / "glue.zip"
    code, out, err = bertship("--json", "task", "leaderboard", target, "--data", glue, "--runs", runs)
    assert code == 0, err
    counts = {"SST-2.tsv": 2, "MNLI-m.tsv": 3, "MNLI-mm.tsv": 3, "STS-B.tsv": 3, "AX.tsv": 3}
    assert json.loads(out)["predictions"] == counts
    assert "left out: cola, mrpc, qqp, qnli, rte, wnli" in err
    with zipfile.ZipFile(target) as archive:
        assert set(archive.namelist()) == set(counts)
        lines = {name: archive.read(name).decode().split("\n")[:-1] for name in counts}
    assert all(rows[0] == "index\tprediction" for rows in lines.values())
    assert {row.split("\t")[1] for row in lines["SST-2.tsv"][1:]} <= {"0", "1"}
    assert {row.split("\t")[1] for row in lines["AX.tsv"][1:]} <= {"entailment", "neutral", "contradiction"}
    assert [row.split("\t")[0] for row in lines["MNLI-m.tsv"][1:]] == ["0", "1", "2"]
    assert all(0 <= float(row.split("\t")[1]) <= 5 for row in lines["STS-B.tsv"][1:])
