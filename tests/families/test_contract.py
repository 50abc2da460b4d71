"""The contract that every family passes: slicing computes what masking computes, and nothing else changes.

The oracle masks activations of the unsliced model, so it shares nothing with the slicing code.
"""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from lapcli.artifacts import read_header
from lapcli.families.loading import load_model, resolve_model
from lapcli.families.registry import family_for
from lapcli.families.source import with_compat
from lapcli.stages.slicing import plan_slicing
from lapcli.testing.models import tiny_delta_net, tiny_gated_deltanet, tiny_qdelta
from lapcli.testing.oracle import masked, relative_error
from lapcli.testing.slices import layers_of, random_kept, selection_of, sliced_by

FP32 = 1e-5  # the oracle's bound on weights of N(0, 0.25 / fan-in): a few hundred roundings of a sum of that length
FP64 = 1e-10

CASES = {
    "gated": (tiny_gated_deltanet, {}),
    "gated-gva": (tiny_gated_deltanet, {"num_heads": 2, "num_v_heads": 4}),
    "gated-wide-values": (tiny_gated_deltanet, {"head_dim": 32, "expand_v": 2.0}),
    "gated-no-gate-no-conv": (tiny_gated_deltanet, {"use_gate": False, "use_short_conv": False}),
    "gated-tied": (tiny_gated_deltanet, {"tie_word_embeddings": True}),
    "gated-negative-eigenvalues": (tiny_gated_deltanet, {"allow_neg_eigval": True}),
    "gated-sharded": (tiny_gated_deltanet, {"max_shard_size": "60KB"}),
    "delta": (tiny_delta_net, {}),
    "delta-elu-sum": (tiny_delta_net, {"qk_activation": "elu", "qk_norm": "sum"}),
    "delta-relu": (tiny_delta_net, {"qk_activation": "relu"}),
    "delta-gate": (tiny_delta_net, {"use_gate": True, "expand_v": 2.0}),
    "delta-shared-filters": (tiny_delta_net, {"head_shared_conv": True}),
    "qdelta-gva": (tiny_qdelta, {"num_heads": 2, "num_v_heads": 4, "lamb_bias": -0.5}),
    "qdelta-fixed-no-decay": (tiny_qdelta, {"lamb_fixed": 0.8, "use_decay": False}),
    "qdelta-gain-negative-eigenvalues": (tiny_qdelta, {"lamb_gain": True, "allow_neg_eigval": True}),
}
# The builders silence torch's remark that a model without short convolutions learns worse.


@pytest.fixture(params=list(CASES), ids=list(CASES))
def base(request, tmp_path):
    builder, config = CASES[request.param]
    return resolve_model(str(builder(tmp_path / "base", **config)))


def logits(model, ids, **options):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **options).logits


IDS = torch.randint(3, 259, (2, 90), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, FP32), (torch.float64, FP64)], ids=["fp32", "fp64"])
def test_sliced_equals_masked(base, tmp_path, dtype, bound):
    kept = random_kept(base, 11)
    small = load_model(sliced_by(base, kept, tmp_path), dtype=dtype)
    whole = load_model(base, dtype=dtype)
    family = family_for(base.config)
    with masked(whole, family, family.layers(base.config), kept):
        wanted = logits(whole, IDS)
    assert relative_error(logits(small, IDS), wanted) < bound
    # The oracle would also pass if both ignored the cut: the unmasked model must differ.
    assert relative_error(logits(whole, IDS), wanted) > 1e-3


def test_what_the_releases_kernels_compute_is_sliced_as_well(tmp_path):
    """More tokens than a chunk of theirs; and asked for by the caller, where the file does not."""
    base = with_compat(resolve_model(str(tiny_qdelta(tmp_path / "base", lamb_bias=-1.0))), "released")
    kept = random_kept(base, 11)
    small = with_compat(sliced_by(base, kept, tmp_path), "released")
    whole = load_model(base)
    family = family_for(base.config)
    with masked(whole, family, family.layers(base.config), kept):
        wanted = logits(whole, IDS)
    assert relative_error(logits(load_model(small), IDS), wanted) < FP32
    plain = {**small.config, "compat": None}
    right = load_model(replace(small, config=plain))
    assert relative_error(logits(right, IDS), wanted) > 1e-3
    assert small.digest != replace(small, config=plain).digest


def test_everything_else_stays(base, tmp_path):
    small = sliced_by(base, random_kept(base, 8), tmp_path)
    layers = layers_of(base)
    cut = {member.tensor for layer in layers for member in layer.members}
    assert small.tensors.keys() == base.tensors.keys()
    for name, (header, entry) in base.tensors.items():
        new_header, new_entry = small.tensors[name]
        assert new_header.path.name == header.path.name
        assert new_entry.dtype == entry.dtype
        old = header.path.read_bytes()[entry.start : entry.start + entry.nbytes]
        new = new_header.path.read_bytes()[new_entry.start : new_entry.start + new_entry.nbytes]
        assert (old != new and len(new) * layers[0].key_width == len(old) * 8) if name in cut else old == new, name
    after = layers_of(small)
    assert [(layer.key_width, layer.value_width, layer.value_heads) for layer in after] == [
        (8, layer.value_width, layer.value_heads) for layer in layers
    ]
    assert (small.path / "tokenizer.json").read_bytes() == (base.path / "tokenizer.json").read_bytes()


def test_keeping_all_channels_is_the_identity(base, tmp_path):
    layers = layers_of(base)
    same = sliced_by(base, random_kept(base, layers[0].key_width), tmp_path)
    assert layers_of(same) == layers
    for name in {header.path.name for header in base.headers}:
        assert (same.path / name).read_bytes() == (base.path / name).read_bytes()


def test_cached_decode_equals_prefill_and_it_generates(base, tmp_path):
    model = load_model(sliced_by(base, random_kept(base, 11), tmp_path))
    whole = logits(model, IDS)
    with torch.no_grad():
        out = model(input_ids=IDS[:, :50], use_cache=True)
        parts = [out.logits]
        for start, end in ((50, 57), (57, 58), (58, 90)):
            out = model(input_ids=IDS[:, start:end], past_key_values=out.past_key_values, use_cache=True)
            parts.append(out.logits)
        generated = model.generate(IDS[:, :20], max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert relative_error(torch.cat(parts, 1), whole) < 2e-5
    assert generated.shape == (2, 25)


def test_saved_again_and_loaded_it_is_the_same(base, tmp_path):
    first = load_model(sliced_by(base, random_kept(base, 11), tmp_path))
    first.save_pretrained(tmp_path / "again")
    second = load_model(resolve_model(str(tmp_path / "again")))
    assert torch.equal(logits(first, IDS), logits(second, IDS))


def test_stock_fla_reads_the_configs_in_a_fresh_process(tmp_path):
    """Shapes from stock fla's own constructors, on the meta device, against the sliced checkpoints'."""
    models = {}
    for name, (builder, config) in CASES.items():
        if "head_shared_conv" in config or builder is tiny_qdelta:
            continue  # fla has neither; tests/models/test_fla_names.py says how it refuses the first
        (tmp_path / name).mkdir()
        base = resolve_model(str(builder(tmp_path / name / "base", **config)))
        models[name] = sliced_by(base, random_kept(base, 11), tmp_path / name)
    program = """
import json, sys, warnings, torch
warnings.simplefilter("ignore")
import fla.models
from transformers import AutoConfig, AutoModelForCausalLM
found = {}
for name, path in json.load(sys.stdin).items():
    config = AutoConfig.from_pretrained(path)
    assert type(config).__module__.startswith("fla."), type(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found[name] = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps({name: str(model.path) for name, model in models.items()}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    wanted = json.loads(done.stdout.splitlines()[-1])
    for name, model in models.items():
        if model.config["tie_word_embeddings"]:
            assert "lm_head.weight" not in model.tensors
            wanted[name].pop("lm_head.weight")
        assert {key: list(entry.shape) for key, (_header, entry) in model.tensors.items()} == wanted[name], name


def test_a_plan_counts_what_will_be_written(base, tmp_path):
    selection = selection_of(base, random_kept(base, 8), tmp_path)
    plan = plan_slicing(base, selection)
    small = sliced_by(base, random_kept(base, 8), tmp_path)
    assert plan.bytes_after == sum(entry.nbytes for _header, entry in small.tensors.values())
    layers = layers_of(base)
    state = sum(layer.value_heads * 8 * layer.value_width * 4 for layer in layers)
    assert plan.state_bytes_after == state
    with torch.no_grad():
        out = load_model(small)(input_ids=IDS[:1], use_cache=True)
    held = [out.past_key_values.get(layer.index).recurrent for layer in layers]
    assert sum(tensor.numel() * tensor.element_size() for tensor in held) == state


def test_bf16_is_cut_bit_for_bit(tmp_path):
    source = resolve_model(str(tiny_gated_deltanet(tmp_path / "base32")))
    load_model(source, dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    base = resolve_model(str(tmp_path / "base"))
    kept = random_kept(base, 11)
    small = sliced_by(base, kept, tmp_path)
    for layer in layers_of(base):
        for member in layer.members:
            old, new = (load_tensor(model, member.tensor) for model in (base, small))
            assert old.dtype is torch.bfloat16
            rows = torch.cat([kept[layer.index][head] + head * layer.key_width for head in range(layer.heads)])
            assert torch.equal(new, old[rows])


def load_tensor(source, name):
    from safetensors import safe_open

    with safe_open(read_header(source.tensors[name][0].path).path, framework="pt") as handle:
        return handle.get_tensor(name)
