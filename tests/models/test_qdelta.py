"""Q-Delta: what it has beyond Gated DeltaNet, its release's names and numbers, and what keeps it stable."""

import json

import pytest
import torch
from torch.nn import functional as F

from lapcli.errors import ModelError
from lapcli.models import QDeltaConfig, QDeltaForCausalLM
from lapcli.models.decoder import _CACHE_FIELD
from lapkernels.testing import relative_error

EXACT = 1e-10


def feedback_of(model, ids):
    """By layer, what the delta rule is handed."""
    seen = []
    for mixer in model.mixers():
        mixer.watch, mixer.watched = seen.append, True
    with torch.no_grad():
        model(ids, use_cache=False)
    for mixer in model.mixers():
        mixer.watch, mixer.watched = None, False
    return seen


# --- the feedback ---------------------------------------------------------------------------------------------------


def test_the_feedback_is_the_papers(make_model, tokens):
    """`sigmoid(W x - 0.9)`, per value head and token, of the mixer's input; 0.9 from the config."""
    model, inputs = make_model("qdelta", num_v_heads=4, lamb_bias=0.3), []
    hooks = [m.register_forward_pre_hook(lambda _m, args: inputs.append(args[0])) for m in model.mixers()]
    seen = feedback_of(model, tokens(2, 9))
    for hook in hooks:
        hook.remove()
    assert QDeltaConfig().lamb_bias == 0.9
    for mixer, x, given in zip(model.mixers(), inputs, seen, strict=True):
        wanted = 1 / (1 + torch.exp(-(x @ mixer.lamb_proj.weight.T - 0.3)))
        assert given.lamb.shape == (2, 9, 4)
        assert relative_error(given.lamb, wanted) < EXACT
        assert mixer.lamb_proj.bias is None


@torch.no_grad()
@pytest.mark.parametrize("value_heads", [2, 4], ids=["HV=H", "HV=2H"])
def test_without_feedback_it_is_a_gated_deltanet_to_the_bit(make_model, tokens, value_heads):
    ids = tokens(2, 70)
    gated = make_model("gated_deltanet", num_v_heads=value_heads).float()
    for changes in ({"lamb_fixed": 0.0}, {"lamb_gain": True}):
        same = make_model("qdelta", num_v_heads=value_heads, seed=1, **changes).float()
        loaded = same.load_state_dict(gated.state_dict(), strict=False)
        assert not loaded.unexpected_keys
        assert torch.equal(same(ids).logits, gated(ids).logits)
    other = make_model("qdelta", num_v_heads=value_heads).float()
    other.load_state_dict(gated.state_dict(), strict=False)
    assert relative_error(other(ids).logits, gated(ids).logits) > 1e-3


def test_a_gain_of_zero_learns(make_model, tokens):
    """Its gradient is there although the feedback is zero; that of the projection follows once the gain has moved."""
    model, ids = make_model("qdelta", lamb_gain=True), tokens(2, 20)
    model(ids, labels=ids).loss.backward()
    for mixer in model.mixers():
        assert mixer.lamb_gain.dtype == torch.float64
        assert mixer.lamb_gain.detach().abs().max() == 0
        assert mixer.lamb_gain.grad.abs().min() > 0
        assert mixer.lamb_proj.weight.grad.abs().max() == 0
        with torch.no_grad():
            mixer.lamb_gain.sub_(mixer.lamb_gain.grad.sign())
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    assert all(mixer.lamb_proj.weight.grad.abs().max() > 0 for mixer in model.mixers())
    # However far it moves, the feedback stays below 1.
    for mixer in model.mixers():
        mixer.lamb_gain.data.fill_(100.0)
    assert all(given.lamb.max() < 1 for given in feedback_of(model, ids))


def test_variants_have_no_parameters_that_do_nothing(make_model):
    def names(**changes):
        return {name.rsplit("layers.0.attn.", 1)[-1] for name in make_model("qdelta", **changes).state_dict()}

    plain = names()
    assert "lamb_proj.weight" in plain
    assert plain - names(lamb_fixed=0.5) == {"lamb_proj.weight", "model.layers.1.attn.lamb_proj.weight"}
    without = {"A_log", "dt_bias", "a_proj.weight"}
    assert {name for name in plain - names(use_decay=False) if "." not in name or name in without} == without


@torch.no_grad()
def test_a_gain_stays_fp32_in_a_bf16_model(make_model, tokens, tmp_path):
    make_model("qdelta", lamb_gain=True).float().save_pretrained(tmp_path)
    loaded = QDeltaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert loaded.mixers()[0].lamb_gain.dtype == torch.float32
    assert loaded(tokens(1, 9)).logits.dtype == torch.bfloat16


# --- negative eigenvalues -------------------------------------------------------------------------------------------


def contraction(model, ids):
    """`beta k.x` of every token, layer and head."""
    found = []
    for given in feedback_of(model, ids):
        q, k = (F.normalize(x, dim=-1) for x in (given.q, given.k))
        found.append(given.beta * ((k * k).sum(-1) + given.lamb * (k * q).sum(-1)))
    return torch.stack(found)


def test_negative_eigenvalues_cannot_break_the_contraction(make_model, tokens):
    """Keys that are the queries, or their negatives, at a strength near 2: where a feedback doubled as in the release
    leaves (0, 2), the guard holds it within."""
    model, ids = make_model("qdelta", allow_neg_eigval=True, lamb_bias=-4.0), tokens(2, 20)
    for sign in (1, -1):
        for mixer in model.mixers():
            mixer.b_proj.weight.data.mul_(4)
            mixer.k_proj.weight.data.copy_(sign * mixer.q_proj.weight)
            mixer.k_conv1d.weight.data.copy_(mixer.q_conv1d.weight)
            mixer.k_conv1d.silu = mixer.q_conv1d.silu = False
            mixer.released = False
        held = contraction(model, ids)
        assert 0 <= held.min() < held.max() <= 2 + 1e-12
        for mixer in model.mixers():
            mixer.released = True
        as_released = contraction(model, ids)
        assert as_released.min() < 0 or as_released.max() > 2
    strengths = feedback_of(model, ids)[0].beta
    assert strengths.max() > 1.5


def test_the_release_doubles_strength_and_feedback(make_model, tokens):
    doubled = make_model("qdelta", allow_neg_eigval=True, compat="released")
    plain = make_model("qdelta", compat="released")
    plain.load_state_dict(doubled.state_dict())
    first, other = (feedback_of(model, tokens(1, 9))[0] for model in (doubled, plain))
    assert torch.equal(first.lamb, 2 * other.lamb)
    assert torch.equal(first.beta, 2 * other.beta)


# --- the release ----------------------------------------------------------------------------------------------------


def wave(*shape: int, step: float):
    count = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64)
    return torch.sin(step * count**1.01).view(shape)


def waved(model):
    """Weights that need no generator, large enough for every part to matter."""
    with torch.no_grad():
        for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
            w = wave(*parameter.shape, step=0.37 + 0.11 * index)
            if name.endswith("norm.weight"):
                w = 1 + 0.2 * w
            elif name.endswith("A_log"):
                w = w - 4
            elif parameter.ndim > 1:
                w = w * (1.5 / parameter.shape[-1] ** 0.5 if parameter.ndim == 2 else 0.7)
            parameter.copy_(w)
    return model.eval()


SIZES = {
    "hidden_size": 16, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": 40, "intermediate_size": 32,
    "head_dim": 16, "expand_v": 1.0, "pad_token_id": None,
}  # fmt: skip
RELEASED_FIELDS = {
    "allow_neg_eigval", "attn", "attn_mode", "bos_token_id", "conv_size", "eos_token_id", "expand_v",
    "fuse_cross_entropy", "fuse_linear_cross_entropy", "fuse_norm", "fuse_swiglu", "head_dim", "hidden_act",
    "hidden_ratio", "hidden_size", "initializer_range", "intermediate_size", "lamb_bias", "max_position_embeddings",
    "model_type", "norm_eps", "num_heads", "num_hidden_layers", "num_v_heads", "pad_token_id", "tie_word_embeddings",
    "use_cache", "use_gate", "use_l2warp", "use_short_conv", "vocab_size",
}  # fmt: skip


@torch.no_grad()
def test_compat_released_is_the_released_model():
    """Golden: logits of the released model (commit 4afe5b5, on fla 0.6) in triton 3.7.1's interpreter, two chunks.

    Its largest difference to ours was 9e-6 of the largest logit, 3.67; the paper's recurrence gives other logits.
    """
    model = waved(QDeltaForCausalLM(QDeltaConfig(compat="released", **SIZES))).double()
    ids = (torch.arange(70) * 7 % 40)[None]
    logits = model(ids).logits[0]
    golden = {(0, 0): 1.333648, (5, 11): 0.981471, (40, 39): 2.823584, (63, 3): -0.740618, (64, 20): -2.340948,
              (69, 7): 0.943178}  # fmt: skip
    for place, value in golden.items():
        assert float(logits[place]) == pytest.approx(value, abs=1e-4)
    right = waved(QDeltaForCausalLM(QDeltaConfig(**SIZES))).double()
    assert relative_error(right(ids).logits[0], logits) > 0.05


def test_a_config_has_the_released_fields_and_a_released_checkpoint_loads(tmp_path):
    """The released 340M model's config as it is published, at a smaller width: every field is known."""
    assert set(QDeltaConfig().to_dict()) >= RELEASED_FIELDS
    published = {
        "attn_mode": "chunk", "bos_token_id": 1, "conv_size": 4, "eos_token_id": 2, "expand_v": 2,
        "fuse_cross_entropy": True, "head_dim": 16, "hidden_act": "swish", "hidden_ratio": 4, "hidden_size": 16,
        "initializer_range": 0.02, "intermediate_size": None, "model_type": "qdelta", "norm_eps": 1e-06,
        "num_heads": 6, "num_hidden_layers": 2, "tie_word_embeddings": False, "use_cache": True, "use_gate": True,
        "use_short_conv": True, "lamb_bias": 0.9, "vocab_size": 40,
    }  # fmt: skip
    model = QDeltaForCausalLM(QDeltaConfig(**published))
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(published))
    again, report = QDeltaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    mixer = {
        name.removeprefix("model.layers.0.attn."): tuple(parameter.shape)
        for name, parameter in again.named_parameters()
        if name.startswith("model.layers.0.attn.")
    }
    assert mixer == {
        "A_log": (6,), "dt_bias": (6,), "q_proj.weight": (96, 16), "k_proj.weight": (96, 16),
        "v_proj.weight": (192, 16), "g_proj.weight": (192, 16), "a_proj.weight": (6, 16), "b_proj.weight": (6, 16),
        "lamb_proj.weight": (6, 16), "o_proj.weight": (16, 192), "o_norm.weight": (32,),
        "q_conv1d.weight": (96, 1, 4), "k_conv1d.weight": (96, 1, 4), "v_conv1d.weight": (192, 1, 4),
    }  # fmt: skip


@torch.no_grad()
def test_the_releases_chunks_count_tokens_not_padding(make_model, tokens):
    """Left padding would move the borders of chunks of positions, and change what the release computes."""
    model, ids = make_model("qdelta", compat="released", lamb_bias=-1.0), tokens(2, 90)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    mask[1, 40:45] = 0
    padded = model(ids, attention_mask=mask).logits
    for row in range(2):
        real = mask[row].bool()
        assert relative_error(padded[row, real], model(ids[row : row + 1, real]).logits[0]) < EXACT


@torch.no_grad()
def test_a_released_model_goes_on_from_its_cache_by_the_recurrence(make_model, tokens):
    """As the release's own kernel does at one token a call, so its steps are not what its prompts are."""
    model, ids = make_model("qdelta", compat="released", lamb_bias=-1.0), tokens(1, 71)
    held = model(ids[:, :70], use_cache=True).get(_CACHE_FIELD)
    step = model(ids[:, 70:], cache=held.copy(), use_cache=True).logits
    whole = model(ids).logits[:, -1:]
    for mixer in model.mixers():
        mixer.released = False
    assert relative_error(model(ids[:, 70:], cache=held, use_cache=True).logits, step) < EXACT
    assert relative_error(step, whole) > 1e-3


def test_kernels_that_do_not_compute_it_are_refused(make_model):
    model = make_model("qdelta", compat="released")
    for kernel in ("reference", "fla"):
        with pytest.raises(ModelError, match="cannot run here"):
            model.set_kernel(kernel)
    model.set_kernel("chunked")
    assert model.kernel_choice(70).name == "chunked"


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"compat": "paper"}, "compat = 'paper'"), ({"lamb_fixed": 1.5}, "lamb_fixed = 1.5"),
     ({"lamb_fixed": -0.1}, "lamb_fixed")],
    ids=["compat", "above", "below"],
)  # fmt: skip
def test_what_is_not_here_is_refused_by_name(make_model, changes, message):
    with pytest.raises(ModelError, match=message):
        make_model("qdelta", **changes)
