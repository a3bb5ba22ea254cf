"""The best spans of a question over all windows of its context (Devlin et al. 2019, sections 4.2 and 4.3).

Spans of all windows and the null answer are compared in logits, which are on one scale; probabilities of separate
softmaxes are not. A score is a softmax over the null answer and every span of every window that `max_answer_tokens`
allows. A span that several windows hold is one answer and counts once, with its best logits: were it counted in each,
a certain answer's probability would halve wherever two windows overlap.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bertship.tasks.base import Logits, short
from bertship.tokenization import NO_OFFSET

NO_SPAN = 1e4  # null odds of a context without any token


def best_answers(
    contexts: Sequence[str], table: Mapping[str, np.ndarray], logits: Logits, options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Each question's best answer over all its windows, its probability and the runners-up.

    `table`: OWNER int32 [R], the question of each window, and OFFSETS int32 [R, L, 2], its tokens' code points;
    `logits`: start_logits and end_logits, float32 [R, L]. Of an answer: answer, score, start, end, null_odds,
    null_score, spans (the best `top_k`) and candidates (those after the null answer where that is the answer).
    """
    found = []
    for i, context in enumerate(contexts):
        rows = np.flatnonzero(table["OWNER"] == i).tolist()
        found.append(_answer(context, (_spans(table, logits, w, options) for w in rows), options))
    return found


class _Window(NamedTuple):
    """One row's spans: `scores` float64 [D, L] for d + 1 tokens from token l, -inf past the row; null: its [CLS]."""

    scores: np.ndarray
    offsets: np.ndarray
    null: float


def _spans(table: Mapping[str, np.ndarray], logits: Logits, w: int, options: Mapping[str, Any]) -> _Window:
    """Scores of all spans of window `w`: start logit plus end logit, at most `max_answer_tokens` long."""
    start, end = (np.asarray(logits[name][w], np.float64) for name in ("start_logits", "end_logits"))
    offsets = table["OFFSETS"][w]
    context = np.flatnonzero(offsets[:, 0] != NO_OFFSET)
    tokens = len(context)
    longest = min(options["max_answer_tokens"], tokens)
    scores = np.full((longest, tokens), -np.inf)
    s, e = start[context], end[context]
    for d in range(longest):
        scores[d, : tokens - d] = s[: tokens - d] + e[d:]
    return _Window(scores, offsets[context], float(start[0] + end[0]))


def _distinct(places: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each place once, ascending, at its best score."""
    order = np.argsort(places, kind="stable")
    places, scores = places[order], scores[order]
    new = np.flatnonzero(np.diff(places, prepend=-1))
    return places[new], np.maximum.reduceat(scores, new) if len(new) else scores


class _Tally:
    """All spans of one question, window by window: memory is that of a window, however long the context.

    A place is start * 2^32 + end, in code points. Windows overlap, so the same span may come from several of them; it
    counts once, at its best. What starts before the next window cannot come again and is added up.
    """

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        self.null = np.inf
        self.total = -np.inf  # log of the sum of exp(score)
        self.places, self.scores = np.zeros(0, np.int64), np.zeros(0)  # the best so far, the best first
        self._open = (self.places, self.scores)  # spans that the next window may have too

    def add(self, window: _Window) -> None:
        self.null = min(self.null, window.null)
        if not len(window.offsets):
            return
        d, first = np.nonzero(np.isfinite(window.scores))
        starts, ends = window.offsets[first, 0].astype(np.int64), window.offsets[first + d, 1].astype(np.int64)
        self._close(int(window.offsets[0, 0]))
        places, scores = self._open
        self._open = _distinct(
            np.concatenate([places, (starts << 32) + ends]), np.concatenate([scores, window.scores[d, first]])
        )

    def _close(self, before: int | None) -> None:
        """Add up the open spans that start before this code point; all of them for None."""
        places, scores = self._open
        cut = len(places) if before is None else int(np.searchsorted(places, before << 32))
        if cut:
            highest = scores[:cut].max()
            self.total = np.logaddexp(self.total, highest + np.log(np.exp(scores[:cut] - highest).sum()))
            places_all = np.concatenate([self.places, places[:cut]])
            scores_all = np.concatenate([self.scores, scores[:cut]])
            best = np.lexsort((places_all, -scores_all))[: self.top_k]  # of equal ones the earlier
            self.places, self.scores = places_all[best], scores_all[best]
            self._open = places[cut:], scores[cut:]

    def finish(self) -> float:
        """Close what is open; the log of the sum over all spans and the null answer."""
        self._close(None)
        return float(np.logaddexp(self.total, self.null))


def _answer(context: str, spans: Iterable[_Window], options: Mapping[str, Any]) -> dict[str, Any]:
    """The best answer over all windows of one question, its probability, and the runners-up.

    The candidates begin with the answer itself, which is the null answer where the threshold says so; the spans follow
    from the best on.
    """
    tally = _Tally(options["top_k"])
    for window in spans:
        tally.add(window)
    total = tally.finish()
    candidates = []
    for place, cost in zip(tally.places.tolist(), tally.scores.tolist(), strict=True):
        start, end = place >> 32, place & 0xFFFFFFFF
        score = short(np.exp(cost - total))
        candidates.append({"answer": context[start:end], "score": score, "start": start, "end": end})
    threshold = options["null_threshold"]
    # without any span the null answer is certain; a finite number, as it goes into JSON
    odds = float(tally.null - tally.scores[0]) if candidates else NO_SPAN
    more = {"null_odds": odds, "null_score": short(np.exp(tally.null - total)), "spans": candidates}
    if not candidates or (threshold is not None and odds > threshold):
        empty = {"answer": "", "score": short(np.exp(tally.null - total)), "start": -1, "end": -1}
        return {**empty, **more, "candidates": [empty, *candidates][: options["top_k"]]}
    return {**candidates[0], **more, "candidates": candidates}
