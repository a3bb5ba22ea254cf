"""bertship/artifacts.py: directories that appear whole or not at all, whatever ends the writer."""

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from bertship.artifacts import is_current, publish, read_manifest, write_manifest, write_text
from bertship.errors import InputError

DEAD = 2**22 + 1  # above the kernel's largest process id


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_publish_appears_whole_and_replaces_whole(tmp_path):
    target = tmp_path / "deep" / "run"
    with publish(target) as staging:
        (staging / "old").write_text("1")
        assert not target.exists()
    with publish(target) as staging:
        assert names(staging) == []
        (staging / "new").write_text("2")
        assert names(target) == ["old"]
    assert names(target) == ["new"]
    assert names(target.parent) == ["run"]


@pytest.mark.parametrize("end", [ValueError, KeyboardInterrupt, SystemExit, OSError(errno.EIO, "I/O error")])
def test_publish_leaves_nothing_when_the_writer_fails(tmp_path, end):
    with publish(tmp_path / "run") as staging:
        (staging / "kept").write_text("1")
    for target in (tmp_path / "run", tmp_path / "other"):
        with pytest.raises(end if isinstance(end, type) else type(end)), publish(target) as staging:
            (staging / "half").write_text("written")
            raise end
    assert names(tmp_path) == ["run"] and names(tmp_path / "run") == ["kept"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), OSError(errno.EDQUOT, "quota"), ValueError("No space left on device (28)")]
)
def test_publish_says_that_the_disk_is_full(tmp_path, error):
    with pytest.raises(InputError, match=f"no space left while writing {tmp_path}/run"), publish(tmp_path / "run"):
        raise error
    assert names(tmp_path) == []


def test_publish_puts_the_old_one_back_when_stopped_between_the_renames(tmp_path, monkeypatch):
    with publish(tmp_path / "run") as staging:
        (staging / "old").write_text("1")
    rename = Path.rename

    def stop(self, target):
        if ".partial-" in self.name:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(KeyboardInterrupt), publish(tmp_path / "run") as staging:
        (staging / "new").write_text("2")
    assert names(tmp_path) == ["run"] and names(tmp_path / "run") == ["old"]


@pytest.mark.parametrize("name", ["run", "a[1]*"])
def test_publish_cleans_up_after_dead_writers_alone(tmp_path, name):
    for folder in (f".{name}.partial-{DEAD}", f".{name}.partial-{os.getppid()}", ".another.partial-1x"):
        (tmp_path / folder).mkdir()
    with publish(tmp_path / name):
        pass
    assert names(tmp_path) == sorted([f".{name}.partial-{os.getppid()}", ".another.partial-1x", name])


def test_publish_restores_what_a_killed_writer_had_moved_away(tmp_path):
    moved = tmp_path / f".run.replaced-{DEAD}"
    moved.mkdir()
    (moved / "old").write_text("1")
    with pytest.raises(ValueError), publish(tmp_path / "run"):
        assert names(tmp_path / "run") == ["old"]
        raise ValueError
    assert names(tmp_path) == ["run"] and names(tmp_path / "run") == ["old"]


@pytest.mark.parametrize("target", ["file", "file/run", "file/deep/run"])
def test_publish_names_the_file_that_is_in_the_way(tmp_path, target):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match=f"cannot write {tmp_path / target}.*is a file"), publish(tmp_path / target):
        pass
    assert (tmp_path / "file").read_text() == "mine" and names(tmp_path) == ["file"]


def test_publish_keeps_a_link(tmp_path):
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "run")
    with publish(tmp_path / "run") as staging:
        (staging / "new").write_text("1")
    assert (tmp_path / "run").is_symlink() and names(tmp_path / "disk" / "run") == ["new"]
    assert names(tmp_path) == ["disk", "run"] and names(tmp_path / "disk") == ["run"]


def test_publish_on_a_disk_that_is_really_full(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        with pytest.raises(InputError, match="no space left"), publish(disk / "run") as staging:
            (staging / "weights").write_bytes(b"x" * 1_000_000)
        assert names(disk) == []
        with pytest.raises(OSError) as failed:
            write_text(disk / "file", "x" * 1_000_000)
        assert failed.value.errno == errno.ENOSPC
        assert names(disk) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_write_text_is_atomic(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    write_text(path, "old é")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text("utf-8") == "old é" and names(path.parent) == ["file.txt"]
    write_text(path, "new")
    assert path.read_text("utf-8") == "new" and names(path.parent) == ["file.txt"]


@pytest.fixture
def made(tmp_path):
    with publish(tmp_path / "run") as staging:
        (staging / "deep").mkdir()
        (staging / "a.bin").write_bytes(b"12345")
        (staging / "deep" / "b.txt").write_text("b")
        write_manifest(staging, "corpus", fingerprint="f1", config={"path": tmp_path})
    return tmp_path / "run"


def test_manifest_lists_every_file(made):
    manifest = read_manifest(made, "corpus")
    assert {name: facts["bytes"] for name, facts in manifest["files"].items()} == {"a.bin": 5, "deep/b.txt": 1}
    assert {"bertship", "python", "numpy", "tokenizers"} <= manifest["versions"].keys()
    assert is_current(made, "f1")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda run: (run / "a.bin").write_bytes(b"123456"),
        lambda run: (run / "a.bin").write_bytes(b"12346"),
        lambda run: (run / "deep" / "b.txt").unlink(),
        lambda run: (run / "manifest.json").unlink(),
        lambda run: (run / "manifest.json").write_text("{"),
        lambda run: (run / "manifest.json").write_text("[]"),
        lambda run: (run / "manifest.json").write_text("{}"),
    ],
    ids=["size", "content", "missing", "no manifest", "broken manifest", "list", "empty"],
)
def test_is_current_sees_every_change(made, spoil):
    spoil(made)
    assert not is_current(made, "f1")


def test_is_current_wants_the_same_inputs(made, tmp_path):
    assert not is_current(made, "f2")
    assert not is_current(tmp_path / "absent", "f1")


def test_read_manifest_says_what_is_wrong(made, tmp_path):
    with pytest.raises(InputError, match=r"no manifest.json in .*absent.*`bertship corpus`"):
        read_manifest(tmp_path / "absent", "corpus")
    with pytest.raises(InputError, match="written by stage 'corpus'; a directory of stage 'export' is needed"):
        read_manifest(made, "export")
    for text, reason in (("{", "not JSON"), (json.dumps([1]), "no JSON object")):
        (made / "manifest.json").write_text(text)
        with pytest.raises(InputError, match=reason):
            read_manifest(made)


def test_two_writers_that_end_at_once_leave_one_whole_directory(tmp_path, monkeypatch):
    """Another writer puts its directory in place between this one's two renames."""
    target, rename, calls = tmp_path / "out", Path.rename, []

    def meanwhile(path, to):
        if Path(to) == target and not calls:
            calls.append(path)
            (tmp_path / "other").mkdir()
            (tmp_path / "other" / "theirs").write_text("whole")
            rename(tmp_path / "other", target)
        return rename(path, to)

    for existing in (False, True):
        calls.clear()
        if existing:
            assert (target / "ours").is_file()
        with monkeypatch.context() as patch, publish(target) as staging:
            (staging / "ours").write_text("whole")
            patch.setattr(Path, "rename", meanwhile)
        assert calls
        assert [path.name for path in target.iterdir()] == ["ours"]
        assert list(tmp_path.iterdir()) == [target]
