"""What this machine has of what the line needs: what was found, what it enables, what to type to get the rest.

`machine.look` reads the machine; `judge` turns what it saw into checks, and reads nothing itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bertship
from bertship.machine import PORTS, Machine, look

# what each extra of pyproject.toml that the line needs is for
ENABLES = {
    "core": "tasks, tokenization, and the client of a server elsewhere",
    "train": "corpus, pretrain, finetune, evaluate",
    "export": "export through the parity gate, predict",
    "serve": "the Triton repository, load tests, the playground",
}
# flags of /proc/cpuinfo: what people call them, what they bring
CPU_FEATURES = {
    "AVX-512": (("avx512f",), "the widest kernels"),
    "VNNI": (("avx512_vnni", "avx_vnni", "amx_int8"), "8-bit weights in INT8, which `--precision auto` then serves"),
    "BF16": (("avx512_bf16", "amx_bf16"), "training in bf16"),
}
LEAST_DISK_GIB = 5.0  # the server's environment, a model of MiniLM's size and its exports
LEAST_MEMORY_GIB = 4.0
LEAST_SHM_MIB = 100  # 20 models, which are five tasks, of 5 MiB each


@dataclass(frozen=True)
class Check:
    """One thing that was looked for.

    `status`: ok; missing, where the line needs it; absent, where it would bring something more.
    """

    group: str
    name: str
    status: str
    found: str
    enables: str = ""
    remedy: str = ""


def examine(runs: Path) -> list[Check]:
    """Look at the machine and judge it."""
    return judge(look(runs))


def ready(checks: Iterable[Check]) -> bool:
    """Whether the line can run: nothing that it needs is missing."""
    return all(check.status != "missing" for check in checks)


def judge(machine: Machine) -> list[Check]:
    """Checks in the order of the line."""
    return [*_judge_machine(machine), *_judge_packages(machine), *_judge_server(machine), *_judge_gpu(machine)]


def _judge_machine(machine: Machine) -> list[Check]:
    linux = machine.system == "Linux x86_64"
    modern = machine.glibc is not None and machine.glibc >= (2, 35)
    glibc = "glibc {}.{}".format(*machine.glibc) if machine.glibc else "no glibc"
    checks = [
        Check(
            "machine",
            "system",
            "ok" if linux and modern else "missing",
            f"{machine.system}, {glibc}",
            "training, export, and the embedded Triton server",
            ""
            if linux and modern
            else "the line needs Linux x86-64 with glibc 2.35 or newer (Ubuntu 22.04, Debian 12)",
        )
    ]
    has = {name: not machine.cpu_flags.isdisjoint(flags) for name, (flags, _) in CPU_FEATURES.items()}
    checks.append(Check("machine", "processor", "ok", f"{machine.cpu or 'unknown'}, {_count(machine.cores, 'core')}"))
    for name, (_, brings) in CPU_FEATURES.items():
        remedy = {
            "AVX-512": "none needed: everything runs without, slower",
            "VNNI": "none needed: INT8 gets 7-bit weights, and `--precision auto` serves FP32",
            "BF16": "none needed: training takes FP32",
        }[name]
        found = "yes" if has[name] else "no"
        checks.append(
            Check("machine", name, "ok" if has[name] else "absent", found, brings, "" if has[name] else remedy)
        )
    enough = machine.memory_gib >= LEAST_MEMORY_GIB
    checks.append(
        Check(
            "machine",
            "memory",
            "ok" if enough else "missing",
            f"{machine.memory_gib:.1f} GiB",
            "training up to the `tiny` preset and fine-tuning a model of MiniLM's size" if enough else "",
            "" if enough else f"at least {LEAST_MEMORY_GIB:g} GiB are needed",
        )
    )
    room = machine.disk_gib >= LEAST_DISK_GIB
    checks.append(
        Check(
            "machine",
            "disk",
            "ok" if room else "missing",
            f"{machine.disk_gib:.1f} GiB free where runs are written",
            "" if not room else "environments, models and exports",
            "" if room else f"free {LEAST_DISK_GIB:g} GiB, or give another folder with --runs",
        )
    )
    return checks


def _judge_packages(machine: Machine) -> list[Check]:
    version = tuple(int(part) for part in machine.python.split(".")[:2] if part.isdigit())
    new = version >= (3, 11)
    checks = [
        Check(
            "python",
            "Python",
            "ok" if new else "missing",
            machine.python,
            "",
            "" if new else "install Python 3.11 or newer, then `make setup PYTHON=/path/to/python3.11`",
        )
    ]
    for part in ENABLES:
        names = machine.parts.get(part, ())
        missing = [name for name in names if name not in machine.packages] or ([] if names else ["bertship"])
        shown = [f"{name} {machine.packages[name]}" for name in names if name in machine.packages]
        found = ", ".join(shown) or "nothing"
        if missing:
            found = f"{', '.join(missing)} not installed" + (f"; {', '.join(shown)}" if shown else "")
        remedy = "`make setup` in the checkout" if machine.checkout else "clone the project, then `make setup` there"
        checks.append(
            Check("python", part, "missing" if missing else "ok", found, ENABLES[part], remedy if missing else "")
        )
    hub = [name for name in ("datasets", "huggingface_hub") if name in machine.packages]
    checks.append(
        Check(
            "python",
            "hub",
            "ok" if len(hub) == 2 else "absent",
            ", ".join(f"{name} {machine.packages[name]}" for name in hub) or "not installed",
            "data sets and models by their hub name",
            "" if len(hub) == 2 else "`.venv/bin/pip install datasets`; files in DATA= need none of it",
        )
    )
    return checks


def _judge_server(machine: Machine) -> list[Check]:
    if not machine.checkout:
        reason = "the core alone is installed: it asks servers elsewhere"
        return [Check("server", "Triton", "missing", reason, "", "clone the project, then `make setup` there")]
    checks = []
    if machine.triton:
        checks.append(Check("server", "Triton", "ok", machine.triton, "`make serve`: the real server, no container"))
    elif machine.triton_problem:
        checks.append(
            Check("server", "Triton", "missing", "not set up, and no Python to do it with", "", machine.triton_problem)
        )
    else:
        found = f"not set up yet; the first `make serve` does it with {machine.triton_python}"
        checks.append(
            Check("server", "Triton", "ok", found, "the real server, no container", "`make setup` does it now")
        )
    checks.append(
        Check(
            "server",
            "perf_analyzer",
            "ok" if machine.perf_analyzer else "absent",
            machine.perf_analyzer or "not set up yet",
            "`make bench`",
            "" if machine.perf_analyzer else "`make setup`",
        )
    )
    enough = machine.shm_mib is not None and machine.shm_mib >= LEAST_SHM_MIB
    found = "/dev/shm cannot be written to" if machine.shm_mib is None else f"{machine.shm_mib:,} MiB free in /dev/shm"
    checks.append(
        Check(
            "server",
            "shared memory",
            "ok" if enough else "missing",
            found,
            "tensors between Triton and its Python steps" if enough else "",
            "" if enough else f"enlarge /dev/shm to {LEAST_SHM_MIB} MiB or more (Docker: --shm-size=256m)",
        )
    )
    taken = {port: holder for port, holder in machine.ports.items() if holder}
    ours = f"; {machine.server} is ours" if machine.server else ""
    free = ", ".join(str(port) for port in machine.ports if port not in taken)
    checks.append(
        Check(
            "server",
            "ports",
            "absent" if taken and not machine.server else "ok",
            f"{', '.join(map(str, taken))} taken{ours}" if taken else f"{free} free{ours}",
            "the usual addresses" if not taken else "",
            f"take others, such as `make serve {' '.join(f'{PORTS[port]}={port + 10_000}' for port in taken)}`"
            if taken and not machine.server
            else "",
        )
    )
    return checks


def _judge_gpu(machine: Machine) -> list[Check]:
    if not machine.gpus:
        why = "no NVIDIA GPU (nvidia-smi finds none)" if "nvidia-smi" in machine.tools else "no NVIDIA GPU or driver"
        remedy = "the line runs on the processor; larger presets than `tiny` want a GPU"
        return [Check("gpu", "GPU", "absent", why, "CUDA training, TensorRT plans", remedy), *_judge_tensorrt(machine)]
    checks = [Check("gpu", "GPU", "ok", "; ".join(machine.gpus), "CUDA training, TensorRT plans")]
    usable, built = bool(machine.torch_cuda.get("usable")), machine.torch_cuda.get("cuda")
    if usable:
        found = f"torch uses CUDA {built}{', bf16 too' if machine.torch_cuda.get('bf16') else ''}"
    elif "torch" in machine.packages:
        found = f"torch was built for {f'CUDA {built}, which the driver does not run' if built else 'processors alone'}"
    else:
        found = "torch is not installed"
    remedy = "renew the driver" if built else "`make clean ALL=1 setup` without TORCH_INDEX_URL brings torch for CUDA"
    checks.append(
        Check("gpu", "CUDA", "ok" if usable else "absent", found, "training on the GPU", "" if usable else remedy)
    )
    return [*checks, *_judge_tensorrt(machine)]


def _judge_tensorrt(machine: Machine) -> list[Check]:
    version = machine.packages.get("tensorrt", "")
    rtx = machine.packages.get("tensorrt-rtx-cu12", "")
    found = f"tensorrt {version}" if version else "not installed"
    if rtx:
        found += f"; TensorRT for RTX {rtx}, which checks graphs without a GPU"
    remedy = "" if version else "on the GPU's machine: `pip install tensorrt`, or NVIDIA's TensorRT container"
    return [Check("gpu", "TensorRT", "ok" if version else "absent", found, "FP16 plans of `make export`", remedy)]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def result(checks: Sequence[Check]) -> dict[str, Any]:
    """The examination as one JSON object."""
    return {"ready": ready(checks), "version": bertship.__version__, "checks": [asdict(check) for check in checks]}


_MARKS = {"ok": "ok", "missing": "NO", "absent": "--"}
_WIDTH = 110
_INDENT = 21  # where what was found begins


def lines(checks: Sequence[Check]) -> list[str]:
    """The examination for people: a block a group, a line a check, what it brings and the remedy beside or under it."""
    said: list[str] = []
    for group in dict.fromkeys(check.group for check in checks):
        said += [*([""] if said else []), group]
        for check in (check for check in checks if check.group == group):
            words = [f"  {_MARKS[check.status]}  {check.name:<{_INDENT - 7}} {check.found}"]
            if check.enables:
                words.append(f"for {check.enables}")
            if check.remedy:
                words.append(f"-> {check.remedy}")
            said += _flowed(words)
    missing = [check.name for check in checks if check.status == "missing"]
    said += ["", f"the line cannot run yet: {', '.join(missing)}" if missing else "the line can run: try `make demo`"]
    return said


def _flowed(words: Sequence[str]) -> list[str]:
    """Pieces on one line where they fit, else a line each; a remedy always has its own."""
    said = [words[0]]
    for piece in words[1:]:
        if piece.startswith("->") or len(said[-1]) + 2 + len(piece) > _WIDTH:
            said.append(" " * (_INDENT) + piece)
        else:
            said[-1] += f"; {piece}"
    return said
