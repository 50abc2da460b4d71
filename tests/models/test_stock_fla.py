"""Logits of stock fla's own models, run on the CPU by Triton's interpreter: an oracle that shares no code with ours."""

import json

import pytest

from lapcli.testing.interpreter import run_interpreted

PROGRAM = """
import json, sys
import torch
import fla.models
import lapcli.models

for name, changes in json.load(sys.stdin).values():
    widths = {"head_dim": 16, "expand_v": 1.5} if name == "GatedDeltaNet" else {}
    sizes = dict(hidden_size=32, num_heads=2, num_hidden_layers=2, vocab_size=64, intermediate_size=48)
    config = getattr(lapcli.models, name + "Config")(**{**sizes, **widths, **changes})
    torch.manual_seed(0)
    ours = getattr(lapcli.models, name + "ForCausalLM")(config).eval()
    # Where Triton interprets, a kernel of ours could run as well.
    ours.set_kernel("chunked")
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
    stock = getattr(fla.models, name + "Config")(**json.loads(config.to_json_string(use_diff=False)))
    theirs = getattr(fla.models, name + "ForCausalLM")(stock).eval()
    theirs.load_state_dict(ours.state_dict())
    # Twice as long as the convolutions' filters.
    ids = torch.randint(0, 64, (2, 8))
    with torch.no_grad():
        found, wanted = (model(ids, use_cache=False).logits for model in (ours, theirs))
    print(json.dumps(((found - wanted).abs().max() / wanted.abs().max()).item()))
"""

VARIANTS = {
    "gated": ("GatedDeltaNet", {}),
    "gated-gva-no-output-gate": ("GatedDeltaNet", {"num_v_heads": 4, "use_gate": False}),
    "gated-no-conv-negative-sigmoid": (
        "GatedDeltaNet",
        {"use_short_conv": False, "allow_neg_eigval": True, "output_gate_activation": "sigmoid"},
    ),
    "gated-tied": ("GatedDeltaNet", {"tie_word_embeddings": True}),
    "delta": ("DeltaNet", {}),
    "delta-elu-sum-gate": ("DeltaNet", {"qk_activation": "elu", "qk_norm": "sum", "use_gate": True}),
    "delta-relu-no-beta-no-conv": (
        "DeltaNet",
        {"qk_activation": "relu", "use_beta": False, "use_short_conv": False},
    ),
    "delta-identity-negative": ("DeltaNet", {"qk_activation": "identity", "allow_neg_eigval": True}),
}


@pytest.fixture(scope="module")
def errors():
    lines = run_interpreted(PROGRAM, given=VARIANTS).splitlines()
    found = [json.loads(line) for line in lines[-len(VARIANTS) :]]
    return dict(zip(VARIANTS, found, strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_stock_fla(errors, variant):
    # Two fp32 evaluations in another order of sums: the bound that prefill against decode has.
    assert errors[variant] < 2e-5
