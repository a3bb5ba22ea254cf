"""Typed, strict configuration: an unknown or ill-typed field is an error that names the field and its file.

Presets are TOML files in `presets/`; a user's own file has the same tables (`[model]`, `[pretrain]`) and may name any
subset of the fields.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from bertship.errors import InputError

PRESETS = Path(__file__).parent / "presets"


def _parted(value: Any) -> Any:
    """Numbers of the command line, `0.8,0.1,0.1` with or without brackets, as a list."""
    return [part.strip() for part in value.strip().strip("[]()").split(",")] if isinstance(value, str) else value


_Beta = Annotated[float, Field(ge=0, lt=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EncoderConfig(_Strict):
    """The encoder's shape, in the words of a Hugging Face `config.json` (Devlin et al. 2019, section 3)."""

    vocab_size: int = Field(gt=0)  # pieces
    hidden_size: int = Field(gt=0)  # units
    num_hidden_layers: int = Field(gt=0)  # Transformer blocks
    num_attention_heads: int = Field(gt=0)  # heads a block
    intermediate_size: int = Field(gt=0)  # units of the feed-forward layer
    max_position_embeddings: int = Field(default=512, gt=0)  # tokens
    type_vocab_size: int = Field(default=2, gt=0)  # segments
    hidden_act: Literal["gelu"] = "gelu"
    hidden_dropout_prob: float = Field(default=0.1, ge=0, lt=1)  # share of units
    attention_probs_dropout_prob: float = Field(default=0.1, ge=0, lt=1)  # share of attention weights
    initializer_range: float = Field(default=0.02, gt=0)  # standard deviation
    layer_norm_eps: float = Field(default=1e-12, gt=0)
    pad_token_id: int = Field(default=0, ge=0)
    is_decoder: bool = False  # left to right: a token gathers from those before it alone

    @model_validator(mode="after")
    def _heads_divide(self) -> "EncoderConfig":
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is no multiple of num_attention_heads {self.num_attention_heads}"
            )
        return self


class CorpusConfig(_Strict):
    """Documents to tokens."""

    # pieces, special ones included; rounded up to a multiple of 8
    vocab_size: int = Field(default=8192, ge=64, le=1 << 22)
    lowercase: bool = True  # also strips accents, as BERT's uncased tokenizer does
    heldout_share: float = Field(default=0.05, gt=0, lt=1)  # share of documents kept for evaluation
    seed: int = Field(default=42, ge=0)
    text_field: str = "text"  # of JSON Lines, the column of Parquet and of hub data sets
    rows_per_document: int = Field(default=1, gt=0)  # of Parquet and hub data sets, for collections of single sentences
    language: str = Field(
        default="en", pattern=r"^[a-z]{2,3}([_-][A-Za-z]+)*$"
    )  # whose rules part sentences, as an ISO 639 code
    vocabulary_sample_mib: int = Field(default=256, gt=0)  # of text that the vocabulary is trained on, spread over all

    @field_validator("vocab_size")
    @classmethod
    def _even(cls, size: int) -> int:
        return -(-size // 8) * 8  # matrix units like it


class PretrainConfig(_Strict):
    """Masked LM + next sentence prediction (Devlin et al. 2019, sections 3.1 and A.2), and what it is compared with.

    The fields of the first block decide what is learnt. Those after it say how a machine does it: results differ by
    rounding alone, and an interrupted run may go on with other values.
    """

    steps: int = Field(default=300, gt=0)  # optimizer updates of the first phase
    batch_size: int = Field(default=32, gt=0)  # sequences an update, over all processes
    sequence_length: int = Field(default=128, ge=8)  # tokens, [CLS] and [SEP] included
    learning_rate: float = Field(default=1e-4, gt=0, allow_inf_nan=False)  # at its peak
    warmup_steps: int = Field(default=30, ge=0)  # updates of linear warm-up
    schedule: Literal["linear", "wsd"] = "linear"  # after the warm-up: down to 0, or stable and down at the end
    decay_share: float = Field(default=0.1, gt=0, le=1)  # of a phase's updates, in which wsd goes down to 0
    # a second phase on longer sequences, with a schedule of its own; 0 updates: none. None: as in the first.
    long_steps: int = Field(default=0, ge=0)
    long_sequence_length: int = Field(default=512, ge=8)  # tokens
    long_batch_size: int | None = Field(default=None, gt=0)  # sequences an update
    long_learning_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    long_warmup_steps: int | None = Field(default=None, ge=0)
    optimizer: Literal["adamw", "lamb"] = "adamw"
    bias_correction: bool = True  # False: the paper's Adam, which has none
    weight_decay: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    adam_betas: Annotated[tuple[_Beta, _Beta], BeforeValidator(_parted)] = (0.9, 0.999)
    adam_eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    clip_norm: float = Field(default=1.0, gt=0)  # largest gradient norm
    objective: Literal["mlm+nsp", "mlm", "ltr"] = "mlm+nsp"  # ltr: left to right, each token from those before it
    masked_share: float = Field(default=0.15, gt=0, lt=1)  # of the tokens, special ones apart
    # [MASK], random piece, unchanged
    mask_rates: Annotated[tuple[float, float, float], BeforeValidator(_parted)] = (0.8, 0.1, 0.1)
    whole_word_masking: bool = False  # all pieces of a word or none
    short_sequence_share: float = Field(default=0.1, ge=0, le=1)  # of the samples, made shorter than they could be
    heldout_batches: int = Field(default=20, gt=0)  # batches an evaluation
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    seed: int = Field(default=42, ge=0)

    rows: Literal["auto", "padded", "packed", "unpadded"] = "auto"  # how sequences lie in what is computed
    packed_length: int = Field(default=512, ge=8)  # tokens a row of `packed`
    microbatch_size: int | None = Field(default=None, gt=0)  # sequences a process computes at once; None: all it has
    checkpoint_every: int = Field(default=1000, gt=0)  # updates between evaluations, each with a checkpoint
    keep_checkpoints: int = Field(default=2, ge=1)  # the last ones; the best is kept besides
    checkpoint_activations: bool = False  # compute them again in the backward pass: less memory, a third more work
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: on CUDA
    sharded_optimizer: bool = False  # each process keeps the moments of its share of the weights
    data_workers: int | None = Field(default=None, ge=0)  # processes that make samples; None: 4 a GPU, 0 without one


# What may differ between an interrupted run and the one that goes on.
MACHINE_FIELDS = (
    "rows",
    "packed_length",
    "microbatch_size",
    "checkpoint_every",
    "keep_checkpoints",
    "checkpoint_activations",
    "compile",
    "sharded_optimizer",
    "data_workers",
)


# The same for fine-tuning.
FINETUNE_MACHINE_FIELDS = ("snapshot_every_s",)


class FinetuneConfig(_Strict):
    """One task on a warm start (Devlin et al. 2019, section A.3)."""

    epochs: float = Field(default=3.0, gt=0)  # passes over the training set
    min_updates: int = Field(default=200, ge=1)  # a small set is gone through more often (Mosbach et al. 2021)
    batch_size: int = Field(default=32, gt=0)  # examples (windows of long texts) an update
    accumulation: int = Field(default=1, gt=0)  # parts that a batch is computed in, one after another: less memory
    learning_rate: float = Field(default=5e-5, gt=0)  # at its peak
    warmup_share: float = Field(default=0.1, ge=0, lt=1)  # of the updates; linear, then linear decay to 0
    weight_decay: float = Field(default=0.01, ge=0)
    bias_correction: bool = True  # of Adam; off is the paper's form, which small sets may not survive
    clip_norm: float = Field(default=1.0, gt=0)
    evaluations: int = Field(default=1, ge=1)  # of the dev split, evenly over the updates; the best model is kept
    patience: int = Field(default=0, ge=0)  # evaluations without a better one after which training stops; 0: never
    # a frozen encoder's layers that the head reads, instead of training the encoder; "" trains it
    layers: Literal[
        "", "embeddings", "second_to_last", "last", "weighted_last_four", "concat_last_four", "weighted_all"
    ] = ""
    head: Literal["linear", "bilstm"] = "linear"  # on a frozen encoder; bilstm where tokens are labelled
    document_context: bool = False  # CoNLL: a document is one text, so that words have their neighbours' sentences
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    snapshot_every_s: float = Field(default=60.0, ge=0)  # of training, from which an interrupted run goes on
    seed: int = Field(default=42, ge=0)

    @model_validator(mode="after")
    def _parts_of_a_batch(self) -> "FinetuneConfig":
        if self.accumulation > self.batch_size:
            raise ValueError(f"accumulation {self.accumulation} is more than batch_size {self.batch_size}")
        return self


def parse(
    model: type[BaseModel],
    values: dict[str, Any],
    where: str,
    *,
    file: Path | None = None,
    table: str = "",
    over: Mapping[str, Any] | None = None,
) -> Any:
    """Validate `values`; the first fault becomes one line that names the field, the place and the value seen.

    With the `file` and the `table` in it that they are from, the place has the line's number; fields that `over` has
    are from elsewhere, such as --set.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(str(part) for part in fault["loc"])
        name = str(fault["loc"][0]) if fault["loc"] else ""
        if file is not None and name and name not in (over or {}):
            line = line_of(file, f"{table}.{name}" if table else name)
            where = f"{where}, line {line}" if line else where
        if fault["type"] == "extra_forbidden":
            reason = f"unknown field {field}; known fields: {', '.join(model.model_fields)}"
        elif field:
            reason = f"{field} = {fault['input']!r}: {fault['msg'].removeprefix('Value error, ')}"
        else:
            reason = fault["msg"].removeprefix("Value error, ")
        raise InputError(f"{where}: {reason}") from None


def line_of(file: Path, name: str) -> int | None:
    """The line, from 1, of a TOML or JSON file that sets `name` (`table.field` or `field`), or begins the table `name`.

    None where the file is not there or no line does.
    """
    table, _, field = name.rpartition(".")
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    if file.suffix == ".json":
        found = (i for i, line in enumerate(lines, 1) if re.search(rf'"{re.escape(field)}"\s*:', line))
        return next(found, None)
    inside = ""
    for number, line in enumerate(lines, 1):
        if header := re.match(r"\s*\[+\s*([^\]]+?)\s*\]", line):
            inside = header[1].replace('"', "")
            if inside == name:
                return number
        elif key := re.match(r"""\s*["']?([\w.-]+)["']?\s*=""", line):
            full = f"{inside}.{key[1]}" if inside else key[1]
            # a table in one line: files = { format = "csv" }
            inline = full == table and re.search(rf"\b{re.escape(field)}\s*=", line[key.end() :])
            if full == name or inline:
                return number
    return None


def preset_path(name_or_path: str) -> Path:
    """Where a preset's tables are. Raises InputError for a name that is none."""
    path = Path(name_or_path)
    if path.suffix == ".toml":
        return path
    if name_or_path not in preset_names():
        raise InputError(
            f"unknown preset {name_or_path!r}; presets are {', '.join(preset_names())}, or give a .toml file"
        )
    return PRESETS / f"{name_or_path}.toml"


def preset_names() -> list[str]:
    """Presets from the smallest to the largest."""
    return ["tiny", "mini", "small", "medium", "base", "large"]


def load_preset(name_or_path: str) -> dict[str, dict[str, Any]]:
    """Tables of a preset by name, or of a TOML file by path. Raises InputError."""
    return read_toml(preset_path(name_or_path))


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as tables. Raises InputError with the line of a syntax error."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def read_encoder_config(model_dir: Path) -> EncoderConfig:
    """The encoder's configuration in a Hugging Face model directory. Raises InputError when it is no BERT."""
    path = model_dir / "config.json"
    if not path.is_file():
        raise InputError(f"no model in {model_dir}: config.json is missing (a Hugging Face BERT directory is needed)")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict) or values.get("model_type") != "bert":
        kind = values.get("model_type") if isinstance(values, dict) else type(values).__name__
        raise InputError(f"{model_dir} is no BERT: model_type in config.json is {kind!r}, 'bert' is needed")
    if values.get("position_embedding_type", "absolute") != "absolute":
        raise InputError(
            f"{path}: position_embedding_type {values['position_embedding_type']!r} is not supported; "
            "BERT's learned absolute positions are"
        )
    known = {name: values[name] for name in EncoderConfig.model_fields if values.get(name) is not None}
    return parse(EncoderConfig, known, str(path), file=path)
