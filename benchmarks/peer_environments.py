"""The environments of the peers, each with its own pins: build/peers/NAME, made once and kept.

`transformers` has this project's pins and the packages of its stages besides, so that a training of ours and of the
peer's run in one process and take turns. `optimum` and `mlserver` need older libraries and have nothing of ours.
"""

import hashlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOME = ROOT / "build" / "peers"
CONSTRAINTS = ROOT / "requirements" / "constraints.txt"
NAMES = ("transformers", "optimum", "mlserver")
SHOWN = ("transformers", "torch", "optimum", "optimum-onnx", "onnxruntime", "fastapi", "uvicorn", "mlserver")
Report = Callable[[str], None]


@dataclass(frozen=True)
class Environment:
    """`missing` is why it is not there, in one line; empty where it is. `versions` are those that matter, by name."""

    name: str
    python: Path
    missing: str
    versions: dict[str, str]


def install(name: str, report: Report, home: Path = HOME) -> Environment:
    """Make the environment, or find it made from the same pins. What goes wrong is told, and raises nothing."""
    requirements = ROOT / "benchmarks" / f"requirements-{name}.txt"
    folder = home / name
    python, log = folder / "bin" / "python", home / f"{name}.log"
    pins = "\n".join(path.read_text(encoding="utf-8") for path in (requirements, CONSTRAINTS))
    stamp = folder / f".installed-{hashlib.sha256(pins.encode()).hexdigest()[:16]}"
    if not stamp.is_file():
        report(f"{name}: setting up {folder} (log: {log})")
        home.mkdir(parents=True, exist_ok=True)
        steps = [] if (folder / ".made").is_file() else [[sys.executable, "-m", "venv", "--clear", str(folder)]]
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        index = ["--index-url", os.environ["TORCH_INDEX_URL"]] if os.environ.get("TORCH_INDEX_URL") else []
        torch = next(line for line in requirements.read_text(encoding="utf-8").split() if line.startswith("torch=="))
        steps.append([*pip, *index, torch])
        ours = ["-c", str(CONSTRAINTS), *stage_requirements()] if name == "transformers" else []
        steps.append([*pip, *ours, "-r", str(requirements)])
        with log.open("w", encoding="utf-8") as file:
            for step in steps:
                done = subprocess.run(step, stdout=file, stderr=subprocess.STDOUT, check=False)
                if done.returncode:
                    break
                (folder / ".made").touch()
        if done.returncode:
            return Environment(name, python, reason(log), {})
        stamp.touch()
    return Environment(name, python, "", versions(python))


def stage_requirements() -> list[str]:
    """What this project's training and export need, without the project itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["train"], *extras["export"], *extras["serve"]]


def reason(log: Path) -> str:
    """pip's last error, else its last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it said nothing"])[-1]


def versions(python: Path) -> dict[str, str]:
    """Versions of what computes and serves there."""
    code = (
        "import importlib.metadata as m, json, sys; found = {d.name.lower().replace('_', '-'): d.version "
        "for d in m.distributions()}; print(json.dumps({n: found[n] for n in sys.argv[1:] if n in found}))"
    )
    done = subprocess.run([str(python), "-c", code, *SHOWN], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found
