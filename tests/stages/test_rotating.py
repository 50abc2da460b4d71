"""Rotated models: what the weights become, against dense products written here; where they compute the same function.

Exact are the cases without filters for each channel and without an activation on keys and queries; there the oracle is
in the activations: the unsliced model with q and k projected to the directions, and its read scale pinned.
"""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lapcli.errors import ArtifactError, FamilyError, ModelError
from lapcli.families.loading import load_model, resolve_model
from lapcli.families.registry import family_for
from lapcli.recipe import CalibrationSettings, SelectionSettings
from lapcli.reporting import SilentReporter
from lapcli.stages.pruning import plan_pruning
from lapcli.stages.slicing import plan_slicing, slice_into, slice_model
from lapcli.testing.models import tiny_delta_net, tiny_gated_deltanet, tiny_qdelta
from lapcli.testing.oracle import relative_error
from lapcli.testing.slices import layers_of, random_bases, selection_of, sliced_by
from lapcli.testing.stock_models import lay_convolutions, tiny_stock_model

KEPT = 11
FP64 = 1e-10
FP32 = 1e-5
IDS = torch.randint(3, 259, (2, 70), generator=torch.Generator().manual_seed(1))


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def wide(builder, folder, **config):
    """A tiny model whose weights are fp64 on disk, so that nothing is rounded on the way."""
    source = resolve_model(str(builder(folder / "fp32", **config)))
    load_model(source, dtype=torch.float64).save_pretrained(folder / "base")
    return resolve_model(str(folder / "base"))


CASES = {
    "delta": (tiny_delta_net, {}),
    "delta-shared-filters": (tiny_delta_net, {"head_shared_conv": True}),
    "delta-elu-sum-no-conv": (tiny_delta_net, {"qk_activation": "elu", "qk_norm": "sum", "use_short_conv": False}),
    "gated-gva-sharded": (tiny_gated_deltanet, {"num_v_heads": 4}),
    "qdelta-no-filters": (tiny_qdelta, {"use_short_conv": False, "num_v_heads": 4}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kept", [KEPT, 32], ids=["narrower", "as-wide"])
def test_rotated_equals_rotated_by_hand(tmp_path, name, kept):
    builder, config = CASES[name]
    base = wide(builder, tmp_path, **config)
    bases = random_bases(base, kept)
    small = load_model(sliced_by(base, bases, tmp_path), dtype=torch.float64)
    tensors = load_file(base.path / "model.safetensors")
    for layer in layers_of(base):
        for side in "qk":
            for part, power in (("proj", 1), ("conv1d", 2)):
                name = f"{layer.mixer}.{side}_{part}.weight"
                if name not in tensors or len(tensors[name]) == layer.heads:
                    continue
                heads = tensors[name].chunk(layer.heads)
                turned = [
                    sum((basis[:, [j]] ** power) * head[j].reshape(1, -1) for j in range(len(head)))
                    for basis, head in zip(bases[layer.index], heads, strict=True)
                ]
                tensors[name] = torch.cat(turned).reshape(layer.heads * kept, *tensors[name].shape[1:])
    by_hand = type(small)(small.config).double().eval()
    by_hand.load_state_dict(tensors)
    assert relative_error(logits(small), logits(by_hand)) < FP64
    # The oracle would also pass if nothing had been rotated.
    assert relative_error(logits(load_model(base, dtype=torch.float64)), logits(by_hand)) > 1e-3


EXACT = {
    "no-filters": {"use_short_conv": False},
    "shared-filters": {"head_shared_conv": True},
    "shared-filters-negative-gate": {"head_shared_conv": True, "allow_neg_eigval": True, "use_gate": True},
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("kept", [KEPT, 32], ids=["narrower", "as-wide"])
def test_where_it_is_exact_it_projects_queries_and_keys(tmp_path, name, kept):
    base = wide(tiny_delta_net, tmp_path, qk_activation="identity", **EXACT[name])
    bases = random_bases(base, kept)
    small = load_model(sliced_by(base, bases, tmp_path), dtype=torch.float64)
    whole = load_model(base, dtype=torch.float64)
    unchanged = logits(whole)
    for mixer, basis in zip(whole.mixers(), bases.values(), strict=True):
        planes = basis.mT @ basis

        def project(_module, _args, output, planes=planes):
            return tuple(torch.einsum("bthk,hkj->bthj", x, planes) for x in output)

        mixer.tap.register_forward_hook(project)
        mixer.read_scale = kept**-0.5
    assert relative_error(logits(small), logits(whole)) < FP64
    # All directions are no change of the function at all; fewer are one.
    assert (relative_error(logits(small), unchanged) < FP64) == (kept == 32)


def test_silu_does_not_commute(tmp_path):
    base = wide(tiny_delta_net, tmp_path, head_shared_conv=True)
    small = sliced_by(base, random_bases(base, 32), tmp_path)
    found, wanted = (logits(load_model(source, dtype=torch.float64)) for source in (small, base))
    assert relative_error(found, wanted) > 1e-2


def blocks_of_rows(model_type):
    """By tensor (its last names), the first rows of q's and k's heads, and 2 for filters; from the layouts."""
    if model_type == "qwen3_next":
        group = 2 * 32 + 2 * 2 * 24  # q, k, and v and z of two value heads
        return {
            "in_proj_qkvz.weight": ([0, group, 32, group + 32], 1),
            "conv1d.weight": ([0, 32, 64, 96], 2),
        }
    if model_type == "qwen3_5":
        return {"in_proj_qkv.weight": ([0, 32, 64, 96], 1), "conv1d.weight": ([0, 32, 64, 96], 2)}
    if model_type == "olmo_hybrid":
        return {
            f"{side}_{part}.weight": ([0, 32], power) for side in "qk" for part, power in (("proj", 1), ("conv1d", 2))
        }
    inner = 128
    projected, convolved = ([start + 32 * group for group in range(4)] for start in (2 * inner, inner))
    return {
        "in_proj.weight": (projected, 1),
        "in_proj.bias": (projected, 1),
        "conv1d.weight": (convolved, 2),
        "conv1d.bias": (convolved, 1),
    }


STOCK = {
    "qwen3_next": {},
    "qwen3_5": {"max_shard_size": "60KB"},
    "olmo_hybrid": {},
    "mamba2": {"n_groups": 2, "use_bias": True},
}


@pytest.mark.parametrize("model_type", STOCK)
def test_packed_layouts_are_rotated_head_by_head(tmp_path, model_type):
    folder = tiny_stock_model(model_type, tmp_path / "base", **STOCK[model_type])
    if model_type == "olmo_hybrid":
        lay_convolutions(folder, fused=False)
    base = resolve_model(str(folder))
    bases = random_bases(base, KEPT)
    small = sliced_by(base, bases, tmp_path)
    blocks = blocks_of_rows(model_type)
    before, after = (
        {name: tensor for file in model.shards for name, tensor in load_file(file).items()} for model in (base, small)
    )
    assert before.keys() == after.keys()
    of_layer = {layer.mixer.split(".layers.")[1].split(".")[0]: layer.index for layer in layers_of(base)}
    turned = 0
    for name, tensor in before.items():
        ending = ".".join(name.split(".")[-2:])
        index = of_layer.get(name.split(".layers.")[-1].split(".")[0])
        if ending not in blocks or index is None:
            assert torch.equal(after[name], tensor), name
            continue
        firsts, power = blocks[ending]
        rows = list(tensor.double())
        for number in sorted(range(len(firsts)), key=firsts.__getitem__, reverse=True):
            # Queries and keys of a head turn alike; where both lie in one tensor, each has half of the blocks.
            basis = bases[index][number % 2] ** power
            head = torch.stack(rows[firsts[number] : firsts[number] + 32])
            rows[firsts[number] : firsts[number] + 32] = list(torch.tensordot(basis, head, 1))
        torch.testing.assert_close(after[name], torch.stack(rows).float(), rtol=1e-6, atol=1e-9, msg=name)
        turned += 1
    assert turned == len(blocks) * len(bases)
    assert logits(load_model(small)).isfinite().all()


def test_groups_with_one_filter_and_no_activation_are_turned_exactly(tmp_path):
    """A layout-blind oracle: equal filters commute with a rotation, so that transformers' own model is unchanged."""
    folder = tiny_stock_model("mamba2", tmp_path / "base", n_groups=2, hidden_act="linear", use_conv_bias=False)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith("conv1d.weight"):
            tensors[name][128:] = tensors[name][128:].unflatten(0, (4, 32))[:, :1].expand(-1, 32, -1, -1).flatten(0, 1)
    save_file(tensors, path, metadata={"format": "pt"})
    base = resolve_model(str(folder))
    small = sliced_by(base, random_bases(base, 32), tmp_path)
    assert (small.path / "model.safetensors").read_bytes() != path.read_bytes()
    assert relative_error(logits(load_model(small)), logits(load_model(base))) < FP32


def test_half_precision_is_rounded_once(tmp_path):
    source = resolve_model(str(tiny_gated_deltanet(tmp_path / "base32")))
    load_model(source, dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    base = resolve_model(str(tmp_path / "base"))
    bases = random_bases(base, KEPT)
    before, after = (load_file(model.path / "model.safetensors") for model in (base, sliced_by(base, bases, tmp_path)))
    for layer in layers_of(base):
        name = f"{layer.mixer}.k_proj.weight"
        heads = before[name].double().unflatten(0, (2, 32))
        assert torch.equal(after[name], torch.bmm(bases[layer.index], heads).flatten(0, 1).bfloat16())


def test_it_is_made_once(tmp_path):
    base = resolve_model(str(tiny_gated_deltanet(tmp_path / "base", max_shard_size="60KB")))
    selection = selection_of(base, random_bases(base, KEPT), tmp_path)
    options = {"overwrite": False, "reporter": SilentReporter()}
    plan, worked = slice_into(base, selection, tmp_path / "sliced", **options)
    assert worked
    assert plan.bytes_after == sum(
        entry.nbytes for _h, entry in resolve_model(str(tmp_path / "sliced")).tensors.values()
    )
    assert "rotated" in (tmp_path / "sliced" / "README.md").read_text()
    assert not slice_into(base, selection, tmp_path / "sliced", **options)[1]


def test_channels_with_gates_of_their_own_stay_apart(tmp_path):
    base = resolve_model(str(tiny_stock_model("kimi_linear", tmp_path / "base")))
    selection = selection_of(base, random_bases(base, KEPT), tmp_path)
    for refuse in (
        lambda: plan_slicing(base, selection),
        lambda: slice_model(base, selection, tmp_path / "sliced"),
        # Before the calibration, which would take hours.
        lambda: plan_pruning(
            base,
            CalibrationSettings(data="builtin", samples=1, seq_len=8),
            SelectionSettings(method="pca", ratio="0.5"),
            tmp_path / "run",
        ),
    ):
        with pytest.raises(
            FamilyError, match=r"kimi_linear.* cannot be rotated: .*f_b_proj.weight is the gate projection"
        ):
            refuse()
    assert not (tmp_path / "sliced").exists()


def changed(change):
    return lambda bases: {index: change(basis) for index, basis in bases.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(lambda basis: basis[:1]), "2 key heads"),
        (changed(lambda basis: basis.float()), "float32"),
        (changed(lambda basis: basis[..., :-1].contiguous()), "not orthonormal in 32 channels"),
        (changed(lambda basis: 1.001 * basis), "not orthonormal"),
        (changed(lambda basis: torch.full_like(basis, np.nan)), "not orthonormal"),
        (changed(lambda basis: basis[:, :0]), r"float64 \[2, 0, 32\]"),
        (lambda bases: {0: bases[0], 1: bases[1][:, :5]}, "different widths"),
        (lambda bases: {0: bases[0]}, r"holds no layers\.1\.basis"),
    ],
    ids=["a-head-missing", "fp32", "other-width", "scaled", "nan", "empty", "widths", "a-layer-missing"],
)
def test_directions_that_cannot_be_are_refused(tmp_path, change, message):
    base = resolve_model(str(tiny_gated_deltanet(tmp_path / "base")))
    selection = selection_of(base, change(random_bases(base, KEPT)), tmp_path)
    with pytest.raises(ArtifactError, match=message):
        plan_slicing(base, selection)


def test_a_dtype_without_arithmetic_is_refused(tmp_path):
    base = wide(tiny_gated_deltanet, tmp_path)
    tensors = load_file(base.path / "model.safetensors")
    name = "model.layers.0.attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, base.path / "model.safetensors", metadata={"format": "pt"})
    base = resolve_model(str(base.path))
    with pytest.raises(ModelError, match=r"layers\.0\.attn\.q_proj\.weight is I8"):
        plan_slicing(base, selection_of(base, random_bases(base, KEPT), tmp_path))


def test_a_family_that_is_not_rotated_still_takes_channels(tmp_path):
    base = resolve_model(str(tiny_stock_model("kimi_linear", tmp_path / "base")))
    assert family_for(base.config).name == "kimi_linear"
    kept = {layer.index: torch.arange(KEPT).repeat(layer.heads, 1) for layer in layers_of(base)}
    assert plan_slicing(base, selection_of(base, kept, tmp_path)).kept_width == KEPT
