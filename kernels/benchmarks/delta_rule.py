"""Time the chunked delta rule, forward, against fla's and FlashQLA's kernels, and its tiles against each other.

PYTHONPATH=kernels python -m benchmarks.delta_rule --output FILE.jsonl [--budget SECONDS] [--tiles] [--ours]
    [--channels]

Every line of the file is one row: a shape, an implementation, milliseconds (median of three trials, a CUDA graph of
calls on operands that no cache holds), the floor that memory sets, and the error against the PyTorch form in fp32. A
row whose error is above twice that of the PyTorch form in the row's own dtype has no time.
"""

import argparse
import contextlib
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lapkernels import timing
from lapkernels.delta_rule.api import delta_rule
from lapkernels.delta_rule.triton_launch import Tiles, delta_rule_triton


class Shape(NamedTuple):
    """What is computed: `batch` rows of `time` steps."""

    batch: int
    time: int
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    by_channel: bool = False

    def nbytes(self) -> int:
        """What must be read and written once, in bf16 with fp32 gates."""
        tokens = self.batch * self.time
        channels = 2 * self.key_heads * self.key_width + 2 * self.value_heads * self.value_width
        gates = self.value_heads * (self.key_width if self.by_channel else 1)
        return tokens * (2 * channels + 2 * self.value_heads + 4 * gates)


SHAPES = [
    Shape(8, 8192, 16, 32, 64, 128),
    Shape(8, 8192, 16, 32, 32, 128),
    Shape(8, 8192, 16, 32, 128, 128),
    Shape(8, 8192, 16, 32, 96, 128),
    Shape(8, 2048, 6, 6, 128, 512),
    Shape(8, 2048, 6, 6, 256, 512),
    Shape(1, 2048, 6, 6, 128, 512),
    Shape(2, 4096, 16, 32, 64, 128),
]
SMALL = Shape(2, 100, 1, 2, 32, 16)


class Operands(NamedTuple):
    """Of one call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    g: torch.Tensor


def operands(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Operands:
    """Random ones: q and k not normalised, gates like those of a trained model."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*axes: int) -> torch.Tensor:
        return torch.randn(shape.batch, shape.time, *axes, generator=generator, device=device, dtype=dtype)

    heads = shape.value_heads
    gates = (heads, shape.key_width) if shape.by_channel else (heads,)
    return Operands(
        normal(shape.key_heads, shape.key_width),
        normal(shape.key_heads, shape.key_width),
        normal(heads, shape.value_width),
        normal(heads).sigmoid(),
        -0.05 * normal(*gates).float().exp(),
    )


def implementations(
    shape: Shape, dtype: torch.dtype, every_tile: bool, *, ours_alone: bool = False
) -> Iterator[tuple[str, Callable[[Operands], Any]]]:
    """By name; each takes operands and returns the output."""

    def ours(tiles: Tiles | None) -> Callable[[Operands], Any]:
        return lambda x: delta_rule_triton(
            x.q, x.k, x.v, x.beta, x.g, None, shape.key_width**-0.5, None, None, qk_l2norm=True, final_state=False,
            tiles=tiles,
        )[0]  # fmt: skip

    yield "triton", ours(None)
    if not ours_alone:
        # fla's tuning takes longer than all that is measured here.
        with contextlib.suppress(ImportError):
            if shape.by_channel:
                from fla.ops.kda import chunk_kda as theirs  # pyright: ignore[reportMissingImports]
            else:
                from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
                    chunk_gated_delta_rule as theirs,
                )

            yield "fla", lambda x: theirs(x.q, x.k, x.v, x.g, x.beta, use_qk_l2norm_in_kernel=True)[0]
    if not every_tile:
        return
    for tiles in (
        Tiles(128, 4, 2),
        Tiles(128, 4, 2, q_late=True),
        Tiles(64, 4, 2),
        Tiles(64, 4, 2, q_late=True),
    ):
        if tiles.value_block <= shape.value_width:
            yield "triton " + " ".join(map(str, tiles)), ours(tiles)


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no other row is begun")
    parser.add_argument("--tiles", action="store_true", help="all tiles, not only those that are chosen")
    parser.add_argument("--ours", action="store_true", help="no other kernels than lapkernels'")
    parser.add_argument("--channels", action="store_true", help="a decay of each key channel (Kimi Delta Attention)")
    parser.add_argument("--small", action="store_true", help="one small shape, wherever it can run")
    parser.add_argument("--warm", type=int, default=0, help="processes that compile everything beforehand")
    options = parser.parse_args()
    shapes = [shape._replace(by_channel=options.channels) for shape in ([SMALL] if options.small else SHAPES)]
    if options.warm:
        _compile(shapes, options.warm, options.tiles)
    begun = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bandwidth = timing.copy_bandwidth(device)
    with options.output.open("w") as file:
        for shape in shapes:
            few = shape._replace(batch=1, time=min(shape.time, 1024))
            probe = operands(few, dtype, device, 1)
            wide = Operands(*(x.float() for x in probe))
            truth = delta_rule(*wide, qk_l2norm=True, impl="chunked").output
            plain = delta_rule(*probe, qk_l2norm=True, impl="chunked").output
            allowed = 2 * _error(plain, truth) + torch.finfo(dtype).eps
            sets = [operands(shape, dtype, device, seed) for seed in range(timing.copies(shape.nbytes(), device))]
            for name, call in implementations(shape, dtype, options.tiles, ours_alone=options.ours):
                if time.monotonic() - begun > options.budget:
                    return
                row: dict[str, Any] = {**shape._asdict(), "impl": name, "floor_ms": 1e3 * shape.nbytes() / bandwidth}
                try:
                    row["error"] = _error(call(probe), truth)
                    row["allowed"] = allowed
                    if row["error"] <= allowed:
                        calls = [partial(call, x) for x in sets]
                        row["ms"] = 1e3 * timing.measure(calls, device, graph=True, limit=1.5).seconds
                        row["kernels_us"] = _kernels(calls[0], device)
                except Exception as error:
                    row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
                print(json.dumps(row), file=file, flush=True)
                print({key: round(x, 4) if isinstance(x, float) else x for key, x in row.items()}, flush=True)
            if time.monotonic() - begun < options.budget and shape.time == 4096:
                _gradients(shape, sets, device, file, ("triton",) if options.ours else ("triton", "fla", "chunked"))
            timing.free(device)


def _gradients(shape: Shape, sets: list[Operands], device: torch.device, file: Any, impls: Sequence[str]) -> None:
    """Rows of forward and backward together, whose correctness is the tests' business."""
    for impl in impls:
        row: dict[str, Any] = {**shape._asdict(), "impl": impl, "passes": "forward + backward"}

        def call(x: Operands, impl: str = impl) -> torch.Tensor:
            return delta_rule(*x, qk_l2norm=True, impl=impl).output

        try:
            took = timing.measure(_both(call, sets[0]), device, limit=2.0)
            row |= {"ms": 1e3 * took.seconds, "kernels_us": _kernels(_both(call, sets[0]), device)}
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        print(json.dumps(row), file=file, flush=True)
        print(row, flush=True)


def _compile(shapes: Sequence[Shape], processes: int, tiles: bool) -> None:
    """Fill triton's cache, many kernels at a time."""
    names = [
        (shape, name) for shape in shapes for name, _ in implementations(shape, torch.bfloat16, tiles, ours_alone=True)
    ]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.starmap(_compile_one, names, chunksize=1)


def _compile_one(shape: Shape, name: str) -> None:
    probe = operands(shape._replace(batch=1, time=1024), torch.bfloat16, torch.device("cuda"), 1)
    with contextlib.suppress(Exception):
        dict(implementations(shape, torch.bfloat16, True, ours_alone=True))[name](probe)


def _both(call: Callable[[Operands], Any], x: Operands) -> Callable[[], Any]:
    """Forward and backward."""
    leaves = Operands(*(each.detach().requires_grad_() for each in x))
    upstream = torch.ones_like(x.v)
    return lambda: torch.autograd.grad(call(leaves), leaves, upstream)


def _error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.float() - truth.float()).norm() / truth.float().norm())


def _kernels(call: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Microseconds of each kernel of one call."""
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        call()
        timing.synchronize(device)
    return {each.key[:40]: each.device_time_total for each in record.key_averages() if each.device_time_total > 5}


if __name__ == "__main__":
    main()
