"""The architectures that stock libraries cannot run on every machine, or do not have at all.

DeltaNet and Gated DeltaNet are fla's, field by field and parameter by parameter: a checkpoint goes both ways
unchanged. Q-Delta has the fields and parameters of its release. They are not registered with transformers' `Auto`
classes, where fla registers its own under the same names; `lapcli.families.loading` knows which to take.
"""

from lapcli.models.cache import RecurrentCache
from lapcli.models.delta_net import DeltaNetConfig, DeltaNetForCausalLM, DeltaNetModel
from lapcli.models.gated_deltanet import GatedDeltaNetConfig, GatedDeltaNetForCausalLM, GatedDeltaNetModel
from lapcli.models.qdelta import QDeltaConfig, QDeltaForCausalLM, QDeltaModel

__all__ = [
    "DeltaNetConfig",
    "DeltaNetForCausalLM",
    "DeltaNetModel",
    "GatedDeltaNetConfig",
    "GatedDeltaNetForCausalLM",
    "GatedDeltaNetModel",
    "QDeltaConfig",
    "QDeltaForCausalLM",
    "QDeltaModel",
    "RecurrentCache",
]
