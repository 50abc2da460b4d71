"""The sums that a calibration keeps of each layer, and how they grow as tokens pass through the model."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lapcli.errors import DataError, ModelError
from lapcli.families.base import Family, StatefulLayer
from lapcli.parallel import Processes
from lapcli.recipe import CalibrationSettings

_SUMS = ("gram_key", "gram_query", "input_sq")
_TRIANGLES = ("triangle_key", "triangle_query")


@dataclass
class _Sums:
    """The sums of one layer; an `Observer`. Products are computed where the layer lies."""

    layer: StatefulLayer
    normalized: bool
    picks: tuple[Tensor, Tensor] | None
    """Sorted token positions whose queries and keys count; `None` for all."""
    exact: bool
    """Whether triangles of a streamed QR are kept too."""
    seen: int = 0
    """Tokens of the text that came before."""
    home: torch.device | None = None
    """Where the sums lie; `None` for the layer's own device."""
    gram_key: Tensor = field(default_factory=lambda: torch.empty(0))
    gram_query: Tensor = field(default_factory=lambda: torch.empty(0))
    input_sq: Tensor = field(default_factory=lambda: torch.empty(0))
    triangle_key: Tensor = field(default_factory=lambda: torch.empty(0))
    triangle_query: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of what is kept."""
        return _SUMS + _TRIANGLES if self.exact else _SUMS

    def mixer_input(self, hidden: Tensor) -> None:
        """Add the squares of `[B, T, D]`."""
        squares = hidden.detach().double().square().sum(dim=(0, 1))
        squares = self._at_home(squares)
        self.input_sq = squares if self.input_sq.numel() == 0 else self.input_sq.add_(squares)

    def queries_keys(self, q: Tensor, k: Tensor) -> None:
        """Add the Gram matrices of `[B, T, H, K]`, or of `[B, T, copies, H, K]`."""
        tokens = q.shape[0] * q.shape[1]
        for name, values, index in (("gram_query", q, 0), ("gram_key", k, 1)):
            rows = values.detach().flatten(0, 1)
            if self.picks is not None:
                picked = self.picks[index]
                inside = picked[(picked >= self.seen) & (picked < self.seen + tokens)] - self.seen
                rows = rows[inside.to(rows.device)]
            # Copies of a head are so many more keys or queries of it.
            wide = rows.double().flatten(0, -3)
            if self.normalized:
                wide = wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
            heads = wide.transpose(0, 1)
            gram = self._at_home(heads.mT @ heads)
            old: Tensor = getattr(self, name)
            setattr(self, name, gram if old.numel() == 0 else old.add_(gram))
            if self.exact:
                triangle = name.replace("gram", "triangle")
                above: Tensor = getattr(self, triangle)
                # Zeros at the start make it square however few rows come first.
                above = torch.zeros_like(gram) if above.numel() == 0 else above
                stacked = torch.cat((above.to(heads.device), heads), dim=-2)
                setattr(self, triangle, self._at_home(torch.linalg.qr(stacked, mode="r").R))
        self.seen += tokens

    def _at_home(self, values: Tensor) -> Tensor:
        return values if self.home is None else values.to(self.home)


def _picks(settings: CalibrationSettings, layer: StatefulLayer) -> tuple[Tensor, Tensor] | None:
    """Positions of the rows that count, drawn without replacement for queries and keys apart."""
    if settings.rows is None:
        return None
    total = settings.samples * settings.seq_len
    if settings.rows > total:
        raise DataError(
            f"--rows {settings.rows} is more than the {total} tokens of {settings.samples} x {settings.seq_len}"
        )
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + layer.index)
    drawn = [torch.randperm(total, generator=generator)[: settings.rows].sort().values for _ in range(2)]
    return drawn[0], drawn[1]


@dataclass(frozen=True)
class Observation:
    """The sums of all layers."""

    layers: tuple[_Sums, ...]

    @contextmanager
    def attached(self, family: Family, model: Any) -> Generator[None]:
        """Let the sums grow by every forward pass within the context."""
        handles = [handle for sums in self.layers for handle in family.attach(model, sums.layer, sums)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def tensors(self) -> dict[str, Tensor]:
        """The sums under the names that the artifact gives them."""
        return {f"layers.{sums.layer.index}.{part}": getattr(sums, part) for sums in self.layers for part in sums.parts}

    def restore(self, stored: Mapping[str, Tensor], seen: int, device: torch.device) -> None:
        """Take up sums over the tokens up to the `seen`-th of the text."""
        for sums in self.layers:
            for part in sums.parts:
                setattr(sums, part, stored[f"layers.{sums.layer.index}.{part}"].to(device))
            sums.seen = seen

    def combine(self, processes: Processes) -> None:
        """Make the sums those of all processes, each of which has seen its share of the text; they move to the CPU.

        Raises:
            LapcliError: another process ended.
        """
        for sums in self.layers:
            for part in sums.parts:
                mine = getattr(sums, part).cpu()
                if part in _TRIANGLES and processes.size > 1:
                    stacked = torch.cat(processes.collect(mine), dim=-2)
                    mine = torch.linalg.qr(stacked, mode="r").R
                else:
                    processes.add([mine])
                setattr(sums, part, mine)

    def nbytes(self) -> int:
        """Memory that the sums take."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def check_finite(self, name: str) -> None:
        """Refuse sums that are NaN or infinite.

        Args:
            name: of the model, for the message.

        Raises:
            ModelError: some are; the layer is named.
        """
        for layer in self.layers:
            for what, tensor in (("keys", layer.gram_key), ("queries", layer.gram_query), ("inputs", layer.input_sq)):
                if not torch.isfinite(tensor).all():
                    raise ModelError(
                        f"the {what} of layer {layer.layer.index} ({layer.layer.mixer}) of {name} are NaN or infinite",
                        "try --dtype float32; if they stay so, the checkpoint is damaged",
                    )


def observe(
    layers: Sequence[StatefulLayer],
    settings: CalibrationSettings | None = None,
    *,
    seen: int = 0,
    home: torch.device | None = None,
) -> Observation:
    """Empty sums.

    Args:
        layers: of these.
        settings: which tokens count and how; all and unnormalised where there are none.
        seen: how many tokens of the text come before the first that will pass.
        home: where the sums lie; each on its layer's device where that is not said.
    """
    if settings is None:
        return Observation(tuple(_Sums(layer, False, None, False, seen, home) for layer in layers))
    return Observation(
        tuple(
            _Sums(layer, settings.normalized, _picks(settings, layer), settings.exact, seen, home) for layer in layers
        )
    )
