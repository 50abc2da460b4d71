"""How a product of few rows is cut into programs, whatever language they are written in."""

from typing import NamedTuple

import torch
from torch import Tensor

PROCESSORS = 132
"""Of an H200."""
_FEWEST = 4
"""Steps along D of a program, at least: what it adds costs more than what it spares where it has fewer."""


class Plan(NamedTuple):
    """How a product is cut into programs.

    Attributes:
        columns: rows of the matrix that a program takes.
        depth: of D, at a step.
        room: KiB of shared memory for steps that are under way; 100 let the programs of two kernels share a processor.
        warps: of a program.
        fill: programs for each processor, about; what the matrix's rows do not give, splits along D do.
        ask: columns of each of its rows that a program brings into L2 before its turn.
        sums: who adds the shares of splits: the `last` of their programs, a `kernel`, or their `reader`.
        haste: whether the next kernel may begin before this one's turn.
    """

    columns: int
    depth: int
    room: int
    warps: int
    fill: float
    ask: int = 0
    sums: str = "last"
    haste: bool = False

    def stages(self, rows: int) -> int:
        """Steps that are under way, of operands of 16 bits."""
        return max(2, self.room * 512 // (self.depth * (self.columns + rows)))

    def splits(self, outputs: int, width: int) -> int:
        """Programs that share D, for a matrix `outputs x width`."""
        tiles, steps = -(-outputs // self.columns), -(-width // self.depth)
        return max(1, min(int(PROCESSORS * self.fill / tiles), steps // _FEWEST))

    def __str__(self) -> str:
        """For a table."""
        parts = f"{self.columns}x{self.depth} {self.room}K {self.warps}w fill {self.fill:g}"
        return parts + (f" ask {self.ask}" if self.ask else "") + f" {self.sums}" + (" haste" if self.haste else "")


class Call(NamedTuple):
    """A plan for one shape, and where its programs meet.

    Attributes:
        plan: how it is cut.
        rows: of x, up to a power of two that tensor cores take.
        splits: programs that share D.
        counters: int32, a tile each, zero between launches.
        scratch: fp32, `splits * B * N`.
    """

    plan: Plan
    rows: int
    splits: int
    counters: Tensor
    scratch: Tensor

    @staticmethod
    def of(plan: Plan, x: Tensor, weight: Tensor) -> "Call":
        """With memory of its own."""
        (rows, width), outputs = x.shape, len(weight)
        splits = plan.splits(outputs, width)
        return Call(
            plan, max(16, 1 << (rows - 1).bit_length()), splits,
            torch.zeros(-(-outputs // plan.columns), dtype=torch.int32, device=x.device),
            torch.full((splits * rows * outputs,), torch.nan, device=x.device),
        )  # fmt: skip
