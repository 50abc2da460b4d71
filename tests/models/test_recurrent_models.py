"""What both families owe their callers: padding, packing, caches, losses, hooks, files."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache

from lapcli.errors import ModelError
from lapcli.models import GatedDeltaNetForCausalLM, RecurrentCache
from lapcli.models.decoder import _CACHE_FIELD
from lapcli.models.gated_deltanet import GatedDeltaNetMixer
from lapcli.models.loss import cross_entropy
from lapkernels import KernelUnavailable
from lapkernels.delta_rule import GIVEN, delta_rule
from lapkernels.testing import relative_error

# fp64 through two layers; the oracle's bound for our own models.
EXACT = 1e-10


def cache_of(output) -> RecurrentCache | None:
    return output.get(_CACHE_FIELD)


def states(cache: RecurrentCache) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in layer.tensors()]


# --- caches ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_100_tokens_then_7_then_1_are_108(model, tokens):
    """Case 6."""
    ids = tokens(2, 108)
    whole = model(ids).logits
    cache, parts = None, []
    for start, stop in ((0, 100), (100, 107), (107, 108)):
        output = model(ids[:, start:stop], cache=cache, use_cache=True)
        cache = cache_of(output)
        parts.append(output.logits)
    assert relative_error(torch.cat(parts, 1), whole) < EXACT
    assert cache.get_seq_length() == 108


@torch.no_grad()
def test_the_cache_goes_by_its_older_name_too(make_model, tokens):
    model, ids = make_model("gated_deltanet"), tokens(1, 12)
    cache = cache_of(model(ids[:, :8], use_cache=True))
    copy = cache.copy()
    expected = model(ids[:, 8:], cache=cache, use_cache=True)
    assert torch.equal(model(ids[:, 8:], past_key_values=copy, use_cache=True).logits, expected.logits)
    with pytest.raises(ValueError, match="two names"):
        model(ids, cache=cache, past_key_values=copy)


@torch.no_grad()
def test_a_cache_is_read_but_not_written_without_use_cache(make_model, tokens):
    model, ids = make_model("gated_deltanet"), tokens(1, 12)
    cache = cache_of(model(ids[:, :8], use_cache=True))
    before = [tensor.clone() for tensor in states(cache)]
    output = model(ids[:, 8:], cache=cache, use_cache=False)
    assert cache_of(output) is None
    assert relative_error(output.logits, model(ids).logits[:, 8:]) < EXACT
    assert all(torch.equal(a, b) for a, b in zip(states(cache), before, strict=True))
    assert cache.get_seq_length() == 8


@torch.no_grad()
def test_the_cache_never_grows(model, tokens):
    """Its size is that of the states, in what it holds and in what it keeps alive."""
    sizes = set()
    cache = None
    for length in (9, 70, 1, 1, 3):
        cache = cache_of(model(tokens(2, length), cache=cache, use_cache=True))
        sizes.add((cache.nbytes(), sum(tensor.untyped_storage().nbytes() for tensor in states(cache))))
    shape = model.mixers()[0].shape
    taps = model.config.conv_size - 1 if model.config.use_short_conv else 0
    wanted = (
        8
        * 2
        * 2
        * (
            shape.value_heads * shape.key_width * shape.value_width
            + taps * (2 * shape.key_channels + shape.value_channels)
        )
    )
    assert sizes == {(wanted, wanted)}


@torch.no_grad()
def test_states_in_place_keep_their_addresses(make_model, tokens):
    model, ids = make_model("gated_deltanet"), tokens(1, 12)
    cache = cache_of(model(ids[:, :10], cache=RecurrentCache(in_place=True), use_cache=True))
    addresses = [tensor.data_ptr() for tensor in states(cache)]
    last = model(ids[:, 10:11], cache=cache, use_cache=True)
    last = model(ids[:, 11:], cache=cache, use_cache=True)
    assert [tensor.data_ptr() for tensor in states(cache)] == addresses
    assert relative_error(last.logits, model(ids).logits[:, -1:]) < EXACT


@torch.no_grad()
def test_rows_of_a_cache_can_be_picked_and_repeated(make_model, tokens):
    model, ids, last = make_model("gated_deltanet"), tokens(3, 9), tokens(3, 1, seed=1)
    cache = cache_of(model(ids, use_cache=True))
    cache.reorder_cache(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    rows = torch.tensor([2, 2, 0, 0])
    expected = model(torch.cat([ids, last], 1)[rows]).logits[:, -1:]
    assert relative_error(model(last[rows], cache=cache, use_cache=True).logits, expected) < EXACT


def test_a_cache_cannot_go_back(make_model, tokens):
    model = make_model("delta_net")
    cache = cache_of(model(tokens(1, 9), use_cache=True))
    cache.crop(9)
    with pytest.raises(NotImplementedError, match="rolled back"):
        cache.crop(8)
    cache.reset()
    assert cache.get_seq_length() == len(cache) == 0
    with pytest.raises(TypeError, match="RecurrentCache, not a DynamicCache"):
        model(tokens(1, 9), cache=DynamicCache())


# --- generation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 3}], ids=["greedy", "sampled", "beams"])
@pytest.mark.parametrize("family", ["gated_deltanet", "delta_net"])
def test_generation_with_a_cache_is_generation_without(make_model, tokens, family, options):
    model, ids = make_model(family), tokens(2, 11)
    ids[0, :4] = 0
    arguments = {"attention_mask": (ids != 0).long(), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    results = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        results.append(model.generate(ids, use_cache=use_cache, **(arguments | options)))
    assert torch.equal(*results)
    if "do_sample" not in options:
        alone = model.generate(ids[:1, 4:], **(arguments | options | {"attention_mask": (ids[:1, 4:] != 0).long()}))
        length = min(alone.shape[1], results[0].shape[1] - 4)
        assert torch.equal(results[0][0, 4 : 4 + length], alone[0, :length])


# --- padding --------------------------------------------------------------------------------------------------------

MASKS = {
    "left": "000001111111111",
    "right": "111111111100000",
    "both": "001111111111000",
    "holes": "010111001111011",
    "more_than_tokens": "000000000000011",
}


@torch.no_grad()
@pytest.mark.parametrize("where", MASKS)
def test_padding_changes_nothing(model, tokens, where):
    """Case 7: logits and states as without; other embeddings at the pads change no bit."""
    mask = torch.tensor([[int(c) for c in MASKS[where]], [1] * 15])
    ids = tokens(2, 15)
    real = mask[0].bool()
    alone = model(ids[:1, real], use_cache=True)
    padded = model(ids, attention_mask=mask, use_cache=True)
    assert relative_error(padded.logits[:1, real], alone.logits) < EXACT
    for held, expected in zip(states(cache_of(padded)), states(cache_of(alone)), strict=True):
        assert relative_error(held[:1], expected) < EXACT

    embeddings = model.get_input_embeddings()(ids)
    embeddings[0, ~real] = torch.nan
    other = model(inputs_embeds=embeddings, attention_mask=mask, use_cache=True)
    assert torch.equal(other.logits[0, real], padded.logits[0, real])
    assert torch.equal(other.logits[1], padded.logits[1])
    for held, expected in zip(states(cache_of(other)), states(cache_of(padded)), strict=True):
        assert torch.equal(held, expected)


@torch.no_grad()
@pytest.mark.parametrize("continuation", ["1", "0110111", "1110000"], ids="then_{}".format)
def test_padded_rows_go_on(model, tokens, continuation):
    """Rows of different lengths, padded on the right, and then padded again in the cached continuation."""
    first = torch.tensor([[1] * 4 + [0] * 5, [1] * 9])
    second = torch.tensor([[int(c) for c in continuation], [1] * len(continuation)])
    mask = torch.cat([first, second], 1)
    ids = tokens(2, mask.shape[1])
    cache = cache_of(model(ids[:, :9], attention_mask=first, use_cache=True))
    output = model(ids[:, 9:], attention_mask=mask, cache=cache, use_cache=True).logits
    for row in range(2):
        expected = model(ids[row : row + 1, mask[row].bool()]).logits[0, first[row].sum() :]
        assert relative_error(output[row, second[row].bool()], expected) < EXACT


@torch.no_grad()
def test_a_row_of_padding_alone_leaves_a_state_of_zeros(make_model, tokens):
    model = make_model("gated_deltanet")
    mask = torch.tensor([[0] * 6, [1] * 6])
    output = model(tokens(2, 6), attention_mask=mask, use_cache=True)
    assert output.logits.isfinite().all()
    assert all(tensor[0].abs().max() == 0 for tensor in states(cache_of(output)))


def test_masks_that_make_no_sense_are_named(make_model, tokens):
    model, ids = make_model("gated_deltanet"), tokens(2, 6)
    for mask in (torch.ones(2, 1, 6, 6), torch.ones(2, 5)):
        with pytest.raises(ModelError, match="attention_mask has shape"):
            model(ids, attention_mask=mask)
    with pytest.raises(ModelError, match="leave the padding out"):
        model(ids[:1], attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]), cu_seqlens=torch.tensor([0, 3, 6]))


# --- packed sequences -----------------------------------------------------------------------------------------------

LENGTHS = [1, 70, 2, 5]


@torch.no_grad()
def test_packed_sequences_are_separate_ones(model, tokens):
    """With boundaries and with positions that start again, over a second call that goes on from the states."""
    rows = [tokens(1, length + 3, seed=length) for length in LENGTHS]
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    packed = torch.cat([row[:, :-3] for row in rows], 1)
    alone = [model(row).logits for row in rows]

    output = model(packed, cu_seqlens=bounds, use_cache=True)
    assert relative_error(output.logits, torch.cat([x[:, :-3] for x in alone], 1)) < EXACT
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    assert torch.equal(model(packed, position_ids=positions).logits, output.logits)

    rest = torch.cat([row[:, -3:] for row in rows], 1)
    later = model(rest, cu_seqlens=torch.arange(0, 13, 3), cache=cache_of(output), use_cache=True)
    assert relative_error(later.logits, torch.cat([x[:, -3:] for x in alone], 1)) < EXACT


@torch.no_grad()
def test_positions_that_start_again_in_several_rows(make_model, tokens):
    model, ids = make_model("gated_deltanet"), tokens(2, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 0, 1]])
    expected = torch.cat(
        [torch.cat([model(ids[:1, :4]).logits, model(ids[:1, 4:]).logits], 1),
         torch.cat([model(ids[1:, :7]).logits, model(ids[1:, 7:]).logits], 1)]
    )  # fmt: skip
    output = model(ids, position_ids=positions, output_hidden_states=True)
    assert relative_error(output.logits, expected) < EXACT
    assert [x.shape for x in output.hidden_states] == [(2, 9, 16)] * 3
    plain = torch.arange(9).expand(2, 9)
    assert torch.equal(model(ids, position_ids=plain).logits, model(ids).logits)


def test_the_loss_of_a_packed_document_is_its_own(model, tokens):
    """Case 9, gradients too: what lies before it in the row, and its own first token, count for nothing."""
    first, second = tokens(1, 6), tokens(1, 9, seed=1)
    alone = model(second, labels=second).loss
    expected = torch.autograd.grad(alone, model.lm_head.weight)[0]
    packed = torch.cat([first, second], 1)
    labels = torch.cat([torch.full_like(first, -100), second], 1)
    loss = model(packed, labels=labels, cu_seqlens=torch.tensor([0, 6, 15])).loss
    assert abs(loss.item() - alone.item()) < EXACT
    assert relative_error(torch.autograd.grad(loss, model.lm_head.weight)[0], expected) < EXACT


@pytest.mark.parametrize("bounds", [[0, 3, 3, 6], [0, 5], [1, 6]], ids=str)
def test_boundaries_that_make_no_sense_are_named(make_model, tokens, bounds):
    with pytest.raises(ModelError, match="rise strictly from 0 to 6"):
        make_model("delta_net")(tokens(1, 6), cu_seqlens=torch.tensor(bounds))


# --- losses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_of_padded_rows_counts_tokens_alone(make_model, tokens, side):
    model, ids = make_model("gated_deltanet"), tokens(2, 12)
    real = slice(5, None) if side == "left" else slice(None, 7)
    mask = torch.ones_like(ids)
    mask[0] = 0
    mask[0, real] = 1
    sums = [model(row, labels=row).loss * (row.shape[1] - 1) for row in (ids[:1, real], ids[1:])]
    padded = model(ids, attention_mask=mask, labels=ids)
    assert abs(padded.loss.item() - (sum(sums) / (6 + 11)).item()) < EXACT
    divided = model(ids, attention_mask=mask, labels=ids, num_items_in_batch=torch.tensor(34)).loss
    assert abs(divided.item() - padded.loss.item() / 2) < EXACT


def test_the_loss_is_the_plain_cross_entropy(make_model, tokens):
    model, ids = make_model("gated_deltanet"), tokens(2, 12)
    output = model(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(output.loss.item() - expected.item()) < EXACT


def test_a_batch_without_any_label_has_loss_zero(make_model, tokens):
    model, ids = make_model("gated_deltanet"), tokens(2, 5)
    loss = model(ids, labels=torch.full_like(ids, -100)).loss
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in model.parameters())
    assert cross_entropy(torch.zeros(1, 1, 3), torch.tensor([[-100]])).item() == 0


@torch.no_grad()
@pytest.mark.parametrize("keep", [1, 4, torch.tensor([0, 7])], ids=["last", "last_four", "named"])
@pytest.mark.parametrize("more", ["plain", "packed", "padded", "hidden"])
def test_logits_of_some_positions(make_model, tokens, keep, more):
    """Whatever the last block leaves out, the states are those of all tokens."""
    model, ids = make_model("gated_deltanet"), tokens(2, 9)
    given = {
        "plain": {},
        "packed": {"position_ids": torch.arange(9).repeat(2, 1) % 4},
        "padded": {"attention_mask": torch.tensor([[1] * 9, [0] * 3 + [1] * 6])},
        "hidden": {"output_hidden_states": True},
    }[more]
    whole = model(ids, use_cache=True, **given)
    found = model(ids, use_cache=True, logits_to_keep=keep, **given)
    expected = whole.logits[:, -keep:] if isinstance(keep, int) else whole.logits[:, keep]
    assert relative_error(found.logits, expected) < EXACT
    name = next(name for name in ("cache", "past_key_values") if name in whole)
    for one, other in zip(whole[name].layers, found[name].layers, strict=True):
        assert all(map(torch.equal, one.tensors(), other.tensors()))
    if more == "hidden":
        assert all(map(torch.equal, whole.hidden_states, found.hidden_states))


# --- kernels and hooks ----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_every_kernel_gives_the_same_logits(model, tokens):
    ids = tokens(2, 70)
    model.set_kernel("reference")
    expected = model(ids).logits
    for kernel in ("chunked", "auto"):
        model.set_kernel(kernel)
        assert relative_error(model(ids).logits, expected) < EXACT


def test_kernels_that_cannot_run_are_named(make_model, tokens):
    model = make_model("gated_deltanet")
    assert model.kernel_choice(70).name == "chunked"
    assert model.kernel_choice(1).name == "reference"
    with pytest.raises(ModelError, match="'magic' does not compute"):
        model.set_kernel("magic")
    if not torch.cuda.is_available():
        for kernel in ("fla", "triton"):
            with pytest.raises(ModelError, match="cannot run here"):
                model.set_kernel(kernel)
        model.mixers()[0].kernel = "fla"
        with pytest.raises(KernelUnavailable):
            model(tokens(1, 5))
    model.set_kernel("chunked")
    assert model.kernel_choice(70).name == "chunked"
    assert "kernel" not in model.config.to_dict()


@torch.no_grad()
def test_the_tap_shows_and_replaces_queries_and_keys(model, tokens):
    """A hook sees zeros at the pads; masking channels there is what slicing must equal."""
    ids, mask = tokens(2, 8), torch.tensor([[0, 0, 1, 1, 1, 1, 0, 1], [1] * 8])
    seen = []
    shape = model.mixers()[0].shape

    def drop_first_channel(module, arguments, output):
        seen.extend(output)
        return tuple(x * (torch.arange(shape.key_width) > 0) for x in output)

    plain = model(ids, attention_mask=mask).logits
    hooks = [mixer.tap.register_forward_hook(drop_first_channel) for mixer in model.mixers()]
    dropped = model(ids, attention_mask=mask).logits
    for hook in hooks:
        hook.remove()
    assert [tuple(x.shape) for x in seen] == [(2, 8, 2, shape.key_width)] * 4
    for x in seen:
        assert x[0, mask[0] == 0].abs().max() == 0
        assert x[0, mask[0] == 1].abs().max() > 0
    assert relative_error(dropped, plain) > 1e-3
    assert torch.equal(model(ids, attention_mask=mask).logits, plain)


@torch.no_grad()
def test_the_read_scale_can_be_pinned(make_model, tokens):
    model, ids = make_model("gated_deltanet"), tokens(1, 9)
    plain = model(ids).logits
    for mixer in model.mixers():
        mixer.read_scale = 6**-0.5
    assert torch.equal(model(ids).logits, plain)
    for mixer in model.mixers():
        mixer.read_scale = 1e-3
    # Far below the eps of the output norm, so that the norm cannot undo it.
    assert relative_error(model(ids).logits, plain) > 1e-3


# --- training -------------------------------------------------------------------------------------------------------


def test_checkpointed_gradients_are_plain_ones(model, tokens):
    ids = tokens(2, 9)
    model.train()
    plain = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    runs = []
    hook = model.mixers()[0].tap.register_forward_hook(lambda *_: runs.append(1))
    again = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    hook.remove()
    assert len(runs) == 2
    for a, b in zip(again, plain, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="gradient checkpointing"):
        model(ids, cache=RecurrentCache())


def test_every_parameter_has_a_gradient(model, tokens):
    ids = tokens(2, 9)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


# torch.compile makes an instance of each autograd function itself, against torch's own advice.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_model_compiles_whole(make_model, tokens):
    model, ids = make_model("gated_deltanet", num_hidden_layers=1), tokens(2, 70)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    expected = torch.autograd.grad(model(ids, labels=ids, use_cache=False).loss, list(model.parameters()))
    actual = torch.autograd.grad(compiled(ids, labels=ids, use_cache=False).loss, list(model.parameters()))
    for a, b in zip(actual, expected, strict=True):
        assert relative_error(a, b) < EXACT


def test_fresh_gates_are_those_of_the_paper(make_config):
    """Decay rates in (0, 16), step sizes in [1e-3, 0.1] up to the floor's rounding."""
    torch.manual_seed(0)
    mixer = GatedDeltaNetForCausalLM(make_config("gated_deltanet", num_v_heads=512)).mixers()[0]
    rate, step = mixer.A_log.exp(), torch.nn.functional.softplus(mixer.dt_bias)
    assert 0 < rate.min() < 1 < 15 < rate.max() < 16
    assert 1e-3 * 0.999 < step.min() < 2e-3 < 0.05 < step.max() < 0.1 * 1.001


def test_the_penalty_that_is_not_here_is_refused_where_it_counts(make_model, tokens):
    model, ids = make_model("gated_deltanet", use_l2warp=True), tokens(1, 5)
    with torch.no_grad():
        model(ids, labels=ids)
    with pytest.raises(ModelError, match="use_l2warp"):
        model(ids, labels=ids)


# --- configurations and files ---------------------------------------------------------------------------------------

REFUSED = [
    ("gated_deltanet", {"attn": {"layers": [0], "num_heads": 2}}, "attn ="),
    ("gated_deltanet", {"attnres_block_size": 2}, "attnres_block_size"),
    ("gated_deltanet", {"hidden_act": "powlu"}, "hidden_act"),
    ("gated_deltanet", {"attn_mode": "parallel"}, "attn_mode"),
    ("gated_deltanet", {"output_gate_activation": "relu"}, "output_gate_activation"),
    ("gated_deltanet", {"expand_v": 1.3}, "expand_v"),
    ("gated_deltanet", {"num_v_heads": 3}, "num_v_heads"),
    ("delta_net", {"qk_norm": "none"}, "qk_norm"),
    ("delta_net", {"qk_activation": "gelu"}, "qk_activation"),
    ("delta_net", {"expand_k": 0.3}, "expand_k"),
    ("delta_net", {"expand_v": 0.3125, "num_heads": 2}, "expand_v"),
]


@pytest.mark.parametrize(("family", "changes", "field"), REFUSED, ids=[next(iter(r[1])) + "_" + r[0] for r in REFUSED])
def test_what_is_not_here_is_refused_by_name(make_model, family, changes, field):
    with pytest.raises(ModelError, match=field):
        make_model(family, **changes)


@torch.no_grad()
def test_saved_and_loaded(model, tokens, tmp_path):
    ids = tokens(2, 20)
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert torch.equal(again(ids).logits, expected)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != model.config.tie_word_embeddings
    assert (again.lm_head.weight is again.model.embeddings.weight) == model.config.tie_word_embeddings


@torch.no_grad()
def test_time_constants_stay_fp32_in_a_bf16_model(make_model, tokens, tmp_path):
    model = make_model("gated_deltanet").float()
    model.save_pretrained(tmp_path)
    loaded = GatedDeltaNetForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    dtypes = {name.rsplit(".", 1)[-1]: p.dtype for name, p in loaded.named_parameters() if "layers.0.attn." in name}
    assert dtypes["A_log"] == dtypes["dt_bias"] == torch.float32
    assert dtypes["weight"] == torch.bfloat16
    assert torch.equal(loaded.mixers()[0].A_log, model.mixers()[0].A_log)
    output = loaded(tokens(2, 20), use_cache=True)
    assert output.logits.dtype == torch.bfloat16
    assert cache_of(output).layers[0].recurrent.dtype == torch.float32
    assert cache_of(output).layers[0].convolution[0].dtype == torch.bfloat16


def test_a_model_without_files_warns_of_nothing(make_config):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GatedDeltaNetForCausalLM(make_config("gated_deltanet", use_short_conv=False))


def test_a_mixer_is_found_by_its_class(make_model):
    assert [type(mixer) for mixer in make_model("gated_deltanet").mixers()] == [GatedDeltaNetMixer] * 2


def test_gates_are_left_to_the_rule_where_nobody_else_needs_them(model, tokens, monkeypatch):
    """Its kernel activates them on the way. At padding, under a watch and with query feedback they come as they are."""
    left = []

    def rule(*arguments, gates, **options):
        left.append(gates != GIVEN)
        return delta_rule(*arguments, gates=gates, **options)

    monkeypatch.setattr("lapcli.models.mixer.delta_rule", rule)
    mixers, ids = model.mixers(), tokens(2, 9)
    raw = model(ids).logits
    projected = hasattr(mixers[0], "b_proj") and not mixers[0].erasing
    assert left == [projected] * len(mixers)
    left.clear()
    seen = []
    for mixer in mixers:
        mixer.watch, mixer.watched = seen.append, True
    assert relative_error(model(ids).logits, raw) < EXACT
    assert not any(left)
    assert all((each.beta >= 0).all() and (each.g is None or (each.g <= 0).all()) for each in seen)
    for mixer in mixers:
        mixer.watched = False
    model(ids, attention_mask=torch.tensor([[0] + [1] * 8, [1] * 9]))
    assert not any(left)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_small_operators_by_their_definition_are_the_same(model, tokens, packed, monkeypatch):
    """Norms, sums, activations and convolutions as a GPU runs them, logits and gradients."""
    ids = tokens(1, 18) if packed else tokens(2, 9)
    where = {"cu_seqlens": torch.tensor([0, 5, 18])} if packed else {}
    results = []
    for fused in (False, True):
        for module in ("norms", "decoder", "convolution"):
            monkeypatch.setattr(f"lapcli.models.{module}.by_one_kernel", lambda *_, fused=fused: fused)
        output = model(ids, labels=ids, **where)
        gradients = torch.autograd.grad(output.loss, list(model.parameters()), materialize_grads=True)
        results.append([output.logits, *gradients])
    for fused, plain in zip(results[1], results[0], strict=True):
        assert torch.allclose(fused, plain, rtol=0, atol=EXACT * max(1.0, plain.abs().max().item()))
