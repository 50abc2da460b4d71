"""Print the table of docs/analyze.md that says how exact the measures of states are.

python scripts/analysis_accuracy.py [MODEL] [--samples 8] [--threads 1]

The model reads text in fp32 and in fp64; states are measured after 128, 192, ... 1024 tokens. `er` and `kappa` come
from `lapcli.analysis.spectra`, and from singular values that `torch.linalg.svdvals` gives in fp64.
"""

import argparse
import time
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from lapcli.analysis.spectra import spectrum, spectrum_floor
from lapcli.analysis.states import Walker
from lapcli.data import token_blocks
from lapcli.families.loading import load_model, load_tokenizer
from lapcli.families.registry import family_for
from lapcli.families.source import DEFAULT_MODEL, ModelSource, resolve_model
from lapcli.reporting import SilentReporter

LENGTH, SKIP, STRIDE = 1024, 64, 64


def states(source: ModelSource, ids: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """The states of all layers after each stretch, `[B, HV, K, V]`, as the model in that dtype has them."""
    family = family_for(source.config)
    walker = Walker(load_model(source, dtype=dtype), family, family.layers(source.config))
    with torch.inference_mode(), walker.attached():
        ends = [0, *range(SKIP + STRIDE, LENGTH + 1, STRIDE)]
        for start, stop in pairwise(ends):
            walker.step(ids[:, start:stop])
            for layer in walker.layers:
                yield walker.state(layer).flatten(0, 1).clone()


def deviation(found: Tensor, wanted: Tensor, where: Tensor | None = None) -> float:
    """The largest relative one, of those where it counts."""
    relative = (found.double() / wanted.double() - 1).abs()
    return float((relative if where is None else relative[where]).max())


def main() -> None:
    """Measure, and print rows of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    source = resolve_model(asked.model)
    blocks = token_blocks(
        "builtin", load_tokenizer(source), samples=asked.samples, seq_len=LENGTH, seed=0, reporter=SilentReporter()
    )
    single, double = (torch.cat(list(states(source, blocks.ids, dtype))) for dtype in (torch.float32, torch.float64))
    begun = time.perf_counter()
    found = spectrum(single)
    ours = time.perf_counter() - begun
    begun = time.perf_counter()
    values = torch.linalg.svdvals(single.double())
    theirs = time.perf_counter() - begun
    rank = values.square().sum(-1) / values[:, 0].square()
    floor, exact = spectrum_floor(single), spectrum(double)
    above = values[:, -1] > floor * values[:, 0]
    truth_above = ~found.floored & (exact.kappa < 1 / floor)
    coarse = torch.linalg.svdvals(single)
    rows = {
        "an fp64 SVD of the same states: `er`": deviation(found.effective_rank, rank),
        "… : `κ` above the floor": deviation(found.kappa, values[:, 0] / values[:, -1], above),
        "the states of the same model in fp64: `er`": deviation(found.effective_rank, exact.effective_rank),
        "… : `κ` above the floor ": deviation(found.kappa, exact.kappa, truth_above),
        "for comparison, an fp32 SVD against an fp64 one: `σ_min` above the floor": deviation(
            coarse[:, -1], values[:, -1], above
        ),
    }
    print(f"{len(single)} states of {source.name}, {list(single.shape[1:])}, torch {torch.__version__}\n")
    print("| against | largest relative deviation |\n| --- | --- |")
    for what, size in rows.items():
        print(f"| {what.strip()} | {size:.1e} |")
    print(f"\n{1e3 * ours / len(single):.3f} ms a state; the fp64 SVD {1e3 * theirs / len(single):.3f} ms")


if __name__ == "__main__":
    main()
