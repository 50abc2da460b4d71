"""Policies as functions of what they are told: caps by length, pressure, the quality limit, and when a replay pays."""

import json
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lapcli.artifacts import Lineage, write_artifact
from lapcli.errors import ArtifactError, UsageError
from lapcli.linearising.plan import Place
from lapcli.linearising.record import KIND
from lapcli.serving.adaptive import BY_LENGTH, BY_PRESSURE, BY_QUALITY, PAPER_CAPS, RELIEVED, Adaptive, Cap
from lapcli.serving.modes import Wish, find_conversion, parse_caps, parse_modes, parse_share, policy_of, read_conversion
from lapcli.serving.policy import Configuration, Load, RequestFacts, RunningFacts

KIND_BYTES, STATE_BYTES = 100, 6400
"""Keys and values of a token in a layer, and a layer's states: equal at 64 tokens."""


def configurations(layers=8, increases=None):
    """All prefixes; each layer converted costs a percent of perplexity unless told."""
    increases = increases or [number / 100 for number in range(layers + 1)]
    return tuple(
        Configuration(f"{n}-of-{layers}", n, layers, n * STATE_BYTES, (layers - n) * KIND_BYTES, increases[n])
        for n in range(layers + 1)
    )


def load(used, *, waiting=0, layers=8, total=10**8, prefill=0.001, step=0.01, **fields):
    return Load(
        8, waiting, 64, total, round(total * (1 - used)), prefill, step, fields.get("found", configurations(layers))
    )


def converted(name):
    return int(name.partition("-")[0])


@pytest.mark.parametrize(
    ("layers", "wanted"), [(32, [4, 8, 12, 16]), (30, [3, 7, 11, 15]), (4, [0, 1, 1, 2])], ids=["32", "30", "4"]
)
def test_lengths_are_capped_as_in_the_paper(layers, wanted):
    """Table 4: 12.5, 25, 37.5 and 50 % for prompts under 2048, 4096, 8192 and from there on."""
    policy, calm = Adaptive(), load(0.1, layers=layers, total=10**12)
    for ends, number in zip(((1, 2047), (2048, 4095), (4096, 8191), (8192, 10**6)), wanted, strict=True):
        for tokens in ends:
            decision = policy.choose(RequestFacts(tokens, 100), calm)
            assert (converted(decision.configuration), decision.reason) == (number, BY_LENGTH)


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.integers(1, 20_000),
    longer=st.integers(0, 20_000),
    answer=st.integers(1, 2000),
    used=st.floats(0, 1.2),
    more=st.floats(0, 0.5),
    limit=st.one_of(st.just(math.inf), st.floats(0, 0.1)),
)
def test_more_pressure_and_longer_prompts_never_convert_less(tokens, longer, answer, used, more, limit):
    """And nothing ever exceeds the quality limit, or the cap while memory is free."""
    policy = Adaptive(most_increase=limit)
    found = [
        policy.share(tokens, policy.pressure(load(used))),
        policy.share(tokens, policy.pressure(load(used + more))),
        policy.share(tokens + longer, policy.pressure(load(used))),
    ]
    assert found[0] <= found[1]
    assert found[0] <= found[2]
    decision = policy.choose(RequestFacts(tokens, answer), load(used))
    number = converted(decision.configuration)
    assert number == 0 or number / 100 <= limit
    assert (number / 8 > policy.share(tokens, 0.0)) == (decision.reason == BY_PRESSURE)
    # What takes memory for itself is no way out of a want of it.
    if decision.reason == BY_PRESSURE:
        calm = policy.choose(RequestFacts(tokens, answer), load(0.0)).configuration
        by_name = {each.name: each for each in configurations()}
        there = tokens + answer // 2
        assert by_name[decision.configuration].row_bytes(there) < by_name[calm].row_bytes(there)


def test_long_requests_are_converted_first():
    """As pressure grows, the longest class is at the end of its way when the next begins."""
    policy = Adaptive()
    lengths = (10_000, 5000, 3000, 1000)
    for step in range(5):
        shares = [policy.share(tokens, step / 4) for tokens in lengths]
        wanted = [1.0] * step + [cap.share for cap in PAPER_CAPS[::-1]][step:]
        assert shares == pytest.approx(wanted)


def test_the_quality_limit_says_so():
    """Prefixes need not get worse one by one: what is good enough later is not lost for a worse one before it."""
    found = configurations(increases=[0, 0.01, 0.3, 0.02, 0.03, 0.04, math.nan, math.inf, 0.5])
    policy = Adaptive(most_increase=0.05)
    choose = [policy.choose(RequestFacts(tokens, 10), load(0, found=found)) for tokens in (10, 2048, 4096, 9000)]
    assert [(converted(each.configuration), each.reason) for each in choose] == [
        (1, BY_LENGTH),
        (1, BY_QUALITY),
        (3, BY_LENGTH),
        (4, BY_LENGTH),
    ]
    # An engine need not hold what is never used.
    allowed = policy.within(found)
    aware = Adaptive(most_increase=0.05, refused=[each for each in found if each not in allowed])
    assert aware.choose(RequestFacts(2048, 10), load(0, found=allowed)).reason == BY_QUALITY
    pressed = policy.choose(RequestFacts(9000, 10), load(1.0, found=found))
    assert (converted(pressed.configuration), pressed.reason) == (5, BY_PRESSURE)


def rows_of(*rows):
    """Running requests: configuration, tokens, left, and more."""
    return [RunningFacts(str(n), f"{row[0]}-of-8", *row[1:]) for n, row in enumerate(rows)]


def test_a_running_request_is_handed_over_where_that_pays():
    """By hand: 8000 tokens in 5 attention layers are 4 MB and three states; all eight states are 51,200 bytes."""
    policy, rows = Adaptive(), rows_of((3, 8000, 1000), (3, 500, 1000))
    frees = 3 * STATE_BYTES + 5 * KIND_BYTES * 8000 - 8 * STATE_BYTES
    # A share of frees / 1e8 of memory for 1000 steps of 10 ms; the replay takes 8000 times `prefill`.
    worth = frees / 10**8 * 1000 * 0.01
    cheap = load(1.0, waiting=3, prefill=0.99 * worth / 8000)
    (switch,) = policy.review(rows, cheap)
    assert switch == ("0", "8-of-8", BY_PRESSURE, pytest.approx(0.99 * worth), frees)
    assert policy.review(rows, cheap._replace(prefill_seconds=1.01 * worth / 8000)) == []
    # Waiting rows go through the model anyway.
    dear = cheap._replace(prefill_seconds=1.0)
    (switch,) = policy.review([rows[0]._replace(waits=True), rows[1]], dear)
    assert (switch.name, switch.replay_seconds) == ("0", 0.0)
    # One replay at a time, and not twice the same.
    assert policy.review([rows[0]._replace(switching=True), rows[1]], cheap) == []
    assert policy.review(rows, load(0.8, prefill=1e-9)) == []


def test_it_goes_back_when_memory_is_free():
    policy = Adaptive()
    rows = rows_of((8, 8000, 1000), (8, 500, 1000))
    calm = load(0.2, prefill=0.002)
    # The shorter first, to what its length asks for; its replay is a tenth of the ten seconds that are left.
    assert policy.review(rows, calm) == [
        ("1", "1-of-8", RELIEVED, pytest.approx(1.0), 7 * STATE_BYTES - 7 * KIND_BYTES * 500)
    ]
    assert policy.review(rows, calm._replace(prefill_seconds=0.0021)) == []
    assert policy.review(rows, calm._replace(waiting=1)) == []
    assert policy.review(rows, load(0.7, prefill=1e-9)) == []
    # With what it becomes by its end: 1500 tokens in seven layers are a megabyte, more than is left under `low`.
    tight = load(0.2, prefill=1e-9, total=2 * 10**6)
    assert policy.review(rows_of((8, 500, 1000)), tight) == []


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 8), st.integers(1, 9000), st.integers(1, 2000), st.booleans()), min_size=1, max_size=12
    ),
    total=st.integers(10**5, 10**8),
    waiting=st.sampled_from([0, 0, 3]),
    prefill=st.floats(1e-7, 1e-2),
)
def test_reviews_come_to_rest(rows, total, waiting, prefill):
    """Where nothing else changes, nobody is handed to and fro; every replay pays; nothing exceeds the limit."""
    policy, found = Adaptive(most_increase=0.06), configurations()
    by_name = {each.name: each for each in found}
    running = rows_of(*rows)
    for _ in range(3 * len(rows) + 3):
        taken = sum(by_name[row.configuration].row_bytes(row.tokens) for row in running)
        now = Load(len(rows), waiting, 64, total, total - taken, prefill, 0.01, found)
        switches = policy.review(running, now)
        assert switches == policy.review(running, now)
        if not switches:
            break
        assert sum(switch.replay_seconds > 0 for switch in switches) <= 1
        for switch in switches:
            row = running[int(switch.name)]
            old, new = by_name[row.configuration], by_name[switch.configuration]
            assert switch.frees_bytes == old.row_bytes(row.tokens) - new.row_bytes(row.tokens)
            assert new.increase <= 0.06
            rest = row.left * 0.01
            if switch.reason == BY_PRESSURE:
                assert new.converted > old.converted
                assert row.waits or row.tokens * prefill < switch.frees_bytes / total * rest
            else:
                assert (new.converted < old.converted, waiting) == (True, 0)
                assert row.waits or row.tokens * prefill <= 0.1 * rest
            running[int(switch.name)] = row._replace(configuration=switch.configuration)
    else:
        pytest.fail("it never comes to rest")


@pytest.fixture
def conversion(tmp_path):
    """Makes what a conversion of four layers left, as far as serving reads it before a model is loaded."""

    def write(*perplexities, teacher=10.0, record=None):
        place = Place(tmp_path / str(len(list(tmp_path.iterdir()))))
        place.base.mkdir(parents=True)
        config = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 1, "hidden_size": 8}
        (place.base / "config.json").write_text(json.dumps(config))
        for number, value in enumerate(perplexities, 1):
            known = {"cross_entropy": math.log(value), "teacher_cross_entropy": math.log(teacher)}
            lineage = Lineage(KIND, {}, "dsla", {"number": number}, {}, {}, known if record is None else record)
            write_artifact(place.prefix(number, number), lineage, {"x": torch.zeros(1)})
        return place.root

    return write


def test_what_a_conversion_says(conversion):
    found = read_conversion(conversion(10.5, 11.0, 20.0))
    assert [(each.name, each.converted) for each in found.configurations] == [
        ("0-of-4", 0),
        ("1-of-4", 1),
        ("2-of-4", 2),
        ("3-of-4", 3),
    ]
    assert [each.increase for each in found.configurations] == [0, 0.05, 0.1, 1.0]
    assert read_conversion(conversion(1e300, teacher=1e-300)).configurations[1].increase == math.inf
    for record in ({}, {"cross_entropy": None, "teacher_cross_entropy": 1}):
        with pytest.raises(ArtifactError, match="does not say how good"):
            read_conversion(conversion(1, record=record))


def served(root, **wish):
    return find_conversion(str(root), Wish(**wish))


def test_a_wish_comes_to_a_policy(conversion):
    root = conversion(10.5, 11.0, 20.0)
    found = served(root)
    assert isinstance(found.policy, Adaptive)
    assert (found.policy.most_increase, found.settings["configurations"]) == (0.1, [0, 1, 2])
    assert [each.name for each in found.policy.refused] == ["3-of-4"]
    assert served(root, max_ppl_increase="200%").settings["configurations"] == [0, 1, 2, 3]
    assert served(root, caps="0:0%,100:50%").policy.caps == (Cap(0, 0.0), Cap(100, 0.5))
    told = (({"fraction": "0.75"}, 3), ({"fraction": " 75 %"}, 3), ({"fraction": "0"}, 0), ({"fraction": "0%"}, 0))
    for wish, number in (*told, ({"adapt": False}, 0)):
        found = served(root, **wish)
        assert found.settings["configurations"] == [number]
        assert found.policy.choose(RequestFacts(9000, 1), load(1.0)).configuration == f"{number}-of-4"
        assert found.policy.review([], load(1.0)) == []


@pytest.mark.parametrize(
    ("wish", "words", "hint"),
    [
        ({"adapt": True, "fraction": "0.5"}, "--adapt and --fraction 0.5", "pass one"),
        ({"fraction": "1"}, "1 of 4 layers are 4, and 3 are converted", "--fraction 1 --output"),
        ({"fraction": "0.5", "caps": "0:1%"}, "--caps is for --adapt", "drop --caps"),
        ({"fraction": "0.5", "offload": True}, "--offload is for --adapt", "drop --offload"),
        ({"fraction": "50"}, "--fraction 50", "did you mean 0.5, or 50%?"),
        ({"fraction": "-5%"}, "--fraction -5%", ""),
        ({"fraction": "nan%"}, "--fraction nan%", ""),
        ({"fraction": "half"}, "--fraction half", ""),
        ({"fraction": "0.75", "max_ppl_increase": "50%"}, "100.0% above", "--fraction 0.5 at most"),
        ({"max_ppl_increase": "4%"}, "1-of-4, the best, has a perplexity 5.0% above", "--max-ppl-increase 5% or more"),
        ({"max_ppl_increase": "10"}, "more than the whole", "did you mean --max-ppl-increase 10%"),
        ({"max_ppl_increase": "-1%"}, "a share of 0 or more", "10%"),
        ({"max_ppl_increase": "nan"}, "a share of 0 or more", "10%"),
        ({"caps": "0:12.5%,100"}, "'100' is no TOKENS:SHARE", "--caps 0:12.5%"),
        ({"caps": "5:10%"}, "the first from 0", ""),
        ({"caps": "0:10%,9:20%,8:30%"}, "ascending", ""),
        ({"caps": "0:200%"}, "0% to 100%", ""),
    ],
    ids=str,
)
def test_wishes_that_cannot_be_met(conversion, wish, words, hint):
    root = conversion(10.5, 11.0, 20.0)
    with pytest.raises(UsageError) as raised:
        served(root, **wish)
    assert words in raised.value.message
    assert hint in (raised.value.hint or "")


def test_of_many_configurations_some_are_held():
    """Thirty layers: of each eighth, of each cap, and the largest within the limit; what lies between is not needed."""
    found = configurations(30, [number / 300 for number in range(31)])
    (adaptive,) = parse_modes("adaptive")
    _, held = policy_of(adaptive, found, most_increase=1.0)
    assert [each.converted for each in held] == [0, 3, 7, 11, 15, 18, 22, 26, 30]
    policy, held = policy_of(adaptive, found, most_increase=0.044, caps=(Cap(0, 0.0), Cap(100, 0.2)))
    assert [each.converted for each in held] == [0, 3, 6, 7, 11, 13]
    assert [each.converted for each in policy.refused] == list(range(14, 31))
    assert policy.choose(RequestFacts(100, 1), load(0, found=tuple(held))).configuration == "6-of-30"


def test_what_is_no_conversion_cannot_adapt(conversion, tmp_path):
    root = conversion(10.5)
    inside = root / "models" / "1-of-4"
    inside.mkdir(parents=True)
    assert find_conversion(str(inside), Wish()) is None
    assert find_conversion(None, Wish(adapt=False)) is None
    with pytest.raises(UsageError, match="one model") as raised:
        find_conversion(str(inside), Wish(adapt=True))
    assert raised.value.hint == f"name that: lapcli serve {root} --adapt"
    with pytest.raises(UsageError, match="--fraction: demo:gdn") as raised:
        find_conversion("demo:gdn", Wish(fraction="0.5"))
    assert "lapcli convert demo:gdn --to dsla" in raised.value.hint
    with pytest.raises(UsageError, match="nothing is converted"):
        served(conversion())


def test_modes():
    found = parse_modes("never, static:50%,adaptive")
    assert [mode.options for mode in found] == [["--fraction", "0"], ["--fraction", "0.5"], ["--adapt"]]
    for text, words in (
        ("never,always", "'always' is none of"),
        ("static", "'static' is none of"),
        ("static:2", "static: 2: more than all"),
        ("never,never", "twice"),
        ("static:50%,static:0.50", "static:0.5 stands there twice"),
        ("static:150%", "more than all of the layers"),
        ("", "'' is none of"),
    ):
        with pytest.raises(UsageError, match=words):
            parse_modes(text)
    policy, chosen = policy_of(found[1], configurations())
    assert policy.choose(RequestFacts(1, 1), load(0)) == ("4-of-8", "one for all")
    assert [each.converted for each in chosen] == [4]


def test_shares_are_read_as_they_are_typed():
    assert [parse_share(text, "--x") for text in ("10%", "0.1", "250%", "0", "1")] == [0.1, 0.1, 2.5, 0, 1]
    assert parse_caps("0:12.5%, 2048:25%,4096:0.375,8192:50%") == PAPER_CAPS


def test_a_configuration_is_the_same_on_both_sides():
    first = configurations()[3]
    assert Configuration.of(json.loads(json.dumps(first.document()))) == first


@pytest.mark.parametrize("seed", range(4))
def test_under_pressure_that_lasts_each_is_handed_over_once(seed):
    """Answers that grow on and on, in memory for a part of them; nobody comes, so that what will be can be known."""
    draw, found, total = random.Random(seed), configurations(), 6 * 10**6
    by_name, policy = {each.name: each for each in found}, Adaptive()
    rows = rows_of(*((1, draw.randint(900, 1400), draw.randint(2000, 4000)) for _ in range(6)))
    switched, used = {row.name: [] for row in rows}, []
    while rows:
        taken = sum(by_name[row.configuration].row_bytes(row.tokens) for row in rows)
        used.append(taken / total)
        now = Load(len(rows), 1, 64, total, total - taken, 1e-5, 0.01, found)
        told = {switch.name: switch for switch in policy.review(rows, now)}
        for switch in told.values():
            switched[switch.name].append(converted(switch.configuration))
        rows = [
            row._replace(
                configuration=told[row.name].configuration if row.name in told else row.configuration,
                tokens=row.tokens + 10,
                left=row.left - 10,
            )
            for row in rows
            if row.left > 10
        ]
    assert any(switched.values())
    assert max(used) < 1
    assert max(map(len, switched.values())) == 1
