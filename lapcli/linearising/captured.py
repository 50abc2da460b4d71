"""The loss and the gradient of a training step as one CUDA graph, compared with the same without it before it is used.

A step of a small model is thousands of kernels of microseconds, and launching them takes longer than they do. Of a
layer's training all shapes are known, boundaries of documents are tensors (`lapcli.linearising.passes.Text`), and
whatever changes from step to step lies in memory that stays where it is: the text, and the trained parameters.

What a graph keeps by mistake (a copy of a weight, boundaries that were read by the host, a batch) would be trained on
without a word. So while it is made, text and parameters are others than those of the step, and its first losses and
gradients are compared with those that the same functions give, called as ever. Where they differ, or where something
cannot be captured, training goes on without a graph, and says so.
"""

import contextlib
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lapcli.families.dual_state import kernel_choice
from lapcli.families.remote.lapcli_dual_state import dual_state_layers
from lapcli.linearising.passes import Text, draws
from lapcli.training.packing import PackedBatch

APART = 1 / 8
"""How far, as a share, losses and gradients may be from those they are compared with.

Both are made of the same numbers in bf16: what adds up in another order, some thirty blocks deep, moves the gradient of
a tensor by a few hundredths of its size. A batch, boundaries or a weight of another step make it another gradient, of
most tensors half as far away as it is long, or farther.
"""
_FLOOR = 1 / 64
"""A loss a token that counts as none: what bf16 leaves of a KL between like distributions is below it."""
_LEAST = 2**-10
"""A tensor's share of the whole gradient that counts as none: what is left of sums that cancel."""
_OTHERWISE = 1.5
"""What trained parameters are multiplied by while a step is captured."""

Recorder = Callable[[Callable[[], Sequence[Tensor]], torch.device], tuple[Callable[[], Any], Sequence[Tensor]]]
"""Makes of a call what computes it again, and the tensors in which that leaves its results."""


class Step(Protocol):
    """What is asked of an objective (`lapcli.linearising.objective.LayerObjective`)."""

    def models(self) -> list[Any]:
        """The student, and the teacher."""
        ...

    def parts(self, text: PackedBatch | Text) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's own loss, the final KL, and the tokens that count: sums."""
        ...

    def loss(self, own: Tensor, kl: Tensor) -> Tensor:
        """What is minimised, of these sums."""
        ...


class Capturing:
    """Captures the steps of one layer's training, as a context that frees the graph at its end.

    Args:
        record: makes the graph; by default a CUDA graph.
    """

    def __init__(self, record: Recorder | None = None):
        self._record = record or record_cuda_graph
        self._captured: _Captured | None = None
        self.steps = 0
        """How many were computed by the graph, with their gradients."""
        self.failure: str | None = None
        """Why there is no graph, and will be none."""

    def __enter__(self) -> "Capturing":
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    def sums(self, step: Step, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor] | None:
        """What `step.parts` would give of a batch, from a graph; `None` where there is none for it.

        The first of the three has the gradient of `step.loss` of both, unless there is `no_grad`; the others have none.
        """
        if self._captured is None and self.failure is None and torch.is_grad_enabled():
            self.failure = self._begin(step, batch)
            if self.failure is not None:
                self._drop()
        if self._captured is None or not self._captured.text.fits(batch):
            return None
        if self._captured.moved():
            self.failure = "trained parameters moved"
            self._drop()
            return None
        self.steps += torch.is_grad_enabled()
        return self._captured.run(batch)

    def _begin(self, step: Step, batch: PackedBatch) -> str | None:
        """Capture the step, and compare it on its first batch; why there is no graph of it, or `None`."""
        why = why_not_captured(step.models()[0])
        if why is not None:
            return why
        try:
            self._captured = _Captured.of(step, batch, self._record)
            self._captured.load(batch)
            # Without a graph, from the very tensors that it read.
            why = disagreement(self._captured.found, gradients_of(step, self._captured.text))
        except torch.OutOfMemoryError:
            return "a CUDA graph takes more memory than there is"
        except RuntimeError as error:
            # What runs all the same without a graph (a module that reads values on the host) is only slower.
            return str(error).partition("\n")[0]
        return None if why is None else f"a CUDA graph of them is wrong here: {why}"

    def _drop(self) -> None:
        if self._captured is not None:
            self._captured = None
            if torch.cuda.is_available():
                # What a graph held is given back by nobody else before memory runs out.
                torch.cuda.empty_cache()


@dataclass(eq=False)
class _Captured:
    """A step that was captured.

    Attributes:
        text: what it reads.
        parameters: whose gradients it makes.
        replay: computes it.
        found: where it leaves the three sums, and the gradients.
        places: of the parameters, in memory.
    """

    text: Text
    parameters: list[Tensor]
    replay: Callable[[], Any]
    found: Sequence[Tensor]
    places: list[int]

    @classmethod
    def of(cls, step: Step, batch: PackedBatch, record: Recorder) -> "_Captured":
        student = step.models()[0]
        parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
        text = Text.of(batch, student.device)
        with _otherwise(text, parameters):
            replay, found = record(lambda: gradients_of(step, text), student.device)
        return cls(text, parameters, replay, found, [each.data_ptr() for each in parameters])

    def moved(self) -> bool:
        """Whether a parameter is not where the graph reads it."""
        return any(each.data_ptr() != place for each, place in zip(self.parameters, self.places, strict=True))

    def load(self, batch: PackedBatch) -> None:
        """Compute a batch."""
        self.text.hold(batch)
        self.replay()

    def run(self, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """The sums of a batch, as `Capturing.sums` gives them."""
        self.load(batch)
        if not torch.is_grad_enabled():
            own, kl, tokens = (each.clone() for each in self.found[:3])
            return own, kl, tokens
        return _Known.apply(self.found, *self.parameters)


class _Known(torch.autograd.Function):
    """Sums whose gradient is known already."""

    @staticmethod
    def forward(ctx: Any, found: Sequence[Tensor], *parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Copies: the next step overwrites what it leaves."""
        own, kl, tokens, *gradients = found
        ctx.gradients = gradients
        own, kl, tokens = own.clone(), kl.clone(), tokens.clone()
        ctx.mark_non_differentiable(kl, tokens)
        return own, kl, tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Times what comes from outside."""
        return None, *(gradient * outer for gradient in ctx.gradients)


def gradients_of(step: Step, text: PackedBatch | Text) -> list[Tensor]:
    """The three sums of a step, and the gradient of its loss by each trained parameter; nothing is left in them.

    Raises:
        RuntimeError: a trained parameter has no say in the loss.
    """
    parameters = [parameter for parameter in step.models()[0].parameters() if parameter.requires_grad]
    with torch.enable_grad():
        own, kl, tokens = step.parts(text)
        gradients = torch.autograd.grad(step.loss(own, kl), parameters)
    return [own.detach(), kl.detach(), tokens, *gradients]


def disagreement(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> str | None:
    """In what sums and gradients of one step differ by more than rounding, or `None`; waits for the device.

    Args:
        found: as `gradients_of` gives them.
        wanted: what they should be.
    """
    names = ("the layer's own loss", "the KL")
    tokens = [int(each[2]) for each in (found, wanted)]
    if tokens[0] != tokens[1]:
        return f"it counts {tokens[0]} tokens instead of {tokens[1]}"
    for name, one, other in zip(names, found[:2], wanted[:2], strict=True):
        bound = APART * (abs(float(other)) + _FLOOR * tokens[1])
        # So that NaN, too, is not within it.
        if not abs(float(one) - float(other)) <= bound:
            return f"{name} is {float(one):.4g} instead of {float(other):.4g}"
    sizes = torch.stack([each.double().norm() for each in wanted[3:]])
    apart = torch.stack([(one.double() - other).norm() for one, other in zip(found[3:], wanted[3:], strict=True)])
    shares = (apart / sizes.clamp(min=max(_LEAST * float(sizes.norm()), 1e-30))).tolist()
    worst = next((number for number, share in enumerate(shares) if not share <= APART), None)
    if worst is not None:
        return f"the gradient of trained tensor {worst} is off by {shares[worst]:.2g} of its norm"
    return None


def why_not_captured(student: Any) -> str | None:
    """Why a student's steps should not be captured, as far as that can be known, or `None`."""
    if draws(student):
        return "the model drops numbers at random"
    for number, layer in dual_state_layers(student).items():
        if layer.settings.window is not None:
            continue
        dtype = torch.bfloat16 if student.device.type == "cuda" else student.dtype
        if kernel_choice(layer.kernel, student.device, dtype, needs_gradient=True).name == "reference":
            return f"the states of layer {number} are computed token by token"
    return None


@contextlib.contextmanager
def _otherwise(text: Text, parameters: Sequence[Tensor]) -> Generator[None]:
    """Put another text and other parameters in the same memory, for the time of the context.

    The text is what it was, turned round, as one document a row.
    """
    tensors = [text.ids, text.ranks, text.labels, *parameters]
    kept = [tensor.detach().clone() for tensor in tensors]
    with torch.no_grad():
        text.ids.copy_(text.ids.flip(1))
        text.labels.copy_(text.labels.flip(0))
        text.ranks.copy_(torch.arange(text.ranks.shape[1], device=text.ranks.device).expand_as(text.ranks))
        for parameter in parameters:
            parameter.mul_(_OTHERWISE)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in zip(tensors, kept, strict=True):
                tensor.copy_(before)


def record_cuda_graph(
    call: Callable[[], Sequence[Tensor]], device: torch.device
) -> tuple[Callable[[], Any], Sequence[Tensor]]:
    """Capture a call in a CUDA graph, after running it so that kernels are compiled and tuned.

    Raises:
        RuntimeError: it cannot be captured: it waits for the device, for one.
    """
    now, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(now)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        call()
        with _refusing_to_wait():
            # A capture that fails in its middle leaves more behind than this.
            call()
    now.wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads read text meanwhile, and need not stop.
        with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = call()
    finally:
        # A capture that cannot be ended does not give the stream back.
        torch.cuda.set_stream(now)
    return graph.replay, found


@contextlib.contextmanager
def _refusing_to_wait() -> Generator[None]:
    """Have PyTorch raise where it would wait for a device, in any thread, for the time of the context."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # It says that it does not know of every such operation: a capture does.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
