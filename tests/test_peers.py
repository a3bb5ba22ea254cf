"""benchmarks/peers.py: what its page says follows from what was measured, and what is missing is on it."""

import html
import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import finetuning, peer_environments, peers, peers_page, serving_systems
from benchmarks.peer_environments import Environment, install
from benchmarks.peers import (
    Absent,
    Context,
    compare_graphs,
    finetuning_options,
    measure,
    ratio_of,
    spread,
    write_official,
)
from benchmarks.peers_page import Part, Ratio, markdown, page, write
from bertship.errors import CheckFailed
from bertship.tasks import TASKS, Example
from bertship.tasks.readers import read_split

MACHINE = {
    "processor": "a processor",
    "cores": 2,
    "measured": "2026-01-01",
    "load_before": 0.1,
    "versions": {"torch": "2"},
}


def result(parts, **facts):
    environments = {"transformers": {"transformers": "5"}, "mlserver": "ERROR: No matching distribution"}
    return {"quick": False, "machine": MACHINE, "environments": environments, **facts} | {
        "parts": [part.as_dict() for part in parts]
    }


@pytest.fixture
def parts():
    faster = Ratio("ours", "hf | fp32", "tokens/s", 3.0, 2.5, 3.5, 7)
    measured = Part(
        "pre-training", "What ran.", [("ours", "loss 1.0")], "Judged alike.", [("ours", "9/s", "")], [faster]
    )
    return [measured, Part("export", "", absent=["optimum: no"]), Part("serving", "", failed="CheckFailed: not equal")]


def test_ratios_are_of_rounds_that_belong_together():
    assert ratio_of("ours", "theirs", "speed", [4.0, 9.0, 2.0], [2.0, 3.0, 2.0]) == Ratio(
        "ours", "theirs", "speed", 2.0, 1.0, 3.0, 3
    )
    assert spread([3.0, 1.0, 2.0], "s") == "2 s (1 to 3)" and spread([1.25], "s") == "1.25 s"


@pytest.mark.parametrize(
    ("values", "says"),
    [((2.0, 1.5, 3.0), "better than"), ((1.0, 0.9, 1.2), "as good as"), ((0.5, 0.4, 0.6), "worse than")],
)
def test_words_follow_the_spread(values, says):
    assert (
        f"ours is {says} theirs by speed: {values[0]:.2f} times"
        in Ratio("ours", "theirs", "speed", *values, 3).sentence()
    )


def test_both_pages_have_everything_and_hide_nothing(parts, tmp_path):
    write(result(parts), parts, tmp_path)
    shown = html.unescape((tmp_path / "report.html").read_text("utf-8"))
    text = (tmp_path / "report.md").read_text("utf-8")
    for line in (
        "ours is better than hf | fp32 by tokens/s: 3.00 times (2.50 to 3.50 over 7 paired rounds)",
        "export: without a peer, optimum: no",
        "serving: not measured, CheckFailed: not equal",
        "could not be installed: ERROR: No matching distribution",
        "a processor",
        "transformers 5",
        "loss 1.0",
    ):
        assert line in shown and line in text, line
    assert "| pre-training | ours | hf \\| fp32 | tokens/s | 3.00 | 2.50 | 3.50 | 7 |" in text
    assert json.loads((tmp_path / "results.json").read_text())["parts"][0]["ratios"][0]["median"] == 3.0


def test_figures_that_mean_nothing_are_called_so(parts):
    quick = markdown(result(parts, quick=True), parts)
    assert peers_page.QUICK in quick and "is better than" not in quick and "not measured" in quick
    assert peers_page.QUICK not in markdown(result(parts), parts)
    busy = result(parts, machine=MACHINE | {"load_before": 7})
    assert "busy when this began (load 7 on 2 cores)" in page(busy, parts).html()


def test_a_part_that_is_absent_or_fails_is_told_and_the_others_go_on(monkeypatch, tmp_path, capsys):
    def absent(context):
        context.need("mlserver")

    def fails(context):
        raise CheckFailed("answers\ndiffer")

    monkeypatch.setattr(peers, "PARTS", {"a": absent, "b": fails, "c": lambda context: Part("c", "well")})
    gone = Environment("mlserver", tmp_path, "no wheel", {})
    found = measure(Context(tmp_path, tmp_path, {"mlserver": gone}, True), ["a", "b", "c"])
    assert found[0].absent == ["mlserver could not be installed: no wheel"] and not found[0].failed
    assert found[1].failed == "CheckFailed: answers differ" and found[2].what == "well"
    assert "b: CheckFailed: answers differ" in capsys.readouterr().err
    with pytest.raises(Absent):
        absent(Context(tmp_path, tmp_path, {"mlserver": gone}, True))


def test_graphs_with_other_weights_are_not_compared():
    right = np.array([[1.0, 2.0], [3.0, 1.0]])
    same = {"ours fp32": right + 1e-6, "ours int8": right + 0.1, "optimum fp32": right}
    assert [name for name, _ in compare_graphs(same)] == list(same)
    with pytest.raises(CheckFailed, match=r"ours fp32 departs from optimum's FP32 graph by 0\.5: not the same weights"):
        compare_graphs({**same, "ours fp32": right + 0.5})
    with pytest.raises(CheckFailed, match=r"ours int8 decides as optimum's FP32 graph in 50\.0% of the texts"):
        compare_graphs({**same, "ours int8": np.array([[1.0, 2.0], [1.0, 3.0]])})
    with pytest.raises(CheckFailed, match="departs"):
        compare_graphs({**same, "ours fp32": right * np.nan})


def test_an_approximated_graph_of_the_peer_may_depart_further():
    right = np.array([[1.0, 2.0], [3.0, 1.0]])
    found = {"ours fp32": right, "optimum fp32": right, "optimum fp32 O3": right + 0.005}
    assert [name for name, _ in compare_graphs(found)] == list(found)
    with pytest.raises(CheckFailed, match=r"optimum fp32 O3 departs"):
        compare_graphs({**found, "optimum fp32 O3": right + 0.5})


@pytest.mark.parametrize("quick", [False, True])
def test_the_fine_tuning_benchmark_takes_what_it_is_given(monkeypatch, tmp_path, quick):
    monkeypatch.setattr(peers, "write_official", lambda home: home)
    options = finetuning_options(Context(tmp_path, tmp_path, {}, quick), tmp_path / "lines.jsonl")
    given = finetuning._parser().parse_args([str(option) for option in options])
    assert (given.sets, bool(given.limit), len(given.seeds.split(","))) == ("sst2", quick, 1 if quick else 2)


def test_the_reviews_become_official_files(monkeypatch, tmp_path):
    examples = [Example({"TEXT": 'a "joy"\tto\nwatch'}, "positive"), Example({"TEXT": "dull"}, "negative")]
    monkeypatch.setattr("train.data.load_examples", lambda *_: examples)
    folder = write_official(tmp_path) / "glue" / "SST-2"
    read = read_split(TASKS["sst2"], folder, "dev")
    assert [(e.columns["TEXT"], e.target) for e in read] == [('a "joy" to watch', "positive"), ("dull", "negative")]


def test_what_cannot_be_installed_has_its_reason_and_what_can_is_kept(monkeypatch, tmp_path):
    """With a stand-in for pip, which alone needs a network."""
    asked: list[list[str]] = []

    def run(command, **options):
        if "install" not in command:
            return real(command, **options)
        asked.append(command)
        if "-r" in command and broken:
            options["stdout"].write("Collecting it\nERROR: No matching distribution found for it\n")
            return subprocess.CompletedProcess(command, 1)
        return subprocess.CompletedProcess(command, 0)

    real = subprocess.run
    monkeypatch.setattr(peer_environments.subprocess, "run", run)
    broken = True
    found = install("optimum", lambda line: None, tmp_path)
    assert found.missing == "ERROR: No matching distribution found for it" and found.versions == {}
    broken = False
    assert not install("optimum", lambda line: None, tmp_path).missing
    before = len(asked)
    assert not install("optimum", lambda line: None, tmp_path).missing and len(asked) == before, "made once"
    assert all("-c" not in command for command in asked), "its own pins, not this project's"
    install("transformers", lambda line: None, tmp_path)
    assert "-c" in asked[-1] and any(word.startswith("safetensors") for word in asked[-1])


def test_a_server_that_does_not_start_says_why():
    command = [sys.executable, "-c", "print('x.ModelError: no such model'); print('bye'); exit(1)"]
    with (
        pytest.raises(CheckFailed, match=r"Peer did not start: x\.ModelError: no such model"),
        serving_systems.started(command, {}, "http://127.0.0.1:9", "/ready", "Peer"),
    ):
        pass


def test_mlserver_is_asked_and_read_in_its_own_form():
    (tensor,) = json.loads(serving_systems.mlserver_body({"TEXT": "a joy"}))["inputs"]
    assert tensor["data"] == ["a joy"] and tensor["datatype"] == "BYTES"
    for data in ('{"label": "positive", "score": 0.5}', '[{"label": "positive", "score": 0.5}]'):
        assert serving_systems.mlserver_answer({"outputs": [{"data": [data]}]}) == ("positive", 0.5)


def test_what_was_measured_before_stays_on_the_page(monkeypatch, tmp_path):
    ratio = Ratio("ours", "theirs", "speed", 2.0, 1.5, 2.5, 3)
    made = {name: (lambda context, name=name: Part(name, f"{name} ran", ratios=[ratio])) for name in "abc"}
    monkeypatch.setattr(peers, "PARTS", made)
    context = Context(tmp_path, tmp_path, {}, False)
    measure(context, ["a"])
    again = measure(context, ["b"])
    assert [part.name for part in peers.measured_before(tmp_path, ["b"])] == ["a"]
    (kept,) = peers.measured_before(tmp_path, ["b"])
    assert kept.ratios == [ratio] and kept.measured and kept.what == "a ran"
    text = markdown(result([kept, *again]), [kept, *again])
    assert f"a ran\nMeasured {kept.measured}" in text.replace("\n\n", "\n") and "## B" in text
