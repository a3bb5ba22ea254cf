"""The Python backend's stub processes, seen from outside: Triton never says that one has died."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from serving import supervisor


def stubs(server: int, known: Iterable[int] = ()) -> tuple[bool, dict[int, tuple[str, int]]]:
    """Whether a child of the server has died and was not waited for, and what each living stub runs.

    The latter by process id: the model's name and its version. `known`: process ids of stubs seen before, which are
    looked at too. A child belongs to the thread that made it, and when that ends, to another: one look at the threads
    in turn can miss a child that moves meanwhile.
    """
    children = set(known)
    dead, alive = False, {}
    for task in Path(f"/proc/{server}/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread that has ended since
            children |= set(map(int, (task / "children").read_text().split()))
    for child in children:
        facts = supervisor.process_facts(child)
        if facts is None or facts[0] in "ZX":
            dead = dead or facts is not None
            continue
        with contextlib.suppress(OSError):
            # a stub's first argument is MODEL/VERSION/model.py
            arguments = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if len(arguments) > 1:
                folder = Path(os.fsdecode(arguments[1])).parent
                if folder.name.isdigit():
                    alive[child] = (folder.parent.name, int(folder.name))
    return dead, alive
