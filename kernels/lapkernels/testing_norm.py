"""Checks of the small operators' gradients that tests of the interpreter and of a GPU share, against fp64."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lapkernels.norm import rms_norm, swiglu
from lapkernels.testing import assert_as_precise, poisoned

CASES: dict[str, dict[str, Any]] = {
    "alone": {},
    "a sum": {"residual": True, "offset": 1.0},
    "a wide sum": {"residual": True, "wide": True},
    "SiLU": {"gate": "silu"},
    "sigmoid": {"gate": "sigmoid", "offset": 1.0},
    "a gated sum": {"residual": True, "gate": "swish"},
}
_EPS = 1e-5


def check_norm_gradients(
    case: str, rows: int, width: int, impl: str, dtype: torch.dtype, device: str = "cpu", frozen: bool = False
) -> None:
    """Results and gradients of the norm: as near fp64 as the reference, but for roundings.

    Args:
        case: of `CASES`.
        rows: of each of two batches.
        width: D.
        impl: the implementation.
        dtype: of x; the weight is fp32, as masters are, or fp64.
        device: where.
        frozen: whether the weight is.
    """
    options = CASES[case]
    gate, offset, kept = options.get("gate"), options.get("offset", 0.0), dtype
    wide = torch.promote_types(dtype, torch.float32)
    draw = _drawn((2, rows, width))
    given: dict[str, Tensor] = {"x": draw(dtype), "weight": _drawn((width,))(wide, 2)}
    if options.get("residual"):
        kept = wide if options.get("wide") else dtype
        given["residual"] = draw(kept, 3)
    if gate is not None:
        given["gate"] = draw(dtype, 4, 3.0)
    # As in a model under autocast, where the stream is wider than what is added: the output is as wide.
    d = {"output": draw(kept, 5), "residual": draw(kept, 6)}
    if "residual" not in given:
        del d["residual"]

    def run(x: Tensor, weight: Tensor, impl: str = impl, **others: Tensor) -> dict[str, Tensor]:
        activation = {} if gate is None else {"gate_activation": gate}
        found = rms_norm(x, weight, _EPS, offset=offset, **others, **activation, dtype=kept, impl=impl)._asdict()
        return {name: found[name] for name in d}

    def formula(x: Tensor, weight: Tensor, **others: Tensor) -> dict[str, Tensor]:
        total = x + others["residual"] if "residual" in others else x
        # What is normed is rounded first.
        total = total + (total.to(kept).double() - total).detach()
        normed = total / (total.square().mean(-1, keepdim=True) + _EPS).sqrt() * (weight + offset)
        if gate is not None:
            normed = normed * (torch.sigmoid if gate == "sigmoid" else F.silu)(others["gate"])
        return {name: x for name, x in (("output", normed), ("residual", total)) if name in d}

    still = ("weight",) if frozen else ()
    exact = {name: x.double() for name, x in given.items()}
    truth = _results(formula, exact, {name: x.double() for name, x in d.items()}, still)
    plain = truth if dtype == torch.float64 else _results(lambda **k: run(**k, impl="reference"), given, d, still)
    with poisoned():
        found = _results(run, _moved(given, device), _moved(d, device), still)
        # One order of sums on a GPU, where programs race.
        again = found if device == "cpu" else _results(run, _moved(given, device), _moved(d, device), still)
    for name, x in found.items():
        assert torch.equal(x, again[name]), f"{name} differs from one run to the next"
        wanted = given[name[1:]].dtype if name.startswith("d") else d[name].dtype
        assert x.dtype == wanted, f"{name} has dtype {x.dtype}, not {wanted}"

    # x's gradient is what is left of two, and the weight's a sum over rows, each of a sum over a row.
    total = exact["x"] + exact["residual"] if "residual" in exact else exact["x"]
    over = (total.square().mean(-1, keepdim=True) + _EPS).rsqrt()
    slope = d["output"].double()
    if gate is not None:
        slope = slope * (torch.sigmoid if gate == "sigmoid" else F.silu)(exact["gate"])
    inner = slope * (exact["weight"] + offset)
    mean = (inner * total * over).square().mean(-1, keepdim=True).sqrt()
    parts = over * (inner.square() + (total * over * mean).square()).sqrt()
    sizes = {"dx": parts, "dresidual": parts, "dweight": (slope * total * over).square().sum((0, 1)).sqrt()}
    for name, right in truth.items():
        rounding = found[name].dtype
        terms = (2 * rows if name == "dweight" else 1) * (width if rounding == wide else 1)
        one = [{name: each[name]} for each in (found, truth, plain)]
        assert right.shape == sizes.get(name, right).shape
        assert_as_precise(one[0], one[1], one[2], rounding, terms, {name: sizes[name]} if name in sizes else None)


def check_swiglu_gradients(rows: int, width: int, impl: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Gradients of gate and up, which lie side by side or apart."""
    joined, d = _drawn((rows, 2 * width))(dtype, 1, 3.0), _drawn((rows, width))(dtype, 2)

    def formula(x: Tensor) -> dict[str, Tensor]:
        gate, up = x.chunk(2, dim=-1)
        return {"output": gate / (1 + (-gate).exp()) * up}

    ways: dict[str, Callable[..., dict[str, Tensor]]] = {
        "side by side": lambda x, impl=impl: {"output": swiglu(x, impl=impl)},
        "apart": lambda x, impl=impl: {"output": swiglu(*(each.contiguous() for each in x.chunk(2, -1)), impl=impl)},
    }
    truth = _results(formula, {"x": joined.double()}, {"output": d.double()})
    for run in ways.values():
        plain = truth if dtype == torch.float64 else _results(
            lambda x, run=run: run(x, impl="reference"), {"x": joined}, {"output": d}
        )  # fmt: skip
        with poisoned():
            found = _results(run, _moved({"x": joined}, device), _moved({"output": d}, device))
        # Three products and an exponential, rounded in fp32 alone.
        assert_as_precise(found, truth, plain, dtype, 4)


def _drawn(size: tuple[int, ...]) -> Callable[..., Tensor]:
    """What draws a tensor: of a dtype, a seed and a spread; a view into a larger one of NaN."""

    def draw(dtype: torch.dtype, seed: int = 1, spread: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return _amid_nan(spread * torch.randn(*size, generator=generator, dtype=torch.float64), dtype, "cpu")

    return draw


def _amid_nan(x: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    around = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan, dtype=dtype, device=device)
    around[..., : x.shape[-1]] = x.to(device)
    return around[..., : x.shape[-1]]


def _moved(given: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    return {name: _amid_nan(x, x.dtype, device) for name, x in given.items()}


def _results(
    run: Callable[..., dict[str, Tensor]], given: dict[str, Tensor], d: dict[str, Tensor], frozen: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Results, and the gradients of the arguments that are not frozen, by name."""
    # Leaves keep their strides.
    leaves = {name: x.detach().requires_grad_(name not in frozen) for name, x in given.items()}
    outputs = run(**leaves)
    trained = {name: x for name, x in leaves.items() if x.requires_grad}
    gradients = torch.autograd.grad(list(outputs.values()), list(trained.values()), list(d.values()))
    return {**outputs, **{f"d{name}": x for name, x in zip(trained, gradients, strict=True)}}
