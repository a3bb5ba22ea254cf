"""bertship/cli.py: exit codes, one-line errors, one JSON object. (tests/test_line.py runs the commands for real.)"""

import errno
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bertship import cli, console
from bertship.commands import exporting, serving, training

ROOT = Path(__file__).parents[1]
COMMANDS = [
    "demo",
    "corpus",
    "pretrain",
    "params",
    "finetune",
    "evaluate",
    "export",
    "parity",
    "plan",
    "repository",
    "serve",
    "health",
    "deploy",
    "stop",
    "ask",
    "predict",
    "bench",
    "playground",
    "compare",
    "doctor",
    "bench-engine",
]


@pytest.fixture
def stage(monkeypatch):
    """Make whatever stage a command loads do this instead."""

    def replace(action):
        for module in (training, exporting, serving):
            monkeypatch.setattr(
                module, "load", lambda where: console.load(where) if where.startswith("bertship.") else action
            )

    return replace


def fails(error):
    def run(*_, **__):
        raise error

    return run


def test_every_command_is_tested():
    assert sorted(COMMANDS) == sorted(
        c.name or c.callback.__name__.replace("_", "-") for c in cli.app.registered_commands
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help(bertship, command):
    code, out, err = bertship(command, "--help")
    assert (code, err) == (0, "")
    assert out.lstrip().startswith(f"Usage: bertship {command}")


def test_help_without_arguments(bertship):
    code, out, _ = bertship()
    assert code in (0, 2)
    assert all(f" {command} " in out for command in COMMANDS)


def test_version(bertship):
    code, out, err = bertship("--version")
    assert (code, err) == (0, "") and re.fullmatch(r"bertship \d+\.\d+\.\d+\n", out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "No such command 'train'"),
        (["predict", "--txt", "a"], "No such option: --txt"),
        (["ask", "--timeout-s", "soon"], "Invalid value for '--timeout-s'"),
        (["serve", "--http-port", "70000"], "Invalid value for '--http-port'"),
        (["predict", "--task", "sst3", "--text", "a"], "unknown task 'sst3'; tasks are sst2"),
        (["predict", "--task", "none.toml", "--text", "a"], "no such file: none.toml"),
        (["predict", "--runs", "/nowhere", "--text", "a"], "there is no /nowhere/export/sst2; run `bertship export"),
        (["task", "check"], "`bertship task check --help` lists what there is"),
        (["bench-engine", "/nowhere"], "no manifest.json in /nowhere (the directory that `bertship export` writes)"),
        (["bench-engine", "/nowhere", "--batch", "1,x"], "--batch '1,x': whole numbers of 1 or more are needed"),
        (["bench-engine", "/nowhere", "--length", "0"], "--length '0': whole numbers of 1 or more are needed"),
        (["finetune", "--set", "epochs"], "--set 'epochs': FIELD=VALUE is needed"),
        (["finetune", "--set", "=3"], "--set '=3': FIELD=VALUE is needed"),
        (["ask"], "nothing to ask: give --text"),
        (["ask", "--text", "a", "--url", "localhost:8000"], "http://HOST:PORT or grpc://HOST:PORT is needed"),
    ],
)
def test_wrong_usage_is_one_line_and_2(bertship, arguments, message):
    code, out, err = bertship(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_what_is_missing_is_named_beside_what_is_there(bertship, tmp_path):
    for name in ("default", "second"):
        (tmp_path / "finetune" / "sst2" / name).mkdir(parents=True)
        (tmp_path / "finetune" / "sst2" / name / "manifest.json").write_text("{}")
    code, _, err = bertship("export", "--runs", tmp_path, "--name", "third")
    assert code == 2 and f"there is no {tmp_path / 'finetune' / 'sst2' / 'third'} (there: default, second)" in err
    assert "bertship finetune --task sst2 --name third` first" in err


def test_unknown_preset(bertship, tmp_path):
    (tmp_path / "corpus" / "default").mkdir(parents=True)
    (tmp_path / "corpus" / "default" / "manifest.json").write_text('{"stage": "corpus", "vocab_size": 64, "files": {}}')
    code, out, err = bertship("pretrain", "--preset", "huge", "--runs", tmp_path)
    assert (code, out) == (2, "") and "unknown preset 'huge'" in err and err.count("\n") == 1


def test_a_server_that_is_not_there_is_1(bertship):
    code, out, err = bertship("ask", "--text", "a", "--url", "http://127.0.0.1:9")
    assert (
        (code, out) == (1, "")
        and err.startswith("error: sst2: no server at http://127.0.0.1:9")
        and err.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/runs/x"),
            2,
            r"No space left on device \(/runs/x\)",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/runs/x"), 2, r"Permission denied \(/runs/x\)"),
        (KeyboardInterrupt(), 130, "interrupted; nothing is left half written"),
        (ValueError("two\nlines"), 1, "unexpected ValueError: two lines; run again with --debug"),
    ],
    ids=["full", "denied", "interrupted", "unexpected"],
)
@pytest.mark.parametrize("debug", [False, True])
def test_errors_of_a_stage(bertship, stage, error, code, message, debug):
    stage(fails(error))
    found, out, err = bertship(*(["--debug"] if debug else []), "corpus", "some.txt")
    assert (found, out) == (code, "")
    lines = [line for line in err.splitlines() if line]
    assert re.match(f"error: {message}", lines[-1])
    assert ("Traceback" in err) is debug and (debug or len(lines) == 1)


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("raise KeyboardInterrupt", 130, "error: interrupted; nothing is left half written\n"),
        ("raise SystemExit(143)", 143, "error: ended by SIGTERM; nothing is left half written\n"),
        ("raise SystemExit(5)", 5, ""),
    ],
)
def test_the_exit_code_is_ours_wherever_the_signal_fell(end: str, code: int, message: str, tmp_path: Path) -> None:
    """Also within code made from a string, from which CPython would end `python -m` by SIGINT, that is -2."""
    script = f"from bertship.console import run\n\nrun(lambda *a, **k: exec({end!r}))\n"
    (tmp_path / "ends.py").write_text(script, encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "ends"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, message)


def test_json_is_one_object_and_progress_is_not_in_it(bertship, stage):
    def work(*arguments):
        report = next(a for a in arguments if callable(a))
        report("at work: é")
        return {"metrics": {"documents": 3, "deep": {"share": 0.5}}, "path": Path("x"), "text": "é"}

    stage(work)
    code, out, err = bertship("--json", "corpus")
    assert (code, err) == (0, "at work: é\n")
    assert json.loads(out) == {"metrics": {"documents": 3, "deep": {"share": 0.5}}, "path": "x", "text": "é"}
    assert out.count("\n") == 1 and "é" in out
    code, out, _ = bertship("corpus")
    assert code == 0 and out.startswith("runs/corpus/default\n") and "documents            3\n" in out


def test_settings_reach_the_stage(bertship, stage):
    seen = []
    stage(lambda *arguments: seen.append(arguments) or {"metrics": {}})
    assert (
        bertship("corpus", "a", "b", "--set", "vocab_size=64", "--set", "seed = 1=2", "--name", "n", "--force")[0] == 0
    )
    sources, out, settings, _, force, *_ = seen[0]
    assert (sources, out, settings, force) == (
        ["a", "b"],
        Path("runs/corpus/n"),
        {"vocab_size": "64", "seed": "1=2"},
        True,
    )


def run(*arguments):
    # `-m bertship.cli` would not run main: this is what the installed script does
    code = "import sys; from bertship.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_as_a_process():
    done = run("predict", "--task", "sst3", "--text", "a")
    assert (done.returncode, done.stdout) == (2, "") and "Traceback" not in done.stderr
    done = run("--debug", "predict", "--task", "sst3", "--text", "a")
    assert done.returncode == 2 and "Traceback" in done.stderr


def test_a_reader_that_leaves_is_no_error():
    code = (
        "import sys; from bertship import cli; from bertship.commands import training\n"
        "training.load = lambda where: lambda *a: {'metrics': {str(i): i for i in range(100000)}}\n"
        "sys.argv = ['bertship', 'corpus']; cli.main()"
    )
    done = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$0" -c "$1" | head -1', sys.executable, code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "runs/corpus/default\n" and done.stderr == ""


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "-x", "x" * 101])
@pytest.mark.parametrize("command", ["corpus", "pretrain", "finetune", "evaluate", "export", "repository"])
def test_a_run_name_is_a_folder_name(bertship, tmp_path, command, name):
    code, out, err = bertship(command, "--runs", tmp_path, f"--name={name}")
    assert (code, out) == (2, "") and err.startswith("error: run name ") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_mistyped_precision_is_said_before_anything_is_trained(bertship, tmp_path):
    code, _, err = bertship("export", "--bring", "--precision", "fp32,fp12", "--runs", tmp_path)
    assert code == 2 and "unknown precision 'fp12'; precisions are auto, fp32, fp16, int8" in err
