"""The update: groups, schedule, number format, clipping, and the step that a non-finite gradient does not take."""

import math

import pytest
import torch

from bertship.config import EncoderConfig
from bertship.errors import InputError
from train import optim
from train.heads import PretrainingModel, SentenceModel
from train.optim import build_optimizer, clip_and_step, linear_schedule, pick_precision

CONFIG = EncoderConfig(vocab_size=64, hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=40)


def test_biases_and_layer_norm_do_not_decay() -> None:
    model = PretrainingModel(CONFIG)
    optimizer = build_optimizer(model, 1e-3, 0.01)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, plain = ({names[id(p)] for p in group["params"]} for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert plain == {name for name in names.values() if name.endswith("bias") or "norm" in name}
    assert decayed == set(names.values()) - plain
    assert all(group["fused"] and group["eps"] == 1e-6 for group in optimizer.param_groups)


def test_frozen_parameters_are_left_out() -> None:
    model = SentenceModel(CONFIG, 2)
    model.freeze_encoder()
    optimizer = build_optimizer(model, 1e-3, 0.01)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {
        id(p) for p in model.classifier.parameters()
    }
    model.requires_grad_(False)
    with pytest.raises(InputError, match="nothing to train"):
        build_optimizer(model, 1e-3, 0.01)


def test_the_first_update_is_bias_corrected() -> None:
    """With the correction Adam's first step is the learning rate, whatever the gradient's size; without, a third."""
    layer = torch.nn.Linear(1, 1, bias=False)
    before = layer.weight.item()
    layer.weight.grad = torch.full_like(layer.weight, 1e3)
    build_optimizer(layer, 0.1, 0.0).step()
    assert before - layer.weight.item() == pytest.approx(0.1, rel=1e-4)


def values(warmup: int, total: int, steps: int) -> list[float]:
    optimizer = build_optimizer(torch.nn.Linear(1, 1), 2.0, 0.0)
    schedule, seen = linear_schedule(optimizer, warmup, total), []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


@pytest.mark.parametrize(
    ("warmup", "total", "expected"),
    [
        (2, 6, [0.0, 1.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0]),
        (0, 4, [2.0, 1.5, 1.0, 0.5, 0.0, 0.0]),
        (3, 3, [0.0, 2 / 3, 4 / 3, 0.0]),
    ],
)
def test_schedule(warmup: int, total: int, expected: list[float]) -> None:
    assert values(warmup, total, len(expected)) == pytest.approx(expected)


@pytest.mark.parametrize(("warmup", "total"), [(11, 10), (-1, 10), (0, 0)])
def test_a_warmup_that_does_not_fit_is_refused(warmup: int, total: int) -> None:
    with pytest.raises(InputError, match=f"warm-up of {warmup} updates .* {total}"):
        values(warmup, total, 1)


def test_clipping_scales_to_the_norm_and_reports_it_before() -> None:
    layer = torch.nn.Linear(2, 1, bias=False)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.tensor([[30.0, 40.0]])
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    norm, applied = clip_and_step(optimizer, linear_schedule(optimizer, 0, 9), layer.parameters(), 1.0)
    assert (norm, applied) == (pytest.approx(50.0), True)
    torch.testing.assert_close(before - layer.weight.detach(), torch.tensor([[0.6, 0.8]]))
    assert layer.weight.grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = build_optimizer(model, 0.1, 0.01)
    schedule = linear_schedule(optimizer, 0, 10)

    def gradient(value: float) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model[1].bias.grad[0] = value

    gradient(1.0)
    assert clip_and_step(optimizer, schedule, model.parameters(), 1.0)[1]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    moments = [optimizer.state[parameter]["exp_avg"].clone() for parameter in model.parameters()]
    rate = optimizer.param_groups[0]["lr"]

    gradient(bad)
    norm, applied = clip_and_step(optimizer, schedule, model.parameters(), 1.0)
    assert not applied
    assert not math.isfinite(norm)
    assert optimizer.param_groups[0]["lr"] == rate
    for parameter, weight, moment in zip(model.parameters(), weights, moments, strict=True):
        assert torch.equal(parameter, weight)
        assert torch.equal(optimizer.state[parameter]["exp_avg"], moment)
        assert parameter.grad is None

    gradient(1.0)
    assert clip_and_step(optimizer, schedule, model.parameters(), 1.0)[1]
    assert optimizer.param_groups[0]["lr"] < rate


def test_precision_follows_the_name_and_for_auto_the_hardware(monkeypatch) -> None:
    assert pick_precision("fp32", "cpu") is None
    assert pick_precision("bf16", "cpu") is torch.bfloat16
    for feature, expected in (("avx512_bf16", torch.bfloat16), ("amx_bf16", torch.bfloat16), ("avx2", None)):
        monkeypatch.setattr(optim, "_cpu_features", lambda feature=feature: {"avx512_f", feature})
        assert pick_precision("auto", torch.device("cpu")) is expected
    assert pick_precision("auto", "meta") is None
    with pytest.raises(InputError, match="'fp16'"):
        pick_precision("fp16", "cpu")


def test_cpu_features_come_from_the_kernel_where_torch_does_not_say(monkeypatch) -> None:
    known = optim._cpu_features()
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    from_kernel = optim._cpu_features()
    for name in ("avx2", "avx512_bf16", "amx_bf16"):
        assert (name in known) == (name in from_kernel)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_with_bf16_is_used() -> None:
    native = torch.cuda.get_device_capability() >= (8, 0)
    assert (pick_precision("auto", "cuda") is torch.bfloat16) == native
