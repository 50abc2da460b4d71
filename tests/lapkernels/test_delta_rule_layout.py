"""How tokens are laid out in chunks: nothing lost, nothing twice, and rows as packed sequences of one length."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lapkernels.chunk_layout import from_chunks, packed_layout, rows_layout, to_chunks
from lapkernels.delta_rule import delta_rule
from lapkernels.testing import delta_rule_inputs, output_state_and_gradients

CPU = torch.device("cpu")


def numbered(batch: int, time: int) -> torch.Tensor:
    """`[B, T, 1]`, each token its own number from 1 on, so that a place without a token (0) shows."""
    return torch.arange(1, batch * time + 1).view(batch, time, 1)


@pytest.mark.parametrize("chunk_size", [1, 2, 16, 32, 64], ids="chunk{}".format)
@pytest.mark.parametrize("time", [1, 15, 16, 17, 33], ids="T{}".format)
def test_rows_are_cut_step_by_step(time, chunk_size):
    """Chunk `n` of every row comes before chunk `n + 1` of any; a short row is not filled up to a whole chunk."""
    layout = rows_layout(3, time, chunk_size)
    x = numbered(3, time)
    chunks = to_chunks(x, layout).flatten(0, 1)
    assert layout.chunk == min(chunk_size, time)
    assert set(layout.counts) == {3}
    for step, row in itertools.product(range(len(layout.counts)), range(3)):
        wanted = x[row, step * layout.chunk : (step + 1) * layout.chunk]
        found = chunks[step * 3 + row]
        assert torch.equal(found[: len(wanted)], wanted)
        assert not found[len(wanted) :].any()
    assert chunks.shape[0] * layout.chunk < 3 * (time + layout.chunk)
    assert torch.equal(from_chunks(chunks, layout, 3, time), x)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=7), chunk_size=st.integers(1, 48))
def test_packed_sequences_are_cut_longest_first(lengths, chunk_size):
    bounds = [0, *itertools.accumulate(lengths)]
    layout = packed_layout(tuple(bounds), chunk_size, CPU)
    x = numbered(1, bounds[-1])
    chunks = to_chunks(x, layout)
    assert layout.chunk == min(chunk_size, max(lengths))
    assert layout.order is not None
    assert layout.is_token is not None
    assert [lengths[n] for n in layout.order] == sorted(lengths, reverse=True)
    remaining = zip(chunks, layout.is_token.unflatten(0, (-1, layout.chunk)), strict=True)
    for step, count in enumerate(layout.counts):
        running = [n for n in layout.order.tolist() if lengths[n] > step * layout.chunk]
        assert len(running) == count
        for n in running:
            wanted = x[0, bounds[n] : bounds[n + 1]][step * layout.chunk : (step + 1) * layout.chunk]
            found, is_token = next(remaining)
            assert torch.equal(found[is_token], wanted)
            assert is_token[: len(wanted)].all()
            # No other sequence's token, whose NaN would not stay its own.
            assert (found[len(wanted) :] == wanted[-1]).all()
    assert next(remaining, None) is None
    assert torch.equal(from_chunks(chunks, layout, 1, bounds[-1]), x)


@pytest.mark.parametrize("chunk_size", [1, 2, 16, 32], ids="chunk{}".format)
@pytest.mark.parametrize("time", [15, 32, 33], ids="T{}".format)
def test_rows_are_packed_sequences_of_one_length_to_the_bit(time, chunk_size):
    """Outputs, states and gradients: the two layouts hand the same chunks to the same products."""
    inputs = delta_rule_inputs(batch=3, time=time, value_heads=4, erase="value", state=True)
    packed = delta_rule_inputs(batch=1, time=3 * time, value_heads=4, erase="value", state=True, sequences=3)
    for name, tensor in inputs.tensors().items():
        setattr(packed, name, tensor if name == "initial_state" else tensor.flatten(0, 1).unsqueeze(0))
    bounds = torch.arange(4) * time
    options = {"impl": "chunked", "chunk_size": chunk_size, "output_final_state": True}

    # One cotangent for both: their own draws differ in shape alone, not in the order of the numbers.
    rows = output_state_and_gradients(lambda x: delta_rule(**x.tensors(), **options), inputs)
    row = output_state_and_gradients(lambda x: delta_rule(**x.tensors(), **options, cu_seqlens=bounds), packed)
    for name, wanted in rows.items():
        assert torch.equal(row[name].view_as(wanted), wanted), name


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_a_sequence_of_nan_stays_its_own(impl, packed):
    """Outputs, states and gradients of the other sequences are those of any other neighbour, to the bit."""
    lengths = (9, 20, 14) if packed else (20, 20, 20)
    bounds = [0, *itertools.accumulate(lengths)]
    shape = {"batch": 1, "time": bounds[-1], "sequences": 3} if packed else {"batch": 3, "time": 20}
    clean = delta_rule_inputs(**shape, value_heads=4, erase="key", state=True)
    poisoned = clean.to()
    spoilt = (0, slice(bounds[1], bounds[2])) if packed else (1,)
    for name, tensor in poisoned.tensors().items():
        tensor[1 if name == "initial_state" else spoilt] = torch.nan
    options = {"impl": impl, "chunk_size": 8, "output_final_state": True}
    if packed:
        options["cu_seqlens"] = torch.tensor(bounds)
    wanted, found = (
        output_state_and_gradients(lambda x: delta_rule(**x.tensors(), **options), x) for x in (clean, poisoned)
    )
    for name, right in wanted.items():
        place = 1 if name in ("final_state", "dinitial_state") else spoilt
        others = torch.ones_like(right, dtype=torch.bool)
        others[place] = False
        assert torch.equal(found[name][others], right[others]), name
        assert found[name][place].isnan().any(), name
