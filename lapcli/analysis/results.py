"""The numbers of an analysis as they are stored, and what tables, pictures and the terminal take from them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lapcli.analysis.filters import SIDES
from lapcli.analysis.findings import LayerFindings
from lapcli.analysis.spectra import pearson

ROUNDING = 1e-6
"""By how much, relatively, a bound may seem to be missed."""
TRACKING_ROUNDING = 1e-6
"""Of a value: what fp64 and up to some thousand steps of growing states may leave of the lemma's identity."""

AXES = {
    "positions": ["P"],
    "*.layers.*.effective_rank": ["N", "P", "HV"],
    "*.layers.*.kappa": ["N", "P", "HV"],
    "*.layers.*.key_kappa": ["N", "P", "H"],
    "*.layers.*.key_margin": ["N", "P", "HV"],
    "*.layers.*.spectrum": ["HV", "min(K, V)"],
    "*.layers.*.contraction": ["N", "T", "HV"],
    "*.layers.*.readout_cosine": ["N", "T", "HV"],
    "*.layers.*.error": ["N", "T", "HV"],
    "*.layers.*.drift": ["N", "T", "HV"],
    "conditioning.layers.*": ["all | kept | compared", "H", "sigma_min | sigma_max | kappa"],
    "overlap.layers.*": ["H", "shared | Jaccard"],
    "filters.layers.*": ["kept | dropped", "H", "W"],
}


def findings_tensors(label: str, index: int, found: LayerFindings) -> dict[str, Tensor]:
    """One layer's numbers under the names that the artifact gives them; fp32 where there is one a state."""
    prefix = f"{label}.layers.{index}"
    names = {"effective_rank": found.rank, "kappa": found.kappa}
    names |= {"key_kappa": found.key_kappa, "key_margin": found.key_margin}
    each = {f"{prefix}.{name}": values.float() for name, values in names.items()}
    states = found.rank.shape[0] * found.rank.shape[1]
    return {**each, f"{prefix}.spectrum": found.spectrum / states}


@dataclass(frozen=True)
class Bound:
    """How a bound fared.

    Attributes:
        states: (sample, position, head)s that meet its premise.
        share: of them that satisfy it, up to rounding; `None` where there are none.
        margin: the smallest of (larger side) / (smaller side); `None` likewise.
    """

    states: int
    share: float | None
    margin: float | None


def bound_of(margins: Tensor) -> Bound:
    """Judge margins (any shape); NaN where the premise is not met."""
    met = margins[~margins.isnan()].double()
    if met.numel() == 0:
        return Bound(0, None, None)
    return Bound(met.numel(), float((met >= 1 - ROUNDING).double().mean()), float(met.min()))


def rank_limit(layer: Mapping[str, int]) -> int:
    """The largest rank that a state of a layer can have, `min(K, V)`."""
    return min(layer["key_width"], layer["value_width"])


@dataclass(frozen=True)
class Analysis:
    """An analysis.

    Attributes:
        tensors: as `AXES` says.
        record: labels of the models and sizes of their layers, output errors, counts.
    """

    tensors: Mapping[str, Tensor]
    record: Mapping[str, Any]

    @property
    def labels(self) -> list[str]:
        """The models, the base first."""
        return list(self.record["models"])

    @property
    def positions(self) -> list[int]:
        """After how many tokens states were looked at."""
        return self.tensors["positions"].tolist()

    def layers(self, label: str) -> list[dict[str, int]]:
        """Index and sizes of a model's stateful layers."""
        return self.record["models"][label]

    @property
    def base_layers(self) -> list[dict[str, int]]:
        """Those of the first model."""
        return self.layers(self.labels[0])

    def _of(self, label: str, index: int, name: str) -> Tensor:
        return self.tensors[f"{label}.layers.{index}.{name}"]

    def effective_rank(self, label: str, index: int) -> Tensor:
        """Mean over samples, fp64 `[P, HV]`."""
        return self._of(label, index, "effective_rank").double().mean(0)

    def utilisation(self, label: str) -> Tensor:
        """`er / min(K, V)`, mean over samples, of all heads of all layers side by side: fp64 `[P, L HV]`."""
        return torch.cat(
            [self.effective_rank(label, layer["index"]) / rank_limit(layer) for layer in self.layers(label)], -1
        )

    def kappa(self, label: str, index: int) -> Tensor:
        """Of the states, fp64 `[N, P, HV]`."""
        return self._of(label, index, "kappa").double()

    def all_kappas(self, label: str) -> Tensor:
        """Of all states of all layers, flat."""
        return torch.cat([self.kappa(label, layer["index"]).flatten() for layer in self.layers(label)])

    def spectrum(self, label: str, index: int) -> Tensor:
        """Mean normalised singular values, fp64 `[HV, min(K, V)]`."""
        return self._of(label, index, "spectrum")

    def by_state(self, label: str, index: int | None = None) -> list[dict[str, float]]:
        """Figures of the first, second, ... states of all key heads; none where each key head has one state.

        Args:
            label: of the model.
            index: of a layer; `None` for all of them.
        """
        layers = [layer for layer in self.layers(label) if index in (None, layer["index"])]
        states = layers[0].get("states", 1) if layers else 1
        if states == 1:
            return []
        # A key head's states lie side by side.
        ranks = [self.effective_rank(label, layer["index"]).unflatten(-1, (-1, states)) for layer in layers]
        kappas = torch.cat(
            [self.kappa(label, layer["index"]).unflatten(-1, (-1, states)).flatten(0, -2) for layer in layers]
        )
        shares = [rank / rank_limit(layer) for rank, layer in zip(ranks, layers, strict=True)]
        return [
            {
                "state": state,
                "utilisation": float(torch.cat([share[..., state].flatten() for share in shares]).mean()),
                "effective_rank": float(torch.cat([rank[..., state].flatten() for rank in ranks]).mean()),
                "kappa_median": float(kappas[:, state].median()),
            }
            for state in range(states)
        ]

    def pearson(self, label: str) -> float | None:
        """Correlation over heads of the mean utilisation with the base's; `None` of the base itself."""
        if label == self.labels[0]:
            return None
        return pearson(self.utilisation(label).mean(0), self.utilisation(self.labels[0]).mean(0))

    def bounds(self, label: str, index: int) -> dict[str, Bound]:
        """The bounds of arXiv 2602.04852 (Eqs. 7 and 4) in one layer."""
        layer = next(layer for layer in self.layers(label) if layer["index"] == index)
        return {name: bound_of(margins) for name, margins in self._margins(label, layer).items()}

    def all_bounds(self, label: str) -> dict[str, Bound]:
        """The bounds over all layers."""
        each = [self._margins(label, layer) for layer in self.layers(label)]
        return {name: bound_of(torch.cat([margins[name].flatten() for margins in each])) for name in each[0]}

    def _margins(self, label: str, layer: Mapping[str, int]) -> dict[str, Tensor]:
        """For each bound the larger side over the smaller, `[N, P, HV]`; NaN where its premise is not met."""
        index = layer["index"]
        rank = self._of(label, index, "effective_rank").double()
        readout = self.kappa(label, index) * (rank / rank_limit(layer)).sqrt()
        return {
            "kappa(S) >= 1/sqrt(u)": torch.where(rank > 0, readout, torch.nan),
            "er(S) >= nu(V)/kappa(K)^2": self._of(label, index, "key_margin").double(),
        }

    def stability(self, label: str) -> Mapping[str, Any] | None:
        """How a model tracks its values (`lapcli.analysis.stability`); `None` where no model has query feedback.

        `rows` of `length` tokens each; figures of `all` layers, and of each of `layers`.
        """
        return self.record.get("stability", {}).get(label)

    def _untracked(self) -> list[str]:
        """What Lemma 3.1 and Theorem 3.2 are missed by, a sentence each."""
        found: list[str] = []
        for label in self.labels:
            told = (self.stability(label) or {"all": None})["all"]
            if told is not None and told["lemma"] > TRACKING_ROUNDING:
                found.append(f"an error of {label} does not shrink by 1 - beta k.x (off by {told['lemma']:.2g})")
            if told is not None and (told["bound_share"] or 1) < 1:
                missed = (1 - told["bound_share"]) * told["bound_count"]
                found.append(f"the bound on the error is missed by {missed:.0f} of {told['bound_count']} of {label}")
        return found

    def violated(self) -> list[str]:
        """What bounds are missed beyond rounding, a sentence each; there should be none."""
        return [*self._untracked(), *self._missed()]

    def _missed(self) -> list[str]:
        """Of states, a sentence each."""
        return [
            f"{name} is missed by {(1 - bound.share) * bound.states:.0f} of {bound.states} states of {label} "
            f"(smallest ratio {bound.margin:.6g})"
            for label in self.labels
            for name, bound in self.all_bounds(label).items()
            if bound.share is not None and bound.share < 1
        ]

    def conditioning(self, index: int) -> Tensor | None:
        """`[2 or 3, H, 3]`: of all, the kept, and the compared channels; sigma_min, sigma_max, kappa."""
        return self.tensors.get(f"conditioning.layers.{index}")

    def overlap(self, index: int) -> Tensor | None:
        """`[H, 2]`: shared channels and Jaccard index."""
        return self.tensors.get(f"overlap.layers.{index}")

    def filters(self, index: int) -> dict[str, Tensor]:
        """By side `[2, H, W]`: mean absolute taps of kept and of dropped channels."""
        names = {side: f"filters.layers.{index}.{side}" for side in SIDES}
        return {side: self.tensors[name] for side, name in names.items() if name in self.tensors}

    def summary(self) -> dict[str, Any]:
        """What the terminal and `--json` show: one row a model, and medians over all heads."""
        models: dict[str, Any] = {}
        for label in self.labels:
            ranks = [self.effective_rank(label, layer["index"]).mean(0) for layer in self.layers(label)]
            kappas = self.all_kappas(label)
            models[label] = {
                "utilisation": float(self.utilisation(label).mean()),
                "effective_rank": float(torch.cat(ranks).mean()),
                "pearson": self.pearson(label),
                "kappa_median": float(kappas.median()),
                "kappa_at_floor": self.record["floored"][label] / kappas.numel(),
                "bounds": {name: asdict(bound) for name, bound in self.all_bounds(label).items()},
                "output_error": self._output_error(label),
            }
            if (tracked := self.stability(label)) is not None:
                models[label]["stability"] = tracked["all"]
            if states := self.by_state(label):
                models[label]["states"] = states
        found: dict[str, Any] = {"models": models}
        for name in ("conditioning", "overlap"):
            parts = [getattr(self, name)(layer["index"]) for layer in self.base_layers]
            if parts[0] is not None:
                # Medians of the per-head values: kappa's is not the ratio of the other two.
                found[name] = torch.cat(parts, -2).quantile(0.5, dim=-2).tolist()
        return found

    def _output_error(self, label: str) -> dict[str, float] | None:
        """Median over layers of the relative errors of the mixers' outputs; `None` of the base."""
        rows = self.record["output_error"].get(label)
        if not rows:
            return None
        return {
            name: float(torch.tensor([row[name] for row in rows], dtype=torch.float64).quantile(0.5))
            for name in ("own", "base")
        }
