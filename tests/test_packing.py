"""Sequences that share rows: packed, unpadded and alone agree, forwards and backwards, in either direction."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from bertship.config import EncoderConfig, PretrainConfig
from bertship.errors import InputError
from bertship.tokenization import Row
from train.attention import Sequences, attend_jagged, attend_regathered, attention_bias
from train.batches import Batch, Counts, Updates, phases_of, where_of
from train.dataset import Sample, Span
from train.heads import MaskedLanguageModel, PretrainingModel
from train.objectives import forward, loss_sums
from train.packing import ALIGNED, LAYOUTS, lay_out, pack

CONFIG = EncoderConfig(
    vocab_size=64,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=40,
    max_position_embeddings=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    initializer_range=0.2,
)
LENGTHS = (12, 5, 32, 9, 3, 20, 31)


def make_samples(lengths: tuple[int, ...] = LENGTHS) -> list[Sample]:
    rng = np.random.default_rng(4)
    samples = []
    for number, length in enumerate(lengths):
        types = (np.arange(length) >= length // 2).astype(np.int64)
        positions = np.sort(rng.choice(np.arange(1, length), max(1, length // 6), replace=False))
        row = Row(rng.integers(5, 64, length), types, number)
        samples.append(
            Sample(row, positions, rng.integers(5, 64, len(positions)), number % 2, Span(0, 0, 1), Span(0, 1, 2))
        )
    return samples


def batch_of(samples: list[Sample], layout: str, packed_length: int = 64) -> Batch:
    return {name: torch.from_numpy(value) for name, value in lay_out(samples, layout, 0, packed_length).items()}


@given(st.lists(st.integers(1, 64), max_size=60))
def test_packing_puts_every_sample_into_one_row(lengths: list[int]) -> None:
    rows = pack(lengths, 64)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    filled = [sum(lengths[index] for index in row) for row in rows]
    assert all(total <= 64 for total in filled)
    # best fit leaves no two rows that one would hold
    assert all(a + b > 64 for i, a in enumerate(filled) for b in filled[i + 1 :])
    assert pack(lengths, 64) == rows


def models(causal: bool) -> Iterator[MaskedLanguageModel]:
    torch.manual_seed(3)
    yield MaskedLanguageModel(CONFIG.model_copy(update={"is_decoder": causal}))
    yield PretrainingModel(CONFIG.model_copy(update={"is_decoder": causal}))


def step(model: nn.Module, samples: list[Sample], layout: str) -> tuple[float, float, dict[str, torch.Tensor]]:
    model.zero_grad()
    batch = batch_of(samples, layout)
    mlm, nsp = loss_sums(forward(model, batch, None), batch)
    (mlm + nsp).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return mlm.item(), nsp.item(), gradients


@pytest.mark.parametrize("causal", [False, True])
def test_packed_unpadded_and_padded_equal_each_sample_alone(causal: bool) -> None:
    """trn.7: losses, and what the heads say, to 1e-5; gradients with them."""
    samples = make_samples()
    for model in models(causal):
        alone = [step(model, [sample], "padded") for sample in samples]
        total = {name: sum(gradients[name] for *_, gradients in alone) for name in alone[0][2]}
        for layout in LAYOUTS:
            mlm, nsp, gradients = step(model, samples, layout)
            assert mlm == pytest.approx(sum(one for one, *_ in alone), abs=1e-4)
            assert nsp == pytest.approx(sum(one for _, one, _ in alone), abs=1e-5)
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, total[name], atol=1e-4, rtol=1e-4, msg=f"{layout}: {name}")


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_hidden_vectors_and_heads_are_those_of_the_sample_alone(causal: bool) -> None:
    samples = make_samples()
    *_, model = models(causal)
    model.eval()
    for layout in ("packed", "unpadded"):
        batch = batch_of(samples, layout)
        where = where_of(batch)
        assert where is not None
        hidden, pooled = model.encoder(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"], where)
        flat, ids = hidden.flatten(0, 1), batch["input_ids"].flatten()
        seen = set()
        for number, (begin, end) in enumerate(zip(where.bounds[:-1], where.bounds[1:], strict=True)):
            places = where.tokens[begin:end]
            (owner,) = [s.row.owner for s in samples if np.array_equal(s.row.ids, ids[places].numpy())]
            seen.add(owner)
            one = batch_of([samples[owner]], "padded")
            alone, alone_pooled = model.encoder(one["input_ids"], one["attention_mask"], one["token_type_ids"])
            torch.testing.assert_close(flat[places], alone[0], atol=1e-5, rtol=0)
            torch.testing.assert_close(pooled[number], alone_pooled[0], atol=1e-5, rtol=0)
            assert int(batch["nsp_labels"][number]) == samples[owner].next_label
        assert seen == set(range(len(samples)))


def test_positions_begin_anew_for_each_packed_pair_and_run_on_through_its_separator() -> None:
    samples = make_samples()
    batch = batch_of(samples, "packed")
    where = where_of(batch)
    assert where is not None
    assert batch["input_ids"].shape[1] == 64
    assert batch["input_ids"].shape[0] < len(samples)
    for begin, end in zip(where.bounds[:-1], where.bounds[1:], strict=True):
        places = where.tokens[begin:end]
        assert where.positions.flatten()[places].tolist() == list(range(int(end - begin)))
    assert where.positions[batch["attention_mask"] == 0].sum() == 0


def attention_inputs(layout: str) -> tuple[list[torch.Tensor], Sequences]:
    where = where_of(batch_of(make_samples(), layout))
    assert where is not None
    torch.manual_seed(6)
    tokens = len(where.back)
    return [torch.randn(tokens, 3, 8, requires_grad=True) for _ in range(3)], where


@pytest.mark.parametrize("layout", ["packed", "unpadded"])
def test_the_kernel_for_jagged_sequences_equals_the_one_that_pads(layout: str) -> None:
    """What CUDA runs, on the CPU; causal is CUDA's alone here."""
    qkv, where = attention_inputs(layout)
    bias = attention_bias(where.real, False, torch.float32)
    real = torch.zeros(len(where.back)).index_fill(0, where.tokens, 1.0)[:, None, None]
    results = []
    for apart in (attend_regathered, attend_jagged):
        out = apart(*qkv, where, bias, False, 0.0) * real
        weights = torch.linspace(-1, 1, out.numel()).view_as(out)
        results.append([out, *torch.autograd.grad((out * weights).sum(), qkv)])
    for padded, jagged in zip(*results, strict=True):
        torch.testing.assert_close(padded, jagged, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [attend_regathered, attend_jagged])
def test_compiled_blocks_agree(kernel: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """What `compile` does on CUDA, on the CPU: the compiler builds for a minute."""
    from train import attention

    monkeypatch.setattr(attention, "attend_regathered", kernel)
    *_, model = models(causal=False)
    expected = step(model, make_samples(), "padded")
    for block in model.encoder.blocks:
        block.compile()
    for lengths in (LENGTHS, LENGTHS[:4]):  # another shape
        samples = make_samples(lengths)
        found = step(model, samples, "unpadded")
        if lengths == LENGTHS:
            assert found[:2] == pytest.approx(expected[:2], abs=1e-4)
            for name, gradient in found[2].items():
                torch.testing.assert_close(gradient, expected[2][name], atol=1e-4, rtol=1e-4, msg=name)


def test_both_equal_the_formula() -> None:
    (q, k, v), where = attention_inputs("packed")
    for causal in (False, True):
        bias = attention_bias(where.real, causal, torch.float32)
        ours = attend_regathered(q, k, v, where, bias, causal, 0.0)
        for begin, end in zip(where.bounds[:-1], where.bounds[1:], strict=True):
            places = where.tokens[begin:end]
            scores = torch.einsum("snk,tnk->nst", q[places], k[places]) / 8**0.5
            if causal:
                scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
            expected = torch.einsum("nst,tnk->snk", scores.softmax(-1), v[places])
            torch.testing.assert_close(ours[places], expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_causal_encoder_never_looks_ahead() -> None:
    *_, model = models(causal=True)
    batch = batch_of(make_samples((12,)), "padded")
    inputs = [batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")]
    hidden, pooled = model.encoder(*inputs)
    changed = inputs[0].clone()
    changed[0, 7] = 63 if changed[0, 7] != 63 else 62
    other, other_pooled = model.encoder(changed, *inputs[1:])
    assert torch.equal(hidden[0, :7], other[0, :7])
    assert (hidden[0, 7:] - other[0, 7:]).abs().max() > 1e-2
    assert not torch.equal(pooled, other_pooled), "the last token has seen all"


@torch.no_grad()
def test_a_sequence_longer_than_the_positions_is_refused_and_a_long_row_is_not() -> None:
    *_, model = models(causal=False)
    forward(model, batch_of(make_samples(), "unpadded"), None)
    with pytest.raises(InputError, match="33 tokens"):
        forward(model, batch_of(make_samples((4, 33)), "unpadded"), None)


class FixedSamples:
    """As much of a dataset as `Updates` asks for."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples
        self.tokenizer = type("Padding", (), {"pad_id": 0})()

    def __len__(self) -> int:
        return len(self.samples)

    def order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng(epoch).permutation(len(self.samples))

    def sample(self, index: int, epoch: int) -> Sample:
        return self.samples[index]


def gradients_of(model: nn.Module, microbatches: list[Batch], counts: Counts) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for batch in microbatches:
        mlm, nsp = loss_sums(forward(model, batch, None), batch)
        (mlm / counts.predicted + nsp / counts.pairs).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_batch_and_four_microbatches_give_equal_gradients(layout: str) -> None:
    """trn.1: the samples have from 1 to 5 predictions each."""
    *_, model = models(causal=False)
    dataset = FixedSamples(make_samples((3, 4, 5, 32, 31, 30, 9, 8)))
    found = []
    for microbatch_size in (None, 2):
        config = PretrainConfig(batch_size=8, microbatch_size=microbatch_size, packed_length=64)
        microbatches = Updates(dataset, 1, 8, config, layout)[0]  # type: ignore[arg-type]
        assert len(microbatches) == (1 if microbatch_size is None else 4)
        found.append(gradients_of(model, microbatches, Counts.of(microbatches)))
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_counts_are_those_of_the_samples(layout: str) -> None:
    samples = make_samples()
    config = PretrainConfig(batch_size=len(samples), microbatch_size=3, packed_length=64)
    counts = Counts.of(Updates(FixedSamples(samples), 1, len(samples), config, layout)[0])  # type: ignore[arg-type]
    assert sorted(counts.lengths) == sorted(LENGTHS)
    assert (counts.predicted, counts.pairs) == (sum(len(s.positions) for s in samples), len(samples))
    assert counts.is_next == sum(s.next_label == 0 for s in samples)
    assert counts.computed >= counts.tokens == sum(LENGTHS)
    assert (counts.computed < counts.tokens + 3 * ALIGNED) == (layout == "unpadded"), "three microbatches"


def test_processes_share_an_update_whatever_their_number() -> None:
    dataset = FixedSamples(make_samples((3, 4, 5, 6, 7, 8, 9, 10, 11, 12)))
    config = PretrainConfig(batch_size=6)

    def owners(update: int, processes: int) -> list[int]:
        parts = [Updates(dataset, 9, 6, config, "padded", rank, processes) for rank in range(processes)]  # type: ignore
        return sorted(sample.row.owner for part in parts for sample in part.samples(update))

    for update in range(5):
        assert owners(update, 1) == owners(update, 2) == owners(update, 3)
    with pytest.raises(InputError, match="batch_size 6 cannot be dealt evenly to 4 processes"):
        Updates(dataset, 9, 6, config, "padded", 0, 4)  # type: ignore[arg-type]


def test_phases_take_what_is_not_said_from_the_first() -> None:
    one = PretrainConfig(steps=5, batch_size=4, learning_rate=2e-3, warmup_steps=1)
    assert len(phases_of(one)) == 1
    first, second = phases_of(one.model_copy(update={"long_steps": 7, "long_learning_rate": 1e-3}))
    assert (first.steps, first.sequence_length, first.learning_rate) == (5, 128, 2e-3)
    assert (second.steps, second.sequence_length, second.batch_size) == (7, 512, 4)
    assert (second.learning_rate, second.warmup_steps) == (1e-3, 1)


def test_the_language_model_alone_has_no_pooler(tmp_path: Path) -> None:
    names = [name for name, _ in MaskedLanguageModel(CONFIG).named_parameters()]
    assert not [name for name in names if "pooler" in name or "nsp" in name]
    logits = F.softmax(
        MaskedLanguageModel(CONFIG).eval()(
            **{
                name: batch_of(make_samples(), "padded")[name]
                for name in ("input_ids", "attention_mask", "token_type_ids")
            }
        )[0],
        -1,
    )
    assert logits.shape == (len(LENGTHS), 32, 64)
