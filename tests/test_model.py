"""The encoder: padding that changes nothing, sizes of the published models, a graph without baked shapes."""

import pytest
import torch

from bertship.config import EncoderConfig, load_preset
from bertship.errors import InputError
from train.model import MASK_BIAS, BertEncoder, check_length, count_parameters

CONFIG = EncoderConfig(
    vocab_size=64,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=40,
    max_position_embeddings=16,
    initializer_range=0.2,  # wide, so that a fault in any layer shows in the outputs
)
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def make_encoder(pooler: bool = True) -> BertEncoder:
    torch.manual_seed(1)
    return BertEncoder(CONFIG, pooler).eval()


def make_batch(lengths: list[int], width: int) -> dict[str, torch.Tensor]:
    """Random rows of the given lengths, padded to `width`; padding holds id 0 and segment 0."""
    torch.manual_seed(2)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return {
        "input_ids": torch.randint(5, CONFIG.vocab_size, mask.shape) * mask,
        "attention_mask": mask,
        "token_type_ids": torch.randint(0, 2, mask.shape) * mask,
    }


@torch.no_grad()
def test_a_padded_batch_equals_each_row_alone() -> None:
    encoder, lengths = make_encoder(), [12, 5, 1, 9]
    batch = make_batch(lengths, 16)
    hidden, pooled = encoder(**batch)
    for i, length in enumerate(lengths):
        alone_hidden, alone_pooled = encoder(**{name: value[i : i + 1, :length] for name, value in batch.items()})
        torch.testing.assert_close(hidden[i, :length], alone_hidden[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(pooled[i], alone_pooled[0], atol=1e-5, rtol=0)


@torch.no_grad()
def test_what_stands_in_the_padding_is_never_seen() -> None:
    encoder, batch = make_encoder(), make_batch([6, 10], 12)
    hidden, _ = encoder(**batch)
    other = {**batch, "input_ids": batch["input_ids"] + 7 * (1 - batch["attention_mask"])}
    other_hidden, _ = encoder(**other)
    real = batch["attention_mask"].bool()
    assert torch.equal(hidden[real], other_hidden[real])
    assert not torch.equal(hidden[~real], other_hidden[~real])  # the change did reach the encoder


@pytest.mark.parametrize("autocast", [False, True])
@torch.no_grad()
def test_a_row_of_padding_alone_is_finite_and_changes_no_other(autocast: bool) -> None:
    encoder, batch = make_encoder(), make_batch([8, 0, 3], 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden, pooled = encoder(**batch)
        without, _ = encoder(**{name: value[[0, 2]] for name, value in batch.items()})
    assert torch.isfinite(hidden).all()
    assert torch.isfinite(pooled).all()
    real = batch["attention_mask"][[0, 2]].bool()
    tolerance = 0.05 if autocast else 1e-5
    torch.testing.assert_close(hidden[[0, 2]][real], without[real], atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mask_constant_is_finite_and_silences_in_half_precision(dtype: torch.dtype) -> None:
    bias = torch.tensor([0.0, MASK_BIAS]).to(dtype)
    assert torch.isfinite(2 * bias).all()  # with room for a score beside it
    assert torch.equal(torch.softmax(bias, 0), torch.tensor([1.0, 0.0], dtype=dtype))


@torch.no_grad()
def test_the_bias_is_given_in_the_type_of_the_query(monkeypatch) -> None:
    """The CPU would take a mixture; kernels of GPUs need not."""
    attend, seen = torch.nn.functional.scaled_dot_product_attention, []

    def record(query, key, value, attn_mask, dropout_p):
        seen.append((query.dtype, attn_mask.dtype))
        return attend(query, key, value, attn_mask, dropout_p)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    with torch.autocast("cpu", torch.bfloat16):
        make_encoder()(**make_batch([8, 3], 8))
    assert seen == [(torch.bfloat16, torch.bfloat16)] * CONFIG.num_hidden_layers


@torch.no_grad()
def test_half_precision_stays_finite() -> None:
    hidden, pooled = make_encoder().half()(**make_batch([8, 0, 3], 8))
    assert hidden.dtype == torch.float16
    assert torch.isfinite(hidden).all()
    assert torch.isfinite(pooled).all()


@torch.no_grad()
def test_autocast_is_close_to_fp32() -> None:
    encoder, batch = make_encoder(), make_batch([8, 3], 8)
    with torch.autocast("cpu", torch.bfloat16):
        hidden, _ = encoder(**batch)
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(hidden[real], encoder(**batch)[0][real], atol=0.1, rtol=0)


@torch.no_grad()
def test_position_segment_and_word_each_count() -> None:
    encoder, batch = make_encoder(), make_batch([8, 8], 8)
    hidden, _ = encoder(**batch)
    flipped, _ = encoder(**{**batch, "token_type_ids": 1 - batch["token_type_ids"]})
    reversed_, _ = encoder(**{name: value.flip(1) for name, value in batch.items()})
    assert (hidden - flipped).abs().max() > 1e-2
    assert (hidden - reversed_.flip(1)).abs().max() > 1e-2


@torch.no_grad()
def test_dropout_in_training_alone() -> None:
    encoder, batch = make_encoder(), make_batch([8, 3], 8)
    assert torch.equal(encoder(**batch)[0], encoder(**batch)[0])
    encoder.train()
    assert not torch.equal(encoder(**batch)[0], encoder(**batch)[0])


@torch.no_grad()
def test_attention_weights_are_dropped_in_training_alone() -> None:
    torch.manual_seed(1)
    encoder = BertEncoder(CONFIG.model_copy(update={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.5}))
    batch = make_batch([8, 3], 8)
    assert not torch.equal(encoder(**batch)[0], encoder(**batch)[0])
    encoder.eval()
    assert torch.equal(encoder(**batch)[0], encoder(**batch)[0])


def test_without_pooler_there_is_no_pooled_vector() -> None:
    encoder = make_encoder(pooler=False)
    assert encoder(**make_batch([4], 4))[1] is None
    assert not [name for name, _ in encoder.named_parameters() if "pooler" in name]


@pytest.mark.parametrize(("preset", "expected"), [("base", 109_482_240), ("large", 335_141_888)])
def test_published_sizes(preset: str, expected: int) -> None:
    config = EncoderConfig(**{**load_preset(preset)["model"], "vocab_size": 30_522})
    with torch.device("meta"):
        assert count_parameters(BertEncoder(config)) == expected


def test_initial_weights() -> None:
    torch.manual_seed(3)
    config = CONFIG.model_copy(update={"hidden_size": 120, "initializer_range": 0.02})
    for name, parameter in BertEncoder(config).named_parameters():
        if "norm" in name and name.endswith("weight"):
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif parameter.numel() > 1000:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name
            assert abs(parameter.mean().item()) < 0.003, name


@pytest.mark.parametrize("tokens", [0, 17])
def test_a_length_beyond_the_positions_is_one_clear_line(tokens: int) -> None:
    with pytest.raises(InputError, match=rf"sequence of {tokens} tokens .* 1 to 16"):
        check_length(CONFIG, tokens)
    with pytest.raises(InputError, match=f"sequence of {tokens} tokens"):
        make_encoder()(**make_batch([tokens], tokens))


@pytest.mark.parametrize("change", [lambda ids: ids[:, :-1], lambda ids: ids[0], lambda ids: ids.float()])
def test_inputs_of_wrong_shape_or_type_are_named(change) -> None:
    batch = make_batch([6, 4], 6)
    with pytest.raises(InputError, match=r"token_type_ids is .* int64"):
        make_encoder()(**{**batch, "token_type_ids": change(batch["token_type_ids"])})


@torch.no_grad()
def test_a_traced_graph_takes_other_batches_and_lengths() -> None:
    """`torch.export` raises where the forward pass ties B or S to the traced values."""
    encoder = make_encoder()
    batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence", max=CONFIG.max_position_embeddings)
    traced = torch.export.export(
        encoder,
        (),
        kwargs=make_batch([8, 3], 8),
        dynamic_shapes={name: {0: batch, 1: sequence} for name in INPUTS},
    ).module()
    for lengths, width in (([5], 5), ([16, 2, 7], 16)):
        other = make_batch(lengths, width)
        for ours, theirs in zip(encoder(**other), traced(**other), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_onnx_graph_agrees_at_any_shape(tmp_path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    encoder, path = make_encoder(), tmp_path / "encoder.onnx"
    program = torch.onnx.export(
        encoder,
        (),
        kwargs=make_batch([8, 3], 8),
        dynamo=True,
        opset_version=18,
        dynamic_shapes={name: {0: "batch", 1: "sequence"} for name in INPUTS},
        output_names=["hidden", "pooled"],
        verbose=False,
    )
    program.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for lengths, width in (([5], 5), ([16, 0, 7], 16), ([1], 1)):
        batch = make_batch(lengths, width)
        outputs = session.run(None, {name: value.numpy() for name, value in batch.items()})
        for ours, theirs in zip(encoder(**batch), outputs, strict=True):
            torch.testing.assert_close(ours, torch.from_numpy(theirs), atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_causal_encoder_is_traced_too() -> None:
    torch.manual_seed(1)
    encoder = BertEncoder(CONFIG.model_copy(update={"is_decoder": True})).eval()
    batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence", max=CONFIG.max_position_embeddings)
    traced = torch.export.export(
        encoder,
        (),
        kwargs=make_batch([8, 3], 8),
        dynamic_shapes={name: {0: batch, 1: sequence} for name in INPUTS},
    ).module()
    for lengths, width in (([5], 5), ([16, 0, 7], 16)):
        other = make_batch(lengths, width)
        for ours, theirs in zip(encoder(**other), traced(**other), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_a_causal_encoder_agrees_with_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from train.checkpoint import our_name

    config = CONFIG.model_copy(update={"is_decoder": True})
    theirs = transformers.BertModel(transformers.BertConfig(**config.model_dump()), add_pooling_layer=False).eval()
    ours = BertEncoder(config, pooler=False).eval()
    ours.load_state_dict({our_name(f"bert.{n}").removeprefix("encoder."): p for n, p in theirs.named_parameters()})
    batch = make_batch([12, 5, 9], 12)
    with torch.no_grad():
        real = batch["attention_mask"].bool()
        expected = theirs(**batch).last_hidden_state[real]
        torch.testing.assert_close(ours(**batch)[0][real], expected, atol=1e-5, rtol=0)


def test_checkpointed_activations_change_no_gradient() -> None:
    gradients = []
    for kept in (False, True):
        encoder = make_encoder().train()
        encoder.checkpoint_activations = kept
        torch.manual_seed(9)  # dropout is drawn again as it was
        hidden, pooled = encoder(**make_batch([12, 5], 12))
        (hidden.sum() + pooled.sum()).backward()
        gradients.append({name: parameter.grad for name, parameter in encoder.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("lengths", [[12, 5, 1, 9], [16]])
@pytest.mark.parametrize("kept", [True, False])
def test_the_pooled_vector_alone_is_that_of_the_whole_pass(lengths: list[int], kept: bool) -> None:
    """Values and every weight's gradient, though most of the last block is not computed."""
    still = CONFIG.model_copy(update={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
    found = []
    for alone in (False, True):
        torch.manual_seed(1)
        encoder = BertEncoder(still).train()
        encoder.checkpoint_activations = not kept
        batch = make_batch(lengths, 16)
        pooled = encoder.pooled(**batch) if alone else encoder(**batch)[1]
        pooled.square().sum().backward()
        found.append([pooled.detach(), *(parameter.grad for parameter in encoder.parameters())])
    for whole, alone in zip(*found, strict=True):
        torch.testing.assert_close(alone, whole, atol=1e-5, rtol=1e-4)


def test_the_pooled_vector_alone_computes_the_last_feed_forward_for_one_token() -> None:
    encoder, seen = make_encoder(), []
    for block in encoder.blocks:
        block.feed_forward.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    with torch.no_grad():
        encoder.pooled(**make_batch([12, 5], 12))
    assert seen == [12, 1]


@torch.no_grad()
def test_the_pooled_vector_alone_of_a_causal_encoder_is_the_last_tokens() -> None:
    torch.manual_seed(1)
    encoder = BertEncoder(CONFIG.model_copy(update={"is_decoder": True})).eval()
    batch = make_batch([12, 5], 12)
    assert torch.equal(encoder.pooled(**batch), encoder(**batch)[1])
