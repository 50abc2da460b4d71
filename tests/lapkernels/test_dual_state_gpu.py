"""Gated states on a GPU: fla's chunked GLA with all states in one call, against the sum over all pairs in fp64."""

import itertools

import pytest
import torch

from lapkernels.dual_state import dual_state, select_impl, why_not
from lapkernels.testing import assert_as_precise, output_state_and_gradients, relative_error
from lapkernels.testing_dual import (
    DualStateInputs,
    check_dual_step,
    dual_state_inputs,
    rounding_recurrence,
    sum_over_pairs,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # fla and triton warn about deprecations of their own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _true_fp32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def run(inputs: DualStateInputs, **options):
    return dual_state(**inputs.tensors(), output_final_state=True, **options)


def skip_unless_fla() -> None:
    why = why_not("fla", "cuda", BF16, needs_gradient=True)
    if why is not None:
        pytest.skip(why)


@pytest.mark.parametrize("states", [1, 2, 4], ids="states{}".format)
@pytest.mark.parametrize("time", [8, 130], ids="T{}".format)
@pytest.mark.parametrize("query_heads", [2, 6], ids=["HQ=H", "HQ=3H"])
def test_fla_forward(query_heads, time, states):
    skip_unless_fla()
    inputs = dual_state_inputs(
        time=time, query_heads=query_heads, states=states, key_width=64, value_width=64, gate=0.1, state=True
    ).to(BF16)
    with torch.no_grad():
        actual = run(inputs.to(device="cuda"), impl="fla")
    names = ("output", "final_state")
    assert_as_precise(
        dict(zip(names, actual, strict=True)),
        dict(zip(names, sum_over_pairs(inputs), strict=True)),
        dict(zip(names, rounding_recurrence(inputs, BF16), strict=True)),
        BF16,
    )


@pytest.mark.parametrize("query_heads", [2, 6], ids=["HQ=H", "HQ=3H"])
def test_fla_backward(query_heads):
    """Gradients as near fp64 as those of a recurrence that rounds; those of shared heads are summed."""
    skip_unless_fla()
    inputs = dual_state_inputs(
        time=130, query_heads=query_heads, key_width=64, value_width=64, gate=0.1, state=True
    ).to(BF16)
    exact = inputs.to(torch.float64)
    truth = output_state_and_gradients(sum_over_pairs, exact)
    yardstick = output_state_and_gradients(lambda x: rounding_recurrence(x, BF16), exact)
    actual = output_state_and_gradients(lambda x: run(x, impl="fla"), inputs.to(device="cuda"))
    # A chunk's products have as many rounded summands as the chunk is long.
    assert_as_precise(actual, truth, yardstick, BF16, terms=64)


def test_fla_takes_packed_sequences():
    skip_unless_fla()
    bounds = [0, 5, 70, 71, 150]
    inputs = (
        dual_state_inputs(
            batch=1, time=150, query_heads=4, key_width=64, value_width=64, gate=0.1, state=True, sequences=4
        )
        .to(BF16)
        .to(device="cuda")
    )
    with torch.no_grad():
        packed = run(inputs, impl="fla", cu_seqlens=torch.tensor(bounds))
        for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
            alone = run(inputs.time_slice(start, stop, inputs.initial_state[n : n + 1]), impl="fla")
            assert relative_error(packed.output[:, start:stop], alone.output) < 2**-7
            assert relative_error(packed.final_state[n : n + 1], alone.final_state) < 2**-7


def test_fla_is_what_auto_takes_in_half_precision():
    skip_unless_fla()
    assert select_impl("cuda", BF16, time=100, needs_gradient=True).name == "fla"
    assert select_impl("cuda", torch.float32, time=100).name == "chunked"


def test_the_chunked_form_on_a_gpu():
    inputs = dual_state_inputs(time=70, query_heads=4, state=True)
    truth = output_state_and_gradients(sum_over_pairs, inputs)
    actual = output_state_and_gradients(lambda x: run(x, impl="chunked"), inputs.to(device="cuda"))
    for name, right in truth.items():
        assert relative_error(actual[name], right) < 1e-12, name


@pytest.mark.parametrize("at_once", [1, 3], ids="T{}".format)
@pytest.mark.parametrize("state_dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize(
    ("states", "query_heads", "key_width", "value_width"),
    [(2, 2, 64, 64), (2, 6, 64, 64), (1, 2, 128, 128), (4, 4, 48, 96), (8, 2, 100, 33)],
    ids=lambda x: str(x),
)
def test_decode_step(states, query_heads, key_width, value_width, dtype, state_dtype, at_once):
    check_dual_step(
        "triton", dtype, "cuda", state_dtype=state_dtype, at_once=at_once, states=states, query_heads=query_heads,
        key_width=key_width, value_width=value_width,
    )  # fmt: skip
