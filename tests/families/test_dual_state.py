"""Dual-state layers in the place of stock attention: what they compute, cache, masks, files, cutting their states."""

import copy
import json
import math
import subprocess
import sys
import textwrap

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lapcli.artifacts import RunDirectory
from lapcli.errors import FamilyError, ModelError
from lapcli.families.dual_state import TEACHERS, DualState, converted_config
from lapcli.families.loading import load_model
from lapcli.families.registry import family_for
from lapcli.families.remote import lapcli_dual_state
from lapcli.families.remote.lapcli_dual_state import (
    DualStateSettings,
    Layout,
    convert_layers,
    dual_state_layers,
    gate_similarity,
    log_decays,
    restore_layer,
)
from lapcli.families.remote.lapcli_dual_state_portable import portable_dual_state
from lapcli.families.remote.lapcli_dual_state_window import equal_memory_window
from lapcli.families.source import resolve_model
from lapcli.machine import Machine
from lapcli.recipe import CalibrationSettings, SelectionSettings
from lapcli.stages.pruning import plan_pruning
from lapcli.stages.slicing import slice_model
from lapcli.testing.dual_state import converted, converted_source, layer_tensors, tiny_source, tiny_teacher
from lapcli.testing.oracle import relative_error
from lapcli.testing.slices import layers_of, random_kept, selection_of
from lapcli.training.engine import _keep_only_inputs_of_blocks
from lapkernels.testing_dual import DualStateInputs, dual_state_inputs, sum_over_pairs

F64 = torch.float64
# Sums of some hundred unit-sized fp64 terms over three layers.
EXACT = 1e-11
IDS = torch.randint(3, 60, (2, 41), generator=torch.Generator().manual_seed(5))


def run(model, ids=IDS, **arguments):
    with torch.no_grad():
        return model(input_ids=ids, **{"use_cache": False, **arguments}).logits


def by_hand(teacher, model, layer: int, hidden):
    """The layer's output from the teacher's own queries, keys and values and the sum over all pairs of tokens."""
    seen = {}

    def look(module, query, key, value, mask, *, scaling, **kwargs):
        seen[module.layer_idx] = query, key, value, scaling
        return query.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("look", look)
    attention, mixer = teacher.model.layers[layer].self_attn, model.model.layers[layer].self_attn
    attention.config = copy.copy(attention.config)
    attention.config._attn_implementation = "look"
    positions = torch.arange(hidden.shape[1])[None]
    with torch.no_grad():
        attention(
            hidden, position_embeddings=teacher.model.rotary_emb(hidden, position_ids=positions), attention_mask=None
        )
        q, k, v, scale = seen[layer]
        states = mixer.settings.states
        gate = hidden @ mixer.forget_proj.weight.T + mixer.forget_proj.bias
        decay = (torch.sigmoid(gate).log() / 16).clamp(min=-50)
        inputs = DualStateInputs(
            *(x.transpose(1, 2) for x in (q, k, v)),
            decay.view(*hidden.shape[:2], states, k.shape[1], k.shape[3]),
            mixer.mixture.exp() / mixer.mixture.exp().sum(),
        )
        output, _ = sum_over_pairs(inputs, scale)
        projection = getattr(attention, "o_proj", None) or attention.dense
        return projection(output.flatten(2))


@pytest.mark.parametrize("model_type", TEACHERS)
def test_the_layer_is_the_paper_s_with_the_teacher_s_projections_norms_and_rotary_embedding(model_type):
    teacher = tiny_teacher(model_type, dtype=F64)
    model = converted(copy.deepcopy(teacher), 1)
    hidden = torch.randn(2, 23, 32, dtype=F64, generator=torch.Generator().manual_seed(3))
    positions = model.model.rotary_emb(hidden, position_ids=torch.arange(23)[None])
    with torch.no_grad():
        found, _ = model.model.layers[1].self_attn(hidden, position_embeddings=positions)
    assert relative_error(found, by_hand(teacher, model, 1, hidden)) < EXACT


@pytest.mark.parametrize("model_type", TEACHERS)
def test_the_teacher_s_weights_stay_and_come_back(model_type):
    """The release drops them: its converted layers begin from random numbers."""
    teacher = tiny_teacher(model_type)
    model = converted(copy.deepcopy(teacher), 2, 0)
    before, after = teacher.state_dict(), model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    new = after.keys() - before.keys()
    assert {name.split("self_attn.")[1] for name in new} == {
        "forget_proj.weight", "forget_proj.bias", "mixture", "key_channels",
    }  # fmt: skip
    assert relative_error(run(model), run(teacher)) > 0.05
    for layer in (0, 2):
        restore_layer(model, layer)
    assert torch.equal(run(model), run(teacher))
    assert model.state_dict().keys() == before.keys()


def test_gates_begin_where_the_paper_says():
    model = tiny_teacher("llama")
    convert_layers(model, DualStateSettings(layers=(0,)))
    layer = model.model.layers[0].self_attn
    hidden = torch.randn(2, 50, 32)
    with torch.no_grad():
        history, recency = layer.log_decays(hidden).unbind(2)
        assert layer.mixture.softmax(0).tolist() == [0.5, 0.5]
    # Half-lives of about 600 and 16 tokens.
    assert 550 < math.log(2) / -history.mean().item() < 680
    assert history.std() < 0.05 * -history.mean()
    assert 10 < math.log(2) / -recency.mean().item() < 20
    assert recency.std() > 0.3 * -recency.mean()
    for states, biases in ((1, [4.0]), (4, [4.0, 8 / 3, 4 / 3, 0.0])):
        model = tiny_teacher("llama")
        convert_layers(model, DualStateSettings(layers=(0,), states=states))
        found = model.model.layers[0].self_attn.forget_proj.bias.view(states, -1)
        assert found[:, 0].tolist() == pytest.approx(biases)
    model = tiny_teacher("llama")
    convert_layers(model, DualStateSettings(layers=(0,), start="random"))
    assert not model.model.layers[0].self_attn.forget_proj.bias.any()


def test_a_wider_state_begins_as_the_teacher_s_width():
    narrow, wide = tiny_teacher("llama", dtype=F64), tiny_teacher("llama", dtype=F64)
    convert_layers(narrow, DualStateSettings(layers=(1,), states=1))
    convert_layers(wide, DualStateSettings(layers=(1,), states=1, width=2))
    layers = [model.model.layers[1].self_attn for model in (narrow, wide)]
    assert layers[1].forget_proj.weight.shape[0] == 2 * layers[0].forget_proj.weight.shape[0]
    with torch.no_grad():
        for layer in layers:
            layer.forget_proj.weight.zero_()
    assert relative_error(run(wide), run(narrow)) < EXACT
    run_with_gradient = wide(input_ids=IDS, use_cache=False).logits.square().sum()
    run_with_gradient.backward()
    assert layers[1].wide_k_proj.weight.grad.abs().max() > 0


def test_the_floor_of_the_gates():
    assert log_decays(torch.tensor([-1e6, 0.0, 1e6])).tolist() == pytest.approx([-50.0, -math.log(2) / 16, 0.0])


VARIANTS = {
    "dual": {},
    "one state": {"states": 1},
    "eight states": {"states": 8},
    "twice the width": {"states": 1, "width": 2},
    "window": {"window": 9, "sinks": 3},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_prompt_in_pieces_is_one_pass(model_type, variant):
    """Case 6: many tokens, then some at once, then one; first, middle or last layers converted."""
    for layers in ((0,), (2, 0), (1, 0, 2)):
        model = converted(tiny_teacher(model_type, dtype=F64), *layers, **VARIANTS[variant])
        cache, found = None, []
        for start, stop in ((0, 20), (20, 27), (27, 28), (28, 41)):
            with torch.no_grad():
                out = model(input_ids=IDS[:, start:stop], cache=cache, use_cache=True)
            cache = out.cache
            found.append(out.logits)
        assert relative_error(torch.cat(found, 1), run(model)) < EXACT


def test_the_cache_of_a_converted_layer_does_not_grow():
    """Case 30; and the layers that are left keep theirs."""
    model = converted(tiny_teacher("llama"), 0, 2)
    with torch.no_grad():
        cache = model(input_ids=IDS, use_cache=True).cache
        sizes, grown = [], []
        for token in range(3):
            model(input_ids=IDS[:, token : token + 1], cache=cache, use_cache=True)
            sizes.append([cache.layers[layer].nbytes() for layer in (0, 2)])
            grown.append(cache.layers[1].keys.shape[2])
    # Two states of two key heads of 8 x 8, of two rows, in fp32.
    assert sizes == [[2 * 2 * 2 * 64 * 4] * 2] * 3
    assert grown == [42, 43, 44]
    assert cache.get_seq_length() == 44


@pytest.mark.parametrize("variant", ["dual", "twice the width", "window"])
def test_left_pads_change_nothing(variant):
    """Case 7: logits as without them; other embeddings of the pads change no bit, of the states neither."""
    model = converted(tiny_teacher("qwen3", dtype=F64), 0, 1, 2, **VARIANTS[variant])
    mask = torch.ones(1, 46, dtype=torch.long)
    mask[:, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        embeds = model.get_input_embeddings()(torch.cat((torch.zeros(1, 5, dtype=torch.long), IDS[:1]), 1))
        found = []
        for filler in (0.0, 3.0):
            embeds[:, :5] = filler
            out = model(inputs_embeds=embeds, attention_mask=mask, position_ids=positions, use_cache=True)
            found.append((out.logits[:, 5:], [list(layer.tensors().values()) for layer in out.cache.layers]))
    (first, states), (second, others) = found
    assert relative_error(first, run(model, IDS[:1])) < EXACT
    assert torch.equal(first, second)
    for mine, theirs in zip(states, others, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("variant", ["dual", "window"])
def test_rows_of_unlike_lengths_decode_as_alone(variant):
    """Left-padded rows, decoded together token by token, each as it does alone; grouped heads."""
    model = converted(tiny_teacher("llama", dtype=F64), 0, 2, **VARIANTS[variant])
    lengths = [30, 17]
    ids, mask = torch.zeros(2, 30, dtype=torch.long), torch.zeros(2, 30, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, 30 - length :], mask[row, 30 - length :] = IDS[row, :length], 1
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=True)
        for step in range(4):
            mask = torch.cat((mask, mask.new_ones(2, 1)), 1)
            token = torch.stack([IDS[row, length + step] for row, length in enumerate(lengths)])[:, None]
            out = model(
                input_ids=token, attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1, cache=out.cache,
                use_cache=True,
            )  # fmt: skip
    for row, length in enumerate(lengths):
        alone = run(model, IDS[row : row + 1, : length + 4])[:, -1]
        assert relative_error(out.logits[row, -1:], alone) < EXACT


@pytest.mark.parametrize("variant", ["dual", "window"])
def test_packed_sequences_are_the_separate_ones(variant):
    """Case 9: two documents in one row; and rows that hold several each."""
    model = converted(tiny_teacher("llama", dtype=F64), 0, 1, **VARIANTS[variant])
    parts = [(0, 0, 12), (0, 12, 41), (1, 0, 20), (1, 20, 41)]
    positions = torch.stack(
        (torch.cat((torch.arange(12), torch.arange(29))), torch.cat((torch.arange(20), torch.arange(21))))
    )
    packed = run(model, position_ids=positions)
    for row, start, stop in parts:
        alone = run(model, IDS[row : row + 1, start:stop])
        assert relative_error(packed[row : row + 1, start:stop], alone) < EXACT


def test_what_a_pass_says_of_its_layout():
    ids = torch.zeros(1, 6, dtype=torch.long)
    assert Layout.of({"input_ids": ids}) == Layout()
    assert Layout.of({"input_ids": ids, "cu_seqlens": torch.tensor([0, 2, 6])}).bounds == (0, 2, 6)
    assert Layout.of({"input_ids": ids, "position_ids": torch.arange(6)[None]}) == Layout()
    assert Layout.of({"input_ids": ids, "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]])}).bounds == (0, 2, 6)
    # As the library has it: with a mask or a cache positions mean nothing but rotation.
    assert (
        Layout.of({"input_ids": ids, "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]]), "cache": object()}) == Layout()
    )
    with pytest.raises(ValueError, match=r"\[0, 7\]"):
        Layout.of({"input_ids": ids, "cu_seqlens": torch.tensor([0, 7])})
    with pytest.raises(ValueError, match=r"rows, 6 or more"):
        Layout.of({"input_ids": ids, "attention_mask": torch.ones(1, 1, 6, 6)})


def test_what_cannot_be_kept_in_a_cache_is_refused():
    model = converted(tiny_teacher("llama"), 0)
    teacher = tiny_teacher("llama")
    with torch.no_grad():
        of_teacher = teacher(input_ids=IDS, use_cache=True).cache
        with pytest.raises(ValueError, match="pass its tokens again"):
            model(input_ids=IDS[:, :1], cache=of_teacher, use_cache=True)
        cache = model(input_ids=IDS, use_cache=True).cache
        with pytest.raises(ValueError, match="2 rows, and 1"):
            model(input_ids=IDS[:1, :1], cache=cache, use_cache=True)
        with pytest.raises(NotImplementedError, match="rolled back"):
            cache.crop(-1)
        with pytest.raises(ValueError, match="packed sequences"):
            model.model(input_ids=IDS[:1], cu_seqlens=torch.tensor([0, 4, 41]), use_cache=True)


@pytest.mark.parametrize("variant", ["dual", "window"])
def test_generate_greedily_and_by_beams(variant):
    """The library's own loop, cache and reordering of beams included: as by passing everything again each time."""
    model = converted(tiny_teacher("qwen2", dtype=F64), 0, 1, **VARIANTS[variant])
    for options in ({}, {"num_beams": 3}):
        told = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, **options}
        mask = torch.ones_like(IDS)
        cached = model.generate(input_ids=IDS, attention_mask=mask, **told)
        again = model.generate(input_ids=IDS, attention_mask=mask, **told, use_cache=False)
        assert torch.equal(cached, again)


def test_gradients_flow_through_checkpointed_blocks():
    """What tells the layers of padding is there again when blocks run again in the backward pass."""
    found = []
    mask = torch.ones_like(IDS)
    mask[0, :7] = 0
    for checkpointing in (False, True):
        model = converted(tiny_teacher("llama", dtype=F64), 0, 2).train()
        if checkpointing:
            _keep_only_inputs_of_blocks(model)
        model(input_ids=IDS, attention_mask=mask, use_cache=False).logits[:, 7:].square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in found[0].items():
        assert relative_error(found[1][name], gradient) < EXACT, name
    new = [name for name in found[0] if "forget_proj" in name or "mixture" in name]
    assert len(new) == 6
    assert all(found[0][name].abs().max() > 0 for name in new)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "phi"])
def test_a_layer_that_is_trained_in_fp32_among_layers_in_bf16(model_type):
    """As on a GPU: products by autocast; what norms and biases in fp32 give is no matter."""
    model = converted(tiny_teacher(model_type, dtype=torch.bfloat16), 1)
    layer = dual_state_layers(model)[1].float()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(input_ids=IDS, use_cache=False).logits
    out.float().sum().backward()
    for parameter in layer.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is None or parameter.grad.isfinite().all()
    assert layer.forget_proj.weight.grad.abs().max() > 0
    whole = converted(tiny_teacher(model_type), 1)
    assert relative_error(out, run(whole)) < 0.1


def test_without_lapkernels_the_portable_form_gives_the_same(monkeypatch):
    model = converted(tiny_teacher("llama", dtype=F64), 0, 2)
    mask = torch.ones_like(IDS)
    mask[0, :7] = 0
    packed = torch.stack((torch.cat((torch.arange(12), torch.arange(29))),) * 2)
    calls = ({"attention_mask": mask}, {"position_ids": packed})
    with_kernels = [run(model, **call) for call in calls]

    def decoded():
        with torch.no_grad():
            cache = model(input_ids=IDS[:, :30], use_cache=True).cache
            return torch.cat(
                [model(input_ids=IDS[:, t : t + 1], cache=cache, use_cache=True).logits for t in range(30, 33)], 1
            )

    stepped = decoded()
    monkeypatch.setattr(lapcli_dual_state, "_operator", None)
    monkeypatch.setattr(lapcli_dual_state, "_step", None)
    for call, expected in zip(calls, with_kernels, strict=True):
        assert relative_error(run(model, **call), expected) < EXACT
    assert relative_error(decoded(), stepped) < EXACT


def test_the_portable_operator():
    inputs = dual_state_inputs(time=37, query_heads=4, states=3, state=True)
    inputs.g[:, ::5, :, :, ::2] = -50.0
    output, state = portable_dual_state(
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.mixture, 0.3, inputs.initial_state
    )
    truth, final = sum_over_pairs(inputs, 0.3)
    assert relative_error(output, truth) < 1e-12
    assert relative_error(state, final) < 1e-12


def test_similarity_of_gates():
    decays = torch.randn(2, 5, 3, 2, 4, dtype=F64, generator=torch.Generator().manual_seed(0)).abs().neg()
    gates = decays.exp().flatten(3)
    pairs = [torch.cosine_similarity(gates[:, :, a], gates[:, :, b], dim=-1) for a, b in ((0, 1), (0, 2), (1, 2))]
    assert gate_similarity(decays).item() == pytest.approx(torch.stack(pairs).mean().item(), abs=1e-12)
    token = torch.ones(2, 5, dtype=torch.bool)
    token[0, :3] = False
    counted = torch.stack(pairs)[:, token]
    assert gate_similarity(decays, token).item() == pytest.approx(counted.mean().item(), abs=1e-12)
    assert gate_similarity(decays[:, :, :1]).item() == 0


def test_the_window_sees_its_last_tokens_and_the_first_ones():
    """Against stock attention with a mask that is written out."""
    teacher = tiny_teacher("llama", dtype=F64)
    model = converted(copy.deepcopy(teacher), 0, 1, 2, window=9, sinks=3)
    now, then = torch.arange(41)[:, None], torch.arange(41)[None]
    seen = (then <= now) & ((then < 3) | (then > now - 9))
    bias = torch.zeros(1, 1, 41, 41, dtype=F64).masked_fill(~seen, -torch.inf)
    expected = run(teacher, attention_mask=bias)
    assert relative_error(run(model), expected) < EXACT
    # A window that sees everything is the teacher.
    whole = converted(copy.deepcopy(teacher), 0, 1, 2, window=41, sinks=0)
    assert relative_error(run(whole), run(teacher)) < EXACT


def test_a_window_of_equal_memory():
    """Two fp32 states of 64 x 64 are the keys and values of 128 tokens in bf16, 64 in fp32."""
    assert equal_memory_window(2, 64, 64) == 128
    assert equal_memory_window(2, 64, 64, kv_bytes=4) == 64
    model = converted(tiny_teacher("llama"), 0, window=equal_memory_window(2, 8, 8, kv_bytes=4) - 4, sinks=4)
    with torch.no_grad():
        held = model(input_ids=IDS, use_cache=True).cache.layers[0]
    # Beside the number of the token in each slot.
    assert held.keys.nbytes + held.values.nbytes == 2 * (2 * 2 * 64 * 4)


BAD_SETTINGS = [
    ({"states": 0}, "states = 0"),
    ({"start": "fast"}, "start = 'fast'"),
    ({"layers": (1, 1)}, "each layer's number once"),
    ({"window": 0}, "window = 0"),
]


@pytest.mark.parametrize(("change", "message"), BAD_SETTINGS, ids=[message for _, message in BAD_SETTINGS])
def test_settings_that_make_no_sense_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        DualStateSettings(**change)


def test_layers_that_cannot_be_converted_are_named():
    model = tiny_teacher("llama")
    with pytest.raises(ValueError, match="layers 0 to 2, and no layer 3"):
        convert_layers(model, DualStateSettings(layers=(3,)))
    convert_layers(model, DualStateSettings(layers=(1,)))
    with pytest.raises(ValueError, match="layer 1 is converted already"):
        convert_layers(model, DualStateSettings(layers=(1,)))
    model.model.layers[0].self_attn = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="layer 0 has no attention"):
        convert_layers(model, DualStateSettings(layers=(0,)))


# Files.


def in_a_fresh_process(folder, ids, *, blocked=()):
    program = f"""
        import sys, torch
        for name in {blocked!r}:
            sys.modules[name] = None
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True).eval()
        ids = torch.tensor({ids.tolist()!r})
        with torch.no_grad():
            out = model(input_ids=ids[:, :-1], use_cache=True)
            last = model(input_ids=ids[:, -1:], cache=out.cache, use_cache=True).logits
        torch.save(torch.cat((out.logits, last), 1), {str(folder / "logits.pt")!r})
        model.save_pretrained({str(folder / "again")!r})
        """
    environment = {
        "HF_MODULES_CACHE": str(folder / "modules"),
        "PATH": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "logits.pt")


def test_stock_transformers_loads_it_without_lapcli_and_writes_it_again(tmp_path):
    source, model = converted_source(tiny_source("llama", tmp_path / "teacher", shards="20KB"), tmp_path / "made")
    assert source.index is not None
    found = in_a_fresh_process(source.path, IDS, blocked=("lapcli", "lapkernels"))
    # fp32, the portable form beside the operator of lapkernels, cached beside one pass.
    assert relative_error(found, run(model)) < 2e-5
    again = resolve_model(str(source.path / "again"))
    assert relative_error(run(load_model(again)), run(model)) < 1e-6
    assert again.tensors.keys() - {"lm_head.weight"} == source.tensors.keys() - {"lm_head.weight"}


@pytest.mark.parametrize("model_type", TEACHERS)
def test_lapcli_loads_it_without_trust(model_type, tmp_path):
    teacher = tiny_source(model_type, tmp_path / "teacher")
    source, model = converted_source(teacher, tmp_path / "made")
    loaded = load_model(source)
    assert torch.equal(run(loaded), run(model))
    assert sorted(dual_state_layers(loaded)) == [0, 2]
    kept = {name: tensor for name, tensor in teacher.tensors.items() if ".layers.1." in name}
    for name, (header, entry) in kept.items():
        mine_header, mine = source.tensors[name]
        assert (mine.dtype, mine.shape) == (entry.dtype, entry.shape)
        read = []
        for path, place in ((header.path, entry), (mine_header.path, mine)):
            with path.open("rb") as file:
                file.seek(place.start)
                read.append(file.read(place.nbytes))
        assert read[0] == read[1], name


def test_a_bf16_teacher_stays_bf16(tmp_path):
    teacher = tiny_source("llama", tmp_path / "teacher", dtype=torch.bfloat16)
    source, _ = converted_source(teacher, tmp_path / "made")
    dtypes = {name: entry.dtype for name, (_header, entry) in source.tensors.items()}
    assert dtypes.pop("model.layers.0.self_attn.key_channels") == "I64"
    assert dtypes.pop("model.layers.2.self_attn.key_channels") == "I64"
    assert set(dtypes.values()) == {"BF16"}


def test_a_model_of_which_nothing_is_converted_is_the_teacher():
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3}
    some = converted_config(config, DualStateSettings(layers=(1,)).as_config())
    assert some["model_type"] == "lapcli_dual_state_llama"
    assert some["auto_map"]["AutoModelForCausalLM"] == "modeling_lapcli_dual_state.LapcliDualStateLlamaForCausalLM"
    assert converted_config(some, DualStateSettings().as_config()) == config
    with pytest.raises(FamilyError, match="no attention that can become dual-state"):
        converted_config({"model_type": "mamba2"}, DualStateSettings().as_config())


def test_code_that_is_not_ours_is_not_run_unasked(tmp_path):
    source, _ = converted_source(tiny_source("llama", tmp_path / "teacher"), tmp_path / "made")
    path = source.path / "lapcli_dual_state.py"
    path.write_text(path.read_text() + "\n# mine\n")
    with pytest.raises(ModelError, match=r"needs lapcli_dual_state\.py"):
        load_model(source)


def test_configs_that_make_no_sense_are_named(tmp_path):
    source, _ = converted_source(tiny_source("llama", tmp_path / "teacher"), tmp_path / "made")
    for change, message in (
        (None, "dual_state = None"),
        ({"layers": [7], "states": 2}, r"dual_state\.layers = \[7\]"),
        ({"layers": [0], "states": 0}, "states"),
    ):
        with pytest.raises(ModelError, match=message):
            family_for(source.config).layers({**source.config, "dual_state": change})
    config = json.loads((source.path / "config.json").read_text())
    config["dual_state"]["speed"] = 3
    (source.path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="speed"):
        load_model(resolve_model(str(source.path)))


# Cutting the states.


class Mask:
    """Zeroes the channels that are not kept, of q and k as the states get them."""

    def __init__(self, kept, key_width):
        self.mask = torch.zeros(len(kept), key_width, dtype=F64).scatter_(1, kept, 1.0)

    def mixer_input(self, hidden):
        pass

    def queries_keys(self, q, k):
        return q * self.mask, k * self.mask


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "phi", "phi3"])
def test_a_sliced_state_is_a_masked_one(model_type, tmp_path):
    """The oracle: the read scale is the teacher's, so nothing is pinned; both gates go with the keys."""
    source, model = converted_source(tiny_source(model_type, tmp_path / "teacher"), tmp_path / "made")
    model = model.double()
    width = layers_of(source)[0].key_width
    kept = random_kept(source, width // 2 + 1)
    slice_model(source, selection_of(source, kept, tmp_path), tmp_path / "sliced")
    sliced_source = resolve_model(str(tmp_path / "sliced"))
    sliced = load_model(sliced_source, dtype=F64)
    whole = run(model)
    family, handles = DualState(), []
    for layer in layers_of(source):
        handles += family.attach(model, layer, Mask(kept[layer.index], layer.key_width))
    masked = run(model)
    for handle in handles:
        handle.remove()
    assert relative_error(run(sliced), masked) < EXACT
    assert relative_error(whole, masked) > 1e-3
    with torch.no_grad():
        held = sliced(input_ids=IDS, use_cache=True).cache.layers[0]
    assert held.recurrent.shape == (2, 2, 2, width // 2 + 1, width)
    layer = layers_of(sliced_source)[0]
    assert layer.state_bytes(itemsize=8) * 2 == held.nbytes()
    gate = sliced.model.layers[0].self_attn.forget_proj
    assert gate.weight.shape[0] == gate.bias.shape[0] == 2 * 2 * (width // 2 + 1)
    # Queries and keys need their whole projections: rotary embeddings turn channels in pairs.
    name = next(
        name for name in source.tensors if "layers.0.self_attn" in name and "proj.weight" in name and "q" in name
    )
    assert sliced_source.tensors[name][1].shape == source.tensors[name][1].shape


def test_all_channels_kept_is_the_model_itself(tmp_path):
    source, _ = converted_source(tiny_source("llama", tmp_path / "teacher"), tmp_path / "made")
    slice_model(source, selection_of(source, random_kept(source, 8), tmp_path), tmp_path / "sliced")
    assert resolve_model(str(tmp_path / "sliced")).digest == source.digest


def test_states_are_cut_once_and_controls_not_at_all(tmp_path):
    source, _ = converted_source(tiny_source("llama", tmp_path / "teacher"), tmp_path / "made")
    slice_model(source, selection_of(source, random_kept(source, 5), tmp_path), tmp_path / "sliced")
    family, sliced = DualState(), resolve_model(str(tmp_path / "sliced"))
    with pytest.raises(FamilyError, match="cut to 5 key channels before"):
        family.sliced_config(sliced.config, 3)
    # Before any text is read.
    text = CalibrationSettings(data="builtin", samples=2, seq_len=64)
    with pytest.raises(FamilyError, match="cut to 5 key channels before"):
        plan_pruning(sliced, text, SelectionSettings(keep=3, align=1), RunDirectory(tmp_path / "run"))
    wide = converted_config(source.config, DualStateSettings(layers=(0,), states=1, width=2).as_config())
    assert [layer.key_width for layer in family.layers(wide)] == [16]
    with pytest.raises(FamilyError, match="width = 2"):
        family.sliced_config(wide, 8)
    window = converted_config(source.config, DualStateSettings(layers=(0,), window=8).as_config())
    assert family.layers(window) == ()


def test_calibration_sees_what_the_states_get(tmp_path):
    """Queries that share a key head are copies of one head, and each of them counts."""
    source, model = converted_source(tiny_source("llama", tmp_path / "teacher"), tmp_path / "made")
    seen = {}

    class Look:
        def mixer_input(self, hidden):
            seen["input"] = hidden

        def queries_keys(self, q, k):
            seen["q"], seen["k"] = q, k

    layer = layers_of(source)[0]
    handles = DualState().attach(model, layer, Look())
    taken = {}
    handles.append(
        model.model.layers[0].self_attn.tap.register_forward_hook(lambda _m, _a, out: taken.update(q=out[0], k=out[1]))
    )
    run(model)
    for handle in handles:
        handle.remove()
    assert seen["q"].shape == (2, 41, 2, 2, 8)
    assert seen["k"].shape == (2, 41, 2, 8)
    for head in range(4):
        assert torch.equal(seen["q"][:, :, head % 2, head // 2], taken["q"][:, :, head])
    weights = {member.role: member for member in layer.members}
    assert weights["key projection"].stays
    assert layer_tensors(model, [0])["model.layers.0.self_attn.key_channels"].tolist() == [*range(8), *range(8)]


def test_the_kernel_asked_for_is_the_layers(tmp_path):
    """By name, checked before and while loading; the teacher's own layers have none to choose."""
    source, _ = converted_source(tiny_source("llama", tmp_path / "base"), tmp_path / "dsla")
    ids = torch.tensor([[1, 5, 7, 9, 4]])
    found = {}
    for kernel in ("auto", "reference", "chunked"):
        Machine("cpu", kernel=kernel).check(source.config)
        model = load_model(source, kernel=kernel)
        assert {layer.kernel for layer in dual_state_layers(model).values()} == {kernel}
        with torch.no_grad():
            found[kernel] = model(ids).logits
    assert torch.equal(found["auto"], found["chunked"])
    torch.testing.assert_close(found["reference"], found["chunked"], rtol=1e-5, atol=1e-5)
    for kernel, why in (("triton", "layers with gated states have auto, reference"), ("fla", "cannot run here")):
        with pytest.raises(ModelError, match=f"--kernel {kernel}.*{why}"):
            Machine("cpu", kernel=kernel).check(source.config)
        with pytest.raises(ModelError, match=f"--kernel {kernel}"):
            load_model(source, kernel=kernel)
    with pytest.raises(ModelError, match="--require-fast: the chunked kernel would run"):
        Machine("cpu", require_fast=True).check(source.config)
