"""The kernels of decode steps, compiled: every case, awkward widths, many ways to cut them, graphs, large offsets."""

import pytest
import torch

from lapkernels.decoding.configs import StepConfig, choose_apart
from lapkernels.decoding.workspace import Workspace
from lapkernels.delta_step import allocate_state, delta_step
from lapkernels.norm import rms_norm, swiglu
from lapkernels.ssd_step import ssd_step
from lapkernels.testing_steps import (
    DELTA_CASES,
    SSD_CASES,
    check_delta,
    check_ssd,
    delta_step_case,
    ssd_step_case,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

F32, BF16 = torch.float32, torch.bfloat16
WAYS = {
    "the table's": None,
    "a tile a head, eight warps": StepConfig(8, 8, 1),
    "tile after tile": StepConfig(2, 1, 1),
    "programs that meet": StepConfig(2, 2, 4),
    "three kernels": StepConfig(2, 1, 1, apart=True),
    "three kernels, a tile a head": StepConfig(8, 1, 1, apart=True),
}


@pytest.mark.parametrize("at_once", [1, 3], ids="T{}".format)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "state_dtype"), [(F32, F32), (BF16, F32), (BF16, BF16)], ids=["32", "16", "16/16"])
@pytest.mark.parametrize("name", DELTA_CASES)
def test_delta_step(name, dtype, state_dtype, way, at_once):
    check_delta(name, "triton", dtype, "cuda", state_dtype=state_dtype, config=WAYS[way], at_once=at_once)


@pytest.mark.parametrize("at_once", [1, 3], ids="T{}".format)
@pytest.mark.parametrize("way", [way for way, config in WAYS.items() if config is None or not config.apart])
@pytest.mark.parametrize(("dtype", "state_dtype"), [(F32, F32), (BF16, F32), (BF16, BF16)], ids=["32", "16", "16/16"])
@pytest.mark.parametrize("name", SSD_CASES)
def test_ssd_step(name, dtype, state_dtype, way, at_once):
    check_ssd(name, "triton", dtype, "cuda", state_dtype=state_dtype, config=WAYS[way], at_once=at_once)


@pytest.mark.parametrize("state_dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    ("key_width", "value_width"),
    [(32, 128), (48, 128), (60, 96), (64, 512), (80, 128), (96, 128), (100, 128), (112, 128), (128, 128), (192, 512),
     (256, 512)],
    ids=lambda width: str(width),
)  # fmt: skip
def test_widths(key_width, value_width, state_dtype):
    """Case 1 and what pruning leaves, cut as a large batch is and as this small one is."""
    large = {32: StepConfig(128, 2, 1), 256: StepConfig(64, 8, 8)}.get(
        key_width, StepConfig(64, 4, -(-value_width // 64))
    )
    apart = [StepConfig(tile, 2, 1, apart=True) for tile in (8, 32)]
    apart.append(choose_apart(key_width, value_width, 4096, state_dtype.itemsize))
    for config in (None, large, large._replace(registers=128, evict="evict_first"), *apart):
        check_delta(
            "as in Gated DeltaNet", "triton", BF16, "cuda", state_dtype=state_dtype, config=config,
            key_width=key_width, value_width=value_width, key_heads=2, value_heads=4,
        )  # fmt: skip


@pytest.mark.parametrize("state_width", [16, 48, 64, 96, 128, 256], ids="N{}".format)
def test_state_widths(state_width):
    for value_major in (False, True):
        check_ssd(
            "as in Mamba-2", "triton", BF16, "cuda", value_major=value_major, state_width=state_width, head_width=64,
            heads=8, groups=2, norm_groups=2,
        )  # fmt: skip


def test_more_heads_than_a_grid_axis_has_room_for():
    """Case 16: batch x heads above 65535."""
    case = delta_step_case(batch=1, tokens=1, key_heads=1, value_heads=2, key_width=16, value_width=16, taps=None)
    case = case.to(F32, "cuda")
    rows = 40000
    state, alone = torch.full((rows, 2, 16, 16), 0.5, device="cuda"), torch.full((1, 2, 16, 16), 0.5, device="cuda")
    given = {name: x.expand(rows, *x.shape[1:]) for name, x in case.tokens(0, 1).items() if x is not None}
    for config in (StepConfig(16, 1, 1), StepConfig(4, 1, 4), StepConfig(8, 1, 1, apart=True)):
        out = delta_step(**given, **case.constants(), state=state, config=config)
        one = delta_step(**case.tokens(0, 1), **case.constants(), state=alone, config=config)
        assert torch.equal(out, one.expand_as(out))
        assert torch.equal(state, alone.expand_as(state))


def test_more_heads_of_mamba_than_a_grid_axis_has_room_for():
    """Case 16: the same of Mamba-2, with programs that meet for a norm over two heads."""
    case = ssd_step_case(batch=1, tokens=1, groups=1, heads=2, state_width=16, head_width=16, norm_groups=1, taps=None)
    case, rows = case.to(F32, "cuda"), 40000
    given = {name: x.expand(rows, *x.shape[1:]) for name, x in case.tokens(0, 1).items() if x is not None}
    state, alone = (torch.full((count, 2, 16, 16), 0.5, device="cuda") for count in (rows, 1))
    for config in (StepConfig(16, 1, 1), StepConfig(4, 1, 4)):
        out = ssd_step(**given, **case.constants(), state=state, config=config)
        one = ssd_step(**case.tokens(0, 1), **case.constants(), state=alone, config=config)
        assert torch.equal(out, one.expand_as(out))
        assert torch.equal(state, alone.expand_as(state))


def test_a_pool_of_mamba_above_2_to_the_31():
    """Case 16: rows at both ends of a pool of 2.3 G numbers, in the order that is allocated and in the library's."""
    slots, heads = 4400, 64
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of GPU memory")
    case = ssd_step_case(batch=2, tokens=1, groups=8, heads=heads, state_width=128, head_width=64, norm_groups=8)
    case = case.to(BF16, "cuda")
    ends, position = torch.tensor([slots - 1, 0], device="cuda"), torch.tensor([5, 7], device="cuda")
    for value_major in (False, True):
        pool, small = (case.state(n, BF16, value_major=value_major).zero_() for n in (slots, 2))
        convs = [case.conv(n) for n in (slots, 2)]
        for conv in convs:
            conv.inputs.fill_(0.25)
        start = torch.randn_like(small)
        pool[ends], small[:] = start, start
        outs = [
            ssd_step(**case.tokens(0, 1), **case.constants(), state=state, conv=conv, slots=where, position=position)
            for state, conv, where in ((pool, convs[0], ends), (small, convs[1], None))
        ]
        assert torch.equal(*outs)
        assert torch.equal(pool[ends], small)
        assert not pool[1 : slots - 1].any()
        del pool


@pytest.mark.parametrize("config", [None, StepConfig(64, 4, 1, apart=True)], ids=["table", "apart"])
def test_a_pool_above_2_to_the_31(config):
    """Case 16: rows at both ends of a pool of 2.3 G numbers."""
    slots, heads = 4400, 32
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of GPU memory")
    case = delta_step_case(batch=2, tokens=1, key_heads=16, value_heads=heads, key_width=128, value_width=128, taps=4)
    case = case.to(BF16, "cuda")
    pool, small = (allocate_state(n, heads, 128, 128, dtype=BF16, device="cuda") for n in (slots, 2))
    convs = [case.conv(n) for n in (slots, 2)]
    for conv in convs:
        conv.inputs.fill_(0.25)
    start = torch.randn_like(small)
    ends = torch.tensor([slots - 1, 0], device="cuda")
    pool[ends], small[:] = start, start
    position = torch.tensor([5, 7], device="cuda")
    outs = [
        delta_step(
            **case.tokens(0, 1),
            **case.constants(),
            state=state,
            conv=conv,
            slots=where,
            position=position,
            config=config,
        )
        for state, conv, where in ((pool, convs[0], ends), (small, convs[1], None))
    ]
    assert torch.equal(*outs)
    assert torch.equal(pool[ends], small)
    assert not pool[1 : slots - 1].any()


@pytest.mark.parametrize("kind", ["delta", "apart", "ssd"])
def test_replayed_in_a_graph(kind):
    """Programs meet anew in each replay; positions, slots and seeds change under the graph."""
    configs = {"delta": StepConfig(8, 1, 4), "apart": StepConfig(8, 1, 1, apart=True)}
    config = configs.get(kind)
    if kind == "ssd":
        step, case = ssd_step, ssd_step_case(batch=3, tokens=20, heads=8, norm_groups=2)
    else:
        step, case = delta_step, delta_step_case(batch=3, tokens=20, value_width=32)
    case = case.to(F32, "cuda")
    slots = torch.tensor([5, 1, 3], device="cuda")
    position, token = torch.zeros(3, dtype=torch.int64, device="cuda"), case.projected[:, :1].clone()
    work = Workspace.allocate(64, 4096, "cuda")

    def once(pool, conv):
        return step(
            **case.views(token), **case.constants(), state=pool, conv=conv, position=position, slots=slots,
            config=config, workspace=work,
        )  # fmt: skip

    eager, graphed = ((case.state(6), case.conv(6)) for _ in range(2))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        once(case.state(6), case.conv(6))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = once(*graphed)
    for t in range(20):
        token.copy_(case.projected[:, t : t + 1])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, once(*eager)), t
        assert not work.counters.any()
        position += 1
    assert torch.equal(graphed[0][slots], eager[0][slots])


def test_seeds_change_under_a_graph():
    case = delta_step_case(batch=1, tokens=1, taps=None).to(F32, "cuda")
    state, seed = torch.ones(1, 4, 16, 8, dtype=BF16, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")

    def once():
        state.fill_(1.0)
        delta_step(**case.tokens(0, 1), **case.constants(), state=state, rounding_seed=seed)

    once()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
        seed.add_(1)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(state.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    seed.zero_()
    graph.replay()
    assert torch.equal(state, seen[0])


@pytest.mark.parametrize("width", [64, 100])
def test_norms_of_many_narrow_rows(width):
    """Several to a program; the last one is not full."""
    x, gate = (torch.randn(40009, width, device="cuda").to(BF16) for _ in range(2))
    weight = torch.randn(width, device="cuda")
    found, wanted = (rms_norm(x, weight, gate=gate, impl=i).output for i in ("triton", "reference"))
    torch.testing.assert_close(found, wanted, rtol=2 * torch.finfo(BF16).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("width", [37, 2048, 5120])
def test_norms(width, dtype):
    x, weight = torch.randn(5, 3, width, device="cuda").to(dtype), torch.randn(width, device="cuda").to(dtype)
    residual = torch.randn(5, 3, width, device="cuda")
    for held in (None, residual, residual.to(dtype)):
        found, wanted = (rms_norm(x, weight, residual=held, offset=1.0, impl=i) for i in ("triton", "reference"))
        assert torch.equal(found.residual, wanted.residual)
        assert torch.equal(found.output, rms_norm(x, weight, residual=held, offset=1.0, ready=True).output)
        # Both round once, from sums in another order.
        torch.testing.assert_close(found.output, wanted.output, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    gate = torch.randn(5, 3, width, device="cuda").to(dtype)
    for activation in ("silu", "sigmoid"):
        found, wanted = (
            rms_norm(x, weight, gate=gate, gate_activation=activation, impl=i).output for i in ("triton", "reference")
        )
        torch.testing.assert_close(found, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    gated = torch.randn(5, 2 * width + 3, device="cuda").to(dtype)[:, : 2 * width]
    found, wanted = (swiglu(gated, impl=i) for i in ("triton", "reference"))
    torch.testing.assert_close(found, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
