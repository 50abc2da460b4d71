"""How layers are compared: entropies against whole maps, outliers by hand, replacing one layer after the other."""

import math

import pytest
import torch
from scipy.stats import spearmanr

from lapcli.errors import UsageError
from lapcli.families.remote.lapcli_dual_state import DualStateSettings
from lapcli.linearising.sensitivity import (
    OUTLIER,
    entropies,
    look_at_attention,
    mean_loss,
    one_by_one,
    order_of,
    rank_correlations,
)
from lapcli.linearising.settings import check_order, layers_of
from lapcli.linearising.watching import attention_of, watched
from lapcli.testing.dual_state import tiny_teacher

IDS = torch.randint(3, 60, (3, 130), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "phi"])
@pytest.mark.parametrize("rows", ["last", "all"])
def test_entropy_is_that_of_the_whole_map(model_type, rows):
    """Grouped heads, more rows than are made at once; the maps are the library's own."""
    model = tiny_teacher(model_type)
    found = look_at_attention(model, IDS, rows=rows, batch=2)["entropy"]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(input_ids=IDS, output_attentions=True, use_cache=False).attentions
    assert found.shape == (3, 4)
    for layer, weights in enumerate(maps):
        weights = weights.double()
        whole = -(weights * weights.clamp(min=1e-300).log()).sum(-1)
        if rows == "last":
            expected = whole[:, :, -1].mean(0)
        else:
            expected = (whole[:, :, 1:] / torch.arange(2, 131).log()).mean((0, 2))
        # Softmax in fp32 on both sides.
        torch.testing.assert_close(found[layer], expected, rtol=1e-4, atol=1e-5)


def test_entropy_knows_a_sliding_window():
    model = tiny_teacher("mistral", sliding_window=8)
    found = look_at_attention(model, IDS, rows="all")["entropy"]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(input_ids=IDS, output_attentions=True, use_cache=False).attentions
    weights = maps[1].double()
    whole = -(weights * weights.clamp(min=1e-300).log()).sum(-1)
    seen = torch.arange(2, 131).clamp(max=8)
    torch.testing.assert_close(found[1], (whole[:, :, 1:] / seen.log()).mean((0, 2)), rtol=1e-4, atol=1e-5)
    assert (found <= 1 + 1e-5).all()


def test_entropies_have_the_sign_that_the_paper_s_equation_lacks():
    assert entropies(torch.tensor([0.5, 0.5, 0.0])).item() == pytest.approx(math.log(2))
    assert entropies(torch.tensor([1.0, 0.0])).item() == 0


def test_outliers_are_counted_by_token():
    model = tiny_teacher("llama")
    with torch.no_grad():
        # One channel of one layer's output stands out, in some tokens by enough.
        model.model.layers[1].self_attn.o_proj.weight[5] *= 30
    found = look_at_attention(model, IDS, rows="last")["outlier"]
    with torch.no_grad(), watched(model, 1) as seen:
        model(input_ids=IDS, use_cache=False)
    output = seen.outputs[0].abs()
    expected = (output > OUTLIER * output.square().mean(-1, keepdim=True).sqrt()).double().mean()
    # 32 channels: sqrt(32) < 6, so not even one channel alone can stand out by six.
    assert expected == found[1] == 0
    wide = tiny_teacher("llama", hidden_size=64, num_attention_heads=4)
    with torch.no_grad():
        wide.model.layers[1].self_attn.o_proj.weight[5] *= 100
        wide.model.layers[1].self_attn.o_proj.bias[5] *= 100
    found = look_at_attention(wide, IDS, rows="last")["outlier"]
    with torch.no_grad(), watched(wide, 1) as seen:
        wide(input_ids=IDS, use_cache=False)
    output = seen.outputs[0].abs()
    expected = (output > OUTLIER * output.square().mean(-1, keepdim=True).sqrt()).double().mean()
    assert found[1] == pytest.approx(expected.item())
    assert found[1] > 0
    assert found[0] == 0


@pytest.mark.parametrize("change", [{}, {"window": 12}], ids=["states", "window"])
def test_each_layer_alone_and_the_teacher_as_before(change):
    model = tiny_teacher("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    settings = DualStateSettings(**change)
    values, whole = one_by_one(model, lambda m: mean_loss(m, IDS), settings, IDS[:1], seed=3, title="layers")
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert type(attention_of(model, 0)).__name__ == "LlamaAttention"
    assert whole == pytest.approx(mean_loss(model, IDS, batch=3), rel=1e-6)
    assert len(set(values.tolist())) == 3
    assert all(value != whole for value in values.tolist())
    again, _ = one_by_one(model, lambda m: mean_loss(m, IDS), settings, IDS[:1], seed=3, title="layers")
    assert torch.equal(values, again)


def test_the_loss_is_the_library_s():
    model = tiny_teacher("llama")
    with torch.no_grad():
        expected = model(input_ids=IDS, labels=IDS, use_cache=False).loss.item()
    assert mean_loss(model, IDS, batch=2) == pytest.approx(expected, rel=1e-6)


def test_the_least_minded_comes_first_and_of_equals_the_later():
    assert order_of(torch.tensor([3.0, 1.0, 2.0, 1.0])) == [3, 1, 2, 0]


def test_rank_correlations_are_spearman_s():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(9, generator=generator), torch.randint(0, 4, (9,), generator=generator)
    found = rank_correlations({"a": a, "b": b, "same": torch.ones(9), "minus": -a})
    assert found["a ~ b"] == pytest.approx(spearmanr(a, b).statistic)
    assert found["a ~ minus"] == pytest.approx(-1)
    assert math.isnan(found["a ~ same"])
    assert len(found) == 6


@pytest.mark.parametrize(
    ("fraction", "count", "number"),
    [
        ("0.25", 32, 8),
        ("0.125", 24, 3),
        ("0.375", 30, 11),
        ("0.5", 3, 2),
        ("0.01", 6, 1),
        ("1", 6, 6),
        ("1.0", 6, 6),
        ("37.5%", 30, 11),
        (" 100% ", 6, 6),
    ],
)
def test_fractions_are_the_decimals_that_were_typed(fraction, count, number):
    assert layers_of(fraction, count) == number


@pytest.mark.parametrize("fraction", ["-0.5", "a half", "nan", "inf", "", "%", "-1%", "half%"])
def test_what_is_no_fraction_is_refused(fraction):
    with pytest.raises(UsageError, match="no number above 0"):
        layers_of(fraction, 8)


def test_no_layer_and_more_than_all_are_refused():
    for fraction in ("0", "0%"):
        with pytest.raises(UsageError, match="none of the layers"):
            layers_of(fraction, 8)
    for fraction, hint in (
        ("25", "did you mean 0.25, or 25%?"), ("130%", None), ("100.1%", None), ("1e9", None)
    ):  # fmt: skip
        with pytest.raises(UsageError, match="more than all of the layers") as caught:
            layers_of(fraction, 8)
        assert caught.value.hint == hint


def test_orders_that_there_are():
    for order in ("entropy", "loss", "outlier", "task:wikitext", "first"):
        check_order(order)
    for order in ("entropie", "task:", "last"):
        with pytest.raises(ValueError, match="none of"):
            check_order(order)
