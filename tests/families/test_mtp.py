"""Heads that predict further tokens (MTP): softmax ones stay as they are, those with a state are left out."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lapcli.families.loading import load_model
from lapcli.families.narrow_kda import StockKda
from lapcli.families.registry import FAMILIES, family_for
from lapcli.families.source import resolve_model
from lapcli.reporting import SilentReporter
from lapcli.stages.slicing import plan_slicing, slice_into, slice_model
from lapcli.testing.models import tiny_gated_deltanet
from lapcli.testing.slices import layers_of, random_kept, selection_of
from lapcli.testing.stock_models import STOCK_MODELS, tiny_stock_model

KEPT = 11
SOFTMAX = {
    "mtp.fc.weight": (64, 128),
    "mtp.layers.0.input_layernorm.weight": (64,),
    "mtp.layers.0.self_attn.q_proj.weight": (128, 64),
    "mtp.norm.weight": (64,),
}
STATEFUL = {**SOFTMAX, "mtp.layers.0.linear_attn.in_proj_qkv.weight": (224, 64)}


class Notes(SilentReporter):
    """Keeps the warnings."""

    def __init__(self):
        self.said = []

    def warn(self, text):
        self.said.append(text)


def with_head(folder, shapes, *, shard=False, **config):
    """Add a head's tensors to a checkpoint, to its only file or in a file of their own, and fields to its config."""
    generator = torch.Generator().manual_seed(3)
    head = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    base = folder / "model.safetensors"
    tensors = load_file(base)
    if shard:
        base.unlink()
        files = {"model-00001-of-00002.safetensors": tensors, "model-00002-of-00002.safetensors": head}
        weight_map = {name: file for file, part in files.items() for name in part}
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        files = {base.name: {**tensors, **head}}
    for file, part in files.items():
        save_file(part, folder / file, {"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    written.get("text_config", written).update(config)
    (folder / "config.json").write_text(json.dumps(written))
    return resolve_model(str(folder))


MODELS = {
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5 text": ("qwen3_5", {}),
    "qwen3_5 multimodal": ("qwen3_5", {"multimodal": True}),
}


@pytest.mark.parametrize(("family", "config"), MODELS.values(), ids=MODELS)
def test_a_softmax_head_passes_through(family, config, tmp_path):
    base = with_head(tiny_stock_model(family, tmp_path / "base", **config), SOFTMAX, mtp_num_hidden_layers=1)
    selection, notes = selection_of(base, random_kept(base, KEPT), tmp_path), Notes()
    plan = slice_model(base, selection, tmp_path / "sliced", reporter=notes)
    assert (plan.mtp, notes.said) == ("passes through", [])
    sliced = resolve_model(str(tmp_path / "sliced"))
    assert sliced.tensors.keys() == base.tensors.keys()
    before, after = (load_file(source.path / "model.safetensors") for source in (base, sliced))
    for name in SOFTMAX:
        assert torch.equal(before[name], after[name])
    assert sliced.config.get("text_config", sliced.config)["mtp_num_hidden_layers"] == 1
    load_model(sliced)


@pytest.mark.parametrize("shard", [False, True], ids=["one file", "a file of its own"])
@pytest.mark.parametrize(("family", "config"), MODELS.values(), ids=MODELS)
def test_a_head_with_a_state_is_left_out(family, config, shard, tmp_path):
    folder = tiny_stock_model(family, tmp_path / "base", **config)
    base = with_head(folder, STATEFUL, shard=shard, mtp_num_hidden_layers=1)
    selection, notes = selection_of(base, random_kept(base, KEPT), tmp_path), Notes()
    assert plan_slicing(base, selection).mtp == "dropped"
    plan, worked = slice_into(base, selection, tmp_path / "sliced", overwrite=False, reporter=notes)
    assert worked
    assert len(notes.said) == 1
    assert "MTP head" in notes.said[0]
    sliced = resolve_model(str(tmp_path / "sliced"))
    assert sliced.tensors.keys() == base.tensors.keys() - STATEFUL.keys()
    assert plan.bytes_after == sum(entry.nbytes for _header, entry in sliced.tensors.values())
    assert sliced.config.get("text_config", sliced.config)["mtp_num_hidden_layers"] == 0
    if shard:
        assert len(list(sliced.path.glob("*.safetensors"))) == 1
        assert sliced.index["weight_map"].keys() == sliced.tensors.keys()
        assert sliced.index["metadata"]["total_size"] == plan.bytes_after
    load_model(sliced)
    again, worked = slice_into(base, selection, tmp_path / "sliced", overwrite=False, reporter=notes)
    assert (again, worked) == (plan, False)


def test_without_a_head_the_plan_says_nothing(tmp_path):
    base = resolve_model(str(tiny_stock_model("qwen3_next", tmp_path / "base")))
    assert plan_slicing(base, selection_of(base, random_kept(base, KEPT), tmp_path)).mtp is None


@pytest.mark.parametrize(
    "family",
    # The heads of KDA models are known by the numbers of their layers.
    [name for name in STOCK_MODELS if name in CONFIG_MAPPING and not isinstance(FAMILIES[name], StockKda)],
)
def test_a_mixer_of_the_head_is_known_by_the_names_of_the_models(family, tmp_path):
    """Layers of the model itself, renamed: one with a state, and what a softmax layer has."""
    source = resolve_model(str(tiny_stock_model(family, tmp_path / "base")))
    declared = family_for(source.config)
    (member, *_rest) = layers_of(source)[0].members
    mixer = "mtp.layers.0" + member.tensor.partition(".layers.0")[2]
    softmax = "mtp.layers.0.mixer.q_proj.weight" if family == "nemotron_h" else "mtp.layers.0.self_attn.q_proj.weight"
    head = declared.mtp(source.config, [*source.tensors, mixer, softmax])
    assert head is not None
    assert head.tensors == {mixer, softmax}
    assert head.stateful == {mixer}


def test_a_familys_own_word_for_its_mixers_counts(tmp_path):
    source = resolve_model(str(tiny_gated_deltanet(tmp_path / "base")))
    head = family_for(source.config).mtp(source.config, ["mtp.layers.0.attn.q_proj.weight", "mtp.fc.weight"])
    assert head is not None
    assert head.stateful == {"mtp.layers.0.attn.q_proj.weight"}
