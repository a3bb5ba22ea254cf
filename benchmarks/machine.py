"""What a figure belongs to: the machine and the versions; and where figures are kept."""

import contextlib
import importlib.metadata
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from bertship import artifacts
from bertship.processor import cpu_field

RESULTS = Path(__file__).parent / "results"
# what decides which kernels run, as Linux spells them: with bf16 in hardware a training takes half the time
INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd", "i8mm", "bf16")


def describe_machine() -> dict[str, Any]:
    """Processor, its instructions, cores, memory, GPUs and the versions of what computes."""
    import torch

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    versions = artifacts.versions()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["transformers"] = importlib.metadata.version("transformers")
    return {
        "processor": cpu_field("model name") or platform.processor(),
        "instructions": instructions(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": gpus,
        "system": platform.platform(),
        "versions": versions,
        "measured": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def instructions() -> list[str]:
    """Those of INSTRUCTIONS that the processor has."""
    flags = (cpu_field("flags") or cpu_field("Features")).split()
    return [name for name in INSTRUCTIONS if name in flags]


def save_result(benchmark: str, name: str, result: dict[str, Any]) -> Path:
    """Put `result` under its `name` into results/BENCHMARK.json, beside those of other names."""
    path = RESULTS / f"{benchmark}.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    kept[name] = result
    artifacts.write_text(path, json.dumps(kept, indent=2, sort_keys=True) + "\n")
    return path
