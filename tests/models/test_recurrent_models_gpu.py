"""The models on a GPU, against fla's own classes and against themselves in fp64."""

import importlib
import warnings

import pytest
import torch

from lapcli.models import (
    DeltaNetConfig,
    DeltaNetForCausalLM,
    GatedDeltaNetConfig,
    GatedDeltaNetForCausalLM,
    QDeltaConfig,
    QDeltaForCausalLM,
)
from lapkernels.delta_rule import why_not
from lapkernels.testing import assert_as_precise, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # fla, triton and inductor warn about themselves.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

BF16 = torch.bfloat16
SIZES = {
    "hidden_size": 128, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": 256, "intermediate_size": 256,
    "pad_token_id": 0,
}  # fmt: skip
KINDS = {
    "gdn": (GatedDeltaNetConfig, GatedDeltaNetForCausalLM, {"head_dim": 64, "expand_v": 2.0}),
    "gdn_gva_K48": (
        GatedDeltaNetConfig,
        GatedDeltaNetForCausalLM,
        {"head_dim": 48, "expand_v": 64 / 48, "num_v_heads": 4},
    ),
    "gdn_no_output_gate_negative": (
        GatedDeltaNetConfig,
        GatedDeltaNetForCausalLM,
        {"head_dim": 64, "expand_v": 1.0, "use_gate": False, "allow_neg_eigval": True},
    ),
    "delta": (DeltaNetConfig, DeltaNetForCausalLM, {}),
    "delta_elu_sum_gate": (
        DeltaNetConfig,
        DeltaNetForCausalLM,
        {"qk_activation": "elu", "qk_norm": "sum", "use_gate": True},
    ),
    "qdelta_gva": (QDeltaConfig, QDeltaForCausalLM, {"head_dim": 64, "expand_v": 1.0, "num_v_heads": 4}),
}


@pytest.fixture(params=KINDS)
def model(request):
    config_class, model_class, changes = KINDS[request.param]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
    # Rounded once, so that every copy below has the same numbers whatever its dtype.
    return model.to(BF16).float().eval()


def copy_of(model, device, dtype, kernel="auto"):
    twin = type(model)(model.config).to(device, dtype).eval()
    twin.load_state_dict(model.state_dict())
    twin.set_kernel(kernel)
    return twin


def fla_copy(model, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fla = pytest.importorskip("fla.models")
    if not hasattr(fla, type(model).__name__):
        pytest.skip(f"fla has no {type(model).__name__}")
    config = getattr(fla, type(model.config).__name__)(**model.config.to_dict())
    theirs = getattr(fla, type(model).__name__)(config)
    theirs.load_state_dict(model.state_dict())
    return theirs.to("cuda", dtype).eval()


def draw(rows, length):
    return torch.randint(1, 256, (rows, length), generator=torch.Generator().manual_seed(0))


def results(model, ids, **arguments):
    device = next(model.parameters()).device
    arguments = {name: value.to(device) for name, value in arguments.items()}
    with torch.no_grad():
        return {"logits": model(ids.to(device), use_cache=False, **arguments).logits}


@pytest.mark.parametrize("length", [40, 200], ids=["short", "chunks"])
@pytest.mark.parametrize("padded", [False, True], ids=["full_rows", "left_padded"])
def test_logits_are_flas(model, length, padded):
    """fla's own model is as near our fp64 logits as our own bf16 model is, and ours through fla's kernels too."""
    ids = draw(2, length)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :9] = 0
    real = mask.bool()

    def logits(network):
        found = results(network, ids, attention_mask=mask)["logits"]
        return {"logits": found.cpu()[real]}

    truth = logits(copy_of(model, "cpu", torch.float64))
    plain = logits(copy_of(model, "cuda", BF16, "reference"))
    assert_as_precise(logits(copy_of(model, "cuda", BF16, "chunked")), truth, plain, BF16)
    assert_as_precise(logits(copy_of(model, "cuda", BF16, "auto")), truth, plain, BF16)
    if not isinstance(model, QDeltaForCausalLM):  # of which fla has no model
        assert_as_precise(logits(fla_copy(model, BF16)), truth, plain, BF16)


def test_gradients_are_flas(model):
    why = why_not(
        "fla",
        "cuda",
        BF16,
        key_width=model.mixers()[0].shape.key_width,
        gated=model.mixers()[0].gated,
        erasing=model.mixers()[0].erasing,
        needs_gradient=True,
    )
    if why is not None:
        pytest.skip(why)
    ids = draw(2, 200)

    def gradients(network):
        device = next(network.parameters()).device
        network.train()
        network(ids.to(device), labels=ids.to(device)).loss.backward()
        return {name: parameter.grad for name, parameter in network.named_parameters()}

    # fla has no Q-Delta, but its kernels run ours.
    theirs = copy_of(model, "cuda", BF16, "fla") if isinstance(model, QDeltaForCausalLM) else fla_copy(model, BF16)
    # Sums over the 64 rounded products of a chunk stand where the recurrence has steps.
    assert_as_precise(
        gradients(theirs),
        gradients(copy_of(model, "cpu", torch.float64)),
        gradients(copy_of(model, "cuda", BF16, "chunked")),
        BF16,
        terms=64,
    )


PACKED = {"rows": {}, "packed": {"cu_seqlens": torch.tensor([0, 7, 200, 201, 400])}}


def loss_and_gradients(network, ids, autocast=False, **where):
    device = next(network.parameters()).device
    network.train()
    with torch.autocast(device.type, BF16, enabled=autocast):
        loss = network(ids.to(device), labels=ids.to(device), **where).loss
    loss.backward()
    gradients = {name: each.grad for name, each in network.named_parameters() if each.grad is not None}
    return {"loss": loss.detach(), **gradients}


@pytest.fixture
def launches(monkeypatch):
    """How often the small operators' kernels ran with gradients."""
    counts = dict.fromkeys(("short_conv.triton_autograd.short_conv_triton", "norm.triton_autograd.rms_norm_triton",
                            "norm.triton_autograd.swiglu_triton"), 0)  # fmt: skip
    for name in counts:
        module, _, function = f"lapkernels.{name}".rpartition(".")
        right = getattr(importlib.import_module(module), function)

        def counted(*args, name=name, right=right):
            counts[name] += 1
            return right(*args)

        monkeypatch.setattr(f"lapkernels.{name}", counted)
    return counts


@pytest.mark.parametrize("where", PACKED)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_training_by_small_kernels_is_training_in_pytorch(model, where, autocast, launches, monkeypatch):
    """Loss and gradients through the kernels of convolutions, norms and SwiGLU are as near fp64 as without them."""
    ids = draw(1, 400) if PACKED[where] else draw(2, 200)
    truth = loss_and_gradients(copy_of(model, "cpu", torch.float64), ids, **PACKED[where])
    kernels = loss_and_gradients(copy_of(model, "cuda", torch.float32, "chunked"), ids, autocast, **PACKED[where])
    # Of each of two layers three convolutions, three norms and an activation, and the last norm.
    assert list(launches.values()) == [6, 7, 2]
    for module in ("norms", "decoder", "convolution"):
        monkeypatch.setattr(f"lapcli.models.{module}.by_one_kernel", lambda *_: False)
    plain = loss_and_gradients(copy_of(model, "cuda", torch.float32, "chunked"), ids, autocast, **PACKED[where])
    assert list(launches.values()) == [6, 7, 2]
    # In bf16, as for the delta rule alone, sums stand over the rounded products of a chunk, and in fp32 those of the
    # tokens that a weight's gradient adds up, too.
    rounding, terms = (BF16, 64) if autocast else (torch.float32, 64 * 400)
    assert_as_precise(kernels, truth, plain, rounding, terms)


def test_small_kernels_beside_frozen_weights_and_under_checkpointing(model, launches):
    """As LoRA leaves the small weights, and as blocks are computed again: the other gradients are the same."""
    ids, network = draw(2, 200), copy_of(model, "cuda", torch.float32, "chunked")
    wanted = loss_and_gradients(network, ids)
    network.zero_grad()
    for name, parameter in network.named_parameters():
        parameter.requires_grad_("norm" not in name and "conv1d" not in name)
    network.gradient_checkpointing_enable()
    found = loss_and_gradients(network, ids)
    # Twice what lies within blocks, and once more where it is computed again.
    assert list(launches.values()) == [3 * 6, 3 * 6 + 2, 3 * 2]
    assert not any("norm" in name or "conv1d" in name for name in found)
    for name, each in found.items():
        assert relative_error(each, wanted[name]) < 400**0.5 * 64 * torch.finfo(torch.float32).eps, name


def test_fp32_on_the_gpu_is_fp64_on_the_cpu(model):
    ids = draw(2, 200)
    truth = results(copy_of(model, "cpu", torch.float64), ids)
    plain = results(copy_of(model, "cuda", torch.float32, "reference"), ids)
    assert_as_precise(results(copy_of(model, "cuda", torch.float32), ids), truth, plain, torch.float32, terms=64)


@torch.no_grad()
def test_cached_decoding_through_fla(model):
    """A prompt in chunks, then steps: the states that fla hands over are in our layout."""
    ids = draw(2, 100).cuda()
    network = copy_of(model, "cuda", BF16)
    truth = results(copy_of(model, "cpu", torch.float64), ids.cpu())["logits"]
    plain = results(copy_of(model, "cuda", BF16, "reference"), ids)["logits"]
    cache, parts = None, []
    for start, stop in ((0, 90), (90, 97), (97, 98), (98, 99), (99, 100)):
        output = network(ids[:, start:stop], past_key_values=cache, use_cache=True)
        cache = output["cache" if "cache" in output else "past_key_values"]
        parts.append(output.logits)
    assert_as_precise({"logits": torch.cat(parts, 1)}, {"logits": truth}, {"logits": plain}, BF16)


def test_generate_on_the_gpu(model):
    network = copy_of(model, "cuda", torch.float32)
    ids = draw(2, 20).cuda()
    ids[0, :5] = 0
    arguments = {"attention_mask": (ids != 0).long(), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(
        network.generate(ids, use_cache=True, **arguments), network.generate(ids, use_cache=False, **arguments)
    )


def test_training_step_compiled_whole(model):
    """As the demo model is trained: no graph break, gradients as without compilation."""
    network = copy_of(model, "cuda", torch.float32, "chunked").train()
    ids = draw(2, 256).cuda()
    parameters = list(network.parameters())
    expected = torch.autograd.grad(network(ids, labels=ids).loss, parameters)
    # torch 2.11's fusion of sums over rows with sums over columns fails on the norms' gradients, or sums wrongly.
    compiled = torch.compile(network, fullgraph=True, dynamic=False, options={"triton.mix_order_reduction": False})
    actual = torch.autograd.grad(compiled(ids, labels=ids).loss, parameters)
    for (name, _), a, b in zip(network.named_parameters(), actual, expected, strict=True):
        # Two orders of summation in fp32 over 512 tokens.
        assert relative_error(a, b) < 512**0.5 * 64 * torch.finfo(torch.float32).eps, name
