"""train/value_scale.py: a regression learns the same whatever its unit, and begins at the mean."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_bert import TOKENIZER, TRAINED_TASKS, make_examples, make_model
from torch import nn

from bertship.config import FinetuneConfig
from bertship.tasks import Example
from train import finetune
from train.checkpoint import save_model
from train.finetuned import load_finetuned
from train.scoring import evaluate
from train.torch_runner import TorchRunner
from train.value_scale import LEAST, MOST, ValueScale, start_at_the_mean, unit_of

TASK = TRAINED_TASKS["value"]


@pytest.fixture
def init(tmp_path: Path) -> Path:
    """A warm start with another head, so that this one's starts afresh."""
    folder = tmp_path / "init"
    folder.mkdir()
    save_model(make_model("sentence"), TOKENIZER, folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return folder


def train(
    init: Path, out: Path, examples: list[Example], **settings: object
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The trained weights, and the loss by update."""
    config = FinetuneConfig(**{"epochs": 0.1, "min_updates": 20, "batch_size": 8, "precision": "fp32", **settings})
    finetune.finetune(TASK, init, out, config, examples, examples[:10], lambda line: None)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
    return load_file(out / "model" / "model.safetensors"), [line["loss"] for line in lines if "loss" in line]


def times(examples: list[Example], factor: float) -> list[Example]:
    return [dataclasses.replace(example, target=repr(float(example.target) * factor)) for example in examples]


@pytest.mark.parametrize(("factor", "evaluations"), [(2.0**-20, 1), (2.0**13, 4)])
def test_the_unit_of_the_values_does_not_matter(factor: float, evaluations: int, init: Path, tmp_path: Path) -> None:
    """Bytes or KiB: the same losses, the same encoder, the head in the values' unit, bit for bit."""
    examples = make_examples("value")
    weights, losses = train(init, tmp_path / "one", examples, evaluations=evaluations)
    others, same = train(init, tmp_path / "other", times(examples, factor), evaluations=evaluations)
    assert losses == same
    for name, weight in weights.items():
        assert torch.equal(weight * (factor if name.startswith("classifier") else 1), others[name]), name


def test_it_begins_at_the_mean_and_learns_large_values(init: Path, tmp_path: Path) -> None:
    """Values around 20,000, of two kinds that the text gives away."""
    kinds = {"aaaa": "20100.5", "bbbb": "19900.5"}
    examples = [
        Example({"TEXT": f"{word} {other.columns['TEXT']}"}, value, other.where)
        for other in make_examples("value")
        for word, value in kinds.items()
    ]
    _, losses = train(init, tmp_path / "run", examples, min_updates=150, learning_rate=1e-3, batch_size=16)
    assert losses[0] < 2, "in units of the spread: what answering the mean costs"
    task, tokenizer, model = load_finetuned(tmp_path / "run")
    _, answers = evaluate(task, tokenizer, TorchRunner(model, tokenizer.pad_id), examples)
    wanted = np.array([float(example.target) for example in examples])
    assert np.abs(answers["SCORE"] - wanted).mean() < 30


def test_a_head_that_has_learnt_goes_on_from_what_it_answers(init: Path, tmp_path: Path) -> None:
    """The head of a regression's checkpoint keeps its mean and its scale."""
    examples = make_examples("value")
    train(init, tmp_path / "first", examples, min_updates=60, learning_rate=1e-3)
    _, losses = train(tmp_path / "first" / "model", tmp_path / "second", times(examples, 1.0), learning_rate=1e-9)
    weights = load_file(tmp_path / "first" / "model" / "model.safetensors")
    again = load_file(tmp_path / "second" / "model" / "model.safetensors")
    assert torch.allclose(weights["classifier.bias"], again["classifier.bias"], atol=1e-6)
    assert max(losses) < 4


@pytest.mark.parametrize(
    ("values", "unit"),
    [
        ([], 1.0),
        ([3.0], 1.0),
        ([2.5, 2.5, 2.5], 1.0),
        ([0.0, 2.0], 1.0),
        ([0.0, 3.0], 2.0),
        ([0.0, 1e-40], 2.0**LEAST),
        ([-1e38, 1e38], 2.0**MOST),
    ],
)
def test_units(values: list[float], unit: float) -> None:
    assert unit_of(values) == unit


def test_back_and_forth_changes_no_bit_and_twice_is_once() -> None:
    torch.manual_seed(0)
    head, values = nn.Linear(16, 1), [100.0, 900.0]
    start_at_the_mean(head, values)
    assert head.bias.item() == 500 and head.weight.abs().max() < 256
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    scale = ValueScale(head, values)
    for turn in (scale.shrink, scale.shrink):
        turn()
        assert head.bias.item() == 500 / scale.unit
    for turn in (scale.restore, scale.restore):
        turn()
        assert all(torch.equal(before[name], tensor) for name, tensor in head.state_dict().items())
