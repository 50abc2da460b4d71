"""A checkpoint and its configuration go to fla and back unchanged: fields, defaults, names, shapes, refusals."""

import json
import math
import warnings

import pytest
import torch
from transformers import AutoConfig

from lapcli.models import DeltaNetConfig, DeltaNetForCausalLM, GatedDeltaNetConfig, GatedDeltaNetForCausalLM
from lapcli.models.delta_net import delta_net_shape
from lapcli.models.gated_deltanet import gated_deltanet_shape

# fla advises against what one of the variants asks for.
pytestmark = pytest.mark.filterwarnings("ignore:\\s*ShortConvolution is crucial:UserWarning")


@pytest.fixture(scope="module")
def fla():
    with warnings.catch_warnings():
        # fla says at its import that there is no GPU.
        warnings.filterwarnings("ignore", message="Triton is not supported on current platform")
        return pytest.importorskip("fla.models")


@pytest.fixture
def variant(variant):
    """Those kinds of models that fla knows."""
    if variant[0] == "qdelta":
        pytest.skip("fla has no Q-Delta")
    if "head_shared_conv" in variant[1]:
        pytest.skip("an option of ours, which fla does not have")
    return variant


def pair(fla, ours):
    """fla's class of the same name."""
    return getattr(fla, ours.__name__)


def stored(config) -> dict:
    return json.loads(config.to_json_string(use_diff=False))


@pytest.mark.parametrize("config_class", [GatedDeltaNetConfig, DeltaNetConfig], ids=lambda c: c.model_type)
def test_fields_and_defaults(fla, config_class):
    assert stored(config_class()) == stored(pair(fla, config_class)())
    assert config_class.model_type == pair(fla, config_class).model_type


def test_configurations_go_both_ways(fla, make_config, variant, tmp_path):
    family, changes = variant
    ours = make_config(family, **changes)
    ours.save_pretrained(tmp_path)
    theirs = pair(fla, type(ours)).from_pretrained(tmp_path)
    assert stored(theirs) == stored(ours)
    theirs.save_pretrained(tmp_path)
    assert stored(type(ours).from_pretrained(tmp_path)) == stored(ours)


def test_names_and_shapes_of_parameters(fla, model):
    theirs = pair(fla, type(model))(pair(fla, type(model.config))(**stored(model.config)))
    ours = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert ours == {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in theirs.named_parameters()}


def test_checkpoints_go_both_ways(fla, model, tmp_path):
    """Files too: what one library writes the other loads, with the same key set and the same numbers."""
    model = model.float()
    model.save_pretrained(tmp_path / "ours")
    their_class = pair(fla, type(model))
    theirs, report = their_class.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    theirs.save_pretrained(tmp_path / "theirs")
    again = type(model).from_pretrained(tmp_path / "theirs")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_filters_that_a_head_shares_are_refused_by_fla_until_they_are_written_out(fla, make_model, tokens, tmp_path):
    model = make_model("delta_net", head_shared_conv=True).float()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["head_shared_conv"] is True
    theirs = pair(fla, type(model))
    with pytest.raises(RuntimeError, match="mismatched"):
        theirs.from_pretrained(tmp_path)

    written_out = {
        name: tensor.repeat_interleave(6, 0) if name.endswith(("q_conv1d.weight", "k_conv1d.weight")) else tensor
        for name, tensor in model.state_dict().items()
    }
    plain = make_model("delta_net").float()
    theirs(pair(fla, type(model.config))(**stored(plain.config))).load_state_dict(written_out)
    plain.load_state_dict(written_out)
    ids = tokens(2, 30)
    assert torch.equal(plain(ids).logits, model(ids).logits)


@pytest.mark.parametrize("value_width", [64, 128, 256, 512], ids="V{}".format)
def test_value_widths_survive_any_kept_key_width(value_width):
    """Case 12: V over K' does not always multiply back to V; the float above it does."""
    plain_fails = 0
    for key_width in range(1, 256):
        quotient = value_width / key_width
        plain_fails += int(key_width * quotient) != value_width
        if int(key_width * quotient) != value_width:
            quotient = math.nextafter(quotient, math.inf)
        config = GatedDeltaNetConfig(head_dim=key_width, expand_v=quotient, num_heads=1)
        assert gated_deltanet_shape(config).value_width == value_width
    assert plain_fails > 0


def test_widths_follow_fla_on_odd_factors(fla):
    from fla.layers import DeltaNet, GatedDeltaNet

    for head_dim, expand_v in ((89, 128 / 89), (6, 1.5), (100, 0.64)):
        theirs = GatedDeltaNet(hidden_size=8, head_dim=head_dim, expand_v=expand_v, num_heads=1)
        config = GatedDeltaNetConfig(hidden_size=8, head_dim=head_dim, expand_v=expand_v, num_heads=1)
        shape = gated_deltanet_shape(config)
        assert (shape.key_width, shape.value_width) == (theirs.head_k_dim, theirs.head_v_dim)
    for factor in (89 / 128, 0.1 + 0.2, 0.7):
        hidden = {89 / 128: 128, 0.1 + 0.2: 10, 0.7: 10}[factor]
        theirs = DeltaNet(hidden_size=hidden, expand_k=factor, num_heads=1)
        shape = delta_net_shape(DeltaNetConfig(hidden_size=hidden, expand_k=factor, num_heads=1))
        assert shape.key_width == theirs.head_k_dim


def test_ours_are_not_registered_with_transformers():
    """fla registers the same names, and a second registration would be an error of one of the two."""
    for config_class in (GatedDeltaNetConfig, DeltaNetConfig):
        try:
            found = type(AutoConfig.for_model(config_class.model_type))
        except ValueError:
            continue
        assert found is not config_class
    assert GatedDeltaNetForCausalLM.config_class is GatedDeltaNetConfig
    assert DeltaNetForCausalLM.config_class is DeltaNetConfig
