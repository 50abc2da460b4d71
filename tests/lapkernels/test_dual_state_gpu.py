"""Gated states on a GPU: fla's chunked GLA with all states in one call, against the sum over all pairs in fp64."""

import itertools

import pytest
import torch

from lapkernels.dual_state import dual_state, select_impl, why_not
from lapkernels.testing import assert_as_precise, output_state_and_gradients, relative_error
from lapkernels.testing_dual import DualStateInputs, check_dual_step, dual_state_inputs, sum_over_pairs

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


def rounded(inputs: DualStateInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel that multiplies in bf16 has to round: states as they are read, shares in q, and the output."""
    shares = (inputs.q.double().unsqueeze(3) * inputs.mixture.double()[:, None]).to(BF16).double()
    outputs, state = [], inputs.initial_state.double()
    heads = inputs.k.shape[2]
    for t in range(inputs.q.shape[1]):
        g, k, v = (x[:, t].double() for x in (inputs.g, inputs.k, inputs.v))
        state = g.exp().unsqueeze(-1) * state + k[:, None, :, :, None] * v[:, None, :, None, :]
        q = shares[:, t].unflatten(1, (heads, -1)) * inputs.q.shape[3] ** -0.5
        outputs.append(torch.einsum("bhrak,bahkv->bhrv", q, state.to(BF16).double()).flatten(1, 2))
    return torch.stack(outputs, 1).to(BF16).double(), state


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
        dict(zip(names, rounded(inputs), strict=True)),
        BF16,
    )


@pytest.mark.parametrize("query_heads", [2, 6], ids=["HQ=H", "HQ=3H"])
def test_fla_backward(query_heads):
    """Gradients within what bf16 products of this many terms may lose, and those of shared heads summed."""
    skip_unless_fla()
    inputs = dual_state_inputs(
        time=130, query_heads=query_heads, key_width=64, value_width=64, gate=0.1, state=True
    ).to(BF16)
    truth = output_state_and_gradients(sum_over_pairs, inputs.to(torch.float64))
    actual = output_state_and_gradients(lambda x: run(x, impl="fla"), inputs.to(device="cuda"))
    for name, right in truth.items():
        found = actual[name].double().cpu()
        assert found.isfinite().all(), name
        # A bf16 product rounds its operands: 2^-8 each, some of them twice; in the root mean square, not the largest.
        assert (found - right).norm() < 4 * 2**-8 * right.norm(), name


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
