"""Where a config says what: the language model's part of it, and layer types that it leaves to the library."""

import json
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

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


@pytest.mark.parametrize("spelling", ["missing", "null"])
@pytest.mark.parametrize(
    ("model_type", "count"),
    [
        *[(name, count) for name in ("lara_mini", "olmo_hybrid") for count in (2, 3, 4, 9)],
        *[(name, 9) for name in ("granitemoehybrid", "qwen3_next", "qwen3_5_text", "qwen4_exp_text")],
        *[(name, 9) for name in ("kimi_linear", "bailing_hybrid")],
        ("zamba2", 54),
    ],
)
def test_layers_of_a_config_without_types_are_those_that_the_library_makes(model_type, count, spelling, tmp_path):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    field = "layers_block_type" if model_type == "zamba2" else "layer_types"
    family = model_type.removesuffix("_text")
    config = json.loads((tiny_stock_model(family, tmp_path) / "config.json").read_text())
    config |= {"num_hidden_layers": count, field: None}
    # Others have one entry a layer too.
    config = {name: value for name, value in config.items() if name not in ("mlp_layer_types", "hybrid_layer_ids")}
    if spelling == "missing":
        del config[field]
    (tmp_path / "config.json").write_text(json.dumps(config))
    types = getattr(CONFIG_MAPPING[model_type].from_pretrained(tmp_path), field)
    assert len(types) == count
    kinds = {"linear_attention", "hybrid"}  # Zamba2's hybrid layers have a mixer as well
    wanted = [index for index, kind in enumerate(types) if kind in kinds]
    layers = family_for(config).layers(config)
    assert [layer.index for layer in layers] == wanted
    deeper = [layer.index for layer in layers if ".mamba_decoder." in layer.mixer]
    assert deeper == [index for index, kind in enumerate(types) if kind == "hybrid"]
