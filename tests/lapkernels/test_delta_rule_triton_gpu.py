"""The chunked Triton kernels, compiled."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

if torch.cuda.is_available():
    from lapkernels.delta_rule.triton_launch import Tiles
    from lapkernels.testing import delta_rule_inputs
    from lapkernels.testing_chunks import (
        CASES,
        CHANNEL_CASES,
        CHANNEL_GATES,
        RAW_GATES,
        check,
        check_channels,
        check_equal_channels,
        check_many_rows,
        check_norm,
        check_packed,
        check_poisoned,
        check_raw_gates,
        check_repeated_keys,
        check_strong_decay,
        check_strong_decay_of_channels,
        check_tiles,
        check_zeros,
        compare,
        run,
    )
else:
    CASES = CHANNEL_CASES = CHANNEL_GATES = RAW_GATES = {}

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@DTYPES
@pytest.mark.parametrize("name", CASES)
def test_against_the_recurrence(name, dtype):
    check(name, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize("key_width", [32, 48, 64, 96, 128, 192, 256], ids="K{}".format)
def test_widths(key_width, dtype):
    """Case 2; several chunks, which is where the compilers of triton 3.4 to 3.7.0 went wrong for others (case 14)."""
    inputs = delta_rule_inputs(time=200, value_heads=4, key_width=key_width, value_width=128, state=True, gate=0.1)
    compare(inputs.to(dtype), "cuda")


@DTYPES
@pytest.mark.parametrize(
    ("key_width", "value_width"), [(64, 64), (64, 256), (64, 512), (128, 64), (256, 512)], ids=lambda width: str(width)
)
def test_value_widths(key_width, value_width, dtype):
    """Cases 2 and 15: narrower and wider values than keys."""
    inputs = delta_rule_inputs(batch=1, time=130, key_heads=1, key_width=key_width, value_width=value_width, gate=0.1)
    compare(inputs.to(dtype), "cuda")


@DTYPES
@pytest.mark.parametrize("name", CHANNEL_CASES)
def test_decays_of_channels_against_the_recurrence(name, dtype):
    check_channels(name, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize("key_width", [32, 48, 64, 96, 128, 192, 256], ids="K{}".format)
def test_widths_with_decays_of_channels(key_width, dtype):
    inputs = delta_rule_inputs(
        time=200, value_heads=4, key_width=key_width, value_width=128, state=True, gate=0.1, by_channel=True
    )
    compare(inputs.to(dtype), "cuda")


@DTYPES
@pytest.mark.parametrize(
    ("key_width", "value_width"), [(64, 64), (64, 256), (64, 512), (128, 64), (256, 512)], ids=lambda width: str(width)
)
def test_value_widths_with_decays_of_channels(key_width, value_width, dtype):
    inputs = delta_rule_inputs(
        batch=1, time=130, key_heads=1, key_width=key_width, value_width=value_width, gate=1.0, by_channel=True
    )
    compare(inputs.to(dtype), "cuda")


@DTYPES
@pytest.mark.parametrize("key_width", [192, 256], ids="K{}".format)
def test_wide_erase_directions(key_width, dtype):
    """Three operands of the walks, which take the most shared memory there is."""
    inputs = delta_rule_inputs(
        time=130, value_heads=4, key_width=key_width, value_width=128, state=True, gate=0.1, erase="value"
    )
    compare(inputs.to(dtype), "cuda")


@DTYPES
@pytest.mark.parametrize(("block", "q_late"), [(16, False), (32, False), (64, False), (128, False), (64, True)])
def test_tiles(block, q_late, dtype):
    check_tiles(Tiles(block, 4, 2, q_late), dtype, "cuda")


@DTYPES
@pytest.mark.parametrize("by_channel", [False, True], ids=["a_head", "a_channel"])
@pytest.mark.parametrize("key_width", [16, 64, 96, 128], ids="K{}".format)
def test_the_normalisation(key_width, by_channel, dtype):
    check_norm(key_width, dtype, "cuda", by_channel=by_channel)


@DTYPES
@pytest.mark.parametrize(
    "property_",
    [
        check_packed, check_zeros, check_strong_decay, check_repeated_keys, check_strong_decay_of_channels,
        check_equal_channels,
    ]
    if CASES
    else [],
    ids=lambda check: check.__name__,
)  # fmt: skip
def test_properties(property_, dtype):
    property_(dtype, "cuda")


@DTYPES
def test_packed_sequences_with_decays_of_channels(dtype):
    check_packed(dtype, "cuda", by_channel=True)


@DTYPES
@pytest.mark.parametrize("name", [*RAW_GATES, *CHANNEL_GATES])
def test_gates_before_their_activations(name, dtype):
    check_raw_gates(name, dtype, "cuda")


@pytest.mark.parametrize("key_width", [20, 60, 96, 100], ids="K{}".format)
@pytest.mark.parametrize("by_channel", [False, True], ids=["a_head", "a_channel"])
def test_neighbours_do_not_reach_the_result(key_width, by_channel):
    check_poisoned(torch.bfloat16, "cuda", key_width, by_channel=by_channel)


def test_more_rows_times_heads_than_a_grid_axis_counts():
    """Case 16: 66000 states."""
    check_many_rows(33000, torch.bfloat16, "cuda")


def test_states_of_more_than_2_to_the_31_numbers():
    """Case 16: 8224 x 16 states of 128 x 128, forward and backward."""
    if torch.cuda.mem_get_info()[0] < 64 * 2**30:
        pytest.skip("needs 64 GiB of GPU memory")
    check_many_rows(8224, torch.bfloat16, "cuda", value_heads=16, width=128)


def test_captured_in_a_cuda_graph():
    inputs = delta_rule_inputs(time=130, value_heads=4, key_width=64, value_width=64, state=True)
    inputs = inputs.to(torch.bfloat16, "cuda")
    other = delta_rule_inputs(time=130, value_heads=4, key_width=64, value_width=64, state=True, seed=5)
    with torch.no_grad():
        run(inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(inputs)
        for name, tensor in inputs.tensors().items():
            tensor.copy_(other.tensors()[name])
        graph.replay()
        torch.cuda.synchronize()
        eager = run(inputs)
    assert torch.equal(captured.output, eager.output)
    assert torch.equal(captured.final_state, eager.final_state)
