"""The Transformer encoder of BERT (Devlin et al. 2019, section 3; Vaswani et al. 2017, section 3), in reading order.

A name that holds a tensor ends with the tensor's shape, one letter an axis:

    B  batch, sequences          H  hidden_size, units of a token's vector
    S  sequence, tokens          I  intermediate_size, units inside the feed-forward layer
    N  attention heads           K  units of one head, H = N * K
    1  an axis that is broadcast

and R, L for the rows that several sequences share (`train.attention`): there B, S stand for R, L.

What happens to a batch:

    ids, segments  [B, S]  ->  Embeddings  ->  Block, num_hidden_layers times  ->  hidden  [B, S, H]
                                               (SelfAttention, FeedForward)         first token -> pooler -> [B, H]

The same forward pass is trained, evaluated and traced into ONNX, so nothing in it depends on the value of B or S.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bertship.config import EncoderConfig
from bertship.errors import InputError
from train.attention import MASK_BIAS, Sequences, attend, attend_apart, attention_bias
from train.dropout import Dropout

__all__ = ["MASK_BIAS", "BertEncoder", "check_inputs", "check_length", "count_parameters", "init_weights"]


class Embeddings(nn.Module):
    """What a token is, where it is and which segment it is in: three learned vectors, summed and normalized."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        # No `padding_idx`: nothing attends to padding, so its vector needs no special value.
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.segment = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, ids_BS: Tensor, segments_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        if positions_BS is None:
            # Looked up rather than sliced off the table: a slice would tie the traced S to the table's size.
            positions_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device)
        x_BSH = self.word(ids_BS) + self.segment(segments_BS) + self.position(positions_BS)
        return self.dropout(self.norm(x_BSH))


class SelfAttention(nn.Module):
    """Every token gathers from every real token of its sequence (Vaswani et al. 2017, section 3.2).

    `bias` is added to the scores: 0 for what is seen, MASK_BIAS for what is not (`train.attention.attention_bias`).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.units = config.hidden_size // config.num_attention_heads
        self.weight_dropout = config.attention_probs_dropout_prob
        self.causal = config.is_decoder
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, x_BSH: Tensor, bias: Tensor, where: Sequences | None = None, asking_BQH: Tensor | None = None
    ) -> Tensor:
        """With `asking_BQH` those tokens alone gather, [B, Q, H]; all tokens of `x_BSH` otherwise."""
        q_BSH = self.query(x_BSH if asking_BQH is None else asking_BQH)
        k_BSH, v_BSH = self.key(x_BSH), self.value(x_BSH)
        dropout = self.weight_dropout if self.training else 0.0
        if where is not None:
            return self.output(attend_apart(q_BSH, k_BSH, v_BSH, self.heads, where, bias, self.causal, dropout))
        q_BNSK, k_BNSK, v_BNSK = (self._split_heads(x) for x in (q_BSH, k_BSH, v_BSH))
        gathered_BNSK = attend(q_BNSK, k_BNSK, v_BNSK, bias, dropout)
        gathered_BSH = gathered_BNSK.transpose(1, 2).flatten(2)
        return self.output(gathered_BSH)

    def _split_heads(self, x_BSH: Tensor) -> Tensor:
        x_BSNK = x_BSH.unflatten(2, (self.heads, self.units))
        return x_BSNK.transpose(1, 2)


class FeedForward(nn.Module):
    """Two layers applied to each token by itself, with the exact (erf) GELU between them."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.hidden_size, config.intermediate_size)
        self.contract = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSI = F.gelu(self.expand(x_BSH))
        return self.contract(x_BSI)


class Block(nn.Module):
    """Attention, then feed-forward; each is added to its input and the sum normalized (post-norm)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, x_BSH: Tensor, bias: Tensor, where: Sequences | None = None) -> Tensor:
        return self._add(x_BSH, self.attention(x_BSH, bias, where))

    def first(self, x_BSH: Tensor, bias: Tensor) -> Tensor:
        """The first token's vector of `forward`, [B, 1, H]: of all others keys and values alone are computed."""
        first_B1H = x_BSH[:, :1]
        return self._add(first_B1H, self.attention(x_BSH, bias, asking_BQH=first_B1H))

    def _add(self, x_BSH: Tensor, gathered_BSH: Tensor) -> Tensor:
        x_BSH = self.attention_norm(x_BSH + self.dropout(gathered_BSH))
        return self.feed_forward_norm(x_BSH + self.dropout(self.feed_forward(x_BSH)))


class BertEncoder(nn.Module):
    """Token ids to one vector a token and, with `pooler`, one a sequence (Devlin et al. 2019, section 3).

    Weights start from `init_weights`; `train.checkpoint.load_model` brings a checkpoint's. With
    `checkpoint_activations` a training pass keeps each block's input alone and computes the rest again when the
    gradient needs it (Chen et al. 2016).
    """

    def __init__(self, config: EncoderConfig, pooler: bool = True) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = False
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size) if pooler else None
        init_weights(self, config.initializer_range)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor,
        where: Sequences | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Encode a batch.

        `input_ids`: int64 [B, S], below `vocab_size`; `attention_mask`: int64 [B, S], 1 for a token and 0 for
        padding; `token_type_ids`: int64 [B, S], the segment. With `where` they are rows [R, L] that the sequences
        share.

        Returns `hidden` [B, S, H] (or [R, L, H]), whose values at padding mean nothing, and `pooled` [B, H], tanh of
        a layer over the first token ([CLS]), or None without a pooler. Left to right, the first token has seen
        nothing, and the last one ([SEP]) is taken in its place. Both are floats of the parameters' type (under
        autocast `pooled` has autocast's). A row of padding alone gives finite values and changes no other row.
        Raises InputError for what `check_inputs` finds.
        """
        hidden_BSH, bias = self._embed(input_ids, attention_mask, token_type_ids, where)
        for block in self.blocks:
            hidden_BSH = self._through(block, hidden_BSH, bias, where)
        if self.pooler is None:
            return hidden_BSH, None
        return hidden_BSH, torch.tanh(self.pooler(self._summary(hidden_BSH, attention_mask, where)))

    def pooled(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """`pooled` of `forward` alone, [B, H]: five sixths of the last block, which nothing reads, are not computed."""
        assert self.pooler is not None
        if self.config.is_decoder:
            _, pooled_BH = self(input_ids, attention_mask, token_type_ids)
            return pooled_BH
        hidden_BSH, bias = self._embed(input_ids, attention_mask, token_type_ids, None)
        *before, last = self.blocks
        assert isinstance(last, Block)
        for block in before:
            hidden_BSH = self._through(block, hidden_BSH, bias)
        return torch.tanh(self.pooler(self._through(last.first, hidden_BSH, bias)[:, 0]))

    def _embed(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, where: Sequences | None
    ) -> tuple[Tensor, Tensor]:
        """The first block's input, and the bias of every block's attention."""
        if not torch.compiler.is_compiling():  # a graph has symbols for B and S; its runner checks their values
            longest = None if where is None else where.places.shape[1]
            check_inputs(self.config, input_ids, attention_mask, token_type_ids, longest)
        hidden_BSH = self.embeddings(input_ids, token_type_ids, None if where is None else where.positions)
        real_BS = attention_mask if where is None else where.real
        return hidden_BSH, attention_bias(real_BS, self.config.is_decoder, hidden_BSH.dtype)

    def _through(self, block: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """A block's output, or of a training that keeps no activations a promise to compute it twice."""
        if self.checkpoint_activations and self.training:
            output: Tensor = checkpoint(block, *inputs, use_reentrant=False)
            return output
        return block(*inputs)

    def _summary(self, hidden_BSH: Tensor, attention_mask: Tensor, where: Sequences | None) -> Tensor:
        """The vector of each sequence's first token, [B, H], or of its last one where it is read left to right."""
        if where is not None:
            return hidden_BSH.flatten(0, 1).index_select(0, where.last if self.config.is_decoder else where.first)
        if not self.config.is_decoder:
            return hidden_BSH[:, 0]
        last_B = (attention_mask.sum(1) - 1).clamp(min=0)
        return hidden_BSH.gather(1, last_B[:, None, None].expand(-1, 1, hidden_BSH.shape[2]))[:, 0]


def init_weights(module: nn.Module, standard_deviation: float) -> None:
    """Draw the weights of every layer in `module` from N(0, `standard_deviation`²); biases 0, LayerNorm 1 and 0.

    Uses torch's global generator: seed it for a repeatable start. (Devlin et al. 2019, released code.)
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            nn.init.normal_(layer.weight, std=standard_deviation)
        if isinstance(layer, nn.LayerNorm):
            nn.init.ones_(layer.weight)
        if isinstance(layer, nn.Linear | nn.LayerNorm) and layer.bias is not None:
            nn.init.zeros_(layer.bias)


def count_parameters(module: nn.Module) -> int:
    """Number of trained and frozen values in `module`, a shared tensor counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def check_inputs(
    config: EncoderConfig,
    input_ids: Tensor,
    attention_mask: Tensor,
    token_type_ids: Tensor,
    longest: int | None = None,
) -> None:
    """Refuse a batch that the encoder cannot take: all three int64 [B, S], 1 <= S <= `max_position_embeddings`.

    `longest`: tokens of the longest sequence where several share a row; S otherwise. Shapes and types alone: values
    would have to be fetched from the device. Raises InputError.
    """
    named = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
    for name, tensor in named.items():
        if tensor.ndim != 2 or tensor.shape != input_ids.shape or tensor.dtype != torch.int64:
            raise InputError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}; the encoder takes int64 [batch, tokens], "
                f"of one shape for {', '.join(named)}"
            )
    check_length(config, input_ids.shape[1] if longest is None else longest)


def check_length(config: EncoderConfig, tokens: int) -> None:
    """Refuse a sequence of `tokens`, special ones included, that the position table does not cover: InputError."""
    if not 1 <= tokens <= config.max_position_embeddings:
        raise InputError(
            f"a sequence of {tokens} tokens does not fit the model, which takes 1 to "
            f"{config.max_position_embeddings} (max_position_embeddings); shorten or window the text"
        )
