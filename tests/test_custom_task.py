"""bertship/tasks/custom.py: a task from a few lines of TOML, and errors that name the file, the field and the value."""

import pytest

from bertship.errors import InputError
from bertship.tasks import KINDS, TASKS, Task, get_task
from bertship.tasks.readers import read_split

PLAIN = 'name = "own"\nkind = "sentence"\n'
FILES = '[files]\ncolumns = { TEXT = "message" }\n'
CHOSEN = '[files]\nformat = "csv"\ncolumns = { TEXT = "q", CHOICES = ["a", "b"] }\n'
PAIRED = '[files]\ncolumns = { TEXT = "a", TEXT_PAIR = "b" }\n'


def task_of(tmp_path, text):
    path = tmp_path / "own.toml"
    path.write_text(text, encoding="utf-8")
    return get_task(str(path))


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_built_in_tasks_survive_json(task):
    assert Task.from_json(task.to_json()) == task


@pytest.mark.parametrize(
    ("kind", "files", "metrics"),
    [
        ("sentence", FILES, ("accuracy",)),
        ("pair", PAIRED, ("accuracy",)),
        ("regression", PAIRED, ("pearson",)),
        ("multiple_choice", CHOSEN, ("accuracy",)),
        ("span", "", ("f1",)),
        ("token", "", ("f1",)),
    ],
)
def test_every_kind(tmp_path, kind, files, metrics):
    task = task_of(tmp_path, f'name = "own"\nkind = "{kind}"\n{files}')
    assert (task.kind, task.metrics, task.labels) == (kind, metrics, ())
    assert Task.from_json(task.to_json()) == task
    (tmp_path / "task.json").write_text(task.to_json())
    assert Task.from_file(tmp_path / "task.json") == task
    assert "own" not in TASKS


def test_every_kind_is_tried():
    kinds = {"sentence", "pair", "regression", "single_regression", "multiple_choice", "span", "token"}
    assert set(KINDS) == kinds


def test_all_fields(tmp_path):
    task = task_of(
        tmp_path,
        'name = "faq"\nkind = "span"\ndescription = "ours"\nmetrics = ["exact_match", "f1"]\nmax_tokens = 256\n'
        "overlap = 64\nmax_characters = 5000\n[options]\ntop_k = 5\nnull_threshold = 1\n[training]\nepochs = 4\n"
        '[files]\ntrain = "a.json"\ndev = "b.json"\ntest = "c.json"\n',
    )
    assert (task.max_tokens, task.overlap, task.max_characters, task.description) == (256, 64, 5000, "ours")
    assert task.options == {"top_k": 5, "max_answer_tokens": 30, "null_threshold": 1.0}
    assert task.training == {"epochs": 4, "min_updates": 1}, "epochs that are asked for count"
    assert task.files.splits == {"train": ("a.json",), "dev": ("b.json",), "test": ("c.json",)}


def test_the_docstrings_task_reads_its_data(tmp_path):
    from bertship.tasks import custom

    task = task_of(tmp_path, custom.__doc__.partition("\n\n")[2])
    (tmp_path / "train.csv").write_text('label,message\nbilling,"pay, please"\nother,hi\n')
    found = read_split(task, tmp_path, "train")
    task.behaviour.check(task, found)
    assert [(e.columns["TEXT"], e.target) for e in found] == [("pay, please", "billing"), ("hi", "other")]


def test_labels_may_be_mapped_and_columns_numbered(tmp_path):
    files = '[files]\nheader = false\ntarget = 0\ncolumns = { TEXT = 1 }\nlabels = { "0" = "no", "1" = "yes" }\n'
    task = task_of(tmp_path, PLAIN + 'labels = ["no", "yes"]\n' + files)
    (tmp_path / "train.tsv").write_text("1\ta\n0\tb\n")
    assert [e.target for e in read_split(task, tmp_path, "train")] == ["yes", "no"]


TOKENS = 'name = "own"\nkind = "token"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = own", "is not TOML: .*line 1"),
        ('kind = "sentence"\n', "name None: "),
        ('name = "Own Task"\n', "name 'Own Task': lower-case letters"),
        ('name = "../own"\n', "name '../own'"),
        ('name = "sst2"\nkind = "sentence"\n', "name 'sst2' belongs to a built-in task"),
        ('name = "own"\n', "kind None is unknown; kinds are sentence, pair"),
        ('name = "own"\nkind = "sentense"\n', "kind 'sentense' is unknown"),
        (PLAIN + "label = 3\n", "unknown field label; known fields are "),
        (PLAIN + 'labels = "yes"\n', "labels 'yes': a list of strings"),
        (PLAIN + 'labels = ["yes"]\n', r"labels \['yes'\]: at least two"),
        (PLAIN + 'labels = ["a", "b", "a"]\n', r"labels \['a', 'b', 'a'\]: .*each once"),
        (PLAIN + "labels = [0, 1]\n", r"labels \[0, 1\]: a list of strings"),
        (PLAIN + 'metrics = ["bleu"]\n', "metric 'bleu' does not fit kind 'sentence'; it has accuracy, mcc, f1"),
        (PLAIN + "metrics = []\n", r"metrics \[\]: at least one of accuracy"),
        (PLAIN + "max_tokens = 7\n", "max_tokens 7: a whole number from 8 to 512"),
        (PLAIN + "max_tokens = true\n", "max_tokens True: "),
        (PLAIN + 'overlap = "3"\n', "overlap '3': "),
        (PLAIN + "max_characters = 0\n", "max_characters 0: "),
        (PLAIN + "description = 3\n", "description 3: a string"),
        (PLAIN + 'options = "x"\n' + FILES, "options 'x': a table"),
        (PLAIN + FILES + "[options]\ntop_k = 3\n", r"\[options\]: unknown parameter 'top_k' for own; known: none"),
        ('name = "own"\nkind = "span"\n[options]\ntop_k = nan\n', r"\[options\]: parameter top_k=nan: a whole number"),
        (PLAIN + FILES + "[training]\nepoch = 3\n", r"\[training\]: unknown field epoch; known fields: epochs"),
        (PLAIN + FILES + '[training]\nepochs = "x"\n', r"\[training\]: epochs = 'x'"),
        (PLAIN + "training = 3\n" + FILES, "training 3: a table"),
        (PLAIN + "files = 3\n", "files 3: a table"),
        (PLAIN, r"files.columns \{\}: one for each of TEXT is needed"),
        (PLAIN + PAIRED, "files.columns .*TEXT_PAIR.*: one for each of TEXT is needed"),
        (
            PLAIN + FILES + 'format = "xml"\n',
            "files.format 'xml' is unknown; formats are tsv, csv, jsonl, conll, squad",
        ),
        (
            PLAIN + '[files]\nformat = "squad"\n',
            "files.format 'squad' does not fit kind 'sentence'; it has tsv, csv, jsonl",
        ),
        (
            TOKENS + '[files]\nformat = "csv"\ncolumns = { TEXT = "a" }\n',
            "files.format 'csv' does not fit kind 'token'; it has conll, jsonl",
        ),
        (TOKENS + '[files]\ncolumns = { TEXT = "a" }\n', "files.columns .*: one for each of nothing"),
        (TOKENS + 'labels = ["PER", "LOC"]\n', r"labels \['PER', 'LOC'\]: O, and B-NAME and I-NAME"),
        (TOKENS + 'labels = ["O", "B-PER"]\n', r"labels \['O', 'B-PER'\]: O, and B-NAME and I-NAME"),
        ('name = "own"\nkind = "span"\nlabels = ["a", "b"]\n', "labels .*: kind 'span' has none"),
        (PLAIN + FILES + 'column = "x"\n', "unknown field files.column; known fields"),
        (PLAIN + FILES + "train = 3\n", "files.train 3: a string"),
        (PLAIN + FILES + 'header = "no"\n', "files.header 'no': true or false"),
        (PLAIN + FILES + "target = 3\n", "files column for target is 3; its name in the header"),
        (PLAIN + FILES + "header = false\n", "files column for TEXT is 'message'; its number, from 0"),
        (
            PLAIN + "[files]\nheader = false\ntarget = 0\ncolumns = { TEXT = -1 }\n",
            "for TEXT is -1; its number, from 0",
        ),
        (PLAIN + FILES + "labels = 3\n", "files.labels 3: a table"),
        (PLAIN + FILES + 'labels = { "0" = 1 }\n', "files.labels.0 1: a string"),
    ],
)
def test_faults_name_the_file_the_field_and_the_value(tmp_path, text, message):
    with pytest.raises(InputError, match=message) as caught:
        task_of(tmp_path, text)
    assert str(tmp_path / "own.toml") in str(caught.value) and "\n" not in str(caught.value)


def test_labels_of_a_token_task(tmp_path):
    assert task_of(tmp_path, TOKENS + 'labels = ["O", "B-PER", "I-PER"]\n').labels == ("O", "B-PER", "I-PER")


def test_unknown_names(tmp_path):
    with pytest.raises(InputError, match=r"unknown task 'sst3'; tasks are sst2, .*or give a .toml file"):
        get_task("sst3")
    with pytest.raises(InputError, match=r"no such file: .*none.toml"):
        get_task(str(tmp_path / "none.toml"))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"files": {}, "nmae": 1}', "\ufffd"])
def test_a_damaged_definition_is_named(tmp_path, content):
    (tmp_path / "task.json").write_text(content)
    with pytest.raises(InputError, match=r"task.json is no task definition"):
        Task.from_file(tmp_path / "task.json")
