"""Documents packed into blocks of equally many tokens, for calibration and training.

The convention: a document is `[BOS] text [EOS]`. BOS is there if the tokenizer itself puts one before a text, EOS if
the tokenizer has one and it is another token than that BOS; where both are one token it stands once between two
documents. Documents follow one another without padding and are cut into blocks wherever a block is full, so that a
block may begin anywhere; no token is masked. A document of over `PIECE_CHARACTERS` is taken in pieces, each of them a
document of its own to the order, with BOS only before the first and EOS only after the last.

The order is shuffled by the seed through a buffer of `BUFFER_PIECES` pieces, so that a calibration on a folder of
books does not consist of the first book, and a stream is not read further than needed.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lapcli.data.documents import Document
from lapcli.data.files import PIECE_CHARACTERS
from lapcli.data.sources import Source, check_source, describe_source, open_source, parse_mixture
from lapcli.errors import DataError
from lapcli.reporting import Reporter

BUFFER_PIECES = 2048
"""Pieces held in memory to draw the next one from."""


@dataclass(frozen=True)
class TokenBlocks:
    """Blocks of tokens with their provenance.

    Attributes:
        ids: int64 `[samples, seq_len]`.
        digest: SHA-256 of the shape and the ids, hexadecimal: equal if and only if the tokens are.
        description: one line: sources, shares, and the Python version where that matters.
    """

    ids: Tensor
    digest: str
    description: str

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.ids.numel()


class Separators(NamedTuple):
    """Tokens before and after each document; see this module's convention."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def token_blocks(
    source: str,
    tokenizer: Any,
    *,
    samples: int,
    seq_len: int,
    seed: int,
    reporter: Reporter,
    split: str = "train",
    text_field: str | None = None,
) -> TokenBlocks:
    """Read as much of a source as needed and pack it into blocks.

    The same source, tokenizer, seed and sizes give the same tokens; fewer samples give the first of them.

    Args:
        source: see `lapcli.data.sources`; a mixture gives each source its share of the blocks, spread evenly.
        tokenizer: a `PreTrainedTokenizerBase`.
        samples: blocks.
        seq_len: tokens of a block.
        seed: of the order and of `recall`.
        reporter: hears about progress.
        split: as in `open_source`.
        text_field: as in `open_source`.

    Returns:
        `TokenBlocks` with ids `[samples, seq_len]`.

    Raises:
        DataError: sizes below 1, and whatever is wrong with a source, or that it holds too little text; the
            message says how much there is.
    """
    if samples < 1:
        raise DataError(f"--samples is {samples}; at least one sample is needed.")
    if seq_len < 1:
        raise DataError(f"--seq-len is {seq_len}; at least one token is needed.")
    sources = parse_mixture(source)
    for part in sources:
        check_source(part.name)
    separators = separators_of(tokenizer)

    turns = _turns(sources, samples)
    ids = np.empty((samples, seq_len), dtype=np.int64)
    with reporter.task(f"reading {source}", total=samples, unit="samples") as task:
        for part in sources:
            mine = [row for row, turn in enumerate(turns) if turn is part]
            stream = open_source(part.name, split=split, seed=seed, text_field=text_field)
            blocks = _pack(_shuffled(pieces_of(stream), seed), tokenizer, separators, seq_len)
            for row in mine:
                block = next(blocks)
                if len(block) < seq_len:
                    raise _too_little(part, source, mine.index(row), len(block), len(mine), seq_len)
                ids[row] = block
                task.advance()
    return TokenBlocks(torch.from_numpy(ids), ids_digest(ids), _describe(sources, split))


def separators_of(tokenizer: Any) -> Separators:
    """The tokens that a tokenizer's documents are parted by."""
    bos: int | None = tokenizer.bos_token_id
    eos: int | None = tokenizer.eos_token_id
    if bos is not None and tokenizer("", verbose=False)["input_ids"][:1] == [bos]:
        return Separators((bos,), () if eos is None or eos == bos else (eos,))
    if eos is not None:
        return Separators((), (eos,))
    return Separators(() if bos is None else (bos,), ())


def ids_digest(ids: np.ndarray) -> str:
    """SHA-256 of the shape and the ids as little-endian int64, hexadecimal."""
    digest = hashlib.sha256(repr(tuple(ids.shape)).encode())
    digest.update(np.ascontiguousarray(ids, dtype="<i8").tobytes())
    return digest.hexdigest()


class Piece(NamedTuple):
    """A document, or a part of a long one.

    Attributes:
        text: at most `PIECE_CHARACTERS`.
        first: whether the document begins with it.
        last: whether the document ends with it.
    """

    text: str
    first: bool
    last: bool


def pieces_of(documents: Iterator[Document]) -> Iterator[Piece]:
    """The pieces of documents, in order: joined, those of one document are its text again. Empty ones have none."""
    for document in documents:
        text = document.text
        start = 0
        while start < len(text):
            end = start + PIECE_CHARACTERS
            if end < len(text):
                # Cut before a blank, so that no word is torn and tokens come out as in the whole text.
                blank = max(text.rfind(" ", start + 1, end), text.rfind("\n", start + 1, end))
                end = blank if blank > start else end
            yield Piece(text[start:end], start == 0, end >= len(text))
            start = end


def _shuffled(pieces: Iterator[Piece], seed: int) -> Iterator[Piece]:
    rng = random.Random(seed)
    buffer: list[Piece] = []
    for piece in pieces:
        if len(buffer) < BUFFER_PIECES:
            buffer.append(piece)
            continue
        drawn = rng.randrange(BUFFER_PIECES)
        yield buffer[drawn]
        buffer[drawn] = piece
    rng.shuffle(buffer)
    yield from buffer


def _pack(pieces: Iterator[Piece], tokenizer: Any, separators: Separators, seq_len: int) -> Iterator[np.ndarray]:
    """Whole blocks, and at the end what is left over (shorter than a block, perhaps empty)."""
    waiting: list[int] = []
    for piece in pieces:
        if piece.first:
            waiting.extend(separators.before)
        waiting.extend(tokenizer(piece.text, add_special_tokens=False, verbose=False)["input_ids"])
        if piece.last:
            waiting.extend(separators.after)
        whole = len(waiting) // seq_len * seq_len
        for start in range(0, whole, seq_len):
            yield np.asarray(waiting[start : start + seq_len], dtype=np.int64)
        del waiting[:whole]
    yield np.asarray(waiting, dtype=np.int64)


def _turns(sources: tuple[Source, ...], samples: int) -> list[Source]:
    """Whose turn each block is: always the one that lags furthest behind its share, the first named on a tie."""
    given = [0] * len(sources)
    turns: list[Source] = []
    for made in range(1, samples + 1):
        lag = [source.share * made - count for source, count in zip(sources, given, strict=True)]
        index = max(range(len(sources)), key=lambda i: (lag[i], -i))
        given[index] += 1
        turns.append(sources[index])
    return turns


def _too_little(part: Source, source: str, blocks: int, rest: int, wanted: int, seq_len: int) -> DataError:
    there = blocks * seq_len + rest
    of = "" if part.name == source else f" (its share of '{source}')"
    return DataError(
        f"'{part.name}' holds {there} tokens, {blocks} samples of {seq_len}; {wanted} samples are asked of it{of}.",
        f"Lower --samples to {blocks} or --seq-len, or name a longer text with --data."
        if blocks
        else f"Lower --seq-len to {max(1, there)} or less, or name a longer text with --data.",
    )


def _describe(sources: tuple[Source, ...], split: str) -> str:
    if len(sources) == 1:
        return describe_source(sources[0].name, split)
    return ", ".join(f"{source.share:.3g} {describe_source(source.name, split)}" for source in sources)
