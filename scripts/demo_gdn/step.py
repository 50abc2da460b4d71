"""One training step over whole rows of tokens, compiled and captured in a CUDA graph where that works."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo_gdn.optim import MuonAdamW
from demo_gdn.recall_rows import FLAG

MODES = ("compiled+graph", "eager+graph", "compiled", "eager")
"""How a step can run, the fastest first."""


def block_forward(block: nn.Module, hidden: Tensor) -> Tensor:
    """One layer; compiled once and used by all, which have the same shapes."""
    return block(hidden)


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of the embedding; compiled, its backward pass needs no sort."""
    return F.embedding(ids, weight)


def final_loss(hidden: Tensor, embedding: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy, and the plain loss of each token, fp32.

    Args:
        hidden: `[B, T, D]` after the last norm.
        embedding: `[vocabulary, D]`, tied.
        targets: `[B, T]`.
        weights: `[B, T]`.
    """
    logits = (hidden @ embedding.T.to(hidden.dtype)).float()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").unflatten(0, targets.shape)
    return (losses * weights).sum() / weights.sum(), losses


def embedding_of(model: Any) -> Tensor:
    """The tied embedding, whatever the architecture calls it."""
    body = model.model
    return (body.embeddings if hasattr(body, "embeddings") else body.embed_tokens).weight


class Network:
    """The model as the training runs it: layers compiled or not, bf16 in the linear maps.

    Args:
        model: a `GatedDeltaNetForCausalLM`.
        compiled: whether to compile.
        device: where it lies.
    """

    def __init__(self, model: Any, *, compiled: bool, device: torch.device):
        self.model = model
        self._device = device
        self._embed: Callable[..., Tensor] = embed
        self._block: Callable[..., Tensor] = block_forward
        self._loss: Callable[..., tuple[Tensor, Tensor]] = final_loss
        if compiled:
            self._embed = torch.compile(embed, dynamic=False)
            self._block = torch.compile(block_forward, dynamic=False)
            self._loss = torch.compile(final_loss, dynamic=False)

    def hidden(self, ids: Tensor) -> Tensor:
        """`[B, T]` ids to `[B, T, D]` after the last norm."""
        body = self.model.model
        hidden = self._embed(ids, body.embeddings.weight)
        for block in body.layers:
            hidden = self._block(block, hidden)
        return body.norm(hidden)

    def losses(self, rows: Tensor, answer_weight: float) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted loss, each token's loss, and which targets are answers, of flagged rows `[B, T + 1]`."""
        answers = rows >= FLAG
        ids = torch.where(answers, rows - FLAG, rows)
        weights = 1.0 + (answer_weight - 1.0) * answers[:, 1:].float()
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            hidden = self.hidden(ids[:, :-1])
            loss, losses = self._loss(hidden, embedding_of(self.model), ids[:, 1:], weights)
        return loss, losses, answers[:, 1:]


class TrainStep:
    """A step that reads rows from a resident pool of tokens.

    Args:
        network: the model.
        optimiser: its optimiser.
        pool: all tokens `[n]`, int16 with `FLAG`, resident.
        batch: rows of a step.
        length: tokens of a row.
        answer_weight: weight of answer tokens in the loss.
        graph: whether to capture.

    Attributes:
        starts: `[batch]` int64, where each row begins in the pool; set it before a step.
        sums: `[5]`, since they were last zeroed: sum of text losses, their count, the same of answer tokens,
            and the last gradient norm.
    """

    def __init__(
        self,
        network: Network,
        optimiser: MuonAdamW,
        pool: Tensor,
        *,
        batch: int,
        length: int,
        answer_weight: float,
        graph: bool,
    ):
        self.network, self.optimiser, self.pool = network, optimiser, pool
        self._answer_weight = answer_weight
        device = pool.device
        self.starts = torch.zeros(batch, dtype=torch.long, device=device)
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._offsets = torch.arange(length + 1, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if graph:
            self._capture()

    def __call__(self) -> None:
        """Take one step from `starts`."""
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()

    def _step(self) -> None:
        rows = self.pool[self.starts.unsqueeze(1) + self._offsets].long()
        for parameter in self.optimiser.parameters:
            parameter.grad = None
        loss, losses, answers = self.network.losses(rows, self._answer_weight)
        loss.backward()
        norm = self.optimiser.step()
        with torch.no_grad():
            of_answers, count = (losses * answers).sum(), answers.sum()
            self.sums[0] += losses.sum() - of_answers
            self.sums[1] += answers.numel() - count
            self.sums[2] += of_answers
            self.sums[3] += count
            self.sums[4] = norm

    def _capture(self) -> None:
        # The warm-up steps run at a rate of zero, so that they change no weight; their moments are cleared after.
        scale = self.optimiser.progress_scale
        scale.zero_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self._graph = graph
        self.optimiser.reset()
        self.sums.zero_()
        scale.fill_(1.0)


def build_step(
    model: Any,
    make_optimiser: Callable[[], MuonAdamW],
    pool: Tensor,
    *,
    batch: int,
    length: int,
    answer_weight: float,
    modes: tuple[str, ...],
    say: Callable[[str], None],
    make_network: Callable[..., Network] = Network,
) -> tuple[TrainStep, str]:
    """The first of `modes` that works here: two steps at a rate of zero end with finite losses and weights unchanged.

    Returns:
        The step and its mode.

    Raises:
        RuntimeError: none of the modes works.
    """
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for mode in modes:
        started = time.time()
        try:
            network = make_network(model, compiled="compiled" in mode, device=pool.device)
            step = TrainStep(
                network, make_optimiser(), pool, batch=batch, length=length, answer_weight=answer_weight,
                graph="graph" in mode,
            )  # fmt: skip
            step.optimiser.progress_scale.zero_()
            for _ in range(2):
                step()
            mean = float(step.sums[0] / step.sums[1])
            if not 0 < mean < 50:
                raise RuntimeError(f"the loss is {mean}")
            step.optimiser.reset()
            step.sums.zero_()
            say(f"step runs {mode}: loss at the start {mean:.3f}, ready after {time.time() - started:.1f} s")
            return step, mode
        except Exception as error:
            say(f"step does not run {mode}: {type(error).__name__}: {str(error)[:600]}")
            torch.cuda.synchronize() if pool.is_cuda else None
            model.load_state_dict(before)
    raise RuntimeError(f"no step runs here, of {', '.join(modes)}")
