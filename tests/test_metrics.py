"""bertship/metrics.py against scikit-learn, SciPy, seqeval and SQuAD's official rules."""

import math

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from bertship.metrics import _normal, score_entities, score_labels, score_squad, score_values
from bertship.tasks.ner import entities_of

RNG = np.random.default_rng(7)


@pytest.mark.parametrize("labels", [("no", "yes"), ("a", "b", "c")])
def test_labels_agree_with_scikit_learn(labels):
    gold, predicted = RNG.choice(labels, 200).tolist(), RNG.choice(labels, 200).tolist()
    found = score_labels(("accuracy", "mcc", "f1"), gold, predicted, labels)
    f1 = sklearn.metrics.f1_score(gold, predicted, average=None, labels=list(labels))
    assert found == pytest.approx(
        {
            "accuracy": sklearn.metrics.accuracy_score(gold, predicted),
            "mcc": sklearn.metrics.matthews_corrcoef(gold, predicted),
            "f1": f1[1] if len(labels) == 2 else f1.mean(),
        }
    )


@pytest.mark.filterwarnings("ignore:A single label")
def test_one_class_is_no_correlation():
    """fit.3"""
    found = score_labels(("mcc", "f1", "accuracy"), ["no", "yes", "yes"], ["no"] * 3, ("no", "yes"))
    assert found == pytest.approx({"mcc": 0, "f1": 0, "accuracy": 1 / 3})
    assert score_labels(("mcc", "f1"), ["no"] * 2, ["no"] * 2, ("no", "yes")) == {"mcc": 0, "f1": 0}


def test_values_agree_with_scipy():
    gold = RNG.uniform(0, 5, 100)
    predicted = gold + RNG.normal(0, 1, 100)
    assert score_values(("pearson", "spearman"), gold.tolist(), predicted.astype(np.float32)) == pytest.approx(
        {
            "pearson": scipy.stats.pearsonr(gold, predicted)[0],
            "spearman": scipy.stats.spearmanr(gold, predicted)[0],
        },
        rel=1e-5,
    )


@pytest.mark.parametrize(
    ("gold", "predicted"), [([1.0, 2.0, 3.0], [2.0] * 3), ([2.0] * 3, [1.0, 2.0, 3.0]), ([4.0], [4.0])]
)
@pytest.mark.filterwarnings("error")
def test_constant_values_correlate_with_nothing(gold, predicted):
    assert score_values(("pearson", "spearman"), gold, np.array(predicted)) == {"pearson": 0, "spearman": 0}


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("The  Cat", "cat"),
        ("a.b-c, D!", "abc d"),
        ("An apple; the (A) pear", "apple pear"),
        ("theatre another", "theatre another"),
        ("\u00a0x\ty\n", "x y"),
        ("“quoted”", "“quoted”"),  # the official script knows ASCII punctuation alone
        ("The", ""),
    ],
)
def test_answers_are_compared_as_squad_does(answer, normal):
    assert _normal(answer) == normal


@pytest.mark.parametrize(
    ("accepted", "answer", "exact", "f1"),
    [
        (["Denver Broncos", "the Broncos"], "Broncos", 1, 1),
        (["Denver Broncos"], "Broncos", 0, 2 / 3),
        (["x x y"], "x x x", 0, 2 / 3),
        (["x"], "y", 0, 0),
        (["x"], "", 0, 0),
        ([], "", 1, 1),
        ([], "x", 0, 0),
        (["a"], "the", 1, 0),  # version 1.1: no common word is no overlap, though both are nothing but articles
    ],
)
def test_squad_scores(accepted, answer, exact, f1):
    found = score_squad([accepted], [answer])
    assert {name: found[name] for name in ("exact_match", "f1")} == pytest.approx({"exact_match": exact, "f1": f1})


def test_squad_scores_are_means():
    assert score_squad([["x"], ["y"]], ["x", "z"]) == {"exact_match": 0.5, "f1": 0.5}


TAGS = st.sampled_from(["O", "B-P", "I-P", "B-L", "I-L"])
SEQUENCES = st.lists(st.lists(st.tuples(TAGS, TAGS), min_size=1, max_size=12), min_size=1, max_size=4)


def valid(tags):
    """IOB2: an I- only after its own B- or I-."""
    fixed = []
    for tag in tags:
        previous = fixed[-1] if fixed else "O"
        fixed.append("B" + tag[1:] if tag[0] == "I" and previous[1:] != tag[1:] else tag)
    return fixed


@pytest.mark.filterwarnings("ignore")
@settings(deadline=None)  # a busy machine is no fault
@given(SEQUENCES, st.booleans())
def test_entities_agree_with_seqeval(sequences, strict):
    """In its strict IOB2 mode on IOB2; on anything else with its lenient one, as conlleval reads loose tags."""
    from seqeval.metrics import f1_score, precision_score, recall_score
    from seqeval.scheme import IOB2

    gold = [valid([g for g, _ in sequence]) for sequence in sequences]
    predicted = [[p for _, p in sequence] for sequence in sequences]
    if strict:
        predicted = [valid(tags) for tags in predicted]
    places = [[(2 * i, 2 * i + 1) for i in range(len(tags))] for tags in gold]
    ours = score_entities(
        *([entities_of(p, t) for p, t in zip(places, tags, strict=True)] for tags in (gold, predicted))
    )
    mode = {"mode": "strict", "scheme": IOB2} if strict else {}
    assert ours["f1"] == pytest.approx(f1_score(gold, predicted, **mode))
    assert ours["precision"] == pytest.approx(precision_score(gold, predicted, **mode))
    assert ours["recall"] == pytest.approx(recall_score(gold, predicted, **mode))


def test_nothing_to_divide_by_is_0():
    """As in seqeval and conlleval."""
    assert score_entities([[]], [[]]) == {"f1": 0, "precision": 0, "recall": 0}
    assert score_entities([[("P", 0, 1)]], [[]]) == {"f1": 0, "precision": 0, "recall": 0}
    assert all(math.isfinite(v) for v in score_entities([[]], [[("P", 0, 1)]]).values())
