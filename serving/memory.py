"""How much memory each model's process holds.

Triton's Python backend runs every model instance in a process of its own, a stub whose first argument is
`MODEL/VERSION/model.py`.
"""

import contextlib
import os
from pathlib import Path

SERVER = "tritonserver"


def memory_of(server_pid: int) -> dict[str, dict[str, float]]:
    """MiB by model, and of the server itself: `rss_mib`, resident, and `pss_mib`, with shared pages shared out."""
    found = {SERVER: _sizes(server_pid)}
    for child in _children(server_pid):
        with contextlib.suppress(OSError):  # it has just ended
            arguments = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if len(arguments) > 1 and arguments[1].endswith(b"model.py"):
                found[Path(os.fsdecode(arguments[1])).parents[1].name] = _sizes(child)
    return dict(sorted(found.items()))


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text(encoding="ascii").split()
        ]
    return []


def _sizes(pid: int) -> dict[str, float]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    kib = {line.split()[0].rstrip(":"): int(line.split()[1]) for line in lines if line.endswith(" kB")}
    return {"rss_mib": round(kib["Rss"] / 1024, 1), "pss_mib": round(kib["Pss"] / 1024, 1)}
