"""Pages of keys and values: whose they are, what rows in them give, and what happens when there are too few."""

import random

import pytest
import torch

from lapcli.errors import ModelError
from lapcli.families.loading import load_model, resolve_model
from lapcli.runtime import Batch, Engine, GenerationSettings
from lapcli.runtime.pages import PAGE, AttentionPool, Kind, Pages
from lapcli.runtime.pools import PagedStates, RecurrentShape
from lapcli.testing.decoding import distance, full_logits, prompts_of, spoil
from lapcli.testing.dual_state import tiny_conversion, tiny_teacher
from lapcli.testing.stock_models import tiny_stock_model

pytestmark = pytest.mark.filterwarnings("ignore")

# fp32 sums in another order, as for other models, over up to 190 tokens and experts.
FP32 = 3e-5
CPU = torch.device("cpu")


def llama(**room):
    return Engine(tiny_teacher("llama", max_position_embeddings=512), max_length=200, **room)


def page_bytes(engine, rows):
    """What rows of full length take, of `llama`'s three layers."""
    return rows * 3 * 4 * engine.pages.page_bytes


def check(pages, rows):
    """Each page has one owner or none, and the device's table says which is whose.

    Blocks of states are neighbours; those that are whole are all that could be.
    """
    held = [page for slot in rows for page in pages._all_of(slot)]
    taken = set(held)
    assert len(taken) == len(held)
    blocks = [set(range(first, first + pages.block)) for first in range(0, pages.count, pages.block)]
    whole = [block for block in blocks if max(block) < pages.count and not block & taken]
    assert pages.whole == len(whole)
    assert pages.free == pages.count - len(held)
    singles = set(range(pages.count)).difference(taken, *whole)
    assert set(pages._loose) == singles
    for slot, (tokens, (layers, states)) in rows.items():
        assert [layer for layer, pool in pages.states.items() if slot in pool.blocks] == list(states)
        count = -(-tokens // PAGE)
        assert len(pages._held[slot]) == count * len(layers)
        found = [pages.table[pages.layers.index(layer), slot, :count].tolist() for layer in layers]
        assert sorted(page for each in found for page in each) == sorted(pages._held[slot])
    assert pages.growth == sum(len(kind.attention) for _, kind in rows.values())


@pytest.mark.parametrize("block", [1, 2, 3])
def test_every_page_has_one_owner_at_most(block):
    """Rows of different layers that come, grow and end in any order; who asks for too much gets nothing."""
    draw = random.Random(0)
    pools = {layer: AttentionPool(1, 2, 3) for layer in (1, 4, 5)}
    # A page has room for 320 numbers.
    states = {layer: PagedStates(RecurrentShape((block, 8, 33), 0, 0), torch.float32) for layer in (1, 4)}
    kinds = [Kind([1, 4, 5]), Kind([4, 5], [1]), Kind([5], [1, 4]), Kind([], [4])]
    pages = Pages(pools, 5, 300, nbytes=20 * 64 * 5 * 4, dtype=torch.float32, device=CPU, states=states, kinds=kinds)
    assert (pages.count, pages.page_bytes, pages.block) == (20, 64 * 5 * 4, block)
    rows, refused, unopened = {}, 0, 0
    for _ in range(400):
        slot = draw.randrange(5)
        if slot not in rows:
            kind = draw.choice(kinds)
            if len(kind.states) > pages.whole:
                unopened += 1
                with pytest.raises(ModelError, match=f"{pages.whole} blocks of {block} pages are free"):
                    pages.open(slot, kind)
                pages.close(slot)
            else:
                pages.open(slot, kind)
                rows[slot] = 0, kind
                for layer in kind.states:
                    states[layer].write(slot, 0, torch.full((block, 8, 33), slot + layer / 8), torch.empty(0, 0))
        elif draw.random() < 0.3:
            pages.close(slot)
            del rows[slot]
        else:
            asked = {each: min(300, rows[each][0] + draw.randrange(130)) for each in rows if draw.random() < 0.7}
            wanted = {
                each: pages.need(tokens, rows[each][1]) - len(pages._all_of(each)) for each, tokens in asked.items()
            }
            assert pages.lacking(asked) == sum(wanted.values()) - pages.free
            if sum(wanted.values()) > pages.free:
                refused += 1
                with pytest.raises(ModelError, match=f"{pages.free} of 20 are free"):
                    pages.grow(asked)
            else:
                pages.grow(asked)
                rows |= {each: (tokens, rows[each][1]) for each, tokens in asked.items()}
        check(pages, rows)
        # Nobody wrote into another's states.
        for row, (_, kind) in rows.items():
            for layer in kind.states:
                assert bool((states[layer].read(row, 0)[0] == row + layer / 8).all())
    assert refused > 20
    assert unopened > 0


def test_a_page_is_what_states_take_where_nothing_is_attention():
    """And blocks of one layer are read by none of another."""
    states = {layer: PagedStates(RecurrentShape((2, 3, 5), 0, 0), torch.float32) for layer in (0, 2)}
    pages = Pages({}, 4, 1000, dtype=torch.bfloat16, device=CPU, states=states, kinds=[Kind([], [0, 2])])
    assert (pages.count, pages.block, pages.page_bytes) == (8, 1, 2 * 3 * 5 * 4)
    for slot in range(4):
        pages.open(slot, Kind([], [0, 2]))
        for layer, pool in states.items():
            pool.write(slot, 7, torch.full((2, 3, 5), 10.0 * slot + layer), torch.empty(0, 0))
    found = [[float(pool.read(slot, 7)[0].unique()) for pool in states.values()] for slot in range(4)]
    assert found == [[0, 2], [10, 12], [20, 22], [30, 32]]
    numbers = pages.blocks_of([3, 0, 9])
    assert [row[-1] for row in numbers] == [-1, -1]
    assert float(states[2].state[numbers[1][0]].unique()) == 32
    pages.copy(1, 3)
    assert float(states[0].read(3, 7)[0].unique()) == 10
    pages.clear(1)
    assert not states[0].read(1, 7)[0].any()


def test_layers_of_other_shapes_share_the_pages():
    pools = {0: AttentionPool(2, 8, 8), 1: AttentionPool(1, 4, 12, latent=True)}
    pages = Pages(pools, 2, 100, dtype=torch.float32, device=CPU)
    assert pages.page_bytes == 2 * 64 * 16 * 4
    written = {}
    for slot in (0, 1):
        pages.open(slot)
        pages.grow({slot: 70})
        for layer, pool in pools.items():
            written[slot, layer] = [torch.randn(pool.heads, 70, width) for width in (pool.key_width, pool.value_width)]
    pages.content.fill_(torch.nan)
    for (slot, layer), tensors in written.items():
        pools[layer].write(slot, 70, *tensors)
    for (slot, layer), tensors in written.items():
        assert all(map(torch.equal, pools[layer].read(slot, 70), tensors))
    pages.close(0)
    pages.open(0)
    pages.grow({0: 70})
    pages.copy(1, 0)
    assert all(torch.equal(*pair) for pair in zip(pools[1].read(0, 70), written[1, 1], strict=True))
    pages.clear(0)
    assert not pools[0].read(0, 70)[0].any()
    assert pools[0].read(1, 70)[0].any()


MODELS = {
    "llama": lambda folder: tiny_teacher("llama", max_position_embeddings=512),
    "mistral, window": lambda folder: tiny_teacher("mistral", sliding_window=66, max_position_embeddings=512),
    **{
        name: lambda folder, name=name: load_model(resolve_model(str(tiny_stock_model(name, folder / "m"))))
        for name in ("qwen3_5", "kimi_linear", "zamba2")
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_rows_over_pages_of_any_order(name, tmp_path):
    """Rows that end at, before and behind the end of a page, in pages that others had, with NaN all around."""
    reference, engine = (MODELS[name](tmp_path / str(n)) for n in range(2))
    engine = Engine(engine, max_rows=4, max_length=200)
    assert engine.plan.attention
    random.Random(0).shuffle(engine.pages._free)
    rows = prompts_of(62, 64, 127, high=60)
    done = engine.prefill_rows(rows)
    slots = [found.slot for found in done]
    spoil(engine, slots)
    for step in range(4):
        for row in rows:
            row.append(3 + (step * 37 + len(row)) % 57)
        logits = engine.step([row[-1] for row in rows], slots)
        for row, found in zip(rows, logits, strict=True):
            assert distance(found, full_logits(reference, row)) < FP32
    # On from there, over the next page's beginning.
    rows[0] += prompts_of(64, seed=1, high=60)[0]
    assert distance(engine.prefill(rows[0][-64:], slots[0]).logits, full_logits(reference, rows[0])) < FP32
    assert engine.pages.free == engine.pages.count - sum(engine.pages.need(len(row)) for row in rows)


def run(batch):
    """Tokens and reason of each row, and the most rows that were under way."""
    found, most = {}, 0
    while batch.unfinished:
        for event in batch.advance():
            tokens, reason = found.get(event.row, ((), None))
            assert reason is None
            found[event.row] = tokens + event.tokens, event.reason
        most = max(most, batch.active)
    return found, most


@pytest.mark.parametrize("piece", [None, 16])
def test_too_few_pages_cost_time_and_nothing_else(piece):
    """Rows that outgrow the pages together wait again, and say what they say with room for all."""
    lengths, counts = (10, 20, 15, 12, 60, 130, 5), (180, 170, 170, 100, 40, 60, 3)
    found = []
    for rows in (7, 2):
        full = llama(max_rows=7)
        engine = llama(max_rows=7, kv_bytes=page_bytes(full, rows))
        batch = Batch(engine, together=128, piece=piece)
        for number, (prompt, count) in enumerate(zip(prompts_of(*lengths, high=60), counts, strict=True)):
            batch.add(prompt, GenerationSettings(max_new_tokens=count, temperature=1.0, seed=number))
        found.append(run(batch))
        assert (engine.pages.free, engine.slots.free) == (engine.pages.count, 7)
        assert (batch.set_back > 0) == (rows == 2)
    assert found[0][0] == found[1][0]
    assert [reason for _, reason in found[0][0].values()].count("full") == 0
    assert found[0][1] > found[1][1] > 1


def test_many_short_rows_fit_where_few_long_ones_would():
    engine = llama(max_rows=12, kv_bytes=page_bytes(llama(), 3))
    short, long = Batch(engine), Batch(engine)
    for prompt in prompts_of(*[10] * 12, high=60):
        short.add(prompt, GenerationSettings(max_new_tokens=30))
    # One page of a layer each, and as much again to grow: six.
    assert run(short)[1] == 6
    for prompt in prompts_of(*[150] * 12, high=60):
        long.add(prompt, GenerationSettings(max_new_tokens=30))
    assert run(long)[1] == 3


def test_who_came_last_waits_again():
    """A prompt that goes through token by token is begun anew once the rows before it need its pages."""
    engine = llama(max_rows=3, kv_bytes=page_bytes(llama(), 2))
    (long,) = prompts_of(190, seed=1, high=60)
    alone = tuple(event.tokens[0] for event in engine.generate([long], GenerationSettings(max_new_tokens=2)))
    batch = Batch(engine)
    for prompt in prompts_of(60, 60, high=60):
        batch.add(prompt, GenerationSettings(max_new_tokens=140))
    tokens, rooms = {0: (), 1: (), 2: ()}, set()
    for event in batch.advance():
        tokens[event.row] += event.tokens
    batch.piece = 1
    batch.add(long, GenerationSettings(max_new_tokens=2))
    while batch.unfinished:
        for event in batch.advance():
            tokens[event.row] += event.tokens
            if event.row == 2:
                assert len(tokens[0]) == len(tokens[1]) == 140
        rooms.add(batch.room)
    assert tokens[2] == alone
    assert batch.set_back == 1
    # Two, while the third was waiting for pages.
    assert {2, 3} <= rooms


def test_a_row_always_fits_alone():
    """In an engine of fewest pages a row may become as long as rows may be."""
    engine = llama(max_rows=5, kv_bytes=page_bytes(llama(), 1))
    batch = Batch(engine)
    for prompt in prompts_of(100, 200, 30, high=60):
        batch.add(prompt, GenerationSettings(max_new_tokens=300))
    found, _ = run(batch)
    # The last token is never taken in.
    assert [(len(tokens), reason) for tokens, reason in found.values()] == [(101, "full"), (1, "full"), (171, "full")]
    for few in (0, page_bytes(engine, 1) - 1):
        with pytest.raises(ModelError, match=f"{few} bytes hold .* a row of 200 tokens needs 12, "):
            llama(kv_bytes=few)


def test_pages_taken_by_hand_run_out_with_a_word():
    engine = llama(max_rows=3, kv_bytes=page_bytes(llama(), 1))
    row, long = prompts_of(100, 130, high=60)
    slot = engine.prefill(row).slot
    for refused in (lambda: engine.prefill(long), lambda: engine.occupy(1, 190), lambda: engine.begin(long)):
        with pytest.raises(ModelError, match="more pages of keys and values are wanted; 6 of 12 are free"):
            refused()
        assert (engine.slots.free, engine.pages.free) == (2, 6)
    with pytest.raises(ModelError, match="room for 200"):
        engine.reserve([slot], 201)
    other = engine.prefill(row[:60]).slot
    # 100 and 60 tokens more: together there is no room for so many, and neither gets any.
    with pytest.raises(ModelError, match="12 more pages"):
        engine.decode([1, 2], 100, [slot, other])
    assert engine.pages.free == 3
    engine.release(slot)
    assert engine.decode([1], 100, [other]).shape == (100, 1)


def test_memory_is_what_rows_take():
    engine = llama(max_rows=4, kv_bytes=page_bytes(llama(), 2))
    # Three layers of two key heads, keys and values of 8 fp32 numbers.
    token = 3 * 2 * 16 * 4
    assert engine.row_bytes(0) == 0
    assert engine.row_bytes(64) == 64 * token
    assert engine.row_bytes(65) == 128 * token
    assert engine.memory == (2 * 256 * token, 2 * 256 * token)
    slot = engine.prefill(prompts_of(65, high=60)[0]).slot
    assert engine.memory.free_bytes == engine.memory.total_bytes - engine.row_bytes(65)
    engine.release(slot)
    assert engine.memory.free_bytes == engine.memory.total_bytes == engine.nbytes()["attention"]


@pytest.mark.parametrize(("width", "block"), [(8, 1), (128, 2)])
def test_rows_take_pages_of_attention_and_blocks_of_states(tmp_path, width, block):
    """Rows of several configurations among each other, one of which is handed over, in pages for two whole ones."""
    root = tiny_conversion(tmp_path / "dir", teacher={"head_dim": width})
    full = Engine.load(root, max_length=200, max_rows=6)
    one = full.pages.page_bytes
    assert full.pages.block == block
    assert full.slot_bytes == full.nbytes()["states"] == 0
    for converted in range(4):
        name = f"{converted}-of-3"
        assert full.row_bytes(0, name) == full.configurations[converted].fixed_bytes == converted * block * one
        assert full.row_bytes(65, name) - full.row_bytes(0, name) == (3 - converted) * 2 * one
        slot = full.prefill(prompts_of(65, high=60)[0], configuration=name).slot
        assert full.pages.free == full.pages.count - 2 * (3 - converted) - converted * block
        full.reserve([slot], 129)
        assert full.pages.free == full.pages.count - 3 * (3 - converted) - converted * block
        full.release(slot)
    engine, found = Engine.load(root, max_length=200, max_rows=6, kv_bytes=26 * one), []
    for each in (full, engine):
        batch, tokens = Batch(each, piece=32), {}
        for number, prompt in enumerate(prompts_of(10, 20, 70, 15, 61, 12, high=60)):
            wanted = GenerationSettings(max_new_tokens=110, temperature=1.0, seed=number)
            batch.add(prompt, wanted, f"{number % 4}-of-3")
        while batch.unfinished:
            for event in batch.advance():
                tokens.setdefault(event.row, []).extend(event.tokens)
                if event.row == 4 and len(tokens[4]) == 80:
                    assert batch.switch(4, "2-of-3")
        found.append(tokens)
        assert (each.pages.free, each.slots.free) == (each.pages.count, 6)
        assert (batch.set_back > 0) == (each is engine)
    assert found[0] == found[1]


def test_models_without_attention_have_no_pages(engine):
    assert engine.pages.count == engine.pages.need(10**6) == 0
    held = engine.nbytes()
    assert engine.memory == (held["states"] + held["convolutions"],) * 2
    assert engine.row_bytes(10**6) * 4 == engine.memory.total_bytes
    slot = engine.prefill(prompts_of(9)[0]).slot
    assert engine.memory.free_bytes == 3 * engine.row_bytes(0)
    engine.release(slot)
