"""Q-Delta (arXiv 2606.08804): a Gated DeltaNet whose erase direction is mixed of key and query, and cut as they are."""

import math
from collections.abc import Mapping
from typing import Any

from lapcli.families.base import Sizes
from lapcli.families.delta import Heads
from lapcli.families.fields import bad_field, optional_fraction, switch
from lapcli.families.gated_deltanet import GatedDeltaNet

COMPATS = ("released",)
"""What `compat` in the config, and `--compat`, may be."""


class QDelta(GatedDeltaNet):
    """Gated DeltaNet's fields and coupled groups; the feedback's projection is on no key axis, and decay may be off."""

    name = "qdelta"
    model_types = ("qdelta",)
    erasing = True
    tested = "masked oracle; the released model, run in triton's interpreter"

    def decays(self, config: Mapping[str, Any]) -> bool:
        """Unless the config says otherwise."""
        return switch(config, "use_decay", True)

    def mixer_tensors(self, config: Mapping[str, Any], heads: Heads, hidden: tuple[str, int]) -> dict[str, Sizes]:
        """Gated DeltaNet's, the feedback's projection unless it is fixed, and its gain where there is one."""
        compat = config.get("compat")
        if compat is not None and compat not in COMPATS:
            raise bad_field("compat", compat, f"{', '.join(COMPATS)} or null")
        bias = config.get("lamb_bias", 0.9)
        if not isinstance(bias, int | float) or isinstance(bias, bool) or not math.isfinite(bias):
            raise bad_field("lamb_bias", bias, "a number")
        found = super().mixer_tensors(config, heads, hidden)
        value_heads = ("value heads", heads.value)
        if optional_fraction(config, "lamb_fixed") is None:
            found["lamb_proj.weight"] = (value_heads, hidden)
        if switch(config, "lamb_gain", False):
            found["lamb_gain"] = (value_heads,)
        return found
