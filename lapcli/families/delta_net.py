"""DeltaNet (fla's `delta_net`): selection per head; the width hides in `expand_k`."""

from collections.abc import Mapping
from typing import Any

from lapcli.families.base import StatefulLayer
from lapcli.families.delta import DeltaModels, delta_layers


class DeltaNet(DeltaModels):
    """The key width is `round(hidden_size * expand_k) // num_heads`."""

    name = "delta_net"
    model_types = ("delta_net",)
    tested = "masked oracle, reload by stock fla config classes; fla's own kernels and model on an H200"

    def layers(self, config: Mapping[str, Any]) -> tuple[StatefulLayer, ...]:
        """Declare the stateful layers."""
        heads = config["num_heads"]
        return delta_layers(
            config,
            heads=heads,
            value_heads=heads,
            key_width=round(config["hidden_size"] * config["expand_k"]) // heads,
            value_width=round(config["hidden_size"] * config["expand_v"]) // heads,
        )

    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Set `expand_k`; fla rounds the product, so the plain quotient is exact."""
        return {**config, "expand_k": kept_width * config["num_heads"] / config["hidden_size"]}
