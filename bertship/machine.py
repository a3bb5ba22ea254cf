"""What is there of what the line can use: read from the machine, and nothing changed on it.

torch is not imported: its presence is read from its metadata, and only where there is a GPU is it asked, in a process
of its own, whether it can use it.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertship.console import load
from bertship.errors import BertshipError
from bertship.processor import cpu_field

PORTS = {8000: "HTTP_PORT", 8001: "GRPC_PORT", 8002: "METRICS_PORT", 8003: "PLAYGROUND_PORT"}
_OPTIONAL = ("tensorrt", "tensorrt-rtx-cu12", "onnxruntime-gpu", "datasets", "huggingface_hub")
_TOOLS = ("nvidia-smi", "nvcc", "trtexec", "docker", "chromium")
_ASK_TORCH = (
    "import json, torch; print(json.dumps({'cuda': torch.version.cuda, 'usable': torch.cuda.is_available(), "
    "'bf16': torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)}))"
)


@dataclass(frozen=True)
class Machine:
    """What was seen; None, empty or missing where there was nothing to see."""

    system: str = ""
    glibc: tuple[int, int] | None = None
    cpu: str = ""
    cpu_flags: frozenset[str] = frozenset()
    cores: int = 0
    memory_gib: float = 0.0
    disk_gib: float = 0.0  # free, where runs are written
    shm_mib: int | None = None  # free in /dev/shm; None: it cannot be written to
    python: str = ""
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # packages that each extra asks for
    packages: Mapping[str, str] = field(default_factory=dict)  # versions by name
    checkout: bool = False  # the stages are there, not the core alone
    triton: str = ""  # version of the embedded server, where its environment is set up
    triton_python: str = ""  # what its environment would be made with
    triton_problem: str = ""  # why it cannot be made
    perf_analyzer: str = ""
    ports: Mapping[int, str] = field(default_factory=dict)  # who holds a port: empty for a free one
    server: str = ""  # address of the server that `serve --detach` left
    gpus: Sequence[str] = ()
    torch_cuda: Mapping[str, Any] = field(default_factory=dict)
    tools: Mapping[str, str] = field(default_factory=dict)  # paths by program


def look(runs: Path) -> Machine:
    """Everything that `judge` wants to know; a second or less, some more where there is a GPU."""
    parts = _parts()
    packages = _versions({*(name for names in parts.values() for name in names), *_OPTIONAL})
    gpus = _gpus()
    triton, perf_analyzer, python, problem, checkout = _triton()
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        glibc=_glibc(),
        cpu=cpu_field("model name"),
        cpu_flags=frozenset(cpu_field("flags").split()),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        memory_gib=_memory_gib(),
        disk_gib=_free_bytes(runs) / 2**30,
        shm_mib=_shm_mib(),
        python=platform.python_version(),
        parts=parts,
        packages=packages,
        checkout=checkout,
        triton=triton,
        triton_python=python,
        triton_problem=problem,
        perf_analyzer=perf_analyzer,
        ports={port: _holder(port) for port in PORTS},
        server=_server(runs),
        gpus=gpus,
        torch_cuda=_torch_cuda() if gpus and "torch" in packages else {},
        tools={name: path for name in _TOOLS if (path := shutil.which(name))},
    )


def _parts() -> dict[str, tuple[str, ...]]:
    """What `pip install bertship[EXTRA]` asks for, by extra; "core" for what it always brings."""
    found: dict[str, tuple[str, ...]] = {}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for line in importlib.metadata.requires("bertship") or []:
            name, extra = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"]([\w-]+)", line)
            if name:
                part = extra[1] if extra else "core"
                found[part] = (*found.get(part, ()), name[0])
    return found


def _versions(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _glibc() -> tuple[int, int] | None:
    try:
        library, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        major, minor = version.split(".")[:2]
    except (ValueError, OSError):  # another C library
        return None
    return (int(major), int(minor)) if library == "glibc" else None


def _memory_gib() -> float:
    """Of the machine, or of the container where that has less."""
    sizes = []
    with contextlib.suppress(OSError, ValueError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError, ValueError):
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(sizes, default=0) / 2**30


def _free_bytes(folder: Path) -> int:
    place = folder.absolute()
    while not place.is_dir():
        place = place.parent
    return shutil.disk_usage(place).free


def _shm_mib() -> int | None:
    folder = "/dev/shm"
    if not os.access(folder, os.W_OK | os.X_OK):
        return None
    return shutil.disk_usage(folder).free >> 20


def _gpus() -> list[str]:
    """A line a GPU: name, memory, compute capability, driver."""
    query = "name,memory.total,compute_cap,driver_version"
    said = _said(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"])
    gpus = []
    for line in said.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4:
            gpus.append("{}, {}, compute capability {}, driver {}".format(*parts))
    return gpus


def _torch_cuda() -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        return dict(json.loads(_said([sys.executable, "-c", _ASK_TORCH]) or "{}"))
    return {}


def _said(command: Sequence[str]) -> str:
    """What a program printed; nothing where it is not there or takes too long."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _triton() -> tuple[str, str, str, str, bool]:
    """Versions of the embedded server and of perf_analyzer; the Python that would serve, what is wrong; a checkout?"""
    try:
        root = load("serving.environment:environment_root")()
        find_python = load("serving.environment:find_python")
    except BertshipError:
        return "", "", "", "", False
    python = root / "bin" / "python"
    server = perf_analyzer = chosen = problem = ""
    if (root / "runtime" / "bin" / "tritonserver").exists():
        ask = "import importlib.metadata as m; print(m.version('nvidia-pytriton'))"
        if version := _said([str(python), "-c", ask]).strip():
            server = f"nvidia-pytriton {version} in {root}"
        words = _said([str(root / "runtime" / "bin" / "perf_analyzer"), "--version"]).split()
        perf_analyzer = next((word for word in words if word[:1].isdigit()), "")
    try:
        chosen = str(find_python())
    except BertshipError as error:
        problem = str(error)
    return server, perf_analyzer, chosen, problem, True


def _holder(port: int) -> str:
    """Who listens on a port of this machine; empty for a free one."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return ""


def _server(runs: Path) -> str:
    with contextlib.suppress(BertshipError):
        state = load("serving.detached:running")(runs / "serve")
        return str(state["http_url"]) if state else ""
    return ""
