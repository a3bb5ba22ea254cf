"""The heads: shapes, the projection of predicted positions alone, tying, and gradients that agree with transformers."""

import pytest
import torch
from torch.nn import functional as F

from bertship.config import EncoderConfig
from bertship.errors import InputError
from train.checkpoint import our_name
from train.heads import HEADS, IS_NEXT, NOT_NEXT, PretrainingModel, SentenceModel, SpanModel, TokenModel

CONFIG = EncoderConfig(
    vocab_size=64,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=40,
    max_position_embeddings=16,
    hidden_dropout_prob=0.3,
    initializer_range=0.2,
)
LENGTHS, WIDTH = [12, 5, 9], 12


def make_batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).long()
    return {
        "input_ids": torch.randint(5, CONFIG.vocab_size, mask.shape) * mask,
        "attention_mask": mask,
        "token_type_ids": torch.randint(0, 2, mask.shape) * mask,
    }


@pytest.mark.parametrize(
    ("kind", "labels", "shapes"), [("sentence", 5, [(3, 5)]), ("span", 2, [(3, 12)] * 2), ("token", 7, [(3, 12, 7)])]
)
def test_outputs_are_a_tuple_in_the_stated_order(kind: str, labels: int, shapes: list[tuple[int, ...]]) -> None:
    model = HEADS[kind](CONFIG, labels).eval()
    outputs = model(**make_batch())
    assert isinstance(outputs, tuple)
    assert [tuple(output.shape) for output in outputs] == shapes
    assert len(model.OUTPUTS) == len(shapes)


@torch.no_grad()
def test_only_predicted_positions_are_projected_and_equal_the_full_projection() -> None:
    torch.manual_seed(3)
    model, batch = PretrainingModel(CONFIG).eval(), make_batch()
    full, nsp = model(**batch)
    positions = torch.tensor([1, 4, WIDTH + 3, 2 * WIDTH, 2 * WIDTH + 8])
    seen: list[torch.Size] = []
    model.mlm.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    picked, nsp_again = model(**batch, predicted_positions=positions)
    assert full.shape == (3, WIDTH, CONFIG.vocab_size)
    assert seen == [(5, CONFIG.vocab_size)]
    torch.testing.assert_close(picked, full.flatten(0, 1)[positions], atol=1e-5, rtol=0)
    assert torch.equal(nsp, nsp_again)


def test_a_batch_without_predictions_gives_empty_logits_and_finite_gradients() -> None:
    model = PretrainingModel(CONFIG)
    mlm, nsp = model(**make_batch(), predicted_positions=torch.zeros(0, dtype=torch.int64))
    assert mlm.shape == (0, CONFIG.vocab_size)
    (mlm.sum() + nsp.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_the_projection_is_tied_to_the_word_embeddings() -> None:
    model = PretrainingModel(CONFIG).eval()
    names = [name for name, parameter in model.named_parameters() if parameter.shape == (64, 24)]
    assert names == ["encoder.embeddings.word.weight"]
    # a piece that is in no input: its vector moves its own logit alone
    batch = make_batch()
    batch["input_ids"][batch["input_ids"] == 63] = 62
    with torch.no_grad():
        before, _ = model(**batch)
        model.encoder.embeddings.word.weight[63] += 1.0
        after, _ = model(**batch)
    assert not torch.equal(before[..., 63], after[..., 63])
    torch.testing.assert_close(before[..., :63], after[..., :63], atol=1e-5, rtol=0)


def test_pretraining_gradients_agree_with_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    settings = {**CONFIG.model_dump(), "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(4)
    theirs = transformers.BertForPreTraining(transformers.BertConfig(**settings)).train()
    ours = PretrainingModel(EncoderConfig(**settings)).train()
    own = {our_name(name): p for name, p in theirs.named_parameters() if "decoder" not in name}
    ours.load_state_dict(own)

    batch = make_batch()
    positions = torch.tensor([1, 4, WIDTH + 3, 2 * WIDTH + 8])
    targets = torch.tensor([7, 9, 63, 20])
    next_labels = torch.tensor([IS_NEXT, NOT_NEXT, IS_NEXT])
    mlm, nsp = ours(**batch, predicted_positions=positions)
    loss = F.cross_entropy(mlm, targets) + F.cross_entropy(nsp, next_labels)
    loss.backward()
    labels = torch.full((3 * WIDTH,), -100).index_copy(0, positions, targets).view(3, WIDTH)
    their_loss = theirs(**batch, labels=labels, next_sentence_label=next_labels).loss
    their_loss.backward()

    torch.testing.assert_close(loss, their_loss, atol=1e-5, rtol=0)
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, own[name].grad, atol=1e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert ours.encoder.embeddings.word.weight.grad.abs().max() > 1e-2  # a comparison of something


def test_next_sentence_labels_are_those_of_released_models() -> None:
    assert (IS_NEXT, NOT_NEXT) == (0, 1)


@pytest.mark.parametrize("kind", HEADS)
def test_a_frozen_encoder_repeats_its_features_while_the_head_trains(kind: str) -> None:
    model, batch = HEADS[kind](CONFIG, 2).train(), make_batch()
    assert not torch.equal(model.encoder(**batch)[0], model.encoder(**batch)[0])
    model.freeze_encoder()
    model.eval()
    model.train()
    assert model.training
    assert torch.equal(model.encoder(**batch)[0], model.encoder(**batch)[0])
    sum(output.sum() for output in model(**batch)).backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert trained
    assert not [name for name in trained if name.startswith("encoder.")]


@pytest.mark.parametrize("model_class", [SentenceModel, TokenModel])
def test_the_classifier_input_is_dropped_in_training(model_class) -> None:
    model, batch = model_class(CONFIG, 3).train(), make_batch()
    model.encoder.eval()
    assert not torch.equal(model(**batch)[0], model(**batch)[0])


@pytest.mark.parametrize(("model_class", "count"), [(SpanModel, 3), (PretrainingModel, 1), (SentenceModel, 0)])
def test_an_impossible_number_of_labels_is_refused(model_class, count: int) -> None:
    with pytest.raises(InputError, match=f"{count} were asked for"):
        model_class(CONFIG, count)
