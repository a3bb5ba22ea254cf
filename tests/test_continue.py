"""Pre-training continued from a checkpoint: heads kept, vocabulary grown, what does not fit named."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bertship.config import CorpusConfig, EncoderConfig, PretrainConfig
from bertship.errors import InputError
from bertship.tokenization import SPECIAL_TOKENS, Tokenizer
from train.checkpoint import load_model, save_model
from train.corpus import build_corpus
from train.heads import PretrainingModel, SentenceModel
from train.pretrain import pretrain
from train.start import resize_vocabulary

WORDS = [f"w{i}" for i in range(40)]
PIECES = [*SPECIAL_TOKENS, *WORDS, "."]
CONFIG = EncoderConfig(
    vocab_size=48,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=64,
)
SETTINGS = PretrainConfig(
    steps=2, batch_size=4, sequence_length=32, warmup_steps=1, heldout_batches=2, learning_rate=1e-4, precision="fp32"
)


def quiet(line: str) -> None:
    assert "\n" not in line


def make_corpus(folder: Path, pieces: list[str]) -> Path:
    rng = np.random.default_rng(0)
    words = [piece for piece in pieces if piece.startswith("w")]
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(" ".join(" ".join(rng.choice(words, 6)) + "." for _ in range(9)) for _ in range(20))
    (folder / "a.txt").write_text(text)
    tokenizer = Tokenizer.from_vocab(pieces, lowercase=True)
    build_corpus([folder / "a.txt"], folder / "corpus", CorpusConfig(), tokenizer, report=quiet)
    return folder / "corpus"


def make_start(folder: Path, model_class: type = PretrainingModel, pieces: list[str] = PIECES) -> Path:
    torch.manual_seed(5)
    folder.mkdir()
    save_model(model_class(CONFIG, 2), Tokenizer.from_vocab(pieces, lowercase=True), folder)
    return folder


def test_encoder_pooler_and_heads_go_on(tmp_path: Path) -> None:
    """With a learning rate of next to nothing, what comes out is what went in."""
    start, corpus = make_start(tmp_path / "start"), make_corpus(tmp_path, PIECES)
    said: list[str] = []
    tiny = SETTINGS.model_copy(update={"learning_rate": 1e-12})
    manifest = pretrain(corpus, tmp_path / "run", None, tiny, said.append, start)
    assert any("all weights loaded" in line for line in said)
    before, after = (load_file(path / "model.safetensors") for path in (start, tmp_path / "run" / "model"))
    assert before.keys() == after.keys()
    assert {"cls.seq_relationship.weight", "bert.pooler.dense.weight"} <= after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, atol=1e-9, rtol=0, msg=name)
    assert manifest["inputs"]["init"] == str(start)
    assert manifest["metrics"]["before"]["mlm_loss"] == pytest.approx(manifest["metrics"]["after"]["mlm_loss"])


def test_what_a_checkpoint_lacks_or_has_too_much_is_listed(tmp_path: Path) -> None:
    start, corpus = make_start(tmp_path / "start", SentenceModel), make_corpus(tmp_path, PIECES)
    said: list[str] = []
    pretrain(corpus, tmp_path / "run", None, SETTINGS, said.append, start)
    (line,) = [line for line in said if "starting afresh" in line]
    for name in ("cls.predictions", "cls.seq_relationship", "left unused: classifier"):
        assert name in line


def test_more_pieces_get_rows_of_their_own(tmp_path: Path) -> None:
    more = [*PIECES, *(f"wnew{i}" for i in range(9))]
    start, corpus = make_start(tmp_path / "start"), make_corpus(tmp_path, more)
    said: list[str] = []
    tiny = SETTINGS.model_copy(update={"learning_rate": 1e-12})
    pretrain(corpus, tmp_path / "run", None, tiny, said.append, start)
    assert any("vocabulary grown from 48 rows to 56" in line for line in said)
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["vocab_size"] == 56
    before, after = (load_file(path / "model.safetensors") for path in (start, tmp_path / "run" / "model"))
    words = "bert.embeddings.word_embeddings.weight"
    torch.testing.assert_close(after[words][:48], before[words], atol=1e-9, rtol=0)
    new = after[words][48:]
    assert new.shape == (8, 16)
    assert float(new.std()) == pytest.approx(float(before[words].std()), rel=0.3)
    assert Tokenizer.from_dir(tmp_path / "run" / "model").vocab_size == len(more)


def test_a_grown_model_answers_as_before_on_the_old_pieces() -> None:
    torch.manual_seed(0)
    model = PretrainingModel(CONFIG).eval()
    assert resize_vocabulary(model, 40) is model
    grown = resize_vocabulary(model, 49).eval()
    ids = torch.randint(0, 48, (2, 9))
    inputs = (ids, torch.ones_like(ids), torch.zeros_like(ids))
    with torch.no_grad():
        for old, new in zip(model(*inputs), grown(*inputs), strict=True):
            torch.testing.assert_close(new[..., : old.shape[-1]], old, atol=1e-6, rtol=0)
        new_logits = grown(*inputs)[0][..., 48:]
        old_logits = model(*inputs)[0]
    assert old_logits.min() - 1 < new_logits.min() and new_logits.max() < old_logits.max() + 1


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    start = make_start(tmp_path / "start")
    swapped = [*SPECIAL_TOKENS, WORDS[1], WORDS[0], *WORDS[2:], "."]
    with pytest.raises(
        InputError, match=r"another vocabulary than .*: 'w0' is number 5 there, here 6; make the corpus"
    ):
        pretrain(make_corpus(tmp_path / "a", swapped), tmp_path / "run", None, SETTINGS, quiet, start)
    with pytest.raises(InputError, match=r"'\.' is number 45 there, here missing"):
        pretrain(make_corpus(tmp_path / "b", PIECES[:-2]), tmp_path / "run", None, SETTINGS, quiet, start)
    assert not (tmp_path / "run").exists() and not (tmp_path / "run.training").exists()


def test_another_direction_is_refused(tmp_path: Path) -> None:
    start, corpus = make_start(tmp_path / "start"), make_corpus(tmp_path, PIECES)
    ltr = SETTINGS.model_copy(update={"objective": "ltr"})
    with pytest.raises(InputError, match="reads in both directions"):
        pretrain(corpus, tmp_path / "run", None, ltr, quiet, start)


def test_a_checkpoint_of_a_training_is_a_warm_start(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, PIECES)
    pretrain(corpus, tmp_path / "run", CONFIG, SETTINGS, quiet)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert load_model(PretrainingModel, checkpoint)[1].complete
    manifest = pretrain(corpus, tmp_path / "more", None, SETTINGS, quiet, checkpoint)
    first = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["metrics"]["before"]["mlm_loss"] == pytest.approx(first["metrics"]["after"]["mlm_loss"])
