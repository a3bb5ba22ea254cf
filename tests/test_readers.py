"""bertship/tasks/readers.py: official files as examples; a fault names the file, the line and what stands there."""

import json
from pathlib import Path

import pytest

from bertship.errors import InputError
from bertship.tasks import TASKS, Task
from bertship.tasks.base import Files
from bertship.tasks.readers import READERS, read_split
from bertship.tasks.squad import Gold

DATA = Path(__file__).parents[2] / "shared" / "data"
SST2, STSB, NER, SQUAD = (TASKS[name] for name in ("sst2", "stsb", "ner", "squad"))


def task_of(form, **files):
    return Task(name="t", kind="sentence", files=Files(format=form, columns={"TEXT": "text"}, **files))


def read(task, tmp_path, content):
    path = tmp_path / f"train.{task.files.format}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(READERS[task.files.format](task, path))


def pairs(examples):
    return [(e.columns["TEXT"], e.target) for e in examples]


@pytest.mark.parametrize(
    ("task", "folder", "counts"),
    [
        (SST2, "glue/SST-2", {"train": 6920, "dev": 872}),
        (STSB, "glue/STS-B", {"train": 5749, "dev": 1500}),
        (NER, "ner/wnut17", {"train": 3394, "dev": 1009}),
        (SQUAD, "squad", {"dev": 10565}),
    ],
    ids=lambda value: value.name if isinstance(value, Task) else "",
)
def test_official_files_have_their_counts(task, folder, counts):
    if not (DATA / folder).is_dir():
        pytest.skip(f"no {DATA / folder}")
    for split, count in counts.items():
        examples = read_split(task, DATA / folder, split)
        assert len(examples) == count
        task = task.with_labels(
            task.labels or (task.behaviour.labels_in(examples) if task.behaviour.needs_labels else ())
        )
        task.behaviour.check(task, examples)


def test_a_quote_in_tsv_is_a_character(tmp_path):
    """fit.10"""
    found = read(SST2, tmp_path, 'sentence\tlabel\n"stray\t1\nquote"s\t0\n"whole"\t1\n')
    assert pairs(found) == [('"stray', "positive"), ('quote"s', "negative"), ('"whole"', "positive")]
    assert [e.where.rpartition(", ")[2] for e in found] == ["line 2", "line 3", "line 4"]


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfsentence\tlabel\na b\t1\n",
        b"sentence\tlabel\r\na b\t1\r\n",
        b"label\tsentence\n1\ta b",
        b"sentence\tlabel\n\na b\t1\n\n",
    ],
    ids=["BOM", "CRLF", "other order, no last newline", "blank lines"],
)
def test_tsv_of_all_sorts(tmp_path, content):
    assert pairs(read(SST2, tmp_path, content)) == [("a b", "positive")]


def test_tsv_keeps_what_generic_line_splitting_breaks(tmp_path):
    assert pairs(read(SST2, tmp_path, "sentence\tlabel\na\u2028b\x0bc\x85\t1\n")) == [("a\u2028b\x0bc\x85", "positive")]


def test_columns_by_number(tmp_path):
    task = Task(
        name="t", kind="sentence", files=Files(columns={"TEXT": 3}, target=1, header=False, labels={"1": "yes"})
    )
    assert pairs(read(task, tmp_path, "x\t1\t\ta b\ny\t0\t*\tc\n")) == [("a b", "yes"), ("c", "0")]
    with pytest.raises(InputError, match="line 2: 2 columns, 4 expected"):
        read(task, tmp_path, "x\t1\t\ta b\ny\t0\n")


@pytest.mark.parametrize(
    ("form", "content", "message"),
    [
        ("tsv", "text\tlabel\na\t1\nb\n", r"train.tsv, line 3: 1 column, 2 expected: \['b'\]"),
        ("tsv", "text\tlabel\na\tb\t1\n", "line 2: 3 columns, 2 expected"),
        ("tsv", "sentence\tlabel\na\t1\n", "no column 'text'; its columns are sentence, label"),
        ("tsv", "text\tgold\na\t1\n", "no column 'label'"),
        ("tsv", b"text\tlabel\n\xe9\t1\n", "not UTF-8 at byte 11; convert it"),
        ("csv", 'text,label\n"a,1\n', "train.csv, line 2: unexpected end of data"),
        ("csv", 'text,label\nx,1\n"a"b,1\n', "line 3: "),
        ("csv", "text,label\na,b,1\n", "line 2: 3 columns"),
        ("jsonl", '{"text": "a", "label": 1}\n{\n', "train.jsonl, line 2: not JSON"),
        ("jsonl", '{"text": "a"}\n', "line 1: no field 'label'"),
        ("jsonl", '["a"]\n', "line 1: no field 'text'"),
        ("jsonl", '{"text": 3, "label": 1}', "line 1: the field for TEXT is 3, a string"),
        ("jsonl", '{"text": "a", "label": null}', "line 1: field 'label' is None, a string or a number"),
    ],
)
def test_faults_of_tables(tmp_path, form, content, message):
    with pytest.raises(InputError, match=message) as caught:
        read(task_of(form), tmp_path, content)
    assert "\n" not in str(caught.value)


def test_csv_quoting(tmp_path):
    found = read(task_of("csv"), tmp_path, 'label,text\r\n1,"a ""b"", c\nd"\r\n0,\r\n')
    assert pairs(found) == [('a "b", c\nd', "1"), ("", "0")]


def test_jsonl(tmp_path):
    content = '{"text": "a\\u2028", "label": 1, "more": []}\n\n{"label": "x", "text": ""}'
    assert pairs(read(task_of("jsonl", labels={"1": "yes"}), tmp_path, content)) == [("a\u2028", "yes"), ("", "x")]


CONLL = "-DOCSTART- -X- O O\n\nEU NNP I-NP I-ORG\nrejects VBZ I-VP O\n\n\nGerman\tB-MISC\n"
CONLL += "call\tI-MISC\r\n\r\n-DOCSTART- O\nx O"


def test_conll(tmp_path):
    found = read(NER, tmp_path, CONLL)
    assert [(e.columns["TEXT"], e.target) for e in found] == [
        ("EU rejects", [("ORG", 0, 2)]),
        ("German call", [("MISC", 0, 11)]),
        ("x", []),
    ]
    assert found[1].columns["WORDS"] == [(0, 6), (7, 11)]
    assert [e.where.rpartition(", ")[2] for e in found] == ["line 3", "line 7", "line 11"]


def test_a_conll_word_may_hold_odd_space(tmp_path):
    found = read(NER, tmp_path, "a\u00a0b\u2028\tB-X\n\u3000\tI-X\n")
    assert found[0].columns == {"TEXT": "a\u00a0b\u2028 \u3000", "WORDS": [(0, 4), (5, 6)]}
    assert found[0].target == [("X", 0, 6)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a O\nword\n", "train.conll, line 2: a word and a tag are needed, 'word' is there"),
        ("a X-PER\n", "line 1: tag 'X-PER' is neither O nor B-… nor I-…"),
        ("a B-\n", "line 1: tag 'B-' is neither"),
        ("a o\n", "line 1: tag 'o' is neither"),
    ],
)
def test_faults_of_conll(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        read(NER, tmp_path, content)


def squad(*questions, context="The cat sat"):
    return json.dumps({"data": [{"paragraphs": [{"context": context, "qas": questions}]}]})


def test_squad(tmp_path):
    answers = [{"text": "cat", "answer_start": 4}, {"text": "The cat", "answer_start": 0}]
    content = squad(
        {"id": "1", "question": " Who? ", "answers": answers},
        {"id": 2, "question": "Why?", "answers": [], "plausible_answers": answers, "is_impossible": True},
        {"id": "3", "question": "How?", "is_impossible": True},
    )
    found = read(SQUAD, tmp_path, content)
    assert [e.target for e in found] == [Gold("1", (("cat", 4), ("The cat", 0))), Gold("2", ()), Gold("3", ())]
    assert found[0].columns == {"QUESTION": "Who?", "CONTEXT": "The cat sat"}
    SQUAD.behaviour.check(SQUAD, found)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        json.dumps({"data": [{"paragraphs": [{"qas": []}]}]}),
        squad({"id": "1", "question": "Who?"}),
        squad({"id": "1", "question": "Who?", "answers": [{"text": "cat"}]}),
        squad({"id": "1", "question": None, "answers": []}),
        squad({"id": "1", "question": "Who?", "answers": [{"text": "cat", "answer_start": "x"}]}),
        squad({"id": "1", "question": "Who?", "answers": []}, context=7),
    ],
)
def test_faults_of_squad(tmp_path, content):
    with pytest.raises(InputError, match=r"train\.squad.* is not in SQuAD's JSON format"):
        read(SQUAD, tmp_path, content)


def test_splits_are_found_by_their_names(tmp_path):
    with pytest.raises(InputError, match=f"no such data folder: {tmp_path / 'none'}"):
        read_split(SST2, tmp_path / "none", "train")
    with pytest.raises(InputError, match=f"no train file for task sst2 in {tmp_path}; looked for train.tsv"):
        read_split(SST2, tmp_path, "train")
    with pytest.raises(InputError, match="looked for nothing: the task has no such split"):
        read_split(SST2, tmp_path, "eval")
    (tmp_path / "train.tsv").write_text("sentence\tlabel\n")
    with pytest.raises(InputError, match=r"train.tsv holds no examples"):
        read_split(SST2, tmp_path, "train")


def test_text_that_no_tokenizer_takes_is_refused(tmp_path):
    task = task_of("jsonl", splits={"train": ("train.jsonl",)})
    (tmp_path / "train.jsonl").write_text('{"text": "fine", "label": 1}\n{"text": "bad \\ud83d", "label": 1}\n')
    with pytest.raises(InputError, match="line 2: a lone surrogate stands in"):
        read_split(task, tmp_path, "train")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "train.tsv is empty; a header and rows are needed"),
        ("sentence\tlabel\nfine\t\n", "line 2: the label is empty"),
        ("sentence\tlabel\nfine\t \n", "line 2: the label is empty"),
    ],
)
def test_an_empty_file_and_an_empty_label_are_refused(tmp_path, text, says):
    (tmp_path / "train.tsv").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=says):
        read_split(TASKS["sst2"], tmp_path, "train")


def test_white_space_around_a_label_is_nobodys_meaning(tmp_path):
    (tmp_path / "train.tsv").write_text("sentence\tlabel\nfine\t 1 \n", encoding="utf-8")
    assert read_split(TASKS["sst2"], tmp_path, "train")[0].target == "positive"
