"""bertship/progress.py: bytes behind us, a rate and the time left, as a bar or as lines."""

import pytest
from rich.console import Console

from bertship import progress


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def test_lines_with_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, said = Clock(monkeypatch), []
    with progress.byte_progress("corpus", 400, 100, said.append) as advance:
        for second in range(1, 26):
            clock.now = 100.0 + second
            advance(4, 2_000_000, f"{second} documents")
    assert said == [
        "corpus 35%: 2.0 MB/s of text, 10 documents, 65 s left",
        "corpus 45%: 2.0 MB/s of text, 20 documents, 55 s left",
    ]


def test_a_total_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, said = Clock(monkeypatch), []
    with progress.byte_progress("corpus", 0, 0, said.append) as advance:
        clock.now += 20
        advance(0, 60_000_000, "7 documents")
    assert said == ["corpus: 3.0 MB/s of text, 7 documents"]


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        progress, "Console", lambda **options: Console(force_terminal=True, width=120, legacy_windows=False, **options)
    )
    said: list[str] = []
    with progress.byte_progress("corpus", 100, 0, said.append) as advance:
        advance(40, 3_000_000, "12 documents")
    shown = capsys.readouterr().err
    assert "corpus" in shown and "MB/s of text" in shown and "12 documents" in shown and "left:" in shown
    assert said == []


def test_of_several_processes_the_first_alone_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, said = Clock(monkeypatch), []
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        with progress.progress("training", 10, said.append) as advance:
            clock.now += 20
            advance("loss 1.0")
        assert len(said) == (rank == "0")
