"""bertship/runners.py: rows that run together, and their logits back in the order of the rows.

That no bit of a row depends on what runs beside it is tested on the graphs of each precision, in test_precision.py and
test_int8.py.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertship.runners import TOGETHER_TOKENS, OnnxRunner, _parts
from bertship.tokenization import Row


def rows_of(lengths) -> list[Row]:
    return [Row(np.full(length, place), np.zeros(length, np.int64)) for place, length in enumerate(lengths)]


class Recording(OnnxRunner):
    """Without a graph: the logits of a row are its ids; `runs` has the shape of each run, and whether it was wide."""

    outputs = ("logits",)

    def __init__(self, threads):
        self.threads, self.runs, self._pool = threads, [], ThreadPoolExecutor(threads)

    def run(self, feeds, wide=True):
        self.runs.append((*feeds["input_ids"].shape, wide))
        if (feeds["input_ids"] == 13).any():
            raise ValueError("row 13")
        return [feeds["input_ids"]]


@given(st.lists(st.integers(1, 90), max_size=40), st.integers(1, 4))
def test_each_row_is_in_one_part_of_its_length(lengths, threads):
    parts = _parts(rows_of(lengths), threads)
    assert sorted(place for part in parts for place in part) == list(range(len(lengths)))
    tokens = []
    for part in parts:
        (length,) = {lengths[place] for place in part}
        tokens.append(length * len(part))
        assert len(part) == 1 or (tokens[-1] <= TOGETHER_TOKENS and length > 1)
        assert len(part) <= -(-len(lengths) // threads), "a thread would have nothing to do"
    assert tokens == sorted(tokens, reverse=True)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(), (5,), (5, 5), (5, 9, 5), (5, 5, 5, 5), (300, 2, 40, 2, 2), range(1, 12)])
def test_logits_come_back_in_the_order_of_the_rows(threads, lengths):
    runner = Recording(threads)
    found = runner(rows_of(lengths))["logits"]
    assert [values.tolist() for values in found] == [[place] * length for place, length in enumerate(lengths)]
    assert sum(count for count, _, _ in runner.runs) == len(lengths)


def test_a_row_alone_takes_all_threads_and_so_does_one_that_is_left_over():
    for lengths, wide in (((7,), [7]), ((7, 9), []), ((7, 9, 8), [9]), ((7, 9, 8, 8), []), ((30, 30, 8), [])):
        runner = Recording(2)
        runner(rows_of(lengths))
        assert [length for _, length, all_threads in runner.runs if all_threads] == wide, lengths


@pytest.mark.parametrize("threads", [1, 2])
def test_what_a_run_raises_is_raised_and_the_next_call_is_answered(threads):
    runner = Recording(threads)
    with pytest.raises(ValueError, match="row 13"):
        runner(rows_of(range(1, 20)))
    assert len(runner(rows_of(range(1, 9)))["logits"]) == 8
