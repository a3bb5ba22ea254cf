"""benchmarks/finetuning.py on tiny data: every side runs, what is done is kept, the table says what was measured."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import machine
from benchmarks.finetuning import SIDES, read_results, table

ROOT = Path(__file__).parents[1]


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "benchmarks/finetuning.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)


def test_every_side_runs_once_and_what_is_done_is_kept(data: Path, warm_start: Path, tmp_path: Path) -> None:
    (tmp_path / "glue").mkdir()
    (tmp_path / "glue" / "SST-2").symlink_to(data / "sst2")
    out = tmp_path / "results.jsonl"
    common = (tmp_path, "--init", warm_start, "--limit", 40, "--out", out, "--sets", "sst2", "--seeds", "42")
    first = run(*common, "--sides", "ours")
    assert first.returncode == 0, first.stderr
    assert [(r["set"], r["side"], r["seed"]) for r in read_results(out)] == [("sst2", "ours", 42)]
    done = run(*common)
    assert done.returncode == 0, done.stderr
    found = read_results(out)
    assert [r["side"] for r in found] == list(SIDES), "ours was not run again"
    for result in found:
        assert 0 <= result["metrics"]["accuracy"] <= 1 and result["seconds"] >= 0  # a tenth of a second
        assert result["machine"]["processor"] and {"torch", "transformers"} <= result["machine"]["versions"].keys()
        assert result["machine"]["instructions"] == machine.instructions()
    assert [bool(result["code"]) for result in found] == [True, False, False]
    assert done.stdout.splitlines()[-1].startswith("| sst2 | accuracy | ")
    again = run(*common, "--sides", "best", "--since", found[-1]["when"][:-1])
    assert len(read_results(out)) == 3, again.stderr
    later = run(*common, "--sides", "best", "--since", "9999-12-31")
    assert [r["side"] for r in read_results(out)] == [*SIDES, "best"], later.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--sets", "cola,x"), "unknown set 'x'; sets are sst2, cola"),
        (("--sides", "theirs"), "unknown side 'theirs'; sides are ours, recipe, best"),
        (("--seeds", "3x"), "--seeds '3x': whole numbers"),
        (("--since", "noon"), "--since 'noon': a time such as 2026-12-31T08:00"),
    ],
)
def test_a_typo_is_said_before_anything_runs(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = run(tmp_path, "--out", tmp_path / "results.jsonl", *arguments)
    assert done.returncode and says in done.stderr and not list(tmp_path.iterdir())


def test_the_table_has_means_spreads_and_shares_of_time() -> None:
    def made(side: str, seed: int, mcc: float, seconds: float) -> dict[str, Any]:
        return {"set": "cola", "side": side, "seed": seed, "metrics": {"mcc": mcc}, "seconds": seconds}

    results = [made("ours", 42, 0.31, 90), made("ours", 43, 0.33, 110), made("recipe", 42, 0.30, 400)]
    (*_, line) = table(results)
    assert line == "| cola | mcc | 32.0 +- 1.4, 100 | 30.0, 400 |  | 0.25 |  |"
