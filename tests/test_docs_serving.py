"""Every example of the operators' and clients' pages runs as it is written, against the server of the line's test."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Line
from typer.testing import CliRunner

from bertship import errors
from bertship.cli import app
from serving.environment import PROJECT

PAGES = ("client", "operations", "kubernetes")


def blocks(language: str) -> list[Any]:
    found = []
    for page in PAGES:
        text = (PROJECT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        for number, block in enumerate(re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL), 1):
            found.append(pytest.param(block, id=f"{page}-{number}"))
    return found


def on(line: Line, text: str) -> str:
    http, grpc = line.server.http_url.removeprefix("http://"), line.server.grpc_url
    return text.replace("127.0.0.1:8000", http).replace("127.0.0.1:8001", grpc)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_examples(line: Line, code: str) -> None:
    done = subprocess.run([sys.executable, "-c", on(line, code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search("positive|negative|market", done.stdout), done.stdout


@pytest.mark.parametrize("code", [block for block in blocks("bash") if block.values[0].startswith("curl")])
def test_curl_examples(line: Line, code: str) -> None:
    done = subprocess.run(["bash", "-c", on(line, code)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert '"outputs"' in done.stdout and re.search("market|person", done.stdout), done.stdout


def test_commands_of_the_examples_exist() -> None:
    """With the options that they are given."""
    said = [row for block in blocks("bash") for row in block.values[0].splitlines() if row.startswith("bertship ")]
    assert len(said) >= 4
    for row in said:
        _, command, *arguments = row.partition("  #")[0].split()
        usage = CliRunner().invoke(app, [command, "--help"]).output
        for argument in arguments:
            assert not argument.startswith("--") or argument in usage, row


def test_files_of_the_examples_exist() -> None:
    for page in PAGES:
        text = (PROJECT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        for path in re.findall(r"serving/deploy[A-Za-z0-9_./-]*", text):
            assert (PROJECT / path.rstrip(".")).exists(), f"{page}: {path}"


def test_the_tree_of_errors_is_the_module_s() -> None:
    page = (PROJECT / "docs" / "client.md").read_text(encoding="utf-8")
    tree = set(re.findall(r"── (\w+)", page))
    assert tree == set(re.findall(r"── (\w+)", errors.__doc__ or "")) - {"CheckFailed"}


def test_pages_are_plain_and_their_lines_fit() -> None:
    for page in PAGES:
        for row in (Path(PROJECT) / "docs" / f"{page}.md").read_text(encoding="utf-8").splitlines():
            assert len(row) <= 120 or row.startswith("|"), row
