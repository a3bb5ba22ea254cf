"""What the objectives promise, against transformers and by what a loss may depend on."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from bertship.config import CorpusConfig, EncoderConfig, PretrainConfig, load_preset
from bertship.tokenization import SPECIAL_TOKENS, Tokenizer
from train.batches import Batch, Updates
from train.checkpoint import our_name
from train.corpus import Corpus, build_corpus
from train.dataset import PretrainingDataset
from train.heads import MaskedLanguageModel, PretrainingModel
from train.masking import MaskingVocabulary, mask_tokens, next_tokens
from train.objectives import OBJECTIVES, evaluate, forward, loss_sums

VOCAB = 30_522
IGNORED = -100


def make_batch(vocab_size: int, lengths: tuple[int, ...] = (40, 17, 33), seed: int = 2) -> Batch:
    torch.manual_seed(seed)
    width = max(lengths)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    places = [torch.randperm(length - 1)[: max(1, length // 7)] + 1 for length in lengths]
    positions = torch.cat([place.sort().values + row * width for row, place in enumerate(places)])
    return {
        "input_ids": torch.randint(5, vocab_size, mask.shape) * mask,
        "attention_mask": mask,
        "token_type_ids": (torch.arange(width) > width // 3).long() * mask,
        "predicted_positions": positions,
        "mlm_labels": torch.randint(5, vocab_size, positions.shape),
        "nsp_labels": torch.arange(len(lengths)) % 2,
    }


@pytest.mark.parametrize("preset", ["tiny", "mini", "small"])
def test_a_preset_agrees_with_transformers(preset: str) -> None:
    """Logits to 1e-5, losses, gradients to 1e-4; same weights, same batch, FP32."""
    transformers = pytest.importorskip("transformers")
    sizes = load_preset(preset)["model"]
    settings = EncoderConfig(
        vocab_size=VOCAB, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ).model_dump()
    torch.manual_seed(4)
    theirs = transformers.BertForPreTraining(transformers.BertConfig(**settings)).train()
    ours = PretrainingModel(EncoderConfig(**settings)).train()
    own = {our_name(name): p for name, p in theirs.named_parameters() if "decoder" not in name}
    ours.load_state_dict(own)

    batch = make_batch(VOCAB)
    outputs = forward(ours, batch, None)
    mlm, nsp = loss_sums(outputs, batch)
    loss = mlm / len(batch["mlm_labels"]) + nsp / len(batch["nsp_labels"])
    loss.backward()
    shape = batch["input_ids"].shape
    labels = torch.full((shape.numel(),), IGNORED)
    labels = labels.index_copy(0, batch["predicted_positions"], batch["mlm_labels"]).view(shape)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    found = theirs(**inputs, labels=labels, next_sentence_label=batch["nsp_labels"])
    found.loss.backward()

    picked = found.prediction_logits.flatten(0, 1)[batch["predicted_positions"]]
    torch.testing.assert_close(outputs[0], picked, atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs[1], found.seq_relationship_logits, atol=1e-5, rtol=0)
    assert loss.item() == pytest.approx(found.loss.item(), abs=1e-5)
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, own[name].grad, atol=1e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert max(p.grad.abs().max() for p in ours.parameters() if p.grad is not None) > 1e-2


SMALL = EncoderConfig(
    vocab_size=64,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=40,
    max_position_embeddings=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    initializer_range=0.2,
)


@torch.no_grad()
def test_the_loss_counts_predicted_positions_alone() -> None:
    torch.manual_seed(1)
    model, batch = PretrainingModel(SMALL).eval(), make_batch(64)
    inputs = [batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")]
    full, _ = model(*inputs)
    labels = torch.full((full.shape[0] * full.shape[1],), IGNORED)
    labels[batch["predicted_positions"]] = batch["mlm_labels"]
    expected = F.cross_entropy(full.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(loss_sums(forward(model, batch, None), batch)[0], expected, atol=1e-4, rtol=0)


def test_nsp_reads_the_first_token() -> None:
    torch.manual_seed(1)
    model, batch = PretrainingModel(SMALL), make_batch(64)
    kept: list[torch.Tensor] = []
    model.encoder.blocks[-1].register_forward_hook(
        lambda module, inputs, hidden: (hidden.retain_grad(), kept.append(hidden))[0]
    )
    _, nsp = loss_sums(forward(model, batch, None), batch)
    nsp.backward()
    assert kept[0].grad is not None
    assert (kept[0].grad[:, 0].abs().sum(1) > 0).all(), "[CLS] of every pair"
    assert (kept[0].grad[:, 1:] == 0).all(), "and nothing else"


def test_a_row_of_padding_alone_trains_and_changes_no_other() -> None:
    """trn.6: finite gradients, equal to those without the row."""
    torch.manual_seed(1)
    model = MaskedLanguageModel(SMALL)
    batch = make_batch(64, (12, 9))
    batch |= {"nsp_labels": batch["nsp_labels"][:2]}
    empty = {
        name: torch.cat([batch[name], torch.zeros_like(batch[name][:1])])
        for name in ("input_ids", "attention_mask", "token_type_ids")
    }
    gradients = []
    for inputs in (batch, batch | empty):
        model.zero_grad()
        loss_sums(forward(model, inputs, None), inputs)[0].backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        assert torch.isfinite(gradients[1][name]).all(), name
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-5, rtol=1e-4, msg=name)


def test_a_single_sentence_is_all_segment_a() -> None:
    tokenizer = Tokenizer.from_vocab([*SPECIAL_TOKENS, *"abc"], lowercase=True)
    (tokens,) = tokenizer.tokenize(["a b c"])
    assert tokenizer.row(tokens).types.tolist() == [0] * 5
    assert tokenizer.row(tokens, tokens).types.tolist() == [0] * 5 + [1] * 4


def test_left_to_right_predicts_each_next_piece() -> None:
    tokenizer = Tokenizer.from_vocab([*SPECIAL_TOKENS, *"abc"], lowercase=True)
    vocabulary = MaskingVocabulary.of(tokenizer)
    a, b, c = (tokenizer.backend.token_to_id(letter) for letter in "abc")
    ids = np.array([tokenizer.cls_id, a, b, tokenizer.sep_id, c, tokenizer.unk_id, a, tokenizer.sep_id])
    found = next_tokens(ids, vocabulary)
    assert found.ids.tolist() == ids.tolist(), "nothing is hidden"
    assert found.positions.tolist() == [0, 1, 3, 5], "not [SEP], and not what no vocabulary has"
    assert found.labels.tolist() == [a, b, c, a]


def test_whatever_is_masked_is_never_special_and_in_shares() -> None:
    tokenizer = Tokenizer.from_vocab([*SPECIAL_TOKENS, *(f"w{i}" for i in range(95))], lowercase=True)
    vocabulary, rng = MaskingVocabulary.of(tokenizer), np.random.default_rng(3)
    ids = np.concatenate([[tokenizer.cls_id], rng.integers(5, 100, 20_000), [tokenizer.sep_id]])
    found = mask_tokens(ids, rng, 0.15, (0.8, 0.1, 0.1), vocabulary)
    chosen = found.ids[found.positions]
    assert len(chosen) == 3000
    masked, kept = (chosen == tokenizer.mask_id).mean(), (chosen == found.labels).mean()
    assert masked == pytest.approx(0.8, abs=0.03)
    assert kept == pytest.approx(0.1, abs=0.02)
    assert not set(chosen[chosen != tokenizer.mask_id]) & set(tokenizer.special_ids)


def test_evaluation_is_the_same_however_it_is_laid_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    text = "\n\n".join(" ".join(f"w{rng.integers(40)} w{rng.integers(40)}." for _ in range(12)) for _ in range(20))
    (tmp_path / "a.txt").write_text(text)
    build_corpus([tmp_path / "a.txt"], tmp_path / "corpus", CorpusConfig(vocab_size=64), report=lambda line: None)
    config = PretrainConfig(sequence_length=32, packed_length=96, microbatch_size=3)
    tokenizer = Tokenizer.from_dir(tmp_path / "corpus")
    dataset = PretrainingDataset(Corpus.open(tmp_path / "corpus"), 32, config, tokenizer)
    torch.manual_seed(0)
    model = PretrainingModel(SMALL).train()
    found = [
        evaluate(model, Updates(dataset, 3, 8, config, layout), None) for layout in ("padded", "packed", "unpadded")
    ]
    assert model.training, "as it was"
    for other in found:
        assert other.pop("perplexity") == pytest.approx(math.exp(other["mlm_loss"]))
        assert other == pytest.approx(found[0], abs=1e-5)


def test_objectives_are_those_of_the_paper() -> None:
    assert {name: (o.nsp, o.causal) for name, o in OBJECTIVES.items()} == {
        "mlm+nsp": (True, False),
        "mlm": (False, False),
        "ltr": (False, True),
    }
