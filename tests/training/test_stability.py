"""The watch over `beta k.x`: right figures, of tokens alone, whatever is around the model, and without a trace."""

import pytest
import torch

from lapcli.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM, QDeltaConfig, QDeltaForCausalLM
from lapcli.training import stability
from lapcli.training.stability import stability_of

SIZES = {
    "hidden_size": 16, "num_heads": 2, "num_v_heads": 4, "num_hidden_layers": 2, "vocab_size": 40,
    "intermediate_size": 24, "head_dim": 6, "expand_v": 1.5, "pad_token_id": 0,
}  # fmt: skip
IDS = torch.randint(1, 40, (2, 30), generator=torch.Generator().manual_seed(0))


def model_of(kind=QDeltaForCausalLM, config=QDeltaConfig, **changes):
    torch.manual_seed(0)
    model = kind(config(**(SIZES | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
    return model.double().eval()


def products_of(model, ids):
    """`beta k.x` by the plain formula, from hooks on the projections; `[L, B, T, HV]`."""
    found = []
    for mixer in model.mixers():
        seen = {}
        hooks = [mixer.tap.register_forward_hook(lambda _m, _a, out, seen=seen: seen.update(q=out[0], k=out[1]))]
        for name in ("b_proj", "lamb_proj"):
            layer = getattr(mixer, name)
            hooks.append(layer.register_forward_hook(lambda _m, _a, out, n=name, seen=seen: seen.update({n: out})))
        with torch.no_grad():
            model(ids, use_cache=False)
        for hook in hooks:
            hook.remove()
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (seen["q"], seen["k"]))
        q, k = (x.repeat_interleave(2, 2) for x in (q, k))
        lamb = torch.sigmoid(seen["lamb_proj"] - 0.9).unsqueeze(-1)
        found.append(torch.sigmoid(seen["b_proj"]) * (k * (k + lamb * q)).sum(-1))
    return torch.stack(found)


def test_figures_are_those_of_the_products():
    model = model_of()
    wanted = products_of(model, IDS)
    with stability_of(model) as watch, torch.no_grad():
        model(IDS[:, :10])
        model(IDS)
    for layer, products in enumerate(wanted):
        seen = torch.cat([products[:, :10].flatten(), products.flatten()])
        found = watch.layers()[layer]
        assert found.count == len(seen)
        # The first ten tokens of a row do not depend on the others.
        assert found.mean == pytest.approx(float(seen.mean()), rel=1e-12)
        for name, share in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
            assert getattr(found, name) == pytest.approx(float(seen.quantile(share)), rel=1e-9)
        assert (found.least, found.greatest) == pytest.approx((float(seen.min()), float(seen.max())), rel=1e-12)
        assert found.rho == pytest.approx(float((1 - seen).abs().max()), rel=1e-12)
        assert found.outside == 0
    assert watch.overall().count == 2 * (2 * 30 + 2 * 10) * 4
    figures = watch.figures()
    assert figures["contraction/mean"] == pytest.approx(watch.overall().mean)
    names = ("mean", "p01", "p50", "p99", "least", "greatest", "outside", "rho")
    assert set(figures) == {f"contraction/{name}" for name in names}


def test_a_share_outside_is_counted():
    """Strengths near 2 on keys that are the queries, with the feedback that the release would use."""
    model = model_of(allow_neg_eigval=True, lamb_bias=-3.0, compat="released")
    for mixer in model.mixers():
        mixer.b_proj.weight.data.mul_(10)
        mixer.k_proj.weight.data.copy_(mixer.q_proj.weight)
        mixer.k_conv1d.weight.data.copy_(mixer.q_conv1d.weight)
    with stability_of(model) as watch, torch.no_grad():
        model(IDS)
    found = watch.overall()
    assert 0 < found.outside < 1
    assert found.rho > 1
    assert found.greatest > 2


def test_padding_does_not_count():
    model, mask = model_of(), torch.ones_like(IDS)
    mask[0, :7] = 0
    with stability_of(model) as padded, torch.no_grad():
        model(IDS, attention_mask=mask)
    with stability_of(model) as alone, torch.no_grad():
        model(IDS[:1, 7:])
        model(IDS[1:])
    assert padded.overall().count == alone.overall().count
    assert padded.overall().mean == pytest.approx(alone.overall().mean, rel=1e-10)
    assert padded.overall().least == pytest.approx(alone.overall().least, rel=1e-9)


def test_it_leaves_no_trace():
    """Results, gradients and checkpoints as without it, and nobody watches afterwards, not even after an error."""
    model = model_of().train()
    plain = torch.autograd.grad(model(IDS, labels=IDS).loss, list(model.parameters()))
    names = list(model.state_dict())
    with stability_of(model):
        watched = torch.autograd.grad(model(IDS, labels=IDS).loss, list(model.parameters()))
        assert list(model.state_dict()) == names
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    with pytest.raises(RuntimeError, match="mine"), stability_of(model):
        raise RuntimeError("mine")
    assert all(mixer.watch is None and not mixer.watched for mixer in model.mixers())


def test_one_within_another_is_undone_in_order():
    model = model_of()
    with stability_of(model) as outer, torch.no_grad():
        with stability_of(model) as inner:
            model(IDS)
        model(IDS[:, :5])
    assert inner.overall().count == 2 * IDS.numel() * 4
    assert outer.overall().count == 2 * 10 * 4


def test_without_feedback_it_is_beta_times_the_squared_key():
    model = model_of(GatedDeltaNetForCausalLM, GatedDeltaNetConfig)
    with stability_of(model) as watch, torch.no_grad():
        model(IDS)
    assert watch.overall().least > 0
    assert watch.overall().greatest < 1


# torch.compile makes an instance of each autograd function itself, against torch's own advice.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_block_is_watched():
    model = model_of(num_hidden_layers=1, use_short_conv=False)
    with stability_of(model) as plain, torch.no_grad():
        model(IDS, use_cache=False)
    for block in model.model.layers:
        block.forward = torch.compile(block.forward, dynamic=False, backend="eager")
    with torch.no_grad():
        before = model(IDS, use_cache=False).logits
        with stability_of(model) as watch:
            assert torch.equal(model(IDS, use_cache=False).logits, before)
        model(IDS, use_cache=False)
    assert watch.overall() == plain.overall()


def test_few_values_are_kept_of_many(monkeypatch):
    monkeypatch.setattr(stability, "_KEPT", 50)
    model = model_of()
    wanted = products_of(model, IDS)
    with stability_of(model) as watch, torch.no_grad():
        for _ in range(3):
            model(IDS)
    assert watch.overall().least == pytest.approx(float(wanted.min()), rel=1e-12)
    assert sum(len(part) for part in watch._sums[0].kept) <= 50


def test_nothing_to_watch_is_said():
    with pytest.raises(ValueError, match="no delta rule"), stability_of(torch.nn.Linear(2, 2)):
        pass
    with stability_of(model_of()) as watch:
        pass
    with pytest.raises(ValueError, match="no layer"):
        watch.figures()
