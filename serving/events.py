"""The server's own log: one JSON object a line, for machines; never a text that was asked."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOG = "serve.jsonl"


class EventLog:
    """Appends to a file and tells `say` in words."""

    def __init__(self, path: Path, say: Callable[[str], None] | None = None) -> None:
        self._path, self._say = path, say

    def __call__(self, event: str, message: str = "", *, level: str = "info", **facts: Any) -> None:
        """One line: time (UTC), level, event, message, and facts such as task, model, version, seconds."""
        now_s = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s)) + f".{int(now_s * 1000) % 1000:03d}Z"
        row = {"time": stamp, "level": level, "event": event, "message": message, **facts}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({name: value for name, value in row.items() if value != ""}, default=str) + "\n")
        if self._say and message:
            self._say(message)


def read(path: Path) -> list[dict[str, Any]]:
    """The log's rows."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
