"""How the kernel cuts a step into programs: one small table, nothing searched at run time."""

from functools import cache
from typing import NamedTuple

import torch


class StepConfig(NamedTuple):
    """One way to cut a step.

    Attributes:
        tile: value channels of a tile, a power of two.
        warps: of a program.
        splits: programs that share a head; each takes every tile of its part in turn.
        evict: how the state passes the L2 cache: `""`, `evict_first` or `evict_last`.
    """

    tile: int
    warps: int
    splits: int
    evict: str = ""

    def tiles(self, value_width: int) -> int:
        """Tiles that each program takes."""
        return -(-value_width // (self.tile * self.splits))


def key_parts(key_width: int) -> tuple[int, int, int]:
    """K as up to three powers of two, the last of which may stand out: 96 is 64 + 32, 60 is 64, 100 is 64 + 32 + 4."""
    parts: list[int] = []
    rest = key_width
    while rest > 0:
        above = 1 << (rest - 1).bit_length()
        # A last part that is nearly full is cheaper than another part.
        if len(parts) == 2 or above - rest <= key_width // 16:
            parts.append(above)
            break
        parts.append(above // 2)
        rest -= above // 2
    return (*parts, *[0] * (3 - len(parts)))  # pyright: ignore[reportReturnType]


def rows_at_once(
    parts: tuple[int, int, int], config: StepConfig, state_bytes: int, value_contiguous: bool
) -> tuple[int, ...]:
    """Key channels of each part that the threads of a program cover with one load of 16 bytes each."""
    if not value_contiguous:
        return parts
    across = min(32, max(1, config.tile * state_bytes // 16))
    return tuple(min(part, 32 * config.warps // across) for part in parts)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device; where kernels are interpreted, a GPU's usual number."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def choose_config(
    key_width: int, value_width: int, heads: int, state_bytes: int, tokens: int, device: torch.device
) -> StepConfig:
    """The configuration for a step.

    Args:
        key_width: K.
        value_width: V.
        heads: rows times value heads.
        state_bytes: of a number of the state.
        tokens: T.
        device: where it runs.
    """
    # TABLE
    return StepConfig(32, 1, 1)
