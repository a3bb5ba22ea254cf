"""Two processes train what one does: gradients, losses, checkpoints, a sharded optimizer, the launcher."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from gloo_processes import start, together
from safetensors.torch import load_file, save_file
from training_processes import torchrun

from bertship.config import CorpusConfig, EncoderConfig, PretrainConfig
from bertship.errors import InputError
from train.batches import Updates, iterate
from train.corpus import Corpus, build_corpus
from train.dataset import PretrainingDataset
from train.distributed import Processes, join
from train.heads import PretrainingModel
from train.learner import Learner
from train.pretrain import pretrain
from train.watch import read_log

ROOT = Path(__file__).parents[1]
MODEL = EncoderConfig(
    vocab_size=128,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=64,
    hidden_dropout_prob=0.0,  # each process draws dropout of its own
    attention_probs_dropout_prob=0.0,
    initializer_range=0.2,
)
CONFIG = PretrainConfig(
    steps=12,
    batch_size=8,
    microbatch_size=2,
    sequence_length=32,
    learning_rate=1e-3,
    warmup_steps=2,
    heldout_batches=2,
    checkpoint_every=4,
    precision="fp32",
)


def quiet(line: str) -> None:
    assert "\n" not in line


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    words = ["stone", "rolls", "down", "green", "hills", "lamps", "shine", "over", "seven", "houses"]
    documents = [
        " ".join(" ".join(words[(i * k) % 10] for k in range(2, 3 + i % 7)) + "." for i in range(j, j + 9))
        for j in range(40)
    ]
    (folder / "a.txt").write_text("\n\n".join(documents))
    build_corpus([folder / "a.txt"], folder / "corpus", CorpusConfig(vocab_size=128, heldout_share=0.2), report=quiet)
    return folder / "corpus"


def write_gradients(corpus: Path, out: Path, layout: str) -> None:
    from bertship.tokenization import Tokenizer

    with join() as processes:
        mixed = CONFIG.model_copy(update={"short_sequence_share": 1.0})  # from one prediction a sample to many
        dataset = PretrainingDataset(Corpus.open(corpus), 32, mixed, Tokenizer.from_dir(corpus))
        torch.manual_seed(1)
        learner = Learner(PretrainingModel(MODEL), CONFIG, processes, None)
        updates = Updates(dataset, 3, CONFIG.batch_size, CONFIG, layout, processes.rank, processes.count)
        for counts, microbatches in iterate(updates, 2, 0, processes.device):
            assert len({len(batch["mlm_labels"]) for batch in microbatches}) > 1
            predicted, pairs = processes.sum(counts.predicted, counts.pairs)
            mlm, nsp = learner.backward(microbatches, predicted, pairs)
        losses = processes.sum(mlm.item(), nsp.item())
        gradients = {name: p.grad.clone() for name, p in learner.model.named_parameters() if p.grad is not None}
        save_file(gradients | {"losses": torch.tensor(losses)}, out / f"{processes.count}-{processes.rank}.safetensors")


@pytest.mark.parametrize("layout", ["padded", "unpadded"])
def test_two_processes_have_the_gradients_of_one(layout: str, corpus: Path, tmp_path: Path) -> None:
    """trn.1"""
    together(write_gradients, corpus, tmp_path, layout)
    write_gradients(corpus, tmp_path, layout)
    one, *two = (load_file(tmp_path / f"{name}.safetensors") for name in ("1-0", "2-0", "2-1"))
    assert max(float(gradient.abs().max()) for gradient in one.values()) > 1e-2
    for other in two:
        assert other.keys() == one.keys()
        for name, gradient in one.items():
            torch.testing.assert_close(other[name], gradient, atol=1e-6, rtol=1e-6, msg=name)


def train(corpus: Path, out: Path, config: PretrainConfig) -> None:
    pretrain(corpus, out, MODEL, config, quiet)


def losses(out: Path) -> list[list[float]]:
    return [[line[name] for name in ("loss", "grad_norm", "lr")] for line in read_log(out / "metrics.jsonl")]


def test_a_training_by_two_processes_is_that_of_one_sharded_or_not(corpus: Path, tmp_path: Path) -> None:
    train(corpus, tmp_path / "one", CONFIG)
    together(train, corpus, tmp_path / "two", CONFIG)
    sharded = CONFIG.model_copy(update={"sharded_optimizer": True})
    together(train, corpus, tmp_path / "sharded", sharded)
    assert losses(tmp_path / "two") == losses(tmp_path / "sharded")
    for ours, theirs in zip(losses(tmp_path / "one"), losses(tmp_path / "two"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("one", "two", "sharded")]
    assert [manifest["processes"] for manifest in manifests] == [1, 2, 2]
    for name in ("is_next_share", "order_hash"):
        assert manifests[0]["metrics"][name] == manifests[1]["metrics"][name]
    held_out = [manifest["metrics"]["after"]["mlm_loss"] for manifest in manifests]
    assert held_out == pytest.approx([held_out[0]] * 3, rel=1e-4)
    moments = [
        load_file(tmp_path / name / "checkpoints" / "step-00000012" / "optimizer.safetensors")
        for name in ("two", "sharded")
    ]
    assert moments[0].keys() == moments[1].keys()
    for name, moment in moments[0].items():
        assert torch.equal(moment, moments[1][name]), name


def test_two_processes_stop_together_and_go_on(corpus: Path, tmp_path: Path) -> None:
    """One of them is asked to end; both save, leave with its code, and lose nothing. Sharded moments come back."""
    config = CONFIG.model_copy(update={"sharded_optimizer": True, "steps": 24})
    together(train, corpus, tmp_path / "whole", config)
    log = tmp_path / "run.training" / "metrics.jsonl"
    running = start(train, corpus, tmp_path / "run", config)
    until = time.monotonic() + 60
    while len(read_log(log)) < 6 and time.monotonic() < until:
        time.sleep(0.002)
    os.kill(running[1].pid, signal.SIGTERM)
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [143, 143]
    assert 6 <= len(read_log(log)) < 24
    together(train, corpus, tmp_path / "run", config)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def refused(corpus: Path, out: Path) -> None:
    """What each process is told."""
    with pytest.raises(InputError) as caught:
        pretrain(corpus, out, MODEL, CONFIG, quiet)
    (out.parent / f"told-{os.environ['RANK']}").write_text(str(caught.value))


def test_what_the_main_process_refuses_is_refused_by_all(corpus: Path, tmp_path: Path) -> None:
    """Without a wait for one that has left."""
    home = tmp_path / "run.training"
    home.mkdir()
    (home / "recipe.json").write_text('{"corpus": "another"}')
    together(refused, corpus, tmp_path / "run")
    told = [(tmp_path / f"told-{rank}").read_text() for rank in range(2)]
    assert told[0] == told[1]
    assert "holds an interrupted training with another corpus" in told[0]
    assert [path.name for path in home.iterdir()] == ["recipe.json"]


def test_alone_nothing_is_asked_of_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with join() as processes:
        assert (processes.rank, processes.count, processes.main) == (0, 1, True)
        assert processes.sum(1.5, 2) == [1.5, 2]
        assert processes.agree("here") == "here"
        model = torch.nn.Linear(1, 1)
        assert processes.share(model) is model
    assert not torch.distributed.is_initialized()
    assert Processes(1, 2, torch.device("cpu")).main is False


def test_torchrun_starts_the_command(corpus: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (runs / "corpus").mkdir(parents=True)
    (runs / "corpus" / "default").symlink_to(corpus)
    preset = tmp_path / "own.toml"
    sizes = MODEL.model_dump(include={"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"})
    settings = {"steps": 4, "batch_size": 4, "sequence_length": 32, "warmup_steps": 1, "heldout_batches": 1}
    tables = {"model": sizes, "pretrain": settings}
    preset.write_text(
        "\n".join(f"[{name}]\n" + "\n".join(f"{k} = {v}" for k, v in table.items()) for name, table in tables.items())
    )
    done = torchrun("pretrain", "--preset", preset, "--runs", runs)
    manifest = json.loads(done.stdout)
    assert manifest["processes"] == 2, "one process speaks for all"
    assert (runs / "pretrain" / "default" / "report.html").is_file()
