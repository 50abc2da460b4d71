"""Which implementation of a decode operator runs: a PyTorch reference, or one Triton kernel where it can run."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lapkernels import verdicts
from lapkernels._triton import kernels_can_run
from lapkernels.delta_rule.api import Choice
from lapkernels.errors import InvalidInput, KernelUnavailable

IMPLEMENTATIONS = ("auto", "reference", "triton")


def gradient_wanted(*tensors: Tensor | None) -> bool:
    """Whether a backward pass may follow a call with these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


@dataclass(frozen=True)
class KernelOrReference:
    """The choice of one operator: its kernel, or its reference.

    Attributes:
        operator: its name, by which verdicts know it.
        what: the operator in words.
        kernel: why the kernel is chosen where it can run.
        reference: how the reference does it, where the kernel cannot.
    """

    operator: str
    what: str
    kernel: str
    reference: str

    def why_not(
        self,
        impl: str,
        device: torch.device | str,
        dtype: torch.dtype,
        limit: str | None = None,
        *,
        needs_gradient: bool = False,
    ) -> str | None:
        """Say why an implementation asked for by name cannot run such a call; else `None`.

        Args:
            impl: its name.
            device: where the tensors lie.
            dtype: of the inputs.
            limit: why the kernel does not take this very call, if so.
            needs_gradient: whether a backward pass will follow.

        Raises:
            InvalidInput: `impl` is no implementation of the operator.
        """
        if impl not in IMPLEMENTATIONS:
            raise InvalidInput(f"impl is '{impl}'; the {self.what} has {', '.join(IMPLEMENTATIONS)}")
        if impl != "triton":
            return None
        if dtype == torch.float64:
            return "its kernel computes in fp32; fp64 inputs need impl='reference'"
        if limit is not None:
            return limit
        if not kernels_can_run(torch.device(device)):
            return (
                "it needs triton and a CUDA device; on a CPU use impl='reference', or set TRITON_INTERPRET=1 before "
                "triton is imported to test the kernel there"
            )
        return verdicts.why_wrong(self.operator, impl, torch.device(device), needs_gradient=needs_gradient)

    def select_impl(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        limit: str | None = None,
        *,
        needs_gradient: bool = False,
    ) -> Choice:
        """Say what `impl="auto"` runs for such a call, and why. Arguments as for `why_not`."""
        why = self.why_not("triton", device, dtype, limit, needs_gradient=needs_gradient)
        if torch.device(device).type == "cpu":
            return Choice("reference", "on a CPU PyTorch is the faster way")
        return Choice("triton", self.kernel) if why is None else Choice("reference", f"{self.reference}: {why}")

    def chosen(
        self,
        impl: str,
        device: torch.device,
        dtype: torch.dtype,
        limit: str | None = None,
        *,
        needs_gradient: bool = False,
    ) -> str:
        """What runs, `reference` or `triton`. Arguments as for `why_not`.

        Raises:
            InvalidInput: `impl` is no implementation of the operator.
            KernelUnavailable: it was asked for by name and cannot run such a call.
        """
        if impl == "auto":
            return self.select_impl(device, dtype, limit, needs_gradient=needs_gradient).name
        if (why := self.why_not(impl, device, dtype, limit, needs_gradient=needs_gradient)) is not None:
            raise KernelUnavailable(f"impl='{impl}' for the {self.what}: {why}")
        return impl
