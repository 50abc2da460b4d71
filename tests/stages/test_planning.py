"""Planning: the plan's bytes are those that slicing writes, and its arithmetic is what docs/plan.md says."""

import json
from pathlib import Path

import pytest
import torch

import lapkernels
from lapcli.artifacts import Lineage, encode_header, read_header, write_artifact
from lapcli.errors import FamilyError, ModelError, UsageError
from lapcli.families.registry import family_for
from lapcli.families.source import resolve_model
from lapcli.stages.conversion import QDeltaSettings, convert_into, plan_conversion
from lapcli.stages.kernel_table import KERNELS, OPERATORS, Kernel, Widths, kernels_for
from lapcli.stages.lineage import cut_from
from lapcli.stages.planning import memory_bytes, plan_ratio, softmax_cache
from lapcli.stages.planning_source import HubHeaders, headers_of
from lapcli.stages.slicing import plan_slicing, slice_model
from lapcli.testing.models import tiny_gated_deltanet, tiny_qdelta
from lapcli.testing.stock_models import STOCK_MODELS, tiny_stock_model
from lapkernels.delta_rule import fla_backend, triton_backend

GIB = 1 << 30
KERNELS_FOLDER = Path(lapkernels.__file__).resolve().parent
OWN_MODELS = {"gated_deltanet": tiny_gated_deltanet, "qdelta": tiny_qdelta}


def selection_of(source, kept, folder):
    layers = family_for(source.config).layers(source.config)
    tensors = {f"layers.{layer.index}.kept": torch.arange(kept).repeat(layer.heads, 1) for layer in layers}
    lineage = Lineage("selection", source.describe(), "any", {"method": "by hand", "kept_width": kept})
    return write_artifact(folder / "selection.safetensors", lineage, tensors)


@pytest.mark.parametrize("model_type", [*OWN_MODELS, *STOCK_MODELS])
def test_the_bytes_are_those_that_slicing_writes(model_type, tmp_path):
    if model_type in OWN_MODELS:
        source = resolve_model(str(OWN_MODELS[model_type](tmp_path / "model", num_v_heads=4)))
    else:
        source = resolve_model(str(tiny_stock_model(model_type, tmp_path / "model", max_shard_size="100KB")))
    plan = plan_ratio(source, keep=12)
    selection = selection_of(source, 12, tmp_path)
    wanted = plan_slicing(source, selection)
    assert (plan.weight_bytes.before, plan.weight_bytes.after) == (wanted.bytes_before, wanted.bytes_after)
    assert (plan.state_bytes.before, plan.state_bytes.after) == (wanted.state_bytes_before, wanted.state_bytes_after)
    assert (plan.cut_tensors, plan.mtp) == (wanted.cut_tensors, getattr(wanted, "mtp", None))
    slice_model(source, selection, tmp_path / "sliced")
    written = [
        entry for file in (tmp_path / "sliced").glob("*.safetensors") for entry in read_header(file).tensors.values()
    ]
    assert plan.weight_bytes.after == sum(entry.nbytes for entry in written)
    assert sum(len(row.layers) for row in plan.rows) == len(wanted.layers)


@pytest.mark.parametrize(
    ("mixer", "told"), [("linear_attn.in_proj_qkvz", "dropped"), ("self_attn.q_proj", "passes through")]
)
def test_a_head_for_further_tokens_counts_as_slicing_treats_it(mixer, told, tmp_path):
    base = resolve_model(str(tiny_stock_model("qwen3_next", tmp_path / "base")))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(base.config))
    (header,) = base.headers
    entries = [(entry.name, entry.dtype, entry.shape, entry.nbytes) for entry in header.tensors.values()]
    entries.append((f"mtp.layers.0.{mixer}.weight", "F32", (64, 64), 4 * 64 * 64))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(encode_header(entries, {}))
        file.truncate(file.tell() + sum(nbytes for *_rest, nbytes in entries))
    source = resolve_model(str(folder))
    plan = plan_ratio(source, keep=12)
    assert plan.mtp == told
    assert plan.weight_bytes.after == plan_slicing(source, selection_of(source, 12, tmp_path)).bytes_after


QWEN_9B = {
    "model_type": "qwen3_next",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "layer_types": ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(32)],
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "vocab_size": 248320,
    "tie_word_embeddings": False,
}
"""Sizes as Qwen3.5-9B's model card gives them, in the layout of Qwen3-Next with dense MLPs."""


def qwen_9b_tensors():
    shapes = {
        "model.embed_tokens.weight": (248320, 4096),
        "lm_head.weight": (248320, 4096),
        "model.norm.weight": (4096,),
    }
    for index, kind in enumerate(QWEN_9B["layer_types"]):
        block = f"model.layers.{index}"
        mixer = {
            "linear_attn.in_proj_qkvz.weight": (2 * 2048 + 2 * 4096, 4096),
            "linear_attn.in_proj_ba.weight": (64, 4096),
            "linear_attn.conv1d.weight": (2 * 2048 + 4096, 1, 4),
            "linear_attn.A_log": (32,),
            "linear_attn.dt_bias": (32,),
            "linear_attn.norm.weight": (128,),
            "linear_attn.out_proj.weight": (4096, 4096),
        }
        attention = {
            "self_attn.q_proj.weight": (2 * 4096, 4096),
            "self_attn.k_proj.weight": (1024, 4096),
            "self_attn.v_proj.weight": (1024, 4096),
            "self_attn.o_proj.weight": (4096, 4096),
        }
        shapes |= {f"{block}.{name}": shape for name, shape in (mixer if kind[0] == "l" else attention).items()}
        for side, shape in {"gate": (12288, 4096), "up": (12288, 4096), "down": (4096, 12288)}.items():
            shapes[f"{block}.mlp.{side}_proj.weight"] = shape
        shapes[f"{block}.input_layernorm.weight"] = shapes[f"{block}.post_attention_layernorm.weight"] = (4096,)
    return shapes


def count(shape):
    return torch.Size(shape).numel()


@pytest.fixture(scope="module")
def qwen_9b(tmp_path_factory):
    """Eighteen gigabytes of weights of which only headers are on disk: the files end in a hole."""
    folder = tmp_path_factory.mktemp("qwen")
    shards, index = [{}, {}, {}, {}], {}
    for number, (name, shape) in enumerate(qwen_9b_tensors().items()):
        shards[number % 4][name] = shape
        index[name] = f"model-{number % 4 + 1:05}-of-00004.safetensors"
    for number, shapes in enumerate(shards, 1):
        entries = [(name, "BF16", shape, 2 * count(shape)) for name, shape in shapes.items()]
        with (folder / f"model-{number:05}-of-00004.safetensors").open("wb") as file:
            file.write(encode_header(entries, {}))
            file.truncate(file.tell() + sum(nbytes for *_rest, nbytes in entries))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(QWEN_9B))
    assert sum(file.stat().st_blocks * 512 for file in folder.iterdir()) < 1 << 20
    return resolve_model(str(folder))


def test_a_large_model_without_its_weights(qwen_9b, tmp_path):
    plan = plan_ratio(qwen_9b, ratio="0.5", memory="80GiB", context=4096)
    assert "digest" not in qwen_9b.__dict__  # naming the model would read weights
    assert [row.layers[:4] for row in plan.rows] == [(0, 1, 2, 4)]
    (row,) = plan.rows
    # 24 layers x 32 heads x 128 x 128 x 4 bytes; the convolution keeps 4 inputs of 8192 channels in bf16.
    assert (row.state_bytes.before, row.state_bytes.after) == (2 << 20, 1 << 20)
    assert plan.state_bytes.before == 48 << 20
    assert (row.convolution_bytes.before, row.convolution_bytes.after) == (8192 * 4 * 2, 6144 * 4 * 2)
    # 16 heads lose 64 rows of q and of k in each projection, and as many channels of the convolution.
    cut = 24 * 16 * 64 * 2 * (4096 + 4) * 2
    assert plan.weight_bytes.before - plan.weight_bytes.after == cut
    assert plan.weight_bytes.before == 2 * sum(count(shape) for shape in qwen_9b_tensors().values())
    assert plan.cache is not None
    assert plan.cache.bytes_per_token == 8 * 2 * 4 * 256 * 2 == 32768
    place = plan.concurrency
    held = 4096 * 32768
    assert place.sequence_bytes.before == (48 << 20) + 24 * 65536 + held
    assert place.before == (80 * GIB - plan.weight_bytes.before) // place.sequence_bytes.before
    assert place.after == (80 * GIB - plan.weight_bytes.after) // place.sequence_bytes.after
    alone = plan_ratio(qwen_9b, ratio="0.5", context=0).concurrency
    assert alone.ratio == pytest.approx(1.97, abs=0.02)
    assert 1 < place.ratio < alone.ratio
    lost = {row["kernel"] for row in plan.kernels if row["verdict"] == "lost"}
    assert {"FlashQLA", "FlashInfer"} < lost
    selection = selection_of(qwen_9b, 64, tmp_path)
    assert plan_slicing(qwen_9b, selection).bytes_after == plan.weight_bytes.after


def test_devices_share_heads_and_memory(qwen_9b):
    plan, one = (plan_ratio(qwen_9b, ratio="0.5", devices=devices) for devices in (8, 1))
    assert plan.heads_per_device == ((2, 4),)
    assert plan.concurrency.devices == 8
    # Four KV heads on eight devices: each is there twice.
    added = plan.concurrency.sequence_bytes.before - one.concurrency.sequence_bytes.before
    assert added == 4096 * 32768
    for devices, near in ((3, "--tp 2 or --tp 4"), (12, "--tp 8 or --tp 16"), (32, "--tp 16")):
        with pytest.raises(UsageError, match=rf"--tp {devices} does not divide .*16 key heads") as refused:
            plan_ratio(qwen_9b, ratio="0.5", devices=devices)
        assert refused.value.hint == f"the nearest that does: {near}"
    with pytest.raises(UsageError, match="below 1"):
        plan_ratio(qwen_9b, ratio="0.5", devices=0)


def test_the_one_group_of_mamba_2_is_kept_on_each_device(tmp_path):
    source = resolve_model(str(tiny_stock_model("mamba2", tmp_path / "one")))
    plan = plan_ratio(source, ratio="0.5", devices=4)
    assert plan.replicated
    assert plan.heads_per_device == ((1, 2),)
    eight = resolve_model(str(tiny_stock_model("mamba2", tmp_path / "four", n_groups=4)))
    with pytest.raises(UsageError, match="does not divide 4 groups") as refused:
        plan_ratio(eight, ratio="0.5", devices=8)
    assert refused.value.hint == "the nearest that does: --tp 4"


def test_what_alignment_takes(model):
    plan = plan_ratio(model, ratio="0.4", align=8)
    assert (plan.unaligned, plan.width.width) == (19, 16)
    heads_and_values = plan.state_bytes.before // plan.width.original
    assert plan.alignment_bytes == 3 * heads_and_values
    assert plan_ratio(model, ratio="0.9", align=8).alignment_bytes == -5 * heads_and_values
    assert plan_ratio(model, ratio="0.4", align=1).alignment_bytes == 0
    kept = plan_ratio(model, keep=19)
    assert (kept.unaligned, kept.alignment_bytes) == (None, 0)


def test_the_dtype_of_states_is_theirs_alone(model):
    wide, narrow = (plan_ratio(model, ratio="0.5", state_dtype=dtype) for dtype in ("fp32", "bf16"))
    assert wide.state_bytes.after == 2 * narrow.state_bytes.after
    assert wide.convolution_bytes == narrow.convolution_bytes
    with pytest.raises(UsageError, match="fp8"):
        plan_ratio(model, ratio="0.5", state_dtype="fp8")


def test_weights_that_do_not_fit_leave_room_for_nothing(model):
    place = plan_ratio(model, ratio="0.5", memory="1KiB").concurrency
    assert (place.before, place.after, place.ratio) == (0, 0, None)


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * GIB), ("80 GB", 80 * 10**9), ("1.5gib", 3 * GIB // 2), ("512MiB", GIB // 2), ("1e3 B", 1000)],
)
def test_sizes(text, size):
    assert memory_bytes(text) == size


@pytest.mark.parametrize("text", ["80", "80G", "", "GiB", "-1GiB", "0GiB", "nanGiB", "infGiB", "80GiBB", "80 parsecs"])
def test_what_is_no_size(text):
    with pytest.raises(UsageError, match="is no size") as refused:
        memory_bytes(text)
    assert ("did you mean 80GiB?" in refused.value.hint) == (text in ("80", "80G"))


@pytest.mark.parametrize(
    ("config", "per_token"),
    [
        ({"num_hidden_layers": 2}, "none"),
        ({"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}, 2 * 2 * 4 * 16 * 2),
        ({"num_hidden_layers": 6, "hybrid_override_pattern": "M-M*-*", "num_attention_heads": 4, "head_dim": 8}, 256),
        ({"attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 2}, "hidden_size": 64}, 2 * 2 * 16 * 2),
        ({"attn": None, "num_hidden_layers": 2}, "none"),
        ({"model_type": "falcon_h1", "num_attention_heads": 4, "head_dim": 8}, 2 * 2 * 4 * 8 * 2),
        ({"num_hidden_layers": 2, "num_key_value_heads": 4}, None),
        ({"layer_types": ["linear_attention", "full_attention"], "kv_lora_rank": 512}, None),
        ({"layer_types": ["linear_attention", "full_attention"]}, None),
        ({"text_config": {"layer_types": ["full_attention"], "num_attention_heads": 1, "head_dim": 2}}, 8),
    ],
    ids=["no-field", "the-rest", "letters", "fla", "fla-none", "beside", "unclear", "latent", "no-heads", "nested"],
)
def test_the_kv_cache_of_hybrids(model, config, per_token):
    layers = family_for(model.config).layers(model.config)
    assert len(layers) == 2
    found = softmax_cache(config, layers)
    if per_token == "none":
        assert found is None
    else:
        assert found.bytes_per_token == per_token
        assert per_token is not None or "not counted" in found.note


@pytest.mark.parametrize("model_type", list(STOCK_MODELS))
def test_a_stock_hybrid_is_counted_or_said_not_to_be(model_type, tmp_path):
    """A layer that is neither stateful nor without a cache never goes unmentioned."""
    source = resolve_model(str(tiny_stock_model(model_type, tmp_path)))
    layers = family_for(source.config).layers(source.config)
    found = softmax_cache(source.config, layers)
    assert (found is None) == (model_type == "mamba2")
    if found is not None:
        assert (found.bytes_per_token is None) == found.note.startswith("not counted")
        assert found.bytes_per_token is None or found.layers > 0


def test_a_sliding_window_bounds_its_share():
    text = {"layer_types": ["linear_attention", "sliding_attention", "full_attention"], "sliding_window": 10}
    found = softmax_cache({**text, "num_attention_heads": 2, "head_dim": 4}, ())
    assert found.bytes_of(4) == 4 * found.bytes_per_token == 4 * 2 * 2 * 2 * 4 * 2
    assert found.bytes_of(30) == (30 + 10) * 2 * 2 * 4 * 2


def test_a_context_longer_than_the_model_takes_is_refused(tmp_path):
    source = resolve_model(str(tiny_stock_model("qwen3_next", tmp_path / "model")))
    assert plan_ratio(source, ratio="0.5").concurrency.context == 512
    with pytest.raises(UsageError, match="max_position_embeddings = 512"):
        plan_ratio(source, ratio="0.5", context=513)
    with pytest.raises(UsageError, match="below 0"):
        plan_ratio(source, ratio="0.5", context=-1)


def test_a_pruned_model_tells_both_widths(model, tmp_path):
    slice_model(model, selection_of(model, 16, tmp_path), tmp_path / "sliced")
    plan = plan_ratio(resolve_model(str(tmp_path / "sliced")), ratio="0.5")
    assert plan.pruned_before == {"model": model.name, "key_width": 32}
    assert (plan.width.original, plan.width.width) == (16, 8)


def test_a_converted_model_was_pruned_only_where_its_origin_was(tmp_path):
    """Whole, pruned, and pruned but no longer there."""
    model = resolve_model(str(tiny_gated_deltanet(tmp_path / "whole")))
    slice_model(model, selection_of(model, 16, tmp_path), tmp_path / "sliced")
    found = {}
    for name in ("whole", "sliced"):
        source = resolve_model(str(tmp_path / name))
        convert_into(plan_conversion(source, QDeltaSettings()), tmp_path / f"{name}-q")
        found[name] = plan_ratio(resolve_model(str(tmp_path / f"{name}-q")), ratio="0.5").pruned_before
    assert found == {"whole": None, "sliced": {"model": model.name, "key_width": 32}}
    (tmp_path / "sliced").rename(tmp_path / "moved")
    assert cut_from(tmp_path / "sliced-q") is not None
    assert cut_from(tmp_path / "whole-q") is None


def test_a_tensor_that_the_family_declares_must_be_there(qwen_9b, tmp_path):
    for file in qwen_9b.path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_9B, "layer_types": ["linear_attention"] * 32}))
    with pytest.raises(FamilyError, match=r"layers\.3\.linear_attn"):
        plan_ratio(resolve_model(str(tmp_path)), ratio="0.5")
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_9B, "linear_key_head_dim": 256}))
    with pytest.raises(ModelError, match="groups of 256"):
        plan_ratio(resolve_model(str(tmp_path)), ratio="0.5")


def test_every_claim_about_a_kernel_has_its_source():
    for kernel in KERNELS:
        assert (kernel.widths is None) == (kernel.source is None), kernel.name
        assert set(kernel.operators) <= set(OPERATORS.values())
    assert all(kernels_for(operator) for operator in OPERATORS.values())
    shapes = [(kernel.name, kernel.phase, operator) for kernel in KERNELS for operator in kernel.operators]
    assert len(set(shapes)) == len(shapes)


def test_kernels_of_query_feedback_are_there_and_our_own_bounds_are_those_of_the_code(tmp_path):
    source = resolve_model(str(tiny_qdelta(tmp_path / "model")))
    plan = plan_ratio(source, ratio="0.5")
    assert plan.operator == "query feedback"
    rows = {row["kernel"]: row for row in plan.kernels}
    takes = {name for name, row in rows.items() if row["verdict"] == "takes it"}
    assert {"lapcli, fused step", "lapcli, PyTorch over chunks", "fla, chunked (comba)"} <= takes
    assert rows["vLLM, SGLang"]["verdict"] == "not checked"
    bounds = {"lapcli, Triton over chunks": triton_backend.WIDEST_KEY, "fla, chunked (comba)": fla_backend.WIDEST_KEY}
    for kernel in KERNELS:
        if kernel.name in bounds:
            assert kernel.widths.key == (1, bounds[kernel.name])
        if kernel.source is not None and kernel.source.repository == "lapcli":
            assert (KERNELS_FOLDER / kernel.source.path.removeprefix("kernels/lapkernels/")).is_file()


def test_verdicts():
    only = Kernel("a", (), "decode", Widths(key=(128, 128), value=(128, 128)), None)
    assert only.verdict((128, 128), (64, 128)) == "lost"
    assert only.verdict((256, 128), (128, 128)) == "gained"
    assert only.verdict((256, 128), (64, 128)) == "never took it"
    assert Kernel("b", (), "decode", None, None).verdict((128, 128), (64, 128)) == "not checked"
    square = Kernel("c", (), "decode", Widths(key=(1, 256), equal=True), None)
    assert square.verdict((128, 128), (64, 128)) == "lost"
    assert [str(kernel.widths) for kernel in (only, square)] == ["K = 128, V = 128", "K <= 256, V any, K = V"]
    assert str(Widths()) == "any K, any V"


def test_of_a_model_on_the_hub_only_headers_are_fetched(model, tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo

    (header,) = model.headers
    tensors = {
        name: TensorInfo("F32", list(entry.shape), (entry.start, entry.start + entry.nbytes))
        for name, entry in header.tensors.items()
    }
    files = {"model.safetensors": SafetensorsFileMetadata(header.metadata, tensors)}
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_args, **_options: str(tmp_path / "config.json"))
    repository = SafetensorsRepoMetadata(None, False, dict.fromkeys(tensors, "model.safetensors"), files)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda *_args, **_options: repository)
    source = headers_of("someone/some-model")
    assert isinstance(source, HubHeaders)
    remote, local = (plan_ratio(found, ratio="0.5").document() for found in (source, model))
    assert remote.pop("model") == "someone/some-model"
    local.pop("model")
    assert remote == local


def test_a_hub_that_cannot_be_asked_is_named(monkeypatch):
    import huggingface_hub

    def unreachable(*_args, **_options):
        raise ConnectionError

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(ModelError, match="could not be asked"):
        headers_of("someone/some-model")
