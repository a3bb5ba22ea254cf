"""train/finetune.py, evaluate.py and torch_runner.py: losses, batches, what diverges, what repeats."""

import json

import numpy as np
import pytest
import torch
from small_bert import TASKS_BY_HEAD, TOKENIZER, make_examples, make_model
from torch.nn import functional

from bertship.config import FinetuneConfig
from bertship.errors import CheckFailed, InputError
from bertship.tasks.ner import IGNORED
from bertship.tokenization import Tokens, pad
from train import finetune
from train.checkpoint import save_model
from train.evaluate import evaluate, load_finetuned
from train.finetune import LOSSES, batches
from train.torch_runner import TorchRunner


def silent(line: str) -> None:
    pass


def rows_of(*lengths):
    return [TOKENIZER.row(Tokens(np.full(n, 7), np.zeros((n, 2), np.int32)), owner=i) for i, n in enumerate(lengths)]


@pytest.fixture(params=TASKS_BY_HEAD)
def head(request):
    return request.param


@pytest.fixture
def init(tmp_path, head):
    folder = tmp_path / "init"
    folder.mkdir()
    save_model(make_model(head), TOKENIZER, folder)
    return folder


def run(head, init, out, **settings):
    settings = {"min_updates": 6, "epochs": 0.1, "batch_size": 4, "precision": "fp32"} | settings
    examples = make_examples(head)
    config = FinetuneConfig(**settings)
    return finetune.finetune(TASKS_BY_HEAD[head], init, out, config, examples, examples[:4], silent)


def losses(out):
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]


def test_a_run_repeats_itself_and_another_seed_does_not(head, init, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(head, init, tmp_path / name, seed=seed)
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")
    task, tokenizer, model = load_finetuned(tmp_path / "a")
    assert task == TASKS_BY_HEAD[head]
    metrics, _ = evaluate(task, tokenizer, TorchRunner(model, tokenizer.pad_id), make_examples(head)[:4])
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text("utf-8"))
    assert all(manifest["metrics"][name] == value for name, value in metrics.items())


def test_non_finite_gradients_are_skipped_and_ten_in_a_row_stop_the_run(head, init, tmp_path, monkeypatch):
    real, calls = finetune.LOSSES[TASKS_BY_HEAD[head].behaviour.loss], []

    def spoilt(outputs, targets):
        calls.append(1)
        return real(outputs, targets) * (float("nan") if len(calls) in bad else 1)

    monkeypatch.setitem(finetune.LOSSES, TASKS_BY_HEAD[head].behaviour.loss, spoilt)
    bad = {2, 3}
    assert run(head, init, tmp_path / "some")["metrics"]["skipped_updates"] == 2
    assert [loss is None for loss in losses(tmp_path / "some")] == [False, True, True, False, False, False]
    calls.clear()
    bad = range(1, 100)
    with pytest.raises(CheckFailed, match="10 updates in a row had non-finite gradients at step 10"):
        run(head, init, tmp_path / "all", min_updates=20)
    calls.clear()
    with pytest.raises(CheckFailed, match="made no update"):
        run(head, init, tmp_path / "all", min_updates=3)
    assert not (tmp_path / "all").exists()


def test_a_task_longer_than_the_model_is_refused(init, tmp_path, head):
    config = json.loads((init / "config.json").read_text("utf-8"))
    with pytest.raises(InputError, match=f"positions for {config['max_position_embeddings']}; lower max_tokens"):
        examples = make_examples(head)
        task = TASKS_BY_HEAD[head].__class__(**{**TASKS_BY_HEAD[head].__dict__, "max_tokens": 4096})
        finetune.finetune(task, init, tmp_path / "out", FinetuneConfig(), examples, examples, silent)


def test_cross_entropy_and_mean_squared_error():
    logits = torch.randn(5, 3)
    expected = functional.cross_entropy(logits, torch.tensor([0, 1, 2, 1, 0]))
    assert torch.equal(LOSSES["cross_entropy"]([logits], [0, 1, 2, 1, 0]), expected)
    predicted = torch.tensor([[1.0], [2.0], [4.0]])
    # (N, 1) against (N,) would broadcast to N x N and give another number
    assert LOSSES["mean_squared_error"]([predicted], [1.5, 2.0, 2.0]).item() == pytest.approx((0.25 + 0 + 4) / 3)


def test_span_loss_is_the_mean_of_both_ends():
    start, end = torch.randn(2, 6), torch.randn(2, 6)
    expected = (
        functional.cross_entropy(start, torch.tensor([1, 0])) + functional.cross_entropy(end, torch.tensor([3, 0]))
    ) / 2
    assert torch.allclose(LOSSES["span"]([start, end], [(1, 3), (0, 0)]), expected)


def test_token_loss_counts_labelled_tokens_alone():
    logits = torch.randn(2, 4, 3)
    targets = [np.array([IGNORED, 1, IGNORED, 2]), np.array([IGNORED, 0])]
    expected = functional.cross_entropy(logits[[0, 0, 1], [1, 3, 1]], torch.tensor([1, 2, 0]))
    assert torch.allclose(LOSSES["token"]([logits], targets), expected)
    assert LOSSES["token"]([logits], [np.array([IGNORED])] * 2).item() == 0  # and not NaN


def test_batches_hold_every_row_once_an_epoch_with_little_padding():
    rng = np.random.default_rng(0)
    rows = rows_of(*rng.integers(1, 100, 3000))
    config = FinetuneConfig(batch_size=16, seed=3)
    drawn = batches(rows, config)
    epochs = [[next(drawn) for _ in range(188)] for _ in range(2)]
    for epoch in epochs:
        assert sorted(np.concatenate(epoch).tolist()) == list(range(3000))
    assert [b.tolist() for b in epochs[0]] != [b.tolist() for b in epochs[1]]
    again = batches(rows, config)
    assert all(np.array_equal(next(again), batch) for batch in epochs[0])
    padded = sum(len(b) * max(len(rows[i]) for i in b) for b in epochs[0])
    assert sum(map(len, rows)) / padded > 0.95


def test_the_torch_runner_gives_each_row_its_own_tokens_in_order(head):
    rows, runner = rows_of(30, 3, 12, 1, 30), TorchRunner(make_model(head), TOKENIZER.pad_id, batch_size=2)
    together = runner(rows)
    for i, row in enumerate(rows):
        alone = runner.run(pad([row], TOKENIZER.pad_id))
        for name, output in zip(runner.outputs, alone, strict=True):
            assert together[name][i].shape == output[0].shape
            np.testing.assert_allclose(together[name][i], output[0], atol=1e-5)
