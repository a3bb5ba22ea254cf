"""The update: groups, schedule, number format, clipping, and the step that a non-finite gradient does not take."""

import math

import pytest
import torch

from bertship.config import EncoderConfig
from bertship.errors import InputError
from train import optim
from train.heads import PretrainingModel, SentenceModel
from train.optim import build_optimizer, clip_and_step, linear_schedule, pick_precision, stable_schedule

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


def by_hand(
    weight: torch.Tensor, gradients: list[torch.Tensor], rate: float, decay: float, corrected: bool, ratio: bool
) -> torch.Tensor:
    """Adam's papers' formulas, in double precision."""
    weight, first, second = weight.double(), torch.zeros(()).double(), torch.zeros(()).double()
    for step, gradient in enumerate(gradients, 1):
        first = 0.9 * first + 0.1 * gradient.double()
        second = 0.999 * second + 0.001 * gradient.double() ** 2
        m, v = (first / (1 - 0.9**step), second / (1 - 0.999**step)) if corrected else (first, second)
        update = m / (v.sqrt() + 1e-6) + decay * weight
        if ratio:
            update = update * (weight.norm() / update.norm())
        weight = weight - rate * update
    return weight


@pytest.mark.parametrize(("kind", "corrected"), [("adamw", True), ("adamw", False), ("lamb", True), ("lamb", False)])
def test_updates_are_those_of_the_papers(kind: str, corrected: bool) -> None:
    torch.manual_seed(5)
    layer = torch.nn.Linear(7, 5)
    matrix, vector = layer.weight.detach().clone(), layer.bias.detach().clone()
    optimizer = build_optimizer(layer, 0.01, 0.1, kind=kind, bias_correction=corrected)
    gradients = [(torch.randn(5, 7), torch.randn(5)) for _ in range(4)]
    for of_matrix, of_vector in gradients:
        layer.weight.grad, layer.bias.grad = of_matrix.clone(), of_vector.clone()
        optimizer.step()
    expected = by_hand(matrix, [g for g, _ in gradients], 0.01, 0.1, corrected, kind == "lamb")
    torch.testing.assert_close(layer.weight.double(), expected, atol=1e-6, rtol=0)
    # biases do not decay, and LAMB scales what decays alone
    plain = by_hand(vector, [g for _, g in gradients], 0.01, 0.0, corrected, False)
    torch.testing.assert_close(layer.bias.double(), plain, atol=1e-6, rtol=0)


def test_lamb_moves_a_tensor_of_zeros() -> None:
    layer = torch.nn.Linear(3, 2)
    torch.nn.init.zeros_(layer.weight)
    layer.weight.grad, layer.bias.grad = torch.ones(2, 3), torch.ones(2)
    build_optimizer(layer, 0.01, 0.1, kind="lamb").step()
    assert torch.isfinite(layer.weight).all() and (layer.weight < 0).all()


def test_an_unknown_optimizer_is_named() -> None:
    with pytest.raises(InputError, match="unknown optimizer 'sgd'; it is adamw or lamb"):
        build_optimizer(torch.nn.Linear(1, 1), 0.1, 0.0, kind="sgd")


def test_warm_up_stable_decay() -> None:
    optimizer = build_optimizer(torch.nn.Linear(1, 1), 2.0, 0.0)
    schedule, seen = stable_schedule(optimizer, 2, 10, 4), []
    for _ in range(12):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx([0, 1, 2, 2, 2, 2, 2, 1.5, 1, 0.5, 0, 0])
    with pytest.raises(InputError, match="a decay of 9 updates do not fit into a training of 10"):
        stable_schedule(optimizer, 2, 10, 9)


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
