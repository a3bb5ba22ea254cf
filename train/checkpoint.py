"""Models in and out of the Hugging Face layout: `config.json`, `model.safetensors`, the tokenizer's files.

Reading is strict: the encoder comes whole or not at all, only a head (or a pooler that the checkpoint never had)
may start afresh, and what is fresh or left over is reported by name. Pickled weights are never opened.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bertship.config import EncoderConfig, read_encoder_config
from bertship.errors import InputError, seen
from bertship.tokenization import Tokenizer
from train.heads import HeadedModel, MaskedLanguageModel, PretrainingModel

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

M = TypeVar("M", bound=HeadedModel)

# Our modules and Hugging Face's, one to one; * is the number of a block. A tensor's own name (weight, bias) is the
# same on both sides.
HUGGING_FACE_NAMES = {
    "encoder.embeddings.word": "bert.embeddings.word_embeddings",
    "encoder.embeddings.position": "bert.embeddings.position_embeddings",
    "encoder.embeddings.segment": "bert.embeddings.token_type_embeddings",
    "encoder.embeddings.norm": "bert.embeddings.LayerNorm",
    "encoder.blocks.*.attention.query": "bert.encoder.layer.*.attention.self.query",
    "encoder.blocks.*.attention.key": "bert.encoder.layer.*.attention.self.key",
    "encoder.blocks.*.attention.value": "bert.encoder.layer.*.attention.self.value",
    "encoder.blocks.*.attention.output": "bert.encoder.layer.*.attention.output.dense",
    "encoder.blocks.*.attention_norm": "bert.encoder.layer.*.attention.output.LayerNorm",
    "encoder.blocks.*.feed_forward.expand": "bert.encoder.layer.*.intermediate.dense",
    "encoder.blocks.*.feed_forward.contract": "bert.encoder.layer.*.output.dense",
    "encoder.blocks.*.feed_forward_norm": "bert.encoder.layer.*.output.LayerNorm",
    "encoder.pooler": "bert.pooler.dense",
    "mlm.dense": "cls.predictions.transform.dense",
    "mlm.norm": "cls.predictions.transform.LayerNorm",
    "mlm": "cls.predictions",  # its bias; the projection itself is the word embeddings
    "nsp": "cls.seq_relationship",
    "classifier": "classifier",
    "span": "qa_outputs",
    # heads that transformers does not know keep their names (`train.features`)
    "mix": "mix",
    **{name: name for name in ("lstm.forward_1", "lstm.backward_1", "lstm.forward_2", "lstm.backward_2")},
}
OUR_NAMES = {theirs: ours for ours, theirs in HUGGING_FACE_NAMES.items()}

# Second names of tensors that are stored once: alias -> the name that counts.
TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_LABEL_LAYER = "classifier"  # whose size is the number of labels; other heads have one size
_BARE_ENCODER = ("embeddings.", "encoder.", "pooler.")  # a BertModel's own names, without the prefix `bert.`
_IGNORED = "bert.embeddings.position_ids"  # 0, 1, 2, ...: a constant that old versions stored


@dataclass(frozen=True)
class LoadReport:
    """What a checkpoint did not settle, by Hugging Face's names.

    `fresh`: tensors of the model that start from their initialization; `missing`: those of them that the checkpoint
    has no tensor for (the others belong to another head, or to another number of labels); `unused`: tensors of the
    checkpoint that the model has no place for, under the names that they have in the file.
    """

    missing: tuple[str, ...]
    unused: tuple[str, ...]
    fresh: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every tensor of the model came from the checkpoint: what evaluation and export need."""
        return not self.fresh

    def describe(self) -> str:
        """The report in one line."""
        fresh = f"starting afresh: {', '.join(_modules(self.fresh))}" if self.fresh else "all weights loaded"
        unused = f"; left unused: {', '.join(_modules(self.unused))}" if self.unused else ""
        return fresh + unused


def save_model(
    model: HeadedModel, tokenizer: Tokenizer, model_dir: Path, labels: Sequence[str] = (), **extra_config: Any
) -> None:
    """Write `model` and `tokenizer` into the existing directory `model_dir`, for transformers and `load_model`.

    `labels`: names in the order of the logits; `extra_config`: further fields of `config.json`, or other values
    for those written here (`problem_type="regression"`). Weights keep their type. Raises InputError where labels or
    vocabulary do not fit the model.
    """
    check_vocabulary(tokenizer, model.config, "the tokenizer to save")
    config: dict[str, Any] = {
        "model_type": "bert",
        "architectures": [model.ARCHITECTURE],
        **model.config.model_dump(),
        "tie_word_embeddings": True,
    }
    if labels:
        if len(labels) != model.num_labels or len(set(labels)) != len(labels):
            raise InputError(f"{model.num_labels} different labels are needed for this model; given: {list(labels)}")
        config["id2label"] = {str(index): label for index, label in enumerate(labels)}
        config["label2id"] = {label: index for index, label in enumerate(labels)}
    elif model.NUM_LABELS is None:
        config["num_labels"] = model.num_labels  # or other readers would assume two
    text = json.dumps({**config, **extra_config}, indent=2, ensure_ascii=False)
    (model_dir / "config.json").write_text(text + "\n", encoding="utf-8")

    # The tied projection is in the file once, as the word embeddings: safetensors refuses shared memory, and every
    # reader ties it again by `tie_word_embeddings`.
    tensors = {hugging_face_name(name): tensor.contiguous().cpu() for name, tensor in model.state_dict().items()}
    save_file(tensors, model_dir / WEIGHTS, metadata={"format": "pt"})
    tokenizer.save(model_dir, max_tokens=model.config.max_position_embeddings)


def load_model(model_class: type[M], model_dir: Path, num_labels: int | None = None) -> tuple[M, LoadReport]:
    """A `model_class` in evaluation mode, FP32 on the CPU, with the weights of a BERT checkpoint, and the report.

    `model_dir` has Hugging Face's layout: safetensors, whole or sharded, with or without the prefix `bert.`, of any
    BERT class. `num_labels`: None takes those of the checkpoint's own head. The checkpoint's head is used where it
    has the same meaning and number of labels; otherwise the head is drawn anew (seed torch for a repeatable one).

    Raises InputError where the directory is no BERT, weights are pickled, corrupt, lacking, of a wrong shape or of
    an integer type, or the number of labels is needed and unknown.
    """
    model_dir = Path(model_dir)
    config = read_encoder_config(model_dir)
    stored = _read_tensors(model_dir)
    named = _canonical_names(stored, model_dir)
    tensors = {name: stored[in_file] for name, in_file in named.items()}
    if issubclass(model_class, MaskedLanguageModel):
        _resolve_ties(tensors, model_dir)

    head_fits = _head_fits(model_class, model_dir)
    if num_labels is None:
        num_labels = model_class.NUM_LABELS
    if num_labels is None and head_fits and f"{_LABEL_LAYER}.bias" in tensors:
        num_labels = tensors[f"{_LABEL_LAYER}.bias"].numel()
    if num_labels is None:
        raise InputError(f"{model_dir} has no {model_class.ARCHITECTURE} head; say how many labels the new one has")

    model = model_class(config, num_labels)
    loaded: list[str] = []
    missing: list[str] = []
    other_head: list[str] = []
    for ours, target in model.state_dict().items():
        name = hugging_face_name(ours)
        tensor = tensors.get(name)
        if tensor is None:
            if _part(ours) == "encoder":
                raise InputError(f"{model_dir} lacks {name}, shape {list(target.shape)}; the encoder must be whole")
            missing.append(name)
        elif name.startswith(f"{_LABEL_LAYER}.") and (not head_fits or _differ_in_labels(tensor, target)):
            other_head.append(name)
        else:
            _check_tensor(tensor, target, name, model_dir)
            target.copy_(tensor)  # a state dict shares the parameters' memory
            loaded.append(name)
    _refuse_halves(loaded, missing + other_head, model_dir)
    settled = {*loaded, _IGNORED, *(TIED if issubclass(model_class, MaskedLanguageModel) else ())}
    unused = sorted(in_file for name, in_file in named.items() if name not in settled)
    model.eval()
    return model, LoadReport(tuple(missing), tuple(unused), tuple(missing + other_head))


def labels_of(model_dir: Path) -> tuple[str, ...]:
    """Names of the labels in the order of the logits, from `id2label` of `config.json`; empty where it has none.

    Raises InputError where the ids are not 0, 1, 2, ...
    """
    id2label = _raw_config(Path(model_dir)).get("id2label") or {}
    try:
        by_id = {int(index): str(label) for index, label in id2label.items()}
    except (AttributeError, ValueError):
        by_id = {-1: ""}
    if sorted(by_id) != list(range(len(by_id))):
        raise InputError(f"{model_dir}/config.json: id2label must name labels 0, 1, 2, ...; it is {id2label!r}")
    return tuple(by_id[index] for index in range(len(by_id)))


def check_vocabulary(tokenizer: Tokenizer, config: EncoderConfig, where: str) -> None:
    """Refuse a tokenizer whose ids reach beyond the embedding's rows: InputError. Spare rows are harmless."""
    largest = max(tokenizer.backend.get_vocab(with_added_tokens=True).values())
    if largest >= config.vocab_size:
        raise InputError(
            f"{where}: the tokenizer's ids reach {largest}, the model's embedding has {config.vocab_size} rows "
            "(vocab_size); take tokenizer and model from the same directory"
        )


def hugging_face_name(our_name: str) -> str:
    """Hugging Face's name of a tensor of ours, such as `encoder.blocks.3.feed_forward.expand.weight`."""
    return _translate(our_name, HUGGING_FACE_NAMES)


def our_name(hugging_face_name: str) -> str:
    """The inverse of `hugging_face_name`. KeyError for a module that has no counterpart here."""
    return _translate(hugging_face_name, OUR_NAMES)


def _translate(name: str, table: dict[str, str]) -> str:
    module, _, tensor = name.rpartition(".")
    block = re.search(r"\.(\d+)\.", module)
    if block is None:
        return f"{table[module]}.{tensor}"
    number = block.group(1)
    pattern = module.replace(f".{number}.", ".*.")
    return f"{table[pattern]}.{tensor}".replace(".*.", f".{number}.")


def _modules(names: Iterable[str]) -> list[str]:
    """Names without `weight` and `bias`, each once: the short form for people."""
    return list(dict.fromkeys(re.sub(r"\.(weight|bias)$", "", name) for name in names))


def _part(our_name: str) -> str:
    """The part of a model that a tensor stands or falls with: the encoder, the pooler, or one head."""
    return "pooler" if our_name.startswith("encoder.pooler.") else our_name.split(".")[0]


def _head_fits(model_class: type[HeadedModel], model_dir: Path) -> bool:
    """Whether the checkpoint's `classifier` means what this class's does: sentence and token heads share the name."""
    stated = _raw_config(model_dir).get("architectures") or []
    if not isinstance(stated, list):
        raise InputError(f"{model_dir}/config.json: architectures is {seen(stated)}, a list of classes is needed")
    return any(name in (model_class.ARCHITECTURE, *model_class.SAME_HEAD) for name in stated)


def _differ_in_labels(tensor: Tensor, target: Tensor) -> bool:
    """Whether only the first axis, that of the labels, differs."""
    return tensor.shape != target.shape and tensor.shape[1:] == target.shape[1:]


def _check_tensor(tensor: Tensor, target: Tensor, name: str, model_dir: Path) -> None:
    if tensor.shape != target.shape:
        raise InputError(
            f"{model_dir}: {name} has shape {list(tensor.shape)}, by config.json it must be {list(target.shape)}"
        )
    if not tensor.is_floating_point():
        raise InputError(f"{model_dir}: {name} is {tensor.dtype}; quantized weights are not read, take the originals")
    if not torch.isfinite(tensor).all():
        raise InputError(f"{model_dir}: {name} has values that are not finite; take another checkpoint")


def _refuse_halves(loaded: Sequence[str], fresh: Sequence[str], model_dir: Path) -> None:
    """A head is loaded whole or drawn whole: half of one is a damaged checkpoint."""
    began = {_part(our_name(name)) for name in loaded}
    for name in fresh:
        if _part(our_name(name)) in began:
            raise InputError(f"{model_dir} has a part of the {_part(our_name(name))} but no fitting {name}")


def _raw_config(model_dir: Path) -> dict[str, Any]:
    """`config.json` with the fields that are not the encoder's, after `read_encoder_config` has judged the file."""
    read_encoder_config(model_dir)
    config: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    return config


def _canonical_names(stored: Iterable[str], model_dir: Path) -> dict[str, str]:
    """Today's Hugging Face names -> the names in the file, which may lack the prefix or be older."""
    named: dict[str, str] = {}
    for in_file in stored:
        # Only LayerNorm's: a tensor that happens to be called gamma elsewhere is somebody else's.
        name = re.sub(r"(?<=LayerNorm\.)gamma$", "weight", in_file)
        name = re.sub(r"(?<=LayerNorm\.)beta$", "bias", name)
        name = f"bert.{name}" if name.startswith(_BARE_ENCODER) else name
        if name in named:
            raise InputError(f"{model_dir}: {in_file} and {named[name]} are the same tensor; keep one of them")
        named[name] = in_file
    return named


def _resolve_ties(tensors: dict[str, Tensor], model_dir: Path) -> None:
    """Fold second names into first ones, in place. An untied projection is another model: InputError."""
    for alias, name in TIED.items():
        second = tensors.pop(alias, None)
        if second is None:
            continue
        first = tensors.setdefault(name, second)
        if not torch.equal(first, second):
            raise InputError(f"{model_dir}: {alias} differs from {name}; only a tied vocabulary projection is read")


def _read_tensors(model_dir: Path) -> dict[str, Tensor]:
    """Every tensor of the directory's safetensors, under its name in the file."""
    if (model_dir / WEIGHTS).is_file():
        return _read_file(model_dir / WEIGHTS)
    if (model_dir / INDEX).is_file():
        return _read_shards(model_dir / INDEX)
    pickled = next(iter(sorted(model_dir.glob("pytorch_model*.bin"))), None)
    if pickled is not None:
        stated = next(iter(_raw_config(model_dir).get("architectures") or []), PretrainingModel.ARCHITECTURE)
        raise InputError(
            f"{pickled} is pickled, and weights are never unpickled; where you trust it, convert it once, in Python: "
            f"import transformers; d = {str(model_dir)!r}; transformers.{stated}.from_pretrained(d).save_pretrained(d)"
        )
    raise InputError(f"no weights in {model_dir}: neither {WEIGHTS} nor {INDEX}")


def _read_shards(index: Path) -> dict[str, Tensor]:
    try:
        shard_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(shard_of.values()))
        outside = [shard for shard in shards if Path(shard).name != shard]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} is no index of shards: {type(error).__name__}: {error}") from None
    if outside:
        raise InputError(f"{index} names {outside[0]!r}; shards lie beside their index")
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        found = _read_file(index.with_name(shard))
        for name in (name for name, place in shard_of.items() if place == shard):
            if name not in found:
                raise InputError(f"{index} puts {name} into {shard}, which lacks it; fetch the checkpoint again")
            tensors[name] = found[name]
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise InputError(f"no such file: {path}; the checkpoint is not whole, fetch it again") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path} is corrupt or cut short ({error}); fetch it again") from None
