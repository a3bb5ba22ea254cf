"""What of the processor decides whether an INT8 graph computes what it was judged by.

Without VNNI or AMX an x86 processor adds products of 8 bits by pairs in 16 bits, which saturate where weights use all
of theirs. An export knows its own machine and keeps to 7 bits there; the machine that serves may be another one.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from bertship.errors import InputError

CPUINFO = Path("/proc/cpuinfo")
INT8 = "bertship.int8"  # the key of an INT8 graph's own description, JSON with its "weight_bits"
_ADDS_IN_32_BITS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})


def has_vnni() -> bool:
    """Whether the processor adds INT8 products in 32 bits (AVX-512 VNNI, AVX VNNI or AMX)."""
    return not _ADDS_IN_32_BITS.isdisjoint(cpu_field("flags").split())


def check_int8(path: Path, metadata: Mapping[str, str]) -> None:
    """Raises InputError for a graph of 8-bit weights, by its metadata, on an x86 processor where sums saturate."""
    bits = json.loads(metadata.get(INT8, "{}")).get("weight_bits", 0)
    if bits > 7 and cpu_field("flags") and not has_vnni():  # another architecture's line has another name
        raise InputError(
            f"{path} is INT8 with weights of {bits} bits, made for processors with VNNI or AMX; this one has neither, "
            "and its sums would saturate: take --precision fp32, or export on a processor like this one, where weights "
            "get 7 bits"
        )


def cpu_field(name: str) -> str:
    """What Linux says of the first processor under `name`; empty where it says nothing."""
    with contextlib.suppress(OSError):
        for line in CPUINFO.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""
