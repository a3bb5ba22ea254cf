"""bertship/shell.py: what is told to type can be typed, from where the reader is."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from bertship.report import Report
from bertship.shell import place, shown, shown_places, typed, typed_within

OWN = Path(sys.executable).parent


def test_a_program_of_this_environment_is_named_so_that_a_shell_finds_it(tmp_path, monkeypatch):
    monkeypatch.chdir(OWN.parent.parent)
    monkeypatch.setenv("PATH", os.defpath)
    line = typed("bertship compare 'a b' c    # bertship")
    assert line == f"{OWN.relative_to(OWN.parent.parent)}/bertship compare 'a b' c    # bertship"
    assert subprocess.run([*shlex.split(line)[:1], "--version"], check=True, capture_output=True, text=True).stdout
    monkeypatch.chdir(tmp_path)
    assert Path(shlex.split(typed("tensorboard --logdir x"))[0]).resolve() == (OWN / "tensorboard").resolve()
    assert typed("cp -rT a b") == "cp -rT a b" and typed("bertshipx a") == "bertshipx a"
    monkeypatch.setenv("PATH", f"{OWN}:{os.defpath}")
    assert typed("bertship stop") == "bertship stop", "on the PATH its name is enough"
    (tmp_path / "bertship").write_text("#!/bin/sh\n", encoding="utf-8")
    (tmp_path / "bertship").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    assert typed("bertship stop") != "bertship stop", "another environment's is not this one"


def test_reports_and_errors_name_it_alike(tmp_path, monkeypatch, bertship):
    monkeypatch.setenv("PATH", os.defpath)
    program = typed("bertship")
    assert program != "bertship"
    assert f"<pre>{program} stop\ncp a b</pre>" in Report("a", "b").command("Next", "bertship stop", "cp a b").html()
    assert typed_within("run `bertship stop`, or `make stop` of bertship") == (
        f"run `{program} stop`, or `make stop` of bertship"
    )
    code, out, err = bertship("predict", "--task", "sst2", "--text", "a", "--runs", tmp_path)
    assert (code, out) == (2, "") and f"`{program} export --task sst2`" in err


def test_places_are_as_one_would_type_them(tmp_path, monkeypatch):
    (tmp_path / "work" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    assert place(tmp_path / "work" / "a b") == "'a b'" and shown(tmp_path / "work" / "a b") == "a b"
    assert place(tmp_path / "work" / ".." / "data") == "../data" == shown(f"{tmp_path}/data")
    assert place("/etc") == "/etc", "shorter than from here"
    assert place("owner/name:config") == "owner/name:config" and place("minilm") == "minilm", "names stay"
    inputs = {"data": str(tmp_path / "data"), "task_file": None, "train_examples": 3, "init": "minilm"}
    assert shown_places(inputs) == {"data": "../data", "train_examples": 3, "init": "minilm"}
