"""Check and time linear layers over few rows against torch's products, and what reading the matrix must take.

`PYTHONPATH=kernels python -m benchmarks.thin_linear --output rows.jsonl [--budget SECONDS] [--all]` on a GPU. The
layers are those of a Gated DeltaNet of hidden size 2048, half of whose keys are gone. Times are medians of CUDA graphs
of layers in turn, each with a matrix that no cache holds, as in a model. The first rows of a shape are torch's and our
choice; `--all` adds the configurations beside it.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lapkernels import timing
from lapkernels.thin_linear import Normed, thin_linear
from lapkernels.thin_linear.triton_thin import ThinConfig, choose_thin, thin_linear_triton


class Layer(NamedTuple):
    """One of a block's layers: `outputs x width`, with a norm or SwiGLU before it where rows are few."""

    name: str
    outputs: int
    width: int
    before: str


LAYERS = [
    Layer("gate and up", 11264, 2048, "norm"),
    Layer("projections", 7744, 2048, "norm"),
    Layer("down", 2048, 5632, "gated"),
    Layer("output", 2048, 3072, ""),
]
ROWS = (1, 4, 2, 8)


def variants(layer: Layer, rows: int, everything: bool) -> Iterator[tuple[str, Any]]:
    """Configurations by name: `None` is torch's product."""
    yield "torch", None
    first = choose_thin(rows, layer.width)
    more = [ThinConfig(4, 8192, 4), ThinConfig(8, 16384, 8), ThinConfig(2, 4096, 2), ThinConfig(4, 4096, 2)]
    more += [
        ThinConfig(8, 8192, 8),
        ThinConfig(8, 8192, 4),
        ThinConfig(4, 8192, 4, False),
        ThinConfig(8, 8192, 4, False),
    ]
    more += [ThinConfig(4, 4096, 2, False), ThinConfig(2, 4096, 2, False), ThinConfig(8, 8192, 8, False)]
    more += [ThinConfig(1, 8192, 4), ThinConfig(2, 16384, 8), ThinConfig(4, 16384, 8)]
    for config in dict.fromkeys((first, *(more if everything else ()))):
        yield " ".join(map(str, config)), config


def call(config: Any, layer: Layer, x: Tensor, weight: Tensor, norm: Normed) -> Tensor:
    """One layer: torch's product alone, ours with what comes before it."""
    if config is None:
        return F.linear(x[:, : layer.width], weight)
    gated, parts = layer.before == "gated", norm if layer.before == "norm" else (None, 0.0, 0.0)
    x = x if gated else x[:, : layer.width]
    return thin_linear_triton(x, weight, None, *parts, gated, None, 1.0, ready=True, config=config)


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no other row is begun")
    parser.add_argument("--all", action="store_true", help="configurations beside our choice")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="of the input, comma-separated")
    options = parser.parse_args()
    begun, device = time.monotonic(), torch.device("cuda")
    rate = timing.copy_bandwidth(device)
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=torch.bfloat16)

    with options.output.open("w") as file:
        for rows in map(int, options.rows.split(",")):
            for layer in LAYERS:
                weights = [draw(layer.outputs, layer.width) * layer.width**-0.5 for _ in range(12)]
                x, norm = draw(rows, 2 * layer.width), Normed(draw(layer.width), 1e-6)
                for name, config in variants(layer, rows, options.all):
                    if time.monotonic() - begun > options.budget:
                        return
                    facts: dict[str, Any] = {"rows": rows, "layer": layer.name, "config": name}
                    try:
                        facts |= _row(config, layer, x, weights, norm, rate)
                    except Exception as error:
                        facts["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
                    print(json.dumps(facts), file=file, flush=True)
                    print({key: round(y, 3) if isinstance(y, float) else y for key, y in facts.items()}, flush=True)


def _row(
    config: Any, layer: Layer, x: Tensor, weights: list[Tensor], norm: Normed, rate: float
) -> dict[str, float | bool]:
    found = call(config, layer, x, weights[0], norm).double()
    inside = config is not None
    truth = thin_linear(
        x.double() if inside and layer.before == "gated" else x[:, : layer.width].double(),
        weights[0].double(),
        norm=norm._replace(weight=norm.weight.double()) if inside and layer.before == "norm" else None,
        gated=inside and layer.before == "gated",
        impl="reference",
    )
    error = float((found - truth).norm() / truth.norm())
    # Rounded once before the product and once behind it.
    if error > 2**-7:
        return {"error": error, "right": False}
    calls: list[Callable[[], Any]] = [partial(call, config, layer, x, weight, norm) for weight in weights]
    took = timing.measure(calls, x.device, graph=True, limit=0.6).seconds
    floor = weights[0].nbytes / rate
    return {"us": 1e6 * took, "floor_us": 1e6 * floor, "of_floor": took / floor, "error": error}


if __name__ == "__main__":
    main()
