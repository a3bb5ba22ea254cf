"""The Makefile hands over what it was given, as it was given."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# nothing is set up, and the command prints its arguments instead of running
DRY = ["make", "-o", ".venv/.run-installed", "-o", "setup", "-o", ".venv/.made", "BERTSHIP=printf '<%s>\\n'"]


def arguments(*given: str) -> list[str]:
    done = subprocess.run([*DRY, *given], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.removesuffix(">\n").removeprefix("<").split(">\n<")


@pytest.mark.parametrize(
    "text",
    [
        "a joy to watch",
        "",
        'it\'s "quoted"',
        "$HOME `ls` $(shell false) $(error boom) ${x} $$",
        "price $(",
        "back\\slash; rm -rf / # & | *",
        "two\nlines",
        "--help",
        "😀 日本",
    ],
)
def test_a_text_arrives_as_typed(text: str) -> None:
    assert arguments("ask", f"TEXT={text}")[-2:] == ["--text", text]


def test_variables_arrive_whatever_is_in_them() -> None:
    given = arguments("finetune", "TASK=it's.toml", "DATA=/a folder/b", "INIT=x;y", "NAME=one", "SEED=7")
    for option, value in {"task": "it's.toml", "data": "/a folder/b", "init": "x;y", "name": "one"}.items():
        assert given[given.index(f"--{option}") + 1] == value
    assert "seed=7" in given


def test_gpus_start_as_many_processes() -> None:
    alone = arguments("pretrain", "PRESET=base", "INIT=minilm")
    assert alone == ["pretrain", "--preset", "base", "--name", "default", "--init", "minilm", "--bring"]
    assert arguments("pretrain", "PRESET=base", "GPUS=1") == arguments("pretrain", "PRESET=base")
    many = arguments("pretrain", "PRESET=base", "GPUS=8", "BERTSHIP=true", "TORCHRUN=printf '<%s>\\n'")
    launcher = ["--standalone", "--nproc-per-node", "8", "-m", "bertship"]
    assert many == [*launcher, "pretrain", "--preset", "base", "--name", "default"]
    many = arguments("finetune", "TASK=rte", "GPUS=8", "SEEDS=5", "BERTSHIP=true", "TORCHRUN=printf '<%s>\\n'")
    assert many[: len(launcher) + 3] == [*launcher, "finetune", "--task", "rte"] and many[-2:] == ["--seeds", "5"]
    assert arguments("finetune", "TASK=rte", "GPUS=1")[:3] == ["finetune", "--task", "rte"]


def test_ports_reach_the_server_and_the_question(tmp_path: Path) -> None:
    (tmp_path / "sst2_encode" / "1").mkdir(parents=True)
    (tmp_path / "sst2_encode" / "1" / "model.onnx").touch()
    serve = arguments("serve", "HTTP_PORT=18000", "GRPC_PORT=18001", "METRICS_PORT=18002", f"REPOSITORY={tmp_path}")
    for port, option in enumerate(("--http-port", "--grpc-port", "--metrics-port"), 18000):
        assert serve[serve.index(option) + 1] == str(port)
    assert "http://127.0.0.1:18000" in arguments("ask", "HTTP_PORT=18000", "TEXT=x")
    assert "--url" not in arguments("ask", "TEXT=x"), "the running server is found by what it left in runs/serve"


def test_make_alone_lists_every_target() -> None:
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = [line for line in makefile.splitlines() if line.startswith(".PHONY:")]
    for target in phony.removeprefix(".PHONY:").split():
        assert f"make {target} " in listed
    known = re.findall(r"^(?:export )?([A-Z_]+) \?=", makefile, re.MULTILINE)
    assert {"HTTP_PORT", "GRPC_PORT", "METRICS_PORT", "PLAYGROUND_PORT", "CONTAINER", "QUICK"} <= set(known)
    for variable in known:
        assert f"{variable}=" in listed, "a variable that one may set"
