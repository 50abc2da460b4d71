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

from lapcli.families.remote.lapcli_dual_state import gate_similarity
from lapcli.linearising.settings import DistillationSettings
from lapcli.linearising.watching import attention_of, watched
from lapcli.models.loss import IGNORED
from lapcli.training.distillation import distillation_sums, head_of
from lapcli.training.distributed import Objective
from lapcli.training.packing import PackedBatch, last_hidden


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
        vocabulary: int | None = None,
        temperature: float = 1.0,
        autocast: bool = True,
    ):
        super().__init__(student, teacher, vocabulary=vocabulary, temperature=temperature, autocast=autocast)
        self._layer, self._variance, self._distillation = layer, max(variance, 1e-30), distillation

    def forward(self, batch: PackedBatch, passes: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """The fields of `Sums`; in the place of the cross entropy stands what is not the final KL."""
        found, settings = self.sums(batch), self._distillation
        own = settings.align_weight * found.alignment + settings.penalty * found.similarity
        return own, found.kl, found.tokens

    def sums(self, batch: PackedBatch) -> LayerSums:
        """All parts of the loss, with a gradient unless there is `no_grad`."""
        student, teacher = self.models()
        labels = batch.labels.to(student.device)
        # Found where the labels lie: to look for them on a device would be to wait for all that it has to do.
        counted = (batch.labels != IGNORED).nonzero().squeeze(1)
        with self._precision(student.device), watched(student, self._layer) as mine:
            hidden = last_hidden(student, batch)
        with torch.no_grad(), self._precision(teacher.device), watched(teacher, self._layer) as theirs:
            guide = last_hidden(teacher, batch)
        with self._precision(student.device):
            final = distillation_sums(
                hidden,
                head_of(student),
                guide,
                head_of(teacher),
                labels,
                vocabulary=self._vocabulary,
                temperature=self._temperature,
            )
        made, wanted = (
            torch.cat([output.flatten(0, 1) for output in seen.outputs]).index_select(
                0, counted.to(seen.outputs[0].device)
            )
            for seen in (mine, theirs)
        )
        alignment = self._alignment(_wide(made), _wide(wanted.to(made.device)))
        attention = attention_of(student, self._layer)
        similarity = alignment.new_zeros(())
        # NaN of no token at all must not enter the sum.
        if hasattr(attention, "forget_proj") and len(counted):
            # The layer is in fp32, and what enters it in the dtype of those before it.
            with self._precision(student.device):
                decays = attention.log_decays(mine.inputs[0]).flatten(0, 1)
            those = decays.index_select(0, counted.to(decays.device)).unsqueeze(0)
            similarity = gate_similarity(those) * len(counted)
        return LayerSums(alignment, similarity, final.cross_entropy, final.kl, final.tokens)

    def _alignment(self, made: Tensor, wanted: Tensor) -> Tensor:
        if self._distillation.align == "mse":
            return (made - wanted).square().mean(-1).sum() / self._variance
        mine, theirs = made.log_softmax(-1), wanted.log_softmax(-1)
        return (mine.exp() * (mine - theirs)).sum()


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
