"""Attention among sequences that share rows: packed ones, and one long row without any padding.

Letters as in `train.model`, and

    R  rows, each of which may hold several sequences     L  tokens a row, so that R * L are computed
    B  sequences in all the rows together                 S  tokens of the longest of them
    T  real tokens, padding apart

Everything but attention works on each token by itself and need not know where a sequence ends. Here each sequence is
taken out of its row, gathers from itself alone, and is put back: what it gets is what it would get alone.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from train.dropout import drop

# Added to the attention scores of what must not be seen. Far below any real score, so that softmax gives an exact 0
# in FP32, and finite in FP16 (largest value 65,504), so that a row of padding alone gives numbers and no NaN.
MASK_BIAS = -1e4


class Sequences(NamedTuple):
    """Where the sequences lie in rows [R, L]; all int64. Places count along the rows, one after another: r * L + l.

    `positions` [R, L]: each token's place in its own sequence, 0 for padding; `first`, `last` [B]: places of a
    sequence's first and last token; `places` [B, S]: those of all its tokens, of any token beyond its end;
    `real` [B, S]: 1 for a token, 0 beyond the end; `back` [R * L]: each token's place in [B * S], 0 for padding;
    `tokens` [T]: places of all sequences' tokens, end to end; `bounds` [B + 1]: where each sequence begins in `tokens`.
    """

    positions: Tensor
    first: Tensor
    last: Tensor
    places: Tensor
    real: Tensor
    back: Tensor
    tokens: Tensor
    bounds: Tensor


def attention_bias(real_BS: Tensor, causal: bool, dtype: torch.dtype) -> Tensor:
    """What is added to the scores: [B, 1, 1, S], or [B, 1, S, S] where a token must not see those after it."""
    hidden_B11S = 1 - real_BS[:, None, None, :]
    if causal:
        places_S = torch.arange(real_BS.shape[1], device=real_BS.device)
        later_SS = (places_S[None, :] > places_S[:, None]).to(hidden_B11S.dtype)
        hidden_B11S = torch.maximum(hidden_B11S, later_SS)
    return hidden_B11S.to(dtype) * MASK_BIAS


def attend(q_BNSK: Tensor, k_BNSK: Tensor, v_BNSK: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """softmax(q k^T / sqrt(K) + bias) v, [B, N, S, K]; `dropout`: of the attention weights, 0 outside training."""
    bias = bias.to(q_BNSK.dtype)  # which is bf16 under autocast
    if dropout and q_BNSK.device.type == "cpu" and not torch.compiler.is_compiling():
        return attend_by_steps(q_BNSK, k_BNSK, v_BNSK, bias, dropout)
    return F.scaled_dot_product_attention(q_BNSK, k_BNSK, v_BNSK, attn_mask=bias, dropout_p=dropout)


def attend_by_steps(q_BNSK: Tensor, k_BNSK: Tensor, v_BNSK: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """As `attend`, spelled out. On a CPU PyTorch's own has no kernel with dropout and falls back to FP32 and to slow
    random numbers."""
    scaled_BNSK = q_BNSK * q_BNSK.shape[-1] ** -0.5
    scores_BNSS = torch.matmul(scaled_BNSK, k_BNSK.transpose(-2, -1)).add_(bias)
    weights_BNSS = torch.softmax(scores_BNSS, -1, dtype=scores_BNSS.dtype)
    if dropout:
        weights_BNSS = drop(weights_BNSS, dropout)
    return torch.matmul(weights_BNSS, v_BNSK)


def attend_apart(
    q_RLH: Tensor,
    k_RLH: Tensor,
    v_RLH: Tensor,
    heads: int,
    where: Sequences,
    bias: Tensor,
    causal: bool,
    dropout: float,
) -> Tensor:
    """softmax(q k^T / sqrt(K)) v of each sequence by itself, [R, L, H]; what stands at padding means nothing.

    `bias`: `attention_bias` of `where.real`, used where the device has no kernel for sequences of many lengths.
    """
    apart = attend_jagged if q_RLH.is_cuda else attend_regathered
    q_xNK, k_xNK, v_xNK = (x_RLH.flatten(0, 1).unflatten(1, (heads, -1)) for x_RLH in (q_RLH, k_RLH, v_RLH))
    gathered_xNK = apart(q_xNK, k_xNK, v_xNK, where, bias, causal, dropout)
    return gathered_xNK.flatten(1).view(q_RLH.shape)


def attend_regathered(
    q_xNK: Tensor, k_xNK: Tensor, v_xNK: Tensor, where: Sequences, bias: Tensor, causal: bool, dropout: float
) -> Tensor:
    """By way of padded rows [B, S], in attention alone: every device can. x is R * L."""
    shape = where.places.shape
    q_BNSK, k_BNSK, v_BNSK = (
        x_xNK.index_select(0, where.places.flatten()).unflatten(0, shape).transpose(1, 2)
        for x_xNK in (q_xNK, k_xNK, v_xNK)
    )
    gathered_BNSK = attend(q_BNSK, k_BNSK, v_BNSK, bias, dropout)
    return gathered_BNSK.transpose(1, 2).flatten(0, 1).index_select(0, where.back)


def attend_jagged(
    q_xNK: Tensor, k_xNK: Tensor, v_xNK: Tensor, where: Sequences, bias: Tensor, causal: bool, dropout: float
) -> Tensor:
    """On sequences end to end, with PyTorch's jagged tensors: on CUDA one flash kernel, nothing spent on padding."""
    one_row = where.positions.shape[0] == 1  # it holds the tokens end to end already, its padding after them
    longest, tokens = where.places.shape[1], where.tokens.shape[0]
    q_BNjK, k_BNjK, v_BNjK = (
        torch.nested.nested_tensor_from_jagged(
            x_xNK[:tokens] if one_row else x_xNK.index_select(0, where.tokens),
            where.bounds,
            min_seqlen=1,
            max_seqlen=longest,
        ).transpose(1, 2)
        for x_xNK in (q_xNK, k_xNK, v_xNK)
    )
    gathered_BNjK = F.scaled_dot_product_attention(q_BNjK, k_BNjK, v_BNjK, dropout_p=dropout, is_causal=causal)
    gathered_TNK = gathered_BNjK.transpose(1, 2).values()
    if one_row:
        return F.pad(gathered_TNK, (0, 0, 0, 0, 0, q_xNK.shape[0] - tokens))
    return torch.zeros_like(q_xNK).index_copy(0, where.tokens, gathered_TNK.to(q_xNK.dtype))
