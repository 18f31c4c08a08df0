"""AdamW for weights in bfloat16: master weights and moments in float32, as mixed-precision training keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class MixedAdamW(torch.optim.Optimizer):
    """Decoupled weight decay (Loshchilov & Hutter, https://arxiv.org/abs/1711.05101) on float32 copies of weights.

    State of each parameter, of its shape: "master", "exp_avg", "exp_avg_sq" in float32; "step", on the CPU.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """One update of every parameter that has a gradient; takes no closure."""
        for group in self.param_groups:
            with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in with_gradient:
                if not self.state[parameter]:
                    self.state[parameter] = {
                        "step": torch.zeros((), device="cpu"),
                        "master": parameter.detach().float().clone(),
                        "exp_avg": torch.zeros_like(parameter, dtype=torch.float32),
                        "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32),
                    }
            if with_gradient:
                self._update(with_gradient, group["lr"], group["betas"], group["eps"], group["weight_decay"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would round the state to the weights' bfloat16."""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                device = "cpu" if name == "step" else parameter.device
                self.state[parameter][name] = value.to(device, torch.float32, copy=True)

    def _update(
        self, parameters: list[nn.Parameter], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        def slots(name: str) -> list[Tensor]:
            return [self.state[parameter][name] for parameter in parameters]

        master, averages, squares = slots("master"), slots("exp_avg"), slots("exp_avg_sq")
        gradients = [parameter.grad.float() for parameter in parameters if parameter.grad is not None]
        torch._foreach_add_(slots("step"), 1.0)
        step = float(self.state[parameters[0]]["step"])
        torch._foreach_lerp_(averages, gradients, 1 - betas[0])
        torch._foreach_mul_(squares, betas[1])
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - betas[1])
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, (1 - betas[1] ** step) ** 0.5)
        torch._foreach_add_(denominators, eps)
        torch._foreach_mul_(master, 1 - lr * weight_decay)
        torch._foreach_addcdiv_(master, averages, denominators, -lr / (1 - betas[0] ** step))
        torch._foreach_copy_([parameter.data for parameter in parameters], master)
