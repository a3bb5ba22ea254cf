"""Command lines and paths as a person can paste them: for the shell and the directory that this process was started in.

Everything that a report, a message or `NEXT.md` tells to type goes through `typed`; every path in it through `place`.
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROGRAMS = ("bertship", "tensorboard")  # of this environment


def typed(line: str) -> str:
    """A command line with its program as it can be started here: by name where it is on the PATH, else by its path."""
    program, space, rest = line.partition(" ")
    return f"{_started(program)}{space}{rest}" if program in PROGRAMS else line


def typed_within(text: str) -> str:
    """A sentence with the commands that it names between backticks as `typed` has them."""
    return re.sub(rf"`((?:{'|'.join(PROGRAMS)}) [^`]*)`", lambda found: f"`{typed(found[1])}`", text)


def place(path: Path | str) -> str:
    """A path quoted for the shell: from here where it lies below, else absolute; without turns like `a/..`."""
    return shlex.quote(shown(path))


def shown(path: Path | str) -> str:
    """`place`, for reading: not quoted."""
    absolute = Path(os.path.normpath(Path(path).absolute()))
    return str(absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute)


def shown_places(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest's inputs for reading: places as seen from here; what was not given is left out."""
    places = ("data", "task_file", "init", "run", "model", "export", "corpus")
    return {
        name: shown(value) if name in places and isinstance(value, str) else value
        for name, value in inputs.items()
        if value not in (None, "")
    }


def _started(program: str) -> str:
    """The program's name where the PATH leads to this environment's own, else its path; the name where it has none."""
    own = Path(sys.executable).parent / program
    on_path = shutil.which(program)
    if not own.is_file() or (on_path and os.path.realpath(on_path) == os.path.realpath(own)):
        return program
    return place(own)
