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


def f1_note(labels: Sequence[str]) -> str:
    """Which F1 `score_labels` gives: of two labels that of the second one, of more the unweighted mean over all."""
    return f"of {labels[1]}" if len(labels) == 2 else "macro"


def score_values(metrics: Sequence[str], gold: Sequence[float], predicted: np.ndarray) -> dict[str, float]:
    """`pearson` and `spearman` correlation; 0 where either side is all the same, which correlates with nothing."""
    from scipy import stats

    known = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}
    constant = np.ptp(np.asarray(predicted)) == 0 or np.ptp(np.asarray(gold)) == 0
    return {name: 0.0 if constant else float(known[name](gold, predicted)[0]) for name in metrics}


LABEL_METRICS = ("accuracy", "mcc", "f1")
VALUE_METRICS = ("pearson", "spearman")


def score_squad(gold: Sequence[Sequence[str]], predicted: Sequence[str]) -> dict[str, float]:
    """Exact match and word F1, the best over the accepted answers, as SQuAD's scripts compute them.

    Where every question has an answer, that is version 1.1's script. Where one has none, it is version 2.0's: no
    accepted answer means "" is right, and `has_answer_*` and `no_answer_*` are those of the two kinds of question.
    """
    second = not all(gold)
    exact = []
    for accepted, answer in zip(gold, predicted, strict=True):
        exact.append(max(float(_normal(answer) == _normal(text)) for text in _accepted(accepted, second)))
    f1 = squad_f1(gold, predicted)
    scores = {"f1": float(np.mean(f1)), "exact_match": float(np.mean(exact))}
    if second:
        has = np.array([bool(accepted) for accepted in gold])
        for name, chosen in (("has_answer", has), ("no_answer", ~has)):
            if chosen.any():
                scores[f"{name}_f1"] = float(np.mean(np.array(f1)[chosen]))
                scores[f"{name}_exact_match"] = float(np.mean(np.array(exact)[chosen]))
    return scores


def squad_f1(gold: Sequence[Sequence[str]], predicted: Sequence[str]) -> list[float]:
    """Word F1 of each answer, as in `score_squad`."""
    second = not all(gold)
    return [
        max(_word_f1(answer, text, second) for text in _accepted(accepted, second))
        for accepted, answer in zip(gold, predicted, strict=True)
    ]


def _accepted(texts: Sequence[str], second: bool) -> Sequence[str]:
    """For version 2.0's script, an accepted answer without any word is none."""
    return ([text for text in texts if _normal(text)] or [""]) if second else texts


def best_null_threshold(gold: Sequence[Sequence[str]], spans: Sequence[str], null_odds: np.ndarray) -> float:
    """The threshold on `null_odds` above which "no answer" gives the best F1 (SQuAD 2.0's script finds the same).

    `spans` are the best spans. Of equal thresholds the lowest is taken, as the script does, and the threshold is one
    of the odds, or one below all of them where no question should be answered.
    """
    # what answering with the span wins, or loses, against silence
    gain = np.array(
        [
            max(_word_f1(span, text, True) for text in texts) - max(_word_f1("", text, True) for text in texts)
            for span, texts in zip(spans, (_accepted(texts, True) for texts in gold), strict=True)
        ]
    )
    order = np.argsort(null_odds, kind="stable")
    totals = np.concatenate([[0.0], np.cumsum(gain[order])])
    sorted_odds = np.asarray(null_odds, np.float64)[order]
    # equal odds are answered together or not at all
    last = np.append(np.flatnonzero(np.diff(sorted_odds)), len(sorted_odds) - 1) + 1
    places = np.concatenate([[0], last])
    best = int(places[np.argmax(totals[places])])
    return float(sorted_odds[best - 1]) if best else float(sorted_odds[0] - 1.0)


def _normal(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces: how SQuAD's evaluation compares answers."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _word_f1(predicted: str, gold: str, second: bool) -> float:
    """Of two answers without any word, version 2.0 calls equal what version 1.1 gives nothing."""
    a, b = _normal(predicted).split(), _normal(gold).split()
    if second and (not a or not b):
        return float(a == b)
    common = sum((collections.Counter(a) & collections.Counter(b)).values())
    return 2 * common / (len(a) + len(b)) if common else 0.0


def score_entities(
    gold: Sequence[Sequence[tuple[str, int, int]]], predicted: Sequence[Sequence[tuple[str, int, int]]]
) -> dict[str, float]:
    """Micro F1, precision and recall over exact (label, start, end): seqeval's strict mode, on places in the text.

    0 where there is nothing to divide by, as in seqeval and conlleval.
    """
    right = sum(len(set(g) & set(p)) for g, p in zip(gold, predicted, strict=True))
    found, wanted = sum(len(set(p)) for p in predicted), sum(len(set(g)) for g in gold)
    return {
        "f1": 2 * right / (found + wanted) if found + wanted else 0.0,
        "precision": right / found if found else 0.0,
        "recall": right / wanted if wanted else 0.0,
    }


def calibration_error(scores: np.ndarray, right: np.ndarray, bins: int = 10) -> float:
    """Expected calibration error: the mean gap between stated probability and share of right answers, over bins of
    equal width weighted by their size (Guo et al. 2017, section 2). `scores` float [N] in 0..1, `right` bool [N].
    """
    place = np.minimum((np.asarray(scores, np.float64) * bins).astype(int), bins - 1)
    total = 0.0
    for b in np.unique(place):
        chosen = place == b
        total += chosen.sum() * abs(float(np.mean(scores[chosen])) - float(np.mean(right[chosen])))
    return total / len(scores)
