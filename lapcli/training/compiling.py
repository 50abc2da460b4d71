"""Decoder blocks of a model through `torch.compile`, in place, so that names and hooks stay what they were.

A compiler's wrong gradient shows in nothing but a model that learns less. So the first time that a block of some kind
is given inputs of some shape, its gradients are compared with those that it has without the compiler.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lapcli.errors import ModelError
from lapcli.training.distributed import decoder_blocks


def compile_blocks(model: Any) -> None:
    """Let every decoder block's forward pass be compiled when it first runs; blocks of one shape share the code.

    The forward method is compiled, not the module: what wraps a block (hooks that shard it, gradient checkpointing)
    stays outside, as it is. Shapes are taken as constants, so rows should all have one length and no boundaries.

    Args:
        model: a causal language model, out of any wrapper; changed in place.

    Raises:
        ModelError: its decoder blocks are not found. Later, from within a training step: compiled gradients are wrong.
    """
    seen: set[Any] = set()
    for block in decoder_blocks(model):
        # Not by name: modules let an instance have a method of its own.
        block.forward = _compared(block, seen)


def _compared(block: nn.Module, seen: set[Any]) -> Callable[..., Any]:
    """A block's compiled forward pass, compared once for each kind of block and shape.

    Args:
        block: whose `forward` is compiled.
        seen: what was compared, of all blocks; grows.
    """
    plain: Any = block.forward
    compiled: Any = torch.compile(plain, dynamic=False, options=_options())

    mine: set[Any] = set()

    def forward(hidden: Tensor, *others: Any, **named: Any) -> Any:
        shape = hidden.shape, hidden.dtype, torch.is_autocast_enabled(hidden.device.type)
        if torch.is_grad_enabled() and shape not in mine:
            mine.add(shape)
            # Here, while FSDP2 has the parameters whole, and not at every step.
            kind = type(block), shape, tuple(each.shape for each in block.parameters())
            if kind not in seen:
                seen.add(kind)
                _compare(block, plain, compiled, hidden, others, named)
        return compiled(hidden, *others, **named)

    return forward


def _compare(
    block: nn.Module, plain: Any, compiled: Any, hidden: Tensor, others: Sequence[Any], named: dict[str, Any]
) -> None:
    """Raise unless compiled gradients are as near those in fp32 as they are without the compiler.

    Raises:
        ModelError: naming the gradient and both distances.
    """
    given = [name for name, each in block.named_parameters() if each.requires_grad]
    trained = [block.get_parameter(name) for name in given]
    generator = torch.Generator(hidden.device).manual_seed(0)
    upstream: Tensor | None = None

    def gradients(run: Any, autocast: bool) -> list[Tensor]:
        nonlocal upstream
        start = hidden.detach().requires_grad_()
        kind = hidden.device.type
        # Gradient checkpointing around the block would compute it again to give what was saved.
        kept = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with torch.enable_grad(), kept, torch.autocast(kind, enabled=autocast, dtype=torch.get_autocast_dtype(kind)):
            found = run(start, *others, **named)
            output: Tensor = found[0] if isinstance(found, tuple) else found
        if upstream is None:
            upstream = torch.randn(output.shape, generator=generator, device=output.device, dtype=output.dtype)
        found = torch.autograd.grad(output, [start, *trained], upstream.to(output.dtype), allow_unused=True)
        return [torch.zeros_like(x) if each is None else each for each, x in zip(found, [start, *trained], strict=True)]

    as_it_is = torch.is_autocast_enabled(hidden.device.type)
    truth = gradients(plain, autocast=False)
    apart = [_apart(gradients(run, as_it_is), truth) for run in (plain, compiled)]
    # What bf16 would round a gradient by does no harm; what compilers were seen to do wrong is far above it.
    for name, without, found in zip(["its input", *given], *apart, strict=True):
        if not found <= 4 * without + 2**-7:
            kind = f"{name} of a {type(block).__name__}"
            raise ModelError(
                f"torch.compile of torch {torch.__version__} makes a wrong gradient of {kind}: {found:.2g} of it away "
                f"from the same in {truth[0].dtype}, where it is {without:.2g} without the compiler",
                "leave out --compile",
            )


def _apart(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    """How far each gradient is from what it should be, as a share of that."""
    return [float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30))
            for one, other in zip(found, truth, strict=True)]  # fmt: skip


def _options() -> dict[str, Any]:
    """The compiler's settings.

    One fusion of its GPU backend, of sums over rows and over columns in one kernel, has known errors
    (`kernels/lapkernels/delta_rule/README.md`, "Compiled"); older versions do not have it.
    """
    from torch._inductor import config

    name = "mix_order_reduction"
    return {f"triton.{name}": False} if hasattr(config.triton, name) else {}
