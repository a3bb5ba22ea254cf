"""The Transformer encoder of BERT (Devlin et al. 2019, section 3; Vaswani et al. 2017, section 3), in reading order.

A name that holds a tensor ends with the tensor's shape, one letter an axis:

    B  batch, sequences          H  hidden_size, units of a token's vector
    S  sequence, tokens          I  intermediate_size, units inside the feed-forward layer
    N  attention heads           K  units of one head, H = N * K
    1  an axis that is broadcast

What happens to a batch:

    ids, segments  [B, S]  ->  Embeddings  ->  Block, num_hidden_layers times  ->  hidden  [B, S, H]
                                               (SelfAttention, FeedForward)         first token -> pooler -> [B, H]

The same forward pass is trained, evaluated and traced into ONNX, so nothing in it depends on the value of B or S.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertship.config import EncoderConfig
from bertship.errors import InputError

# Added to the attention scores of padding. Far below any real score, so that softmax gives an exact 0 in FP32, and
# finite in FP16 (largest value 65,504), so that a row of padding alone gives numbers and no NaN.
MASK_BIAS = -1e4


class Embeddings(nn.Module):
    """What a token is, where it is and which segment it is in: three learned vectors, summed and normalized."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        # No `padding_idx`: nothing attends to padding, so its vector needs no special value.
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.segment = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, ids_BS: Tensor, segments_BS: Tensor) -> Tensor:
        # Looked up rather than sliced off the table: a slice would tie the traced S to the table's size.
        positions_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
        x_BSH = self.word(ids_BS) + self.segment(segments_BS) + self.position(positions_S)
        return self.dropout(self.norm(x_BSH))


class SelfAttention(nn.Module):
    """Every token gathers from every real token of its sequence (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.units = config.hidden_size // config.num_attention_heads
        self.weight_dropout = config.attention_probs_dropout_prob
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_BSH: Tensor, bias_B11S: Tensor) -> Tensor:
        q_BNSK = self._split_heads(self.query(x_BSH))
        k_BNSK = self._split_heads(self.key(x_BSH))
        v_BNSK = self._split_heads(self.value(x_BSH))
        # softmax(q k^T / sqrt(K) + bias) v; the bias takes the type of q, which is bf16 under autocast
        gathered_BNSK = F.scaled_dot_product_attention(
            q_BNSK,
            k_BNSK,
            v_BNSK,
            attn_mask=bias_B11S.to(q_BNSK.dtype),
            dropout_p=self.weight_dropout if self.training else 0.0,
        )
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
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x_BSH: Tensor, bias_B11S: Tensor) -> Tensor:
        x_BSH = self.attention_norm(x_BSH + self.dropout(self.attention(x_BSH, bias_B11S)))
        return self.feed_forward_norm(x_BSH + self.dropout(self.feed_forward(x_BSH)))


class BertEncoder(nn.Module):
    """Token ids to one vector a token and, with `pooler`, one a sequence (Devlin et al. 2019, section 3).

    Weights start from `init_weights`; `train.checkpoint.load_model` brings a checkpoint's.
    """

    def __init__(self, config: EncoderConfig, pooler: bool = True) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size) if pooler else None
        init_weights(self, config.initializer_range)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Encode a batch.

        `input_ids`: int64 [B, S], below `vocab_size`; `attention_mask`: int64 [B, S], 1 for a token and 0 for
        padding; `token_type_ids`: int64 [B, S], the segment.

        Returns `hidden` [B, S, H], whose values at padding mean nothing, and `pooled` [B, H], tanh of a layer over
        the first token ([CLS]), or None without a pooler. Both are floats of the parameters' type (under autocast
        `pooled` has autocast's). A row of padding alone gives finite values and changes no other row.
        Raises InputError for what `check_inputs` finds.
        """
        if not torch.compiler.is_compiling():  # a graph has symbols for B and S; its runner checks their values
            check_inputs(self.config, input_ids, attention_mask, token_type_ids)
        hidden_BSH = self.embeddings(input_ids, token_type_ids)
        padding_B11S = 1 - attention_mask[:, None, None, :]
        bias_B11S = padding_B11S.to(hidden_BSH.dtype) * MASK_BIAS
        for block in self.blocks:
            hidden_BSH = block(hidden_BSH, bias_B11S)
        if self.pooler is None:
            return hidden_BSH, None
        first_BH = hidden_BSH[:, 0]
        return hidden_BSH, torch.tanh(self.pooler(first_BH))


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


def check_inputs(config: EncoderConfig, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> None:
    """Refuse a batch that the encoder cannot take: all three int64 [B, S], 1 <= S <= `max_position_embeddings`.

    Shapes and types alone: values would have to be fetched from the device. Raises InputError.
    """
    named = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
    for name, tensor in named.items():
        if tensor.ndim != 2 or tensor.shape != input_ids.shape or tensor.dtype != torch.int64:
            raise InputError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}; the encoder takes int64 [batch, tokens], "
                f"of one shape for {', '.join(named)}"
            )
    check_length(config, input_ids.shape[1])


def check_length(config: EncoderConfig, tokens: int) -> None:
    """Refuse a sequence of `tokens`, special ones included, that the position table does not cover: InputError."""
    if not 1 <= tokens <= config.max_position_embeddings:
        raise InputError(
            f"a sequence of {tokens} tokens does not fit the model, which takes 1 to "
            f"{config.max_position_embeddings} (max_position_embeddings); shorten or window the text"
        )
