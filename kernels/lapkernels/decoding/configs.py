"""How the kernel cuts a step into programs: one small table, nothing searched at run time."""

from functools import cache
from typing import NamedTuple

import torch


class StepConfig(NamedTuple):
    """One way to cut a step.

    Attributes:
        tile: value channels of a tile, a power of two.
        warps: of a program, a power of two.
        splits: programs that share a head; each takes every tile of its part in turn.
        evict: how the state passes the caches: `""`, `evict_first` or `evict_last`.
        registers: the most that a thread may have; `None` for what the compiler likes.
        apart: whether filters, norms and gates are kernels of their own; the delta step alone, one token a row.
    """

    tile: int
    warps: int
    splits: int
    evict: str = ""
    registers: int | None = None
    apart: bool = False

    def tiles(self, value_width: int) -> int:
        """Tiles that each program takes."""
        return -(-value_width // (self.tile * self.splits))

    def gathers(self, key_width: int) -> bool:
        """Whether q and k go to the threads through an explicit gather, see `part_of` in `triton_parts`."""
        return self.warps > 1 and (key_parts(key_width)[1] > 0 or power_of_two(key_width) < 32 * self.warps)

    def rows_at_once(self, parts: tuple[int, int, int], state_bytes: int, columns_contiguous: bool) -> tuple[int, ...]:
        """Key channels of each part that the threads of a program cover with one load of 16 bytes each."""
        if not columns_contiguous:
            return parts
        across = min(32, max(1, self.tile * state_bytes // 16))
        return tuple(min(part, 32 * self.warps // across) for part in parts)

    def block(self, key_width: int, state_bytes: int) -> int:
        """Rows of a block of `apart`: as many as a program's threads cover with 16 bytes each."""
        vector = min(self.tile, 16 // state_bytes)
        return min(max(1, 32 * self.warps * vector // self.tile), power_of_two(key_width))


def power_of_two(number: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << (number - 1).bit_length()


def key_parts(key_width: int) -> tuple[int, int, int]:
    """K as up to three powers of two, the last of which may stand out: 96 is 64 + 32, 60 is 64, 100 is 64 + 32 + 4."""
    parts: list[int] = []
    rest = key_width
    while rest > 0:
        above = power_of_two(rest)
        # A last part that is nearly full is cheaper than another part.
        if len(parts) == 2 or above - rest <= max(4, key_width // 16):
            parts.append(above)
            break
        parts.append(above // 2)
        rest -= above // 2
    first, second, third = (*parts, 0, 0)[:3]
    return first, second, third


@cache
def processors(device: torch.device | str) -> int:
    """Multiprocessors of a device; where kernels are interpreted, a GPU's usual number."""
    if torch.device(device).type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


WIDEST = 128
"""Value channels of a tile at most: whole lines of memory."""

LARGEST = 128 * 128
"""Numbers of the state that a program holds at most."""

MOST = {4: 96, 2: 128}
"""Numbers of the state that a thread holds at most, by their bytes. Narrow ones are half as much to load for the same
arithmetic, so that more of them share what a thread does once."""

REGISTERS = {4: ((64, 128), (96, 168)), 2: ((64, 128), (128, 168))}
"""Registers of a thread, by the bytes of a number and by how many a thread holds: the fewest without (many) spills, so
that more programs share a multiprocessor."""


def choose_config(
    key_width: int,
    value_width: int,
    heads: int,
    state_bytes: int,
    device: torch.device | str,
    *,
    columns_contiguous: bool = True,
) -> StepConfig:
    """The configuration for a step: one tile a program.

    Args:
        key_width: K (N of Mamba-2).
        value_width: V (P of Mamba-2).
        heads: rows times heads.
        state_bytes: of a number of the state.
        device: where it runs.
        columns_contiguous: whether V is contiguous in the pool; the other order takes more registers.
    """
    rows = sum(key_parts(key_width))
    tile = min(WIDEST, power_of_two(value_width))
    while tile > 16 and rows * tile > LARGEST:
        tile //= 2
    # Small batches are cut finer, so that every multiprocessor has work; pieces of rows stay 64 bytes or longer.
    while tile * state_bytes > 64 and heads * -(-value_width // tile) < 2 * processors(device):
        tile //= 2
    warps = 1
    while warps < 8 and rows * tile > 32 * warps * MOST[state_bytes]:
        warps *= 2
    held = rows * tile / (32 * warps)
    fits = (most for numbers, most in REGISTERS[state_bytes] if held <= numbers and columns_contiguous)
    registers = next(fits, None)
    return StepConfig(tile, warps, -(-value_width // tile), registers=registers)


APART = 16 * 2**20
"""Bytes of state in a step from which three kernels are faster than one: less is over before the first of them is."""


APART_REGISTERS = ((64, 80), (120, 120), (128, 128))
"""Registers of a thread that holds so many numbers of a bf16 state, beside other warps: the fewest without spills. What
the compiler takes of itself is few enough in fp32, and without another warp to hand sums to."""


def choose_apart(key_width: int, value_width: int, heads: int, state_bytes: int) -> StepConfig | None:
    """The configuration of a step by three kernels; `None` where one does better.

    Small programs are many, and have their part of the state under way while they wait for anything else. Pieces of
    rows are a line of memory or two, a program is of 32 KB and four warps at most. A thread holds up to 64 numbers in
    fp32; in bf16, where the same arithmetic is done for half the bytes, 64 or more.

    Args:
        key_width: K.
        value_width: V, contiguous in the pool.
        heads: rows times value heads.
        state_bytes: of a number of the state.
    """
    if heads * key_width * value_width * state_bytes < APART:
        return None
    tile = min(64, power_of_two(value_width))
    while tile > 16 and key_width * tile * state_bytes > 32 * 1024:
        tile //= 2
    numbers, warps = key_width * tile, 1
    while warps < 4 and (numbers > 64 * 32 * warps if state_bytes == 4 else numbers >= 2 * 64 * 32 * warps):
        warps *= 2
    registers = None
    if state_bytes == 2 and warps > 1:
        registers = next((most for held, most in APART_REGISTERS if numbers <= held * 32 * warps), None)
    return StepConfig(tile, warps, 1, registers=registers, apart=True)
