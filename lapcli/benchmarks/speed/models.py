"""A model with random weights under measurement: its truth, and the ways that compute it."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lapcli.benchmarks.speed.configs import Subject
from lapcli.benchmarks.speed.gate import Verdict, compare
from lapcli.families.dual_state import has_states, set_kernel
from lapcli.families.loading import own_class
from lapcli.runtime.random_models import random_model
from lapkernels.timing import free

STEPS = 4
"""Decode steps that are compared before any is timed."""
CHUNK = 64
"""Tokens of a chunk, in fla's kernels and in ours."""
DISTINCT = 4
"""Rows with a prompt of their own; others repeat them."""


class Truth(NamedTuple):
    """What rows of tokens should give.

    Attributes:
        tokens: `[DISTINCT, P + STEPS]`.
        exact: `[DISTINCT, STEPS + 1, vocabulary]`, the logits after the prompt and after each step, from a wider dtype.
        plain: the same from the library's or PyTorch's forward pass in the model's own dtype.
    """

    tokens: Tensor
    exact: Tensor
    plain: Tensor


@dataclass
class Model:
    """A model with random weights.

    Attributes:
        subject: which.
        device: where.
        dtype: of weights and activations.
        seed: of the weights, and of all tokens.
    """

    subject: Subject
    device: torch.device
    dtype: torch.dtype
    seed: int = 0

    @cached_property
    def ours(self) -> Any:
        """Lapcli's own class where there is one, else the library's."""
        return random_model(self.subject.config, device=self.device, dtype=self.dtype, seed=self.seed)

    @cached_property
    def fla(self) -> Any:
        """Fla's model with the same weights."""
        from lapcli.benchmarks.speed.library import fla_model

        return fla_model(self.ours)

    @property
    def is_own(self) -> bool:
        """Whether the architecture is lapcli's own too."""
        return own_class(self.subject.config.get("model_type")) is not None

    @property
    def vocabulary(self) -> int:
        """Token ids."""
        return self.ours.config.get_text_config(decoder=True).vocab_size

    def tokens(self, rows: int, length: int) -> Tensor:
        """Random tokens `[rows, length]`, the same for the same sizes."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randint(0, self.vocabulary, (rows, length), generator=generator).to(self.device)

    def weight_bytes(self) -> int:
        """Of what a step reads: all weights but an embedding that is not the head too, of which it reads a few rows."""
        embedding, head = self.ours.get_input_embeddings(), self.ours.get_output_embeddings()
        tied = head is not None and head.weight is embedding.weight
        own = {id(value): value for value in self.ours.parameters()}
        return sum(value.nbytes for value in own.values()) - (0 if tied else embedding.weight.nbytes)

    def product_weights(self) -> int:
        """Entries of what each token of a prompt is multiplied with: matrices and filters, no embedding and no head."""
        outside = {id(self.ours.get_input_embeddings().weight), id(self.ours.get_output_embeddings().weight)}
        return sum(value.numel() for value in self.ours.parameters() if value.ndim > 1 and id(value) not in outside)

    def last_weights(self) -> int:
        """Those of them that the last token alone is multiplied with: of the last block, all behind its state.

        None where the model is transformers', which multiplies every token with them.
        """
        if not self.is_own:
            return 0
        block = self.ours.model.layers[-1]
        parts = [block.mlp, block.attn.o_proj, *([block.attn.g_proj] if block.attn.use_gate else [])]
        return sum(value.numel() for part in parts for value in part.parameters() if value.ndim > 1)

    def truth(self, prompt: int) -> Truth:
        """What the rows that differ should give for a prompt and `STEPS` more tokens; computed once."""
        if prompt not in self._truths:
            tokens = self.tokens(DISTINCT, prompt + STEPS)
            plain = self._logits(self.ours, tokens, "chunked")
            wider = torch.float64 if self.dtype == torch.float32 else torch.float32
            exact = copy.deepcopy(self.ours).to(wider)
            if hasattr(exact, "set_experts_implementation"):
                # Grouped products of experts are there in half precision and fp32 alone.
                exact.set_experts_implementation("eager")
            with true_products():
                found = self._logits(exact, tokens, "reference")
            del exact
            free(self.device)
            self._truths[prompt] = Truth(tokens, found, plain)
        return self._truths[prompt]

    @cached_property
    def _truths(self) -> dict[int, Truth]:
        return {}

    @torch.no_grad()
    def _logits(self, model: Any, tokens: Tensor, kernel: str) -> Tensor:
        """The last logits, by PyTorch's forms of the recurrence where the model is lapcli's own, or converted."""
        before = model.mixers()[0].kernel if self.is_own else None
        if self.is_own:
            model.set_kernel(kernel)
        elif has_states(self.subject.config):
            # Token by token would take minutes for long prompts; the wider dtype is what makes it exact.
            set_kernel(model, "chunked", self.device)
        try:
            return model(input_ids=tokens, use_cache=False, logits_to_keep=STEPS + 1).logits.clone()
        finally:
            if before is not None:
                model.set_kernel(before)
            elif has_states(self.subject.config):
                set_kernel(model, "auto", self.device)

    def judge(
        self,
        start: Callable[[Tensor], Tensor],
        step: Callable[[Tensor], Tensor],
        rows: int,
        prompt: int,
        *,
        plain: Tensor | None = None,
    ) -> Verdict:
        """Run a way over known tokens and compare all its logits; it is left after them.

        Args:
            start: runs prompts `[rows, P]` and returns the last logits.
            step: takes one token of each row in and returns logits.
            rows: B.
            prompt: P.
            plain: what a plain computation makes of them, where that is another than the model's own; see `logits`.
        """
        truth = self.truth(prompt)
        plain = truth.plain if plain is None else plain
        return compare(self.logits(start, step, rows, prompt), truth.exact, plain, self.dtype)

    def logits(
        self, start: Callable[[Tensor], Tensor], step: Callable[[Tensor], Tensor], rows: int, prompt: int
    ) -> Tensor:
        """All logits `[rows, STEPS + 1, vocabulary]` of a way over the known tokens."""
        tokens = self.truth(prompt).tokens
        index = torch.arange(rows, device=self.device) % tokens.shape[0]
        found = [start(tokens[index, :prompt]).clone()]
        found += [step(tokens[index, prompt + number].contiguous()).clone() for number in range(STEPS)]
        return torch.stack(found, 1)


@contextmanager
def true_products() -> Iterator[None]:
    """fp32 products in fp32, not in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
