"""Pre-training: the loss falls, runs repeat, gradients that are not finite are skipped, nothing half is left."""

import html
import json
import math
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bertship import artifacts
from bertship.config import CorpusConfig, EncoderConfig, PretrainConfig
from bertship.errors import CheckFailed, InputError
from bertship.tokenization import Tokenizer
from train import learner as module
from train import pretrain as pretrain_module
from train.batches import Updates
from train.checkpoint import load_model
from train.corpus import Corpus, build_corpus
from train.dataset import PretrainingDataset
from train.heads import PretrainingModel, SentenceModel
from train.objectives import evaluate, loss_sums
from train.pretrain import fingerprint_of, pretrain
from train.stages import make_pretraining

MODEL = EncoderConfig(
    vocab_size=128,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=64,
)
CONFIG = PretrainConfig(
    steps=60,
    batch_size=16,
    sequence_length=32,
    learning_rate=1e-2,
    warmup_steps=6,
    heldout_batches=4,
    precision="fp32",
)
SHORT = CONFIG.model_copy(update={"steps": 4, "warmup_steps": 1, "heldout_batches": 1})


def quiet(line: str) -> None:
    assert "\n" not in line


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of few words, in which each word tells the next."""
    folder = tmp_path_factory.mktemp("pretrain")
    rng = np.random.default_rng(0)
    chains = [["stone", "rolls", "down", "green", "hills"], ["lamps", "shine", "over", "seven", "houses"]]
    documents = [
        ". ".join(" ".join(chains[rng.integers(2)]) for _ in range(rng.integers(4, 14))) + "." for _ in range(60)
    ]
    (folder / "a.txt").write_text("\n\n".join(documents))
    build_corpus([folder / "a.txt"], folder / "corpus", CorpusConfig(vocab_size=128, heldout_share=0.2), report=quiet)
    return folder / "corpus"


def read_log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_held_out_loss_falls_and_the_model_is_what_was_measured(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    manifest = pretrain(corpus, out, MODEL, CONFIG, quiet)
    metrics = manifest["metrics"]
    assert metrics["after"]["mlm_loss"] < 0.5 * metrics["before"]["mlm_loss"]
    assert metrics["after"]["mlm_accuracy"] > metrics["before"]["mlm_accuracy"]
    assert metrics["after"]["perplexity"] == pytest.approx(math.exp(metrics["after"]["mlm_loss"]))
    assert abs(metrics["is_next_share"] - 0.5) < 0.01
    assert metrics["skipped_updates"] == 0
    assert 0 <= metrics["padding_share"] < 0.5
    assert metrics["tokens_per_s"] > 0
    log = read_log(out)
    assert [line["step"] for line in log] == list(range(1, CONFIG.steps + 1))
    assert log[0]["lr"] == 0 and max(line["lr"] for line in log) == pytest.approx(CONFIG.learning_rate)
    assert artifacts.is_current(out, fingerprint_of(corpus, MODEL, CONFIG))
    assert not artifacts.is_current(out, fingerprint_of(corpus, MODEL, SHORT))

    model, found = load_model(PretrainingModel, out / "model")
    assert found.complete
    tokenizer = Tokenizer.from_dir(out / "model")
    heldout = PretrainingDataset(Corpus.open(corpus, "heldout"), CONFIG.sequence_length, CONFIG, tokenizer)
    assert metrics["order_hash"] == PretrainingDataset(Corpus.open(corpus), 32, CONFIG, tokenizer).order_hash()
    again = evaluate(model, Updates(heldout, CONFIG.heldout_batches, CONFIG.batch_size, CONFIG, "padded"), None)
    assert again == pytest.approx(metrics["after"])


def test_same_seed_gives_the_same_losses(corpus: Path, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"steps": 12})
    runs = []
    for name, seed in (("one", 1), ("two", 1), ("three", 2)):
        torch.rand(3)  # what came before must not matter
        pretrain(corpus, tmp_path / name, MODEL, config.model_copy(update={"seed": seed}), quiet)
        runs.append([(line["loss"], line["grad_norm"]) for line in read_log(tmp_path / name)])
    assert runs[0] == runs[1] != runs[2]


def test_losses_are_sums_over_what_was_predicted() -> None:
    torch.manual_seed(0)
    mlm, nsp = torch.randn(3, 7), torch.randn(2, 2)
    batch = {"mlm_labels": torch.tensor([1, 0, 6]), "nsp_labels": torch.tensor([0, 1])}
    masked, pairs = loss_sums((mlm, nsp), batch)
    by_hand = -sum(mlm.log_softmax(-1)[i, label] for i, label in enumerate([1, 0, 6]))
    assert masked.item() == pytest.approx(float(by_hand))
    assert pairs.item() == pytest.approx(float(-nsp.log_softmax(-1)[[0, 1], [0, 1]].sum()))
    none, _ = loss_sums((mlm[:0], nsp), batch | {"mlm_labels": torch.tensor([], dtype=torch.int64)})
    assert none.item() == 0
    assert loss_sums((mlm,), batch)[1].item() == 0


def spoil(monkeypatch: pytest.MonkeyPatch, bad: set[int]) -> None:
    """Make the losses of some calls infinite."""
    original, calls = module.loss_sums, iter(range(10**9))

    def spoiled(*arguments: Any) -> Any:
        mlm, nsp = original(*arguments)
        return (mlm * torch.inf if next(calls) in bad else mlm), nsp

    monkeypatch.setattr(module, "loss_sums", spoiled)


def test_updates_that_are_not_finite_are_skipped_and_counted(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, {2, 3, 7})
    manifest = pretrain(corpus, tmp_path / "run", MODEL, SHORT.model_copy(update={"steps": 10}), quiet)
    assert manifest["metrics"]["skipped_updates"] == 3
    assert math.isfinite(manifest["metrics"]["after"]["mlm_loss"])
    log = read_log(tmp_path / "run")
    assert log[2]["loss"] is None
    assert log[2]["lr"] == log[3]["lr"] == log[4]["lr"] > log[5]["lr"], "the schedule counts applied updates"


def test_ten_in_a_row_stop_the_run_with_a_diagnosis(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, set(range(5, 100)))
    with pytest.raises(
        CheckFailed, match=r"update 15: 10 gradients in a row were not finite.*lower learning_rate"
    ) as e:
        pretrain(corpus, tmp_path / "run", MODEL, SHORT.model_copy(update={"steps": 40}), quiet)
    assert "all weights are still finite" in str(e.value) and "\n" not in str(e.value)
    assert "there is no checkpoint yet" in str(e.value)
    assert not (tmp_path / "run").exists()


def test_configurations_that_do_not_fit(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sequence_length 65 is above the model's max_position_embeddings 64"):
        pretrain(corpus, tmp_path / "run", MODEL, SHORT.model_copy(update={"sequence_length": 65}), quiet)
    with pytest.raises(InputError, match="vocab_size"):
        pretrain(corpus, tmp_path / "run", MODEL.model_copy(update={"vocab_size": 16}), SHORT, quiet)
    with pytest.raises(InputError, match=r"no manifest\.json"):
        pretrain(tmp_path, tmp_path / "run", MODEL, SHORT, quiet)
    with pytest.raises(InputError, match="warm-up of 9 updates does not fit into a training of 4"):
        pretrain(corpus, tmp_path / "run", MODEL, SHORT.model_copy(update={"warmup_steps": 9}), quiet)
    with pytest.raises(InputError, match="warm-up of 9 updates does not fit into a training of 5"):
        change = {"long_steps": 5, "long_warmup_steps": 9, "long_sequence_length": 32}
        pretrain(corpus, tmp_path / "run", MODEL, SHORT.model_copy(update=change), quiet)
    with pytest.raises(InputError, match="sequence_length 512 is above"):
        pretrain(corpus, tmp_path / "run", MODEL, SHORT.model_copy(update={"long_steps": 1}), quiet)
    with pytest.raises(InputError, match="packed_length 16 is below sequence_length 32"):
        pretrain(
            corpus, tmp_path / "run", MODEL, SHORT.model_copy(update={"rows": "packed", "packed_length": 16}), quiet
        )
    assert not list(tmp_path.iterdir())


def test_one_document_is_enough(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A stone rolls. A lamp shines. Houses stand. Hills are green. Rivers run on.")
    build_corpus([tmp_path / "a.txt"], tmp_path / "corpus", CorpusConfig(vocab_size=64), report=quiet)
    said: list[str] = []
    manifest = pretrain(tmp_path / "corpus", tmp_path / "run", MODEL, SHORT, said.append)
    assert manifest["metrics"]["is_next_share"] == manifest["metrics"]["after"]["is_next_share"] == 1
    assert math.isfinite(manifest["metrics"]["after"]["mlm_loss"])


def test_a_diverged_run_names_its_last_checkpoint(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """trn.5"""
    spoil(monkeypatch, set(range(5, 100)))
    config = SHORT.model_copy(update={"steps": 40, "checkpoint_every": 4})
    with pytest.raises(CheckFailed, match=r"the last checkpoint is .*run\.training/checkpoints/step-00000012") as e:
        pretrain(corpus, tmp_path / "run", MODEL, config, quiet)
    checkpoint = tmp_path / "run.training" / "checkpoints" / "step-00000012"
    assert str(checkpoint) in str(e.value)
    assert load_model(PretrainingModel, checkpoint)[1].complete


def test_a_phase_change_resets_the_schedule_and_nothing_else(corpus: Path, tmp_path: Path) -> None:
    """trn.3"""
    config = SHORT.model_copy(
        update={"steps": 10, "warmup_steps": 2, "long_steps": 10, "long_sequence_length": 48, "long_warmup_steps": 3}
    )
    manifest = pretrain(corpus, tmp_path / "run", MODEL, config, quiet)
    rates = [line["lr"] for line in read_log(tmp_path / "run")]
    expected = [0, 0.5, 1, *(n / 8 for n in range(7, 0, -1)), 0, 1 / 3, 2 / 3, 1, *(n / 7 for n in range(6, 0, -1))]
    assert rates == pytest.approx([1e-2 * share for share in expected])
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000020" / "training.json").read_text())
    assert (state["progress"]["phase"], state["progress"]["phase_update"]) == (1, 10)
    moments = load_file(tmp_path / "run" / "checkpoints" / "step-00000020" / "optimizer.safetensors")
    steps = {name: tensor.item() for name, tensor in moments.items() if name.endswith("/step")}
    assert steps and set(steps.values()) == {20.0}, "the moments went on"
    assert manifest["metrics"]["after"]["mlm_loss"] < manifest["metrics"]["before"]["mlm_loss"]


@pytest.mark.parametrize("objective", ["mlm", "ltr"])
def test_objectives_without_next_sentences(objective: str, corpus: Path, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"objective": objective})
    manifest = pretrain(corpus, tmp_path / "run", MODEL, config, quiet)
    metrics = manifest["metrics"]
    assert metrics["after"].keys() == {"mlm_loss", "mlm_accuracy", "perplexity"}
    assert metrics["after"]["mlm_loss"] < 0.5 * metrics["before"]["mlm_loss"]
    assert metrics["is_next_share"] == 1, "the second segment always follows"
    saved = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert saved["is_decoder"] == (objective == "ltr")
    assert saved["architectures"] == ["BertLMHeadModel" if objective == "ltr" else "BertForMaskedLM"]
    # a task's model keeps the direction, and says that the pooler is its own
    model, found = load_model(SentenceModel, tmp_path / "run" / "model", 2)
    assert model.encoder.config.is_decoder == (objective == "ltr")
    assert any("pooler" in name for name in found.fresh)


def test_the_page_and_the_logs_of_a_run(corpus: Path, tmp_path: Path) -> None:
    config = SHORT.model_copy(update={"steps": 6, "checkpoint_every": 2, "keep_checkpoints": 1})
    manifest = pretrain(corpus, tmp_path / "run", MODEL, config, quiet)
    heldout = [json.loads(line) for line in (tmp_path / "run" / "heldout.jsonl").read_text().splitlines()]
    assert [line["step"] for line in heldout] == [2, 4, 6]
    assert {k: v for k, v in heldout[-1].items() if k != "step"} == manifest["metrics"]["after"]
    best = min(heldout, key=lambda line: line["mlm_loss"])["step"]
    assert manifest["metrics"]["best_checkpoint"] == best
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {f"step-{step:08d}" for step in {best, 6}}, "the last one and the best"
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("<svg") == 6 and "Conclusions" in page
    assert str(manifest["metrics"]["order_hash"]) in page
    again = tomllib.loads(html.unescape(page).split("<<'END'\n")[1].split("\nEND")[0])
    assert PretrainConfig(**again["pretrain"]) == config and EncoderConfig(**again["model"]) == MODEL
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))
    assert 0 < manifest["metrics"]["mfu"] < 1


def test_a_last_checkpoint_that_was_never_published_is_published(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrain_module, "write_report", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        pretrain(corpus, tmp_path / "run", MODEL, SHORT, quiet)
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    said: list[str] = []
    manifest = pretrain(corpus, tmp_path / "run", MODEL, SHORT, said.append)
    assert any("going on after update 4" in line for line in said)
    assert len(read_log(tmp_path / "run")) == 4
    heldout = [json.loads(line) for line in (tmp_path / "run" / "heldout.jsonl").read_text().splitlines()]
    assert manifest["metrics"]["after"] == {k: v for k, v in heldout[-1].items() if k != "step"}


def test_a_model_that_is_broken_is_neither_saved_nor_published(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """trn.5: also where the training ends before ten gradients in a row were not finite."""
    update = module.Learner.update

    def broken(self: Any, number: int, *rest: Any) -> Any:
        outcome = update(self, number, *rest)
        if number == 5:
            with torch.no_grad():
                self.model.encoder.pooler.weight.fill_(math.nan)
        return outcome

    monkeypatch.setattr(module.Learner, "update", broken)
    config = SHORT.model_copy(update={"steps": 10, "checkpoint_every": 3})
    with pytest.raises(CheckFailed, match=r"at update 6: the held-out loss is not finite .*first .*pooler") as e:
        pretrain(corpus, tmp_path / "run", MODEL, config, quiet)
    assert f"the last checkpoint is {tmp_path}/run.training/checkpoints/step-00000003; start" in str(e.value)
    assert [path.name for path in (tmp_path / "run.training" / "checkpoints").iterdir()] == ["step-00000003"]
    assert not (tmp_path / "run").exists()


def test_a_corpus_that_is_made_anew_meanwhile_changes_nothing(corpus: Path, tmp_path: Path) -> None:
    """What a training reads is the corpus that it began with, held-out part and second phase included."""
    config = SHORT.model_copy(update={"checkpoint_every": 2, "long_steps": 4, "long_sequence_length": 48})
    (tmp_path / "a.txt").write_text("\n\n".join(f"Other text {n}. It is of another kind, {n}." for n in range(99)))
    place = tmp_path / "corpus"
    shutil.copytree(corpus, place)
    pretrain(place, tmp_path / "whole", MODEL, config, quiet)

    def make_anew(line: str) -> None:
        if line.startswith("held out before"):
            build_corpus([tmp_path / "a.txt"], place, CorpusConfig(vocab_size=256), report=quiet)

    pretrain(place, tmp_path / "run", MODEL, config, make_anew)
    assert Tokenizer.from_dir(place).vocab_size != Tokenizer.from_dir(corpus).vocab_size
    assert read_log(tmp_path / "run") != []
    for name in ("mlm_loss", "nsp_loss"):
        heldout = [
            [json.loads(line)[name] for line in (tmp_path / run / "heldout.jsonl").read_text().splitlines()]
            for run in ("whole", "run")
        ]
        assert heldout[0] == heldout[1]


def test_a_part_of_one_document_is_said(tmp_path: Path) -> None:
    """pre.1: NSP accuracy on it would be 100 % for a model that always says IsNext."""
    (tmp_path / "a.txt").write_text(
        "\n\n".join(f"A stone rolls {n}. A lamp shines. Hills are green." for n in range(4))
    )
    build_corpus([tmp_path / "a.txt"], tmp_path / "corpus", CorpusConfig(vocab_size=64), report=quiet)
    said: list[str] = []
    pretrain(tmp_path / "corpus", tmp_path / "run", MODEL, SHORT, said.append)
    assert any("the held-out part of" in line and "is one document" in line for line in said)
    assert not any("the training part of" in line for line in said)
    pretrain(tmp_path / "corpus", tmp_path / "mlm", MODEL, SHORT.model_copy(update={"objective": "mlm"}), said.append)
    assert sum("is one document" in line for line in said) == 1


def test_a_model_of_one_segment_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="type_vocab_size 1; a pair of segments needs 2"):
        pretrain(corpus, tmp_path / "run", MODEL.model_copy(update={"type_vocab_size": 1}), SHORT, quiet)
    assert not list(tmp_path.iterdir())


def test_a_finished_run_is_not_replaced_without_a_word(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "nano.toml").write_text(
        "[model]\nhidden_size = 32\nnum_hidden_layers = 1\nnum_attention_heads = 2\nintermediate_size = 64\n"
        "[pretrain]\nsteps = 3\nwarmup_steps = 1\nsequence_length = 32\nbatch_size = 8\nheldout_batches = 1\n"
    )
    out, said = tmp_path / "pretrain" / "run", list[str]()
    for settings in ({}, {}, {"learning_rate": "1e-3"}):
        make_pretraining(corpus, out, str(tmp_path / "nano.toml"), settings, said.append)
    assert [line.split("; ")[0] for line in said if line.startswith(str(out))] == [
        f"{out} is up to date: nothing was made again (--force does), this is its result",
        f"{out} is finished and differs from what is asked for (corpus, settings, start or code)",
    ]
