"""Checkpoints: both ways to transformers and back, old and bare names, shards, and everything that is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bertship.config import EncoderConfig
from bertship.errors import InputError
from bertship.tokenization import SPECIAL_TOKENS, Tokenizer
from train import checkpoint
from train.checkpoint import check_vocabulary, hugging_face_name, labels_of, load_model, our_name, save_model
from train.heads import HeadedModel, PretrainingModel, SentenceModel, SpanModel, TokenModel

CONFIG = EncoderConfig(
    vocab_size=64,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=40,
    max_position_embeddings=16,
    initializer_range=0.2,
)
TOKENIZER = Tokenizer.from_vocab([*SPECIAL_TOKENS, *(chr(ord("a") + i) for i in range(26))], lowercase=True)
LABELS = ("yes", "no", "perhaps")
MODELS = [(PretrainingModel, 2), (SentenceModel, 3), (SpanModel, 2), (TokenModel, 3)]


def randomized(model: torch.nn.Module) -> Any:
    """Every tensor random, biases and LayerNorm too: zeros and ones would hide an exchange of two of them."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2)
            if "norm" in name.lower() and name.endswith("weight"):
                parameter += 1.0
    return model.eval()


def make_batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    mask = (torch.arange(12) < torch.tensor([12, 5, 9])[:, None]).long()
    return {
        "input_ids": torch.randint(5, 31, mask.shape) * mask,
        "attention_mask": mask,
        "token_type_ids": torch.randint(0, 2, mask.shape) * mask,
    }


@torch.no_grad()
def assert_agree(ours: HeadedModel, theirs: Any) -> None:
    """Both give the same at every real position, to 1e-5."""
    batch = make_batch()
    outputs, expected = ours(**batch), theirs(**batch)
    values = [expected[name] for name in expected if "logits" in name]
    assert len(values) == len(outputs)
    real = batch["attention_mask"].bool()
    for got, want in zip(outputs, values, strict=True):
        assert got.shape == want.shape
        if got.shape[:2] == real.shape:
            got, want = got[real], want[real]
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
        assert want.std() > 1e-2


def saved(model: HeadedModel, path: Path, labels: tuple[str, ...] = (), **extra: Any) -> Path:
    path.mkdir()
    save_model(model, TOKENIZER, path, labels, **extra)
    return path


def edit(model_dir: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    change(tensors)
    save_file(tensors, model_dir / "model.safetensors")


def edit_config(model_dir: Path, **changes: Any) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def their_class(model_class: type[HeadedModel]) -> Any:
    return getattr(pytest.importorskip("transformers"), model_class.ARCHITECTURE)


def their_model(model_class: type[HeadedModel], labels: int) -> Any:
    settings = {**CONFIG.model_dump(), "num_labels": labels}
    return randomized(their_class(model_class)(pytest.importorskip("transformers").BertConfig(**settings)))


@pytest.mark.parametrize(("model_class", "count"), MODELS)
def test_transformers_reads_what_is_saved(model_class: type[HeadedModel], count: int, tmp_path: Path) -> None:
    ours = randomized(model_class(CONFIG, count))
    path = saved(ours, tmp_path / "m", LABELS[:count] if count == 3 else ())
    theirs, info = their_class(model_class).from_pretrained(path, output_loading_info=True)
    assert {kind: list(names) for kind, names in info.items() if names} == {}
    assert_agree(ours, theirs.eval())
    assert theirs.config.architectures == [model_class.ARCHITECTURE]
    if count == 3:
        assert tuple(theirs.config.id2label[i] for i in range(3)) == LABELS


@pytest.mark.parametrize(("model_class", "count"), MODELS)
def test_what_transformers_saved_is_read(model_class: type[HeadedModel], count: int, tmp_path: Path) -> None:
    theirs = their_model(model_class, count)
    theirs.save_pretrained(tmp_path)
    ours, report = load_model(model_class, tmp_path)
    assert not ours.training
    assert (report.missing, report.unused, report.fresh) == ((), (), ())
    assert report.complete
    assert report.describe() == "all weights loaded"
    assert_agree(ours, theirs)


@pytest.mark.parametrize(("model_class", "count"), MODELS)
def test_saved_and_loaded_is_the_same_bit_for_bit(model_class: type[HeadedModel], count: int, tmp_path: Path) -> None:
    model = randomized(model_class(CONFIG, count))
    again, report = load_model(model_class, saved(model, tmp_path / "m"))
    assert report.complete
    assert not report.unused
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_names_are_one_to_one() -> None:
    assert len(checkpoint.OUR_NAMES) == len(checkpoint.HUGGING_FACE_NAMES)
    for model_class, count in MODELS:
        for name in model_class(CONFIG, count).state_dict():
            assert our_name(hugging_face_name(name)) == name
    name = "encoder.blocks.11.attention_norm.bias"
    assert hugging_face_name(name) == "bert.encoder.layer.11.attention.output.LayerNorm.bias"


def test_transformers_reads_the_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path = saved(SentenceModel(CONFIG, 3), tmp_path / "m", LABELS)
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    assert theirs("a b", "c")["input_ids"] == [2, 5, 6, 3, 7, 3]
    assert theirs.model_max_length == CONFIG.max_position_embeddings


def test_a_regression_model_keeps_its_single_output(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = randomized(SentenceModel(CONFIG, 1))
    path = saved(ours, tmp_path / "m", problem_type="regression")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    assert (theirs.config.problem_type, theirs.config.num_labels) == ("regression", 1)
    assert_agree(ours, theirs)
    assert labels_of(path) == ()
    again, report = load_model(SentenceModel, path)
    assert (again.num_labels, report.complete) == (1, True)


def test_a_multiple_choice_model_comes_back_whole(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = randomized(SentenceModel(CONFIG, 1))
    path = saved(ours, tmp_path / "m", architectures=["BertForMultipleChoice"])
    theirs = transformers.AutoModelForMultipleChoice.from_pretrained(path).eval()
    with torch.no_grad():
        choices = theirs(**{name: value[None] for name, value in make_batch().items()}).logits
        torch.testing.assert_close(ours(**make_batch())[0].T, choices, atol=1e-5, rtol=0)
    assert load_model(SentenceModel, path)[1].complete


def test_labels_come_in_the_order_of_their_ids(tmp_path: Path) -> None:
    path = saved(SentenceModel(CONFIG, 3), tmp_path / "m", LABELS)
    assert labels_of(path) == LABELS
    edit_config(path, id2label={"2": "c", "10": "k", **{str(i): f"l{i}" for i in (0, 1, *range(3, 10))}})
    assert labels_of(path)[2] == "c"
    assert labels_of(path)[10] == "k"
    edit_config(path, id2label={"0": "a", "2": "b"})
    with pytest.raises(InputError, match="id2label"):
        labels_of(path)


@pytest.mark.parametrize("labels", [("a", "b"), ("a", "b", "a")])
def test_labels_that_do_not_fit_the_model_are_refused(labels: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="3 different labels"):
        save_model(SentenceModel(CONFIG, 3), TOKENIZER, tmp_path, labels)


def test_a_warm_start_lists_the_new_head(tmp_path: Path) -> None:
    source = randomized(PretrainingModel(CONFIG))
    model, report = load_model(SentenceModel, saved(source, tmp_path / "m"), num_labels=3)
    assert report.missing == report.fresh == ("classifier.weight", "classifier.bias")
    assert not report.complete
    assert {name.split(".")[0] for name in report.unused} == {"cls"}
    assert report.describe().startswith("starting afresh: classifier; left unused: cls.predictions, ")
    assert "\n" not in report.describe()
    for name, tensor in model.encoder.state_dict().items():
        assert torch.equal(tensor, source.encoder.state_dict()[name])


def test_a_missing_pooler_is_fresh_and_listed(tmp_path: Path) -> None:
    path = saved(randomized(TokenModel(CONFIG, 3)), tmp_path / "m", LABELS)
    _, report = load_model(SentenceModel, path, num_labels=2)
    assert report.missing == ("bert.pooler.dense.weight", "bert.pooler.dense.bias")
    assert report.fresh == (*report.missing, "classifier.weight", "classifier.bias")


def test_a_head_of_another_label_count_is_fresh_and_listed(tmp_path: Path) -> None:
    source = randomized(SentenceModel(CONFIG, 3))
    model, report = load_model(SentenceModel, saved(source, tmp_path / "m", LABELS), num_labels=2)
    assert model.num_labels == 2
    assert report.missing == ()
    assert report.fresh == report.unused[::-1] == ("classifier.weight", "classifier.bias")
    assert torch.equal(model.encoder.pooler.weight, source.encoder.pooler.weight)


def test_a_head_of_another_meaning_is_not_taken_over(tmp_path: Path) -> None:
    """Sentence and token classifiers have the same tensors by name and shape."""
    source = randomized(SentenceModel(CONFIG, 3))
    path = saved(source, tmp_path / "m", LABELS)
    model, report = load_model(TokenModel, path, num_labels=3)
    assert report.fresh == ("classifier.weight", "classifier.bias")
    assert not torch.equal(model.classifier.weight, source.classifier.weight)
    with pytest.raises(InputError, match="say how many labels"):
        load_model(TokenModel, path)


@pytest.mark.parametrize("drop_pooler", [False, True])
def test_a_bare_bert_model_without_prefix(drop_pooler: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    bare = randomized(transformers.BertModel(transformers.BertConfig(**CONFIG.model_dump()), not drop_pooler))
    bare.save_pretrained(tmp_path)
    assert "embeddings.word_embeddings.weight" in load_file(tmp_path / "model.safetensors")
    edit(tmp_path, lambda tensors: tensors.update({"embeddings.position_ids": torch.arange(16)[None]}))
    model, report = load_model(SentenceModel, tmp_path, num_labels=4)
    assert report.unused == ()
    assert report.fresh[-2:] == ("classifier.weight", "classifier.bias")
    assert ("bert.pooler.dense.weight" in report.missing) == drop_pooler
    batch = make_batch()
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        hidden, expected = model.encoder(**batch)[0], bare(**batch).last_hidden_state
    torch.testing.assert_close(hidden[real], expected[real], atol=1e-5, rtol=0)


def test_old_layer_norm_names_are_understood_there_alone(tmp_path: Path) -> None:
    source = randomized(SentenceModel(CONFIG, 3))
    path = saved(source, tmp_path / "m", LABELS)

    def age(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[old] = tensors.pop(name)
        tensors["bert.pooler.dense.gamma"] = torch.ones(2)
        tensors["bert.pooler.dense.beta"] = torch.ones(2)

    edit(path, age)
    assert "bert.embeddings.LayerNorm.gamma" in load_file(path / "model.safetensors")
    model, report = load_model(SentenceModel, path)
    assert report.complete
    assert report.unused == ("bert.pooler.dense.beta", "bert.pooler.dense.gamma")
    for name, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_shards_are_put_together(tmp_path: Path) -> None:
    theirs = their_model(SentenceModel, 3)
    theirs.save_pretrained(tmp_path, max_shard_size="10KB")
    assert not (tmp_path / "model.safetensors").exists()
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    ours, report = load_model(SentenceModel, tmp_path)
    assert report.complete
    assert_agree(ours, theirs)

    first = min(tmp_path.glob("model-*.safetensors"))
    kept = first.read_bytes()
    save_file({"other": torch.ones(1)}, first)
    with pytest.raises(InputError, match="which lacks it"):
        load_model(SentenceModel, tmp_path)
    first.unlink()
    with pytest.raises(InputError, match=f"no such file: .*{first.name}"):
        load_model(SentenceModel, tmp_path)
    first.write_bytes(kept)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../outside.safetensors"}}')
    with pytest.raises(InputError, match="lie beside their index"):
        load_model(SentenceModel, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(InputError, match="no index of shards"):
        load_model(SentenceModel, tmp_path)


def test_half_precision_weights_become_fp32(tmp_path: Path) -> None:
    theirs = their_model(SentenceModel, 3).half()
    theirs.save_pretrained(tmp_path)
    ours, report = load_model(SentenceModel, tmp_path)
    assert report.complete
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    assert_agree(ours, theirs.float())


def test_second_names_of_tied_tensors(tmp_path: Path) -> None:
    source = randomized(PretrainingModel(CONFIG))
    path = saved(source, tmp_path / "m")
    stored = load_file(path / "model.safetensors")
    assert not [name for name in stored if "decoder" in name]

    def duplicate(tensors: dict[str, torch.Tensor]) -> None:
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
        tensors["cls.predictions.decoder.bias"] = tensors.pop("cls.predictions.bias")

    edit(path, duplicate)
    model, report = load_model(PretrainingModel, path)
    assert (report.missing, report.unused) == ((), ())
    assert torch.equal(model.mlm.bias, source.mlm.bias)
    edit(path, lambda tensors: tensors["cls.predictions.decoder.weight"].add_(1.0))
    with pytest.raises(InputError, match=r"cls\.predictions\.decoder\.weight differs"):
        load_model(PretrainingModel, path)
    assert "cls.predictions.decoder.weight" in load_model(SentenceModel, path, 2)[1].unused


QUERY = "bert.encoder.layer.1.attention.self.query.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(QUERY), rf"lacks {QUERY}, shape \[24, 24\]"),
        (lambda t: t.update({QUERY: torch.ones(20, 24)}), rf"{QUERY} has shape \[20, 24\], .* \[24, 24\]"),
        (lambda t: t.update({QUERY: torch.ones(24, 24, dtype=torch.int8)}), rf"{QUERY} is torch\.int8"),
        (lambda t: t.update({"bert.embeddings.word_embeddings.weight": torch.ones(65, 24)}), r"\[65, 24\].*\[64, 24\]"),
        (lambda t: t.pop("bert.pooler.dense.bias"), r"part of the pooler .* bert\.pooler\.dense\.bias"),
        (lambda t: t.pop("classifier.weight"), r"part of the classifier"),
        (lambda t: t.update({"classifier.weight": torch.ones(3, 20)}), r"classifier\.weight .*\[3, 20\].*\[3, 24\]"),
        (lambda t: t.update({QUERY.removeprefix("bert."): t[QUERY].clone()}), "are the same tensor"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(change: Callable, message: str, tmp_path: Path) -> None:
    path = saved(randomized(SentenceModel(CONFIG, 3)), tmp_path / "m", LABELS)
    edit(path, change)
    with pytest.raises(InputError, match=message) as caught:
        load_model(SentenceModel, path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_a_file_cut_short_is_refused(keep: int, tmp_path: Path) -> None:
    path = saved(SentenceModel(CONFIG, 3), tmp_path / "m", LABELS)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(InputError, match="corrupt or cut short") as caught:
        load_model(SentenceModel, path)
    assert "\n" not in str(caught.value)


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    path = saved(SentenceModel(CONFIG, 3), tmp_path / "m", LABELS)
    (path / "model.safetensors").unlink()
    with pytest.raises(InputError, match="no weights in"):
        load_model(SentenceModel, path)
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(InputError, match=r"never unpickled.*BertForSequenceClassification\.from_pretrained") as caught:
        load_model(SentenceModel, path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "roberta"}, "'roberta'"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"hidden_act": "relu"}, "hidden_act"),
    ],
)
def test_another_architecture_is_refused(changes: dict[str, str], message: str, tmp_path: Path) -> None:
    path = saved(SentenceModel(CONFIG, 3), tmp_path / "m", LABELS)
    edit_config(path, **changes)
    with pytest.raises(InputError, match=message):
        load_model(SentenceModel, path)


def test_a_tokenizer_with_more_pieces_than_rows_is_refused(tmp_path: Path) -> None:
    rows = TOKENIZER.vocab_size
    check_vocabulary(TOKENIZER, CONFIG.model_copy(update={"vocab_size": rows}), "here")
    small = CONFIG.model_copy(update={"vocab_size": rows - 1})
    with pytest.raises(InputError, match=f"here: .* reach {rows - 1}, .* {rows - 1} rows"):
        check_vocabulary(TOKENIZER, small, "here")
    with pytest.raises(InputError, match="rows"):
        save_model(SentenceModel(small, 2), TOKENIZER, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_finite_are_refused(tmp_path):
    save_model(PretrainingModel(CONFIG), TOKENIZER, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["bert.encoder.layer.0.output.dense.weight"][0, 0] = float("nan")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(
        InputError, match=r"bert\.encoder\.layer\.0\.output\.dense\.weight has values that are not finite"
    ):
        load_model(TokenModel, tmp_path, 3)
