"""The choice of the likeliest token, compiled."""

import pytest
import torch

from lapkernels.greedy_token import greedy_token, select_impl, why_not
from lapkernels.testing_greedy import check_greedy

BF16 = torch.bfloat16
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def _can_run():
    if why := why_not("triton", "cuda", BF16):
        pytest.skip(why)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize("width", [1, 7, 1000, 32000, 50257, 151936])
def test_awkward_rows(width, dtype):
    check_greedy(width, "triton", dtype, "cuda")


@pytest.mark.parametrize("rows", [1, 5, 64, 300])
def test_it_is_argmax_in_a_graph(rows):
    """Of logits of a model, many of them equal, one step after the other."""
    assert select_impl("cuda", BF16).name == "triton"
    device = torch.device("cuda")
    logits = torch.randn(rows, 32000, device=device).to(BF16)
    tokens, positions = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
    slots = torch.arange(rows, dtype=torch.int32, device=device) - 1

    def step() -> None:
        # What comes before it begins as early as a kernel may.
        greedy_token(logits.mul_(1), tokens, positions, slots)
        greedy_token(logits, tokens, positions, slots)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in range(1, 6):
        logits.normal_()
        logits.copy_((logits * turn).round())
        tokens.fill_(-1)
        graph.replay()
        assert torch.equal(tokens, logits.argmax(dim=-1))
        assert positions.tolist() == [0, *([2 + 2 * turn] * (rows - 1))]


def test_more_than_two_billion_logits():
    logits = torch.zeros(70_000, 32768, dtype=BF16, device="cuda")
    logits[-1, 77], logits[-2, -1] = 1.0, 1.0
    tokens, positions = (torch.zeros(70_000, dtype=torch.int64, device="cuda") for _ in range(2))
    greedy_token(logits, tokens, positions, positions.int())
    assert tokens[-3:].tolist() == [0, 32767, 77]
