"""The contract for families that run through stock transformers: what is sliced is what is masked, and loads as it is.

The oracle wraps the library's own recurrence functions, so it shares nothing with an adapter but the kept channels.
"""

import json
import os
import re
import subprocess
import sys
from functools import partial

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lapcli.families.loading import load_model, resolve_model
from lapcli.families.registry import family_for
from lapcli.testing.oracle import _recurrence_changed as recurrence_changed
from lapcli.testing.oracle import masked, relative_error
from lapcli.testing.slices import layers_of, random_kept, sliced_by
from lapcli.testing.stock_models import STOCK_MODELS, lay_convolutions, release_config, tiny_stock_model

FP32 = 1e-5  # the oracle's bound on weights of N(0, 0.25 / fan-in): a few hundred roundings of a sum of that length
KEPT = 11

VARIANTS = {
    **{name: (name, {}) for name in STOCK_MODELS},
    "qwen3_next-tied-sharded": ("qwen3_next", {"tie_word_embeddings": True, "max_shard_size": "60KB"}),
    "qwen3_next-as-many-value-heads": ("qwen3_next", {"linear_num_value_heads": 2}),
    "qwen3_5-multimodal-tied-sharded": (
        "qwen3_5",
        {"multimodal": True, "tie_word_embeddings": True, "max_shard_size": "60KB"},
    ),
    "qwen3_5_moe-multimodal-bf16": ("qwen3_5_moe", {"multimodal": True, "dtype": torch.bfloat16}),
    "qwen4_exp-multimodal": ("qwen4_exp", {"multimodal": True}),
    "lara_mini-tied-sharded": ("lara_mini", {"tie_word_embeddings": True, "max_shard_size": "60KB"}),
    "olmo_hybrid-as-released": ("olmo_hybrid", {"rewrite": partial(lay_convolutions, fused=False)}),
    "olmo_hybrid-fused": ("olmo_hybrid", {"rewrite": partial(lay_convolutions, fused=True)}),
    "olmo_hybrid-tied-sharded": ("olmo_hybrid", {"tie_word_embeddings": True, "max_shard_size": "60KB"}),
    "kimi_linear-dense-sharded": ("kimi_linear", {"mlp_layer_types": ["dense"] * 3, "max_shard_size": "60KB"}),
    "kimi_linear-as-released": ("kimi_linear", {"linear_num_heads": 3, "rewrite": release_config}),
    "kimi_linear-bf16": ("kimi_linear", {"dtype": torch.bfloat16}),
    "glm5_next-softplus-tied-sharded": (
        "glm5_next",
        {"linear_lower_bound": None, "tie_word_embeddings": True, "max_shard_size": "60KB"},
    ),
    "glm5_next-as-released": ("glm5_next", {"linear_num_heads": 3, "rewrite": release_config}),
    "bailing_hybrid-softplus-sharded": ("bailing_hybrid", {"kda_safe_gate": False, "max_shard_size": "60KB"}),
    "bailing_hybrid-as-released": ("bailing_hybrid", {"rewrite": release_config}),
    "mamba2-8-groups": ("mamba2", {"n_groups": 8}),
    "mamba2-no-bias": ("mamba2", {"use_conv_bias": False, "tie_word_embeddings": True}),
    "bamba-2-groups-tied-sharded": (
        "bamba",
        {"mamba_n_groups": 2, "tie_word_embeddings": True, "max_shard_size": "60KB"},
    ),
    "mamba2-projection-bias": ("mamba2", {"use_bias": True, "n_groups": 2}),
    "bamba-no-bias": ("bamba", {"mamba_conv_bias": False}),
    "bamba-projection-bias": ("bamba", {"mamba_proj_bias": True}),
    "nemotron_h-projection-bias": ("nemotron_h", {"use_bias": True}),
    "falcon_h1-2-groups-no-norm": (
        "falcon_h1",
        {"mamba_n_groups": 2, "mamba_d_ssm": None, "mamba_rms_norm": False, "tie_word_embeddings": True},
    ),
    "falcon_h1-gate-after-norm": ("falcon_h1", {"mamba_norm_before_gate": False, "max_shard_size": "60KB"}),
    "falcon_h1-projection-bias": ("falcon_h1", {"mamba_proj_bias": True, "mamba_n_groups": 2}),
    "falcon_h1-no-bias": ("falcon_h1", {"mamba_conv_bias": False}),
    "granitemoehybrid-projection-bias": ("granitemoehybrid", {"mamba_proj_bias": True, "mamba_n_groups": 2}),
    "granitemoehybrid-no-bias": ("granitemoehybrid", {"mamba_conv_bias": False}),
    "granitemoehybrid-4-groups-tied-sharded": (
        "granitemoehybrid",
        {"mamba_n_groups": 4, "tie_word_embeddings": True, "max_shard_size": "60KB"},
    ),
    "granitemoehybrid-dense": ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "rope"}),
    "nemotron_h-no-bias": ("nemotron_h", {"use_conv_bias": False}),
    "nemotron_h-4-groups-sharded": ("nemotron_h", {"n_groups": 4, "max_shard_size": "60KB"}),
    "zamba2-projection-bias": ("zamba2", {"add_bias_linear": True, "mamba_ngroups": 2}),
    "zamba2-2-groups-sharded": ("zamba2", {"mamba_ngroups": 2, "max_shard_size": "60KB"}),
    "zamba2-two-blocks": (
        "zamba2",
        {
            "num_mem_blocks": 2,
            "num_hidden_layers": 5,
            "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid", "linear_attention"],
            "use_mem_rope": False,
        },
    ),
}
IDS = torch.randint(3, 259, (2, 108), generator=torch.Generator().manual_seed(1))


def made(variant, folder):
    """The base model of a variant."""
    model_type, config = VARIANTS[variant]
    options = {name: value for name, value in config.items() if name != "rewrite"}
    tiny_stock_model(model_type, folder, **options)
    config.get("rewrite", lambda _folder: None)(folder)
    return resolve_model(str(folder))


@pytest.fixture(scope="module", params=list(VARIANTS))
def base(request, tmp_path_factory):
    model_type, _config = VARIANTS[request.param]
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return made(request.param, tmp_path_factory.mktemp(request.param) / "base")


@pytest.fixture(scope="module")
def sliced(base, tmp_path_factory):
    return sliced_by(base, random_kept(base, KEPT), tmp_path_factory.mktemp("slice"))


@pytest.fixture(scope="module")
def small(sliced):
    """The slice's model, for tests that change nothing of it."""
    return load_model(sliced)


def members_of(source, layer):
    """The coupled group as it lies in the checkpoint, without tensors that hold only values."""
    shapes = {name: entry.shape for name, (_header, entry) in source.tensors.items()}
    members = family_for(source.config).members(layer, shapes)
    spans = ((member, member.offset, member.offset + layer.heads * member.stride) for member in members)
    return [m for m, start, end in spans if not m.partial or (end > 0 and start < shapes[m.tensor][m.axis])]


def shapes_in_memory(source):
    """The shapes of what the text model loads; OLMo-Hybrid's convolutions whole, as transformers cuts them anywhere."""
    shapes = {}
    for name, (_header, entry) in source.tensors.items():
        if not name.startswith(("model.visual.", "mtp.")):
            if source.config["model_type"] == "olmo_hybrid":
                name = re.sub(r"\.[qkv]_conv1d\.", ".conv1d.", name)
            earlier = shapes.get(name, (0,))
            shapes[name] = (earlier[0] + entry.shape[0], *entry.shape[1:]) if entry.shape else ()
    return shapes


def in_parts(model, ids, *lengths):
    """Logits of a cached pass over parts of the given lengths, in order."""
    if mixes_rows(model) and len(ids) > 1:
        return torch.cat([in_parts(model, row[None], *lengths) for row in ids])
    parts, cache, start = [], None, 0
    with torch.no_grad():
        for length in lengths:
            positions = torch.arange(start, start + length).expand(len(ids), -1)
            out = model(
                input_ids=ids[:, start : start + length],
                position_ids=positions,
                use_cache=True,
                **({} if cache is None else {cache_name(model): cache}),
            )
            cache = getattr(out, "past_key_values", None)
            if cache is None:
                cache = getattr(out, "cache", None) or out.cache_params
            assert out.logits.shape[:2] == (len(ids), length)
            parts.append(out.logits)
            start += length
    return torch.cat(parts, 1)


def mixes_rows(model):
    """Whether a cached step of one token is wrong for a batch: Falcon-H1 with a gated norm, in transformers 5.17."""
    normed = model.config.model_type == "falcon_h1" and model.config.mamba_rms_norm
    return normed and Version(transformers.__version__) < Version("5.24")


def cache_name(model):
    import inspect

    names = inspect.signature(type(model).forward).parameters
    return next(name for name in ("past_key_values", "cache", "cache_params") if name in names)


def logits(model, ids, **options):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **options).logits


def test_sliced_equals_masked(base, small):
    kept = random_kept(base, KEPT)
    whole = load_model(base)
    family, layers = family_for(base.config), layers_of(base)
    wanted = {}
    with masked(whole, family, layers, kept):
        wanted["prefill"] = logits(whole, IDS)
        wanted["decode"] = in_parts(whole, IDS, 90, 1, 1, 1)
    assert relative_error(logits(small, IDS), wanted["prefill"]) < FP32
    assert relative_error(in_parts(small, IDS, 90, 1, 1, 1), wanted["decode"]) < FP32
    # The oracle would also pass if both ignored the cut: the unmasked model must differ.
    assert relative_error(logits(whole, IDS), wanted["prefill"]) > 1e-3


def test_kept_sets_belong_to_their_heads(base, small, tmp_path):
    if layers_of(base)[0].heads == 1:
        pytest.skip("one key head")
    swapped = sliced_by(base, {index: rows.roll(1, 0) for index, rows in random_kept(base, KEPT).items()}, tmp_path)
    assert relative_error(logits(load_model(swapped), IDS), logits(small, IDS)) > 1e-3


def test_cached_decode_equals_prefill_and_it_generates(small):
    assert relative_error(in_parts(small, IDS, 100, 7, 1), logits(small, IDS)) < 2e-5
    made = small.generate(IDS[:, :20], max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert made.shape == (2, 24)


def states_of(out, layers):
    """The recurrent states and convolution windows in a cache, by the name that the library gives it."""
    cache = getattr(out, "past_key_values", None) or getattr(out, "cache", None) or out.cache_params
    held = (cache.layers[layer.index] for layer in layers)
    return [state for each in held for state in (each.recurrent_states[0], each.conv_states[0])]


def test_left_pads_change_nothing(sliced):
    """Case 7: logits as without them; other pads change no bit, of the states neither."""
    model = load_model(sliced)
    # Token by token: experts that run all their tokens at once round with how many there are, pads among them.
    model.set_experts_implementation("batched_mm")
    pads = torch.full((1, 5), 7)
    row = IDS[:1, :40]
    mask = torch.cat((torch.zeros(1, 5, dtype=torch.long), torch.ones(1, 40, dtype=torch.long)), 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    both = []
    for fill in (pads, pads + 9):
        with torch.no_grad():
            out = model(
                input_ids=torch.cat((fill, row), 1), attention_mask=mask, position_ids=positions, use_cache=True
            )
        both.append((out.logits[:, 5:], states_of(out, layers_of(sliced))))
    (found, states), (other, other_states) = both
    if any(member.role == "key projection bias" for layer in layers_of(sliced) for member in layer.members):
        # In the library a bias puts something at the pads, which the convolution takes to the first tokens.
        assert relative_error(found, logits(model, row)) > FP32
    else:
        assert relative_error(found, logits(model, row)) < FP32
    assert torch.equal(found, other)
    assert all(torch.equal(one, two) for one, two in zip(states, other_states, strict=True))


def test_everything_else_stays(base, sliced):
    layers = layers_of(base)
    cut = {member.tensor for layer in layers for member in members_of(base, layer)}
    assert sliced.tensors.keys() == base.tensors.keys()
    for name, (header, entry) in base.tensors.items():
        new_header, new_entry = sliced.tensors[name]
        assert new_header.path.name == header.path.name
        assert new_entry.dtype == entry.dtype
        old = header.path.read_bytes()[entry.start : entry.start + entry.nbytes]
        new = new_header.path.read_bytes()[new_entry.start : new_entry.start + new_entry.nbytes]
        assert (len(new) < len(old)) if name in cut else old == new, name
    for before, after in zip(layers, layers_of(sliced), strict=True):
        assert (after.key_width, after.value_width) == (KEPT, before.value_width)
        assert (after.heads, after.value_heads) == (before.heads, before.value_heads)


def test_keeping_all_channels_is_the_identity(base, tmp_path):
    same = sliced_by(base, random_kept(base, layers_of(base)[0].key_width), tmp_path)
    for header in base.headers:
        assert (same.path / header.path.name).read_bytes() == header.path.read_bytes()
    assert layers_of(same) == layers_of(base)
    # Whose code loads it stays the same too.
    assert same.config["model_type"] == base.config["model_type"]


def test_the_state_has_the_bytes_that_the_layers_say(sliced, small):
    with torch.no_grad():
        out = small(input_ids=IDS[:1, :40], use_cache=True)
    cache = getattr(out, "past_key_values", None) or getattr(out, "cache", None) or out.cache_params
    for layer in layers_of(sliced):
        state = cache.layers[layer.index].recurrent_states[0]
        assert state.numel() * state.element_size() == layer.state_bytes()
        window = cache.layers[layer.index].conv_states[0]
        assert window.shape[1] == layer.convolution_bytes(itemsize=1) // layer.convolution.taps


def test_saved_again_and_loaded_it_is_the_same(sliced, tmp_path):
    first = load_model(sliced)
    first.save_pretrained(tmp_path / "again")
    again = resolve_model(str(tmp_path / "again"))
    assert shapes_in_memory(again) == shapes_in_memory(sliced)
    assert torch.equal(logits(first, IDS), logits(load_model(again), IDS))


FRESH = """
import json, sys
for name in ("fla", "causal_conv1d", "mamba_ssm"):
    sys.modules[name] = None  # not lapcli's doing: here transformers itself must take its PyTorch path
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
ids, found = torch.tensor(json.loads(sys.argv[1])), {}
for name, path in json.load(sys.stdin).items():
    code = "auto_map" in json.load(open(path + "/config.json"))  # lapcli's, where no stock config can say the slice
    options = {"dtype": torch.float32, "output_loading_info": True, "trust_remote_code": code}
    model, info = AutoModelForCausalLM.from_pretrained(path, **options)
    where = type(model).__module__
    assert where.startswith("transformers_modules." if code else "transformers.models."), (name, type(model))
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], (name, info)
    with torch.no_grad():
        found[name] = model.eval()(input_ids=ids, use_cache=False).logits.contiguous()
save_file(found, sys.argv[2])
assert "lapcli" not in sys.modules
"""


def test_stock_transformers_loads_all_in_a_fresh_process(tmp_path):
    """One process for all variants: it is the imports that take time."""
    slices = {}
    for name, (model_type, _config) in VARIANTS.items():
        if model_type in CONFIG_MAPPING:
            source = made(name, tmp_path / name / "base")
            slices[name] = sliced_by(source, random_kept(source, KEPT), tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", FRESH, json.dumps(IDS[:, :30].tolist()), str(tmp_path / "logits")],
        input=json.dumps({name: str(source.path) for name, source in slices.items()}),
        capture_output=True, text=True, check=False, env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = load_file(tmp_path / "logits")
    for name, source in slices.items():
        assert relative_error(found[name], logits(load_model(source), IDS[:, :30])) < FP32, name


def assert_taps_see_the_recurrence(base):
    from lapcli.stages.observation import observe
    from lapcli.testing.oracle import seen_by_the_recurrence

    model, family, layers = load_model(base), family_for(base.config), layers_of(base)
    mask = torch.ones_like(IDS)
    mask[0, :9] = 0
    observation = observe(layers)
    with torch.no_grad(), observation.attached(family, model), seen_by_the_recurrence(model, layers) as seen:
        model(input_ids=IDS, attention_mask=mask, use_cache=False)
    for sums in observation.layers:
        queries, keys = seen[sums.layer.index]
        for values, gram in ((queries, sums.gram_query), (keys, sums.gram_key)):
            heads = values[mask.bool()].double().transpose(0, 1)
            # transformers 5.17 repeats a key head for each value head that reads it: j reads j // (HV / H).
            readers = heads.unflatten(0, (sums.layer.heads, -1))
            assert torch.equal(readers, readers[:, :1].expand_as(readers))
            heads = readers[:, 0]
            assert relative_error(gram, heads.mT @ heads) < 1e-5


def test_calibration_sees_what_the_library_computes(base):
    """Keys and queries taken through the taps equal those that the library gives its recurrence, pads left out."""
    assert_taps_see_the_recurrence(base)


@pytest.mark.parametrize("model_type", STOCK_MODELS)
def test_calibration_sees_it_with_another_activation_too(model_type, tmp_path):
    """Every library but Zamba2's, which has silu whatever its config says, reads what follows the convolution."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    fields = {"mamba_hidden_act" if model_type == "nemotron_h" else "hidden_act": "gelu"}
    if model_type == "qwen4_exp":
        fields["output_gate_type"] = "silu"  # which otherwise follows, and may not be gelu
    base = resolve_model(str(tiny_stock_model(model_type, tmp_path, **fields)))
    assert layers_of(base)[0].keys.activation == ("silu" if model_type == "zamba2" else "gelu")
    assert_taps_see_the_recurrence(base)


@pytest.mark.parametrize("model_type", STOCK_MODELS)
def test_layers_are_declared_l2_normalised_where_length_does_not_matter(model_type, tmp_path):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    base = resolve_model(str(tiny_stock_model(model_type, tmp_path)))
    model, layers = load_model(base), layers_of(base)
    wanted = logits(model, IDS[:, :20])
    with recurrence_changed(model, layers, lambda _layer, queries, keys: (queries * 8, keys * 8, 1.0)):
        longer = logits(model, IDS[:, :20])
    # The eps under the root is all that length leaves.
    assert {layer.l2_normalised for layer in layers} == {relative_error(longer, wanted) < 1e-3}
