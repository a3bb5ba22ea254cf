"""bertship doctor: what is found, what it means, and what to type."""

import dataclasses
import json
import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from bertship.doctor import ENABLES, Check, judge, lines, ready
from bertship.machine import PORTS, Machine, look

ROOT = Path(__file__).parents[1]
PARTS = {"core": ("numpy",), "train": ("torch",), "export": ("onnx",), "serve": ("psutil",)}
WELL = Machine(
    system="Linux x86_64",
    glibc=(2, 36),
    cpu="AMD EPYC",
    cpu_flags=frozenset({"avx512f", "avx512_vnni", "avx512_bf16"}),
    cores=2,
    memory_gib=16,
    disk_gib=50,
    shm_mib=1000,
    python="3.12.1",
    parts=PARTS,
    packages={"numpy": "2.4", "torch": "2.13.0", "onnx": "1.23", "psutil": "7"},
    checkout=True,
    triton="nvidia-pytriton 0.7.0 in .triton",
    triton_python="/usr/bin/python3.11",
    perf_analyzer="2.51.0",
    ports=dict.fromkeys(PORTS, ""),
)


def found(machine, name):
    (check,) = [check for check in judge(machine) if check.name == name]
    return check


def changed(**facts):
    return dataclasses.replace(WELL, **facts)


def test_a_machine_that_has_all_the_line_needs():
    checks = judge(WELL)
    assert ready(checks)
    assert {check.name for check in checks if check.status == "absent"} == {"hub", "GPU", "TensorRT"}
    assert lines(checks)[-1] == "the line can run: try `make demo`"


@pytest.mark.parametrize(
    ("facts", "name", "says"),
    [
        ({"system": "Darwin arm64"}, "system", "needs Linux x86-64"),
        ({"glibc": (2, 31)}, "system", "glibc 2.35 or newer"),
        ({"glibc": None}, "system", "glibc 2.35 or newer"),
        ({"memory_gib": 2.0}, "memory", "at least 4 GiB"),
        ({"disk_gib": 0.5}, "disk", "free 5 GiB, or give another folder with --runs"),
        ({"python": "3.10.4"}, "Python", "PYTHON=/path/to/python3.11"),
        ({"packages": {"numpy": "2.4", "onnx": "1.23", "psutil": "7"}}, "train", "`make setup` in the checkout"),
        ({"parts": {}}, "core", "`make setup` in the checkout"),
        ({"checkout": False}, "Triton", "clone the project"),
        ({"triton": "", "triton_problem": "needs a Python 3.11 or 3.12: ..."}, "Triton", "needs a Python 3.11 or 3.12"),
        ({"shm_mib": 64}, "shared memory", "--shm-size=256m"),
        ({"shm_mib": None}, "shared memory", "--shm-size=256m"),
    ],
)
def test_what_the_line_needs(facts, name, says):
    check = found(changed(**facts), name)
    assert check.status == "missing" and says in check.remedy
    said = lines(judge(changed(**facts)))
    assert not ready(judge(changed(**facts))) and name in said[-1] and said[-1].startswith("the line cannot run yet: ")
    assert any(says in line for line in said)


@pytest.mark.parametrize(
    ("facts", "name", "says"),
    [
        ({"cpu_flags": frozenset({"avx2"})}, "AVX-512", "slower"),
        ({"cpu_flags": frozenset({"avx512f"})}, "VNNI", "`--precision auto` serves FP32"),
        ({"cpu_flags": frozenset({"avx512f"})}, "BF16", "FP32"),
        ({"perf_analyzer": ""}, "perf_analyzer", "`make setup`"),
        ({"ports": {8000: "address already in use", 8001: ""}}, "ports", "`make serve HTTP_PORT=18000`"),
        ({"tools": {"nvidia-smi": "/usr/bin/nvidia-smi"}}, "GPU", "larger presets"),
        ({"gpus": ["H200, ..."], "torch_cuda": {"usable": False, "cuda": "13.0"}}, "CUDA", "renew the driver"),
        ({"gpus": ["H200, ..."], "torch_cuda": {"usable": False, "cuda": None}}, "CUDA", "without TORCH_INDEX_URL"),
        ({"gpus": ["H200, ..."]}, "TensorRT", "pip install tensorrt"),
    ],
)
def test_what_would_bring_more(facts, name, says):
    check = found(changed(**facts), name)
    assert check.status == "absent" and says in check.remedy
    assert ready(judge(changed(**facts)))


@pytest.mark.parametrize(
    ("facts", "name", "says"),
    [
        ({"cpu_flags": frozenset({"avx_vnni"})}, "VNNI", "yes"),
        ({"cpu_flags": frozenset({"amx_bf16"})}, "BF16", "yes"),
        ({"triton": ""}, "Triton", "the first `make serve` does it with /usr/bin/python3.11"),
        ({"ports": {8000: "in use"}, "server": "http://127.0.0.1:8000"}, "ports", "http://127.0.0.1:8000 is ours"),
        ({"gpus": ["H200", "H200"], "torch_cuda": {"usable": True, "cuda": "13.0", "bf16": True}}, "CUDA", "bf16 too"),
        ({"packages": WELL.packages | {"tensorrt": "10.14"}}, "TensorRT", "tensorrt 10.14"),
    ],
)
def test_what_is_there(facts, name, says):
    check = found(changed(**facts), name)
    assert check.status == "ok" and says in check.found


def test_every_package_of_the_extras_is_looked_for():
    """Out of pyproject.toml by way of the installed metadata: nothing is listed twice."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {"core": project["dependencies"], **project["optional-dependencies"]}
    seen = look(Path("runs")).parts
    for part in ENABLES:
        assert len(seen[part]) == len(wanted[part])
        assert all(line.startswith(name) for name, line in zip(sorted(seen[part]), sorted(wanted[part]), strict=True))


def test_this_machine(bertship, tmp_path):
    code, out, err = bertship("--json", "doctor", "--runs", tmp_path / "not" / "there")
    result = json.loads(out)
    checks = [Check(**check) for check in result["checks"]]
    assert result["ready"] == ready(checks) == (code == 0)
    assert (code == 1) == ("error: the line cannot run here" in err)
    by_name = {check.name: check for check in checks}
    assert by_name["Python"].found == sys.version.split()[0]
    assert "torch" in by_name["train"].found and by_name["train"].status == "ok"
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    assert (by_name["AVX-512"].found == "yes") == ("avx512f" in flags)
    assert list(tmp_path.iterdir()) == []
    code, out, _ = bertship("doctor")
    assert out.splitlines()[0] == "machine" and all(check.name in out for check in checks)


@pytest.fixture
def core_alone(tmp_path):
    """A folder with the core, as the wheel holds it, and what it depends on; nothing else is importable."""
    packages = Path(sysconfig.get_paths()["purelib"])
    names = [
        "annotated_doc",
        "annotated_types",
        "click",
        "google",
        "grpc",
        "gevent",
        "geventhttpclient",
        "greenlet",
        "markdown_it",
        "mdurl",
        "numpy",
        "numpy.libs",
        "pydantic",
        "pydantic_core",
        "pygments",
        "rich",
        "rapidjson",
        "shellingham",
        "tokenizers",
        "tritonclient",
        "typer",
        "typing_inspection",
        "zope",
        "brotli",
        "certifi",
        "urllib3",
        "aiohttp",
    ]
    for name in names:
        if (packages / name).exists():
            (tmp_path / name).symlink_to(packages / name)
    for path in [*packages.glob("*.py"), *packages.glob("*.so")]:
        (tmp_path / path.name).symlink_to(path)
    for path in packages.glob("*.dist-info"):
        if path.name.split("-")[0].lower() in {*map(str.lower, names), "bertship"}:
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "bertship").symlink_to(ROOT / "bertship")
    return tmp_path


def test_with_the_core_alone(core_alone):
    command = [sys.executable, "-S", "-m", "bertship", "--json", "doctor"]
    variables = {**os.environ, "PYTHONPATH": str(core_alone)}
    done = subprocess.run(command, cwd=core_alone, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.startswith("error: the line cannot run here: train, ")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["core"]["status"] == "ok"
    assert checks["train"]["status"] == "missing" and "torch" in checks["train"]["found"]
    assert "clone the project" in checks["train"]["remedy"]
    assert "the core alone is installed" in checks["Triton"]["found"]
