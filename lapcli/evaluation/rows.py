"""How many rows of requests go through a model at once: as many as suit the device, fewer once memory ran out."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from lapcli.errors import ModelError
from lapcli.reporting import Reporter

# Tokens of a pass. On a CPU more of them fall out of the caches, and a model of 6 M parameters gets a fifth slower; on
# a GPU more do not run faster.
_CPU_TOKENS = 4096
_MOST_TOKENS = 1 << 18
# Of a GPU's free memory, for what a pass keeps of its tokens meanwhile, and for its logits: what is wrong by half still
# fits, and where it does not, the batch is halved.
_SHARE = 4
# Numbers that a pass keeps of a token, in widths of the widest layer: projections before and after norms, convolutions
# and activations, some of them in fp32.
_WIDTHS = 16
# Logits of a pass on a GPU: kernels count their elements in 32 bits.
_MOST_LOGITS = 1 << 30


class HasTokens(Protocol):
    """A request; its tokens go through the model."""

    @property
    def tokens(self) -> Sequence[int]:
        """At least one."""
        ...


R = TypeVar("R", bound=HasTokens)
A = TypeVar("A")


class Rows:
    """Rows a pass, remembered where memory ran out.

    Args:
        name: of the model, for messages.
        asked: rows a pass; `None`: as many as suit.
        reporter: told when batches are made smaller.
    """

    def __init__(self, name: str, asked: int | None, reporter: Reporter):
        self._name = name
        self._asked = asked
        self._fits: int | None = None
        self._reporter = reporter

    def at(self, suits: int) -> int:
        """How many rows to put together where so many would suit the device."""
        wanted = max(1, suits) if self._asked is None else self._asked
        return wanted if self._fits is None else min(wanted, self._fits)

    def run(self, batch: Sequence[R], answer: Callable[[Sequence[R]], list[A]]) -> list[A]:
        """The answers to the first requests of the batch: to all of it, or to as many as memory takes.

        Raises:
            ModelError: memory does not take one row.
        """
        while True:
            try:
                return answer(batch)
            except torch.OutOfMemoryError as error:
                if len(batch) == 1:
                    raise ModelError(
                        f"memory ran out on {self._name} with one row of {len(batch[0].tokens)} tokens",
                        "give a shorter --max-length or shorter lengths, or a larger device",
                    ) from error
                batch = batch[: len(batch) // 2]
                self._fits = len(batch)
            torch.cuda.empty_cache()
            self._reporter.warn(f"memory ran out; going on with batches of {self._fits}")


def free_bytes(device: torch.device) -> int | None:
    """Bytes of a GPU that new tensors may take; `None` for another device, which does not say."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def tokens_of_a_pass(model: Any) -> int:
    """Tokens that one pass through a model takes in where it is, those of padding included."""
    free = free_bytes(model.device)
    if free is None:
        return _CPU_TOKENS
    vocabulary = vocabulary_of(model.config)
    widths = [max(each.shape) for each in model.parameters() if each.ndim == 2 and vocabulary not in each.shape]
    token = _WIDTHS * max(widths, default=1) * model.dtype.itemsize
    return max(1, min(_MOST_TOKENS, free // _SHARE // token))


def logits_of_a_pass(model: Any) -> int:
    """Logits that one pass through a model may give where it is."""
    free = free_bytes(model.device)
    # Some models widen them.
    return _MOST_LOGITS if free is None else max(1, min(_MOST_LOGITS, free // _SHARE // 4))


def vocabulary_of(config: Any) -> int:
    """Token ids that have logits."""
    text = getattr(config, "text_config", None) or config
    return int(text.vocab_size)
