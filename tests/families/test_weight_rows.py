"""Weight statistics and saliency are those of the rows that each head has, wherever a packed projection holds them."""

import pytest
import torch
import torch.nn.functional as F

from lapcli.data import token_blocks
from lapcli.families.loading import load_model, load_tokenizer
from lapcli.families.source import resolve_model
from lapcli.machine import Machine
from lapcli.recipe import CalibrationSettings
from lapcli.reporting import SilentReporter
from lapcli.stages.calibration import calibrate
from lapcli.testing.slices import layers_of
from lapcli.testing.stock_models import tiny_stock_model

WIDTH = 32
SETTINGS = CalibrationSettings(data="builtin", samples=3, seq_len=64)
# The first row of each of two heads. Qwen3.5: [q, k, v]. Qwen3-Next, for each key head: q and k, then v and z of two
# value heads of 24 channels each, 160 rows. Mamba-2: z and x, 128 rows each, then B and C, one after the other.
LAYOUTS = {
    "qwen3_5": ({}, "model.layers.0.linear_attn.in_proj_qkv.weight", {"query": (0, 32), "key": (64, 96)}),
    "qwen3_next": ({}, "model.layers.0.linear_attn.in_proj_qkvz.weight", {"query": (0, 160), "key": (32, 192)}),
    "mamba2": ({"n_groups": 2}, "backbone.layers.0.mixer.in_proj.weight", {"key": (256, 288), "query": (320, 352)}),
}


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_statistics_are_those_of_rows_indexed_by_hand(model_type, tmp_path):
    config, name, firsts = LAYOUTS[model_type]
    source = resolve_model(str(tiny_stock_model(model_type, tmp_path / "base", **config)))
    assert layers_of(source)[0].index == 0
    found, _worked = calibrate(
        source, SETTINGS, tmp_path / "calibration.safetensors", machine=Machine(device="cpu"), saliency=True
    )
    ids = token_blocks(
        SETTINGS.data,
        load_tokenizer(source),
        samples=SETTINGS.samples,
        seq_len=SETTINGS.seq_len,
        seed=SETTINGS.seed,
        reporter=SilentReporter(),
    ).ids
    model = load_model(source)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    weight = model.get_parameter(name)
    assert weight.grad is not None
    magnitudes = weight.detach().double().abs()
    saliencies = (weight * weight.grad).detach().double().abs()
    norms = found.tensor("layers.0.input_sq").sqrt()
    for side, rows in firsts.items():
        for head, first in enumerate(rows):
            mine = slice(first, first + WIDTH)
            for statistic, wanted, bound in (
                ("magnitude", magnitudes[mine].sum(1), 1e-12),
                ("wanda", (magnitudes[mine] * norms).sum(1), 1e-12),
                # Another order of a sum of a few hundred fp32 products.
                ("saliency", saliencies[mine].sum(1), 1e-3),
            ):
                made = found.tensor(f"layers.0.{statistic}_{side}")[head]
                torch.testing.assert_close(made, wanted, rtol=bound, atol=bound * wanted.max().item(), msg=statistic)
