"""The documentation builds without a warning, what it names exists, and its commands and snippets do what they show."""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from bertship import cli, errors
from bertship.config import FinetuneConfig, PretrainConfig
from bertship.errors import BertshipError
from bertship.tasks import get_task

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
# what other tests run, and this one would need minutes for
ELSEWHERE = {"make demo": "test_demo.py", "make docs": "here, in test_the_site_builds"}
LANGUAGES = {
    "",
    "bash",
    "python",
    "toml",
    "csv",
    "json",
    "jsonl",
    "yaml",
    "text",
    "tsv",
    "dockerfile",
    "ini",
    "console",
}


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    title: str
    code: str
    line: int

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    text = (DOCS / page).read_text(encoding="utf-8")
    found = []
    for match in re.finditer(
        r"^(?P<indent> *)```(?P<info>.*)\n(?P<code>(?:.*\n)*?)(?P=indent)```$", text, re.MULTILINE
    ):
        language, _, rest = match["info"].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        code = "".join(line.removeprefix(match["indent"]) for line in match["code"].splitlines(keepends=True))
        line = text[: match.start()].count("\n") + 1
        found.append(Block(page, language, title[1] if title else "", code, line))
    return found


EVERY = [block for page in PAGES for block in blocks(page)]


def commands(code: str) -> list[list[str]]:
    """The simple commands of a shell snippet that are ours: words of each `make` and `bertship`."""
    code = re.sub(r"<<\s*'?(\w+)'?\n.*?^\1$", "", code, flags=re.DOTALL | re.MULTILINE)
    found = []
    for line in code.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a string that goes on in the next line
            continue
        while words and (re.fullmatch(r"[A-Z_]+=.*", words[0]) or words[0] == "env"):
            words = words[1:]
        for stop in ("|", "&&", ";", ">", "2>", "&"):
            words = words[: words.index(stop)] if stop in words else words
        if words and Path(words[0]).name in ("make", "bertship"):
            found.append([Path(words[0]).name, *words[1:]])
    return found


# ---- every page


def test_the_site_builds(tmp_path):
    """With warnings as errors, and nothing in it comes from another host."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    assert {page.replace(".md", ".html") for page in PAGES} <= built
    assert {"reference/cli.html", "reference/configuration.html", "reference/python.html", "changelog.html"} <= built
    for page in built:
        html = (tmp_path / "site" / page).read_text(encoding="utf-8")
        assert not re.findall(
            r"<(?:script|img|iframe)[^>]+src=\"(?:https?:)?//[^\"]*|<link[^>]+href=\"(?:https?:)?//", html
        ), page


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_the_codes_own(hooks):
    pages = hooks.generated()
    group = typer.main.get_command(cli.app)
    for name, command in group.commands.items():
        section = pages["reference/cli.md"].partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        for parameter in command.params:
            for option in parameter.opts if parameter.param_type_name == "option" else ():
                assert f"`{option}`" in section or option == "--help", (name, option)
    for model in (PretrainConfig, FinetuneConfig):
        for field in model.model_fields:
            assert f"| `{field}` |" in pages["reference/configuration.md"]
    (remark,) = re.findall(r"^    batch_size: .*#\s*(.+)$", inspect.getsource(PretrainConfig), re.MULTILINE)
    assert f"| `batch_size` | `int` | `32` | {remark}; > 0 |" in pages["reference/configuration.md"]
    assert inspect.getdoc(errors) in pages["reference/python.md"]
    assert "### Client.ask\n" in pages["reference/python.md"]


def test_the_navigation_takes_what_is_there(hooks):
    named = [{"A": ["index.md", "not-there-yet.md"]}, {"B": ["nor-this.md"]}]
    nav = hooks.on_config(SimpleNamespace(nav=named)).nav
    assert nav[0] == {"A": ["index.md"]} and len(nav) == 2
    assert "quickstart.md" in nav[1]["More"] and "reference/cli.md" in nav[1]["More"]


def test_links_out_of_the_folder_become_paths(hooks):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))

    def changed(text):
        return hooks.on_page_markdown(text, page, None, None)

    assert changed("[Contributing](../CONTRIBUTING.md#test)") == "[Contributing](contributing.md#test)"
    assert changed("[the Makefile](../Makefile)") == "the Makefile (`Makefile`)"
    assert changed("[`pyproject.toml`](../pyproject.toml)") == "`pyproject.toml`"
    assert changed("[a](quickstart.md) [b](https://x.y/z) ![c](../Makefile)") == (
        "[a](quickstart.md) [b](https://x.y/z) ![c](../Makefile)"
    )
    assert changed("[x](../not/there.md)") == "[x](../not/there.md)"


@pytest.mark.parametrize("block", EVERY, ids=str)
def test_what_a_snippet_names_exists(block):
    """Commands, options, targets and variables, imported names; data that parses."""
    assert block.language in LANGUAGES, f"{block}: language {block.language!r}"
    if block.language == "bash":
        done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{block}: {done.stderr}"
        for program, *arguments in commands(block.code):
            (_check_make if program == "make" else _check_bertship)(block, arguments)
    elif block.language == "python":
        for node in ast.walk(ast.parse(block.code)):
            ours = isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
                "bertship", "train", "export", "serving",
            )  # fmt: skip
            for name in node.names if ours else ():
                assert _has(node.module, name.name), f"{block}: {node.module}.{name.name}"
    elif block.language == "toml":
        tomllib.loads(block.code)
    elif block.language == "json":
        json.loads(block.code)
    elif block.language == "jsonl":
        assert all(json.loads(line) is not None for line in block.code.splitlines())


def _has(module, name):
    """Whether a module of ours has a name; by its text where it needs an extra that is not installed."""
    try:
        return hasattr(importlib.import_module(module), name)
    except (BertshipError, ImportError):
        text = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
        return re.search(rf"^(?:def|class) {name}\b|^{name}\b.* = ", text, re.MULTILINE) is not None


def _check_make(block, arguments):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    variables = set(re.findall(r"\b[A-Z][A-Z_]+\b", makefile))
    for word in arguments:
        name, is_variable, _ = word.partition("=")
        if is_variable:
            assert name in variables, f"{block}: make has no variable {name}"
        elif not word.startswith("-"):
            assert word in targets, f"{block}: make has no target {word}"


def _check_bertship(block, arguments):
    """Parsed as the command line parses it, and not run."""
    words = [word for word in arguments if word not in ("--json", "--debug")]
    command, path = typer.main.get_command(cli.app), ["bertship"]
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        assert words[0] in command.commands, f"{block}: no command {' '.join([*path, words[0]])}"
        path.append(words[0])
        command = command.commands[words.pop(0)]
    if {"--help", "-h", "--version", "--install-completion"} & set(words):
        return
    try:
        command.make_context(" ".join(path), words)
    except Exception as error:
        pytest.fail(f"{block}: {' '.join([*path, *words])}: {error}")


def test_the_checks_can_fail():
    for code in (
        "bertship servee",
        "bertship serve --hhtp-port 1",
        "make serv",
        "make serve HTTPPORT=1",
        "bertship ask --timeout-s x",
    ):
        block = Block("x.md", "bash", "", code, 1)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            test_what_a_snippet_names_exists(block)
    with pytest.raises(AssertionError):
        test_what_a_snippet_names_exists(Block("x.md", "python", "", "from bertship.client import Klient", 1))


# ---- messages


def _messages() -> list[str]:
    """Every string of the code, with … where an f-string has a value; neighbours joined as Python joins them."""
    found = []
    for package in ("bertship", "train", "export", "serving"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


MESSAGES = re.findall(
    r"^\*\*(?:`` (.+?) ``|`(.+?)`)\*\*$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.M
)


@pytest.fixture(scope="module")
def messages():
    return _messages()


@pytest.mark.parametrize("shown", ["".join(pair) for pair in MESSAGES])
def test_messages_are_the_codes_own(messages, shown):
    """Each piece between two … is found, in this order, in one message of the code."""
    pieces = [piece for piece in shown.split("…") if piece.strip(" :;,.")]
    assert pieces
    pattern = re.compile(".*".join(map(re.escape, pieces)), re.DOTALL)
    assert any(pattern.search(message) for message in messages), f"no message of the code has {pieces}"


def test_a_message_that_is_none_is_found_out(messages):
    with pytest.raises(AssertionError):
        test_messages_are_the_codes_own(messages, "…: this message is in no … of ours")


# ---- the pages that are followed from top to bottom


@pytest.fixture
def clone(tmp_path):
    """A copy of the project's own files, with the environments of this one."""
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split("\0")
    if not any(files):
        pytest.skip("not a clone: git lists no files")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / "clone" / name)
    for name in (".venv", ".triton"):
        if (ROOT / name).exists():
            (tmp_path / "clone" / name).symlink_to(ROOT / name)
    return tmp_path / "clone"


SHELL = """
set -euo pipefail
# the environments are there already
make() { command make -o setup -o .venv/.made -o .venv/.run-installed -o .venv/.dev-installed "$@"; }
"""


def follow(page, clone, environment, ports):
    """Do what the page says, block by block: files are written, commands and programs run. Returns what was said."""
    said = []
    for block in blocks(page):
        code = block.code
        for usual, port in zip((8000, 8001, 8002, 8003), ports, strict=True):
            code = code.replace(f"127.0.0.1:{usual}", f"127.0.0.1:{port}")
        if block.title:
            (clone / block.title).parent.mkdir(parents=True, exist_ok=True)
            (clone / block.title).write_text(code, encoding="utf-8")
            continue
        if block.language == "bash":
            lines = [line for line in code.splitlines() if line.split("#")[0].strip() not in ELSEWHERE]
            # what ends with Ctrl-C is ended so
            until_stopped = re.compile(r"^(make|bertship) playground")
            command = ["bash", "-c", SHELL + "\n".join(lines)]
            if any(until_stopped.match(line) for line in lines):
                said.append(until_it_serves(command, clone, environment, block))
                continue
        elif block.language == "python":
            command = [sys.executable, "-c", code]
        else:
            continue
        done = subprocess.run(
            command, cwd=clone, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{block}\n{code}\n{done.stdout}\n{done.stderr}"
        said.append(done.stdout)
    return said


def until_it_serves(command, clone, environment, block):
    """Run until it prints its address, then end it as Ctrl-C does: that is a good end."""
    started = subprocess.Popen(
        command,
        cwd=clone,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        line = started.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), f"{block}: {line}{started.stderr.read() if not line else ''}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGINT)
        started.communicate(timeout=60)
    return line


def free_ports(number):
    """Ports that are free now, held together until all are known."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]


@pytest.fixture
def environment(tmp_path, warm_start):
    """A small warm start, free ports, and programs of the project on PATH; the ports too."""
    ports = free_ports(3)
    names = ("HTTP_PORT", "GRPC_PORT", "METRICS_PORT")
    variables = {
        **os.environ,
        "PATH": f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "INIT": str(warm_start),
        "PLAYGROUND_PORT": "0",
        **dict(zip(names, map(str, ports), strict=True)),
    }
    variables.pop("DISPLAY", None)
    return variables, [*ports, 0]


def test_the_quick_start_works_as_it_is_written(clone, environment):
    variables, ports = environment
    try:
        said = follow("quickstart.md", clone, variables, ports)
    finally:
        subprocess.run([ROOT / ".venv/bin/bertship", "stop"], cwd=clone, check=False, capture_output=True)
    text = "\n".join(said)
    assert "accuracy" in text and "ready: tickets at http://127.0.0.1" in text
    assert len(re.findall(r"billing|technical", text)) >= 5 and '"model_name":"tickets"' in text
    assert "shows tickets of http://127.0.0.1" in text and said[-1].rstrip().endswith("stopped")
    for folder in (
        "runs/finetune/tickets/default",
        "runs/export/tickets",
        "runs/bench/tickets",
        "model_repository/tickets",
    ):
        assert (
            f"`{folder.replace('model_repository/tickets', 'model_repository/tickets*')}/`"
            in (DOCS / "quickstart.md").read_text()
        )
        assert (clone / folder).is_dir()
    assert get_task(str(clone / "tickets.toml")).kind == "sentence"


def test_snippets_of_the_other_pages(clone, environment, line):
    """Those of pages whose commands need no run of their own: against the server of the line's test."""
    variables, _ = environment
    ports = [line.server.http_port, line.server.grpc_port, line.server.metrics_port, 0]
    shutil.copytree(line.repository, clone / "model_repository", dirs_exist_ok=True)
    for page in ("index.md", "architecture.md", "playground.md"):
        follow(page, clone, variables, ports)


def test_commands_of_troubleshooting(clone, environment, line):
    variables, _ = environment
    for folder in ("finetune/sst2", "export/sst2"):
        shutil.copytree(line.runs / folder, clone / "runs" / folder)
    shutil.copytree(line.repository, clone / "model_repository", dirs_exist_ok=True)
    free = free_ports(3)
    for block in blocks("troubleshooting.md"):
        code = block.code
        for usual, port in zip((18000, 18001, 18002), free, strict=True):
            code = code.replace(f"={usual}", f"={port}")
        done = subprocess.run(
            ["bash", "-c", SHELL + code],
            cwd=clone,
            env=variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    stopped = subprocess.run(
        [ROOT / ".venv/bin/bertship", "stop"], cwd=clone, check=True, capture_output=True, text=True
    )
    assert stopped.stdout == "stopped\n"
