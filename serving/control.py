"""Triton's control API: models loaded and unloaded, behind the key that only a server's keeper and `deploy` hold.

The embedded server closes model control, shared memory, tracing and logging to everybody without the key, over HTTP
and gRPC. The key is made at the start and written to a file that its owner alone may read.
"""

import http.client
import json
import secrets
from pathlib import Path
from typing import Any

from bertship.errors import InputError, ServerUnavailable
from bertship.health import Endpoint, error_text

HEADER = "bertship-key"  # over HTTP; over gRPC Triton wants "triton-grpc-protocol-bertship-key"
RESTRICTED = ("model-repository", "shared-memory", "trace", "logging")
KEY_FILE = "control.key"
CANDIDATE = "_candidate"  # ends the name of an ensemble that `deploy` tries a new version with
LOAD_TIMEOUT_S = 120.0


def new_key() -> str:
    return secrets.token_urlsafe(32)


def write_key(path: Path, key: str) -> None:
    """Write the key where only this user reads it; never readable for a moment by others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(key + "\n", encoding="ascii")


def read_key(path: Path) -> str:
    """Raises InputError when it is not there."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the server's key {path}: {error}") from None


def flags(key: str) -> list[str]:
    """tritonserver's flags that close the control APIs."""
    restricted = f"{','.join(RESTRICTED)}:{HEADER}={key}"
    return [f"--http-restricted-api={restricted}", f"--grpc-restricted-protocol={restricted}"]


class Control:
    """A server's control API. Every method raises ServerUnavailable where the server does not answer."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self._endpoint = Endpoint(url, {HEADER: key} if key else {})

    def index(self) -> dict[tuple[str, int], str]:
        """The state of each version that the server knows, by model and version; READY where it can be asked."""
        return {name: state for name, (state, _) in self._rows().items()}

    def reasons(self) -> dict[tuple[str, int], str]:
        """Why versions that cannot be asked did not load, in one line each."""
        return {name: reason for name, (state, reason) in self._rows().items() if state != "READY" and reason}

    def ready(self) -> set[str]:
        """Names of the models with a version that can be asked."""
        return {name for (name, _), state in self.index().items() if state == "READY"}

    def load(self, model: str) -> None:
        """Load a model, or load it again from its folder; returns when it is ready or has failed.

        The versions that are served go on until the new ones are there. Raises ServerUnavailable with the reason.
        """
        self._call("POST", f"/v2/repository/models/{model}/load", LOAD_TIMEOUT_S)

    def unload(self, model: str) -> None:
        """No new requests from now on; those that run end first."""
        self._call("POST", f"/v2/repository/models/{model}/unload")

    def config(self, model: str) -> dict[str, Any]:
        """The configuration that the server uses."""
        return dict(json.loads(self._call("GET", f"/v2/models/{model}/config")))

    def statistics(self) -> list[dict[str, Any]]:
        return list(json.loads(self._call("GET", "/v2/models/stats"))["model_stats"])

    def _rows(self) -> dict[tuple[str, int], tuple[str, str]]:
        rows = json.loads(self._call("POST", "/v2/repository/index"))
        return {
            (row["name"], int(row["version"])): (row.get("state", ""), _one_line(row.get("reason", "")))
            for row in rows
            if row.get("version")
        }

    def _call(self, method: str, path: str, timeout_s: float = 10.0) -> bytes:
        try:
            status, body = self._endpoint.call(method, path, timeout_s=timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnavailable(f"no server at {self.url}: {error or type(error).__name__}") from None
        if status == 403:
            raise InputError(f"the server at {self.url} refuses the key of {path}; give its own with --key-file")
        if status != 200:
            raise ServerUnavailable(f"{path}: {_one_line(error_text(body)) or f'HTTP status {status}'}")
        return body


def _one_line(text: str) -> str:
    """Triton's words without the traceback that the Python backend adds."""
    return " ".join(text.split("\n\nAt:")[0].split())


def steps_of(config: dict[str, Any]) -> dict[str, int]:
    """The models that an ensemble is made of and the versions that it names; empty where it is none."""
    steps = config.get("ensemble_scheduling", {}).get("step", [])
    return {step["model_name"]: int(step["model_version"]) for step in steps}
