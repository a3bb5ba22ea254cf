"""serving/environment.py: which Python is taken, and that a set-up is made once, repaired and kept up to date."""

import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bertship import artifacts
from bertship.errors import BertshipError, InputError
from serving import environment
from serving.environment import TritonEnvironment


@pytest.fixture(scope="module")
def made() -> TritonEnvironment:
    return environment.prepare()


@pytest.fixture
def no_wish(monkeypatch):
    monkeypatch.delenv("TRITON_PYTHON", raising=False)


@pytest.fixture
def dry(monkeypatch, tmp_path):
    """A new environment's folder, with the step that downloads replaced by one that makes the folders it would."""
    calls = []

    def install(made, base, lock_fd):
        calls.append(base)
        for entry in made.root.iterdir():
            if entry.name != "bertship.lock":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        made.site_packages.mkdir(parents=True)
        made.python.parent.mkdir()
        made.python.symlink_to(base)
        triton = made.site_packages / "pytriton" / "tritonserver"
        for name in ("bin/tritonserver", "backends/python/libtriton_python.so"):
            (triton / name).parent.mkdir(parents=True)
            (triton / name).write_text(name)
        stub = triton / "python_backend_stubs" / made.site_packages.parent.name.removeprefix("python")
        stub.mkdir(parents=True)
        (stub / "triton_python_backend_stub").write_text("stub")
        libraries = made.site_packages / "nvidia_pytriton.libs"
        libraries.mkdir()
        for name in ("libb64-1234.so.0d", "libcudart-1234.so.12.6"):
            (libraries / name).write_text(name)

    root = tmp_path / "env"
    monkeypatch.setenv("BERTSHIP_TRITON_ENV", str(root))
    monkeypatch.delenv("TRITON_PYTHON", raising=False)
    monkeypatch.setattr(environment, "_install_packages", install)
    return root, calls


def fake_python(path: Path, answer: str) -> Path:
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_every_package_is_pinned_and_the_needed_ones_are_there():
    lines = environment.REQUIREMENTS.read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(line.count("==") == 1 and "://" not in line for line in pins)
    wanted = {"numpy": "1.26.4", "onnxruntime": "1.32.0", "tokenizers": "0.23.3", "nvidia-pytriton": "0.7.0"}
    assert dict(line.split("==") for line in pins) == wanted | {"tritonclient": "2.51.0"}


def test_found_python_fits(no_wish):
    version = subprocess.check_output([environment.find_python(), "-c", "import sys; print(sys.version_info[:2])"])
    assert eval(version) in environment.PYTHON_VERSIONS


@pytest.mark.parametrize("value", ["/nonesuch/python", "nonesuch-python", "/bin/true", "/etc/passwd"])
def test_triton_python_that_is_no_python(monkeypatch, value):
    monkeypatch.setenv("TRITON_PYTHON", value)
    with pytest.raises(InputError, match=f"^TRITON_PYTHON={value} is no Python that runs; give .*3.11 or 3.12$"):
        environment.find_python()


def test_triton_python_that_is_too_new(monkeypatch):
    candidates = [*Path.home().glob(".pyenv/versions/3.1[3-9]*/bin/python")]
    candidates += [Path(path) for name in ("python3.13", "python3.14") if (path := shutil.which(name))]
    # pyenv's shims are found and do not run
    found = next((path for path in candidates if environment._probe(path)), None)
    if not found:
        pytest.skip("no Python newer than 3.12 on this machine")
    monkeypatch.setenv("TRITON_PYTHON", str(found))
    with pytest.raises(InputError, match=r"is Python 3\.1[34]\.\d+, not 3\.11 or 3\.12"):
        environment.find_python()


def test_triton_python_without_a_shared_library(monkeypatch, tmp_path):
    python = fake_python(tmp_path / "static", '["/usr/bin/python3.11", [3, 11, 4], "/usr", null]')
    monkeypatch.setenv("TRITON_PYTHON", str(python))
    with pytest.raises(InputError, match=r"has no libpython3\.11\.so\.1\.0, .*install libpython3\.11\)"):
        environment.find_python()


def test_no_python_fits_names_the_variable_and_what_was_seen(no_wish, monkeypatch, tmp_path):
    newer = fake_python(tmp_path / "python3.14", '["/usr/bin/python3.14", [3, 14, 1], "/usr", "/usr/lib"]')
    monkeypatch.setattr(sys, "executable", str(newer))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"python3\.14 is Python 3\.14\.1.*TRITON_PYTHON=/path") as caught:
        environment.find_python()
    assert "\n" not in str(caught.value)


def test_old_glibc_and_other_machines_are_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.31")
    with pytest.raises(InputError, match=r"needs glibc 2\.35 or newer, this machine has glibc 2\.31"):
        environment.prepare()
    monkeypatch.setattr(environment.platform, "machine", lambda: "aarch64")
    with pytest.raises(InputError, match="Linux x86-64 only"):
        environment.prepare()


def test_a_folder_with_other_files_is_not_emptied(monkeypatch, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    monkeypatch.setenv("BERTSHIP_TRITON_ENV", str(tmp_path))
    with pytest.raises(InputError, match="no environment of bertship's"):
        environment.prepare()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_steps_run_once_and_again_when_their_inputs_change(dry, monkeypatch, tmp_path):
    _, installs = dry
    said: list[str] = []
    environment.prepare(said.append)
    assert [line.split()[1] for line in said] == ["packages", "runtime", "bertship"]
    said.clear()
    environment.prepare(said.append)
    assert said == []

    changed = tmp_path / "triton.txt"
    changed.write_text(environment.REQUIREMENTS.read_text() + "# changed\n")
    monkeypatch.setattr(environment, "REQUIREMENTS", changed)
    environment.prepare(said.append)
    assert [line.split()[1] for line in said] == ["packages", "runtime", "bertship"]
    assert len(installs) == 2


def test_changed_sources_are_copied_again_and_nothing_else_is_done(dry, monkeypatch, tmp_path):
    project = tmp_path / "project"
    (project / "bertship" / "presets").mkdir(parents=True)
    (project / "bertship" / "__init__.py").write_text("")
    (project / "bertship" / "presets" / "tiny.toml").write_text("layers = 1\n")
    monkeypatch.setattr(environment, "PROJECT", project)
    site = environment.prepare().site_packages
    (project / "bertship" / "presets" / "tiny.toml").write_text("layers = 2\n")
    (project / "bertship" / "__init__.py").rename(project / "bertship" / "renamed.py")
    said: list[str] = []
    environment.prepare(said.append)
    assert [line.split()[1] for line in said] == ["bertship"]
    assert (site / "bertship" / "presets" / "tiny.toml").read_text() == "layers = 2\n"
    assert not (site / "bertship" / "__init__.py").exists()


def test_an_interrupted_set_up_is_repaired(dry, monkeypatch):
    _, installs = dry

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(environment, "_lay_out_runtime", interrupted)
        with pytest.raises(KeyboardInterrupt):
            environment.prepare()
    said: list[str] = []
    made = environment.prepare(said.append)
    assert [line.split()[1] for line in said] == ["runtime", "bertship"]
    made.tritonserver.unlink()
    shutil.rmtree(made.site_packages / "bertship")
    said.clear()
    environment.prepare(said.append)
    assert [line.split()[1] for line in said] == ["runtime", "bertship"]
    assert len(installs) == 1


def test_two_callers_set_up_once(dry):
    _, installs = dry
    with ThreadPoolExecutor(4) as callers:
        made = [caller.result() for caller in [callers.submit(environment.prepare) for _ in range(4)]]
    assert len(installs) == 1 and len(set(made)) == 1


def test_failure_of_pip_is_one_line_with_its_reason_and_the_log(monkeypatch, tmp_path):
    monkeypatch.setenv("BERTSHIP_TRITON_ENV", str(tmp_path / "env"))
    monkeypatch.delenv("TRITON_PYTHON", raising=False)
    impossible = tmp_path / "triton.txt"
    impossible.write_text("numpy==1.26.4.99\n")
    monkeypatch.setattr(environment, "REQUIREMENTS", impossible)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(BertshipError, match=r"No matching distribution.*numpy==1\.26\.4\.99") as caught:
        environment.prepare()
    log = tmp_path / "env" / "setup.log"
    assert str(log) in str(caught.value) and "\n" not in str(caught.value)
    assert "$ " in log.read_text()


def test_the_server_part_runs_there_and_nothing_heavy_is_installed(made):
    code = (
        "import importlib.util as u, json, numpy, onnxruntime, tokenizers, bertship.artifacts, bertship.errors\n"
        "heavy = [m for m in ('torch', 'transformers', 'pydantic', 'huggingface_hub', 'google') if u.find_spec(m)]\n"
        "print(json.dumps([numpy.__version__, bertship.__file__, heavy]))"
    )
    # from a folder without the checkout's own bertship
    said = subprocess.check_output([made.python, "-c", code], text=True, cwd="/", env=made.variables())
    version, home, heavy = environment.json.loads(said)
    assert version == "1.26.4" and heavy == []
    assert Path(home).is_relative_to(made.site_packages)
    source = environment.PROJECT / "bertship" / "artifacts.py"
    assert artifacts.sha256_file(source) == artifacts.sha256_file(Path(home).parent / "artifacts.py")


def test_variables_put_the_interpreter_first_and_drop_overlays(made):
    variables = made.variables({"PATH": "/usr/bin", "PYTHONPATH": "/elsewhere", "OMP_NUM_THREADS": "3"})
    assert variables["PATH"] == f"{made.root}/bin:/usr/bin"
    assert "PYTHONPATH" not in variables and variables["OMP_NUM_THREADS"] == "3"
    assert variables["LD_LIBRARY_PATH"].endswith(str(made.runtime / "lib"))


def test_perf_analyzer_runs_by_itself(made):
    assert "2.51" in subprocess.check_output([made.perf_analyzer, "--version"], text=True, stderr=subprocess.STDOUT)


def test_command_prints_the_path(made):
    done = subprocess.run([sys.executable, "-m", "serving.environment"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(made.root))


def test_a_damaged_environment_is_mended(dry):
    made = environment.prepare()
    stub = made.runtime / "backends" / "python" / "triton_python_backend_stub"
    for damage, steps in (
        (stub.unlink, ["runtime"]),
        (lambda: (made.site_packages / "bertship" / "errors.py").write_text(""), ["bertship"]),
    ):
        damage()
        said: list[str] = []
        environment.prepare(said.append)
        assert [line.split()[1] for line in said] == steps
    assert stub.is_file()
