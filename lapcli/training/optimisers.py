"""AdamW, and Muon for the hidden matrices of a model that is trained whole with AdamW for all else."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from lapcli.recipe import TrainingSettings
from lapcli.training.adapters import TrainingPlan, trained_parameters

# An odd polynomial whose iteration drives singular values towards 1 (Jordan et al. 2024, "Muon", quintic coefficients).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MOMENTUM = 0.95
# What the entries of AdamW's steps are, about, so that one rate serves both (Liu et al. 2025, arXiv 2502.16982).
_STEP_SIZE = 0.2


def orthogonalised(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly: singular values end between 0.7 and 1.2.

    Args:
        matrices: `[n, rows, columns]`, fp32.
        steps: of Newton-Schulz iteration, in bf16 on a GPU.

    Returns:
        `[n, rows, columns]`, fp32.
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + 1e-7)
    x = x.bfloat16() if x.is_cuda else x
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    # Laid out as parameters are, by the copy that widens: else lists of tensors are gone through one by one.
    return (x.mT if tall else x).to(torch.float32, memory_format=torch.contiguous_format)


class MuonAdamW(torch.optim.AdamW):
    """Muon, with Nesterov's momentum, for the groups that say `orthogonal`; AdamW for the others.

    Steps of matrices are scaled to the size that AdamW's have, so that learning rate and weight decay mean the same.
    Source: Jordan et al. 2024, "Muon"; the scale: Liu et al. 2025, arXiv 2502.16982, section 2.2.

    Arguments are AdamW's; each group of parameters also says `orthogonal`: whether they are matrices for Muon.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of both."""
        groups = self.param_groups
        # AdamW goes through whatever groups there are.
        self.param_groups = [group for group in groups if not group["orthogonal"]]
        try:
            loss = super().step(cast(Any, closure))
        finally:
            self.param_groups = groups
        for group in groups:
            if group["orthogonal"]:
                self._step_of_matrices(group)
        return loss

    def _step_of_matrices(self, group: dict[str, Any]) -> None:
        """One step of all matrices, whose parts are one kernel each for those of a shape or for all, not for each."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return
        momenta = [self._momentum(parameter) for parameter in parameters]
        gradients = [cast(Tensor, parameter.grad).float() for parameter in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - _MOMENTUM)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_add_([self.state[parameter]["step"] for parameter in parameters], 1)  # pyright: ignore[reportPrivateImportUsage]
        alike: dict[torch.Size, list[int]] = defaultdict(list)
        for index, parameter in enumerate(parameters):
            alike[parameter.shape].append(index)
        rate = group["lr"]
        changes = list(gradients)
        for shape, indices in alike.items():
            ahead = torch.stack([gradients[index] for index in indices])
            ahead.lerp_(torch.stack([momenta[index] for index in indices]), _MOMENTUM)
            steps = orthogonalised(ahead) * (rate * _STEP_SIZE * max(shape) ** 0.5)
            for index, change in zip(indices, steps.unbind(), strict=True):
                changes[index] = change
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_sub_(parameters, changes)  # pyright: ignore[reportPrivateImportUsage]

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            # AdamW, when it is loaded, asks every state for its steps.
            state["step"] = torch.zeros(())
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=torch.float32)
        return state["momentum_buffer"]


def optimiser_of(student: nn.Module, plan: TrainingPlan, settings: TrainingSettings) -> torch.optim.AdamW:
    """The optimiser of what is trained: one group of what decays, one of what does not, one of matrices for Muon.

    Args:
        student: the model; its trained parameters are what the plan says.
        plan: what is trained.
        settings: rates and the like, and which optimiser.
    """
    trained, still = trained_parameters(student), plan.undecayed() if settings.weight_decay else frozenset()
    matrices = hidden_matrices(student) if settings.optimizer == "muon" else frozenset()
    rest = {name: value for name, value in trained.items() if name not in matrices}
    groups: list[dict[str, Any]] = [
        {"params": [value for name, value in rest.items() if name not in still]},
        {"params": [value for name, value in rest.items() if name in still], "weight_decay": 0.0},
    ]
    kind: Any = torch.optim.AdamW
    if settings.optimizer == "muon":
        groups.append({"params": [trained[name] for name in trained if name in matrices], "orthogonal": True})
        groups, kind = [{"orthogonal": False, **group} for group in groups], MuonAdamW
    return kind(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        # One kernel for all that lies on GPUs; elsewhere whatever torch takes by itself.
        fused=True if all(parameter.is_cuda for parameter in trained.values()) else None,
    )


def hidden_matrices(student: Any) -> frozenset[str]:
    """The names of all trained matrices but those that tokens meet first and last: what Muon is for.

    Args:
        student: a model of transformers' kind.
    """
    outside = {id(module.weight) for module in (student.get_input_embeddings(), student.get_output_embeddings())}
    return frozenset(
        name for name, value in trained_parameters(student).items() if value.ndim == 2 and id(value) not in outside
    )
