"""A training that is interrupted at any moment goes on as if nothing had happened: equal to the last bit."""

import json
import multiprocessing
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_processes import refused_beside, stop_at

from bertship.config import CorpusConfig, EncoderConfig, PretrainConfig
from bertship.errors import InputError
from train.corpus import build_corpus
from train.pretrain import pretrain
from train.watch import read_log

MODEL = EncoderConfig(
    vocab_size=128,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=64,
)
# dropout, two microbatches, two phases, an evaluation with each checkpoint: all that has a state
CONFIG = PretrainConfig(
    steps=40,
    batch_size=8,
    microbatch_size=4,
    sequence_length=16,
    learning_rate=1e-2,
    warmup_steps=6,
    long_steps=20,
    long_sequence_length=32,
    heldout_batches=1,
    checkpoint_every=7,
    precision="fp32",
)
TIMINGS = {"tokens_per_s"}


def quiet(line: str) -> None:
    assert "\n" not in line


def train(corpus: Path, out: Path, config: PretrainConfig) -> None:
    pretrain(corpus, out, MODEL, config, quiet)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    rng = np.random.default_rng(0)
    words = ["stone", "rolls", "down", "green", "hills", "lamps", "shine", "over", "seven", "houses"]
    documents = [". ".join(" ".join(rng.choice(words, 5)) for _ in range(rng.integers(4, 14))) + "." for _ in range(40)]
    (folder / "a.txt").write_text("\n\n".join(documents))
    build_corpus([folder / "a.txt"], folder / "corpus", CorpusConfig(vocab_size=128, heldout_share=0.2), report=quiet)
    return folder / "corpus"


@pytest.fixture(scope="module")
def processes() -> Any:
    """Fresh processes that have the libraries loaded: each run is a process of its own, as a user's is."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train.pretrain", "torch.utils.tensorboard"])
    return context


@pytest.fixture(scope="module")
def uninterrupted(corpus: Path, processes: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    process = processes.Process(target=train, args=(corpus, out, CONFIG))
    process.start()
    process.join()
    assert process.exitcode == 0
    return out


def interrupt(processes: Any, corpus: Path, out: Path, at: int, number: int) -> tuple[int, int]:
    """Run until update `at` is in the log, then send the signal; the exit code and the updates that were logged."""
    log = out.with_name(f"{out.name}.training") / "metrics.jsonl"
    process = processes.Process(target=train, args=(corpus, out, CONFIG))
    code = stop_at(process, log, at, number, 0.001)
    return code, len(read_log(log)) if log.is_file() else -1


def facts(out: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in TIMINGS} for line in read_log(out / f"{name}.jsonl")]


def assert_same(out: Path, whole: Path) -> None:
    """Logs without their timings, weights and moments, bit for bit."""
    assert len(facts(out)) == CONFIG.steps + CONFIG.long_steps
    assert facts(out) == facts(whole)
    assert facts(out, "heldout") == facts(whole, "heldout")
    for name in ("model/model.safetensors", "checkpoints/step-00000060/optimizer.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    ours, theirs = (json.loads((path / "manifest.json").read_text())["metrics"] for path in (out, whole))
    for name in ("before", "after", "order_hash", "is_next_share", "padding_share", "best_checkpoint"):
        assert ours[name] == theirs[name]


def test_killed_ten_times_at_random_steps_the_losses_are_bitwise_the_same(
    corpus: Path, processes: Any, uninterrupted: Path, tmp_path: Path
) -> None:
    """trn.2"""
    out, rng = tmp_path / "run", random.Random(time.time_ns())
    killed_at = []
    for _ in range(10):
        saved = [int(path.name[5:]) for path in (tmp_path / "run.training" / "checkpoints").glob("step-*")]
        step = min(max(saved, default=0) + rng.randint(1, 9), CONFIG.steps + CONFIG.long_steps - 1)
        code, logged = interrupt(processes, corpus, out, step, signal.SIGKILL)
        assert code == -signal.SIGKILL, f"killed at {killed_at}, then at {step}"
        assert logged >= step
        killed_at.append(logged)
        assert not out.exists(), "nothing is published before the end"
    assert len(set(killed_at)) > 1
    train(corpus, out, CONFIG)
    assert_same(out, uninterrupted)
    assert not (tmp_path / "run.training").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 1)])
def test_asked_to_end_it_saves_where_it_is(
    number: int, code: int, corpus: Path, processes: Any, uninterrupted: Path, tmp_path: Path
) -> None:
    """Ctrl-C is a KeyboardInterrupt, with which a plain Python process ends with 1."""
    out = tmp_path / "run"
    found, logged = interrupt(processes, corpus, out, 10, number)
    assert found == code
    checkpoint = tmp_path / "run.training" / "checkpoints" / f"step-{logged:08d}"
    assert json.loads((checkpoint / "training.json").read_text())["progress"]["update"] == logged
    train(corpus, out, CONFIG)
    assert_same(out, uninterrupted)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    corpus: Path, processes: Any, uninterrupted: Path, tmp_path: Path
) -> None:
    """trn.9"""
    out = tmp_path / "run"
    interrupt(processes, corpus, out, 23, signal.SIGKILL)
    checkpoints = sorted((tmp_path / "run.training" / "checkpoints").glob("step-*"))
    assert len(checkpoints) >= 2
    (checkpoints[-1] / "optimizer.safetensors").write_bytes(b"cut short")
    said: list[str] = []
    pretrain(corpus, out, MODEL, CONFIG, said.append)
    assert any("WARNING" in line and checkpoints[-1].name in line and "passed over" in line for line in said)
    assert any(f"going on after update {int(checkpoints[-2].name[5:])}" in line for line in said)
    assert_same(out, uninterrupted)


def test_an_interrupted_training_is_not_mixed_with_another(corpus: Path, processes: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    interrupt(processes, corpus, out, 9, signal.SIGTERM)
    other = CONFIG.model_copy(update={"learning_rate": 2e-2})
    with pytest.raises(InputError, match=r"interrupted training with another pretrain\.learning_rate \(0\.01 there"):
        pretrain(corpus, out, MODEL, other, quiet)
    assert list((tmp_path / "run.training" / "checkpoints").glob("step-*")), "nothing of it is touched"
    pretrain(corpus, out, MODEL, other.model_copy(update={"steps": 8, "long_steps": 0}), quiet, restart=True)
    assert len(facts(out)) == 8


def test_what_the_machine_alone_decides_may_change(
    corpus: Path, processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    _, logged = interrupt(processes, corpus, out, 9, signal.SIGTERM)
    other = CONFIG.model_copy(update={"rows": "packed", "packed_length": 64, "microbatch_size": None})
    monkeypatch.setattr("train.pretrain.code_of", lambda: "other")
    said: list[str] = []
    pretrain(corpus, out, MODEL, other.model_copy(update={"checkpoint_every": 50}), said.append)
    assert any(f"going on after update {logged}" in line and "the code has changed since" in line for line in said)
    assert [line["step"] for line in facts(out)] == list(range(1, 61))
    assert logged < 60


def train_slowly(corpus: Path, out: Path, config: PretrainConfig) -> None:
    def wait(line: str) -> None:
        time.sleep(0.1 if "held out at" in line else 0)

    pretrain(corpus, out, MODEL, config, wait)


def test_two_trainings_of_one_name(corpus: Path, processes: Any, tmp_path: Path) -> None:
    """The second is refused, whatever it was asked for, and leaves the first alone; a killed one holds nothing."""
    out, log = tmp_path / "run", tmp_path / "run.training" / "metrics.jsonl"
    running = processes.Process(target=train_slowly, args=(corpus, out, CONFIG))
    refused_beside(running, log, lambda restart: pretrain(corpus, out, MODEL, CONFIG, quiet, restart=restart))
    pretrain(corpus, out, MODEL, CONFIG, quiet)
    assert [line["step"] for line in facts(out)] == list(range(1, 61))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
