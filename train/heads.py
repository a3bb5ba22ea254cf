"""What is asked of the encoder: the pre-training objectives, and one head for each kind of task.

Letters of shapes as in `train.model`, and C labels, M predicted positions, V pieces of the vocabulary.

Every model here takes `input_ids`, `attention_mask` and `token_type_ids` (int64 [B, S]) and returns a tuple of
tensors in the order of its `OUTPUTS`. They are logits: softmax belongs to the loss and to the decoder.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertship.config import EncoderConfig
from bertship.errors import InputError
from train.attention import Sequences
from train.model import BertEncoder, init_weights

# Labels of next sentence prediction, in the order that every released BERT has.
IS_NEXT = 0
NOT_NEXT = 1


class HeadedModel(nn.Module):
    """An encoder with a head: `encoder`, `config`, `num_labels` and the facts that other modules read."""

    OUTPUTS: ClassVar[tuple[str, ...]]  # names of the returned tensors, also those of the exported graph
    PER_TOKEN: ClassVar[bool] = False  # whether the outputs have one element a token
    ARCHITECTURE: ClassVar[str]  # transformers' class with the same tensors
    SAME_HEAD: ClassVar[tuple[str, ...]] = ()  # its other classes whose head has the same meaning
    NUM_LABELS: ClassVar[int | None] = None  # where the kind of head fixes it

    def __init__(self, config: EncoderConfig, num_labels: int, pooler: bool = True) -> None:
        super().__init__()
        if num_labels < 1 or num_labels != (self.NUM_LABELS or num_labels):
            raise InputError(
                f"{type(self).__name__} has {self.NUM_LABELS or 'one or more'} labels, {num_labels} were asked for"
            )
        self.config = config
        self.num_labels = num_labels
        self.encoder_frozen = False
        self.encoder = BertEncoder(config, pooler)

    def freeze_encoder(self) -> None:
        """Train the head alone: the encoder gets no gradient and, dropout being off, repeats its features exactly."""
        self.encoder_frozen = True
        self.encoder.requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> "HeadedModel":
        """Set the mode; a frozen encoder stays in evaluation mode, or its dropout would blur the features."""
        super().train(mode)
        if self.encoder_frozen:
            self.encoder.eval()
        return self


class MaskedLanguageHead(nn.Module):
    """Vectors to scores over the vocabulary; the projection is the word embeddings, transposed (section A.2)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden_xH: Tensor, words_VH: Tensor) -> Tensor:
        """`hidden_xH` with any leading axes to logits with the same ones and V."""
        hidden_xH = self.norm(F.gelu(self.dense(hidden_xH)))
        return F.linear(hidden_xH, words_VH, self.bias)


class MaskedLanguageModel(HeadedModel):
    """A language model on the encoder: masked, or left to right where `config.is_decoder` says so.

    (Devlin et al. 2019, section 3.1; the rows "No NSP" and "LTR & No NSP" of section 5.1.)
    """

    OUTPUTS: ClassVar[tuple[str, ...]] = ("mlm_logits",)
    ARCHITECTURE: ClassVar[str] = "BertForMaskedLM"
    NUM_LABELS: ClassVar[int | None] = 1  # the head has the vocabulary's size, not a number of labels
    POOLER: ClassVar[bool] = False

    def __init__(self, config: EncoderConfig, num_labels: int = 1) -> None:
        super().__init__(config, num_labels, pooler=self.POOLER)
        self.mlm = MaskedLanguageHead(config)
        init_weights(self.mlm, config.initializer_range)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor,
        predicted_positions: Tensor | None = None,
        where: Sequences | None = None,
    ) -> tuple[Tensor, ...]:
        """`mlm_logits` [M, V] at `predicted_positions` (int64 [M], each b * S + s), or [B, S, V] for None.

        Projecting the predicted tenth of the tokens, not all, is most of what pre-training a small encoder saves: the
        vocabulary is wider than everything else. With `where`, sequences share rows (`train.attention`).
        """
        hidden_BSH, _ = self.encoder(input_ids, attention_mask, token_type_ids, where)
        return (self.predict(hidden_BSH, predicted_positions),)

    def predict(self, hidden_BSH: Tensor, predicted_positions: Tensor | None) -> Tensor:
        """Scores over the vocabulary, as `forward` describes them."""
        predicted_xH = hidden_BSH
        if predicted_positions is not None:
            predicted_xH = hidden_BSH.flatten(0, 1).index_select(0, predicted_positions)
        logits_xV: Tensor = self.mlm(predicted_xH, self.encoder.embeddings.word.weight)
        return logits_xV


class PretrainingModel(MaskedLanguageModel):
    """Masked language model and next sentence prediction on one encoder (Devlin et al. 2019, section 3.1)."""

    OUTPUTS = ("mlm_logits", "nsp_logits")
    ARCHITECTURE = "BertForPreTraining"
    NUM_LABELS = 2  # IS_NEXT, NOT_NEXT
    POOLER = True

    def __init__(self, config: EncoderConfig, num_labels: int = 2) -> None:
        super().__init__(config, num_labels)
        self.nsp = nn.Linear(config.hidden_size, num_labels)
        init_weights(self.nsp, config.initializer_range)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor,
        predicted_positions: Tensor | None = None,
        where: Sequences | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`mlm_logits` as of MaskedLanguageModel, and `nsp_logits` [B, 2]: IS_NEXT, NOT_NEXT."""
        hidden_BSH, pooled_BH = self.encoder(input_ids, attention_mask, token_type_ids, where)
        return self.predict(hidden_BSH, predicted_positions), self.nsp(pooled_BH)


class SentenceModel(HeadedModel):
    """One decision a sequence: classes, one regression value, or the score of one choice (sections 4.1 and 4.4)."""

    OUTPUTS = ("logits",)
    ARCHITECTURE = "BertForSequenceClassification"
    SAME_HEAD = ("BertForMultipleChoice",)  # one label; the softmax over a question's choices is outside the model

    def __init__(self, config: EncoderConfig, num_labels: int) -> None:
        super().__init__(config, num_labels, pooler=True)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, num_labels)
        init_weights(self.classifier, config.initializer_range)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor]:
        """`logits` [B, C]."""
        pooled_BH = self.encoder.pooled(input_ids, attention_mask, token_type_ids)
        return (self.classifier(self.dropout(pooled_BH)),)


class SpanModel(HeadedModel):
    """Scores of each token as the first and as the last of an answer (sections 4.2 and 4.3)."""

    PER_TOKEN = True
    OUTPUTS = ("start_logits", "end_logits")
    ARCHITECTURE = "BertForQuestionAnswering"
    NUM_LABELS = 2  # start, end

    def __init__(self, config: EncoderConfig, num_labels: int = 2) -> None:
        super().__init__(config, num_labels, pooler=False)
        self.span = nn.Linear(config.hidden_size, num_labels)
        init_weights(self.span, config.initializer_range)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor, Tensor]:
        """`start_logits` and `end_logits`, each [B, S]; those at padding mean nothing."""
        hidden_BSH, _ = self.encoder(input_ids, attention_mask, token_type_ids)
        start_BS, end_BS = self.span(hidden_BSH).unbind(-1)
        return start_BS, end_BS


class TokenModel(HeadedModel):
    """One label a token, as in named entity recognition (section 5.3)."""

    PER_TOKEN = True
    OUTPUTS = ("logits",)
    ARCHITECTURE = "BertForTokenClassification"

    def __init__(self, config: EncoderConfig, num_labels: int) -> None:
        super().__init__(config, num_labels, pooler=False)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, num_labels)
        init_weights(self.classifier, config.initializer_range)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor]:
        """`logits` [B, S, C]; those at padding mean nothing."""
        hidden_BSH, _ = self.encoder(input_ids, attention_mask, token_type_ids)
        return (self.classifier(self.dropout(hidden_BSH)),)


# By a task's head kind; each is made by `HEADS[kind](config, num_labels)`.
HEADS: dict[str, type[SentenceModel] | type[SpanModel] | type[TokenModel]] = {
    "sentence": SentenceModel,
    "span": SpanModel,
    "token": TokenModel,
}
