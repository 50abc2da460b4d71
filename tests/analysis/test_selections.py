"""Conditioning, overlap and filters, counted by hand."""

import math

import pytest
import torch

from lapcli.analysis.filters import filter_magnitudes, kept_and_dropped
from lapcli.analysis.selections import conditioning, overlap
from lapcli.families.loading import load_model, resolve_model
from lapcli.families.registry import family_for
from lapcli.testing.models import tiny_gated_deltanet
from lapcli.testing.stock_models import lay_convolutions, tiny_stock_model


def test_conditioning_of_the_kept_columns():
    activations = torch.randn(2, 40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gram, kept = activations.mT @ activations, torch.tensor([[0, 3, 5], [1, 2, 4]])
    for found, columns in (
        (conditioning(gram), activations),
        (
            conditioning(gram, kept),
            torch.stack([rows[:, channels] for rows, channels in zip(activations, kept, strict=True)]),
        ),
    ):
        values = torch.linalg.svdvals(columns)
        wanted = torch.stack((values[:, -1], values[:, 0], values[:, 0] / values[:, -1]), -1)
        assert torch.allclose(found, wanted, rtol=1e-10)


def test_a_channel_that_is_always_zero_has_a_finite_kappa():
    found = conditioning(torch.diag(torch.tensor([4.0, 1.0, 0.0], dtype=torch.float64))[None])[0]
    assert found[:2].tolist() == [0.0, 2.0]
    assert found[2].item() == pytest.approx(1 / math.sqrt(3 * 2.0**-52))
    assert conditioning(torch.zeros(1, 2, 2, dtype=torch.float64)).isfinite().all()


def test_overlap_by_hand():
    first, second = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]]), torch.tensor([[2, 3, 4], [5, 6, 7]])
    # Two of {0, 1, 2, 3, 4}; none of seven.
    assert overlap(first, second).tolist() == [[2.0, 0.4], [0.0, 0.0]]
    assert overlap(first, first).tolist() == [[4.0, 1.0]] * 2


def taps_in_memory(model, layer, side):
    """`[H, K, W]` of a loaded Gated DeltaNet."""
    convolution = model.get_submodule(f"{layer.mixer}.{side[0]}_conv1d")
    return convolution.weight.detach().double().abs().view(layer.heads, layer.key_width, -1)


def test_filters_are_those_of_the_model(tmp_path):
    source = resolve_model(str(tiny_gated_deltanet(tmp_path / "model")))
    family, model = family_for(source.config), load_model(source)
    for layer in family.layers(source.config):
        found = filter_magnitudes(source, family, layer)
        assert found.keys() == {"key", "query"}
        for side, taps in found.items():
            assert torch.equal(taps, taps_in_memory(model, layer, side))
    kept = torch.arange(2).repeat(2, 1)
    means = kept_and_dropped(found, kept)["key"]
    assert torch.allclose(means[0], found["key"][:, :2].mean(1))
    assert torch.allclose(means[1], found["key"][:, 2:].mean(1))


@pytest.mark.parametrize("fused", [True, False, None], ids=["one", "as-released", "equal-thirds"])
def test_filters_of_convolutions_that_are_cut_anywhere(fused, tmp_path):
    folder = tiny_stock_model("olmo_hybrid", tmp_path / "model")
    if fused is not None:
        lay_convolutions(folder, fused=fused)
    source = resolve_model(str(folder))
    family, model = family_for(source.config), load_model(source)
    layer = family.layers(source.config)[0]
    whole = model.get_submodule(f"{layer.mixer}.conv1d").weight.detach().double().abs().squeeze(1)
    keys = layer.heads * layer.key_width
    for number, side in enumerate(("query", "key")):
        wanted = whole[number * keys : (number + 1) * keys].view(layer.heads, layer.key_width, -1)
        assert torch.equal(filter_magnitudes(source, family, layer)[side], wanted)


def test_a_model_without_convolutions_has_none(tmp_path):
    source = resolve_model(str(tiny_gated_deltanet(tmp_path / "model", use_short_conv=False)))
    family = family_for(source.config)
    assert filter_magnitudes(source, family, family.layers(source.config)[0]) == {}
