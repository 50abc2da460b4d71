"""States read out of caches on the way are those of the recurrence, whichever library keeps them."""

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import lapcli.models.mixer
from lapcli.analysis.spectra import spectrum
from lapcli.analysis.states import Walker, _Keys
from lapcli.analysis.walking import walk
from lapcli.errors import ModelError
from lapcli.families.dual_state import converted_config
from lapcli.families.loading import load_model, resolve_model
from lapcli.families.registry import family_for
from lapcli.families.remote.lapcli_dual_state import DualStateSettings
from lapcli.testing.dual_state import converted, tiny_teacher
from lapcli.testing.models import tiny_delta_net, tiny_gated_deltanet
from lapcli.testing.stock_models import STOCK_MODELS, tiny_stock_model
from lapkernels.delta_rule import delta_rule
from lapkernels.testing import relative_error

IDS = torch.randint(3, 259, (2, 41), generator=torch.Generator().manual_seed(3))
POSITIONS = [1, 2, 7, 24, 40]
FP32 = 2e-5  # between prefill and cached passes, as in the families' tests


def walker_of(folder, dtype=torch.float32):
    source = resolve_model(str(folder))
    family = family_for(source.config)
    return Walker(load_model(source, dtype=dtype), family, family.layers(source.config))


@pytest.mark.parametrize("make", [tiny_gated_deltanet, tiny_delta_net], ids=["gated", "delta"])
def test_states_on_the_way_are_the_recurrence_s_in_fp64(make, tmp_path, monkeypatch):
    # More value heads than key heads, V unlike K; in fp64, so that only the order of sums is left to differ.
    options = {"num_v_heads": 4, "expand_v": 0.5} if make is tiny_gated_deltanet else {"expand_v": 0.5}
    walker = walker_of(make(tmp_path / "model", **options), torch.float64)
    seen = []

    def recorded(q, k, v, beta, g, **rest):
        seen.append((q, k, v, *rest["gates"].activated(beta, g), rest["qk_l2norm"]))
        return delta_rule(q, k, v, beta, g, **rest)

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(lapcli.models.mixer, "delta_rule", recorded)
        walker.body(input_ids=IDS, use_cache=False)
    start = 0
    with walker.attached():
        for position in POSITIONS:
            walker.step(IDS[:, start:position])
            start = position
            for layer, (q, k, v, beta, g, normed) in zip(walker.layers, seen, strict=True):
                inputs = [None if x is None else x[:, :position] for x in (q, k, v, beta, g)]
                wanted = delta_rule(*inputs, output_final_state=True, qk_l2norm=normed, impl="reference").final_state
                assert wanted.dtype == torch.float64
                assert relative_error(walker.state(layer), wanted) < 1e-10
                unit = inputs[1] / (inputs[1].square().sum(-1, keepdim=True) + 1e-6).sqrt()
                assert relative_error(walker.gram(layer), torch.einsum("bthi,bthj->bhij", unit, unit)) < 1e-10


@pytest.mark.parametrize("key_width", [None, 5], ids=["whole", "cut"])
def test_converted_layers_keep_several_states_of_each_key_head(key_width):
    settings = DualStateSettings(layers=(2, 0), states=3, key_width=key_width)
    model = tiny_teacher("llama", dtype=torch.float64)
    config = converted_config(model.config.to_dict(), settings.as_config())
    converted(model, 2, 0, states=3, key_width=key_width)
    family = family_for(config)
    walker = Walker(model, family, family.layers(config))
    assert [(layer.index, layer.heads, layer.value_heads) for layer in walker.layers] == [(0, 2, 6), (2, 2, 6)]
    given, chosen = {}, {}
    for layer in walker.layers:
        mixer = model.get_submodule(layer.mixer)
        if key_width is not None:  # each head keeps other channels
            chosen[layer.index] = torch.tensor([[0, 2, 3, 5, 7], [1, 2, 4, 6, 7]])
            mixer.key_channels.copy_(chosen[layer.index].flatten())
        mixer.register_forward_pre_hook(
            lambda mixer, _args, kwargs: given.update(
                {mixer.layer_idx: (mixer, kwargs["hidden_states"], kwargs["position_embeddings"])}
            ),
            with_kwargs=True,
        )
    ids = IDS[:, : POSITIONS[-1]] % 64
    with torch.no_grad():
        walker.body(input_ids=ids, use_cache=False)
    wanted = {index: _written(*found, chosen.get(index)) for index, found in given.items()}
    start = 0
    with walker.attached():
        for position in POSITIONS:
            walker.step(ids[:, start:position])
            start = position
            for layer in walker.layers:
                states, keys = wanted[layer.index]
                assert relative_error(walker.state(layer), states[position - 1]) < 1e-10
                seen = keys[:, :, :position]
                assert relative_error(walker.gram(layer), torch.einsum("bhti,bhtj->bhij", seen, seen)) < 1e-10


@torch.no_grad()
def _written(mixer, hidden, rotary, chosen):
    """The states after each token, `[B, H * 3, K, V]`, made of one outer product after the other; and the keys."""
    keys, values = (
        torch.nn.functional.linear(hidden, module.weight, module.bias).unflatten(-1, (2, 8)).transpose(1, 2)
        for module in (mixer.k_proj, mixer.v_proj)
    )
    keys = apply_rotary_pos_emb(keys, keys, *rotary)[1]
    if chosen is not None:
        keys = torch.stack([keys[:, head, :, channels] for head, channels in enumerate(chosen)], 1)
    gates = torch.nn.functional.linear(hidden, mixer.forget_proj.weight, mixer.forget_proj.bias)
    kept = gates.unflatten(-1, (3, 2, -1)).sigmoid() ** (1 / 16)
    state = torch.zeros(len(hidden), 6, keys.shape[-1], 8, dtype=torch.float64)
    found = []
    for t in range(hidden.shape[1]):
        state = state.clone()
        for head in range(2):
            for number in range(3):
                new = keys[:, head, t, :, None] * values[:, head, t, None, :]
                place = 3 * head + number
                state[:, place] = kept[:, t, number, head, :, None] * state[:, place] + new
        found.append(state)
    return found, keys


@pytest.mark.parametrize("model_type", STOCK_MODELS)
def test_a_stock_model_s_states_and_keys(model_type, tmp_path):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    walker = walker_of(tiny_stock_model(model_type, tmp_path / "model"))
    whole = {layer.index: _Keys(layer, listening=True) for layer in walker.layers}
    handles = [h for layer in walker.layers for h in walker._family.attach(walker.model, layer, whole[layer.index])]
    with torch.no_grad():
        walker.body(input_ids=IDS[:, : POSITIONS[-1]], use_cache=False)
    for handle in handles:
        handle.remove()
    with walker.attached():
        walker.step(IDS[:, : POSITIONS[-1]])
        wanted = {layer.index: walker.state(layer).clone() for layer in walker.layers}
        walker.restart()
        walker.step(IDS[:, :1])
        for layer in walker.layers:
            state, gram = walker.state(layer).double(), walker.gram(layer)
            # One token writes k u^T: along K the state is the key, whose Gram matrix is k k^T.
            shared = layer.value_heads // layer.heads
            direction = gram / gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
            along = direction.repeat_interleave(shared, 1) @ state
            assert relative_error(along, state) < FP32
            assert state.abs().amax() > 0
        start = 1
        for position in POSITIONS[1:]:
            walker.step(IDS[:, start:position])
            start = position
        for layer in walker.layers:
            assert relative_error(walker.state(layer), wanted[layer.index]) < FP32
            assert relative_error(walker.gram(layer), whole[layer.index].gram) < FP32


def test_a_model_beside_itself_makes_no_error_and_measures_the_same(tmp_path):
    folder = tiny_gated_deltanet(tmp_path / "model")
    walkers = {"base": walker_of(folder), "again": walker_of(folder)}
    found = walk(walkers, IDS, [8, 16, 40], batch=1)
    for index, layer in found["again"].items():
        assert layer.error("own") == layer.error("base") == 0.0
        assert found["base"][index].error("own") is None
        assert layer.rank.shape == (2, 3, 2)
        assert torch.equal(layer.rank, found["base"][index].rank)


def test_batches_and_what_comes_after_the_last_position_change_nothing(tmp_path):
    walker = walker_of(tiny_gated_deltanet(tmp_path / "model", num_v_heads=4), torch.float64)
    one, both = walk({"a": walker}, IDS, [8, 40], batch=1)["a"], walk({"a": walker}, IDS[:, :40], [8, 40], batch=2)["a"]
    for index, layer in one.items():
        for name in ("rank", "kappa", "key_margin"):
            assert torch.allclose(getattr(layer, name), getattr(both[index], name), rtol=1e-6, equal_nan=True)


def test_errors_of_a_changed_mixer_are_found_where_they_arise(tmp_path):
    folder = tiny_gated_deltanet(tmp_path / "model")
    walkers = {"base": walker_of(folder), "half": walker_of(folder)}
    with torch.no_grad():
        walkers["half"].model.get_submodule(walkers["half"].layers[0].mixer).o_proj.weight.mul_(0.5)
    found = walk(walkers, IDS, [20, 40], batch=2)["half"]
    first, second = found[0], found[1]
    # Half of an output is half of it wrong; the next layer errs by its inputs alone.
    assert first.error("own") == pytest.approx(0.5, rel=1e-6)
    assert first.error("base") == pytest.approx(0.5, rel=1e-6)
    assert second.error("own") > 1e-3
    assert second.error("base") == 0.0


def test_a_state_that_is_not_finite_is_named(tmp_path):
    walker = walker_of(tiny_gated_deltanet(tmp_path / "model"))
    with torch.no_grad():
        walker.model.get_submodule(walker.layers[1].mixer).v_proj.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match=r"layer 1 \(model\.layers\.1\.attn\) of base"):
        walk({"base": walker}, IDS, [8], batch=2)


def test_an_fp32_model_s_measures_are_those_of_its_fp64_twin(tmp_path):
    folder = tiny_gated_deltanet(tmp_path / "model")
    single, double = (
        walk({"a": walker_of(folder, d)}, IDS, [40], batch=2)["a"] for d in (torch.float32, torch.float64)
    )
    for index, layer in single.items():
        assert torch.allclose(layer.rank, double[index].rank, rtol=1e-4)


def test_the_walked_state_is_measured_as_it_is(tmp_path):
    walker = walker_of(tiny_gated_deltanet(tmp_path / "model"))
    found = walk({"a": walker}, IDS[:1], [40], batch=1)["a"]
    for layer in walker.layers:
        values = torch.linalg.svdvals(walker.state(layer).double())
        wanted = (values**2).sum(-1) / values[..., 0] ** 2
        assert torch.allclose(found[layer.index].rank[:, 0], wanted, rtol=1e-10)
        assert torch.allclose(spectrum(walker.state(layer)).squares.sqrt()[..., :20], values[..., :20], rtol=1e-6)
