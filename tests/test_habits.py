"""What every command has in common: --json, one-line errors, colours off when asked, completion, lines named."""

import ast
import inspect
import json
import os
import pty
import re
import select
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from bertship import cli, progress
from bertship.commands.options import get_task
from bertship.config import line_of, load_preset
from bertship.errors import InputError

ROOT = Path(__file__).parents[1]
RUN = "import sys; from bertship.cli import main; sys.exit(main())"


def _commands() -> dict[str, typer.models.CommandInfo]:
    """Every command by the words that call it, those of groups too."""
    found = {}
    for prefix, app in [
        ("", cli.app),
        *((f"{g.typer_instance.info.name} ", g.typer_instance) for g in cli.app.registered_groups),
    ]:
        for command in app.registered_commands:
            found[prefix + (command.name or command.callback.__name__.replace("_", "-"))] = command
    return found


COMMANDS = _commands()
every_command = pytest.mark.parametrize("command", COMMANDS)


def test_groups_are_among_them():
    assert {"demo", "bench-engine", "compare", "task check", "task list"} <= COMMANDS.keys()


@every_command
def test_results_go_through_one_door(command):
    """`show` prints lines for people, or with --json one object; nothing else of a command writes on stdout."""
    source = textwrap.dedent(inspect.getsource(COMMANDS[command].callback))
    calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)}
    assert "show" in calls, f"{command} has no result for --json"
    assert not {"print", "typer.echo", "sys.stdout.write", "typer.secho"} & calls


@every_command
def test_json_and_debug_may_stand_after_the_command(bertship, command):
    code, out, err = bertship(*command.split(), "--json", "--no-such-option")
    assert (code, out) == (2, "") and "No such option" in err


@every_command
def test_a_wrong_option_is_one_line_and_2(bertship, command):
    code, out, err = bertship(*command.split(), "--no-such-option")
    assert (code, out) == (2, "") and err.startswith("error: No such option: --no-such-option") and err.count("\n") == 1


def _click(command: str) -> Any:
    found: Any = typer.main.get_command(cli.app)
    for word in command.split():
        found = found.commands[word]
    return found


@pytest.mark.parametrize("command", [c for c in COMMANDS if any(p.required for p in _click(c).params)])
def test_a_missing_argument_is_one_line_and_2(bertship, command):
    code, out, err = bertship(*command.split())
    assert (code, out) == (2, "") and err.startswith("error: Missing ") and err.count("\n") == 1


def test_a_json_result_is_one_object(bertship, tmp_path):
    for arguments in (
        ["params", "tiny"],
        ["task", "list"],
        ["stop", "--runs", tmp_path],
        ["doctor", "--runs", tmp_path],
    ):
        code, out, _ = bertship("--json", *arguments)
        assert code in (0, 1) and isinstance(json.loads(out), dict) and out.count("\n") == 1, arguments


# ---- colours and bars


def on_a_terminal(arguments: list[str], **variables: str) -> str:
    """What a program writes when stdout and stderr are a terminal."""
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color", **variables}
    started = subprocess.Popen(arguments, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while select.select([ours], [], [], 120)[0]:
            try:
                part = os.read(ours, 4096)
            except OSError:  # its end was closed
                break
            if not part:
                break
            seen += part
    finally:
        os.close(ours)
        assert started.wait(timeout=60) is not None
    return seen.decode()


COLOUR = re.compile(r"\x1b\[(?:[\d;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[\d;]*)?m")
BAR = f"""
import sys, time; sys.path.insert(0, {str(ROOT)!r})
from bertship.progress import progress
with progress("work", 3, print) as advance:
    for i in range(3):
        advance("fact"); time.sleep(0.15)
"""


def test_colours_are_off_when_asked():
    assert COLOUR.search(on_a_terminal([sys.executable, "-c", BAR])), "the test can see colours"
    plain = on_a_terminal([sys.executable, "-c", BAR], NO_COLOR="1")
    assert "work" in plain and not COLOUR.search(plain)


@pytest.mark.parametrize("arguments", [["--help"], ["params", "tiny"], ["task", "list"], ["predict", "--txt", "a"]])
def test_what_commands_say_has_no_colours_when_asked(arguments):
    shown = on_a_terminal([sys.executable, "-c", RUN, *arguments], NO_COLOR="1")
    assert shown.strip() and not COLOUR.search(shown)


def test_no_bar_and_no_control_codes_when_piped(monkeypatch):
    done = subprocess.run([sys.executable, "-c", BAR], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", ""), "three short steps are not worth a line"
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "Console", lambda **options: Console(force_terminal=False, **options))
    said: list[str] = []
    with progress.progress("work", 4, said.append) as advance:
        for _ in range(3):
            now[0] += 8
            advance("a fact")
    assert said == ["work 2/4: a fact, 16 s left"], "of long steps the time left says it all"
    with progress.progress("work", 40, said.append) as advance:
        for _ in range(21):
            now[0] += 0.5
            advance("a fact")
    assert said[1:] == ["work 20/40: a fact, 2.0 steps/s, 10 s left"]


# ---- completion


def completed(words: str) -> set[str]:
    environment = os.environ | {
        "_BERTSHIP_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    return set(done.stdout.split())


def test_the_shell_completes_commands_options_tasks_and_presets():
    assert completed("bertship fine") == {"finetune"}
    assert completed("bertship bench") == {"bench", "bench-engine"}
    assert completed("bertship task l") == {"list", "leaderboard"}
    assert "--request-rate" in completed("bertship bench --r")
    assert completed("bertship finetune --task sq") == {"squad", "squad2"}
    assert completed("bertship pretrain --preset m") == {"mini", "medium"}


def test_completion_is_installed_for_the_own_shell(tmp_path):
    environment = os.environ | {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-c", RUN, "--install-completion", "bash"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (script,) = tmp_path.rglob("bertship.sh")
    assert "_BERTSHIP_COMPLETE=complete_bash" in script.read_text() and (tmp_path / ".bashrc").is_file()


# ---- lines of configuration


PRESET = """\
# a size of my own
[model]
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 2
intermediate_size = 64

[pretrain]
steps = 20
"""
TASK = """\
name = "weather"
kind = "sentence"
metrics = ["accuracy"]

[files]
format = "csv"
target = "day"
columns = { TEXT = "message" }

[training]
epochs = 2.0
"""


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus" / "default").mkdir(parents=True)
    text = '{"stage": "corpus", "vocab_size": 64, "files": {}}'
    (tmp_path / "corpus" / "default" / "manifest.json").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("steps = 20", "steps = 0", r"\[pretrain\], line 9: steps = 0: "),
        ("steps = 20", 'steps = "many"', r"\[pretrain\], line 9: steps = 'many': "),
        ("steps = 20", "steps = 20\nstep = 3", r"\[pretrain\], line 10: unknown field step; "),
        ("num_attention_heads = 2", "num_attention_heads = -1", r"\[model\], line 5: num_attention_heads = -1: "),
        ("[pretrain]", "[pretraining]", r", line 8: unknown table \[pretraining\]; tables are"),
        ("steps = 20", "steps = = 20", r"at line 9, column 9"),
    ],
)
def test_a_fault_in_a_preset_names_its_line(bertship, corpus, old, new, says):
    (corpus / "own.toml").write_text(PRESET.replace(old, new))
    code, out, err = bertship("pretrain", "--preset", corpus / "own.toml", "--runs", corpus)
    assert (code, out, err.count("\n")) == (2, "", 1) and re.search(says, err), err


def test_a_fault_of_an_option_names_no_line_of_the_file(bertship, corpus):
    (corpus / "own.toml").write_text(PRESET)
    code, _, err = bertship("pretrain", "--preset", corpus / "own.toml", "--runs", corpus, "--set", "steps=0")
    assert code == 2 and "steps = '0'" in err and "line" not in err


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ('name = "weather"', 'name = "Weather!"', 1),
        ('kind = "sentence"', 'kind = "poem"', 2),
        ('metrics = ["accuracy"]', 'metrics = ["pearson"]', 3),
        ('metrics = ["accuracy"]', "metrics = []", 3),
        ('format = "csv"', 'format = "xlsx"', 6),
        ('format = "csv"', 'format = "csv"\ncolour = "red"', 7),
        ("epochs = 2.0", "epochs = -2.0", 11),
        ("epochs = 2.0", "epoch = 2.0", 11),
        ('name = "weather"', 'name = "weather"\nmax_tokens = 1', 2),
        ('name = "weather"', 'name = "weather"\ncolour = "red"', 2),
        ('kind = "sentence"', "kind = = 1", 2),
    ],
)
def test_a_fault_in_a_task_names_its_line(tmp_path, old, new, line):
    path = tmp_path / "weather.toml"
    path.write_text(TASK)
    assert get_task(str(path)).name == "weather"
    path.write_text(TASK.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        get_task(str(path))
    assert re.search(rf"\bline {line}\b", str(caught.value)) and "\n" not in str(caught.value), str(caught.value)


def test_lines_are_found_whatever_the_form(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('x = 1\nfiles = { format = "csv", "target" = 1 }\n[deep.er]\n"y" = 2\n[x2]\nx = 3\n')
    wanted = {"x": 1, "files.format": 2, "deep.er.y": 4, "x2.x": 6, "x2": 5, "none": None, "files.none": None}
    assert {name: line_of(path, name) for name in wanted} == wanted
    (tmp_path / "config.json").write_text('{\n  "hidden_size": 1,\n  "hidden_act": "relu"\n}\n')
    assert line_of(tmp_path / "config.json", "hidden_act") == 3
    assert line_of(tmp_path / "gone.toml", "x") is None
    with pytest.raises(InputError, match="unknown preset 'huge'"):
        load_preset("huge")
