"""Which parameters recovery trains in each family; merging at byte level: equal logits, every other byte as it was."""

import json
import os
import subprocess
import sys
from functools import partial

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lapcli.errors import ArtifactError, FamilyError, RecipeError
from lapcli.families.loading import load_model
from lapcli.families.registry import family_for
from lapcli.families.source import resolve_model
from lapcli.stages.lineage import LINEAGE_FILE, sliced_lineage
from lapcli.testing.models import tiny_delta_net, tiny_gated_deltanet, tiny_qdelta
from lapcli.testing.slices import random_kept, sliced_by
from lapcli.testing.stock_models import STOCK_MODELS, lay_convolutions, tiny_stock_model
from lapcli.training import adapters, merging
from lapkernels.testing import relative_error

FP32 = 1e-5  # as the contract of families: a few hundred roundings of a sum
OWN = {"gated_deltanet": tiny_gated_deltanet, "delta_net": tiny_delta_net, "qdelta": tiny_qdelta}
PACKED = {
    "qwen3_next": "in_proj_qkvz",
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen4_exp", "lara_mini"), "in_proj_qkv"),
    **dict.fromkeys(("mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"), "in_proj"),
}
VARIANTS = {
    **{name: (name, {}) for name in (*OWN, *STOCK_MODELS)},
    "delta_net-shared-filters": ("delta_net", {"head_shared_conv": True}),
    "qdelta-gain": ("qdelta", {"lamb_gain": True, "num_v_heads": 4}),
    "qdelta-fixed": ("qdelta", {"lamb_fixed": 0.5, "use_decay": False}),
    "gated_deltanet-sharded": ("gated_deltanet", {"max_shard_size": "60KB"}),
    "qwen3_5-multimodal-tied-sharded-bf16": (
        "qwen3_5",
        {"multimodal": True, "tie_word_embeddings": True, "max_shard_size": "60KB", "dtype": torch.bfloat16},
    ),
    "qwen4_exp-multimodal": ("qwen4_exp", {"multimodal": True}),
    "olmo_hybrid-as-released": ("olmo_hybrid", {"rewrite": partial(lay_convolutions, fused=False)}),
    "olmo_hybrid-fused": ("olmo_hybrid", {"rewrite": partial(lay_convolutions, fused=True)}),
    "lara_mini-tied-sharded": ("lara_mini", {"tie_word_embeddings": True, "max_shard_size": "60KB"}),
    "nemotron_h-sharded": ("nemotron_h", {"max_shard_size": "60KB"}),
    **{f"{name}-sliced": (name, {"slice": 11}) for name in ("kimi_linear", "glm5_next", "olmo_hybrid", "mamba2")},
}
IDS = torch.randint(3, 259, (2, 40), generator=torch.Generator().manual_seed(1))


def made(variant, folder):
    """The model of a variant."""
    model_type, config = VARIANTS[variant]
    options = {name: value for name, value in config.items() if name not in ("rewrite", "slice")}
    base = folder / "base"
    if model_type in OWN:
        OWN[model_type](base, **options)
    else:
        tiny_stock_model(model_type, base, **options)
    config.get("rewrite", lambda _folder: None)(base)
    source = resolve_model(str(base))
    return sliced_by(source, random_kept(source, config["slice"]), folder) if "slice" in config else source


@pytest.fixture(scope="module", params=list(VARIANTS))
def source(request, tmp_path_factory):
    model_type = VARIANTS[request.param][0]
    if model_type not in OWN and model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return made(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def own(tmp_path):
    return resolve_model(str(tiny_gated_deltanet(tmp_path / "base")))


def layers_of(source):
    return family_for(source.config).layers(source.config)


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def adapted(source, dtype=torch.float32, **options):
    model = load_model(source, dtype=dtype)
    plan = adapters.plan_adapters(model, source.config, **{"rank": 8, "alpha": 16, **options})
    return adapters.apply_adapters(model, plan), plan


def disturb(model, seed=3):
    """Give all that is trained other values, near enough for sums to stay of the same size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapters.trained_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def saved(source, model, plan, folder):
    return adapters.save_adapter(folder, source, plan, adapters.trained_state(model))


def tensors_of(source):
    return {name: value for shard in source.shards for name, value in load_file(shard).items()}


def same_bits(one, other):
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def test_a_rank_above_the_narrowest_projection_is_refused(tmp_path):
    base = resolve_model(str(tiny_gated_deltanet(tmp_path / "base")))
    source = sliced_by(base, random_kept(base, 5), tmp_path)
    model, heads = load_model(source), layers_of(source)[0].heads
    assert adapters.plan_adapters(model, source.config, rank=5 * heads).lora
    with pytest.raises(
        RecipeError, match=rf"rank {5 * heads + 1} .*4 of the 6 .*q_proj, which is {5 * heads} x"
    ) as refused:
        adapters.plan_adapters(model, source.config, rank=5 * heads + 1)
    assert f"--lora-rank {5 * heads} or less" in refused.value.hint
    # Nothing gets LoRA there.
    assert adapters.plan_adapters(model, source.config, rank=4096, full=True).trained


def test_every_recurrent_layer_is_covered_and_nothing_else(source):
    model, plan = adapted(source)
    layers = layers_of(source)
    assert [layer.index for layer in plan.layers] == [layer.index for layer in layers]
    family = family_for(source.config).name
    projections = [PACKED[family]] if family in PACKED else ["q_proj", "k_proj", "v_proj"]
    for planned, layer in zip(plan.layers, layers, strict=True):
        assert list(planned.lora) == [f"{layer.mixer}.{name}" for name in projections]
        ends = [name.removeprefix(layer.mixer.rpartition(".")[0]) for name in planned.full]
        assert any("conv1d.weight" in name for name in ends)
        assert any("norm" in name for name in ends)
        # Block norms: not those within softmax mixers, MLPs or experts.
        block = layer.mixer.rpartition(".")[0]
        for name in (*planned.lora, *planned.full):
            assert name.startswith(f"{layer.mixer}.") or (name.startswith(f"{block}.") and "norm" in name)
    blocks = tuple(layer.mixer.rpartition(".")[0] + "." for layer in layers)
    trained = adapters.trained_parameters(model)
    assert all(name.startswith(blocks) for name in trained)
    assert not [name for name in trained if "expert" in name or "visual" in name or ".mlp." in name]
    assert sum(parameter.numel() for parameter in trained.values()) == plan.trained
    assert all(parameter.dtype == torch.float32 for parameter in trained.values())


@pytest.mark.parametrize(
    ("config", "wanted"),
    [({"lamb_gain": True}, ["lamb_proj.weight", "lamb_gain"]), ({}, ["lamb_proj.weight"]), ({"lamb_fixed": 0.5}, [])],
    ids=["with-a-gain", "learned", "fixed"],
)
def test_query_feedback_is_trained_in_full(tmp_path, config, wanted):
    source = resolve_model(str(tiny_qdelta(tmp_path / "m", **config)))
    model, plan = adapted(source, torch.bfloat16)
    for layer in plan.layers:
        found = [name.removeprefix(f"{layer.mixer}.") for name in layer.full if "lamb" in name]
        assert found == wanted
    model(input_ids=IDS, labels=IDS).loss.backward()
    trained = adapters.trained_parameters(model)
    gains = [parameter for name, parameter in trained.items() if name.endswith(("lamb_gain", "lamb_proj.weight"))]
    assert len(gains) == 2 * len(wanted)
    assert all(gain.dtype == torch.float32 and gain.grad is not None for gain in gains)


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_merged_equals_unmerged_and_other_bytes_stay(source, full, tmp_path):
    model, plan = adapted(source, full=full)
    before = logits(model)
    disturb(model)
    wanted = logits(model)
    assert relative_error(wanted, before) > 1e-3
    folder = saved(source, model, plan, tmp_path / "adapter")
    done = merging.merge(source, folder, tmp_path / "merged")
    merged = resolve_model(str(tmp_path / "merged"))

    old, new = tensors_of(source), tensors_of(merged)
    assert list(old) == list(new)
    assert merged.config == source.config
    assert [shard.name for shard in source.shards] == [shard.name for shard in merged.shards]
    for name in source.tensors:
        (_h1, was), (_h2, entry) = source.tensors[name], merged.tensors[name]
        assert was == entry
    changed = {name for name in old if not same_bits(old[name], new[name])}
    assert changed == set(done.changed)
    layers = {layer.index for layer in layers_of(source)}
    assert all(any(f".{index}." in name for index in layers) for name in changed)
    assert not [name for name in changed if "expert" in name or ".mlp." in name]

    if all(entry.dtype == "F32" for _header, entry in source.tensors.values()):
        assert relative_error(logits(load_model(merged)), wanted) < FP32
    else:
        # Each value is the fp32 one rounded once to what is stored: loaded, that is the parameter in memory.
        again = dict(load_model(merged).named_parameters())
        state = adapters.trained_state(model)
        for name in plan.full:
            assert torch.equal(again[name].bfloat16(), state[name].bfloat16())
    lineage = sliced_lineage(merged.path)
    assert lineage is not None
    assert lineage.settings["stage"] == "recovery"
    assert "adapter" in lineage.parents
    assert lineage.model["digest"] == source.digest


def test_lara_minis_other_rows_stay(tmp_path):
    source = made("lara_mini", tmp_path)
    model, plan = adapted(source)
    disturb(model)
    merging.merge(source, saved(source, model, plan, tmp_path / "adapter"), tmp_path / "merged")
    old, new = tensors_of(source), tensors_of(resolve_model(str(tmp_path / "merged")))
    rows = model.base_model.model.get_submodule(plan.lora[0]).out_features
    packed = [name for name in old if name.endswith("linear_attn.in_proj.weight")]
    assert packed
    for name in packed:
        assert len(old[name]) > rows
        assert same_bits(old[name][rows:], new[name][rows:])
        assert not same_bits(old[name][:rows], new[name][:rows])


def test_an_untouched_adapter_changes_no_byte(source, tmp_path):
    model, plan = adapted(source, dtype=torch.bfloat16)
    folder = saved(source, model, plan, tmp_path / "adapter")
    done = merging.merge(source, folder, tmp_path / "merged")
    assert done.changed == ()
    for shard in source.shards:
        assert (tmp_path / "merged" / shard.name).read_bytes() == shard.read_bytes()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
def test_stock_peft_loads_the_adapter(source, tmp_path):
    model, plan = adapted(source)
    disturb(model)
    folder = saved(source, model, plan, tmp_path / "adapter")
    stock = peft.PeftModel.from_pretrained(load_model(source), str(folder))
    state = adapters.trained_state(model)
    lora = {adapters._plain_name(name): value for name, value in stock.named_parameters() if ".lora_" in name}
    assert lora.keys() == {name for name in state if ".lora_" in name}
    assert all(torch.equal(value, state[name]) for name, value in lora.items())


def test_a_saved_adapter_comes_back(own, tmp_path):
    model, plan = adapted(own)
    disturb(model)
    wanted = logits(model)
    folder = saved(own, model, plan, tmp_path / "adapter")
    again, _plan = adapted(own)
    adapters.load_adapter(again, folder)
    assert torch.equal(logits(again), wanted)
    other, _plan = adapted(own, targets=["q_proj"])
    with pytest.raises(ArtifactError, match="other parameters"):
        adapters.load_adapter(other, folder)


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
@pytest.mark.parametrize("name", ["gated_deltanet", "qwen3_5", "kimi_linear", "mamba2"])
def test_a_bf16_model_trains_in_fp32(name, full, tmp_path):
    source = made(name, tmp_path)
    loaded = {key: value.dtype for key, value in load_model(source, dtype=torch.bfloat16).named_parameters()}
    model, plan = adapted(source, dtype=torch.bfloat16, full=full)
    trained = adapters.trained_parameters(model)
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    base = model if full else model.base_model.model
    for key in plan.full:
        module, _, leaf = key.rpartition(".")
        assert getattr(base.get_submodule(module), leaf).dtype == loaded[key]
    frozen = {key: value.dtype for key, value in base.named_parameters() if not value.requires_grad}
    assert all(loaded[key.replace(".base_layer.", ".")] == dtype for key, dtype in frozen.items())
    model(input_ids=IDS, use_cache=False).logits.float().logsumexp(-1).mean().backward()
    assert not [key for key, parameter in trained.items() if parameter.grad is None]
    # A step too small for bf16 is kept by the fp32 original.
    some = next(key for key in plan.full if loaded[key] == torch.bfloat16)
    with torch.no_grad():
        before = trained[some].clone()
        trained[some].mul_(1 + 1e-5)
    assert not torch.equal(trained[some], before)
    assert torch.equal(trained[some].bfloat16(), before.bfloat16())


def test_lora_on_a_convolution_is_refused_with_the_remedy(own):
    model = load_model(own)
    with pytest.raises(RecipeError, match="short convolution") as refused:
        adapters.plan_adapters(model, own.config, targets=["q_proj", "q_conv1d"])
    assert "trained in full anyway" in refused.value.hint
    assert refused.value.exit_code == 1


def test_lora_on_query_feedback_is_refused_and_not_proposed(tmp_path):
    source = resolve_model(str(tiny_qdelta(tmp_path / "m")))
    with pytest.raises(RecipeError, match=r"lamb_proj is trained in full") as refused:
        adapters.plan_adapters(load_model(source), source.config, targets=["q_proj", "lamb_proj"], rank=1)
    assert "--lora-target" in refused.value.hint
    with pytest.raises(RecipeError) as refused:
        adapters.plan_adapters(load_model(source), source.config, targets=["nothing"])
    assert "b_proj" in refused.value.hint
    assert "lamb_proj" not in refused.value.hint


@pytest.mark.parametrize(
    "targets", [["q_proj", "v_proj"], ["in_proj_qkv", "q_proj"], []], ids=["default", "both", "none"]
)
def test_targets_that_miss_recurrent_layers_are_refused(targets, tmp_path):
    source = made("qwen3_5", tmp_path)
    with pytest.raises(RecipeError) as refused:
        adapters.plan_adapters(load_model(source), source.config, targets=targets)
    assert refused.value.exit_code == 1
    for layer in layers_of(source):
        assert f"layer {layer.index} ({layer.mixer}): " in refused.value.message
    assert "in_proj_qkv" in refused.value.hint
    if targets:
        assert "outside of recurrent mixers, never trained: model.layers.3.self_attn.q_proj" in refused.value.message


def test_one_layer_out_of_two_is_not_enough(own):
    with pytest.raises(RecipeError, match=r"match 1 of 2 recurrent layers"):
        adapters.plan_adapters(load_model(own), own.config, targets=["model.layers.0.attn.q_proj"])


def test_targets_within_softmax_layers_stay_frozen(tmp_path):
    source = made("kimi_linear", tmp_path)
    model, _plan = adapted(source, targets=["q_proj", "o_proj"])
    mixers = tuple(f"{layer.mixer}." for layer in layers_of(source))
    lora = [name for name in adapters.trained_parameters(model) if ".lora_" in name]
    assert lora
    assert all(name.startswith(mixers) for name in lora)


def test_an_adapter_for_another_model_is_refused(own, tmp_path):
    model, plan = adapted(own)
    folder = saved(own, model, plan, tmp_path / "adapter")
    other = resolve_model(str(tiny_gated_deltanet(tmp_path / "other", seed=5)))
    with pytest.raises(ArtifactError, match="was made for"):
        merging.merge(other, folder, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_what_is_not_finite_is_not_saved(own, tmp_path):
    model, plan = adapted(own)
    state = adapters.trained_state(model)
    state[plan.full[0]][0] = float("nan")
    with pytest.raises(ArtifactError, match="NaN"):
        adapters.save_adapter(tmp_path / "adapter", own, plan, state)
    assert not (tmp_path / "adapter").exists()


def test_a_conversion_that_is_not_of_rows_is_refused(own, monkeypatch):
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    def conversions(_model):
        return [WeightConverter("attn.q_proj.weight", "attn.q_proj.weight", [Transpose()])]

    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", conversions)
    assert merging.rows_on_disk(own, ["model.layers.0.attn.k_proj.weight"])
    with pytest.raises(FamilyError, match=r"where model\.layers\.0\.attn\.q_proj\.weight lies .* is not known"):
        merging.rows_on_disk(own, ["model.layers.0.attn.q_proj.weight"])


def test_what_overflows_the_stored_dtype_leaves_nothing_behind(tmp_path):
    source = resolve_model(str(tiny_stock_model("qwen3_5", tmp_path / "base", dtype=torch.float16)))
    model, plan = adapted(source)
    with torch.no_grad():
        for name, parameter in adapters.trained_parameters(model).items():
            if ".lora_B." in name:
                parameter.fill_(1e6)
    folder = saved(source, model, plan, tmp_path / "adapter")
    with pytest.raises(ArtifactError, match="infinity once the adapter is merged into F16"):
        merging.merge(source, folder, tmp_path / "merged")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


@pytest.mark.filterwarnings("ignore")  # of fla, about drivers
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gla", {"num_heads": 4, "num_kv_heads": 2, "use_short_conv": True}),
        ("gla", {}),
        ("kda", {"num_v_heads": 4}),
        ("gdn2", {}),
        ("gated_deltaproduct", {}),
    ],
    ids=["gla-shared-keys", "gla", "kda", "gdn2", "gated_deltaproduct"],
)
def test_flas_models_are_covered_and_merged_without_a_gpu(name, config, tmp_path):
    pytest.importorskip("fla")
    from lapcli.testing.fla_models import tiny_fla_model

    source = resolve_model(str(tiny_fla_model(name, tmp_path / "base", **config)))
    model = transformers.AutoModelForCausalLM.from_pretrained(source.path)
    plan = adapters.plan_adapters(model, source.config, rank=8, alpha=16)
    wrapped = adapters.apply_adapters(model, plan)
    disturb(wrapped)
    for planned in plan.layers:
        assert [lora.removeprefix(f"{planned.mixer}.") for lora in planned.lora] == ["q_proj", "k_proj", "v_proj"]
    merging.merge(source, saved(source, wrapped, plan, tmp_path / "adapter"), tmp_path / "merged")
    wanted = dict(wrapped.merge_and_unload().named_parameters())
    found = dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").named_parameters())
    assert wanted.keys() == found.keys()
    for key, value in found.items():
        assert torch.allclose(value, wanted[key], rtol=0, atol=1e-6), key


def test_a_name_that_is_nowhere_is_refused(own):
    with pytest.raises(FamilyError, match="no parameter"):
        merging.rows_on_disk(own, ["model.layers.0.attn.x_proj.weight"])


def test_a_model_that_is_not_ours_is_not_replaced(own, tmp_path):
    model, plan = adapted(own)
    folder = saved(own, model, plan, tmp_path / "adapter")
    (tmp_path / "merged").mkdir()
    with pytest.raises(ArtifactError, match="did not write"):
        merging.merge(own, folder, tmp_path / "merged", overwrite=True)
    with pytest.raises(ArtifactError, match="needed here"):
        merging.merge(own, folder, own.path, overwrite=True)
    merging.merge(own, folder, tmp_path / "second")
    merging.merge(own, folder, tmp_path / "second", overwrite=True)
    assert (tmp_path / "second" / LINEAGE_FILE).is_file()


def test_fresh_processes_load_merged_models_without_lapcli(tmp_path):
    script = (
        "import json, sys, torch, transformers\n"
        "from safetensors.torch import load_file, save_file\n"
        "ids = load_file(sys.argv[1])['ids']\n"
        "for folder in sys.argv[2:]:\n"
        "    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)\n"
        "    assert not info['missing_keys'] and not info['unexpected_keys'], info\n"
        "    with torch.no_grad():\n"
        "        save_file({'logits': model.eval()(input_ids=ids, use_cache=False).logits}, folder + '/seen')\n"
        "assert 'lapcli' not in sys.modules\n"
    )
    from safetensors.torch import save_file

    save_file({"ids": IDS}, tmp_path / "ids")
    wanted = {}
    for name in ("lara_mini", "nemotron_h"):
        source = made(name, tmp_path / name)
        model, plan = adapted(source)
        disturb(model)
        folder = str(tmp_path / name / "merged")
        wanted[folder] = logits(model)
        merging.merge(source, saved(source, model, plan, tmp_path / name / "adapter"), tmp_path / name / "merged")
    # fla and causal_conv1d cannot run on a CPU, where they are installed; hidden, transformers takes its own functions.
    hidden = "import sys\nfor name in ('fla', 'causal_conv1d', 'mamba_ssm'): sys.modules[name] = None\n"
    environment = {**os.environ, "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(
        [sys.executable, "-c", hidden + script, str(tmp_path / "ids"), *wanted],
        check=True,
        env=environment,
        cwd=tmp_path,
    )
    for folder, value in wanted.items():
        assert relative_error(load_file(folder + "/seen")["logits"], value) < FP32
    assert (
        json.loads((tmp_path / "nemotron_h" / "merged" / LINEAGE_FILE).read_text())["settings"]["stage"] == "recovery"
    )
