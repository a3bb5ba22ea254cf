"""benchmarks/gpu_check.py: without a GPU it ends well and claims nothing; with stand-ins each step's code runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_tensorrt import FakeCuda, fake_tensorrt, write_plan
from small_bert import make_examples, make_run

from benchmarks import gpu_check
from bertship import artifacts, cuda
from export import plan, publish
from export.tensorrt_engine import profiles_of

ROOT = Path(__file__).parents[1]


def no_driver(*arguments):
    raise gpu_check.InputError("no NVIDIA driver here")


@pytest.fixture
def quick(monkeypatch):
    """Small models, short rows, few calls."""
    tiny = gpu_check.TINY
    monkeypatch.setattr(gpu_check, "SIZES", {"base": tiny, "large": tiny})
    monkeypatch.setattr(gpu_check, "LENGTHS", (16, 32))
    monkeypatch.setattr(gpu_check, "BATCHES", (1, 2))
    monkeypatch.setattr(gpu_check, "latencies", _short(gpu_check.latencies))
    monkeypatch.setattr(gpu_check, "build_rtx", lambda folder: "built elsewhere")
    monkeypatch.setattr(sys, "argv", ["gpu_check"])


def _short(latencies):
    return lambda steps, engine, size, run, vocab_size: latencies(steps, engine, size, run, vocab_size, 0.01)


def build(graph, target, task, trt=None, **more):
    write_plan(target, graph.rename(graph.with_name(f"built.{graph.name}")), profiles_of(task))
    graph.write_bytes(graph.with_name(f"built.{graph.name}").read_bytes())
    return {
        "file": target.name,
        "sha256": artifacts.sha256_file(target),
        "bytes": target.stat().st_size,
        "version": "10.16.1.11",
        "compute_capabilities": ["9.0"],
        "gpu": "NVIDIA H200",
        "outputs": [spec.name for spec in task.behaviour.logits(task)],
        "profiles": [shapes._asdict() for shapes in profiles_of(task)],
        "fused_attentions": [2, 2],
        "build_seconds": 1.0,
    }


@pytest.fixture
def pretended(quick, monkeypatch):
    """A GPU and TensorRT that are stand-ins."""
    monkeypatch.setattr(gpu_check, "load", lambda name: fake_tensorrt())
    monkeypatch.setattr(cuda, "load_driver", FakeCuda)
    monkeypatch.setattr(gpu_check, "build_engine", build)
    monkeypatch.setattr(plan, "build_engine", build)


def test_without_a_gpu_it_ends_well_and_says_that_nothing_was_proven(quick, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu_check, "find_device", no_driver)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path / "kept.json")])
    assert gpu_check.main() == 0
    shown = capsys.readouterr().out
    assert "nothing was proven on a GPU: this machine has none that can be used" in shown
    kept = json.loads((tmp_path / "kept.json").read_text("utf-8"))
    assert kept["proven_on_a_gpu"] is False and kept["failed"] == {} and kept["latencies"] == []
    assert len(kept["not_shown"]) == 8


def test_with_stand_ins_every_step_runs(pretended, monkeypatch, tmp_path):
    run = make_run(tmp_path / "run", "span")
    publish.export_run(run, tmp_path / "export", ["fp32", "fp16"], make_examples("span"), lambda line: None)
    before = {path.name: path.read_bytes() for path in (tmp_path / "export").iterdir()}
    steps = gpu_check.check(tmp_path / "export")
    providers = {"ONNX Runtime's CUDAExecutionProvider", "ONNX Runtime's TensorrtExecutionProvider"}
    assert steps.failed == {}
    assert set(steps.skipped) == {*providers, "Triton's TensorRT backend serves the plan"}
    assert all("install onnxruntime-gpu" in steps.skipped[name] for name in providers)
    judged = steps.shown["a trained export's plan, built, and judged on its texts by execute_async_v3"]
    assert "of the decisions agree" in judged
    assert {(row["size"], row["batch"], row["tokens"]) for row in steps.figures} == {
        (size, batch, tokens) for size in ("base", "large") for batch in (1, 2) for tokens in (16, 32)
    }
    assert all(0 < row["p50_ms"] <= row["p99_ms"] for row in steps.figures)
    assert {path.name: path.read_bytes() for path in (tmp_path / "export").iterdir()} == before
    lines = gpu_check.conclude(steps, True)
    assert not any("nothing was proven" in line for line in lines)


def test_a_wrong_plan_fails_the_check(pretended, monkeypatch, capsys, tmp_path):
    runner = gpu_check.TensorRTRunner
    monkeypatch.setattr(runner, "run", lambda self, feeds, run=runner.run: [2 * x for x in run(self, feeds)])
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path / "kept.json")])
    assert gpu_check.main() == 1
    assert "FAILED: base departs by 1 of the largest logit" in capsys.readouterr().out
    assert json.loads((tmp_path / "kept.json").read_text("utf-8"))["proven_on_a_gpu"] is False


def test_a_step_is_not_begun_without_the_time_for_it(quick, monkeypatch):
    monkeypatch.setattr(gpu_check, "find_device", no_driver)
    steps = gpu_check.check(None, limit_s=100)
    assert any("takes up to 200 s" in reason for reason in steps.skipped.values())
    assert gpu_check.LIMIT_S <= 8 * 60


def test_the_container_gets_the_checkout_the_command_and_this_user(tmp_path):
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\nprintf '<%s>\\n' \"$@\"\n", encoding="utf-8")
    docker.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(*arguments, **more):
        return subprocess.run(
            [ROOT / "export" / "container.sh", *arguments], capture_output=True, text=True, check=False, **more
        )

    done = run("nvcr.io/x:1", "export", "bertship", "plan", "a b", env=environment)
    assert done.returncode == 0, done.stderr
    given = done.stdout.removeprefix("<").removesuffix(">\n").split(">\n<")
    assert given[:4] == ["run", "--rm", "--gpus", "all"]
    assert f"{ROOT}:/bertship" in given and "nvcr.io/x:1" in given
    assert given[given.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
    assert given[-5:] == ["bash", "export", "bertship", "plan", "a b"]
    inside = given[given.index("-c") + 1]
    assert subprocess.run(["bash", "-n", "-c", inside], check=False).returncode == 0
    assert run("nvcr.io/x:1").returncode == 2
    missing = run("nvcr.io/x:1", "export", "true", env={**os.environ, "PATH": "/usr/bin:/bin"})
    if "docker is not on the PATH" in missing.stderr:
        assert missing.returncode == 2


@pytest.mark.parametrize("target", ["plan", "gpu-check"])
def test_make_hands_over_the_image_and_the_task(target):
    command = ["make", "-n", target, "TASK=squad", "CONTAINER=nvcr.io/x:1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert "export/container.sh 'nvcr.io/x:1' " in line and line.endswith("runs/export/'squad'")
