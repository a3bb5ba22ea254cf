"""Every example of the README runs as it is written, against the server of the line's test."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bertship.tasks import KINDS, TASKS, get_task
from bertship.tasks.base import TensorSpec

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.splitlines()[-1][:40])
def test_python_examples(line, code):
    http, grpc = line.server.http_url.removeprefix("http://"), line.server.grpc_url
    code = code.replace("127.0.0.1:8000", http).replace("127.0.0.1:8001", grpc)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "positive" in done.stdout or "negative" in done.stdout


def test_curl_example(line):
    (command,) = [block for block in blocks("bash") if block.startswith("curl")]
    command = command.replace("http://127.0.0.1:8000", line.server.http_url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert '"name":"LABEL"' in done.stdout


def test_the_task_file_is_a_task(tmp_path):
    (toml,) = blocks("toml")
    (tmp_path / "tickets.toml").write_text(toml, encoding="utf-8")
    task = get_task(str(tmp_path / "tickets.toml"))
    assert (task.name, task.kind, task.labels) == ("tickets", "sentence", ())


def test_every_task_and_tensor_is_described():
    table = (Path(__file__).parents[1] / "docs" / "tasks.md").read_text(encoding="utf-8")
    for name, task in TASKS.items():
        assert f"| `{name}` |" in table
        for spec in task.behaviour.outputs(task):
            assert spec.name in README
    assert {spec for kind in KINDS.values() for spec in kind.inputs} <= set(re.findall(r"`([A-Z_]+)`", README))
    assert TensorSpec("TRUNCATED", "BOOL").name in README


def test_make_targets_of_the_examples_exist():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for command in re.findall(r"^make ([a-z -]+)", "\n".join(blocks("bash")), re.MULTILINE):
        assert set(command.split()) <= targets, command
