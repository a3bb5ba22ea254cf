"""The Python backend's stub processes, seen from outside: Triton never says that one has died."""

import contextlib
import os
from pathlib import Path

from serving import supervisor


def stubs(server: int) -> tuple[bool, dict[int, tuple[str, int]]]:
    """Whether a child of the server has died and was not waited for, and what each living stub runs.

    The latter by process id: the model's name and its version.
    """
    children: list[int] = []
    dead, alive = False, {}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{server}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    for child in children:
        facts = supervisor.process_facts(child)
        dead = dead or (facts is not None and facts[0] == "Z")
        with contextlib.suppress(OSError):
            # a stub's first argument is MODEL/VERSION/model.py
            arguments = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if len(arguments) > 1:
                folder = Path(os.fsdecode(arguments[1])).parent
                if folder.name.isdigit():
                    alive[child] = (folder.parent.name, int(folder.name))
    return dead, alive
