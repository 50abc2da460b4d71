"""Two-layer models of width 16, in fp64, of every kind that the two families know."""

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

FAMILIES = {
    "gated_deltanet": (GatedDeltaNetConfig, GatedDeltaNetForCausalLM),
    "delta_net": (DeltaNetConfig, DeltaNetForCausalLM),
    "qdelta": (QDeltaConfig, QDeltaForCausalLM),
}
VARIANTS = {
    "gdn": ("gated_deltanet", {}),
    "gdn_gva_no_output_gate": ("gated_deltanet", {"num_v_heads": 4, "use_gate": False}),
    "gdn_no_conv_negative": (
        "gated_deltanet",
        {"use_short_conv": False, "allow_neg_eigval": True, "output_gate_activation": "sigmoid"},
    ),
    "gdn_tied_wide_conv": ("gated_deltanet", {"tie_word_embeddings": True, "conv_size": 7}),
    "delta": ("delta_net", {}),
    "delta_elu_sum_gate": ("delta_net", {"qk_activation": "elu", "qk_norm": "sum", "use_gate": True}),
    "delta_relu_no_beta": ("delta_net", {"qk_activation": "relu", "use_beta": False, "use_short_conv": False}),
    "delta_shared_filters": ("delta_net", {"head_shared_conv": True}),
    "delta_identity_negative": ("delta_net", {"qk_activation": "identity", "allow_neg_eigval": True}),
    "qdelta": ("qdelta", {}),
    "qdelta_gva_fixed_no_output_gate": ("qdelta", {"num_v_heads": 4, "use_gate": False, "lamb_fixed": 0.8}),
    "qdelta_negative_no_decay": ("qdelta", {"allow_neg_eigval": True, "use_decay": False}),
}


def _config(family: str, changes: dict):
    width = {"expand_k": 0.75, "expand_v": 1.25} if family == "delta_net" else {"head_dim": 6, "expand_v": 1.5}
    sizes = {
        "hidden_size": 16, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": 40, "intermediate_size": 24,
        "pad_token_id": 0,
    }  # fmt: skip
    return FAMILIES[family][0](**(sizes | width | changes))


@pytest.fixture
def make_config():
    """Builds a small configuration of a family, with changes."""
    return lambda family, **changes: _config(family, changes)


@pytest.fixture
def make_model():
    """Builds a small model in fp64, with matrices of N(0, 1/fan_in), large enough for every part to matter."""

    def make(family: str, seed: int = 0, **changes):
        torch.manual_seed(seed)
        model = FAMILIES[family][1](_config(family, changes))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0, parameter[0].numel() ** -0.5)
        return model.double().eval()

    return make


@pytest.fixture(params=VARIANTS)
def variant(request):
    """Family and changes of each kind of model, one after the other."""
    return VARIANTS[request.param]


@pytest.fixture
def model(make_model, variant):
    """A small model of each kind, one after the other."""
    family, changes = variant
    return make_model(family, **changes)


@pytest.fixture
def tokens():
    """Random token ids `[rows, length]`, none of them the padding."""

    def draw(rows: int, length: int, seed: int = 0):
        return torch.randint(1, 40, (rows, length), generator=torch.Generator().manual_seed(seed))

    return draw
