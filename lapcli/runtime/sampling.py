"""The next token of each row, chosen on the device by the row's own logits, seed and position alone."""

import copy
from typing import Literal

import torch
from torch import Tensor

Mode = Literal["logits", "greedy", "draw", "filtered"]
"""What a step ends with: nothing, the likeliest token, one drawn from all, one drawn from some."""

BYTES_A_SCORE = 48
"""That drawing takes for each score while it is under way: what is sorted and its places, sums, noise, hashes."""
SCORES = 2**21
"""Of which so many are looked at together where nobody says otherwise, 100 MB."""
_MASK = 0xFFFFFFFF
_LARGEST = 1 - 2.0**-24
"""The largest fp32 number under 1."""


class Choices:
    """How the tokens of each row are chosen, in tensors that never move.

    Args:
        rows: how many.
        device: where.
        scores: that are looked at together where tokens are drawn, at most, but for those of one row; default:
            `SCORES`.

    Attributes:
        temperature: `[rows]`, fp32; 0 takes the likeliest.
        top_k: `[rows]`, int64; only the so many likeliest; 0 for all.
        top_p: `[rows]`, fp32; only the likeliest that together have this probability; 1 for all.
        seed: `[rows]`, int64.
    """

    def __init__(self, rows: int, device: torch.device, scores: int | None = None):
        self.scores = scores
        self.temperature = torch.zeros(rows, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self.top_p = torch.ones(rows, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)

    def of(self, first: int) -> "Choices":
        """Those of the rows from one on; views."""
        found = copy.copy(self)
        found.temperature, found.top_k, found.top_p, found.seed = (tensor[first:] for tensor in self.tensors())
        return found

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return self.temperature, self.top_k, self.top_p, self.seed


def mode_of(temperature: float, top_k: int, top_p: float) -> Mode:
    """The least that a row with such settings needs."""
    if temperature == 0:
        return "greedy"
    return "filtered" if top_k or top_p < 1 else "draw"


def choose(logits: Tensor, positions: Tensor, choices: Choices, mode: Mode) -> Tensor:
    """Choose a token a row.

    A draw adds noise to the logits and takes the largest (Gumbel's trick). The noise is a function of the row's seed,
    the position drawn for and the token's id: neither the other rows nor the order of the vocabulary matter, and
    small errors in the logits rarely change a token.

    Args:
        logits: `[B, vocabulary]`.
        positions: `[B]`, int64, the positions that the tokens will have.
        choices: of at least B rows, of which the first B are meant.
        mode: one that is enough for every row.

    Returns:
        `[B]`, int64.
    """
    if mode == "greedy":
        return logits.argmax(dim=-1)
    rows, most = len(logits), rows_together(logits.shape[-1], choices.scores)
    if rows > most:
        starts = range(0, rows, most)
        parts = [_chosen(logits[at : at + most], positions[at : at + most], choices.of(at), mode) for at in starts]
        return torch.cat(parts)
    return _chosen(logits, positions, choices, mode)


def rows_together(vocabulary: int, scores: int | None = None) -> int:
    """Rows whose tokens are drawn at a time, by scores (default `SCORES`): more take much memory, and are no faster."""
    return max(1, (SCORES if scores is None else scores) // vocabulary)


def _chosen(logits: Tensor, positions: Tensor, choices: Choices, mode: Mode) -> Tensor:
    """What `choose` does where tokens are drawn."""
    rows = len(logits)
    temperature = choices.temperature[:rows, None]
    scores = logits.float() / torch.where(temperature > 0, temperature, 1.0)
    if mode == "filtered":
        scores = _filtered(scores, choices.top_k[:rows, None], choices.top_p[:rows, None])
    noise = gumbel(choices.seed[:rows], positions, logits.shape[-1])
    return torch.where(temperature > 0, scores + noise, scores).argmax(dim=-1)


def _filtered(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Scores, with `-inf` for all but the likeliest; equal scores stay or go together."""
    ordered = scores.sort(dim=-1, descending=True).values
    last = torch.where(top_k > 0, top_k, scores.shape[-1]).clamp(max=scores.shape[-1]) - 1
    lowest = ordered.gather(-1, last)
    ordered = ordered.masked_fill(ordered < lowest, -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    # What comes before a token in order decides, so the likeliest always stays.
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = (before < top_p) | (top_p >= 1)
    lowest = torch.maximum(lowest, ordered.masked_fill(~kept, torch.inf).amin(dim=-1, keepdim=True))
    return scores.masked_fill(scores < lowest, -torch.inf)


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise `[B, vocabulary]`, fp32, by a hash of seed, position and token id.

    Args:
        seeds: `[B]`, int64.
        positions: `[B]`, int64.
        vocabulary: how many token ids.
    """
    key = _mixed((seeds & _MASK) ^ _mixed((seeds >> 32 & _MASK) ^ _mixed(positions & _MASK)))
    ids = torch.arange(vocabulary, device=seeds.device)
    hashed = _mixed(_mixed((ids * 0x9E3779B1 & _MASK) ^ key.unsqueeze(-1)) ^ (key >> 1).unsqueeze(-1))
    # From the side of 0, where fp32 is fine: the largest noise, which decides, is of the smallest numbers here.
    uniform = ((hashed.float() + 0.5) * 2.0**-32).clamp(max=_LARGEST)
    return -(-torch.log1p(-uniform)).log()


def _mixed(x: Tensor) -> Tensor:
    """Each of 32 bits made to depend on all (the last steps of MurmurHash3), on int64 numbers under `2 ** 32`."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)
