"""One model in Qwen3-Next's interleaved layout and in Qwen3.5's flat one; and neither taken for the other."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from lapcli.errors import FamilyError, ModelError
from lapcli.families.loading import load_model
from lapcli.families.source import resolve_model
from lapcli.machine import Machine
from lapcli.recipe import CalibrationSettings
from lapcli.reporting import SilentReporter
from lapcli.stages.calibration import calibrate
from lapcli.stages.slicing import plan_slicing
from lapcli.testing.oracle import relative_error
from lapcli.testing.slices import layers_of, random_kept, selection_of, sliced_by
from lapcli.testing.stock_models import tiny_stock_model

KEPT = 11
IDS = torch.randint(3, 259, (2, 40), generator=torch.Generator().manual_seed(1))


def flat(tensors, heads, key_width, values):
    """Qwen3-Next's tensors as Qwen3.5 holds them; `values` are the value channels of one key head."""
    made = {}
    for name, tensor in tensors.items():
        mixer, _, last = name.rpartition("in_proj_")
        if last == "qkvz.weight":
            q, k, v, z = (
                tensor.unflatten(0, (heads, -1)).split([key_width, key_width, values, values], 1)
            )  # fmt: skip
            made[f"{mixer}in_proj_qkv.weight"] = torch.cat([part.flatten(0, 1) for part in (q, k, v)])
            made[f"{mixer}in_proj_z.weight"] = z.flatten(0, 1).contiguous()
        elif last == "ba.weight":
            for side, part in zip("ba", tensor.unflatten(0, (heads, 2, -1)).unbind(1), strict=True):
                made[f"{mixer}in_proj_{side}.weight"] = part.flatten(0, 1).contiguous()
        else:
            made[name] = tensor
    return made


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """The model in both layouts."""
    root = tmp_path_factory.mktemp("twins")
    # One more than the byte tokenizer has: that which transformers takes for the flat type adds an end of text.
    interleaved = resolve_model(str(tiny_stock_model("qwen3_next", root / "interleaved", vocab_size=260)))
    (root / "flat").mkdir()
    layer = layers_of(interleaved)[0]
    values = layer.value_heads * layer.value_width // layer.heads
    tensors = load_file(interleaved.path / "model.safetensors")
    save_file(
        flat(tensors, layer.heads, layer.key_width, values), root / "flat" / "model.safetensors", {"format": "pt"}
    )
    config = {**interleaved.config, "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]}
    (root / "flat" / "config.json").write_text(json.dumps(config))
    return interleaved, resolve_model(str(root / "flat"))


def logits(source):
    with torch.no_grad():
        return load_model(source)(input_ids=IDS, use_cache=False).logits


def test_both_layouts_are_sliced_to_one_model(twins, tmp_path):
    slices = []
    for source in twins:
        folder = tmp_path / source.path.name
        folder.mkdir()
        slices.append(sliced_by(source, random_kept(source, KEPT), folder))
    assert relative_error(*(logits(source) for source in twins)) < 1e-5
    assert relative_error(*(logits(source) for source in slices)) < 1e-5
    layer = layers_of(twins[0])[0]
    channels = layer.value_heads * layer.value_width
    interleaved, sliced = (load_file(source.path / "model.safetensors") for source in slices)
    again = flat(interleaved, layer.heads, KEPT, channels // layer.heads)
    assert again.keys() == sliced.keys()
    assert all(torch.equal(again[name], sliced[name]) for name in sliced)
    base = load_file(twins[1].path / "model.safetensors")
    for name in ("conv1d", "in_proj_qkv"):
        tensor = f"model.layers.0.linear_attn.{name}.weight"
        assert len(sliced[tensor]) == 2 * layer.heads * KEPT + channels
        assert torch.equal(sliced[tensor][-channels:], base[tensor][-channels:])


def test_both_layouts_give_one_calibration(twins, tmp_path):
    """Weight statistics and saliency come from rows that lie elsewhere; the activations are the same."""
    interleaved, other = twins
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(interleaved.path / name, other.path)
    settings = CalibrationSettings(data="builtin", samples=2, seq_len=64)
    found, wanted = (
        calibrate(source, settings, tmp_path / source.path.name, machine=Machine(device="cpu"), saliency=True)[0]
        for source in (other, interleaved)
    )
    assert found.names == wanted.names
    for statistic in ("magnitude", "wanda", "saliency"):
        sides = [wanted.tensor(f"layers.0.{statistic}_{side}") for side in ("key", "query")]
        assert relative_error(*sides) > 0.01, statistic
    for name in wanted.names:
        if "magnitude" in name:
            assert torch.equal(found.tensor(name), wanted.tensor(name)), name
        else:
            # Matrices of other heights, whose products round otherwise; a gradient passes through all layers.
            assert relative_error(found.tensor(name), wanted.tensor(name)) < 1e-4, name


@pytest.mark.parametrize(
    ("which", "claimed", "missing", "there"),
    [(0, "qwen3_5_moe_text", "in_proj_qkv", "in_proj_qkvz"), (1, "qwen3_next", "in_proj_qkvz", "in_proj_qkv")],
    ids=["interleaved as flat", "flat as interleaved"],
)
def test_one_layout_under_the_other_config_is_refused(twins, tmp_path, which, claimed, missing, there):
    """A model type decides the rule, and the names of the tensors differ, so the wrong rule finds nothing to cut."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(twins[which].path / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**twins[which].config, "model_type": claimed}))
    mixed = resolve_model(str(folder))
    with pytest.raises(FamilyError, match=rf"no tensor model\.layers\.0\.linear_attn\.{missing}\.weight") as refused:
        plan_slicing(mixed, selection_of(mixed, random_kept(mixed, KEPT), tmp_path))
    assert claimed in str(refused.value)
    assert f"{there}.weight" in str(refused.value.hint)
    with pytest.raises(ModelError, match="in_proj"):
        load_model(mixed)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen4_exp"])
def test_the_whole_multimodal_model_loads_from_a_slice(family, tmp_path):
    from transformers import AutoModelForImageTextToText

    source = resolve_model(str(tiny_stock_model(family, tmp_path / "base", multimodal=True)))
    sliced = sliced_by(source, random_kept(source, KEPT), tmp_path)
    whole, found = AutoModelForImageTextToText.from_pretrained(sliced.path, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        made = whole.eval()(input_ids=IDS, use_cache=False).logits
    assert relative_error(made, logits(sliced)) < 1e-5


def test_a_text_model_saved_from_a_multimodal_one_is_sliced_by_the_names_it_keeps(tmp_path):
    whole = resolve_model(str(tiny_stock_model("qwen3_5", tmp_path / "base", multimodal=True)))
    load_model(whole).save_pretrained(tmp_path / "text")
    text = resolve_model(str(tmp_path / "text"))
    assert text.config["model_type"] == "qwen3_5_text"
    assert any(name.startswith("model.language_model.") for name in text.tensors)
    kept = random_kept(text, KEPT)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    found, wanted = sliced_by(text, kept, tmp_path / "a"), sliced_by(whole, kept, tmp_path / "b")
    assert torch.equal(logits(found), logits(wanted))


def test_both_names_give_one_calibration(tmp_path):
    """The weights that go into it are read from disk, by the names that are there."""
    whole = resolve_model(str(tiny_stock_model("qwen3_5", tmp_path / "base", multimodal=True)))
    load_model(whole).save_pretrained(tmp_path / "text")
    shutil.copy(whole.path / "tokenizer.json", tmp_path / "text")
    shutil.copy(whole.path / "tokenizer_config.json", tmp_path / "text")
    settings = CalibrationSettings(data="builtin", samples=2, seq_len=64)
    found = []
    for source in (whole, resolve_model(str(tmp_path / "text"))):
        notes = []
        reporter = SilentReporter()
        reporter.notice = notes.append
        path = tmp_path / f"{source.path.name}.safetensors"
        made, _worked = calibrate(source, settings, path, machine=Machine(device="cpu"), reporter=reporter)
        assert any("1 layer keeps no state" in note for note in notes)
        found.append(made.tensors())
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_layer_types_may_be_left_to_the_interval(family, tmp_path):
    """As in the configs that these models are released with."""
    source = resolve_model(str(tiny_stock_model(family, tmp_path / "base")))
    spelled = [layer.index for layer in layers_of(source)]
    del source.config["layer_types"]
    assert [layer.index for layer in layers_of(source)] == spelled == [0, 1, 2]
    source.config["full_attention_interval"] = 2
    assert [layer.index for layer in layers_of(source)] == [0, 2]


def test_olmo_defaults_are_written_out(tmp_path):
    """The value width follows from the key width where a config says neither, and must not follow it down."""
    from lapcli.families.olmo_hybrid import OlmoHybrid

    config = {
        "model_type": "olmo_hybrid",
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "linear_key_head_dim": None,
    }
    (layer,) = OlmoHybrid().layers(config)
    assert (layer.heads, layer.value_heads, layer.key_width, layer.value_width) == (4, 4, 12, 24)
    (after,) = OlmoHybrid().layers(OlmoHybrid().sliced_config(config, 5))
    assert (after.key_width, after.value_width) == (5, 24)
