"""Rows of a batch and where they live: slots of a pool, positions, and the ring of convolution inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lapkernels.errors import InvalidInput

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class ConvState:
    """A short depthwise convolution before a decode step: its filter, and what it remembers.

    The inputs lie in a ring: that of the token with `p` tokens before it is at `inputs[slot, p % R]`. Nothing is
    shifted, so every program of a kernel may read the old inputs while one of them writes the new one. What lies
    before a row's first token counts as zero whatever the ring holds, so a slot that is reused need not be cleared.

    Attributes:
        weight: `[channels, W]`, any strides; the last tap meets the current token.
        bias: `[channels]`, or `None`.
        inputs: `[slots, R, channels]`, the last axis contiguous, in the dtype of the step's inputs;
            `R >= W - 1 + T` for steps of T tokens. Written in place.
    """

    weight: Tensor
    bias: Tensor | None
    inputs: Tensor

    @property
    def width(self) -> int:
        """W, taps of the filter."""
        return self.weight.shape[1]

    @property
    def ring(self) -> int:
        """R, inputs that the ring has room for."""
        return self.inputs.shape[1]

    @staticmethod
    def allocate(
        weight: Tensor, bias: Tensor | None, slots: int, *, tokens: int = 1, dtype: torch.dtype | None = None
    ) -> "ConvState":
        """A ring for `slots` rows and steps of up to `tokens` tokens, on the weight's device.

        The filter is copied tap by tap, so that neighbouring channels lie side by side as the kernel reads them.

        Args:
            weight: `[channels, W]`, or `[channels, 1, W]` as `nn.Conv1d` holds it.
            bias: `[channels]`, or `None`.
            slots: rows of the pool.
            tokens: the largest T.
            dtype: of the inputs; `None` for the weight's.
        """
        weight = weight.detach().squeeze(1) if weight.ndim == 3 else weight.detach()
        channels, width = weight.shape
        inputs = weight.new_zeros(slots, width - 1 + tokens, channels, dtype=dtype or weight.dtype)
        return ConvState(weight.t().contiguous().t(), None if bias is None else bias.detach(), inputs)


def store_inputs(conv: ConvState, last: Tensor, position: Tensor, slots: Tensor | None = None) -> None:
    """Put the last raw inputs of rows into their rings, as a prefill must for the steps that follow.

    Args:
        conv: whose `inputs` are written.
        last: `[B, n, channels]`, the `n <= R` inputs before `position`, oldest first. `n = W - 1` is enough. A row
            with fewer than n tokens has anything in front.
        position: `[B]`, tokens of each row so far.
        slots: `[B]`, none of them negative; `None` for `0 .. B - 1`.

    Raises:
        InvalidInput: more inputs than the ring has room for.
    """
    rows, count, _ = last.shape
    if count > conv.ring:
        raise InvalidInput(
            f"{count} inputs do not fit a ring of R = {conv.ring}; pass the last W - 1 = {conv.width - 1}"
        )
    device = conv.inputs.device
    place = torch.arange(rows, device=device) if slots is None else slots.to(device, torch.int64)
    ages = torch.arange(-count, 0, device=device)
    at = (position.to(device, torch.int64).unsqueeze(1) + ages) % conv.ring
    conv.inputs[place.unsqueeze(1), at] = last.to(conv.inputs.dtype)


def check_rows(
    batch: int,
    time: int,
    device: torch.device,
    state: Tensor,
    position: Tensor | None,
    slots: Tensor | None,
    commit: Tensor | None,
    conv: ConvState | None,
    channels: int,
    dtype: torch.dtype,
) -> None:
    """Check what a step is told of its rows. Reads shapes and dtypes, never values.

    Raises:
        InvalidInput: naming the argument, what it is and what it should be.
    """
    for name, index in (("position", position), ("slots", slots), ("commit", commit)):
        if index is None:
            continue
        if tuple(index.shape) != (batch,) or index.dtype not in _INTEGERS:
            raise InvalidInput(
                f"{name} has shape {list(index.shape)} and dtype {index.dtype}; it should be [{batch}], int32 or int64"
            )
        check_contiguous(name, index)
        if index.device != device:
            raise InvalidInput(f"{name} is on {index.device}, the inputs on {device}; they should be on one device")
    if slots is None and state.shape[0] < batch:
        raise InvalidInput(
            f"the state has {state.shape[0]} slots for B = {batch} rows; without `slots`, row b is slot b"
        )
    if conv is None:
        return
    if position is None:
        raise InvalidInput("a convolution needs `position`, the tokens that each row has had so far")
    if conv.weight.ndim != 2 or conv.weight.shape[0] != channels or conv.width < 1:
        raise InvalidInput(f"conv.weight has shape {list(conv.weight.shape)}; it should be [{channels}, W]")
    if conv.bias is not None:
        if tuple(conv.bias.shape) != (channels,):
            raise InvalidInput(f"conv.bias has shape {list(conv.bias.shape)}; it should be [{channels}]")
        check_contiguous("conv.bias", conv.bias)
    if conv.inputs.ndim != 3 or conv.inputs.shape[2] != channels or conv.inputs.shape[0] < state.shape[0]:
        raise InvalidInput(
            f"conv.inputs has shape {list(conv.inputs.shape)}; it should be [{state.shape[0]} or more, R, {channels}]"
        )
    if conv.ring < conv.width - 1 + time:
        raise InvalidInput(
            f"conv.inputs has room for R = {conv.ring} inputs; a step of T = {time} tokens with W = {conv.width} taps "
            f"needs {conv.width - 1 + time}"
        )
    if conv.inputs.dtype != dtype:
        raise InvalidInput(
            f"conv.inputs has dtype {conv.inputs.dtype}, the step's inputs {dtype}; they should share one"
        )
    if conv.inputs.stride(2) != 1:
        raise InvalidInput(f"conv.inputs has strides {conv.inputs.stride()}; its last axis should be contiguous")
    for name, tensor in (("conv.weight", conv.weight), ("conv.bias", conv.bias), ("conv.inputs", conv.inputs)):
        if tensor is not None and tensor.device != device:
            raise InvalidInput(f"{name} is on {tensor.device}, the inputs on {device}; they should be on one device")


def check_tensor(name: str, tensor: Tensor, wanted: tuple[int, ...], device: torch.device) -> None:
    """Check one floating-point tensor's shape, dtype and device.

    Raises:
        InvalidInput: naming the argument, what it is and what it should be.
    """
    if tuple(tensor.shape) != wanted:
        raise InvalidInput(f"{name} has shape {list(tensor.shape)}; it should be {list(wanted)}")
    if tensor.dtype not in FLOATS:
        raise InvalidInput(f"{name} has dtype {tensor.dtype}; it should be fp64, fp32, bf16 or fp16")
    if tensor.device != device:
        raise InvalidInput(f"{name} is on {tensor.device}, the inputs on {device}; they should be on one device")


def check_pool(state: Tensor, wanted: tuple[int, int, int], device: torch.device) -> None:
    """Check a pool of states.

    Args:
        state: `[slots, *wanted]`.
        wanted: its axes behind the slots; the last two in any memory order.
        device: where the inputs lie.

    Raises:
        InvalidInput: naming what it is and what it should be.
    """
    if state.ndim != 4 or tuple(state.shape[1:]) != wanted:
        shape = ", ".join(map(str, wanted))
        raise InvalidInput(f"the state has shape {list(state.shape)}; it should be [slots, {shape}]")
    if state.dtype not in FLOATS:
        raise InvalidInput(f"the state has dtype {state.dtype}; it should be fp32 or bf16")
    if state.device != device:
        raise InvalidInput(f"the state is on {state.device}, the inputs on {device}; they should be on one device")
    strides = [stride for stride, size in zip(state.stride()[2:], wanted[1:], strict=True) if size > 1]
    if strides and 1 not in strides:
        raise InvalidInput(
            f"the state has strides {state.stride()}; neighbours on one of the last two axes should be neighbours in "
            "memory (allocate_state makes such a pool)"
        )


def check_kept_dtype(state: Tensor) -> None:
    """Check that a kernel can keep such states.

    Raises:
        InvalidInput: they are neither fp32 nor bf16.
    """
    if state.dtype not in (torch.float32, torch.bfloat16):
        raise InvalidInput(f"the state has dtype {state.dtype}; the kernel keeps it in fp32 or bf16")


def check_seed(rounding_seed: Tensor | None, state: Tensor, device: torch.device) -> None:
    """Check the seed of stochastic rounding.

    Raises:
        InvalidInput: it is not one integer on the device, or the state is not bf16.
    """
    if rounding_seed is None:
        return
    if rounding_seed.numel() != 1 or rounding_seed.dtype not in _INTEGERS or rounding_seed.device != device:
        raise InvalidInput(
            f"rounding_seed should be one int32 or int64 on {device}; it has shape {list(rounding_seed.shape)} and "
            f"dtype {rounding_seed.dtype}, on {rounding_seed.device}"
        )
    if state.dtype != torch.bfloat16:
        raise InvalidInput(f"rounding_seed rounds a bf16 state; this one has dtype {state.dtype}")


def check_last_axis(name: str, tensor: Tensor) -> None:
    """Check that neighbours on the last axis are neighbours in memory.

    Raises:
        InvalidInput: they are not.
    """
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise InvalidInput(f"{name} has strides {tensor.stride()}; its last axis should be contiguous")


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Check that a tensor's numbers lie one behind the other.

    Raises:
        InvalidInput: they do not.
    """
    if not tensor.is_contiguous():
        raise InvalidInput(f"{name} has shape {list(tensor.shape)} and strides {tensor.stride()}; make it contiguous")
