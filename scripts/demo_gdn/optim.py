"""Muon for the hidden matrices, AdamW for all else; both run inside a captured CUDA graph.

Rates are tensors, so that a captured step reads the current ones.
"""

# torch has the `_foreach` functions under no other name.
# pyright: reportPrivateImportUsage=false

from collections import defaultdict

import torch
from torch import Tensor, nn

from lapcli.training.optimisers import orthogonalised


class MuonAdamW:
    """One optimiser over two kinds of parameters.

    Args:
        matrices: 2-D weights of hidden layers.
        others: everything else, pairs of a parameter and the factor on AdamW's rate.
        device: where the parameters lie.
        muon_rate, adam_rate: peak learning rates.
        decay: decoupled weight decay of `matrices`, times their rate.
        clip: largest norm of all gradients together.

    Attributes:
        progress_scale: scalar tensor, the schedule's factor on both rates; set it before a step.
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        others: list[tuple[nn.Parameter, float]],
        device: torch.device,
        *,
        muon_rate: float,
        adam_rate: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.98),
        decay: float = 0.05,
        clip: float = 1.0,
    ):
        self.progress_scale = torch.ones((), device=device)
        self._groups: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for parameter in matrices:
            self._groups[tuple(parameter.shape)].append(parameter)
        self._momenta = {shape: torch.zeros(len(group), *shape, device=device) for shape, group in self._groups.items()}
        self._others: list[Tensor] = [parameter for parameter, _ in others]
        self._factors = [factor for _, factor in others]
        self._first = [torch.zeros_like(parameter) for parameter in self._others]
        self._second = [torch.zeros_like(parameter) for parameter in self._others]
        self._count = torch.zeros((), device=device)
        self._muon_rate, self._adam_rate = muon_rate, adam_rate
        self._momentum, self._betas, self._decay, self._clip = momentum, betas, decay, clip

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters."""
        return [parameter for group in self._groups.values() for parameter in group] + self._others

    @torch.no_grad()
    def reset(self) -> None:
        """Forget all moments."""
        for state in (*self._momenta.values(), *self._first, *self._second, self._count):
            state.zero_()

    @torch.no_grad()
    def step(self) -> Tensor:
        """Update every parameter from its gradient; return the gradients' norm before clipping."""
        gradients = [_gradient(parameter) for parameter in self.parameters]
        norms = torch._foreach_norm(gradients)
        norm = torch.linalg.vector_norm(torch.stack(norms))
        torch._foreach_mul_(gradients, (self._clip / (norm + 1e-6)).clamp(max=1.0))

        for shape, group in self._groups.items():
            gradient = torch.stack([_gradient(parameter) for parameter in group])
            momentum = self._momenta[shape]
            momentum.lerp_(gradient, 1 - self._momentum)
            update = orthogonalised(gradient.lerp(momentum, self._momentum))
            rate = self.progress_scale * (self._muon_rate * max(1.0, shape[0] / shape[1]) ** 0.5)
            keep = 1 - self.progress_scale * (self._muon_rate * self._decay)
            torch._foreach_mul_(group, keep)
            torch._foreach_sub_(group, list((update * rate).unbind()))

        self._adam()
        return norm

    def _adam(self) -> None:
        gradients = [_gradient(parameter) for parameter in self._others]
        beta1, beta2 = self._betas
        self._count += 1
        torch._foreach_lerp_(self._first, gradients, 1 - beta1)
        torch._foreach_mul_(self._second, beta2)
        torch._foreach_addcmul_(self._second, gradients, gradients, 1 - beta2)
        rate = self.progress_scale * self._adam_rate * (1 - beta2**self._count).sqrt() / (1 - beta1**self._count)
        roots = torch._foreach_sqrt(self._second)
        torch._foreach_add_(roots, 1e-10)
        updates = torch._foreach_div(self._first, roots)
        torch._foreach_mul_(updates, self._factors)
        torch._foreach_mul_(updates, rate)
        torch._foreach_sub_(self._others, updates)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "every parameter takes part in the loss"
    return parameter.grad
