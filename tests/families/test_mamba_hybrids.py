"""What the Mamba-2 families do beyond the common contract: spellings of configs, multipliers, training, MTP heads."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lapcli.artifacts import Lineage, write_artifact
from lapcli.errors import ModelError
from lapcli.families.loading import load_model, resolve_model
from lapcli.families.registry import family_for
from lapcli.recipe import CalibrationSettings
from lapcli.stages.observation import observe
from lapcli.stages.slicing import slice_model
from lapcli.testing.oracle import relative_error, seen_by_the_recurrence
from lapcli.testing.stock_models import tiny_stock_model

HYBRIDS = ["mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"]
IDS = torch.randint(3, 259, (2, 40), generator=torch.Generator().manual_seed(1))


def rewritten(folder, **fields):
    """The model with other fields in its config.json; those that are `None` left out."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return resolve_model(str(folder))


def halved(source, folder):
    layers = family_for(source.config).layers(source.config)
    kept = {f"layers.{layer.index}.kept": torch.arange(0, 32, 2).repeat(layer.heads, 1) for layer in layers}
    lineage = Lineage("selection", source.describe(), "any", {"method": "by hand", "kept_width": 0})
    slice_model(source, write_artifact(folder / "selection.safetensors", lineage, kept), folder / "sliced")
    return resolve_model(str(folder / "sliced"))


PUBLISHED = {
    "bamba": {"mamba_d_head": "auto"},
    "falcon_h1": {"mamba_d_head": "auto"},
    "granitemoehybrid": {"mamba_d_head": "auto", "layer_types": ["mamba", "attention", "mamba"]},
    # By this name transformers 5.17 takes the new types alone.
    "granitemoehybrid-other-name": {
        "layers_block_type": ["linear_attention", "full_attention", "linear_attention"],
        "layer_types": None,
    },
    "nemotron_h": {"hybrid_override_pattern": "M*EM-", "layers_block_type": None, "num_hidden_layers": 5},
    "nemotron_h-older-names": {
        "layers_block_type": ["mamba", "attention", "moe", "mamba", "mlp"],
        **{"mamba_n_groups": 1, "n_groups": 4, "mamba_d_conv": 4, "conv_kernel": 3},
    },
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
}


@pytest.mark.parametrize("case", list(PUBLISHED))
def test_older_spellings_of_a_config_mean_the_same_before_and_after_slicing(case, tmp_path):
    folder = tiny_stock_model(case.partition("-")[0], tmp_path / "base")
    now = resolve_model(str(folder))
    wanted = family_for(now.config).layers(now.config)
    with torch.no_grad():
        logits = load_model(halved(now, tmp_path / "now"))(input_ids=IDS).logits
    older = rewritten(folder, **PUBLISHED[case])
    assert family_for(older.config).layers(older.config) == wanted
    sliced = halved(older, tmp_path / "older")
    assert {name: sliced.config[name] for name in PUBLISHED[case] if name in sliced.config} == {
        name: value for name, value in PUBLISHED[case].items() if value is not None
    }
    with torch.no_grad():
        assert torch.equal(load_model(sliced)(input_ids=IDS).logits, logits)


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_taps_and_recurrence_see_the_same_in_training(model_type, tmp_path):
    source = resolve_model(str(tiny_stock_model(model_type, tmp_path)))
    model, family = load_model(source), family_for(source.config)
    layers = family.layers(source.config)
    grams, recurrences = [], []
    for training in (False, True):
        observation = observe(layers)
        with torch.no_grad(), observation.attached(family, model), seen_by_the_recurrence(model, layers) as seen:
            model.train(training)(input_ids=IDS, use_cache=False)
        grams.append(observation.tensors())
        recurrences.append(seen)
    assert all(torch.equal(grams[0][name], grams[1][name]) for name in grams[0])
    for index, (queries, keys) in recurrences[0].items():
        assert torch.equal(recurrences[1][index][0], queries)
        assert torch.equal(recurrences[1][index][1], keys)


def test_taps_see_what_a_function_over_the_whole_mixer_hides(tmp_path, monkeypatch):
    """With its package, training runs convolution, recurrence and output in one call, which the taps do not need."""
    from transformers.models.bamba import modeling_bamba

    source = resolve_model(str(tiny_stock_model("bamba", tmp_path)))
    model, family = load_model(source), family_for(source.config)
    layer = family.layers(source.config)[0]
    calls = []

    def fused(projected, *_args, **_kwargs):
        calls.append(projected)
        return projected[..., :64] * 0

    monkeypatch.setattr(modeling_bamba, "mamba2_split_conv1d_scan_combined", fused)
    found = []
    for training in (False, True):
        observation = observe([layer])
        with torch.no_grad(), observation.attached(family, model):
            model.train(training)(input_ids=IDS, use_cache=False)
        found.append(observation.tensors())
    assert len(calls) == 2  # one for each Mamba layer, in training alone
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_multipliers_of_falcon_h1_follow_the_width(tmp_path):
    source = resolve_model(str(tiny_stock_model("falcon_h1", tmp_path / "base", mamba_n_groups=2)))
    mixer = load_model(halved(source, tmp_path)).model.layers[1].mamba
    inner, side = 96, 2 * 16
    wanted = torch.tensor(source.config["ssm_multipliers"]).repeat_interleave(
        torch.tensor([inner, inner, side, side, mixer.num_heads])
    )
    assert torch.equal(mixer.mup_vector.flatten(), wanted)


def test_watching_falcon_h1_changes_nothing(tmp_path):
    source = resolve_model(str(tiny_stock_model("falcon_h1", tmp_path)))
    model, family = load_model(source), family_for(source.config)
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
        for _again in range(2):
            with observe(family.layers(source.config)).attached(family, model):
                assert torch.equal(model(input_ids=IDS).logits, wanted)
        assert torch.equal(model(input_ids=IDS).logits, wanted)
    assert not any(module._forward_hooks for module in model.modules())


def test_exact_and_drawn_rows_of_mamba2(tmp_path):
    """Triangles and draws are of B and C as the recurrence gets them, group by group."""
    source = resolve_model(str(tiny_stock_model("mamba2", tmp_path / "base", n_groups=2)))
    model, layers = load_model(source), family_for(source.config).layers(source.config)
    every = CalibrationSettings(data="builtin", samples=len(IDS), seq_len=IDS.shape[1])
    exact = observe(layers, every.model_copy(update={"exact": True}))
    drawn = observe(layers, every.model_copy(update={"rows": 33}))
    family = family_for(source.config)
    with (
        torch.no_grad(),
        exact.attached(family, model),
        drawn.attached(family, model),
        seen_by_the_recurrence(model, layers) as seen,
    ):
        for row in IDS:
            # Several passes, so that triangles are stacked and draws go on where they were.
            kept = dict(seen)
            model(input_ids=row[None], use_cache=False)
            for index, parts in kept.items():
                seen[index] = tuple(torch.cat(pair) for pair in zip(parts, seen[index], strict=True))
    for whole, some in zip(exact.layers, drawn.layers, strict=True):
        assert some.picks is not None
        for side, values, picks in zip(("query", "key"), seen[whole.layer.index], some.picks, strict=True):
            rows = values.flatten(0, 1).unflatten(1, (2, -1))[:, :, 0].double()
            assert rows.shape == (IDS.numel(), 2, 32)
            heads = rows.transpose(0, 1)
            triangle = getattr(whole, f"triangle_{side}")
            assert torch.equal(triangle, triangle.triu())
            # fp32 keys, once taken through the taps and once as the library computes them.
            assert relative_error(triangle.mT @ triangle, heads.mT @ heads) < 1e-5
            assert relative_error(torch.linalg.svdvals(triangle), torch.linalg.svdvals(heads)) < 1e-5
            assert len(picks) == 33
            assert relative_error(getattr(some, f"gram_{side}"), heads[:, picks].mT @ heads[:, picks]) < 1e-5


def with_head(folder, **tensors):
    """The model with an MTP head beside it, as Nemotron 3 has one."""
    path = folder / "model.safetensors"
    head = {f"mtp.layers.0.{name}": torch.full(shape, 0.5) for name, shape in tensors.items()}
    save_file({**load_file(path), **head}, path, metadata={"format": "pt"})
    return head


@pytest.mark.parametrize("spelling", ["missing", "null"])
def test_a_nemotron_h_without_a_list_of_layers_is_told_what_is_wanted(spelling, tmp_path):
    config = json.loads((tiny_stock_model("nemotron_h", tmp_path) / "config.json").read_text())
    for name in ("layers_block_type", "layer_types", "hybrid_override_pattern"):
        config.pop(name, None)
        if spelling == "null":
            config[name] = None
    with pytest.raises(ModelError, match=r"has none of layers_block_type, .* which layers keep a state") as refused:
        family_for(config).layers(config)
    assert "None" not in str(refused.value)


def test_the_head_of_nemotron_h_passes_through_or_is_dropped(tmp_path):
    softmax = tiny_stock_model("nemotron_h", tmp_path / "softmax")
    head = with_head(softmax, **{"mixer.q_proj.weight": (64, 64), "eh_proj.weight": (64, 128)})
    source = rewritten(softmax, num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E")
    sliced = halved(source, tmp_path / "first")
    kept = load_file(sliced.path / "model.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in head.items())
    assert sliced.config["num_nextn_predict_layers"] == 1
    load_model(sliced)

    stateful = tiny_stock_model("nemotron_h", tmp_path / "stateful")
    with_head(stateful, **{"mixer.in_proj.weight": (64, 64), "eh_proj.weight": (64, 128)})
    source = rewritten(stateful, num_nextn_predict_layers=1, mtp_hybrid_override_pattern="M")
    sliced = halved(source, tmp_path / "second")
    assert not any(name.startswith("mtp.") for name in sliced.tensors)
    assert sliced.config["num_nextn_predict_layers"] == 0
    load_model(sliced)
