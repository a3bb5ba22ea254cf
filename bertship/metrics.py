"""Metrics by their usual definitions, from scikit-learn and SciPy; SQuAD's and entity F1 as their official scripts do.

The libraries are loaded when a metric is computed: the server imports this module with the tasks and has none of them.
"""

import collections
import re
import string
from collections.abc import Sequence

import numpy as np


def score_labels(
    metrics: Sequence[str], gold: Sequence[str], predicted: Sequence[str], labels: Sequence[str]
) -> dict[str, float]:
    """`accuracy`, `mcc` (0 where one class is all that is predicted) and `f1` (of the second label, or macro)."""
    from sklearn import metrics as sk

    known = {
        "accuracy": lambda: sk.accuracy_score(gold, predicted),
        "mcc": lambda: sk.matthews_corrcoef(gold, predicted),
        "f1": lambda: (
            sk.f1_score(gold, predicted, pos_label=labels[1], average="binary", zero_division=0)
            if len(labels) == 2
            else sk.f1_score(gold, predicted, labels=list(labels), average="macro", zero_division=0)
        ),
    }
    return {name: float(known[name]()) for name in metrics}


def score_values(metrics: Sequence[str], gold: Sequence[float], predicted: np.ndarray) -> dict[str, float]:
    """`pearson` and `spearman` correlation; 0 where either side is all the same, which correlates with nothing."""
    from scipy import stats

    known = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}
    constant = np.ptp(np.asarray(predicted)) == 0 or np.ptp(np.asarray(gold)) == 0
    return {name: 0.0 if constant else float(known[name](gold, predicted)[0]) for name in metrics}


LABEL_METRICS = ("accuracy", "mcc", "f1")
VALUE_METRICS = ("pearson", "spearman")


def score_squad(gold: Sequence[Sequence[str]], predicted: Sequence[str]) -> dict[str, float]:
    """Exact match and word F1, the best over the accepted answers; no accepted answer means "" is right."""
    exact, f1 = [], []
    for accepted, answer in zip(gold, predicted, strict=True):
        accepted = accepted or [""]
        exact.append(max(float(_normal(answer) == _normal(text)) for text in accepted))
        f1.append(max(_word_f1(answer, text) for text in accepted))
    return {"f1": float(np.mean(f1)), "exact_match": float(np.mean(exact))}


def _normal(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces: how SQuAD's evaluation compares answers."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _word_f1(predicted: str, gold: str) -> float:
    a, b = _normal(predicted).split(), _normal(gold).split()
    common = sum((collections.Counter(a) & collections.Counter(b)).values())
    if not a or not b:
        return float(a == b)
    return 2 * common / (len(a) + len(b))


def score_entities(
    gold: Sequence[Sequence[tuple[str, int, int]]], predicted: Sequence[Sequence[tuple[str, int, int]]]
) -> dict[str, float]:
    """Micro F1, precision and recall over exact (label, start, end): seqeval's strict mode, on places in the text."""
    right = sum(len(set(g) & set(p)) for g, p in zip(gold, predicted, strict=True))
    found, wanted = sum(len(set(p)) for p in predicted), sum(len(set(g)) for g in gold)
    return {
        "f1": 2 * right / (found + wanted) if found + wanted else 1.0,
        "precision": right / found if found else float(not wanted),
        "recall": right / wanted if wanted else 1.0,
    }
