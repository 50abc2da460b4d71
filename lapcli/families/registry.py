"""Every family, in one dictionary. `docs/add-a-family.md` says how to add one."""

from collections.abc import Mapping
from typing import Any

from lapcli.errors import FamilyError
from lapcli.families.base import Family
from lapcli.families.delta_net import DeltaNet
from lapcli.families.gated_deltanet import GatedDeltaNet

FAMILIES: dict[str, Family] = {family.name: family for family in (GatedDeltaNet(), DeltaNet())}
"""The families by name."""


def family_for(config: Mapping[str, Any]) -> Family:
    """Find the family of a model by the `model_type` of its config.

    Raises:
        FamilyError: the type is missing or unknown; the known ones are listed.
    """
    model_type = config.get("model_type")
    for family in FAMILIES.values():
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted(name for family in FAMILIES.values() for name in family.model_types))
    raise FamilyError(
        f"model_type {model_type!r} is no family that lapcli can prune; it knows: {known}",
        "`lapcli list families` shows them; docs/add-a-family.md says how to add one",
    )
