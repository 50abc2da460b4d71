"""`(I + A)^-1` of one strictly lower triangular matrix a program, in registers and shared memory."""

import triton
import triton.language as tl


@triton.jit
def unit_lower_inverse_kernel(a_ptr, inverse_ptr, C: tl.constexpr, LEVELS: tl.constexpr):
    """Invert `[C, C]` fp32 number `program_id(0)`, `C = 2 ** LEVELS`, by the identity in `operator_variants`."""
    base = tl.program_id(0).to(tl.int64) * C * C
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    a = tl.load(a_ptr + base + row * C + column)

    # Blocks of two need no product: the inverse of [[1, 0], [c, 1]] is [[1, 0], [-c, 1]].
    joined = tl.where((row // 2 == column // 2) & (row > column), a, 0.0)
    inverse = tl.where(row == column, 1.0, 0.0) - joined
    for level in tl.static_range(1, LEVELS):  # pyright: ignore[reportGeneralTypeIssues]
        joins = (row >> (level + 1) == column >> (level + 1)) & (row >> level > column >> level)
        left = tl.dot(inverse, tl.where(joins, a, 0.0), input_precision="tf32x3")
        inverse -= tl.dot(left, inverse, input_precision="tf32x3")
    tl.store(inverse_ptr + base + row * C + column, inverse)
