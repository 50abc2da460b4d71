"""Packed text through a student and its teacher: what both have in common is computed once.

Below the first block in which they differ they are one model, so the student begins with what enters that block in the
teacher. Where documents begin, models read off positions, which the host has to look at; or off a tensor of ranks,
which nobody has to look at, so that the pass can be captured in a CUDA graph (`Text`).
"""

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from lapcli.families.remote.lapcli_dual_state import Layout, decoder_of, dual_state_layers
from lapcli.families.remote.lapcli_dual_state_window import attention_mask
from lapcli.linearising.watching import Seen, watched
from lapcli.training.packing import PackedBatch

Precision = Callable[[torch.device], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, eq=False)
class Text:
    """Rows of packed documents on a device, in tensors whose shapes say nothing of the documents.

    Attributes:
        ids: int64 `[B, T]`.
        ranks: how many tokens of its document come before each, 0 where one begins: int64 `[B, T]`.
        labels: what each position predicts, `IGNORED` where nothing, int64 `[B T]`.
    """

    ids: Tensor
    ranks: Tensor
    labels: Tensor

    @classmethod
    def of(cls, batch: PackedBatch, device: torch.device) -> "Text":
        """A batch, on a device; copied, so that it stays as it is."""
        return cls(*(tensor.to(device, copy=True, non_blocking=True) for tensor in _tensors(batch)))

    def fits(self, batch: PackedBatch) -> bool:
        """Whether a batch has these shapes."""
        return self.ids.shape == batch.ids.shape

    def hold(self, batch: PackedBatch) -> None:
        """Take another batch in the place of what is held, in the same memory."""
        # From memory that is not pinned the host goes on when it is copied.
        for mine, other in zip((self.ids, self.ranks, self.labels), _tensors(batch), strict=True):
            mine.copy_(other, non_blocking=True)


def _tensors(batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.ids, batch.position_ids, batch.labels


def why_not_by_ranks(model: Any, time: int) -> str | None:
    """Why a decoder cannot be told of documents by ranks in rows of so many tokens, or `None`.

    Args:
        model: of transformers; what its converted layers attend by does not matter.
        time: T.
    """
    config = model.config
    if config._attn_implementation != "sdpa":
        return f"its attention is {config._attn_implementation}, not PyTorch's"
    window = getattr(config, "sliding_window", None)
    if window is not None and window < time:
        return f"its attention slides over {window} tokens, and rows have {time}"
    return None


@dataclass(frozen=True, eq=False)
class Passed:
    """What one model had of a pass.

    Attributes:
        seen: what entered and left the layer.
        hidden: what enters the output layer, `[B T, D]`.
    """

    seen: Seen
    hidden: Tensor


class Pair:
    """A student, and the teacher that it was before some of its layers were converted.

    Args:
        student: of transformers, with at least one converted layer.
        teacher: likewise, with none; in eval mode.
        layer: whose attention is looked at.
    """

    def __init__(self, student: Any, teacher: Any, layer: int):
        self.student, self.teacher, self.layer = student, teacher, layer
        self._alike: int | None = None

    def first(self) -> int:
        """The first block that is not the teacher's own; 0 where they have nothing in common."""
        if self._alike is None:
            # Weights are compared once: below what was converted nothing is trained.
            self._alike = _blocks_alike(self.student, self.teacher)
        return min(self._alike, *dual_state_layers(self.student))

    def run(self, text: PackedBatch | Text, precision: Precision) -> tuple[Passed, Passed]:
        """The student's pass, with a history unless there is `no_grad`, and the teacher's, without one.

        Args:
            text: which boundaries are read off positions, or off ranks.
            precision: of a device, the context in which its products are made.
        """
        first, student, masks = self.first(), self.student, {}
        theirs, entering = self._of_teacher(text, precision, first, masks)
        with precision(student.device), watched(student, self.layer) as mine:
            hidden = _decode(student, text, masks, first, entering if first else None)
        return Passed(mine, hidden), theirs

    def of_teacher(self, text: PackedBatch | Text, precision: Precision) -> Passed:
        """The teacher's pass alone."""
        return self._of_teacher(text, precision, 0, {})[0]

    def _of_teacher(
        self, text: PackedBatch | Text, precision: Precision, first: int, masks: "_Masks"
    ) -> tuple[Passed, Tensor]:
        """The teacher's pass, and what entered a block."""
        teacher = self.teacher
        with (
            torch.no_grad(),
            precision(teacher.device),
            watched(teacher, self.layer) as seen,
            _entering(teacher, first) as entered,
        ):
            hidden = _decode(teacher, text, masks)
        return Passed(seen, hidden), entered[0]


_Masks = dict[tuple[torch.device, torch.dtype], Tensor]


def _decode(
    model: Any, text: PackedBatch | Text, masks: _Masks, first: int = 0, entering: Tensor | None = None
) -> Tensor:
    """The last hidden states `[B T, D]`, from the first block, or from what enters another one.

    Args:
        model: a student or a teacher.
        text: what it reads.
        masks: of attention that were made of this text already; written.
        first: the block that it begins with.
        entering: what enters that block, unless it is the first.
    """
    device, decoder = model.device, decoder_of(model)
    given: dict[str, Any] = {"use_cache": False}
    given |= {"input_ids": _on(text.ids, device)} if entering is None else {"inputs_embeds": entering}
    if isinstance(text, PackedBatch):
        given["position_ids"] = _on(text.position_ids, device)
    else:
        ranks = _on(text.ranks, device)
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else model.dtype
        if (device, dtype) not in masks:
            masks[device, dtype] = attention_mask(ranks, dtype)
        given |= {"position_ids": ranks, "attention_mask": masks[device, dtype]}
        if dual_state_layers(model):
            given["dual_state_layout"] = Layout(ranks=ranks)
    with _skipped(decoder, first):
        return decoder(**given).last_hidden_state.flatten(0, 1)


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=True)


@contextlib.contextmanager
def _entering(model: Any, layer: int) -> Generator[list[Tensor]]:
    """Keep what enters a block, for the time of the context."""
    kept: list[Tensor] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept.append(args[0] if args else kwargs["hidden_states"])

    handle = decoder_of(model).layers[layer].register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield kept
    finally:
        handle.remove()


@contextlib.contextmanager
def _skipped(decoder: Any, layers: int) -> Generator[None]:
    """Let the first blocks hand on what they are given, for the time of the context."""

    def hand_on(hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return hidden_states

    blocks = list(decoder.layers[:layers])
    for block in blocks:
        block.forward = hand_on
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def draws(model: nn.Module) -> bool:
    """Whether a model drops numbers at random in training."""
    shares = (
        each.p if isinstance(each, nn.Dropout) else getattr(each, "attention_dropout", 0.0) for each in model.modules()
    )
    return any(share > 0 for share in shares)


def _blocks_alike(student: Any, teacher: Any) -> int:
    """How many blocks of a student, from the first one on, compute what the teacher's do, to the bit."""
    mine, theirs = decoder_of(student), decoder_of(teacher)
    if draws(student) or student.device != teacher.device or not _alike(mine.embed_tokens, theirs.embed_tokens):
        return 0
    pairs = zip(mine.layers, theirs.layers, strict=True)
    return sum(1 for _ in takewhile(lambda pair: _alike(*pair), pairs))


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether modules are of the same types with the same tensors."""
    if [type(each) for each in one.modules()] != [type(each) for each in other.modules()]:
        return False
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]) for name, tensor in mine.items()
    )
