"""Operations of an update, counted by hand and by PyTorch."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bertship.config import EncoderConfig
from train.flops import matrix_product_rate, training_flops
from train.heads import PretrainingModel

CONFIG = EncoderConfig(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


def test_they_are_those_that_pytorch_counts() -> None:
    model, length, batch = PretrainingModel(CONFIG), 24, 3
    ids = torch.randint(0, 96, (batch, length))
    positions = torch.arange(0, batch * length, 6)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        mlm, nsp = model(ids, torch.ones_like(ids), torch.zeros_like(ids), positions)
        (mlm.sum() + nsp.sum()).backward()
    ours = training_flops(CONFIG, [length] * batch, len(positions))
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_padding_counts_for_nothing() -> None:
    assert training_flops(CONFIG, [8, 24], 4) < training_flops(CONFIG, [24, 24], 4)
    assert training_flops(CONFIG, [8], 2, nsp=False) < training_flops(CONFIG, [8], 2)


def test_the_machine_has_a_rate() -> None:
    assert matrix_product_rate(torch.device("cpu"), None, budget_s=0.01) > 1e8
