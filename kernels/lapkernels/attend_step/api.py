"""The step's public function, and the choice of what computes it."""

from torch import Tensor

from lapkernels.attend_step.reference import attend_step_reference
from lapkernels.attend_step.validation import check_arguments
from lapkernels.decoding.choice import KernelOrReference

_CHOICE = KernelOrReference(
    "attend_step", "attention step", "reads each row's own tokens once", "over all that a row has room for, in PyTorch"
)
why_not, select_impl = _CHOICE.why_not, _CHOICE.select_impl


def attend_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    pages: Tensor,
    position: Tensor,
    slots: Tensor,
    scale: float | None = None,
    window: int | None = None,
    longest: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Take one token of each row in: keep its key and value, and attend from it to all of the row's tokens.

    A row has the tokens `0 .. position`, of which the last is this one; `P` of them share a page, and no other row has
    that page. What lies in a page behind a row's last token is never read into the result, be it NaN. Scores and sums
    are fp32 (fp64 for fp64 inputs).

    Args:
        query: `[B, HQ, K]`; HQ is a multiple of H, and query head j reads key head `j // (HQ // H)`.
        key: `[B, H, K]`, of the new token.
        value: `[B, H, V]`, of the new token.
        keys: `[pages, H, P, K]`, P a power of two, 16 at least; the new key is written in place.
        values: `[pages, H, P, V]`; the new value is written in place.
        pages: `[slots, M]`, int32: the page of tokens `P i .. P i + P - 1` of the row in a slot at `[slot, i]`. Behind
            the page of the new token there may be the number of any page.
        position: `[B]`, int32 or int64, tokens that each row has had so far, under `M P`.
        slots: `[B]`, int32 or int64, where each row lives, no two alike. Negative: a padding row, of which nothing is
            read or written and whose output is zero.
        scale: factor on the scores; `None` for `K ** -0.5`.
        window: tokens that a row sees at most, the new one counted; `None` for all.
        longest: tokens of the longest row, the new one counted, where the host knows it; the reference then looks no
            further.
        impl: `auto` (see `select_impl`), `reference` or `triton`.

    Returns:
        `[B, HQ, V]` in the query's dtype, contiguous.

    Raises:
        InvalidInput: a shape, dtype, stride, device or setting that breaks the contract.
        KernelUnavailable: an `impl` asked for by name that cannot run here.

    Source: softmax over splits of the tokens, then over the splits: Flash-Decoding (arXiv 2311.01282); pages of keys
    and values that any row may take: PagedAttention (arXiv 2309.06180).
    """
    check_arguments(query, key, value, keys, values, pages, position, slots, window)
    factor: float = query.shape[-1] ** -0.5 if scale is None else scale
    if _CHOICE.chosen(impl, query.device, query.dtype) == "triton":
        from lapkernels.attend_step.triton_attend import attend_step_triton

        return attend_step_triton(query, key, value, keys, values, pages, position, slots, factor, window)
    return attend_step_reference(query, key, value, keys, values, pages, position, slots, factor, window, longest)
