"""Check and time what surrounds a recurrence in training, forward and with its gradients, against PyTorch and fla.

`PYTHONPATH=kernels python -m benchmarks.training_parts --output rows.jsonl [--budget SECONDS]` on a GPU (`--device cpu`
shows that it runs). Convolution, norms and SwiGLU of a small model's training and of a large one's, in bf16 with fp32
weights. Ways: ours (`lapkernels`), the formulas in PyTorch, and fla's kernels where fla is installed. The floor is what
must be read and written at the rate of a large copy: each operand and its gradient once. Results and gradients are
compared with the formulas in fp64 before anything is timed; what is further off than bf16 rounds gets no time.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lapkernels import timing
from lapkernels.norm import rms_norm, swiglu
from lapkernels.short_conv import short_conv

EPS = 1e-6
Run = Callable[..., Tensor]


class Part(NamedTuple):
    """One operator at one size.

    Attributes:
        name: in a table.
        operands: names and shapes, gradients of all of which are wanted; `weight` is in fp32.
        output: shape of the result.
        ours: what computes it here; takes the operands by name, and `impl`.
        theirs: fla's.
    """

    name: str
    operands: dict[str, tuple[int, ...]]
    output: tuple[int, ...]
    ours: Run
    theirs: Run

    def moved(self, backward: bool) -> int:
        """Bytes that must move: operands and result; with gradients those of all, and operands a second time."""
        sizes = [torch.Size(shape).numel() * (4 if name == "weight" else 2) for name, shape in self.operands.items()]
        forward = sum(sizes) + 2 * torch.Size(self.output).numel()
        return forward + (2 * sum(sizes) + 2 * torch.Size(self.output).numel() if backward else 0)


def parts(rows: int, steps: int, hidden: int, inner: int, channels: int, head: int) -> Iterator[Part]:
    """The operators of one model.

    Args:
        rows: of a batch.
        steps: tokens of a row.
        hidden: size of the residual stream.
        inner: of the MLP.
        channels: of the values, which are those of the gate too.
        head: channels of a value head.
    """
    at = f"{rows} x {steps}"
    wide, mlp, heads = (rows, steps, hidden), (rows, steps, inner), (rows, steps, channels // head, head)
    yield Part(
        f"convolution, 4 taps, {at} x {channels}",
        {"x": (rows, steps, channels), "weight": (channels, 4)},
        (rows, steps, channels),
        lambda x, weight, impl: short_conv(x, weight, impl=impl),
        lambda x, weight: _fla("causal_conv1d", "causal_conv1d")(x, weight, activation="silu")[0],
    )
    yield Part(
        f"norm, {at} x {hidden}",
        {"x": wide, "weight": (hidden,)},
        wide,
        lambda x, weight, impl: rms_norm(x, weight, EPS, impl=impl).output,
        lambda x, weight: _fla("layernorm", "rms_norm")(x, weight, None, eps=EPS),
    )
    yield Part(
        f"norm of a sum, {at} x {hidden}",
        {"x": wide, "residual": wide, "weight": (hidden,)},
        wide,
        lambda x, residual, weight, impl: rms_norm(x, weight, EPS, residual=residual, impl=impl).output,
        lambda x, residual, weight: _fla("layernorm", "rms_norm")(x, weight, None, residual=residual, eps=EPS),
    )
    yield Part(
        f"gated norm, {at} x {channels}",
        {"x": heads, "gate": heads, "weight": (head,)},
        heads,
        lambda x, gate, weight, impl: rms_norm(x, weight, EPS, gate=gate, impl=impl).output,
        lambda x, gate, weight: _fla("fused_norm_gate", "rms_norm_gated")(x, gate, weight, None, eps=EPS),
    )
    yield Part(
        f"SwiGLU, {at} x {inner}",
        {"x": mlp, "up": mlp},
        mlp,
        lambda x, up, impl: swiglu(x, up, impl=impl),
        lambda x, up: _fla("activations", "swiglu")(x, up),
    )


def _fla(module: str, name: str) -> Any:
    import importlib

    places = {"layernorm": ("fla.modules.layernorm", "fla.modules.norm.layernorm"),
              "fused_norm_gate": ("fla.modules.fused_norm_gate", "fla.modules.norm.fused_norm_gate"),
              "causal_conv1d": ("fla.modules.causal_conv1d", "fla.modules.convolution"),
              "activations": ("fla.modules.activations",)}  # fmt: skip
    for place in places[module]:
        try:
            return getattr(importlib.import_module(place), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"fla has no {name}")


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no other row is begun")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="toy sizes: shows that it runs, measures nothing")
    options = parser.parse_args()
    begun, device = time.monotonic(), torch.device(options.device)
    rate = timing.copy_bandwidth(device)
    models = (
        [(2, 40, 64, 96, 128, 32)]
        if options.small
        else [(32, 1024, 256, 768, 256, 64), (4, 4096, 2048, 5632, 3072, 512)]
    )
    with options.output.open("w") as file:
        for model in models:
            for part in parts(*model):
                for way in ("lapkernels", "pytorch", "fla"):
                    for backward in (False, True):
                        if time.monotonic() - begun > options.budget:
                            return
                        facts: dict[str, Any] = {"part": part.name, "way": way, "backward": backward}
                        try:
                            facts |= _row(part, way, backward, device, rate)
                        except Exception as error:
                            facts["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
                        print(json.dumps(facts), file=file, flush=True)
                        print({key: round(y, 4) if isinstance(y, float) else y for key, y in facts.items()}, flush=True)


def _row(part: Part, way: str, backward: bool, device: torch.device, rate: float) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    operands = {
        name: draw(shape, torch.float32 if name == "weight" else torch.bfloat16)
        for name, shape in part.operands.items()
    }
    upstream = draw(part.output, torch.bfloat16)
    if way == "fla":
        run: Run = part.theirs
    else:
        impl = {"lapkernels": "auto", "pytorch": "reference"}[way]
        run = lambda **given: part.ours(**given, impl=impl)  # noqa: E731

    def once() -> list[Tensor]:
        if not backward:
            with torch.no_grad():
                return [run(**operands)]
        leaves = {name: value.requires_grad_() for name, value in operands.items()}
        output = run(**leaves)
        return [output, *torch.autograd.grad(output, list(leaves.values()), upstream)]

    error = _distance(part, operands, upstream, once(), backward)
    # Each result is rounded once; a sum with a residual before that, and fla rounds the sum of a weight's gradient.
    if not error < 2**-7:
        return {"error": error, "right": False}
    took = timing.measure(once, device, graph=device.type == "cuda", limit=0.6).seconds
    floor = part.moved(backward) / rate
    return {"us": 1e6 * took, "floor_us": 1e6 * floor, "of_floor": took / floor, "error": error}


def _distance(part: Part, operands: dict[str, Tensor], upstream: Tensor, found: list[Tensor], backward: bool) -> float:
    """The largest relative distance of a result or gradient from the formulas in fp64."""
    exact = {name: value.detach().double().requires_grad_() for name, value in operands.items()}
    output = part.ours(**exact, impl="reference")
    truth = [output]
    if backward:
        truth += torch.autograd.grad(output, list(exact.values()), upstream.double())
    pairs = [(one.detach().double(), other.detach()) for one, other in zip(found, truth, strict=True)]
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


if __name__ == "__main__":
    main()
