"""The delta rule on a GPU: fla's kernels against the recurrence, and the PyTorch form compiled and captured."""

import importlib
import itertools

import pytest
import torch

from lapkernels._triton import is_hopper, triton_version
from lapkernels.delta_rule import delta_rule, select_impl, why_not
from lapkernels.testing import (
    DeltaRuleInputs,
    assert_as_precise,
    delta_rule_inputs,
    output_state_and_gradients,
    precisions,
    relative_error,
    transition_recurrence,
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


def run(inputs: DeltaRuleInputs, **options):
    return delta_rule(**inputs.tensors(), output_final_state=True, **options)


def skip_unless_fla(inputs: DeltaRuleInputs, *, needs_gradient: bool) -> None:
    why = why_not(
        "fla",
        "cuda",
        inputs.q.dtype,
        key_width=inputs.q.shape[-1],
        gated=inputs.g is not None,
        erasing=inputs.erase is not None or inputs.lamb is not None,
        needs_gradient=needs_gradient,
    )
    if why is not None:
        pytest.skip(why)


def assert_fla_is_right(inputs: DeltaRuleInputs) -> None:
    """Forward: as near the fp64 recurrence as a recurrence that rounds what a bf16 kernel must round."""
    narrow = inputs.to(BF16)
    skip_unless_fla(narrow, needs_gradient=False)
    with torch.no_grad():
        actual = run(narrow.to(device="cuda"), impl="fla")
        truth, plain = transition_recurrence(narrow), transition_recurrence(narrow, rounding=BF16)
    names = ("output", "final_state")
    assert actual.final_state.dtype == torch.float32
    assert_as_precise(
        dict(zip(names, actual, strict=True)),
        dict(zip(names, truth, strict=True)),
        dict(zip(names, plain, strict=True)),
        BF16,
    )


@pytest.mark.parametrize("time", [8, 130], ids=["short", "chunks"])
@pytest.mark.parametrize("gate", [None, 0.3], ids=["ungated", "gated"])
@pytest.mark.parametrize("value_heads", [2, 4], ids=["HV=H", "HV=2H"])
def test_fla_forward(time, gate, value_heads):
    assert_fla_is_right(
        delta_rule_inputs(time=time, gate=gate, value_heads=value_heads, key_width=64, value_width=128, state=True)
    )


@pytest.mark.parametrize(
    ("key_width", "value_width"),
    [(32, 128), (60, 64), (64, 128), (96, 128), (100, 64), (128, 64)],
    ids=lambda width: str(width),
)
def test_fla_forward_at_other_widths(key_width, value_width):
    assert_fla_is_right(delta_rule_inputs(time=130, gate=0.3, key_width=key_width, value_width=value_width, state=True))


@pytest.mark.parametrize("erase", ["key", "value"], ids="erase_{}".format)
@pytest.mark.parametrize("gate", [None, 0.3], ids=["ungated", "gated"])
def test_fla_forward_with_an_erase_direction(erase, gate):
    assert_fla_is_right(
        delta_rule_inputs(time=130, gate=gate, value_heads=4, key_width=64, value_width=64, state=True, erase=erase)
    )


@pytest.mark.parametrize("value_heads", [2, 4], ids=["HV=H", "HV=2H"])
@pytest.mark.parametrize("gate", [None, 0.3], ids=["ungated", "gated"])
def test_fla_forward_with_query_feedback(gate, value_heads):
    assert_fla_is_right(
        delta_rule_inputs(
            time=130, gate=gate, value_heads=value_heads, key_width=64, value_width=64, state=True, feedback=True
        )
    )


@pytest.mark.parametrize("key_width", [60, 96, 100], ids="K{}".format)
def test_fla_reads_nothing_beside_the_gate(key_width):
    """Case 1: the gate lies right before 1e30."""
    inputs = delta_rule_inputs(batch=1, time=65, key_width=key_width, value_width=64).to(BF16, "cuda")
    skip_unless_fla(inputs, needs_gradient=False)
    buffer = torch.full((inputs.g.numel() + 4096,), 1e30, device="cuda")
    buffer[: inputs.g.numel()] = inputs.g.flatten()
    beside = DeltaRuleInputs(inputs.q, inputs.k, inputs.v, inputs.beta, buffer[: inputs.g.numel()].view_as(inputs.g))
    with torch.no_grad():
        expected, actual = run(inputs, impl="fla"), run(beside, impl="fla")
    assert torch.equal(actual.output, expected.output)
    assert torch.equal(actual.final_state, expected.final_state)


@pytest.mark.parametrize("short", [True, False], ids=["short", "chunks"])
def test_fla_with_packed_sequences(short):
    bounds = [0, 5, 21, 22, 60] if short else [0, 70, 71, 200]
    inputs = delta_rule_inputs(
        batch=1, time=bounds[-1], gate=0.3, key_width=64, value_width=64, state=True, sequences=len(bounds) - 1
    ).to(BF16, "cuda")
    skip_unless_fla(inputs, needs_gradient=False)
    with torch.no_grad():
        packed = run(inputs, impl="fla", cu_seqlens=torch.tensor(bounds))
        for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
            alone = run(inputs.time_slice(start, stop, inputs.initial_state[n : n + 1]), impl="fla")
            # Two of fla's kernels may serve the two calls: each rounds its output, and little else.
            allowed = 4 * torch.finfo(BF16).eps
            assert relative_error(packed.output[:, start:stop], alone.output) < allowed
            assert relative_error(packed.final_state[n : n + 1], alone.final_state) < allowed


@pytest.mark.parametrize("gate", [None, 0.3], ids=["ungated", "gated"])
@pytest.mark.parametrize(
    "mixing", [{}, {"erase": "value"}, {"feedback": True}], ids=["plain", "erase_value", "feedback"]
)
def test_fla_backward(gate, mixing):
    narrow = delta_rule_inputs(time=130, gate=gate, key_width=64, value_width=128, state=True, **mixing).to(BF16)
    skip_unless_fla(narrow, needs_gradient=True)
    assert_as_precise(
        actual=output_state_and_gradients(lambda x: run(x, impl="fla"), narrow.to(device="cuda")),
        truth=output_state_and_gradients(transition_recurrence, narrow.to(torch.float64)),
        yardstick=output_state_and_gradients(
            lambda x: transition_recurrence(x, rounding=BF16), narrow.to(torch.float64)
        ),
        dtype=BF16,
        terms=64,
    )


def test_what_is_miscompiled_is_seen(monkeypatch):
    """Case 14: where fla refuses its own gated backward pass, the measure that ours are held to finds it wrong.

    Otherwise this measure would say nothing of kernels that the same compiler made (`test_delta_rule_triton_gpu.py`).
    """
    chunk_o = pytest.importorskip("fla.ops.common.chunk_o")
    version = triton_version()
    assert version is not None
    if not is_hopper() or not (3, 4) <= version < (3, 7, 1):
        pytest.skip("triton compiles it right here")
    # It would refuse, or leave it to tilelang.
    monkeypatch.setattr(chunk_o, "IS_NVIDIA_HOPPER", False)
    monkeypatch.setenv("FLA_TILELANG", "0")
    kernel = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

    def by_fla(x):
        return kernel(x.q, x.k, x.v, x.g, x.beta, initial_state=x.initial_state, output_final_state=True)

    bad = set()
    # Neither is what FlashQLA takes.
    for key_width in (64, 96):
        narrow = delta_rule_inputs(
            time=200, value_heads=2, key_width=key_width, value_width=128, state=True, gate=0.1
        ).to(BF16)
        wide = narrow.to(torch.float64)
        actual = output_state_and_gradients(by_fla, narrow.to(device="cuda"))
        truth = output_state_and_gradients(transition_recurrence, wide)
        plain = output_state_and_gradients(lambda x: transition_recurrence(x, rounding=BF16), wide)
        bad |= {each.name for each in precisions(actual, truth, plain, BF16, terms=64) if not each.holds}
    assert bad
    assert all(name.startswith("d") for name in bad), bad


@pytest.mark.parametrize(
    ("key_width", "value_width"), [(32, 128), (64, 128), (96, 128), (128, 64)], ids=lambda width: str(width)
)
def test_chunked_forward_and_backward_in_fp32(key_width, value_width):
    """Case 2, on this device."""
    narrow = delta_rule_inputs(
        time=130, value_heads=4, key_width=key_width, value_width=value_width, state=True, erase="value"
    ).to(torch.float32)
    assert_as_precise(
        actual=output_state_and_gradients(lambda x: run(x, impl="chunked"), narrow.to(device="cuda")),
        truth=output_state_and_gradients(transition_recurrence, narrow.to(torch.float64)),
        yardstick=output_state_and_gradients(lambda x: run(x, impl="reference"), narrow.to(device="cuda")),
        dtype=torch.float32,
        terms=64,
    )


def test_chunked_captured_in_a_cuda_graph():
    inputs = delta_rule_inputs(time=130, value_heads=4, key_width=64, value_width=64, state=True)
    inputs = inputs.to(torch.float32, "cuda")
    other = delta_rule_inputs(time=130, value_heads=4, key_width=64, value_width=64, state=True, seed=5)
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run(inputs, impl="chunked")
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(inputs, impl="chunked")
        for name, tensor in inputs.tensors().items():
            tensor.copy_(other.tensors()[name])
        graph.replay()
        torch.cuda.synchronize()
        eager = run(inputs, impl="chunked")
    assert torch.equal(captured.output, eager.output)
    assert torch.equal(captured.final_state, eager.final_state)


def test_chunked_compiled_whole():
    inputs = delta_rule_inputs(time=256, value_heads=4, key_width=64, value_width=64).to(torch.float32)
    compiled = torch.compile(
        lambda q, k, v, beta, g: tuple(run(DeltaRuleInputs(q, k, v, beta, g), impl="chunked")),
        fullgraph=True,
        dynamic=False,
    )
    assert_as_precise(
        actual=output_state_and_gradients(lambda x: compiled(x.q, x.k, x.v, x.beta, x.g), inputs.to(device="cuda")),
        truth=output_state_and_gradients(transition_recurrence, inputs.to(torch.float64)),
        yardstick=output_state_and_gradients(lambda x: run(x, impl="reference"), inputs.to(device="cuda")),
        dtype=torch.float32,
        terms=64,
    )


def test_auto_says_and_runs_the_same():
    """What `select_impl` names is what `auto` gives, to the bit."""
    inputs = delta_rule_inputs(time=200, key_width=64, value_width=64).to(BF16, "cuda")
    for needs_gradient in (False, True):
        choice = select_impl("cuda", BF16, key_width=64, time=200, gated=True, needs_gradient=needs_gradient)
        at_hand = inputs.requiring_grad() if needs_gradient else inputs
        assert torch.equal(run(at_hand).output, run(at_hand, impl=choice.name).output)
