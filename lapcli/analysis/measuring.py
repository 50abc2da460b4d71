"""What a walker's states are measured with: LAPACK and threads on a CPU, all matrices at once on a GPU."""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from lapcli.analysis.eigenvalues import Tridiagonal, eigenvalues, tridiagonal
from lapcli.analysis.findings import Findings
from lapcli.analysis.spectra import (
    KeyBound,
    Spectrum,
    gram,
    key_bound,
    key_bound_of,
    spectrum,
    spectrum_floor,
    spectrum_of,
    written,
)
from lapcli.analysis.states import Walker
from lapcli.errors import ModelError
from lapcli.families.base import StatefulLayer
from lapcli.selectors.lapack import one_blas_thread

_MATRIX_BYTES = 1 << 30
"""Of matrices that are brought to tridiagonal form together."""

_GATHERED_VALUES = 1 << 22
"""Eigenvalues that are found together: bisection takes as many steps for few as for many."""


class Measurer(AbstractContextManager["Measurer"], Protocol):
    """Measures states while a walk is under way."""

    def measure(self, label: str, walker: Walker, rows: slice, position: int) -> None:
        """Look at the states of one model, which the next step will change.

        Args:
            label: of the model.
            walker: the model.
            rows: the documents that it is at.
            position: the number of the position.

        Raises:
            ModelError: a state is NaN or infinite; the layer is named.
        """
        ...

    def finish(self) -> None:
        """Put all that was measured into the findings; other documents follow.

        Raises:
            ModelError: as `measure`, where it was put off.
        """
        ...


def measurer_for(device: torch.device, findings: Findings) -> Measurer:
    """What measures states that lie on such a device, and puts what it finds into `findings`."""
    return OnDevice(findings) if device.type == "cuda" else OnHost(findings)


class OnHost:
    """LAPACK takes the matrices of a batch one after the other, so a thread takes a layer."""

    def __init__(self, findings: Findings):
        self._findings = findings
        self._pool = ThreadPoolExecutor(torch.get_num_threads())

    def __enter__(self) -> Self:
        """Nothing."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the threads."""
        self._pool.shutdown()

    def measure(self, label: str, walker: Walker, rows: slice, position: int) -> None:
        """See `Measurer`."""

        def measure(layer: StatefulLayer) -> tuple[Spectrum, KeyBound]:
            state = walker.state(layer)
            if not bool(torch.isfinite(state).all()):
                raise _not_finite(layer, label)
            with torch.inference_mode():
                measured = spectrum(state)
                return measured, key_bound(state, measured.effective_rank, walker.gram(layer))

        with one_blas_thread():
            found = list(self._pool.map(measure, walker.layers))
        for layer, (measured, bound) in zip(walker.layers, found, strict=True):
            self._findings[label][layer.index].add(
                rows,
                slice(position, position + 1),
                Spectrum(*(values[:, None] for values in measured)),
                KeyBound(*(values[:, None] for values in bound)),
            )

    def finish(self) -> None:
        """See `Measurer`."""


class OnDevice:
    """Tridiagonal forms are made of all layers' matrices together, and gathered over positions.

    What the host is told, it is told when their eigenvalues are found: nothing waits for the device at a position.
    """

    def __init__(self, findings: Findings):
        self._findings = findings
        self._rows = slice(0)
        self._layers: dict[tuple[str, int], StatefulLayer] = {}
        self._floors: dict[tuple[str, int], float] = {}
        self._positions: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._finite: list[tuple[str, StatefulLayer, Tensor]] = []
        self._waiting: list[tuple[_Place, Tensor]] = []
        self._forms: dict[_Place, list[Tridiagonal]] = defaultdict(list)
        self._values = 0

    def __enter__(self) -> Self:
        """Nothing."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of what was gathered."""
        self._waiting.clear()
        self._forms.clear()

    def measure(self, label: str, walker: Walker, rows: slice, position: int) -> None:
        """See `Measurer`."""
        self._rows = rows
        with torch.inference_mode():
            for layer in walker.layers:
                state, keys, of = walker.state(layer), walker.gram(layer), (label, layer.index)
                self._finite.append((label, layer, torch.isfinite(state).all()))
                self._layers[of], self._floors[of] = layer, spectrum_floor(state)
                self._positions[of].append(position)
                self._wait((*of, "state"), gram(state))
                self._wait((*of, "written"), gram(written(state, keys)))
                self._wait((*of, "keys"), keys)
            self._reduce()
        if self._values >= _GATHERED_VALUES:
            self.finish()

    def _wait(self, place: "_Place", matrices: Tensor) -> None:
        """Leave matrices `[B, heads, n, n]` until there are enough of them."""
        self._waiting.append((place, matrices))
        self._values += matrices.shape[0] * matrices.shape[1] * _wanted(place, matrices.shape[-1])
        if sum(waiting.numel() * waiting.element_size() for _place, waiting in self._waiting) > _MATRIX_BYTES:
            self._reduce()

    def _reduce(self) -> None:
        for width in {matrices.shape[-1] for _place, matrices in self._waiting}:
            alike = [
                (place, matrices.flatten(0, 1)) for place, matrices in self._waiting if matrices.shape[-1] == width
            ]
            # A copy, which is overwritten.
            whole = tridiagonal(torch.cat([matrices for _place, matrices in alike]))
            parts = _split(whole, [len(matrices) for _place, matrices in alike])
            for (place, _matrices), part in zip(alike, parts, strict=True):
                self._forms[place].append(part)
        self._waiting.clear()

    def finish(self) -> None:
        """See `Measurer`."""
        if not self._forms:
            return
        with torch.inference_mode():
            found = self._eigenvalues()
            flags = [flag.double()[None] for _label, _layer, flag in self._finite]
            # The one time that the host waits.
            told = torch.cat([*flags, *(values.flatten() for values in found.values())]).cpu()
        for (label, layer, _flag), finite in zip(self._finite, told[: len(flags)].tolist(), strict=True):
            if not finite:
                raise _not_finite(layer, label)
        sizes = [values.numel() for values in found.values()]
        parts = told[len(flags) :].split(sizes)
        host = {place: part.view(found[place].shape) for place, part in zip(found, parts, strict=True)}
        for (label, index), layer in self._layers.items():
            numbers = self._positions[label, index]
            heads, batch = (layer.value_heads, layer.heads), self._rows.stop - self._rows.start
            states, made, keys = (
                # [P B H, m] to [B, P, H, m]
                host[label, index, kind].unflatten(0, (len(numbers), batch, count)).transpose(0, 1)
                for kind, count in (("state", heads[0]), ("written", heads[0]), ("keys", heads[1]))
            )
            measured = spectrum_of(states.flip(-1).clamp(min=0), self._floors[label, index])
            nu = made[..., 2] / made[..., 1]
            bound = key_bound_of(measured.effective_rank, keys[..., 0], keys[..., 1], layer.key_width, nu)
            where = slice(numbers[0], numbers[-1] + 1)
            self._findings[label][index].add(self._rows, where, measured, bound)
        for gathered in (self._layers, self._positions, self._finite, self._forms):
            gathered.clear()
        self._values = 0

    def _eigenvalues(self) -> "dict[_Place, Tensor]":
        """Of states all, ascending, `[P B HV, n]`; of the others smallest, largest and sum, `[P B H, 3]`."""
        found: dict[_Place, Tensor] = {}
        kinds = {(place[2] == "state", forms[0].diagonal.shape[-1]) for place, forms in self._forms.items()}
        for all_of_them, width in sorted(kinds):
            places = [
                place
                for place, forms in self._forms.items()
                if (place[2] == "state", forms[0].diagonal.shape[-1]) == (all_of_them, width)
            ]
            whole = [Tridiagonal(*map(torch.cat, zip(*self._forms[place], strict=True))) for place in places]
            together = Tridiagonal(*map(torch.cat, zip(*whole, strict=True)))
            if all_of_them:
                values = eigenvalues(together)
            else:
                values = torch.cat([eigenvalues(together, (0, -1)), together.traces[:, None]], -1)
            found |= dict(zip(places, values.split([len(forms.diagonal) for forms in whole]), strict=True))
        return found


_Place = tuple[str, int, str]
"""Label, layer, and of what: "state", "written" or "keys"."""


def _wanted(place: _Place, width: int) -> int:
    return width if place[2] == "state" else 2


def _split(forms: Tridiagonal, sizes: Sequence[int]) -> list[Tridiagonal]:
    return [Tridiagonal(*parts) for parts in zip(*(tensor.split(sizes) for tensor in forms), strict=True)]


def _not_finite(layer: StatefulLayer, label: str) -> ModelError:
    return ModelError(
        f"the state of layer {layer.index} ({layer.mixer}) of {label} is NaN or infinite",
        "try --dtype float32; if it stays so, the checkpoint is damaged",
    )
