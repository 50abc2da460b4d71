import time
from types import SimpleNamespace

import pytest
import torch

from lapkernels import timing
from lapkernels._triton import tune_within_memory

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_medians_of_trials_each_with_its_own_warm_up(monkeypatch):
    """The clock is ours: a slow call among fast ones, and a slow trial among fast ones, leave no trace."""
    clock, made = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def call():
        trial, number = divmod(len(made), 14)
        made.append(number)
        slow = number < 4 or number == 7  # the warm-up, and one outlier
        clock[0] += (trial + 1) * (100.0 if slow else 1.0)

    found = timing.measure(call, CPU, warmup=4, repeats=10, trials=3)
    assert len(made) == 3 * 14
    assert found.trials == (1, 2, 3)
    assert (found.seconds, found.repeats, found.graphed) == (2, 10, False)
    assert found.spread == 2


def test_slow_calls_are_repeated_less_often(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def call():
        clock[0] += 0.5

    found = timing.measure(call, CPU, limit=30)
    assert found.seconds == 0.5
    assert found.repeats == 14  # ten seconds a trial: two calls to find out, and a fifth of the rest to warm up
    assert clock[0] <= 30
    assert timing.measure(call, CPU, limit=0.1).repeats == 5
    assert timing.measure(call, CPU, limit=1e9).repeats == timing.REPEATS


def test_calls_in_turn_count_as_one_each(monkeypatch):
    clock, made = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def call(name):
        made.append(name)
        clock[0] += 2.0

    found = timing.measure([lambda: call("a"), lambda: call("b")], CPU, warmup=0, repeats=3, trials=1)
    assert made == ["a", "b"] * 3
    assert found.seconds == 2


@pytest.mark.parametrize(("share", "wanted"), [(0.5, 50), (0.99, 99), (1, 100), (0, 1), (0.07, 7), (0.071, 8)])
def test_percentiles(share, wanted):
    assert timing.percentile(list(range(100, 0, -1)), share) == wanted


def test_a_percentile_of_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing"):
        timing.percentile([], 0.5)


def test_rates_are_those_of_the_sizes(monkeypatch):
    """A second a call: bytes are counted twice, a product is 2 n^3."""
    clock = [0.0]

    def tick():
        clock[0] += 0.5
        return clock[0]

    monkeypatch.setattr(time, "perf_counter", tick)
    assert timing.copy_bandwidth(CPU, 4000) == 2 * 4000 / 0.5
    assert timing.product_rate(CPU, torch.float32, 8) == 2 * 8**3 / 0.5


def test_what_says_that_memory_is_short():
    def wrapped(cause):
        try:
            raise ValueError("failed") from cause
        except ValueError as error:
            return error

    assert timing.out_of_memory(torch.OutOfMemoryError("no"))
    assert timing.out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert timing.out_of_memory(wrapped(torch.OutOfMemoryError("no")))
    assert not timing.out_of_memory(wrapped(RuntimeError("an illegal memory access")))


@pytest.mark.gpu
@needs_cuda
def test_a_graph_runs_what_was_captured_as_often_as_said():
    device = torch.device("cuda")
    sums = [torch.zeros(1, device=device) for _ in range(2)]
    found = timing.measure([lambda x=x: x.add_(1) for x in sums], device, warmup=2, repeats=5, trials=1, graph=True)
    assert found.graphed
    # Before the capture: three times the first, once the second.
    assert [int(x) for x in sums] == [3 + 7, 1 + 7]


@pytest.mark.gpu
@needs_cuda
def test_copies_overflow_the_last_cache():
    device = torch.device("cuda")
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    assert timing.copies(2**20, device) * 2**20 >= 4 * cache
    assert timing.copies(2**40, device) == 1


def test_a_tuner_does_with_the_memory_there_is(monkeypatch):
    """Less is written between two measurements, where there is less; and none at all is an error still."""
    full = [3]

    def empty(count, **options):
        if full[0] > 0:
            full[0] -= 1
            raise torch.OutOfMemoryError("of the test")
        return torch.zeros(count, **options)

    from triton.runtime import driver

    active = SimpleNamespace(get_empty_cache_for_benchmark=lambda: empty(2**26, dtype=torch.int32))
    monkeypatch.setattr(driver, "_active", active)
    for _ in range(2):
        tune_within_memory(torch.device("cpu"))
    monkeypatch.setattr(torch, "empty", empty)
    for fails, count in ((3, 2**23), (0, 2**26), (8, 2**18)):
        full[0] = fails
        assert active.get_empty_cache_for_benchmark().shape == (count,)
    full[0] = 9
    with pytest.raises(torch.OutOfMemoryError):
        active.get_empty_cache_for_benchmark()
