"""Slices at work: dead channels, and stock fla's own models running them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lapcli.families.loading import load_model, resolve_model
from lapcli.testing.interpreter import run_interpreted
from lapcli.testing.models import tiny_delta_net, tiny_gated_deltanet
from lapcli.testing.oracle import relative_error
from lapcli.testing.slices import layers_of, random_kept, sliced_by
from lapcli.testing.stock_models import STOCK_MODELS, tiny_stock_model

IDS = torch.randint(3, 259, (2, 40), generator=torch.Generator().manual_seed(1))


OWN = {
    "gated": (tiny_gated_deltanet, {}),
    "gated-no-conv": (tiny_gated_deltanet, {"use_short_conv": False}),
    "delta": (tiny_delta_net, {}),
    "delta-relu-sum": (tiny_delta_net, {"qk_activation": "relu", "qk_norm": "sum"}),
    "delta-elu-sum": (tiny_delta_net, {"qk_activation": "elu", "qk_norm": "sum"}),
    "delta-identity": (tiny_delta_net, {"qk_activation": "identity"}),
}
BUILDERS = {
    **OWN,
    **{
        name: (lambda folder, name=name, **config: tiny_stock_model(name, folder, **config), {})
        for name in STOCK_MODELS
    },
}


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_slice_whose_channels_are_all_dead_is_finite_forward_and_backward(name, dtype, tmp_path):
    """Every kept channel of the first layer's first head is zero in every token."""
    from lapcli.families.registry import family_for

    builder, config = BUILDERS[name]
    base = resolve_model(str(builder(tmp_path / "base", **config)))
    kept = random_kept(base, 11)
    layer = layers_of(base)[0]
    dead = kept[layer.index][0]
    shapes = {n: entry.shape for n, (_header, entry) in base.tensors.items()}
    edited = {}
    for member in family_for(base.config).members(layer, shapes):
        path = base.tensors[member.tensor][0].path
        tensors = edited.setdefault(path, load_file(path))
        rows = member.offset + dead
        rows = rows[(rows >= 0) & (rows < tensors[member.tensor].shape[member.axis])]
        tensors[member.tensor].index_fill_(member.axis, rows, 0.0)
    for path, tensors in edited.items():
        save_file(tensors, path, {"format": "pt"})
    model = load_model(sliced_by(resolve_model(str(base.path)), kept, tmp_path), dtype=dtype)
    model.requires_grad_(True)
    output = model(input_ids=IDS, labels=IDS, use_cache=False)
    assert output.logits.isfinite().all()
    assert output.loss.isfinite()
    output.loss.backward()
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.isfinite().all(), parameter_name


STOCK_FLA = """
import json, sys
import torch
import fla.models
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
ids, found = torch.tensor(json.loads(sys.argv[1])), {}
for name, path in json.load(sys.stdin).items():
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert type(model).__module__.startswith("fla."), type(model)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], (name, info)
    with torch.no_grad():
        found[name] = model.eval()(input_ids=ids, use_cache=False).logits.contiguous()
save_file(found, sys.argv[2])
assert "lapcli" not in sys.modules
"""
# Heads of K = V = 16, but where it says otherwise.
FLA = {
    "gated": (tiny_gated_deltanet, {"head_dim": 16}),
    "gated-gva": (tiny_gated_deltanet, {"head_dim": 16, "num_heads": 2, "num_v_heads": 4}),
    "gated-wide-values": (tiny_gated_deltanet, {"head_dim": 16, "expand_v": 2.0}),
    "gated-tied": (tiny_gated_deltanet, {"head_dim": 16, "tie_word_embeddings": True}),
    "delta": (tiny_delta_net, {"hidden_size": 32}),
    "delta-gate": (tiny_delta_net, {"hidden_size": 32, "use_gate": True, "expand_v": 2.0}),
}


def test_stock_fla_computes_the_same_from_a_slice_in_a_fresh_process(tmp_path):
    """Case 12, by Triton's interpreter; a read scale or expand_v that went wrong shows in the logits."""
    slices = {}
    for name, (builder, config) in FLA.items():
        base = resolve_model(str(builder(tmp_path / name / "base", **config)))
        slices[name] = sliced_by(base, random_kept(base, 11), tmp_path / name)
    # Twice as long as the convolutions' filters.
    ids = IDS[:, :8]
    paths = {name: str(source.path) for name, source in slices.items()}
    run_interpreted(STOCK_FLA, json.dumps(ids.tolist()), str(tmp_path / "logits"), given=paths)
    found = load_file(tmp_path / "logits")
    for name, source in slices.items():
        with torch.no_grad():
            wanted = load_model(source)(input_ids=ids, use_cache=False).logits
        assert relative_error(found[name], wanted) < 2e-5, name
