"""train/scale.py: datatrove's executors make the corpus that one machine makes."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from documents import files_of, write_sources

from bertship import artifacts
from bertship.config import CorpusConfig
from bertship.errors import InputError
from train import corpus, scale
from train.corpus import build_corpus, fingerprint_of
from train.scale import MergeCorpus, ShardCorpus

ROOT = Path(__file__).parents[1]
CONFIG = CorpusConfig(vocab_size=512, heldout_share=0.2)
PROGRAM = """
import sys; from pathlib import Path
from datatrove.executor import LocalPipelineExecutor
from train.scale import MergeCorpus, ShardCorpus

if __name__ == "__main__":
    work, out, logs, tasks, workers = sys.argv[1:]
    shards = LocalPipelineExecutor(
        [ShardCorpus(work)], tasks=int(tasks), workers=int(workers), logging_dir=f"{logs}/shards"
    )
    merge = LocalPipelineExecutor([MergeCorpus(work, out)], logging_dir=f"{logs}/merge", depends=shards)
    merge.run()
"""


def quiet(line: str) -> None:
    assert "\n" not in line


def run_pipeline(folder: Path, work: Path, out: Path, tasks: int, workers: int) -> "subprocess.CompletedProcess[str]":
    (folder / "pipeline.py").write_text(PROGRAM)
    command = [sys.executable, str(folder / "pipeline.py"), str(work), str(out), str(folder / "logs")]
    return subprocess.run(
        [*command, str(tasks), str(workers)],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def shards_of(work: Path) -> dict[str, bytes]:
    return {p.relative_to(work).as_posix(): p.read_bytes() for p in sorted((work / "shards").rglob("*")) if p.is_file()}


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.readers.UNIT_BYTES", 1 << 16)


@pytest.mark.usefixtures("small_units")
def test_many_workers_make_the_same_shards_and_the_same_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = write_sources(tmp_path / "in")
    units = scale.prepare(sources, tmp_path / "work", CONFIG, report=quiet)
    assert units > 8
    done = run_pipeline(tmp_path, tmp_path / "work", tmp_path / "many", tasks=5, workers=3)
    assert done.returncode == 0, done.stderr[-3000:]
    kept: dict[str, bytes] = {}
    merge = corpus.merge

    def keep(plan: corpus.Plan, *rest: object) -> object:
        kept.update(shards_of(plan.work))
        return merge(plan, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(corpus, "merge", keep)
    build_corpus(sources, tmp_path / "one", CONFIG, report=quiet, workers=2)
    assert kept and shards_of(tmp_path / "work") == kept
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")
    assert artifacts.is_current(tmp_path / "many", fingerprint_of(sources, CONFIG))


@pytest.mark.usefixtures("small_units")
def test_a_task_builds_its_units_alone_and_once(tmp_path: Path) -> None:
    sources = write_sources(tmp_path / "in", 90)
    units = scale.prepare(sources, tmp_path / "work", CONFIG, report=quiet)
    list(ShardCorpus(tmp_path / "work").run(rank=1, world_size=3))
    made = {int(path.name[:6]) for path in (tmp_path / "work" / "shards").iterdir()}
    assert made == set(range(1, units, 3))
    with pytest.raises(InputError, match=r"work is not complete: unit 0, of .*a\.txt, is missing"):
        list(MergeCorpus(tmp_path / "work", tmp_path / "out").run())
    assert not (tmp_path / "out").exists()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "work" / "shards").iterdir()}
    list(ShardCorpus(tmp_path / "work").run())
    assert {path: path.stat().st_mtime_ns for path in before} == before
    list(MergeCorpus(tmp_path / "work", tmp_path / "out").run())
    assert (tmp_path / "out" / "manifest.json").is_file()


def test_a_folder_that_was_not_prepared(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no plan\.json in .*: it is no working directory of a corpus"):
        list(ShardCorpus(tmp_path).run())


def test_without_datatrove_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datatrove", None)
    monkeypatch.delitem(sys.modules, "train.scale")
    with pytest.raises(InputError, match=r"needs the package datatrove, .*'\.\[scale\]'"):
        importlib.import_module("train.scale")
