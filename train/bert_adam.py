"""Adam as BERT was trained with it, and LAMB: one optimizer, as they share their moments."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class BertAdam(Optimizer):
    """Adam with decoupled weight decay, with or without bias correction and layerwise trust ratios.

    Without both it is the optimizer of Devlin et al. 2019 (section A.2, released code); with both it is LAMB (You et
    al. 2020, algorithm 2): the update of each tensor is scaled to the tensor's own norm, where the tensor decays.
    The state of a parameter: `step` float32 scalar, `exp_avg` and `exp_avg_sq` of its shape.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = False,
        trust_ratio: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"bias_correction": bias_correction, "trust_ratio": trust_ratio})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(group, parameters)
        return loss

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        states = [self.state[parameter] for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        firsts, seconds = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        beta1, beta2 = group["betas"]
        for state in states:
            state["step"] += 1
        torch._foreach_lerp_(firsts, gradients, 1 - beta1)
        torch._foreach_mul_(seconds, beta2)
        torch._foreach_addcmul_(seconds, gradients, gradients, 1 - beta2)

        divisors = torch._foreach_sqrt(seconds)
        if group["bias_correction"]:
            steps = [float(state["step"]) for state in states]
            torch._foreach_div_(divisors, [(1 - beta2**step) ** 0.5 for step in steps])
        torch._foreach_add_(divisors, group["eps"])
        updates = torch._foreach_div(firsts, divisors)
        if group["bias_correction"]:
            torch._foreach_div_(updates, [1 - beta1**step for step in steps])
        if group["weight_decay"]:
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
            if group["trust_ratio"]:
                _scale_to(updates, parameters)
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])


def _scale_to(updates: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Give each update the norm of its parameter, where neither is 0. Nothing is fetched from the device."""
    norms = zip(torch._foreach_norm(list(parameters)), torch._foreach_norm(list(updates)), strict=True)
    ratios = [torch.where((own > 0) & (new > 0), own / new, torch.ones_like(own)) for own, new in norms]
    torch._foreach_mul_(list(updates), ratios)
