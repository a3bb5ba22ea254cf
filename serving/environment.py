"""The embedded server's own interpreter: `.triton`, beside the project's pyproject.toml.

Triton's Python backend needs numpy 1.26 where everything else runs numpy 2, so the server gets an environment of its
own, as it has in NVIDIA's container. It is made in three steps, each with a fingerprint that is written when the step
has ended well: whatever interrupts a set-up, the next call repeats the steps that are missing.

    .triton/
      bin/ lib/           a virtual environment with requirements/triton.txt and a copy of the `bertship` package
      runtime/bin         tritonserver, and perf_analyzer with the libraries it misses
      runtime/lib         shared libraries of the nvidia-pytriton wheel
      runtime/backends    the Python backend, with the stub of this interpreter's version
      runtime/caches      the local response cache
      setup.log           what venv and pip said
      stamps.json         fingerprints of the finished steps

`python -m serving.environment` makes it and prints its path.
"""

import contextlib
import fcntl
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertship import artifacts
from bertship.errors import BertshipError, InputError

PROJECT = Path(__file__).resolve().parent.parent
REQUIREMENTS = PROJECT / "requirements" / "triton.txt"
# nvidia-pytriton has stubs for more; bertship needs 3.11, and numpy 1.26 has no wheel for 3.13
PYTHON_VERSIONS = ((3, 12), (3, 11))
MIN_GLIBC = (2, 35)

_LOCK = "bertship.lock"  # also the sign that a folder is ours to empty
_LOG = "setup.log"
_STAMPS = "stamps.json"

# Run by a candidate interpreter. The stub is linked against the shared libpython, which may lie in LIBDIR, in the
# prefix (relocated builds report the LIBDIR of the machine that built them), in Debian's multiarch folder, or wherever
# the loader looks by itself.
_PROBE = """
import ctypes, json, os, sys, sysconfig
soname = "libpython%d.%d.so.1.0" % sys.version_info[:2]
libdir = sysconfig.get_config_var("LIBDIR") or ""
multiarch = sysconfig.get_config_var("MULTIARCH") or ""
places = [libdir, os.path.join(sys.base_prefix, "lib"), os.path.join(libdir, multiarch)]
found = next((place for place in places if os.path.exists(os.path.join(place, soname))), None)
if found is None:
    try:
        ctypes.CDLL(soname)
        found = ""
    except OSError:
        pass
base = getattr(sys, "_base_executable", None) or sys.executable
print(json.dumps([base, list(sys.version_info[:3]), sys.base_prefix, found]))
"""


@dataclass(frozen=True)
class TritonEnvironment:
    """Where everything is that starting and measuring the embedded server needs."""

    root: Path
    python: Path
    site_packages: Path
    runtime: Path
    libdir: str  # of the interpreter's shared libpython; empty where the loader finds it by itself

    @property
    def tritonserver(self) -> Path:
        return self.runtime / "bin" / "tritonserver"

    @property
    def perf_analyzer(self) -> Path:
        """Runs by itself: a script that brings the libraries which the wheel's binary misses."""
        return self.runtime / "bin" / "perf_analyzer"

    def variables(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Environment variables for the server process, made from `base` (this process's own by default).

        The Python backend takes the interpreter that PATH names first, and its stub the libpython that
        LD_LIBRARY_PATH names first.
        """
        variables = dict(os.environ if base is None else base)
        for name in ("PYTHONPATH", "PYTHONHOME"):
            variables.pop(name, None)
        libraries = [self.libdir] if self.libdir else []
        return variables | {
            "PATH": os.pathsep.join([str(self.root / "bin"), variables.get("PATH", os.defpath)]),
            "LD_LIBRARY_PATH": os.pathsep.join([*libraries, str(self.runtime / "lib")]),
            "VIRTUAL_ENV": str(self.root),
            "PYTHONNOUSERSITE": "1",
            # a repository may be read-only, and what appears in it makes Triton load a model again
            "PYTHONDONTWRITEBYTECODE": "1",
        }


@dataclass(frozen=True)
class _Interpreter:
    executable: Path  # never a virtual environment's
    version: tuple[int, int, int]
    prefix: str
    libdir: str | None  # None: there is no shared libpython

    @property
    def name(self) -> str:
        return ".".join(map(str, self.version))

    @property
    def identity(self) -> tuple[str, str, str | None]:
        """The same for an interpreter and for a virtual environment that was made from it."""
        return self.name, self.prefix, self.libdir

    def complaint(self) -> str:
        """Why the server cannot run on it; empty where it can."""
        if self.version[:2] not in PYTHON_VERSIONS:
            return f"is Python {self.name}, not 3.11 or 3.12"
        if self.libdir is None:
            library = "libpython{}.{}.so.1.0".format(*self.version)
            return f"has no {library}, which Triton's Python backend loads (Debian: install {library.split('.so')[0]})"
        return ""


def environment_root() -> Path:
    """The environment's folder: BERTSHIP_TRITON_ENV, else `.triton` in the project."""
    return Path(os.environ.get("BERTSHIP_TRITON_ENV") or PROJECT / ".triton").absolute()


def find_python() -> Path:
    """A Python 3.11 or 3.12 with a shared libpython: TRITON_PYTHON, else this one, else python3.12 or 3.11 on PATH.

    Raises InputError: TRITON_PYTHON names something else, or there is none.
    """
    wanted = os.environ.get("TRITON_PYTHON")
    if wanted:
        executable = shutil.which(wanted)
        interpreter = _probe(Path(executable)) if executable else None
        if not executable or not interpreter:
            raise InputError(f"TRITON_PYTHON={wanted} is no Python that runs; give the path of a Python 3.11 or 3.12")
        if complaint := interpreter.complaint():
            raise InputError(f"TRITON_PYTHON={wanted} {complaint}; give the path of a Python 3.11 or 3.12")
        return Path(executable)
    complaints = []
    for name in (sys.executable, "python3.12", "python3.11"):
        executable = shutil.which(name)
        # a shim of pyenv's is on PATH for versions that are installed and not chosen; it does not run
        if not executable or not (interpreter := _probe(Path(executable))):
            continue
        if not (complaint := interpreter.complaint()):
            return Path(executable)
        complaints.append(f"{executable} {complaint}")
    raise InputError(
        "the embedded Triton server needs a Python 3.11 or 3.12: "
        f"{'; '.join(complaints) or 'none is on PATH'}; name one with TRITON_PYTHON=/path/to/python3.11"
    )


def prepare(report: Callable[[str], None] | None = None) -> TritonEnvironment:
    """Make the environment, or what is missing or out of date of it; a current one costs some 0.1 s.

    `report` gets one line a step. Two callers at once: the second waits. Raises InputError where the machine, the
    Python or the folder will not do, BertshipError where venv or pip failed.
    """
    say = report or (lambda line: None)
    _check_machine()
    root = environment_root()
    with _locked(root, say) as lock_fd:
        interpreter = _choose(root)
        made = TritonEnvironment(
            root=root,
            python=root / "bin" / "python",
            site_packages=root / "lib" / "python{}.{}".format(*interpreter.version) / "site-packages",
            runtime=root / "runtime",
            libdir=interpreter.libdir or "",
        )
        packages = artifacts.sha256_json([artifacts.sha256_file(REQUIREMENTS), *interpreter.identity])
        modules = [made.site_packages / name / "__init__.py" for name in ("numpy", "onnxruntime", "tokenizers")]
        server = made.site_packages / "pytriton" / "tritonserver" / "bin" / "tritonserver"
        with _step(root, "packages", packages, [made.python, server, *modules], say) as needed:
            if needed:
                _install_packages(made, interpreter.executable, lock_fd)
        layout = artifacts.sha256_json([packages, artifacts.sha256_file(Path(__file__))])
        backend = made.runtime / "backends" / "python"
        parts = [backend / "triton_python_backend_stub", backend / "libtriton_python.so"]
        with _step(root, "runtime", layout, [made.tritonserver, made.perf_analyzer, *parts], say) as needed:
            if needed:
                _lay_out_runtime(made)
        sources = sorted(path.relative_to(PROJECT).as_posix() for path in _package_files())
        code = artifacts.sha256_json([packages, artifacts.code_digest(PROJECT, sources)])
        installed = [
            made.site_packages / "bertship" / path.relative_to(PROJECT / "bertship") for path in _package_files()
        ]
        with _step(root, "bertship", code, installed, say) as needed:
            if needed:
                _install_bertship(made)
    return made


def _check_machine() -> None:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise InputError(
            f"the embedded Triton server runs on Linux x86-64 only, this is {platform.system()} {platform.machine()}; "
            "serve from NVIDIA's container instead (serving/deploy)"
        )
    try:
        library, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
    except ValueError:  # musl knows no such name, or answers nothing
        library, version = "another C library", "0.0"
    if library != "glibc" or tuple(map(int, version.split(".")[:2])) < MIN_GLIBC:
        raise InputError(
            f"the embedded Triton server needs glibc {'.'.join(map(str, MIN_GLIBC))} or newer, this machine has "
            f"{library} {version}; serve from NVIDIA's container instead (serving/deploy)"
        )


def _probe(executable: Path) -> _Interpreter | None:
    """What `executable` is, or None where it is no working Python 3."""
    try:
        said = subprocess.check_output(
            [executable, "-I", "-c", _PROBE], stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, timeout=30
        )
        base, version, prefix, libdir = json.loads(said)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return _Interpreter(Path(base), tuple(version), prefix, libdir)


def _choose(root: Path) -> _Interpreter:
    """The interpreter to make the environment with: the one it has, unless TRITON_PYTHON asks for another."""
    if not os.environ.get("TRITON_PYTHON"):
        present = _probe(root / "bin" / "python")
        if present and not present.complaint():
            return present
    chosen = _probe(find_python())
    assert chosen is not None  # find_python has just run it
    return chosen


@contextlib.contextmanager
def _locked(root: Path, say: Callable[[str], None]) -> Iterator[int]:
    """Hold the environment's lock; yields its descriptor, for children that must keep it while they run."""
    try:
        # read once: between two looks another process may have begun there
        names = {path.name for path in root.iterdir()} if root.exists() else set()
        if names and _LOCK not in names:
            raise InputError(
                f"{root} holds files that are no environment of bertship's, and making one would remove them; "
                "let BERTSHIP_TRITON_ENV name a new folder"
            )
        root.mkdir(parents=True, exist_ok=True)
        file = (root / _LOCK).open("a")
    except OSError as error:
        raise InputError(f"cannot make the Triton environment in {root}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that sets up {root}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


@contextlib.contextmanager
def _step(root: Path, name: str, fingerprint: str, files: Sequence[Path], say: Callable[[str], None]) -> Iterator[bool]:
    """Yield whether the step is to be done; when the block ends well, say so and write down what shows that it holds.

    `files` stand for all that the step makes: where one is gone or has another size, the step is done again.
    """
    if _stamps(root).get(name) == [fingerprint, _sizes(files)]:
        yield False
        return
    started_s = time.monotonic()
    yield True
    stamps = _stamps(root) | {name: [fingerprint, _sizes(files)]}
    artifacts.write_text(root / _STAMPS, json.dumps(stamps, indent=2) + "\n")
    say(f"{root.name}: {name} ready in {time.monotonic() - started_s:.1f} s")


def _sizes(files: Sequence[Path]) -> list[int]:
    """Bytes of each file, -1 for a missing one."""
    return [file.stat().st_size if file.is_file() else -1 for file in files]


def _stamps(root: Path) -> dict[str, Any]:
    try:
        stamps = json.loads((root / _STAMPS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamps if isinstance(stamps, dict) else {}


def _install_packages(made: TritonEnvironment, base: Path, lock_fd: int) -> None:
    """A new virtual environment of the interpreter `base` with what requirements/triton.txt names."""
    for entry in made.root.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != _LOCK:
            entry.unlink()
    _logged([base, "-m", "venv", made.root], made.root, lock_fd)
    install = ["install", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    _logged([made.python, "-m", "pip", *install, "-r", REQUIREMENTS], made.root, lock_fd)


def _logged(command: Sequence[str | Path], root: Path, lock_fd: int) -> None:
    """Run a command with its output in the log; raises BertshipError with its last error line."""
    log = root / _LOG
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {shlex.join(map(str, command))}\n")
        file.flush()
        start = file.tell()
        # the child keeps the lock: should this process be killed, nobody starts over while pip still writes
        status = subprocess.call(
            command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=variables, pass_fds=(lock_fd,)
        )
    if status:
        said = log.read_bytes()[start:].decode(errors="replace")
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        if "ensurepip is not available" in said:
            errors = ["this Python cannot make virtual environments (Debian: install its -venv package)"]
        reason = (errors or lines or [f"exit status {status}"])[-1]
        raise BertshipError(f"setting up {root} failed: {reason}; the whole output is in {log}")


def _lay_out_runtime(made: TritonEnvironment) -> None:
    """The folder that tritonserver takes its backends and caches from."""
    triton = made.site_packages / "pytriton" / "tritonserver"
    libraries = made.site_packages / "nvidia_pytriton.libs"
    version = made.site_packages.parent.name.removeprefix("python")
    with artifacts.publish(made.runtime) as staging:
        for folder in ("bin", "backends/python", "repoagents", "perf_lib"):
            (staging / folder).mkdir(parents=True)
        (staging / "bin" / "tritonserver").symlink_to(triton / "bin" / "tritonserver")
        (staging / "lib").symlink_to(libraries)
        (staging / "caches").symlink_to(triton / "caches")
        # real copies: Triton refuses a library whose path leads out of the backend's folder
        for source in (
            *(triton / "backends" / "python").iterdir(),
            triton / "python_backend_stubs" / version / "triton_python_backend_stub",
        ):
            if source.is_file():
                shutil.copy2(source, staging / "backends" / "python" / source.name)
        # the wheel's perf_analyzer asks for these two under their plain names; nvidia-pytriton brings them renamed
        for library, plain in (("libb64", "libb64.so.0d"), ("libcudart", "libcudart.so.12")):
            (staging / "perf_lib" / plain).symlink_to(next(libraries.glob(f"{library}-*.so.*")))
        script = staging / "bin" / "perf_analyzer"
        search = shlex.quote(f"{made.runtime / 'perf_lib'}:{libraries}")
        binary = shlex.quote(str(made.root / "bin" / "perf_analyzer"))
        script.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={search} exec {binary} "$@"\n')
        script.chmod(0o755)


def _package_files() -> list[Path]:
    return [path for path in (PROJECT / "bertship").rglob("*") if path.is_file() and path.parent.name != "__pycache__"]


def _install_bertship(made: TritonEnvironment) -> None:
    """Put the package's files where its wheel would put them.

    The package is pure Python, so this is what building and installing the wheel comes to, without a build tool in
    the caller's environment, in milliseconds, and by a rename that a running server never sees half done.
    """
    with artifacts.publish(made.site_packages / "bertship") as staging:
        for path in _package_files():
            target = staging / path.relative_to(PROJECT / "bertship")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def main() -> int:
    """Make the environment: progress on stderr, its path on stdout; returns the exit status."""
    try:
        made = prepare(lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201
    except BertshipError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    print(made.root)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
