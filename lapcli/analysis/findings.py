"""What is found of each layer of each model on the way through the text."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lapcli.analysis.spectra import KeyBound, Spectrum
from lapcli.families.base import StatefulLayer


@dataclass
class LayerFindings:
    """What is found of one layer of one model, `N` samples at `P` positions. The tensors are fp64 on the CPU.

    They are there from the start: small results that are left between large matrices keep the memory of those from
    being given back.

    Attributes:
        rank: effective rank, `[N, P, HV]`.
        kappa: of the states, `[N, P, HV]`; see `Spectrum.kappa`.
        key_kappa: of the keys so far, `[N, P, H]`; infinite where they do not span all channels.
        key_margin: see `KeyBound.margin`, `[N, P, HV]`.
        spectrum: sum over samples and positions of the normalised singular values, `[HV, min(K, V)]`.
        floored: how many of `kappa` are lower limits.
        squares: of the errors of the mixer's output, and of the base's output, `[2]`: on its own inputs ("own"), and on
            the base's ("base"). Where the base lies, so that nothing waits for them on the way.
    """

    rank: Tensor
    kappa: Tensor
    key_kappa: Tensor
    key_margin: Tensor
    spectrum: Tensor
    floored: int = 0
    squares: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, layer: StatefulLayer, samples: int, positions: int) -> "LayerFindings":
        """Nothing found yet."""

        def room(heads: int) -> Tensor:
            return torch.full((samples, positions, heads), torch.nan, dtype=torch.float64)

        least = min(layer.key_width, layer.value_width)
        values = torch.zeros(layer.value_heads, least, dtype=torch.float64)
        return cls(room(layer.value_heads), room(layer.value_heads), room(layer.heads), room(layer.value_heads), values)

    def add(self, rows: slice, positions: slice, found: Spectrum, bound: KeyBound) -> None:
        """Add the states of a batch at one position or at several, `[B, P, ...]`."""
        self.rank[rows, positions] = found.effective_rank
        self.kappa[rows, positions] = found.kappa
        self.key_kappa[rows, positions] = bound.kappa
        self.key_margin[rows, positions] = bound.margin
        self.spectrum += found.normalised.flatten(0, 1).sum(0)
        self.floored += int(found.floored.sum())

    def add_error(self, inputs: str, output: Tensor, base: Tensor) -> None:
        """Add the errors of a stretch's outputs `[B, T, D]`."""
        wanted = base.double()
        wrong = output.to(base.device).double() - wanted
        both = torch.stack([wrong.square().sum(), wanted.square().sum()])
        self.squares[inputs] = self.squares[inputs] + both if inputs in self.squares else both

    def error(self, inputs: str) -> float | None:
        """`||o - o_base|| / ||o_base||` over all tokens; `None` where there was nothing to compare."""
        wrong, whole = self.squares[inputs].tolist() if inputs in self.squares else (0.0, 0.0)
        return (wrong / whole) ** 0.5 if whole > 0 else None


Findings = dict[str, dict[int, LayerFindings]]
"""By model and layer."""
