"""Progress on stderr: a live bar on a terminal, a line now and then elsewhere."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_EVERY_S = 10.0


def to_stderr(line: str) -> None:
    """One line on stderr; stdout belongs to results."""
    Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def progress(
    what: str, total: int, report: Callable[[str], None], done: int = 0, rated: bool = True
) -> Iterator[Callable[[str], None]]:
    """Yield `advance(facts)`, to be called once a step with what is worth showing (`loss 3.21, 9,000 tokens/s`).

    `done`: steps that an earlier run has made already; rate and time left are this run's. `rated`: whether steps a
    second say anything, which they do not where a step is a measurement of many. On a terminal a bar shows
    them; otherwise `report` gets a line every LINE_EVERY_S seconds. Of torchrun's processes the first alone shows it.
    """
    if os.environ.get("RANK", "0") != "0":
        yield lambda facts: None
        return
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=total, completed=done, facts="", rate="")

            def draw(facts: str) -> None:
                speed = bar.tasks[0].speed
                bar.update(task, advance=1, facts=facts, rate=f"{speed:.1f}/s" if speed and rated else "")

            yield draw
        return

    started = last = time.monotonic()
    before = done

    def say(facts: str) -> None:
        nonlocal done, last
        done += 1
        now = time.monotonic()
        if now - last >= LINE_EVERY_S:
            last = now
            rate = (done - before) / (now - started)
            shown = f"{rate:.1f} steps/s, " if rated else ""
            report(f"{what} {done}/{total}: {facts}, {shown}{_spoken((total - done) / rate)} left")

    yield say


@contextlib.contextmanager
def byte_progress(what: str, total: int, done: int, report: Callable[[str], None]) -> Iterator[Callable[..., None]]:
    """Yield `advance(bytes, text_bytes, facts)`: so much more of `total` is behind us, in which was so much text.

    `done` was behind us before. The rate is that of the text; the time left is told from `total`, where it is known
    (not 0). On a terminal a bar, otherwise a line to `report` every LINE_EVERY_S seconds.
    """
    console = Console(stderr=True)
    started = time.monotonic()
    behind, text = done, 0

    def rate() -> str:
        return f"{text / 1e6 / max(time.monotonic() - started, 1e-9):.1f} MB/s of text"

    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[rate]}"),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(elapsed_when_finished=False),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=total or None, completed=done, facts="", rate="")

            def draw(count: int, text_count: int, facts: str) -> None:
                nonlocal text
                text += text_count
                bar.update(task, advance=count, facts=facts, rate=rate())

            yield draw
        return

    last = started

    def say(count: int, text_count: int, facts: str) -> None:
        nonlocal behind, text, last
        behind, text = behind + count, text + text_count
        now = time.monotonic()
        if now - last >= LINE_EVERY_S:
            last = now
            share = f" {behind / total:.0%}" if total else ""
            left = (total - behind) / max((behind - done) / (now - started), 1e-9)
            report(f"{what}{share}: {rate()}, {facts}" + (f", {max(left, 0):,.0f} s left" if total else ""))

    yield say


def _spoken(seconds: float) -> str:
    """A duration in the units that say most: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
