"""The recovery loss, cross entropy + `w T^2 KL(teacher_T || student_T)`, without the logits of a batch.

The rows of logits are made a slice of tokens at a time, for student and teacher together, and the gradient with them:
what a slice leaves behind is two sums and gradients of the size of the hidden states (and of the head, where the head
is trained). Everything is a sum over the tokens that count; `total` divides once, by their number on all devices and
in all steps of an accumulation.

Source: arXiv 2602.04852 for the recipe (distillation from the unpruned model at `T = 2`, `w = 1`).
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lapcli.errors import ModelError
from lapcli.families.dual_state import TEACHERS
from lapcli.families.registry import FAMILIES
from lapcli.models.loss import IGNORED
from lapcli.reporting import Reporter, SilentReporter

TEMPORARY_BYTES = 256 * 2**20
"""What the temporaries of a slice may take on the student's device, unless `slice_tokens` says otherwise."""

_BLOCK_BYTES = 32 * 2**20
"""Of these, what the gradient of a trained head takes at a time."""


@dataclass(frozen=True, eq=False)
class Head:
    """How a causal language model turns hidden states into logits: `cap(scale (W x + b))`.

    `cap(z)` is `softcap tanh(z / softcap)`, or `z` where `softcap` is `None`.

    Attributes:
        weight: `[V, D]`, floating point; in training the model's own parameter, so that its gradient arrives there.
        bias: `[V]` or `None`.
        scale: a factor.
        softcap: the largest absolute value of a logit, above 0.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


_Reading = Callable[[float], Mapping[str, float]]

_READINGS: dict[str, _Reading] = {
    "logits_scaling": lambda value: {"scale": 1 / value},
    "lm_head_multiplier": lambda value: {"scale": value},
    "final_logit_softcapping": lambda value: {"softcap": value},
    "logits_soft_cap": lambda value: {"softcap": value},
}
"""Config fields that change logits, and what they make of a head."""

_FIELDS: dict[str, str] = {
    "granitemoehybrid": "logits_scaling",
    "falcon_h1": "lm_head_multiplier",
    "gemma2": "final_logit_softcapping",
    "gemma3_text": "final_logit_softcapping",
    "recurrent_gemma": "logits_soft_cap",
}
"""The field that a model type reads; all others of the families read none (transformers 5.24, fla 0.6)."""

_UNREADABLE = ("logit_scale", "output_multiplier_scale")
"""Fields of other model types that change logits; one of them in a config here means a class that is not known."""

_KNOWN = frozenset(_FIELDS).union(TEACHERS, *(family.model_types for family in FAMILIES.values()))


def head_of(model: nn.Module) -> Head:
    """How a loaded model turns its last hidden states (what enters its output layer) into logits.

    Args:
        model: a causal language model of lapcli, transformers or fla, not wrapped by `DistributedDataParallel`. A model
            with an image tower counts as its text model.

    Returns:
        The head, with the model's own parameters, not copies.

    Raises:
        ModelError: the model type is not one whose formula is known; its config has a field that changes logits and
            that its class does not read; the output layer is no plain linear layer (adapted, quantised), or its weight
            is not here as a whole (sharded, offloaded).
    """
    whole: Any = getattr(model, "config", None)
    config = whole.get_text_config() if hasattr(whole, "get_text_config") else whole
    types = [str(getattr(each, "model_type", None)) for each in (config, whole)]
    model_type = next((each for each in types if each in _KNOWN), None)
    if model_type is None:
        raise ModelError(
            f"how {types[0]} models turn hidden states into logits is not known here; known: "
            f"{', '.join(sorted(_KNOWN))}",
            "say it in lapcli/training/distillation.py (`_FIELDS`), or distil with a model of a known type",
        )
    parts: dict[str, float] = {}
    for field in (*_READINGS, *_UNREADABLE):
        value = getattr(config, field, None)
        if field == _FIELDS.get(model_type) and value is not None:
            parts |= _READINGS[field](float(value))
        elif value not in (None, 1.0):
            raise ModelError(
                f"the config says {field} = {value}, which {model_type} models do not read",
                f"take {field} out of config.json if the logits are right without it",
            )
    layer, weight = _output_layer(model)
    return Head(weight, layer.bias, **parts)


def _output_layer(model: Any) -> tuple[nn.Linear, Tensor]:
    layer = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(layer, nn.Linear):
        raise ModelError(
            f"the output layer of {type(model).__name__} is {type(layer).__name__}, not a linear layer",
            "leave the output layer out of adapters and quantisation; unwrap the model (`model.module`)",
        )
    weight = layer.weight
    # Sharded and quantised tensors are classes of their own, or hold integers.
    if type(weight) not in (Tensor, nn.Parameter) or not weight.is_floating_point() or weight.is_meta:
        kind = f"a {type(weight).__name__} of {weight.dtype} on {weight.device}"
        raise ModelError(
            f"the weight of the output layer is {kind}, not a plain tensor",
            "load the model in bf16 or fp32 with its output layer on one device; under FSDP keep that layer whole",
        )
    return layer, weight


@torch.no_grad()
def logits_from(head: Head, hidden: Tensor) -> Tensor:
    """The logits of hidden states, as the loss computes them; no gradient flows.

    Args:
        head: of the model.
        hidden: `[..., D]`, on the head's device.

    Returns:
        `[..., V]`. The product is in the weight's dtype, or under autocast in autocast's; the logits are fp32 (fp64
        where the weight is). On CUDA a product of half precision is accumulated and given out in fp32; elsewhere it is
        rounded first, as the model rounds its own.
    """
    head = _prepared(head)
    logits = _product(hidden.reshape(-1, hidden.shape[-1]).to(head.weight.dtype), head.weight.T)
    if head.bias is not None:
        logits += head.bias
    if head.scale != 1:
        logits *= head.scale
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_().mul_(head.softcap)
    return logits.view(*hidden.shape[:-1], len(head.weight))


def _prepared(head: Head) -> Head:
    """The head without history, its weight in the dtype of products."""
    weight, device = head.weight.detach(), head.weight.device.type
    if torch.is_autocast_enabled(device) and weight.dtype != torch.float64:
        weight = weight.to(torch.get_autocast_dtype(device))
    return replace(head, weight=weight, bias=None if head.bias is None else head.bias.detach())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The matrix product in the operands' dtype, given out in fp32 or fp64."""
    with torch.autocast(left.device.type, enabled=False):
        if left.is_cuda and torch.version.cuda and left.dtype in (torch.bfloat16, torch.float16):
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.mm(left, right).to(_wide(left.dtype))


class Tokenizer(Protocol):
    """What is read of a tokenizer."""

    def get_vocab(self) -> dict[str, int]:
        """The id of every token, added ones included."""
        ...


def align_vocabularies(
    student_size: int,
    teacher_size: int,
    student_tokenizer: Tokenizer,
    teacher_tokenizer: Tokenizer,
    reporter: Reporter | None = None,
) -> int:
    """How many leading ids mean the same to student and teacher.

    Rows of logits beyond the last token are padding (checkpoints round the vocabulary up), and may differ in number.

    Args:
        student_size: rows of the student's head.
        teacher_size: rows of the teacher's.
        student_tokenizer: the student's.
        teacher_tokenizer: the teacher's.
        reporter: told where the sizes differ.

    Returns:
        The smaller size.

    Raises:
        ModelError: an id below the larger size is a token of one that the other does not have under that id, or has no
            row for; the first is named.
    """
    sizes = {"student": student_size, "teacher": teacher_size}
    tokens = {
        name: {index: token for token, index in tokenizer.get_vocab().items() if index < sizes[name]}
        for name, tokenizer in (("student", student_tokenizer), ("teacher", teacher_tokenizer))
    }
    for index in sorted(tokens["student"].keys() | tokens["teacher"].keys()):
        said = {name: repr(found[index]) if index in found else "no token" for name, found in tokens.items()}
        if said["student"] != said["teacher"]:
            raise ModelError(
                f"id {index} is {said['student']} to the student and {said['teacher']} to the teacher",
                "distil from a teacher with the student's vocabulary: the model that the student was pruned from",
            )
    shared = min(sizes.values())
    if student_size != teacher_size:
        larger = max(sizes, key=sizes.__getitem__)
        (reporter or SilentReporter()).notice(
            f"the student's vocabulary has {student_size} rows and the teacher's {teacher_size}: ids from {shared} on "
            f"are padding of the {larger}, and are left out of the KL"
        )
    return shared


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over the tokens that count; those of two batches add up to those of both (`+`).

    Attributes:
        cross_entropy: of the student, 0-d, fp32 (fp64 where the student's head is); differentiable.
        kl: `KL(teacher_T || student_T)` without the factor `T^2`, likewise; 0 without a teacher.
        tokens: how many count, 0-d, int64, on the same device.
    """

    cross_entropy: Tensor
    kl: Tensor
    tokens: Tensor

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.cross_entropy + other.cross_entropy, self.kl + other.kl, self.tokens + other.tokens)


def total(sums: Sums, tokens: int | Tensor, *, weight: float = 1.0, temperature: float = 2.0) -> Tensor:
    """The loss of one part of a batch: (cross entropy + `weight T^2` KL) / tokens of the *whole* batch.

    The losses of all parts, accumulation steps and devices, add up to the mean per token over the batch. What averages
    gradients over devices (DDP, FSDP) divides once more: multiply by the number of devices.

    Args:
        sums: of this part.
        tokens: how many tokens count in all parts together. With none the loss is 0.
        weight: of the KL.
        temperature: the one `sums` were made with.

    Returns:
        0-d, in the dtype of the sums.
    """
    summed = sums.cross_entropy + weight * temperature**2 * sums.kl
    count = tokens.to(summed.device).clamp(min=1) if isinstance(tokens, Tensor) else max(tokens, 1)
    return summed / count


def distillation_sums(
    student_hidden: Tensor,
    student: Head,
    teacher_hidden: Tensor | None,
    teacher: Head | None,
    labels: Tensor,
    *,
    vocabulary: int | None = None,
    temperature: float = 2.0,
    ignore_index: int = IGNORED,
    slice_tokens: int | None = None,
    entropy: bool = True,
    every_row: bool = False,
) -> Sums:
    """Cross entropy of the student and its KL from the teacher, summed over the tokens that count.

    Labels are those of the positions themselves: shifted already, as `lapcli.models.loss.next_token_labels` does.
    The cross entropy is the student's own loss: its normaliser runs over all `V` rows of the student's head, padding
    included. The KL is between two distributions over the first `vocabulary` ids: later ids are taken out of both
    softmaxes, and get no gradient from it.

    Logits live for a slice of tokens. The gradients of the two sums are computed with them and kept apart, since only
    the backward pass says how they are weighted: twice `[N, Ds]` in the dtype of `student_hidden`, and if the head is
    trained twice `[V, Ds]` in fp32 (and twice `[V]`). Under autocast each head is cast once a call. Positions that do
    not count may hold anything, NaN too, and cost nothing; the gradient there is 0. They are found where the labels
    lie: on the CPU, nothing is waited for.

    Args:
        student_hidden: `[N, Ds]`, what enters the student's output layer; differentiable.
        student: its head, on the same device. Weight and bias are differentiable where they require it.
        teacher_hidden: `[N, Dt]`, or `None` for plain cross entropy. The teacher gets no gradient.
        teacher: its head, or `None`. It may lie on another device: its logits are made there.
        labels: `[N]`, int64, ids below `V`, or `ignore_index`; on the student's device or the CPU.
        vocabulary: the number of leading ids that both models have (`align_vocabularies`); needed only where the heads
            differ in rows.
        temperature: `T`, above 0, of both softmaxes in the KL; the cross entropy is at 1.
        ignore_index: the label that does not count.
        slice_tokens: tokens of a slice; default: as many as keep its temporaries under `TEMPORARY_BYTES`.
        entropy: whether the cross entropy is wanted; otherwise it is 0, and its gradient and its products are not made.
        every_row: whether positions that do not count are computed like the others and left out of the sums. Then no
            shape depends on labels and nothing is waited for, so that the call can be captured in a CUDA graph; labels
            are taken as they are, and heads must be frozen.

    Returns:
        The sums. Products are in the dtype of each head's weight, or under autocast in autocast's; softmaxes and sums
        in fp32 (fp64 where that is fp64).

    Raises:
        ValueError: shapes, sizes or labels that do not fit; a teacher without its hidden states or the other way round;
            a trained head with `every_row`.
    """
    _check(student_hidden, student, labels, "student")
    if (teacher is None) != (teacher_hidden is None):
        raise ValueError("a teacher needs both its head and its hidden states: one of them is None")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    if slice_tokens is not None and slice_tokens < 1:
        raise ValueError(f"slice_tokens must be at least 1, not {slice_tokens}")
    guide = None
    if teacher is not None and teacher_hidden is not None:
        _check(teacher_hidden, teacher, labels, "teacher")
        guide = _Teacher(
            teacher_hidden.detach(), _prepared(teacher), _shared(student, teacher, vocabulary), temperature
        )
    device, head = student_hidden.device, _prepared(student)
    counts = labels != ignore_index
    if every_row:
        if any(part is not None and part.requires_grad for part in (student.weight, student.bias)):
            raise ValueError("every_row is for frozen heads: what does not count would enter the head's gradient")
        counts = counts.to(device, non_blocking=True)
        rows, targets = None, labels.to(device, non_blocking=True).where(counts, 0)
        tokens = counts.sum()
    else:
        rows = counts.nonzero().squeeze(1)
        targets = labels[rows]
        if len(rows):
            lowest, highest = torch.stack(targets.aminmax()).tolist()
            if lowest < 0 or highest >= len(student.weight):
                raise ValueError(
                    f"labels run from {lowest} to {highest}, but the student has the ids 0 to "
                    f"{len(student.weight) - 1} (and {ignore_index} for none)"
                )
        tokens = torch.full((), len(rows), device=device)
        # From memory that is not pinned the host goes on when it is copied.
        rows, targets, counts = rows.to(device, non_blocking=True), targets.to(device, non_blocking=True), None
    work = _Work(
        head, guide, rows, targets, counts, slice_tokens or _slice_length(head, guide), entropy, torch.is_grad_enabled()
    )
    cross_entropy, kl = _Distillation.apply(student_hidden, student.weight, student.bias, work)
    return Sums(cross_entropy, kl, tokens)


def _check(hidden: Tensor, head: Head, labels: Tensor, name: str) -> None:
    if hidden.ndim != 2 or labels.ndim != 1 or len(hidden) != len(labels):
        raise ValueError(
            f"the {name}'s hidden states must be [N, D] and labels [N], not {list(hidden.shape)} and "
            f"{list(labels.shape)}"
        )
    if labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64, not {labels.dtype}")
    if head.weight.ndim != 2 or head.weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"the {name}'s head is {list(head.weight.shape)}, but its hidden states are {list(hidden.shape)}"
        )
    if head.bias is not None and head.bias.shape != head.weight.shape[:1]:
        raise ValueError(f"the {name}'s bias is {list(head.bias.shape)} for {len(head.weight)} logits")


def _shared(student: Head, teacher: Head, vocabulary: int | None) -> int:
    sizes = len(student.weight), len(teacher.weight)
    if vocabulary is None:
        if sizes[0] != sizes[1]:
            raise ValueError(f"the heads have {sizes[0]} and {sizes[1]} rows: say in vocabulary how many they share")
        return sizes[0]
    if not 1 <= vocabulary <= min(sizes):
        raise ValueError(f"vocabulary must be from 1 to {min(sizes)}, the rows that both heads have, not {vocabulary}")
    return vocabulary


_Place = Tensor | slice
"""Rows of a matrix, by number or all in a row."""


def _taken(matrix: Tensor, place: _Place) -> Tensor:
    return matrix[place] if isinstance(place, slice) else matrix.index_select(0, place.to(matrix.device))


@dataclass(frozen=True, eq=False)
class _Teacher:
    """The teacher's part: hidden states `[N, Dt]`, head, shared ids and temperature."""

    hidden: Tensor
    head: Head
    vocabulary: int
    temperature: float

    def log_probabilities(self, rows: "_Place", like: Tensor) -> Tensor:
        """`[n, vocabulary]` of these rows at the temperature, with the device and dtype of another tensor."""
        hidden = _taken(self.hidden, rows).to(self.head.weight.device)
        return F.log_softmax(self.scaled(logits_from(self.head, hidden)), -1).to(like)

    def scaled(self, logits: Tensor) -> Tensor:
        """Logits of the ids that both have, over the temperature; never written to."""
        shared = logits[:, : self.vocabulary]
        return shared if self.temperature == 1 else shared / self.temperature


@dataclass(frozen=True, eq=False)
class _Work:
    """What the pass over the slices needs beside the tensors that get gradients.

    Attributes:
        head: of the student, as `_prepared` gives it.
        teacher: the teacher, if there is one.
        rows: the positions that count; `None` for all, whether they count or not.
        targets: their labels.
        counts: where `rows` is `None`: bool, whether each counts.
        length: tokens of a slice.
        entropy: whether the cross entropy is wanted.
        differentiate: whether anybody may ask for gradients.
    """

    head: Head
    teacher: _Teacher | None
    rows: Tensor | None
    targets: Tensor
    counts: Tensor | None
    length: int
    entropy: bool
    differentiate: bool

    def slices(self) -> "Iterator[tuple[_Place, Tensor, Tensor | None]]":
        """Positions, labels `[n]` and where not all count also which do `[n, 1]`, slice by slice."""
        for start in range(0, len(self.targets), self.length):
            part = slice(start, start + self.length)
            if self.counts is None:
                assert self.rows is not None
                yield self.rows[part], self.targets[part], None
            else:
                yield part, self.targets[part], self.counts[part, None]


def _slice_length(head: Head, teacher: _Teacher | None) -> int:
    """Tokens whose temporaries stay under the budget."""
    heads = [head] if teacher is None else [head, teacher.head]
    width = max(len(each.weight) for each in heads)
    wide = max(_wide(each.weight.dtype).itemsize for each in heads)
    # Alive at once: the teacher's log-probabilities, the student's logits, what is made of them, the slope of a cap,
    # and one of them rounded for a product in half precision.
    rows = 3 + (head.softcap is not None) + (head.weight.dtype.itemsize < wide) / 2
    token = rows * width * wide + 3 * wide * sum(each.weight.shape[1] for each in heads)
    length = max(1, int((TEMPORARY_BYTES - _BLOCK_BYTES) // token))
    # Whole tiles of a matrix product.
    return length - length % 64 if length > 64 else length


class _Gradients:
    """The gradients of one sum, filled slice by slice; a part that nobody asked for is `None`."""

    def __init__(self, hidden: Tensor, head: Head, wanted: Sequence[bool]):
        wide = _wide(head.weight.dtype)
        self.head = head
        self.hidden = torch.zeros_like(hidden) if wanted[0] else None
        self.weight = torch.zeros_like(head.weight, dtype=wide) if wanted[1] else None
        self.bias = head.weight.new_zeros(len(head.weight), dtype=wide) if wanted[2] else None

    def add(self, rows: _Place, inputs: Tensor, outputs: Tensor, counts: Tensor | None) -> None:
        """Take in a slice.

        Args:
            rows: its positions.
            inputs: `[n, Ds]`, its hidden states, in the head's dtype.
            outputs: `[n, V]`, the gradient of what the cap was applied to.
            counts: `[n, 1]`, which of them count, where not all do.
        """
        weight, scale = self.head.weight, self.head.scale
        if self.bias is not None:
            self.bias.add_(outputs.sum(0), alpha=scale)
        outputs = outputs.to(weight.dtype)
        if self.hidden is not None:
            gradient = _product(outputs, weight).mul_(scale)
            if isinstance(rows, slice):
                # Rows are apart in the product, so that NaN of one that does not count stays there.
                gradient = gradient if counts is None else gradient.where(counts, 0.0)
                self.hidden[rows] = gradient
            else:
                self.hidden.index_copy_(0, rows, gradient.to(self.hidden.dtype))
        if self.weight is not None:
            length = max(1, _BLOCK_BYTES // (self.weight.itemsize * self.weight.shape[1]))
            for sums, block in zip(self.weight.split(length), outputs.split(length, dim=1), strict=True):
                sums.add_(_product(block.T, inputs), alpha=scale)

    def parts(self) -> tuple[Tensor | None, ...]:
        """Those of hidden states, weight and bias."""
        return self.hidden, self.weight, self.bias


class _Distillation(torch.autograd.Function):
    """Both sums; gradients are made in the forward pass and weighted in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, work: _Work) -> tuple[Tensor, Tensor]:
        """Go over the slices."""
        head, teacher = work.head, work.teacher
        # Whether a tensor requires a gradient says nothing of `no_grad`.
        wanted = tuple(work.differentiate and needed for needed in ctx.needs_input_grad[:3])
        # In the order of what is given back; without one of them, what is given back for it has no gradient.
        gradients = [_Gradients(hidden, head, wanted if each else (False,) * 3) for each in (work.entropy, teacher)]
        cross_entropy = hidden.new_zeros((), dtype=_wide(head.weight.dtype))
        kl = torch.zeros_like(cross_entropy)
        for rows, labels, counts in work.slices():
            inputs = _taken(hidden, rows).to(head.weight.dtype)
            guide = None if teacher is None else teacher.log_probabilities(rows, like=cross_entropy)
            logits = logits_from(head, inputs)
            slope = None
            if any(wanted) and head.softcap is not None:
                slope = (logits / head.softcap).square_().neg_().add_(1)
            if work.entropy:
                value, gradient = _cross_entropy(logits, labels, counts)
                cross_entropy += value
                if any(wanted):
                    gradients[0].add(rows, inputs, gradient if slope is None else gradient.mul_(slope), counts)
                # Before the next rows of logits are made, those that are done with go.
                del gradient
            if teacher is not None and guide is not None:
                scaled = teacher.scaled(logits)
                del logits
                own = F.log_softmax(scaled, -1)
                del scaled
                value, gradient = _kl(guide, own, teacher.temperature, counts)
                del guide, own
                kl += value
                if any(wanted):
                    if padding := len(head.weight) - teacher.vocabulary:
                        gradient = F.pad(gradient, (0, padding))
                    gradients[1].add(rows, inputs, gradient if slope is None else gradient.mul_(slope), counts)
                del gradient
        ctx.dtypes = [None if each is None else each.dtype for each in (hidden, weight, bias)]
        ctx.save_for_backward(*(part for each in gradients for part in each.parts()))
        return cross_entropy, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Weight the gradients of the two sums."""
        saved, parts = ctx.saved_tensors, len(ctx.dtypes)
        found: list[Tensor | None] = []
        for part, dtype in enumerate(ctx.dtypes):
            each = zip(saved[part::parts], outer, strict=False)
            weighted = [gradient * factor for gradient, factor in each if gradient is not None]
            found.append(functools.reduce(torch.add, weighted).to(dtype) if weighted else None)
        return *found, None


def _cross_entropy(logits: Tensor, labels: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum over a slice, and its gradient `[n, V]`, there also for what does not count."""
    index = labels[:, None]
    found = F.log_softmax(logits, -1)
    chosen = found.gather(1, index)
    value = chosen if counts is None else chosen.where(counts, 0.0)
    return -value.sum(), found.exp_().scatter_(1, index, chosen.expm1())


def _kl(guide: Tensor, own: Tensor, temperature: float, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum over a slice, and its gradient `[n, vocabulary]` by the logits before the temperature, likewise.

    Args:
        guide: the teacher's log-probabilities, overwritten.
        own: the student's, overwritten.
        temperature: of both.
        counts: `[n, 1]`, which rows count, where not all do.
    """
    probabilities = guide.exp()
    parts = guide.sub_(own).mul_(probabilities)
    value = parts.sum() if counts is None else parts.sum(1, keepdim=True).where(counts, 0.0).sum()
    gradient = own.exp_().sub_(probabilities)
    return value, gradient if temperature == 1 else gradient.div_(temperature)
