"""Dropout: the share, the scale, repeatable draws, gradients; and attention with it, spelled out."""

import pytest
import torch
from torch.nn import functional as F

from train.attention import attend, attend_by_steps, attention_bias
from train.dropout import Dropout, drop


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_and_the_scale_of_the_rest(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.full((1001, 999), 3.0, dtype=dtype)
    y = drop(x, p)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert (y == 0).float().mean().item() == pytest.approx(p, abs=4 * (p * (1 - p) / 1e6) ** 0.5)
    kept = y[y != 0]
    assert torch.equal(kept, kept[0].expand_as(kept))
    assert kept[0].item() == pytest.approx(3 / (1 - p), rel=1e-2 if dtype == torch.bfloat16 else 1e-3)


def test_draws_follow_the_seed_and_no_two_are_alike() -> None:
    def draws() -> list[torch.Tensor]:
        torch.manual_seed(7)
        return [drop(torch.ones(4097), 0.5) for _ in range(2)]

    (a, b), (c, d) = draws(), draws()
    assert torch.equal(a, c) and torch.equal(b, d)
    assert (a != b).float().mean().item() == pytest.approx(0.5, abs=0.05)
    # neighbours that share a number decide for themselves
    together = torch.stack([(a.view(-1)[i:4096:4] != 0).float() for i in range(4)])
    off = torch.corrcoef(together) - torch.eye(4)
    assert off.abs().max() < 0.15


def test_gradients_pass_where_elements_do() -> None:
    torch.manual_seed(1)
    x = torch.ones(1000, requires_grad=True)
    y = drop(x, 0.25)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_outside_training_nothing_is_dropped() -> None:
    x = torch.randn(10)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0).train()(x) is x
    assert (Dropout(0.5).train()(torch.ones(1000)) == 0).any()


@pytest.mark.parametrize("causal", [False, True])
def test_attention_spelled_out_is_attention(causal: bool) -> None:
    torch.manual_seed(2)
    real = (torch.arange(9) < torch.tensor([[9], [4]])).long()
    bias = attention_bias(real, causal, torch.float32)
    qkv = [torch.randn(2, 3, 9, 8, requires_grad=True) for _ in range(3)]
    results = []
    for found in (attend_by_steps(*qkv, bias, 0.0), F.scaled_dot_product_attention(*qkv, attn_mask=bias)):
        weighted = (found * torch.linspace(-1, 1, found.numel()).view_as(found)).sum()
        results.append([found, *torch.autograd.grad(weighted, qkv)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_attention_weights_are_dropped_without_bias() -> None:
    """The mean over many draws is what attention without dropout gives."""
    torch.manual_seed(3)
    real = (torch.arange(12) < torch.tensor([[12], [5]])).long()
    bias = attention_bias(real, False, torch.float32)
    q, k, v = (torch.randn(2, 2, 12, 8) for _ in range(3))
    drawn = torch.stack([attend(q, k, v, bias, 0.3) for _ in range(4000)])
    plain = attend(q, k, v, bias, 0.0)
    assert drawn.std(0).min() > 0
    error = (drawn.mean(0) - plain).abs() / (drawn.std(0) / 4000**0.5)
    assert error.max() < 5
