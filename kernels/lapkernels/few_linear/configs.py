"""How a product is cut into programs, and where that was measured to be faster than cuBLAS: nothing is searched.

From `benchmarks.few_rows` on an H200 (2026-11-30, torch 2.11, triton 3.6): us of cuBLAS, Triton's kernel and Gluon's
for layers of a Gated DeltaNet of hidden size 2048, each with a matrix that no cache holds, in a chain of its like.

=====================  ===============  =====  ======================  ======================  ======================
layer                  N x D            apart  16 rows                 32 rows                 64 rows
=====================  ===============  =====  ======================  ======================  ======================
output                 2048 x 3072      yes    8.60  5.51  4.74        8.81  5.38  4.64        9.03  5.68  5.12
down                   2048 x 5632      yes    11.47  7.93  7.06       11.72  7.86  7.19       11.79  8.25  7.45
projections            7744 x 2048      no     11.27  10.33  8.51      11.43  10.25  9.08      11.65  10.47  9.96
gate and up            11264 x 2048     no     14.20  14.16  13.33     14.39  14.39  13.77     15.82  16.51  14.72
head                   32000 x 2048     no     36.48  33.85  32.42     37.01  34.86  32.94     38.64  36.10  34.49
=====================  ===============  =====  ======================  ======================  ======================
"""

from typing import NamedTuple

PROCESSORS = 132
"""Of the GPU that all of this was measured on."""
FEWEST = 10
"""Steps along D of a program, at least: more splits only leave more to be read."""
LEAST_ROWS = 16
"""Fewer were not measured."""
MOST_ROWS = 64
"""More rows are more arithmetic than reading, which is cuBLAS's."""
WARPS = 4


class FewConfig(NamedTuple):
    """How a product is cut.

    Attributes:
        outputs: rows of the matrix that a program takes.
        depth: of D, at a step.
        room: KiB of shared memory for steps that are under way; 100 let two programs share a processor.
        splits: programs that share D.
    """

    outputs: int
    depth: int
    room: int
    splits: int = 1

    def stages(self, rows: int) -> int:
        """Steps that are under way, of operands of 16 bits, for so many rows of x in registers."""
        return max(2, self.room * 512 // (self.depth * (self.outputs + rows)))


def choose(impl: str, outputs: int, width: int, apart: bool = False, *, gated: bool = False) -> FewConfig:
    """The configuration of a product.

    Args:
        impl: `triton` or `gluon`; the latter has more under way, and gains by programs that have a processor alone.
        outputs: N.
        width: D.
        apart: whether the sum over splits is left to the reader.
        gated: whether outputs are gates and ups, of which a program has equal parts.
    """
    if apart:
        config = FewConfig(128, 64, 200) if impl == "gluon" else FewConfig(64, 64, 100)
        tiles, steps = -(-outputs // config.outputs), -(-width // config.depth)
        return config._replace(splits=max(1, min(PROCESSORS // tiles, steps // FEWEST)))
    # Tensor cores take 64 rows at a time, and Triton has two products for gate and up.
    if outputs <= 64 * PROCESSORS and not (gated and impl == "triton"):
        return FewConfig(64, 128, 200)
    alone = impl == "gluon" and outputs <= 128 * PROCESSORS
    return FewConfig(128, 64, 200 if alone else 100)


def beats_cublas(impl: str, rows: int, outputs: int, width: int, apart: bool = False, *, gated: bool = False) -> bool:
    """Whether a product is of a kind that was measured to be faster.

    Args:
        impl: `triton` or `gluon`.
        rows: B.
        outputs: N.
        width: D.
        apart: whether the sum over splits is left to the reader.
        gated: whether outputs are gates and ups; what the activation's own kernel would take is not counted.
    """
    if not LEAST_ROWS <= rows <= MOST_ROWS:
        return False
    config = choose(impl, outputs, width, apart, gated=gated)
    if apart:
        # Where nothing is split, programs are too few to read at full speed.
        return config.splits > 1
    tiles, slots = -(-outputs // config.outputs), PROCESSORS * (200 // config.room)
    # A wave takes as long as a full one, however few of its programs there are. Two thirds of one were measured.
    return 8 * tiles >= 5 * slots * -(-tiles // slots)
