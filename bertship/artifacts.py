"""Directories that appear whole or not at all, and the manifest that says what is in them.

Every stage writes into a staging directory beside its target and renames it into place at the end. A reader
therefore never sees half an artifact, whatever ended the writer: an error, a full disk, Ctrl-C or SIGKILL.
"""

import contextlib
import errno
import glob
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import bertship
from bertship.errors import InputError, seen

MANIFEST = "manifest.json"
# what readers take for granted of a stage's manifest, and its type; exports are carried from machine to machine
_FIELDS: dict[str, dict[str, type]] = {
    "export": {
        **dict.fromkeys(("fingerprint", "created", "task", "serve"), str),
        **dict.fromkeys(("versions", "config", "inputs", "metrics", "files", "graphs"), dict),
    }
}
_JSON_NAMES: dict[type, str] = {str: "a string", dict: "an object"}
_RECORDED_PACKAGES = ("numpy", "onnx", "onnxruntime", "tensorrt", "tokenizers", "torch")


def make_directory(directory: Path, target: Path | None = None) -> None:
    """Make `directory`, and what it lies in, so that `target` (itself) can be written; InputError names what blocks."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        blocking = next((place for place in (directory, *directory.parents) if place.exists()), directory)
        raise InputError(f"cannot write {target or directory}: {blocking} is a file, not a directory") from None


def clear_directory(directory: Path, but: str) -> None:
    """Remove all that is in `directory`, where there is one, except for the entry named `but`."""
    for entry in directory.iterdir() if directory.is_dir() else ():
        if entry.name != but:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


@contextlib.contextmanager
def publish(target: Path) -> Iterator[Path]:
    """Yield an empty staging directory that becomes `target` when the block ends well and vanishes when it does not.

    An existing `target` is replaced as a whole. The staging directory is on the same file system, so the switch is
    two renames; a reader can at worst find no directory for the instant between them.
    """
    target = Path(target)
    if target.is_symlink():  # a link to a larger disk stays a link
        target = target.resolve()
    if target.is_file():
        raise InputError(f"cannot write {target}: it is a file, not a directory; move it away")
    make_directory(target.parent, target)
    _remove_leftovers(target)
    staging = target.with_name(f".{target.name}.partial-{os.getpid()}")
    replaced = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    staging.mkdir()
    try:
        yield staging
        _switch(staging, target, replaced)
        shutil.rmtree(replaced, ignore_errors=True)
    except Exception as error:
        if _disk_is_full(error):
            raise InputError(
                f"no space left while writing {target}; free some and run again, nothing is left half written"
            ) from error
        raise
    finally:
        if replaced.exists() and not target.exists():  # stopped between the two renames
            replaced.rename(target)
        shutil.rmtree(staging, ignore_errors=True)


def _switch(staging: Path, target: Path, replaced: Path) -> None:
    """Rename `staging` to `target`, what was there to `replaced`; of writers that end at once, the last one stays."""
    while True:
        with contextlib.suppress(FileNotFoundError):  # another writer has just moved it out of the way
            target.rename(replaced)
        try:
            staging.rename(target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(replaced, ignore_errors=True)  # another writer has put its own there meanwhile


def published(staging: Path) -> Path:
    """Where a staging directory of `publish` will be; any other directory is where it is."""
    name = re.fullmatch(r"\.(.+)\.partial-\d+", staging.name)
    return staging.with_name(name[1]) if name else staging


def _disk_is_full(error: Exception) -> bool:
    """Whether a full disk or quota is behind the error; libraries in Rust and C++ say so in their message alone."""
    number = getattr(error, "errno", None)
    return number in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error)


def _remove_leftovers(target: Path) -> None:
    """Clean up after writers of `target` that were killed; put a replaced directory back if the new one never came."""
    for kind in ("replaced", "partial"):
        for leftover in target.parent.glob(f".{glob.escape(target.name)}.{kind}-*"):
            pid = leftover.name.rpartition("-")[2]
            if pid.isdigit() and Path(f"/proc/{pid}").exists() and int(pid) != os.getpid():
                continue
            if kind == "replaced" and not target.exists():
                leftover.rename(target)
            else:
                shutil.rmtree(leftover, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a single file beside its place and rename it there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        staging.write_text(text, encoding="utf-8")
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def code_digest(root: Path, patterns: Iterable[str]) -> str:
    """Hash of the source files below `root` that match: part of a fingerprint, so that changed code is run again."""
    digest = hashlib.sha256()
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of what can change a result: the project, Python and the installed libraries."""
    found = {"bertship": bertship.__version__, "python": platform.python_version()}
    for package in _RECORDED_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def write_manifest(
    directory: Path,
    stage: str,
    *,
    fingerprint: str = "",
    config: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Describe every file in `directory` (size in bytes, SHA-256) and how it came about; returns what was written."""
    files = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    manifest = {
        "stage": stage,
        "fingerprint": fingerprint,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions(),
        "config": dict(config or {}),
        "inputs": dict(inputs or {}),
        "metrics": dict(metrics or {}),
        **facts,
        "files": files,
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2, default=str) + "\n", encoding="utf-8")
    return manifest


def read_manifest(directory: Path, stage: str | None = None) -> dict[str, Any]:
    """The manifest of `directory`; `stage` says which stage must have written it. Raises InputError."""
    path = Path(directory) / MANIFEST
    if not path.is_file():
        made_by = f" (the directory that `bertship {stage}` writes)" if stage else ""
        raise InputError(f"no {MANIFEST} in {directory}{made_by}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}; make the directory again") from None
    if not isinstance(manifest, dict):
        raise InputError(f"{path} is no JSON object; make the directory again")
    if stage and manifest.get("stage") != stage:
        raise InputError(
            f"{directory} was written by stage {manifest.get('stage')!r}; a directory of stage {stage!r} is needed"
        )
    if stage in _FIELDS:
        _check_fields(path, manifest, _FIELDS[stage])
    return manifest


def _check_fields(path: Path, manifest: Mapping[str, Any], fields: Mapping[str, type]) -> None:
    """Refuse a manifest that was cut or edited, before a reader trips over what it lacks."""
    for name, kind in fields.items():
        if not isinstance(manifest.get(name), kind):
            shown = repr(manifest[name])[:60] if name in manifest else "missing"
            raise InputError(f"{path}: {name} is {shown}, {_JSON_NAMES[kind]} is needed; make the directory again")
    for name, file in manifest.get("graphs", {}).items():
        if not isinstance(file, str):
            raise InputError(f"{path}: the graph of {name} is {seen(file)}, a file is needed; make the directory again")
    for name, facts in manifest["files"].items():
        whole = isinstance(facts, dict) and isinstance(facts.get("bytes"), int) and isinstance(facts.get("sha256"), str)
        if not whole:
            raise InputError(f"{path}: files has no size and hash of {name}; make the directory again")


def check_files(directory: Path, manifest: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse files that are missing, or differ from what the manifest says. Raises InputError with the file."""
    for name in names:
        path, facts = Path(directory) / name, manifest["files"].get(name)
        if facts is None or not path.is_file():
            raise InputError(f"{path} is missing; make {directory} again")
        if path.stat().st_size != facts["bytes"] or sha256_file(path) != facts["sha256"]:
            raise InputError(f"{path} has changed since it was made; make {directory} again")


def is_current(directory: Path, fingerprint: str) -> bool:
    """Whether `directory` was made from the inputs of this fingerprint and still holds what its manifest lists."""
    try:
        manifest = read_manifest(directory)
        _check_fields(directory / MANIFEST, manifest, {"fingerprint": str, "files": dict})
    except InputError:
        return False
    return manifest.get("fingerprint") == fingerprint and all(
        (directory / name).is_file()
        and (directory / name).stat().st_size == facts["bytes"]
        and sha256_file(directory / name) == facts["sha256"]
        for name, facts in manifest.get("files", {}).items()
    )
