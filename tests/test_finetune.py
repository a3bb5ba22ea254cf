"""train/finetune*.py, losses.py and torch_runner.py: losses, batches, what diverges, what repeats."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from small_bert import TASKS_BY_HEAD, TOKENIZER, TRAINED_TASKS, make_examples, make_model
from torch.nn import functional

from bertship.config import FinetuneConfig
from bertship.errors import CheckFailed, InputError
from bertship.tasks.ner import IGNORED
from bertship.tokenization import Tokens, pad
from train import finetune, finetune_learner
from train.bert_adam import BertAdam
from train.checkpoint import save_model
from train.distributed import alone
from train.finetune_batches import Units, batches
from train.finetune_learner import FinetuneLearner, build_finetune_optimizer
from train.finetune_start import start_model
from train.finetuned import load_finetuned
from train.losses import LOSSES
from train.optim import linear_schedule
from train.scoring import evaluate
from train.torch_runner import TorchRunner

WHOLE = torch.ones(1, 1, dtype=torch.int64)  # a mask for losses that look at none


def silent(line: str) -> None:
    pass


def rows_of(*lengths):
    return [TOKENIZER.row(Tokens(np.full(n, 7), np.zeros((n, 2), np.int32)), owner=i) for i, n in enumerate(lengths)]


@pytest.fixture(params=TRAINED_TASKS)
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
    return finetune.finetune(TRAINED_TASKS[head], init, out, config, examples, examples[:4], silent)


def learner_of(task, init, config, examples):
    torch.manual_seed(config.seed)
    model = start_model(task, init, TOKENIZER, examples, silent)
    return FinetuneLearner(task, model, Units.of(task, TOKENIZER, examples), config, alone(), TOKENIZER.pad_id)


def losses(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_a_run_repeats_itself_and_another_seed_does_not(head, init, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(head, init, tmp_path / name, seed=seed)
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")
    task, tokenizer, model = load_finetuned(tmp_path / "a")
    assert task == TRAINED_TASKS[head]
    metrics, _ = evaluate(task, tokenizer, TorchRunner(model, tokenizer.pad_id), make_examples(head)[:4])
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text("utf-8"))
    assert all(manifest["metrics"][name] == value for name, value in metrics.items())


def test_non_finite_gradients_are_skipped_and_ten_in_a_row_stop_the_run(head, init, tmp_path, monkeypatch):
    real, calls = LOSSES[TRAINED_TASKS[head].behaviour.loss], []

    def spoilt(outputs, targets, mask):
        calls.append(1)
        return real(outputs, targets, mask) * (float("nan") if len(calls) in bad else 1)

    monkeypatch.setitem(LOSSES, TRAINED_TASKS[head].behaviour.loss, spoilt)
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
        task = TRAINED_TASKS[head].__class__(**{**TRAINED_TASKS[head].__dict__, "max_tokens": 4096})
        finetune.finetune(task, init, tmp_path / "out", FinetuneConfig(), examples, examples, silent)


def test_cross_entropy_and_mean_squared_error():
    logits = torch.randn(5, 3)
    expected = functional.cross_entropy(logits, torch.tensor([0, 1, 2, 1, 0]))
    assert torch.equal(LOSSES["cross_entropy"]([logits], [0, 1, 2, 1, 0], WHOLE), expected)
    predicted = torch.tensor([[1.0], [2.0], [4.0]])
    # (N, 1) against (N,) would broadcast to N x N and give another number
    assert LOSSES["mean_squared_error"]([predicted], [1.5, 2.0, 2.0], WHOLE).item() == pytest.approx((0.25 + 0 + 4) / 3)


def test_span_loss_is_the_mean_of_both_ends():
    start, end = torch.randn(2, 6), torch.randn(2, 6)
    expected = (
        functional.cross_entropy(start, torch.tensor([1, 0])) + functional.cross_entropy(end, torch.tensor([3, 0]))
    ) / 2
    mask = torch.ones(2, 6, dtype=torch.int64)
    assert torch.allclose(LOSSES["span"]([start, end], [(1, 3), (0, 0)], mask), expected)
    # padding, whatever stands there, has no share
    wider = [torch.cat([logits, torch.full((2, 3), 50.0)], 1) for logits in (start, end)]
    mask = torch.cat([mask, torch.zeros(2, 3, dtype=torch.int64)], 1)
    assert torch.allclose(LOSSES["span"](wider, [(1, 3), (0, 0)], mask), expected)


def test_token_loss_counts_labelled_tokens_alone():
    logits = torch.randn(2, 4, 3)
    targets = [np.array([IGNORED, 1, IGNORED, 2]), np.array([IGNORED, 0])]
    expected = functional.cross_entropy(logits[[0, 0, 1], [1, 3, 1]], torch.tensor([1, 2, 0]))
    assert torch.allclose(LOSSES["token"]([logits], targets, WHOLE), expected)
    assert LOSSES["token"]([logits], [np.array([IGNORED])] * 2, WHOLE).item() == 0  # and not NaN


def test_batches_hold_every_row_once_an_epoch_with_little_padding():
    rng = np.random.default_rng(0)
    rows = rows_of(*rng.integers(1, 100, 3000))
    config = FinetuneConfig(batch_size=16, seed=3)
    lengths = [len(row) for row in rows]
    drawn = batches(lengths, config)
    epochs = [[next(drawn) for _ in range(188)] for _ in range(2)]
    for epoch in epochs:
        assert sorted(np.concatenate(epoch).tolist()) == list(range(3000))
    assert [b.tolist() for b in epochs[0]] != [b.tolist() for b in epochs[1]]
    again = batches(lengths, config)
    assert all(np.array_equal(next(again), batch) for batch in epochs[0])
    padded = sum(len(b) * max(len(rows[i]) for i in b) for b in epochs[0])
    assert sum(map(len, rows)) / padded > 0.95


def test_a_loss_over_choices_sees_each_question_whole():
    """fit.11: softmax over four, not one decision a pair."""
    scores = torch.randn(8, 1)
    expected = functional.cross_entropy(scores.view(2, 4), torch.tensor([3, 0]))
    assert torch.equal(LOSSES["choice"]([scores], [3, 0], WHOLE), expected)


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_parts_of_a_batch_make_the_same_gradient(init, head, tmp_path, monkeypatch, parts):
    """trn.1: a mean over all targets of the batch, whatever it is split into."""
    stored = json.loads((init / "config.json").read_text("utf-8"))
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (init / "config.json").write_text(json.dumps(stored | still))
    gradients = []

    def keep(optimizer, schedule, parameters, clip_norm):
        gradients.append([parameter.grad.clone() for parameter in parameters if parameter.grad is not None])
        return 0.0, True

    monkeypatch.setattr(finetune_learner, "clip_and_step", keep)
    losses = []
    for accumulation in (1, parts):
        config = FinetuneConfig(batch_size=5, accumulation=accumulation, precision="fp32")
        learner = learner_of(TRAINED_TASKS[head], init, config, make_examples(head))
        losses.append(learner.update(0, [3, 1, 4, 9, 5]).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for whole, split in zip(*gradients, strict=True):
        # sums in another order: what rounding leaves goes with the largest of them
        torch.testing.assert_close(split, whole, atol=1e-6 * max(1.0, float(whole.abs().max())), rtol=1e-4)


def test_the_best_model_is_kept_and_patience_ends_a_run(init, head, tmp_path, monkeypatch):
    metric = TRAINED_TASKS[head].metrics[0]
    scores = iter([0.2, 0.9, 0.5, 0.4, 0.3, 0.2, 0.1])
    seen = []
    real = type(TRAINED_TASKS[head].behaviour).score

    def score(self, task, examples, answers):
        seen.append(1)
        return real(self, task, examples, answers) | {metric: next(scores, 0.0)}

    monkeypatch.setattr(type(TRAINED_TASKS[head].behaviour), "score", score)
    manifest = run(head, init, tmp_path / "out", min_updates=12, evaluations=6, patience=2)
    assert manifest["metrics"][metric] == 0.9 and manifest["metrics"]["best_step"] == 4
    assert len(losses(tmp_path / "out")) == 8  # the evaluations at 6 and 8 were no better
    short = run(head, init, tmp_path / "short", min_updates=12, evaluations=3)
    assert short["metrics"]["best_step"] == 4


def test_labels_of_a_checkpoints_head_go_by_name(tmp_path):
    """fit.1: the same head, its labels stored in another order, gives the same answers."""
    task, model = TASKS_BY_HEAD["sentence"], make_model("sentence")
    folders = [tmp_path / name for name in ("same", "turned", "other")]
    for folder in folders:
        folder.mkdir()
    save_model(model, TOKENIZER, folders[0], task.labels)
    with torch.no_grad():
        for tensor in (model.classifier.weight, model.classifier.bias):
            tensor.copy_(tensor[[2, 0, 1]].clone())
    save_model(model, TOKENIZER, folders[1], [task.labels[i] for i in (2, 0, 1)])
    save_model(model, TOKENIZER, folders[2], ["x", "y", "z"])
    told = [[], [], []]
    examples = make_examples("sentence")
    config = FinetuneConfig(min_updates=1, epochs=0.01, learning_rate=1e-9, batch_size=4, precision="fp32")
    answers = []
    for folder, said in zip(folders, told, strict=True):
        finetune.finetune(task, folder, folder / "out", config, examples, examples[:4], said.append)
        loaded, tokenizer, trained = load_finetuned(folder / "out")
        answers.append(evaluate(loaded, tokenizer, TorchRunner(trained, 0), examples)[1]["PROBABILITIES"])
    np.testing.assert_allclose(answers[0], answers[1], atol=1e-5)
    assert any("put into that of moods" in line for line in told[1])
    assert any("has other labels (x, y, z): the new one starts afresh" in line for line in told[2])
    assert not any("labels" in line for line in told[0])


def test_a_run_whose_labels_contradict_each_other_is_refused(tmp_path):
    from small_bert import make_run

    folder = make_run(tmp_path / "run", "sentence")
    config = json.loads((folder / "model" / "config.json").read_text())
    config["id2label"] = {"0": "good", "1": "bad", "2": "odd"}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"task.json has the labels bad, good, odd, model/config.json has good, bad"):
        load_finetuned(folder)


def test_a_lowercasing_tokenizer_beside_a_cased_vocabulary_is_refused(tmp_path):
    """tok.3"""
    folder = tmp_path / "init"
    folder.mkdir()
    save_model(make_model("token"), TOKENIZER, folder)
    pieces = (folder / "vocab.txt").read_text("utf-8").split("\n")[:-1]
    pieces[10:20] = list("ABCDEFGHIJ")
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", "utf-8")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"lowercases, and 10 of the vocabulary's \d+ pieces have capitals"):
        run("token", folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bias_correction", [True, False])
def test_bias_correction_is_an_option(init, head, tmp_path, bias_correction):
    """fit.4: on by default; the paper's form is there."""
    kind = {True: torch.optim.AdamW, False: BertAdam}[bias_correction]
    config = FinetuneConfig(bias_correction=bias_correction, weight_decay=0.5)
    optimizer = build_finetune_optimizer(make_model(head), config)
    assert type(optimizer) is kind and FinetuneConfig().bias_correction
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    run(head, init, tmp_path / "out", bias_correction=bias_correction)


def test_a_run_that_answers_one_class_is_named(tmp_path):
    """fit.3"""
    task = TASKS_BY_HEAD["sentence"]
    init = tmp_path / "init"
    init.mkdir()
    save_model(make_model("sentence"), TOKENIZER, init)
    examples = make_examples("sentence")
    train = [dataclasses.replace(e, target="good") for e in examples]
    said = []
    config = FinetuneConfig(min_updates=30, epochs=0.1, batch_size=8, learning_rate=5e-3, precision="fp32")
    manifest = finetune.finetune(task, init, tmp_path / "out", config, train, examples, said.append)
    assert manifest["degenerate"] == "every answer is 'good'"
    assert any("WARNING: a degenerate run (seed 42): every answer is 'good'" in line for line in said)
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "This run is degenerate" in page and "Confusion matrix" in page


def test_a_report_shows_curves_errors_and_calibration(init, head, tmp_path):
    run(head, init, tmp_path / "out", evaluations=3)
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    judged = "Answers by the wanted value" if head == "value" else "Calibration"
    for heading in ("Loss", "Dev split while training", "By the texts&#x27; length", judged, "Reproduce"):
        assert f"<h2>{heading}</h2>" in page, heading
    found = json.loads((tmp_path / "out" / "manifest.json").read_text("utf-8"))["metrics"]
    assert ("might give" in page) is ("accuracy" in found), "how far chance reaches, where examples are counted"
    assert "The worst of" in page and "<svg" in page and "prefers-color-scheme: dark" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_the_torch_runner_gives_each_row_its_own_tokens_in_order(head):
    rows, runner = rows_of(30, 3, 12, 1, 30), TorchRunner(make_model(head), TOKENIZER.pad_id, batch_size=2)
    together = runner(rows)
    for i, row in enumerate(rows):
        alone = runner.run(pad([row], TOKENIZER.pad_id))
        for name, output in zip(runner.outputs, alone, strict=True):
            assert together[name][i].shape == output[0].shape
            np.testing.assert_allclose(together[name][i], output[0], atol=1e-5)


def test_only_pieces_that_occur_are_trained_and_the_rest_stays(tmp_path):
    """The same weights as with the whole table; pieces that never occur are those of the warm start, bit for bit."""
    task = TASKS_BY_HEAD["sentence"]
    init = tmp_path / "init"
    init.mkdir()
    save_model(make_model("sentence"), TOKENIZER, init)
    stored = json.loads((init / "config.json").read_text("utf-8"))
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (init / "config.json").write_text(json.dumps(stored | still))
    examples = [e for e in make_examples("sentence") if "z" not in e.columns["TEXT"]]
    config = FinetuneConfig(batch_size=4, precision="fp32", weight_decay=0.0, learning_rate=1e-3)
    tables = []
    for whole in (False, True):
        run = learner_of(task, init, config, examples)
        if whole:
            run.pieces.restore()
            run.pieces = None
            run.optimizer = build_finetune_optimizer(run.model, config)
            run.schedule = linear_schedule(run.optimizer, 20, run.steps)
        run.model.train()
        for _ in range(3):
            run.update(0, [0, 1, 2, 3])
        if run.pieces is not None:
            run.pieces.restore()
        tables.append(run.model.encoder.embeddings.word.weight.detach().clone())
    torch.testing.assert_close(tables[0], tables[1], atol=1e-6, rtol=0)
    before = make_model("sentence").encoder.embeddings.word.weight
    unused = [TOKENIZER.backend.token_to_id(piece) for piece in ("z", "##z", "[MASK]")]
    assert torch.equal(tables[0][unused], before[unused])
    assert not torch.equal(tables[0], before)
