"""bertship/config.py: an unknown or ill-typed field is one line that names the field, the value and the file."""

import json

import pytest

from bertship.config import (
    CorpusConfig,
    EncoderConfig,
    FinetuneConfig,
    PretrainConfig,
    load_preset,
    parse,
    preset_names,
    read_encoder_config,
    read_toml,
)
from bertship.errors import InputError

SHAPE = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 9}


@pytest.mark.parametrize("name", preset_names())
def test_presets_parse(name):
    tables = load_preset(name)
    assert tables.keys() == {"model", "pretrain"}
    model = parse(EncoderConfig, {"vocab_size": 8192, **tables["model"]}, name)
    pretraining = parse(PretrainConfig, tables["pretrain"], name)
    assert pretraining.sequence_length <= model.max_position_embeddings


def test_presets_grow():
    sizes = [load_preset(name)["model"]["hidden_size"] for name in preset_names()]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        (PretrainConfig, {"step": 3}, "here: unknown field step; known fields: steps, batch_size"),
        (PretrainConfig, {"steps": "many"}, "here: steps = 'many': "),
        (PretrainConfig, {"steps": 0}, "here: steps = 0: "),
        (PretrainConfig, {"mask_rates": [0.8, 0.2]}, "here: mask_rates"),
        (PretrainConfig, {"mask_rates": "0.8,0.1,x"}, r"here: mask_rates\.2 = 'x': .*number"),
        (PretrainConfig, {"adam_betas": (0.9, 1)}, r"here: adam_betas\.1 = 1: .*less than 1"),
        (PretrainConfig, {"learning_rate": "inf"}, "here: learning_rate = 'inf': .*finite"),
        (PretrainConfig, {"weight_decay": "inf"}, "here: weight_decay = 'inf': .*finite"),
        (PretrainConfig, {"precision": "fp8"}, "here: precision = 'fp8': .*'auto', 'fp32' or 'bf16'"),
        (CorpusConfig, {"vocab_size": 63}, "here: vocab_size = 63: .*greater than or equal to 64"),
        (
            CorpusConfig,
            {"vocab_size": "1000000000"},
            "here: vocab_size = '1000000000': .*less than or equal to 4194304",
        ),
        (CorpusConfig, {"language": "klingon"}, "here: language = 'klingon': "),
        (FinetuneConfig, {"learning_rate": -1}, "here: learning_rate = -1: .*greater than 0"),
        (EncoderConfig, {**SHAPE, "num_attention_heads": 3}, "here: hidden_size 64 is no multiple .*heads 3"),
        (EncoderConfig, {**SHAPE, "hidden_act": "relu"}, "here: hidden_act = 'relu': .*'gelu'"),
        (EncoderConfig, {}, "here: vocab_size = .*required"),
    ],
)
def test_faults_are_named_in_one_line(model, change, message):
    with pytest.raises(InputError, match=message) as caught:
        parse(model, change, "here")
    assert "\n" not in str(caught.value)


def test_a_vocabulary_is_rounded_up_to_a_multiple_of_eight():
    assert [CorpusConfig(vocab_size=size).vocab_size for size in (64, 30_522, 30_528)] == [64, 30_528, 30_528]


def test_settings_of_the_command_line_come_as_text():
    config = parse(PretrainConfig, {"steps": "7", "learning_rate": "3e-4"}, "here")
    assert (config.steps, config.learning_rate) == (7, 3e-4)
    for rates in ("0.8,0.1,0.1", "(0.8, 0.1, 0.1)", "[0.8,0.1,0.1]"):
        assert parse(PretrainConfig, {"mask_rates": rates}, "here").mask_rates == (0.8, 0.1, 0.1)
    assert parse(PretrainConfig, {"adam_betas": "0.9,0.98"}, "here").adam_betas == (0.9, 0.98)


def test_unknown_preset():
    with pytest.raises(InputError, match=r"unknown preset 'huge'; presets are tiny, mini, .*\.toml file"):
        load_preset("huge")


def test_a_preset_of_ones_own(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text("[pretrain]\nsteps = 7\n")
    assert load_preset(str(path)) == {"pretrain": {"steps": 7}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[model]\nhidden_size 3\n", "own.toml is not TOML: .*line 2"),
        (b"\xff\xfe", "own.toml is not TOML: .*utf-8"),
        (None, "no such file: .*own.toml"),
    ],
)
def test_toml_faults(tmp_path, content, message):
    if content is not None:
        (tmp_path / "own.toml").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_toml(tmp_path / "own.toml")


def test_toml_that_is_a_folder(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*: Is a directory"):
        read_toml(tmp_path)


def test_encoder_config_is_read_from_a_hugging_face_directory(tmp_path):
    values = {"model_type": "bert", **SHAPE, "architectures": ["BertModel"], "hidden_dropout_prob": None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_encoder_config(tmp_path) == EncoderConfig(**SHAPE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json is missing"),
        ("{", "config.json is not JSON"),
        ("[]", "model_type in config.json is 'list'"),
        (json.dumps({"model_type": "roberta", **SHAPE}), "is no BERT: model_type in config.json is 'roberta'"),
        (
            json.dumps({"model_type": "bert", **SHAPE, "position_embedding_type": "relative_key"}),
            "position_embedding_type 'relative_key' is not supported",
        ),
        (json.dumps({"model_type": "bert", **SHAPE, "hidden_size": 65}), "config.json: hidden_size 65 is no multiple"),
        (
            json.dumps({"model_type": "bert", **SHAPE, "hidden_act": "gelu_new"}),
            "config.json, line 1: hidden_act = 'gelu_new'",
        ),
    ],
)
def test_encoder_config_faults(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=message):
        read_encoder_config(tmp_path)


def test_every_field_can_be_set_on_the_command_line():
    """As text, in the form in which Python shows its value."""
    for model in (CorpusConfig, PretrainConfig, FinetuneConfig):
        for name, value in model().model_dump().items():
            if value is not None:
                assert parse(model, {name: str(value)}, "here") == model(), name
