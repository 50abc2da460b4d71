"""Every family, in one dictionary. `docs/add-a-family.md` says how to add one."""

from collections.abc import Mapping
from typing import Any

from lapcli.errors import FamilyError
from lapcli.families.bailing_hybrid import BailingHybrid
from lapcli.families.bamba import Bamba
from lapcli.families.base import Family
from lapcli.families.delta_net import DeltaNet
from lapcli.families.dual_state import DualState
from lapcli.families.falcon_h1 import FalconH1
from lapcli.families.gated_deltanet import GatedDeltaNet
from lapcli.families.gated_deltaproduct import GatedDeltaProduct
from lapcli.families.gdn2 import GatedDeltaNet2
from lapcli.families.gla import GatedLinearAttention
from lapcli.families.glm5_next import Glm5Next
from lapcli.families.granitemoehybrid import GraniteMoeHybrid
from lapcli.families.kda import Kda
from lapcli.families.kimi_linear import KimiLinear
from lapcli.families.mamba2 import Mamba2
from lapcli.families.nemotron_h import NemotronH
from lapcli.families.olmo_hybrid import OlmoHybrid
from lapcli.families.qdelta import QDelta
from lapcli.families.qwen3_5 import LaraMini, Qwen4Exp, Qwen35, Qwen35Moe
from lapcli.families.qwen3_next import Qwen3Next
from lapcli.families.zamba2 import Zamba2

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        GatedDeltaNet(),
        DeltaNet(),
        QDelta(),
        DualState(),
        GatedDeltaNet2(),
        GatedDeltaProduct(),
        Kda(),
        GatedLinearAttention(),
        Qwen3Next(),
        Qwen35(),
        Qwen35Moe(),
        Qwen4Exp(),
        LaraMini(),
        OlmoHybrid(),
        KimiLinear(),
        Glm5Next(),
        BailingHybrid(),
        Mamba2(),
        Bamba(),
        FalconH1(),
        GraniteMoeHybrid(),
        NemotronH(),
        Zamba2(),
    )
}
"""The families by name."""

REFUSED: dict[str, str] = {
    "rwkv7": "its key width is tied to the hidden size: fla's RWKV-7 has hidden_size / head_dim heads of head_dim key "
    "channels, so no config says a smaller key width, and a cut checkpoint would not load",
}
"""Model types with a key axis that cannot be cut, and why."""


def find_family(config: Mapping[str, Any]) -> Family | None:
    """The family of a model by the `model_type` of its config, or `None` where it is of none."""
    model_type = config.get("model_type")
    return next((family for family in FAMILIES.values() if model_type in family.model_types), None)


def family_for(config: Mapping[str, Any]) -> Family:
    """The family of a model by the `model_type` of its config.

    Raises:
        FamilyError: the type is missing or unknown, and the known ones are listed; or it cannot be cut.
    """
    family = find_family(config)
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in REFUSED:
        raise FamilyError(
            f"{model_type} models cannot be pruned: {REFUSED[model_type]}",
            "docs/add-a-family.md says what it would take",
        )
    if family is None:
        known = ", ".join(sorted(name for family in FAMILIES.values() for name in family.model_types))
        raise FamilyError(
            f"model_type {config.get('model_type')!r} is no family that lapcli can prune; it knows: {known}",
            "`lapcli list families` shows them; docs/add-a-family.md says how to add one",
        )
    return family
