"""How long the selection of channels takes, beside the way it was first released.

That way: for each head, LAPACK's pivoted QR of a 5000 x K matrix of keys and queries, in fp32, and a whole new QR of
that matrix at every exchange. `refactoring_rrqr` does so, written for this comparison, in fp64 as well, where its
answer can be held against ours: a ratio is given only where both kept the same channels in every head timed.

All of it runs on one core, one head after the other, so that a ratio says nothing of how many cores there are or who
else uses them.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.linalg
import torch

from lapcli.reporting import Reporter, SilentReporter
from lapcli.selectors.base import HeadStatistics
from lapcli.selectors.lapack import FloatArray, one_blas_thread
from lapcli.selectors.registry import select_layer
from lapcli.selectors.strong_rrqr import StrongRRQR, strong_rrqr_gram

ROWS = 5000
_F = 1.5
# The release gives up after so many exchanges.
_RELEASED_EXCHANGES = 20


@dataclass(frozen=True)
class SelectionCase:
    """Matrices of one size to select from.

    Attributes:
        name: what the row is called.
        layers: layers L.
        heads: key heads H of each.
        width: key width K.
        kept: kept width K'.
        matrix: from the number of a head, its keys over its queries, fp64 [rows, K].
    """

    name: str
    layers: int
    heads: int
    width: int
    kept: int
    matrix: Callable[[int], FloatArray]


@dataclass(frozen=True)
class SelectionRow:
    """What one case took. Seconds are for all heads.

    Attributes:
        case: its name.
        heads: heads in all, L x H.
        width: K.
        kept: K'.
        swaps: exchanges that strong RRQR made, over all heads.
        gram_seconds: the Gram sums; calibration makes them in passing, and no figure below includes them.
        choose_seconds: choosing alone, all that the released way does.
        stage_seconds: `select_layer` as the stage calls it: choosing, singular values, bounds checked.
        released_heads: heads on which the released way was timed; its seconds are scaled up from them.
        released_seconds: the released way, fp64.
        released_fp32_seconds: the released way, fp32 as released.
        same_sets: of the heads timed, in how many it kept what we keep, fp64.
        same_sets_fp32: likewise, fp32.
    """

    case: str
    heads: int
    width: int
    kept: int
    swaps: int
    gram_seconds: float
    choose_seconds: float
    stage_seconds: float
    released_heads: int
    released_seconds: float
    released_fp32_seconds: float
    same_sets: int
    same_sets_fp32: int

    @property
    def ratio(self) -> float | None:
        """How many times faster choosing is than the released way in fp64; `None` where the answers differ."""
        return self.released_seconds / self.choose_seconds if self._agrees(self.same_sets) else None

    @property
    def ratio_with_bounds(self) -> float | None:
        """The same, with our time for singular values and bounds, which the released way does not compute."""
        return self.released_seconds / self.stage_seconds if self._agrees(self.same_sets) else None

    @property
    def ratio_fp32(self) -> float | None:
        """Choosing against the released way in its own fp32; `None` where its rounding, or its giving up after
        twenty exchanges, left it with another answer.
        """
        return self.released_fp32_seconds / self.choose_seconds if self._agrees(self.same_sets_fp32) else None

    @property
    def note(self) -> str:
        """On how many heads the released way was timed."""
        if self.released_heads == self.heads:
            return "released way timed on every head"
        return f"released way timed on {self.released_heads} of {self.heads} heads and scaled up"

    def _agrees(self, same: int) -> bool:
        return same == self.released_heads


def kahan(n: int, c: float, drop: float = 1e-3) -> FloatArray:
    """Kahan's matrix, on which pivoted QR chooses badly: `s^i (1 if i = j, -c if j > i) (1 - drop)^j`, `s^2 + c^2 = 1`.

    The columns shrink a little, so that the pivots come out 0..n-1 in floating point, too.

    Args:
        n: rows and columns.
        c: cosine.
        drop: by how much each column is shorter than the one before.
    """
    rows = np.sqrt(1 - c * c) ** np.arange(n)
    return rows[:, None] * (np.eye(n) - c * np.triu(np.ones((n, n)), 1)) * (1 - drop) ** np.arange(n)


def kahan_blocks(blocks: int, n: int, c: float) -> FloatArray:
    """A block diagonal of Kahan matrices, block b shorter by `1e-5 b`: each needs an exchange of its own.

    Args:
        blocks: their number.
        n: size of each.
        c: cosine.
    """
    return np.asarray(scipy.linalg.block_diag(*(kahan(n, c) * (1 - 1e-5 * block) for block in range(blocks))))


def tall(matrix: FloatArray, rows: int, seed: int) -> FloatArray:
    """A matrix of `rows` rows with the same Gram matrix up to rounding, as activations of that many tokens.

    Args:
        matrix: [m, n], m <= rows.
        rows: rows of the result.
        seed: of the random orthonormal columns that it is multiplied by.
    """
    gaussian = np.random.default_rng(seed).standard_normal((rows, matrix.shape[0]))
    return np.linalg.qr(gaussian)[0] @ matrix


def activations(rows: int, width: int, seed: int) -> FloatArray:
    """Correlated channels through SiLU, conditioned like a trained head's (kappa of 10 to 40).

    Args:
        rows: keys and queries.
        width: channels.
        seed: of everything.
    """
    random = np.random.default_rng(seed)
    left, right = (np.linalg.qr(random.standard_normal((width, width)))[0] for _ in range(2))
    mixed = random.standard_normal((rows, width)) @ (left * np.geomspace(3.0, 0.2, width) @ right)
    return mixed / (1 + np.exp(-mixed))


def refactoring_rrqr(matrix: np.ndarray, k: int, f: float, most_swaps: int | None = None) -> tuple[np.ndarray, int]:
    """Strong RRQR with a whole QR of the matrix at the start and at every exchange, in the matrix's own dtype.

    Args:
        matrix: [rows, n].
        k: columns to keep.
        f: tolerance.
        most_swaps: after so many exchanges it returns what it has.

    Returns:
        The kept columns, ascending, and the number of exchanges.
    """
    qr: Any = scipy.linalg.qr  # what it returns depends on its arguments
    _, triangle, order = qr(matrix, mode="economic", pivoting=True)
    swaps = 0
    while most_swaps is None or swaps < most_swaps:
        leading = triangle[:k, :k]
        coupling = scipy.linalg.solve_triangular(leading, triangle[:k, k:])
        inverse = scipy.linalg.solve_triangular(leading, np.eye(k, dtype=matrix.dtype))
        reach = np.outer(np.linalg.norm(inverse, axis=1), np.linalg.norm(triangle[k:, k:], axis=0))
        rho = np.sqrt(coupling**2 + reach**2)
        i, j = np.unravel_index(rho.argmax(), rho.shape)
        if rho[i, j] <= f:
            break
        order[[i, k + j]] = order[[k + j, i]]
        _, triangle = qr(matrix[:, order], mode="economic")
        swaps += 1
    return np.sort(order[:k]), swaps


def default_cases(rows: int = ROWS) -> list[SelectionCase]:
    """Two sizes of a 1.3B model, and matrices that need many exchanges.

    Args:
        rows: keys and queries per head.
    """

    def hard(name: str, matrix: FloatArray, kept: int) -> SelectionCase:
        return SelectionCase(name, 1, 6, matrix.shape[1], kept, lambda head: tall(matrix, rows, head))

    return [
        SelectionCase("24 layers x 6 heads", 24, 6, 256, 128, lambda head: activations(rows, 256, head)),
        SelectionCase("24 layers x 16 heads", 24, 16, 128, 64, lambda head: activations(rows, 128, head)),
        hard("Kahan, c 0.06", kahan(192, 0.06), 96),
        hard("Kahan, c 0.05", kahan(256, 0.05), 128),
        hard("8 blocks of 16", kahan_blocks(8, 16, 0.5), 64),
        hard("16 blocks of 16", kahan_blocks(16, 16, 0.5), 128),
        hard("32 blocks of 8", kahan_blocks(32, 8, 0.7), 128),
    ]


def selection_benchmark(
    cases: Sequence[SelectionCase] | None = None,
    *,
    repeats: int = 3,
    released_heads: int = 12,
    reporter: Reporter | None = None,
) -> list[SelectionRow]:
    """Time every case.

    Args:
        cases: `default_cases()` when absent.
        repeats: runs of our side, of which the median counts.
        released_heads: at most so many heads, spread over all, for the released way.
        reporter: told of every case.
    """
    reporter = reporter or SilentReporter()
    cases = default_cases() if cases is None else cases
    rows: list[SelectionRow] = []
    with reporter.task("selection", total=len(cases), unit="case") as task:
        for case in cases:
            rows.append(_time_case(case, repeats, released_heads))
            task.advance()
    return rows


def _time_case(case: SelectionCase, repeats: int, released_heads: int) -> SelectionRow:
    heads = case.layers * case.heads
    timed = set(np.linspace(0, heads - 1, min(released_heads, heads)).astype(int).tolist())
    spent: dict[str, float] = {"gram": 0.0, "released": 0.0, "released_fp32": 0.0}
    keys, queries = [], []
    released: dict[int, np.ndarray] = {}
    released_fp32: dict[int, np.ndarray] = {}
    with one_blas_thread():
        for head in range(heads):
            matrix = case.matrix(head)
            half = len(matrix) // 2
            with _adding(spent, "gram"):
                keys.append(matrix[:half].T @ matrix[:half])
                queries.append(matrix[half:].T @ matrix[half:])
            if head in timed:
                with _adding(spent, "released"):
                    released[head], _ = refactoring_rrqr(matrix, case.kept, _F)
                single = matrix.astype(np.float32)
                with _adding(spent, "released_fp32"):
                    released_fp32[head], _ = refactoring_rrqr(single, case.kept, _F, _RELEASED_EXCHANGES)

    joint = [key + query for key, query in zip(keys, queries, strict=True)]
    layers = [
        HeadStatistics(
            gram_key=torch.as_tensor(np.stack(keys[first : first + case.heads])),
            gram_query=torch.as_tensor(np.stack(queries[first : first + case.heads])),
        )
        for first in range(0, heads, case.heads)
    ]
    choosing, staging = [], []
    chosen: list[StrongRRQR] = []
    for _ in range(repeats):
        with one_blas_thread():
            start = time.perf_counter()
            chosen = [strong_rrqr_gram(gram, case.kept, _F, measure=False) for gram in joint]
            choosing.append(time.perf_counter() - start)
        start = time.perf_counter()
        for number, layer in enumerate(layers):
            select_layer("drrqr", layer, case.kept, f=_F, layer=number)
        staging.append(time.perf_counter() - start)

    scale = heads / len(timed)
    return SelectionRow(
        case=case.name,
        heads=heads,
        width=case.width,
        kept=case.kept,
        swaps=sum(found.swaps for found in chosen),
        gram_seconds=spent["gram"],
        choose_seconds=float(np.median(choosing)),
        stage_seconds=float(np.median(staging)),
        released_heads=len(timed),
        released_seconds=spent["released"] * scale,
        released_fp32_seconds=spent["released_fp32"] * scale,
        same_sets=sum(np.array_equal(chosen[head].kept, kept) for head, kept in released.items()),
        same_sets_fp32=sum(np.array_equal(chosen[head].kept, kept) for head, kept in released_fp32.items()),
    )


@contextmanager
def _adding(spent: dict[str, float], name: str) -> Generator[None]:
    """Add the time of the block to an entry."""
    start = time.perf_counter()
    yield
    spent[name] += time.perf_counter() - start
