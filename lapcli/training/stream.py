"""An endless stream of packed training sequences that goes on, bit for bit, from wherever it was saved.

A sequence is `seq_len` tokens, of which the last has no target: models shift labels themselves, and a row keeps a
length that chunked kernels like. Documents are packed as in `lapcli.data.blocks` (`[BOS] text [EOS]`, no padding; a
mixture gives whole sequences in turn), and each sequence says where in it a document, or a piece of a long one, begins.
A document cut by the end of a sequence goes on at the start of that source's next one, as a document of its own.
Where documents are joined, a sequence counts as one document, whatever it is made of.

The order: records are read in windows of `WINDOW_PIECES` pieces, each window is shuffled as a whole, by seed, epoch and
number, and used up before the next is read. The calibration's buffer draws as well but replaces piece by piece, so that
a piece may wait in it for ever; of a window it is enough to remember where it begins. A place in the stream is thus a
few numbers, and going on there reads one window again.

All ranks read all the text and each keeps its own part of the sequences: sequence i is for rank `i % world`. A place
is between two rounds of the ranks and says nothing of their number, so another number of them can go on from it.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lapcli.data.blocks import BUFFER_PIECES, Piece, Separators, pieces_of, separators_of
from lapcli.data.documents import Document
from lapcli.data.sources import Source, check_source, parse_mixture
from lapcli.errors import DataError
from lapcli.evaluation.tokenization import tokenizer_digest
from lapcli.models.loss import IGNORED
from lapcli.reporting import Reporter, SilentReporter
from lapcli.training.records import HubRecords, Place, Record, Records, open_records

WINDOW_PIECES = BUFFER_PIECES
"""Pieces that are shuffled together; a window ends with a document, so that it may hold some more."""

ENCODED_CHARACTERS = 2**17
"""Pieces of a window are given to the tokenizer together up to so many characters, which it may spread over threads."""

STATE_VERSION = 1


@dataclass(frozen=True)
class PackedSequence:
    """Tokens of documents that lie one behind the other.

    Attributes:
        ids: int64 `[T]`.
        starts: where documents begin, rising from 0; what lies at 0 may be the rest of a longer one.
        source: the part of the mixture that it comes from.
    """

    ids: Tensor
    starts: tuple[int, ...]
    source: str

    @property
    def cu_seqlens(self) -> Tensor:
        """Where documents begin, and the length: int64 `[documents + 1]`."""
        return torch.tensor([*self.starts, len(self.ids)])

    @property
    def position_ids(self) -> Tensor:
        """Positions that start again from 0 with each document: int64 `[T]`."""
        return torch.cat([torch.arange(end - start) for start, end in pairwise(self.cu_seqlens.tolist())])

    @property
    def labels(self) -> Tensor:
        """The tokens, `IGNORED` where a document begins; not shifted: int64 `[T]`."""
        return self.ids.index_fill(0, torch.tensor(self.starts), IGNORED)


class Stream(Protocol):
    """What training asks of a stream (`TrainingStream`).

    Attributes:
        reporter: hears what is to be said of the source; another one may take its place between two sequences.
    """

    reporter: Reporter

    @property
    def share(self) -> tuple[int, int]:
        """The rank that its sequences are for, and the number of ranks; read where there are several."""
        ...

    def __next__(self) -> PackedSequence:
        """The next sequence. After an error it stays behind the last one it gave, to be asked again."""
        ...

    def held_out(self, count: int) -> Sequence[PackedSequence]:
        """Sequences that are never given."""
        ...

    def state(self) -> dict[str, Any]:
        """Where it stands; what it gives later does not change that."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on there."""
        ...


def stack_sequences(sequences: Sequence[PackedSequence]) -> dict[str, Tensor]:
    """A batch by the names of a model's arguments: `input_ids`, `position_ids` and `labels`, int64 `[B, T]`.

    `position_ids` alone tell lapcli's models where documents begin, in any number of rows. A stock model reads
    none from them (`lapcli.training.packing`).
    """
    ids = torch.stack([sequence.ids for sequence in sequences])
    places = [row * ids.shape[1] + start for row, sequence in enumerate(sequences) for start in sequence.starts]
    begins = torch.zeros_like(ids, dtype=torch.bool)
    begins.view(-1)[torch.tensor(places)] = True
    places_in_row = torch.arange(ids.shape[1]).expand_as(ids)
    return {
        "input_ids": ids,
        "position_ids": places_in_row - places_in_row.where(begins, 0).cummax(1).values,
        "labels": ids.masked_fill(begins, IGNORED),
    }


class TrainingStream:
    """Packed sequences of a source, without an end; iterate over it for those of one rank.

    A finite source begins again when it is used up, in another order, and the reporter hears of it the first time.
    When reading fails, the stream stays behind the last sequence it gave, to be saved or asked again.

    Args:
        source: see `lapcli.data.sources`; a mixture has its shares by tokens.
        tokenizer: a `PreTrainedTokenizerBase`.
        seq_len: tokens of a sequence.
        seed: of the order and of `recall`.
        rank: which of the ranks this is.
        world: how many ranks there are.
        text_field: as in `lapcli.data.open_source`.
        joined: whether a sequence says only where it begins itself, so that a state runs on from one document to the
            next and the first token of a document is predicted too.
        reporter: hears when a source begins again; give it to one rank only.

    Attributes:
        reporter: the same; another one may take its place.

    Raises:
        DataError: a `seq_len` below 2, or what can be said of a source before reading it. While iterating: whatever
            is wrong with its text, or that there is less of it than one sequence.
        ValueError: a rank outside `world`.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Any,
        seq_len: int,
        *,
        seed: int,
        rank: int = 0,
        world: int = 1,
        text_field: str | None = None,
        joined: bool = False,
        reporter: Reporter | None = None,
    ):
        if seq_len < 2:
            raise DataError(f"--seq-len is {seq_len}; a sequence to train on takes at least two tokens.")
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}")
        self.seq_len, self._rank, self._world = seq_len, rank, world
        self._source, self._tokenizer, self._seed, self._text_field = source, tokenizer, seed, text_field
        self._joined = joined
        self.reporter: Reporter = reporter or SilentReporter()
        self._mixture = parse_mixture(source)
        for part in self._mixture:
            check_source(part.name)
        self._records = [open_records(part.name, seed=seed, text_field=text_field) for part in self._mixture]
        self._held: tuple[PackedSequence, ...] = ()
        self._parts = [self._open_part(i) for i in range(len(self._mixture))]
        self._places = self._current_places()

    @property
    def share(self) -> tuple[int, int]:
        """The rank that its sequences are for, and the number of ranks."""
        return self._rank, self._world

    @property
    def sequences(self) -> int:
        """How many sequences were given so far, to all ranks together."""
        return sum(place["given"] for place in self._places)

    def __iter__(self) -> Iterator[PackedSequence]:
        return self

    def __next__(self) -> PackedSequence:
        try:
            # A whole round at once, so that the state after it is the same on every rank.
            turn = [_next_of(self._parts)[0] for _ in range(self._world)]
        except BaseException:
            self._go_to(self._places)
            raise
        self._places = self._current_places()
        return turn[self._rank]

    def held_out(self, count: int) -> tuple[PackedSequence, ...]:
        """The first sequences of the stream, the same for every rank, kept apart for validation.

        To be called before the first sequence is taken. No piece of text that is in them, in whole or in part, is
        given later, in any epoch; copies of it elsewhere in the source are not looked for.

        Args:
            count: how many.

        Raises:
            DataError: the source holds fewer, or cannot be read.
            ValueError: sequences were taken before, with another number held out.
        """
        if count == len(self._held):
            return self._held
        if self._held or self.sequences:
            raise ValueError(f"{count} sequences are to be held out of a stream that held out {len(self._held)}")
        parts = [self._open_part(i, once=True) for i in range(len(self._mixture))]
        taken = [_next_of(parts) for _ in range(count)]
        self._held = tuple(sequence for sequence, _ in taken)
        kept = frozenset(piece for _, pieces in taken for piece in pieces)
        for part in self._parts:
            part.left_out = kept
        return self._held

    def state(self) -> dict[str, Any]:
        """Where the stream stands: JSON-able, a few hundred bytes for each source, the same on every rank."""
        return {"version": STATE_VERSION, "made_with": self._settings(), "places": self._places}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken, by this or another rank, of as many ranks or another number.

        Sequences that were held out then are held out again, for which the beginning of the source is read.

        Raises:
            DataError: the state is of another stream; the message names what differs.
        """
        saved = _made_with(state)
        if not self._held and not self.sequences:
            self._refuse_other({**saved, "held_out": 0})
            self.held_out(saved["held_out"])
        self._refuse_other(saved)
        self._go_to(state["places"])
        self._places = self._current_places()

    def refuse_other(self, state: dict[str, Any]) -> None:
        """Refuse a state that `restore` would refuse, at once: no text is read for it.

        Raises:
            DataError: it is of another stream; the message names what differs.
        """
        self._refuse_other({**_made_with(state), "held_out": len(self._held)})

    def check(self, held_out: int) -> None:
        """Refuse what the beginning of the text shows, without taking a sequence and without a network.

        What is local must give the sequences that are held out, and one more beside them. Data sets of the hub are not
        opened.

        Args:
            held_out: how many will be held out.

        Raises:
            DataError: a part is empty, too short or cannot be read there.
        """
        local = [not isinstance(records, HubRecords) for records in self._records]
        parts = [self._open_part(i, once=True) for i in range(len(self._mixture))]
        kept: list[_PieceName] = []
        for _ in range(held_out):
            part = _whose_turn(parts)
            if local[parts.index(part)]:
                kept += part.next_sequence()[1]
            else:
                part.place.given += 1
        for index in (index for index, here in enumerate(local) if here):
            part = self._open_part(index)
            part.left_out = frozenset(kept)
            part.next_sequence()

    @cached_property
    def _digests(self) -> dict[str, Any]:
        return {
            "contents": [records.contents() for records in self._records],
            "tokenizer": tokenizer_digest(self._tokenizer),
        }

    def _settings(self) -> dict[str, Any]:
        return {
            "source": self._source,
            "text_field": self._text_field,
            **self._digests,
            "seq_len": self.seq_len,
            "seed": self._seed,
            "held_out": len(self._held),
            "joined": self._joined,
        }

    def _refuse_other(self, saved: dict[str, Any]) -> None:
        now = self._settings()
        # Positions of an earlier version say nothing of this.
        saved = {"joined": False, **saved}
        names = [name for name in now if saved.get(name) != now[name]]
        if "source" in names:
            names = [name for name in names if name != "contents"]
        if not names:
            return
        said: list[str] = []
        for name in names:
            if name == "contents":
                pairs = zip(self._mixture, saved[name], now[name], strict=True)
                changed = [part.name for part, then, today in pairs if then != today]
                said.append(f"what {' and '.join(changed)} holds has changed")
            elif name == "tokenizer":
                said.append(f"tokenizer was {saved[name][:12]} and is {now[name][:12]}")
            else:
                said.append(f"{name} was {saved.get(name)} and is {now[name]}")
        raise DataError(
            f"the data position was saved from another stream: {'; '.join(said)}.",
            "Go on with the settings it was saved with, or begin anew elsewhere.",
        )

    def _open_part(self, index: int, once: bool = False) -> "_Part":
        return _Part(
            self._mixture[index],
            self._records[index],
            self._tokenizer,
            separators_of(self._tokenizer),
            self.seq_len,
            f"{self._seed}/{index}",
            self._joined,
            lambda text: self.reporter.notice(text),
            once,
        )

    def _current_places(self) -> list[dict[str, Any]]:
        return [asdict(part.place) for part in self._parts]

    def _go_to(self, places: list[dict[str, Any]]) -> None:
        for part, place in zip(self._parts, places, strict=True):
            part.go_to(_PartPlace(**place))


_PieceName = tuple[str, int]
"""A record's key and the number of the piece in it."""


@dataclass
class _PartPlace:
    """Where one part of the mixture stands, always between two sequences.

    Attributes:
        epoch: how often it began again.
        window: number of the window in this epoch.
        start: the records' place where the window begins.
        index: the piece at hand, counted in the window's shuffled order.
        used: tokens of that piece that were given.
        tokens: of this epoch, without that piece.
        given: sequences, of all epochs.
    """

    epoch: int = 0
    window: int = 0
    start: Place = field(default_factory=dict)
    index: int = 0
    used: int = 0
    tokens: int = 0
    given: int = 0


class _Part:
    """One part of the mixture: records to windows, pieces to tokens, tokens to sequences."""

    def __init__(
        self,
        source: Source,
        records: Records,
        tokenizer: Any,
        separators: Separators,
        seq_len: int,
        seed: str,
        joined: bool,
        notice: Callable[[str], None],
        once: bool,
    ):
        self.source = source
        self.left_out: frozenset[_PieceName] = frozenset()
        self._records, self._tokenizer, self._separators = records, tokenizer, separators
        self._seq_len, self._seed, self._joined, self._notice, self._once = seq_len, seed, joined, notice, once
        self.go_to(_PartPlace())

    def go_to(self, place: _PartPlace) -> None:
        """Stand at a place; nothing is read yet."""
        self.place = place
        self._reader: Iterator[Record] | None = None
        self._window: list[tuple[_PieceName, Piece]] | None = None
        self._end: Place = {}
        self._ids: dict[int, list[int]] = {}

    def next_sequence(self) -> tuple[PackedSequence, list[_PieceName]]:
        """The next sequence, and the pieces that are in it."""
        ids: list[int] = []
        starts: list[int] = []
        names: list[_PieceName] = []
        while len(ids) < self._seq_len:
            name, piece = self._piece_at_hand()
            taken = piece[self.place.used : self.place.used + self._seq_len - len(ids)]
            if not (self._joined and starts):
                starts.append(len(ids))
            names.append(name)
            ids += taken
            self.place.used += len(taken)
        self.place.given += 1
        packed = torch.from_numpy(np.asarray(ids, dtype=np.int64))
        return PackedSequence(packed, tuple(starts), self.source.name), names

    def _piece_at_hand(self) -> tuple[_PieceName, list[int]]:
        """A piece with tokens that were not given yet."""
        while True:
            place = self.place
            if self._window is None:
                self._window = self._read_window()
            if place.index < len(self._window):
                if place.index not in self._ids:
                    self._ids = self._encode(self._window, place.index)
                ids = self._ids[place.index]
                if place.used < len(ids):
                    return self._window[place.index][0], ids
                place.tokens += len(ids)
                place.index, place.used = place.index + 1, 0
            elif self._window:
                place.window, place.start, place.index = place.window + 1, self._end, 0
                self._window, self._ids = None, {}
            else:
                self._begin_again()

    def _read_window(self) -> list[tuple[_PieceName, Piece]]:
        """The pieces of the window that begins here in the order they are taken; none at the end of an epoch."""
        place = self.place
        if self._reader is None:
            order = random.Random(f"{self._seed}/{place.epoch}/files")
            self._reader = self._records.read(place.start, order)
        chance = random.Random(f"{self._seed}/{place.epoch}/{place.window}")
        # Later epochs begin with a shorter window: else the same pieces would share a window every time.
        shorter = place.epoch > 0 and place.window == 0
        size = chance.randint(1, WINDOW_PIECES) if shorter else WINDOW_PIECES
        window: list[tuple[_PieceName, Piece]] = []
        self._end = place.start
        for record in self._reader:
            pieces = pieces_of(iter([Document(record.key, record.text)]))
            window += (((record.key, number), piece) for number, piece in enumerate(pieces))
            self._end = record.after
            if len(window) >= size:
                break
        chance.shuffle(window)
        return window

    def _begin_again(self) -> None:
        place, name = self.place, self.source.name
        if self._once:
            raise DataError(
                f"'{name}' holds {place.tokens} tokens, too few for the sequences of {self._seq_len} to be held out.",
                "Hold out fewer sequences, lower --seq-len, or name a longer text with --data.",
            )
        if place.tokens < self._seq_len:
            beside = " beside those held out" if self.left_out else ""
            shorter = f"Lower --seq-len to {max(2, place.tokens)} or less"
            fewer = "Lower --validation (pieces of text are held out whole)"
            raise DataError(
                f"'{name}' holds {place.tokens} tokens{beside}, less than one sequence of {self._seq_len}.",
                f"{fewer if self.left_out else shorter}, or name a longer text with --data.",
            )
        if place.epoch == 0:
            self._notice(
                f"'{name}' is used up after {place.tokens} tokens and begins again, in another order each time."
            )
        self.go_to(_PartPlace(epoch=place.epoch + 1, given=place.given))

    def _encode(self, window: Sequence[tuple[_PieceName, Piece]], begin: int) -> dict[int, list[int]]:
        """The tokens of the piece that is `begin`th in a window and of some behind it; none of what is left out."""
        found: dict[int, list[int]] = {}
        texts: dict[int, str] = {}
        room = ENCODED_CHARACTERS
        for index in range(begin, len(window)):
            name, piece = window[index]
            if name in self.left_out:
                found[index] = []
                continue
            if texts and len(piece.text) > room:
                break
            texts[index] = piece.text
            room -= len(piece.text)
        if texts:
            encoded = self._tokenizer(list(texts.values()), add_special_tokens=False, verbose=False)["input_ids"]
            for index, ids in zip(texts, encoded, strict=True):
                piece = window[index][1]
                before = self._separators.before if piece.first else ()
                after = self._separators.after if piece.last else ()
                found[index] = [*before, *ids, *after]
        return found


def _made_with(state: dict[str, Any]) -> dict[str, Any]:
    """The settings of the stream that a state is of."""
    if state.get("version") != STATE_VERSION:
        raise DataError(
            f"a data position of version {state.get('version')} cannot be read; this lapcli knows {STATE_VERSION}."
        )
    return state["made_with"]


def _whose_turn(parts: list[_Part]) -> _Part:
    """The part that lags furthest behind its share, the first named on a tie, as blocks have it."""
    made = sum(part.place.given for part in parts) + 1
    lag = [part.source.share * made - part.place.given for part in parts]
    return parts[max(range(len(parts)), key=lambda i: (lag[i], -i))]


def _next_of(parts: list[_Part]) -> tuple[PackedSequence, list[_PieceName]]:
    """The next sequence of a mixture."""
    return _whose_turn(parts).next_sequence()
