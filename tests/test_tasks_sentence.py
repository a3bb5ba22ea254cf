"""bertship/tasks/sentence.py: sentences, pairs and scores, from texts to rows and from logits to answers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertship.errors import InputError
from bertship.pipeline import Pipeline
from bertship.tasks import TASKS, Example, Task
from bertship.tasks.sentence import _cut_longest
from bertship.tokenization import SPECIAL_TOKENS, Tokenizer

TOKENIZER = Tokenizer.from_vocab([*SPECIAL_TOKENS, *"abcdefghijklmnopqrstuvwxyz"], lowercase=True)
SST2, MNLI, STSB = (TASKS[name] for name in ("sst2", "mnli", "stsb"))


def short(name, max_tokens):
    return Task(name="t", kind=TASKS[name].kind, labels=TASKS[name].labels, max_tokens=max_tokens)


def letters(ids):
    return " ".join(TOKENIZER.backend.id_to_token(i) for i in ids)


def fixed(logits):
    """A runner that answers with these logits, one list a row."""
    return lambda rows: {"logits": [np.array(row, np.float32) for row in logits]}


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 60))
def test_the_longest_gives_way_token_by_token(first, second, room):
    kept = [first, second]
    while sum(kept) > room:  # the second gives way first on a tie
        kept[0 if kept[0] > kept[1] else 1] -= 1
    assert _cut_longest([first, second], room) == kept
    assert _cut_longest([first], room) == [min(first, room)]


def test_a_sentence_is_cut_and_says_so():
    encoded = short("sst2", 8).behaviour.encode(
        short("sst2", 8), TOKENIZER, {"TEXT": ["a b c d e f", "a b c d e f g", ""]}
    )
    assert [letters(row.ids) for row in encoded.rows] == [
        "[CLS] a b c d e f [SEP]",
        "[CLS] a b c d e f [SEP]",
        "[CLS] [SEP]",
    ]
    assert encoded.truncated.tolist() == [False, True, False]
    assert [row.owner for row in encoded.rows] == [0, 1, 2]


def test_a_pair_is_cut_at_its_longer_text():
    task = short("mnli", 8)
    columns = {
        "TEXT": ["a b c d e f", "a", "a b c d", "", "a b"],
        "TEXT_PAIR": ["x", "u v w x y z", "u v w x", "", "u v w"],
    }
    encoded = task.behaviour.encode(task, TOKENIZER, columns)
    assert [letters(row.ids) for row in encoded.rows] == [
        "[CLS] a b c d [SEP] x [SEP]",
        "[CLS] a [SEP] u v w x [SEP]",
        "[CLS] a b c [SEP] u v [SEP]",
        "[CLS] [SEP] [SEP]",
        "[CLS] a b [SEP] u v w [SEP]",
    ]
    assert encoded.truncated.tolist() == [True, True, True, False, False]
    assert encoded.rows[0].types.tolist() == [0] * 6 + [1] * 2


def test_labels_and_probabilities_in_order():
    logits = [[2.0, -1.0], [-300.0, 300.0], [0.0, 0.0]]
    answers = Pipeline(SST2, TOKENIZER, fixed(logits))({"TEXT": ["a", "b", ""]})
    assert answers["LABEL"].tolist() == ["negative", "positive", "negative"]
    assert answers["PROBABILITIES"].dtype == answers["SCORE"].dtype == np.float32
    assert answers["PROBABILITIES"].shape == (3, 2)
    np.testing.assert_allclose(answers["PROBABILITIES"].sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(answers["SCORE"], [1 / (1 + np.exp(-3)), 1, 0.5], rtol=1e-6)
    assert answers["TRUNCATED"].tolist() == [False] * 3


def test_a_score_is_the_value_itself():
    answers = Pipeline(STSB, TOKENIZER, fixed([[4.25], [-0.5]]))({"TEXT": ["a", "b"], "TEXT_PAIR": ["c", ""]})
    assert answers["SCORE"].tolist() == [4.25, -0.5]
    assert STSB.behaviour.decisions(answers) == [None, None]
    assert {spec.name for spec in STSB.behaviour.outputs(STSB)} == {"SCORE"}


def examples(task, *targets):
    return [
        Example(dict.fromkeys(task.behaviour.inputs, "a"), target, f"f, line {i}") for i, target in enumerate(targets)
    ]


def rows_of(task, count):
    return task.behaviour.encode(task, TOKENIZER, {name: ["a"] * count for name in task.behaviour.inputs}).rows


def test_targets_go_by_name():
    """fit.1: the task's own order of labels decides, not the data's and not the alphabet's."""
    made = examples(MNLI, "contradiction", "entailment", "neutral")
    assert MNLI.behaviour.targets(MNLI, rows_of(MNLI, 3), made) == [2, 0, 1]
    other = MNLI.with_labels(["contradiction", "entailment", "neutral"])
    assert other.behaviour.targets(other, rows_of(other, 3), made) == [0, 1, 2]
    answers = Pipeline(other, TOKENIZER, fixed([[9, 0, 0]]))({"TEXT": ["a"], "TEXT_PAIR": ["b"]})
    assert answers["LABEL"].tolist() == ["contradiction"]


def test_scores_are_floats():
    """fit.2"""
    targets = STSB.behaviour.targets(STSB, rows_of(STSB, 3), examples(STSB, "3.8", "0", "5.000"))
    assert targets == [3.8, 0.0, 5.0] and all(type(target) is float for target in targets)


@pytest.mark.parametrize(
    ("task", "target", "message"),
    [
        (SST2, "2", "f, line 0: label '2' is unknown to task sst2; its labels are negative, positive"),
        (MNLI, "-", "f, line 0: label '-' is unknown to task mnli"),
        (STSB, "four", "f, line 0: score 'four' is no finite number"),
        (STSB, "nan", "f, line 0: score 'nan' is no finite number"),
        (STSB, "", "f, line 0: score '' is no finite number"),
    ],
)
def test_targets_that_are_none_are_refused(task, target, message):
    with pytest.raises(InputError, match=message):
        task.behaviour.check(task, examples(task, target))


def test_targets_that_are_right_pass():
    SST2.behaviour.check(SST2, examples(SST2, "negative", "positive"))
    STSB.behaviour.check(STSB, examples(STSB, "0", "-1.5e1"))


def test_labels_from_the_data_are_sorted():
    assert SST2.behaviour.labels_in(examples(SST2, "z", "a", "z", "ä")) == ("a", "z", "ä")


def test_scores_of_the_kinds():
    answers = {"LABEL": np.array(["negative", "positive"], object)}
    assert SST2.behaviour.score(SST2, examples(SST2, "negative", "negative"), answers) == {"accuracy": 0.5}
    scores = STSB.behaviour.score(STSB, examples(STSB, "1", "2", "4"), {"SCORE": np.array([2, 4, 8], np.float32)})
    assert scores == pytest.approx({"pearson": 1, "spearman": 1})


def test_the_tables_of_labels_are_scikit_learns():
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    task = SST2.with_labels(("a", "b", "c", "never"))
    gold, answered = list("aabbbccaab"), list("abbbacccab")
    examples = [Example({"TEXT": "x"}, label) for label in gold]
    matrix, by_label = task.behaviour.tables(task, examples, {"LABEL": np.array(answered, object)})
    counts = confusion_matrix(gold, answered, labels=task.labels)
    assert [row[1:] for row in matrix[2]] == [tuple(row) for row in counts]
    wanted = precision_recall_fscore_support(gold, answered, labels=task.labels, zero_division=0)
    for row, precision, recall, f1, count in zip(by_label[2], *wanted, strict=True):
        assert row[1] == count and row[2:] == pytest.approx((precision, recall, f1)), row[0]
