"""What the training of a converted layer minimises: alignment of its output, final KL, similarity of its gates.

Of a step's tokens, each counts once in each part: the loss is a sum over them by their number, so it does not grow with
the length of sequences. The paper's first term is a KL between outputs of attention, which are no distributions; `kl`
takes it by the letter (of softmax over features), `mse` is the squared error over the variance of the teacher's output.

Source: arXiv 2506.09316, eqs. 9 and 10; the final KL and the trained projections are this repository's.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapcli.families.remote.lapcli_dual_state import gate_similarity, token_similarity
from lapcli.linearising.captured import Capturing
from lapcli.linearising.passes import Pair, Passed, Text
from lapcli.linearising.settings import DistillationSettings
from lapcli.linearising.watching import attention_of
from lapcli.models.loss import IGNORED
from lapcli.training.distillation import distillation_sums, head_of
from lapcli.training.distributed import Objective
from lapcli.training.packing import PackedBatch


@dataclass(frozen=True, eq=False)
class LayerSums:
    """Sums over the tokens that count, of one part of a batch.

    Attributes:
        alignment: of the layer's output, 0-d.
        similarity: of the gates, times the tokens, 0-d.
        cross_entropy: of the student, 0-d.
        kl: `KL(teacher || student)` of the final logits, 0-d.
        tokens: how many, 0-d.
    """

    alignment: Tensor
    similarity: Tensor
    cross_entropy: Tensor
    kl: Tensor
    tokens: Tensor

    def means(self, count: int) -> dict[str, float]:
        """Each of them a token, as numbers."""
        names = ("alignment", "similarity", "cross_entropy", "kl")
        return {name: float(getattr(self, name).detach()) / max(count, 1) for name in names}


class LayerObjective(Objective):
    """The sums of a layer's loss over a part of a batch.

    Args:
        student: the model with the layer converted, all but that layer frozen.
        teacher: the model before any conversion.
        layer: the number of the layer.
        variance: of the teacher's output there (`lapcli.linearising.start.output_variance`).
        distillation: what counts how much.
        by_ranks: whether models are told of documents by ranks, so that no shape depends on them
            (`lapcli.linearising.passes`); what is summed is the same but for rounding.
        capturing: makes a training step one CUDA graph, if it can be; with `by_ranks`.
        vocabulary: as for `Objective`.
        temperature: likewise.
        autocast: likewise.
    """

    def __init__(
        self,
        student: Any,
        teacher: Any,
        *,
        layer: int,
        variance: float,
        distillation: DistillationSettings,
        by_ranks: bool = False,
        capturing: Capturing | None = None,
        vocabulary: int | None = None,
        temperature: float = 1.0,
        autocast: bool = True,
    ):
        super().__init__(student, teacher, vocabulary=vocabulary, temperature=temperature, autocast=autocast)
        self._layer, self._variance, self._distillation = layer, max(variance, 1e-30), distillation
        self._by_ranks, self._capturing = by_ranks, capturing
        mine, theirs = self.models()
        self._pair = Pair(mine, theirs, layer)

    def forward(self, batch: PackedBatch, passes: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """The fields of `Sums`; in the place of the cross entropy stands what is not the final KL.

        From a CUDA graph only their weighted sum has a gradient, at the first of them (`lapcli.linearising.captured`).
        """
        captured = None if self._capturing is None else self._capturing.sums(self, batch)
        return self.parts(self.read(batch)) if captured is None else captured

    def read(self, batch: PackedBatch) -> PackedBatch | Text:
        """A batch as the models read it."""
        return Text.of(batch, self.models()[0].device) if self._by_ranks else batch

    def parts(self, text: PackedBatch | Text) -> tuple[Tensor, Tensor, Tensor]:
        """The same, not from a graph."""
        found, settings = self._sums(text, entropy=False), self._distillation
        own = settings.align_weight * found.alignment + settings.penalty * found.similarity
        return own, found.kl, found.tokens

    def loss(self, own: Tensor, kl: Tensor) -> Tensor:
        """What is minimised, times the tokens of a step: the sum of both, weighted as the training does it."""
        return own + self._distillation.kl_weight * self._temperature**2 * kl

    def sums(self, batch: PackedBatch) -> LayerSums:
        """All parts of the loss, and the cross entropy, with a gradient unless there is `no_grad`."""
        return self._sums(self.read(batch), entropy=True)

    def _sums(self, text: PackedBatch | Text, *, entropy: bool) -> LayerSums:
        student, teacher = self.models()
        mine, theirs = self._pair.run(text, self._precision)
        with self._precision(student.device):
            final = distillation_sums(
                mine.hidden,
                head_of(student),
                theirs.hidden,
                head_of(teacher),
                text.labels,
                vocabulary=self._vocabulary,
                temperature=self._temperature,
                entropy=entropy,
                every_row=isinstance(text, Text),
            )
        own = self._own_by_ranks(mine, theirs, text) if isinstance(text, Text) else self._own(mine, theirs, text)
        return LayerSums(*own, final.cross_entropy, final.kl, final.tokens)

    def _own(self, mine: Passed, theirs: Passed, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Alignment and similarity."""
        # Found where the labels lie: to look for them on a device would be to wait for all that it has to do.
        counted = (batch.labels != IGNORED).nonzero().squeeze(1)
        made, wanted = (
            passed.seen.outputs[0].flatten(0, 1).index_select(0, counted.to(passed.hidden.device))
            for passed in (mine, theirs)
        )
        alignment = self._scaled(self._apart(_wide(made), _wide(wanted.to(made.device))).sum())
        similarity = alignment.new_zeros(())
        # NaN of no token at all must not enter the sum.
        decays = self._decays(mine) if len(counted) else None
        if decays is not None:
            those = decays.flatten(0, 1).index_select(0, counted.to(decays.device)).unsqueeze(0)
            similarity = gate_similarity(those) * len(counted)
        return alignment, similarity

    def _own_by_ranks(self, mine: Passed, theirs: Passed, text: Text) -> tuple[Tensor, Tensor]:
        """The same; every token is computed, and those that do not count are left out of the sums."""
        counts = text.labels != IGNORED
        made, wanted = (passed.seen.outputs[0].flatten(0, 1) for passed in (mine, theirs))
        alignment = self._scaled(self._apart(_wide(made), _wide(wanted.to(made.device))).where(counts, 0.0).sum())
        decays = self._decays(mine)
        if decays is None:
            return alignment, alignment.new_zeros(())
        return alignment, token_similarity(decays).flatten().where(counts, 0.0).sum()

    def _decays(self, mine: Passed) -> Tensor | None:
        """Log decays of the layer's states, if it has any."""
        attention = attention_of(self.models()[0], self._layer)
        if not hasattr(attention, "forget_proj"):
            return None
        # The layer is in fp32, and what enters it in the dtype of those before it.
        with self._precision(mine.hidden.device):
            return attention.log_decays(mine.seen.inputs[0])

    def _apart(self, made: Tensor, wanted: Tensor) -> Tensor:
        """How far each token's output is from the teacher's, before `_scaled`."""
        if self._distillation.align == "mse":
            return (made - wanted).square().mean(-1)
        mine, theirs = made.log_softmax(-1), wanted.log_softmax(-1)
        return (mine.exp() * (mine - theirs)).sum(-1)

    def _scaled(self, total: Tensor) -> Tensor:
        return total / self._variance if self._distillation.align == "mse" else total


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
