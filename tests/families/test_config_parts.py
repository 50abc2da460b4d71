"""Where a config says what: the language model's part of it, and layer types that it leaves to the library."""

import json
from typing import Any

import pytest

from lapcli.families.packed import text_part, with_text_part
from lapcli.families.registry import family_for
from lapcli.testing.stock_models import tiny_stock_model


@pytest.mark.parametrize(
    ("config", "changed"),
    [
        ({"a": 1}, {"a": 2}),
        ({"a": 1, "text_config": None}, {"a": 2, "text_config": None}),
        ({"a": 0, "text_config": {"a": 1}}, {"a": 0, "text_config": {"a": 2}}),
    ],
    ids=["flat", "null", "nested"],
)
def test_what_is_changed_is_what_is_read(config: dict[str, Any], changed: dict[str, Any]):
    assert text_part(config)["a"] == 1
    assert with_text_part(config, a=2) == changed
    assert text_part(changed)["a"] == 2


@pytest.mark.parametrize("model_type", ["qwen3_5", "glm5_next"])
def test_a_null_text_part_is_sliced_flat(model_type, tmp_path):
    config = json.loads((tiny_stock_model(model_type, tmp_path) / "config.json").read_text())
    flat = {**config.get("text_config", config), "model_type": model_type, "text_config": None}
    family = family_for(flat)
    before = family.layers(flat)
    after = family.layers(family.sliced_config(flat, 11))
    assert {layer.key_width for layer in before} == {32}
    assert {layer.key_width for layer in after} == {11}
    assert [layer.index for layer in after] == [layer.index for layer in before]
