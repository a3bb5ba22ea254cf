"""Feature-based use: a frozen encoder, chosen layers, and a head of its own (Devlin et al. 2019, section 5.3, table 7).

The encoder is in evaluation mode and gets no gradient, so a row's features never change: they are computed once, kept
in a file, and only the head is trained on them. The whole model, encoder and head, is what is saved, exported and
served.

Letters of shapes as in `train.heads`, and L chosen layers, F units that the head reads.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from bertship.artifacts import publish, sha256_file, sha256_json
from bertship.config import EncoderConfig
from bertship.errors import InputError
from bertship.progress import progress
from bertship.tasks import Task
from bertship.tokenization import Row, pad
from train.heads import HEADS, HeadedModel
from train.model import init_weights

# By name: which of the embeddings' output (0) and the blocks' (1 to the number of blocks) are read, and how they are
# joined. -4 is the fourth from the end.
LAYERS: dict[str, tuple[slice, str]] = {
    "embeddings": (slice(0, 1), "concatenate"),
    "second_to_last": (slice(-2, -1), "concatenate"),
    "last": (slice(-1, None), "concatenate"),
    "weighted_last_four": (slice(-4, None), "weigh"),
    "concat_last_four": (slice(-4, None), "concatenate"),
    "weighted_all": (slice(1, None), "weigh"),
}
TOPS = ("linear", "bilstm")
_ROWS = 32  # rows encoded together for the cache


class Mix(nn.Module):
    """A weighted sum of layers, the weights a softmax that is learnt, times a scale."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(layers))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x_xLH: Tensor) -> Tensor:
        """Any leading axes, L and H, to the same without L."""
        return self.scale * (x_xLH * self.weight.softmax(0)[:, None]).sum(-2)


@torch.library.custom_op("bertship::lstm", mutates_args=())
def exported_lstm(x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> Tensor:
    """What stands for a layer of `nn.LSTM` in a graph: [B, S, F] to [B, S, U], S free.

    PyTorch's own operator is traced step by step there and would fix S.
    """
    start = x.new_zeros(1, x.shape[0], w_hh.shape[1])
    return torch.lstm(x, (start, start), (w_ih, w_hh, b_ih, b_hh), True, 1, 0.0, False, False, True)[0].clone()


@exported_lstm.register_fake
def _(x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], w_hh.shape[1])


def _read(layer: nn.LSTM, x_BSF: Tensor) -> Tensor:
    if torch.compiler.is_exporting():
        made: Tensor = exported_lstm(x_BSF, layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0)
        return made
    return layer(x_BSF)[0]


class BiLstm(nn.Module):
    """Two layers that read a sequence from both ends, `units` each way.

    The reading from the end begins at a row's own last token: its tokens are put in reverse order first, so padding,
    which then stands last in both readings, changes nothing.
    """

    def __init__(self, inputs: int, units: int, dropout: float) -> None:
        super().__init__()
        self.forward_1, self.backward_1 = (nn.LSTM(inputs, units, batch_first=True) for _ in range(2))
        self.forward_2, self.backward_2 = (nn.LSTM(2 * units, units, batch_first=True) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSF: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, S, F] to [B, S, 2 * units]; `attention_mask` int64 [B, S]."""
        length_B1 = attention_mask.sum(1, keepdim=True)
        place_1S = torch.arange(x_BSF.shape[1], device=x_BSF.device)[None]
        reverse_BS1 = torch.where(place_1S < length_B1, length_B1 - 1 - place_1S, place_1S)[..., None]
        for ahead, behind in ((self.forward_1, self.backward_1), (self.forward_2, self.backward_2)):
            x_BSF = self.dropout(x_BSF)
            one_BSU = _read(ahead, x_BSF)
            other_BSU = _read(behind, x_BSF.gather(1, reverse_BS1.expand(-1, -1, x_BSF.shape[2])))
            other_BSU = other_BSU.gather(1, reverse_BS1.expand(-1, -1, other_BSU.shape[2]))
            x_BSF = torch.cat([one_BSU, other_BSU], -1)
        return x_BSF


class FeatureModel(HeadedModel):
    """A frozen encoder and what reads it; subclasses are made by `model_class`.

    `features` and `head` are its two halves: training runs the second alone.
    """

    LAYERS: ClassVar[str]
    TOP: ClassVar[str]

    def __init__(self, config: EncoderConfig, num_labels: int) -> None:
        super().__init__(config, num_labels, pooler=False)
        chosen, how = LAYERS[self.LAYERS]
        count = len(range(config.num_hidden_layers + 1)[chosen])
        if count < (4 if "four" in self.LAYERS else 1):
            raise InputError(f"layers {self.LAYERS!r} need four blocks; the encoder has {config.num_hidden_layers}")
        self.chosen = chosen
        self.mix = Mix(count) if how == "weigh" else None
        width = config.hidden_size * (1 if self.mix is not None else count)
        self.lstm = None
        if self.TOP == "bilstm":
            self.lstm = BiLstm(width, config.hidden_size, config.hidden_dropout_prob)
            width = 2 * config.hidden_size
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(width, num_labels)
        init_weights(self.classifier, config.initializer_range)
        self.freeze_encoder()

    def features(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """The chosen layers' vectors, [B, S, L, H]; [B, L, H], of the first token, where one decision is asked."""
        seen: list[Tensor] = []
        parts = (self.encoder.embeddings, *self.encoder.blocks)
        hooks = [part.register_forward_hook(lambda module, given, made: seen.append(made)) for part in parts]
        try:
            self.encoder(input_ids, attention_mask, token_type_ids)
        finally:
            for hook in hooks:
                hook.remove()
        x_BSLH = torch.stack(seen[self.chosen], dim=2)
        return x_BSLH if self.PER_TOKEN else x_BSLH[:, 0]

    def head(self, features: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Features to logits."""
        x_xF = features.flatten(-2) if self.mix is None else self.mix(features)
        if self.lstm is not None:
            x_xF = self.lstm(x_xF, attention_mask)
        logits: Tensor = self.classifier(self.dropout(x_xF))
        return tuple(logits.unbind(-1)) if len(self.OUTPUTS) > 1 else (logits,)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor, ...]:
        """As the heads of `train.heads`."""
        return self.head(self.features(input_ids, attention_mask, token_type_ids), attention_mask)


def model_class(task: Task) -> type[Any]:
    """The model of a task: its kind's head on an encoder that trains, or one on a frozen encoder's layers.

    Raises InputError for unknown layers, and for a BiLSTM where there is one decision a text.
    """
    head = HEADS[task.behaviour.head]
    if not task.layers:
        if task.top != "linear":
            raise InputError(f"head {task.top!r} reads a frozen encoder: choose its layers, of {', '.join(LAYERS)}")
        return head
    if task.layers not in LAYERS:
        raise InputError(f"layers {task.layers!r} are unknown; there are {', '.join(LAYERS)}")
    if task.top not in TOPS:
        raise InputError(f"head {task.top!r} is unknown; there are {', '.join(TOPS)}")
    if task.top == "bilstm" and not head.PER_TOKEN:
        raise InputError(f"a BiLSTM reads tokens; task {task.name} has one decision a text, take the linear head")
    facts = {
        "LAYERS": task.layers,
        "TOP": task.top,
        "OUTPUTS": head.OUTPUTS,
        "PER_TOKEN": head.PER_TOKEN,
        "NUM_LABELS": head.NUM_LABELS,
        # a name that transformers has no class for: there the encoder loads, and the head stays behind
        "ARCHITECTURE": f"{head.__name__}On{task.layers.title().replace('_', '')}{task.top.title()}",
    }
    return type("TaskFeatureModel", (FeatureModel,), facts)


class CachedFeatures:
    """Rows' features in a memory-mapped file, float32, so that an epoch costs the head alone."""

    def __init__(self, folder: Path, rows: Sequence[Row], per_token: bool) -> None:
        self.rows, self.per_token = rows, per_token
        sizes = [len(row) if per_token else 1 for row in rows]
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        self.values = np.load(folder / "features.npy", mmap_mode="r")

    def batch(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Features of the chosen rows, padded with zeros to the longest of them, and their attention mask."""
        parts = [self.values[self.starts[i] : self.starts[i + 1]] for i in chosen]
        longest = max(len(self.rows[i]) for i in chosen)
        mask = np.zeros((len(chosen), longest), np.int64)
        for place, i in enumerate(chosen):
            mask[place, : len(self.rows[i])] = 1
        if not self.per_token:
            return torch.from_numpy(np.concatenate(parts)), torch.from_numpy(mask)
        features = np.zeros((len(chosen), longest, *self.values.shape[1:]), np.float32)
        for place, part in enumerate(parts):
            features[place, : len(part)] = part
        return torch.from_numpy(features), torch.from_numpy(mask)


def cache_features(
    model: FeatureModel, rows: Sequence[Row], pad_id: int, folder: Path, init: Path, report: Callable[[str], None]
) -> CachedFeatures:
    """The features of `rows`, computed where `folder` does not hold them yet.

    They are found again by the encoder's weights, the layers and the rows, whatever head reads them. Raises InputError
    where the disk has no room for them.
    """
    weights = {path.name: sha256_file(path) for path in sorted(init.glob("*.safetensors"))}
    ids = [[row.ids.tolist(), row.types.tolist()] for row in rows]
    key = sha256_json([weights, model.LAYERS, model.PER_TOKEN, ids])[:16]
    target = folder / key
    if not (target / "features.npy").is_file():
        _compute(model, rows, pad_id, target, report)
    return CachedFeatures(target, rows, model.PER_TOKEN)


def _compute(
    model: FeatureModel, rows: Sequence[Row], pad_id: int, target: Path, report: Callable[[str], None]
) -> None:
    starts = np.concatenate([[0], np.cumsum([len(row) if model.PER_TOKEN else 1 for row in rows])])
    layers = len(range(model.config.num_hidden_layers + 1)[model.chosen])
    shape = (int(starts[-1]), layers, model.config.hidden_size)
    needed = 4 * int(np.prod(shape))
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise InputError(
            f"the features need {needed / 1e9:,.1f} GB, {target.parent} has {free / 1e9:,.1f} GB free; take fewer "
            "layers, or other runs' folder"
        )
    report(f"features of {len(rows):,} rows, {layers} layers: {needed / 1e6:,.0f} MB in {target}")
    device = next(model.parameters()).device
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    batches = [order[i : i + _ROWS] for i in range(0, len(order), _ROWS)]
    model.eval()
    with publish(target) as staging, progress("encoding", len(batches), report) as advance, torch.inference_mode():
        values = np.lib.format.open_memmap(staging / "features.npy", "w+", np.float32, shape)
        for chosen in batches:
            feeds = pad([rows[i] for i in chosen], pad_id)
            found = model.features(**{name: torch.from_numpy(value).to(device) for name, value in feeds.items()})
            for place, i in enumerate(chosen):
                part = found[place, : len(rows[i])] if model.PER_TOKEN else found[place][None]
                values[starts[i] : starts[i + 1]] = part.float().cpu().numpy()
            advance(f"{len(chosen)} rows")
        values.flush()
        del values
