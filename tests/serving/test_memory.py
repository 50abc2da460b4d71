"""Memory divided between weights, requests, and what lies beside both: nothing is promised twice."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lapcli.errors import ModelError
from lapcli.runtime.sampling import SCORES
from lapcli.serving.memory import (
    SMALLEST_PIECE,
    Limits,
    Needs,
    Room,
    RowBytes,
    beside,
    rows_that_fit,
    said_of,
    scores_together,
    usual_length,
)
from lapcli.serving.settings import EngineSettings
from lapcli.serving.worker import planned, prepare
from lapcli.testing.dual_state import tiny_source

NOTHING = Needs()


def row_of(row_bytes, length=4096):
    return RowBytes(*map(row_bytes, (0, usual_length(length), length)))


def fitting(row_bytes, *, memory=10**9, weights=10**8, max_rows=None, length=4096, needs=NOTHING, piece=256):
    """Rows, and bytes of pages."""
    room = rows_that_fit(Limits(memory, weights, max_rows, piece), row_of(row_bytes, length), needs)
    return room.rows, room.row_bytes


def states(_):
    return 10**7


def hybrid(tokens):
    return 10**7 + 20_000 * tokens


def test_without_a_limit_all_rows_have_room():
    assert rows_that_fit(Limits(None, 10**9, None, 256), row_of(states), NOTHING) == Room(16, None, 256)
    assert rows_that_fit(Limits(None, 10**9, 99, 256), row_of(states), NOTHING).rows == 99


def test_rows_of_one_size():
    """Of 1e9 bytes a tenth is of weights; 89 rows, since a prompt on its way takes what a row does."""
    assert fitting(states) == (89, 0)
    assert fitting(lambda _: 1) == (256, 9 * 10**8 - 257)
    assert fitting(states, max_rows=89) == (89, 0)
    assert fitting(states, max_rows=2) == (2, 87 * 10**7)
    for broken in ({"max_rows": 90}, {"memory": 10**8}):
        with pytest.raises(ModelError, match="bytes hold 100000000 of weights"):
            fitting(states, **broken)


def test_rows_share_keys_and_values():
    """As many as fit at an eighth of the longest length, and one of full length, and one more on its way."""
    assert fitting(lambda tokens: 20_000 * tokens) == ((9 * 10**8 - 4096 * 20_000) // (512 * 20_000), 818_080_000)
    left = 9 * 10**8 - hybrid(4096)
    assert fitting(hybrid) == (left // hybrid(512), left - left // hybrid(512) * 10**7)
    # One of full length takes 8.192e7 besides its slot.
    most = (left - 4096 * 20_000) // 10**7
    assert fitting(hybrid, max_rows=most) == (most, left - most * 10**7)
    with pytest.raises(ModelError, match=rf"and each of {most} others 10000000 at least") as refused:
        fitting(hybrid, max_rows=most + 1)
    assert f"--max-rows to {most} or --max-length" in refused.value.hint
    assert fitting(hybrid, length=22_000)[0] == 1
    with pytest.raises(ModelError, match="the longest takes 450000000") as refused:
        fitting(hybrid, length=22_000, memory=10**9 - 1)
    assert refused.value.hint.startswith("raise --memory to 1000000000B at least, or lower --max-length")


def test_what_lies_beside_is_taken_off_and_named():
    needs = Needs(kept=10**7, pass_fixed=5, pass_token=1000, step_fixed=7, step_row=100)
    # A pass of 256 tokens takes more than a step of so few rows, and they are not under way together.
    room = rows_that_fit(Limits(10**9, 10**8, 3, 256), row_of(states), needs)
    assert room.beside == (10**7, 10**7, 256_005)
    assert room.row_bytes == 9 * 10**8 - 2 * 10**7 - 256_005 - 3 * 10**7
    assert said_of(room, needs)["these are"] == "estimated"
    # Where graphs keep both, they are there besides.
    twice = needs._replace(pass_copies=2, step_copies=2)
    assert beside(twice, 10**7, 3, 256) == (10**7 + 256_005 + 307, 10**7, 256_005)
    assert beside(twice, 10**7, 5000, 256) == (10**7 + 256_005 + 500_007, 10**7, 500_007)
    # States that may be attention count where there are some.
    dearer = needs._replace(pass_states=3000)
    assert [beside(dearer, 0, 3, 256, states=some).passing for some in (False, True)] == [256_005, 768_005]
    with pytest.raises(ModelError) as refused:
        fitting(states, memory=10**8 + 4 * 10**7, max_rows=5, needs=needs._replace(measured=True))
    message = refused.value.message
    assert (
        "as measured, graphs and libraries keep 10000000, a prompt of full length on its way takes 10000000" in message
    )
    assert "a pass of 64 tokens or a step 64005; that leaves 19935995 for requests" in message
    assert "--max-rows to 1 " in refused.value.hint


def test_pieces_are_halved_before_anything_is_refused():
    needs = Needs(pass_token=10**6)
    row, room = row_of(states), {}
    for memory in (10**10, 10**9, 3 * 10**8, 2 * 10**8, 85 * 10**6):
        room[memory] = rows_that_fit(Limits(memory, 0, None, 2048), row, needs)
    assert [each.piece for each in room.values()] == [2048, 128, 64, 64, 64]
    assert room[85 * 10**6].rows == 1
    with pytest.raises(ModelError, match="a pass of 64 tokens"):
        rows_that_fit(Limits(83 * 10**6, 0, None, 2048), row, needs)
    # One that somebody asked for is not shortened for the sake of more rows.
    asked = Limits(10**9, 0, None, 900, easy=False)
    assert rows_that_fit(asked, row, needs).piece == 900
    assert rows_that_fit(asked._replace(memory=5 * 10**8), row, needs).piece == 450
    assert rows_that_fit(asked._replace(piece=40), row, needs).piece == 40
    with pytest.raises(ModelError, match="a pass of 900 tokens"):
        rows_that_fit(asked._replace(memory=5 * 10**8), row, needs, shorten=False)


def test_less_memory_looks_at_fewer_scores_together():
    needs = Needs(score=48, vocabulary=4096)
    assert scores_together(2**40, needs) is None
    assert scores_together(16 * 48 * SCORES, needs) is None
    assert scores_together(16 * 48 * SCORES - 16, needs) == SCORES // 2
    assert scores_together(0, needs) == 4096
    assert scores_together(-(10**9), needs) == 4096
    # What was measured was measured with a number.
    assert scores_together(0, needs._replace(vocabulary=0)) is None
    room = rows_that_fit(Limits(2**28, 0, None, 256), row_of(lambda tokens: 1000), needs)
    assert room.scores == 2**18
    assert room.beside.passing == 2**18 * 48
    # One row's are looked at in any case.
    assert Needs(score=48, vocabulary=100_000).for_step(9, 10) == 48 * 100_000


@given(
    st.integers(1, 10**9),
    st.integers(0, 10**8),
    st.tuples(*(st.integers(0, 10**6) for _ in range(3))),
    st.builds(
        Needs,
        kept=st.integers(0, 10**7),
        pass_fixed=st.integers(0, 10**5),
        pass_token=st.integers(0, 10**5),
        pass_states=st.integers(0, 10**5),
        step_fixed=st.integers(0, 10**6),
        step_row=st.integers(0, 10**5),
        score=st.sampled_from([0, 48]),
        vocabulary=st.sampled_from([1, 300, 50_000]),
        pass_copies=st.sampled_from([1, 2]),
        step_copies=st.sampled_from([1, 2]),
    ),
    st.sampled_from([None, 1, 7, 400]),
    st.integers(1, 4096),
)
def test_never_more_than_there_is_and_no_row_less(memory, weights, sizes, needs, max_rows, piece):
    slot, more, most = sizes
    row, limits = RowBytes(slot, slot + more, slot + more + most), Limits(memory, weights, max_rows, piece)

    def taken(rows, piece, scores):
        return weights + sum(beside(needs, row.longest, rows, piece, scores=scores)) + row.longest + (rows - 1) * slot

    try:
        room = rows_that_fit(limits, row, needs)
    except ModelError as error:
        smallest, wanted = min(piece, SMALLEST_PIECE), max_rows or 1
        assert taken(wanted, smallest, scores_together(memory - weights, needs)) > memory
        enough = int(re.search(r"--memory to (\d+)B", error.hint)[1])
        assert rows_that_fit(limits._replace(memory=enough), row, needs).rows >= wanted
        if (fewer := re.search(r"--max-rows to (\d+) ", error.hint)) is not None:
            assert rows_that_fit(limits._replace(max_rows=int(fewer[1])), row, needs).rows == int(fewer[1]) < max_rows
        return
    assert taken(room.rows, room.piece, room.scores) <= memory
    assert weights + sum(room.beside) + room.rows * slot + room.row_bytes == memory
    assert room.row_bytes >= row.longest - slot
    assert max_rows in (None, room.rows)
    if max_rows is None and room.rows < limits.most:
        rows = room.rows + 1
        left = memory - weights - sum(beside(needs, row.longest, rows, room.piece, scores=room.scores))
        assert max(rows * row.usual, row.longest + (rows - 1) * slot) > left


def test_a_dry_run_divides_as_an_engine_does(tmp_path):
    """By shapes alone, so by the same estimate; but padding of fused projections is in no shape."""
    source = tiny_source("llama", tmp_path / "llama")
    settings = EngineSettings(str(source.path), "cpu", "float32", max_length=256)
    weights = planned(settings)["weights"]
    for memory in (3 * 10**6, 10**7):
        _, facts = prepare(replace(settings, memory=memory))
        told = planned(replace(settings, memory=memory - (facts["bytes"]["weights"] - weights)))
        assert (told["rows"], told["piece"]) == (facts["rows"], facts["piece"])
        assert told["beside"]["these are"] == "estimated"
        assert told["beside"]["a prompt on its way"] == facts["beside"]["prompt"] == told["longest_request"]
        assert told["beside"]["a pass or a step"] == facts["beside"]["passing"] > 0
    assert "beside" not in planned(settings)
