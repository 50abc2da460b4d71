"""Every family, in one dictionary. `docs/add-a-family.md` says how to add one."""

from collections.abc import Mapping
from typing import Any

from lapcli.errors import FamilyError
from lapcli.families.base import Family
from lapcli.families.delta_net import DeltaNet
from lapcli.families.gated_deltanet import GatedDeltaNet
from lapcli.families.mamba2 import Mamba2
from lapcli.families.qwen3_next import Qwen3Next

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        GatedDeltaNet(),
        DeltaNet(),
        Qwen3Next(),
        Mamba2(),
    )
}
"""The families by name."""


def find_family(config: Mapping[str, Any]) -> Family | None:
    """The family of a model by the `model_type` of its config, or `None` where it is of none."""
    model_type = config.get("model_type")
    return next((family for family in FAMILIES.values() if model_type in family.model_types), None)


def family_for(config: Mapping[str, Any]) -> Family:
    """The family of a model by the `model_type` of its config.

    Raises:
        FamilyError: the type is missing or unknown; the known ones are listed.
    """
    family = find_family(config)
    if family is None:
        known = ", ".join(sorted(name for family in FAMILIES.values() for name in family.model_types))
        raise FamilyError(
            f"model_type {config.get('model_type')!r} is no family that lapcli can prune; it knows: {known}",
            "`lapcli list families` shows them; docs/add-a-family.md says how to add one",
        )
    return family
