"""The decode step of Mamba-2: reference against the sum over all pairs of tokens, and the library's own layer."""

import pytest
import torch

from lapkernels.errors import InvalidInput, KernelUnavailable
from lapkernels.ssd_step import ConvState, allocate_state, select_impl, ssd_step
from lapkernels.testing_steps import SSD_CASES, check_ssd, ssd_step_case

F64 = torch.float64


@pytest.mark.parametrize("at_once", [1, 3], ids="T{}".format)
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SSD_CASES)
def test_steps_are_whole_sequences(name, dtype, at_once):
    check_ssd(name, "reference", dtype, at_once=at_once)


@pytest.mark.parametrize("value_major", [False, True], ids=["P contiguous", "N contiguous"])
def test_a_narrow_state_in_either_order(value_major):
    check_ssd("as in Mamba-2", "reference", torch.float32, state_dtype=torch.bfloat16, value_major=value_major)


@pytest.mark.parametrize("groups", [1, 2], ids="groups{}".format)
def test_the_library_decodes_the_same(groups):
    """transformers' Mamba-2 mixer, cached, token by token after its first."""
    from transformers import Mamba2Config
    from transformers.cache_utils import DynamicCache
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=16, num_heads=4, head_dim=8, state_size=12, n_groups=groups, conv_kernel=4, num_hidden_layers=1,
        chunk_size=4, use_bias=True, time_step_limit=(0.0, float("inf")),
    )  # fmt: skip
    torch.manual_seed(0)
    mixer = Mamba2Mixer(config, 0).float().eval()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        hidden = torch.randn(2, 6, 16)
        wanted = mixer(hidden)
        cache = DynamicCache(config=config)
        stepped = torch.cat([mixer(hidden[:, t : t + 1], cache=cache) for t in range(6)], dim=1)
        torch.testing.assert_close(stepped, wanted, rtol=1e-4, atol=1e-5)

        conv = ConvState.allocate(mixer.conv1d.weight, mixer.conv1d.bias, 2)
        state = allocate_state(2, 4, 8, 12)
        sizes = [32, 32, groups * 12, groups * 12, 4]
        for t in range(6):
            gate, x, B, C, dt = mixer.in_proj(hidden[:, t : t + 1]).split(sizes, dim=-1)
            out = ssd_step(
                x.unflatten(-1, (4, 8)), B.unflatten(-1, (groups, 12)), C.unflatten(-1, (groups, 12)), state,
                dt=dt, A_log=mixer.A_log, D=mixer.D, dt_bias=mixer.dt_bias, conv=conv, position=torch.full((2,), t),
                gate=gate.unflatten(-1, (4, 8)), norm_weight=mixer.norm.weight, norm_eps=mixer.norm.variance_epsilon,
            )  # fmt: skip
            torch.testing.assert_close(mixer.out_proj(out.flatten(2)), wanted[:, t : t + 1], rtol=1e-4, atol=1e-5)


def test_a_pool_has_the_fast_order():
    pool = allocate_state(2, 3, 4, 16, dtype=torch.bfloat16)
    assert pool.shape == (2, 3, 4, 16)
    assert pool.stride(2) == 1
    assert pool.nbytes == 2 * 3 * 4 * 16 * 2


def test_what_is_refused():
    case = ssd_step_case()
    for change, word in (
        ({"B": torch.zeros(3, 1, 3, 16, dtype=F64)}, "3 groups"),
        ({"C": torch.zeros(3, 1, 2, 15, dtype=F64)}, "C has shape"),
        ({"dt": torch.zeros(3, 1, 3, dtype=F64)}, "dt has shape"),
        ({"x": torch.zeros(3, 4, 8, dtype=F64)}, "four axes"),
        ({"x": torch.zeros(3, 1, 4, 8)}, "share a dtype"),
        ({"state": torch.zeros(3, 4, 16, 8, dtype=F64)}, r"\[slots, 4, 8, 16\]"),
        ({"norm_groups": 3}, "norm_groups is 3"),
        ({"norm_weight": torch.zeros(8)}, "norm_weight has shape"),
        ({"dt_limit": (1.0, 0.5)}, "dt_limit"),
        ({"rounding_seed": torch.tensor([1.0])}, "rounding_seed"),
        ({"impl": "magic"}, "magic"),
    ):
        given = {**case.tokens(0, 1), "state": case.state(3), "conv": case.conv(3), **case.constants(), **change}
        with pytest.raises(InvalidInput, match=word):
            ssd_step(**given, position=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(KernelUnavailable, match="fp64"):
        ssd_step(**case.tokens(0, 1), state=case.state(3), A_log=case.parameters["A_log"], impl="triton")
    assert select_impl("cpu", torch.float32).name == "reference"
