"""The script that makes `demo:transformer`: its size, and that training runs the function that is stored."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import lapcli

sys.path.append(str(Path(lapcli.__file__).resolve().parents[1] / "scripts"))

from demo_gdn.corpus import MODERN
from demo_transformer.card import write_card
from demo_transformer.modelling import TRANSFORMER, demo_config

ROOT = Path(lapcli.__file__).resolve().parents[1]
IDS = torch.randint(0, 500, (2, 30), generator=torch.Generator().manual_seed(0))


def test_it_is_small_enough_for_the_repository_and_about_the_size_of_the_other():
    with torch.device("meta"):
        model = LlamaForCausalLM(demo_config(None, 4096, length=1024, tiny=False))
    size = 2 * sum(parameter.numel() for parameter in model.parameters())
    other = (ROOT / "lapcli" / "demo" / "gdn" / "model.safetensors").stat().st_size
    assert size < 14e6
    assert size == pytest.approx(other, rel=0.05)


def test_what_is_trained_is_what_is_stored(tmp_path):
    device = torch.device("cpu")
    model = TRANSFORMER.fresh(demo_config(None, 500, length=256, tiny=True), device, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        hidden = TRANSFORMER.network(model, compiled=False, device=device).hidden(IDS)
        expected = model.model(input_ids=IDS, use_cache=False).last_hidden_state
    # The library's own masks and positions, sums in fp32.
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)
    TRANSFORMER.save(model, tmp_path)
    stored = LlamaForCausalLM.from_pretrained(tmp_path)
    assert stored.dtype == torch.bfloat16
    for name, tensor in TRANSFORMER.stored(model).items():
        assert torch.equal(stored.state_dict()[name], tensor), name


def test_every_parameter_is_somebody_s():
    model = TRANSFORMER.fresh(demo_config(None, 500, length=256, tiny=True), torch.device("cpu"), 0)
    optimiser = TRANSFORMER.optimiser(model, torch.device("cpu"), muon_rate=0.02, adam_rate=0.003)
    assert {id(p) for p in optimiser.parameters} == {id(p) for p in model.parameters()}


def test_the_card_says_what_the_log_says(tmp_path):
    log = {
        "parameters": 6_360_320, "tokens": 5e7, "steps": 700, "training_seconds": 400.0, "device": "a GPU",
        "settings": {"length": 1024, "minutes": 9.0}, "builtin_python": "3.11.7", "generated_recall": 0.5,
        "final": {"books_valid_ppl": 23.45},
        "data": {
            "tokens": dict.fromkeys(("books", *MODERN), 1_000_000),
            "paragraphs_dropped_for_heldout_builtin": {"books": 3},
        },
        "mixture": {
            "text_weights": dict.fromkeys(("books", *MODERN), 0.2),
            "recall_share_by_progress": [[0.0, 0.1], [1.0, 0.3]],
        },
    }  # fmt: skip
    write_card(tmp_path, log, demo_config(None, 4096, length=1024, tiny=False), modern=MODERN)
    text = (tmp_path / "README.md").read_text()
    for said in (
        "6.4 M parameters",
        "| books_valid_ppl | 23.45 |",
        "8 of 16 prompts",
        "about 20% of all rows",
        "3 of them",
        "**Its window is 1024 tokens**",
    ):
        assert said in text, said
    assert "{" not in text
