"""Checkpoints of a training: whole or not there, the last ones and the best kept, moments under their names."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from bertship import artifacts
from bertship.config import EncoderConfig
from bertship.errors import InputError
from bertship.tokenization import SPECIAL_TOKENS, Tokenizer
from train.heads import PretrainingModel
from train.optim import build_optimizer
from train.snapshots import Snapshots, check_claim, claim, link_tree, load_optimizer, optimizer_tensors

TOKENIZER = Tokenizer.from_vocab([*SPECIAL_TOKENS, *"abc"], lowercase=True)
CONFIG = EncoderConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)


def trained(kind: str = "adamw", corrected: bool = True) -> tuple[PretrainingModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = PretrainingModel(CONFIG)
    optimizer = build_optimizer(model, 1e-2, 0.1, kind=kind, bias_correction=corrected)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return model, optimizer


def save(snapshots: Snapshots, step: int, held_out: float | None = None) -> None:
    model, optimizer = trained()
    snapshots.save(step, model, TOKENIZER, optimizer_tensors(optimizer, model), {"held_out": held_out, "step": step})


def refuse(line: str) -> None:
    raise AssertionError(line)


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, keep=2)
    for step, held_out in ((10, 3.0), (20, 1.0), (30, 2.0), (35, None), (40, 1.5)):
        save(snapshots, step, held_out)
    assert snapshots.steps() == [20, 35, 40]
    assert snapshots.best() == 20
    newest = snapshots.newest(refuse)
    assert newest is not None and (newest.step, newest.state["held_out"]) == (40, 1.5)
    assert Snapshots(tmp_path / "nothing").newest(refuse) is None


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "training.json", "manifest.json"])
def test_a_damaged_file_makes_it_pass_to_the_one_before(name: str, tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    save(snapshots, 10)
    save(snapshots, 20)
    path = snapshots.path(20) / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    said: list[str] = []
    newest = snapshots.newest(said.append)
    assert newest is not None and newest.step == 10
    assert len(said) == 1 and str(snapshots.path(20)) in said[0] and "\n" not in said[0]


def test_a_full_disk_leaves_the_ones_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """trn.9"""
    snapshots = Snapshots(tmp_path)
    save(snapshots, 10)
    monkeypatch.setattr("train.snapshots.save_file", _full)
    with pytest.raises(InputError, match=r"no space left while writing .*step-00000020"):
        save(snapshots, 20)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    newest = snapshots.newest(refuse)
    assert newest is not None and newest.step == 10


def _full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("kind", "corrected"), [("adamw", True), ("adamw", False), ("lamb", True)])
def test_moments_come_back_by_name(kind: str, corrected: bool, tmp_path: Path) -> None:
    model, optimizer = trained(kind, corrected)
    moments = optimizer_tensors(optimizer, model)
    assert "encoder.pooler.weight/exp_avg" in moments
    assert len(moments) == 3 * len(list(model.parameters()))
    Snapshots(tmp_path).save(3, model, TOKENIZER, moments, {})
    other = build_optimizer(model, 5e-3, 0.1, kind=kind, bias_correction=corrected)
    load_optimizer(other, model, tmp_path / "step-00000003")
    assert other.param_groups[0]["lr"] == 5e-3, "the groups stay"
    again = optimizer_tensors(other, model)
    assert again.keys() == moments.keys()
    for name, tensor in moments.items():
        assert torch.equal(again[name], tensor), name


def test_moments_of_another_model_are_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    moments = optimizer_tensors(optimizer, model)
    renamed = {name.replace("pooler", "summary"): tensor for name, tensor in moments.items()}
    Snapshots(tmp_path).save(1, model, TOKENIZER, renamed, {})
    with pytest.raises(InputError, match=r"moments of encoder\.summary\.(weight|bias), which is not trained here"):
        load_optimizer(build_optimizer(model, 1e-2, 0.1), model, tmp_path / "step-00000001")
    fewer = {name: tensor for name, tensor in moments.items() if "pooler" not in name}
    Snapshots(tmp_path).save(2, model, TOKENIZER, fewer, {})
    with pytest.raises(InputError, match=r"no moments of encoder\.pooler\."):
        load_optimizer(build_optimizer(model, 1e-2, 0.1), model, tmp_path / "step-00000002")


def test_a_folder_belongs_to_one_recipe(tmp_path: Path) -> None:
    home, recipe = tmp_path / "run.training", {"corpus": "a" * 64, "pretrain": {"steps": 3, "rates": (0.8, 0.2)}}
    check_claim(home, recipe, restart=False)
    assert not home.exists()
    claim(home, recipe)
    check_claim(home, recipe, restart=False)
    with pytest.raises(InputError, match=r"another pretrain\.steps \(3 there, 4 asked for\); .*--name.*--force"):
        check_claim(home, {**recipe, "pretrain": {"steps": 4, "rates": (0.8, 0.2)}}, restart=False)
    with pytest.raises(InputError, match=r"another corpus; go on"):
        check_claim(home, {**recipe, "corpus": "b" * 64}, restart=False)
    check_claim(home, {}, restart=True)
    assert not home.exists()


def test_linked_files_are_the_same_ones(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("x")
    link_tree(tmp_path / "a", tmp_path / "to")
    link_tree(tmp_path / "a" / "b" / "c", tmp_path / "d")
    link_tree(tmp_path / "missing", tmp_path / "e")
    assert (tmp_path / "to" / "b" / "c").samefile(tmp_path / "d")
    assert not (tmp_path / "e").exists()
    assert artifacts.sha256_file(tmp_path / "d") == artifacts.sha256_file(tmp_path / "a" / "b" / "c")
