"""What a training writes down and what stops it: the log, the guard, the request to end, the page."""

import json
import math
import os
import re
import signal
import threading
from pathlib import Path

import pytest
import torch

from bertship.errors import CheckFailed
from bertship.report import Curve, Report
from train.watch import Board, MetricsLog, UpdateGuard, read_log, stop_request, weights_state


def test_the_guard_counts_and_stops_at_so_many_in_a_row() -> None:
    guard = UpdateGuard(limit=3)
    for applied in (True, False, False, True, False, False):
        guard.saw(applied, lambda in_a_row: "never")
    assert (guard.skipped, guard.in_a_row) == (4, 2)
    with pytest.raises(CheckFailed, match="3 in a row"):
        guard.saw(False, lambda in_a_row: f"{in_a_row} in a row")
    again = UpdateGuard(limit=3, skipped=4, in_a_row=2)
    with pytest.raises(CheckFailed):
        again.saw(False, str)


def test_broken_weights_are_found() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert weights_state(model) == "all weights are still finite"
    with torch.no_grad():
        model[1].weight[0, 0] = math.nan
    assert weights_state(model) == "weights are not finite, first 1.weight"


def test_the_log_is_json_lines_that_are_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write({"step": 1, "loss": 0.1 + 0.2, "grad_norm": math.inf})
        assert read_log(path) == [{"step": 1, "loss": 0.1 + 0.2, "grad_norm": None}]
        log.write({"step": 2, "loss": math.nan})
    assert [json.loads(line) for line in path.read_text().splitlines()][1] == {"step": 2, "loss": None}


def test_a_log_that_goes_on_forgets_what_lies_beyond_and_what_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step in range(1, 6):
            log.write({"step": step})
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    assert [line["step"] for line in read_log(path)] == [1, 2, 3, 4, 5]
    with MetricsLog(path, after=3) as log:
        log.write({"step": 4, "again": True})
    assert [line["step"] for line in read_log(path)] == [1, 2, 3, 4]
    assert read_log(path)[-1]["again"]
    with MetricsLog(path) as log:
        log.write({"step": 1})
    assert read_log(path) == [{"step": 1}]


def test_tensorboard_reads_what_was_drawn(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Board(tmp_path / "board") as board, MetricsLog(tmp_path / "metrics.jsonl", 0, board) as log:
        for step in (1, 2):
            log.write({"step": step, "loss": 3.0 / step, "note": "no number"})
        log.write({"step": 2, "loss": 9.0}, "held out")
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["held out/loss", "training/loss"]
    assert [(event.step, event.value) for event in events.Scalars("training/loss")] == [(1, 3.0), (2, 1.5)]


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_is_a_request_within_the_block(number: int, error: type[BaseException]) -> None:
    before = signal.getsignal(number)
    with stop_request() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop and stop.signal == number
        with pytest.raises(error) as caught:
            stop.leave()
    if error is SystemExit:
        assert caught.value.code == 143
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_ends_at_once() -> None:
    with stop_request() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_other_threads_have_no_signals() -> None:
    seen: list[bool] = []

    def run() -> None:
        with stop_request() as stop:
            seen.append(bool(stop))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [False]


def test_a_page_is_one_file_for_light_and_dark(tmp_path: Path) -> None:
    page = (
        Report("A <run>", "What was run & how.")
        .table("Scores", ("name", "value"), [["a<b", 0.51234], ["many", 1234567], ["none", None]])
        .text("Conclusions", "It rose.")
        .curves(
            "Loss", [Curve("one", [1, 2, 3], [3.0, None, math.inf]), Curve("two", [1, 2], [1.0, 2.0])], "update", "nats"
        )
        .curves("Nothing", [Curve("empty", [], [])], "x", "y")
        .facts("Settings", {"a": {"b": 1}, "c": True})
        .command("Again", "bertship pretrain")
    )
    page.write(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "A &lt;run&gt;" in text and "a&lt;b" in text and "&amp;" in text
    assert "0.5123" in text and "1,234,567" in text and "a.b" in text and ">True<" in text
    assert text.count("<svg") == 1, "nothing is drawn of nothing"
    assert "currentColor" in text and "#123456" not in text
    assert "prefers-color-scheme: dark" in text
    links = re.findall(r"""(?:href|src)\s*=\s*["']([^"'#][^"']*)["']|url\((?!#)([^)]*)\)""", text)
    assert not links, "nothing is fetched"


def test_a_curve_of_many_points_stays_small() -> None:
    many = list(range(100_000))
    assert len(Report("t", "w").curves("c", [Curve("c", many, many)], "x", "y").html()) < 100_000
