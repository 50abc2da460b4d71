"""The public function, and the choice of what computes it."""

from torch import Tensor

from lapkernels.decoding.choice import KernelOrReference
from lapkernels.greedy_token.reference import greedy_token_reference
from lapkernels.greedy_token.validation import check_arguments

_CHOICE = KernelOrReference("greedy_token", "choice of the likeliest token", "one kernel instead of four", "in PyTorch")
why_not, select_impl = _CHOICE.why_not, _CHOICE.select_impl


def greedy_token(logits: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, *, impl: str = "auto") -> None:
    """Write each row's likeliest token, and count up the positions of rows that have a slot.

    As for `torch.argmax`, NaN is the likeliest of all; of several that are, the first token is taken.

    Args:
        logits: `[B, vocabulary]`, the last axis contiguous.
        tokens: `[B]`, int64, contiguous, written.
        positions: `[B]`, int64, contiguous, counted up in place.
        slots: `[B]`, int32 or int64, contiguous; negative for a row that is only padding.
        impl: `auto` (see `select_impl`), `reference` or `triton`.

    Raises:
        InvalidInput: a shape, dtype, stride or device that breaks the contract.
        KernelUnavailable: an `impl` asked for by name that cannot run here.
    """
    check_arguments(logits, tokens, positions, slots)
    if _CHOICE.chosen(impl, logits.device, logits.dtype) == "triton":
        # Here, since it imports triton.
        from lapkernels.greedy_token.triton_greedy import greedy_token_triton

        greedy_token_triton(logits, tokens, positions, slots)
    else:
        greedy_token_reference(logits, tokens, positions, slots)
