"""RULER's tasks: prompts read again by rules that share nothing with those that made them."""

import json
import random
import re
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch

from lapcli.data.documents import Document
from lapcli.errors import DataError, ModelError, UsageError
from lapcli.evaluation import ruler
from lapcli.evaluation.checks import failures, parse_check
from lapcli.evaluation.estimates import mean
from lapcli.evaluation.groups import group_scores
from lapcli.evaluation.lengths import resolve_ruler_lengths
from lapcli.evaluation.results import Evaluation, Score
from lapcli.evaluation.ruler import Misfit, largest_size, make_prompts, measure_ruler, string_match
from lapcli.evaluation.ruler_texts import RULER_TASKS, Material
from lapcli.evaluation.run import evaluate, evaluate_model, plan_evaluation
from lapcli.evaluation.settings import EvaluationOptions, EvaluationSettings
from lapcli.evaluation.tasks import TASKS, expand, parse_tasks
from lapcli.families.loading import resolve_model
from lapcli.reporting import SilentReporter
from lapcli.testing.models import byte_tokenizer

NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\.")
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
WRITTEN = {"ruler_vt": 30, "ruler_cwe": 120, "ruler_fwe": 50}  # the rest write 128 tokens
NEEDLES = [name for name in RULER_TASKS if name.startswith("niah")]


def prompts_of(name, material, tokenizer, length=2048, samples=3, seed=0, start=None):
    made = make_prompts(name, material, tokenizer, length=length, samples=samples, seed=seed, start=start)
    assert not isinstance(made, Misfit)
    return made


@pytest.mark.parametrize(("length", "start"), [(1024, None), (2048, 3), (5000, None)], ids=["1K", "2K, BOS", "5K"])
@pytest.mark.parametrize("name", RULER_TASKS)
def test_prompts_fill_their_length_and_never_exceed_it(material, tokenizer, name, length, start):
    for prompt in prompts_of(name, material, tokenizer, length, start=start):
        spent = len(prompt.tokens) + WRITTEN.get(name, 128)
        assert spent <= length
        # The last piece of haystack that did not fit: a sentence of 400 characters at most, or a word that comes
        # several times.
        assert spent > length - 250
        assert (prompt.tokens[0] == start) == (start is not None)
        said = tokenizer.decode(prompt.tokens if start is None else prompt.tokens[1:])
        assert said == prompt.text.prompt
        assert all(answer in said for answer in prompt.text.answers)


def test_a_prompt_of_32_thousand_tokens(material, tokenizer):
    (prompt,) = prompts_of("niah_multikey_3", material, tokenizer, 32768, samples=1)
    assert 32768 - 128 - 260 < len(prompt.tokens) <= 32768 - 128


def asked_of(text):
    """The keys that a needle prompt asks for."""
    (keys,) = re.findall(
        r"\nWhat (?:is|are all) the special magic \w+ for (.+) mentioned in the provided text\? ", text
    )
    return re.split(r", and |, ", keys)


@pytest.mark.parametrize("name", NEEDLES)
def test_needles_are_those_of_their_task(material, tokenizer, name):
    hidden = {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}.get(name, 1)
    for prompt in prompts_of(name, material, tokenizer):
        text = prompt.text.prompt
        found = NEEDLE.findall(text)
        keys = asked_of(text)
        assert prompt.text.answers == tuple(value for key in keys for _, k, value in found if k == key) or (
            sorted(prompt.text.answers) == sorted(value for _, key, value in found if key in keys)
        )
        assert len(keys) == (4 if name == "niah_multiquery" else 1)
        assert len(prompt.text.answers) == (4 if name in ("niah_multiquery", "niah_multivalue") else 1)
        if name in ("niah_multikey_2", "niah_multikey_3"):
            body = text.split("\n")[1:-1]
            assert len(found) == len(body) > 15  # nothing but needles
        else:
            assert len(found) == hidden
        distinct_keys = 1 if name == "niah_multivalue" else len(found)
        assert len({key for _, key, _ in found}) == distinct_keys
        assert len({value for _, _, value in found}) == len(found)
        values = UUID if name in ("niah_single_3", "niah_multikey_3") else r"\d{7}"
        assert all(re.fullmatch(values, value) for _, _, value in found)
        if name == "niah_multikey_3":
            assert all(re.fullmatch(UUID, key) for _, key, _ in found)
        else:
            assert all(re.fullmatch(r"[a-z]+-[a-z]+", key) for _, key, _ in found)
        if name == "niah_single_1":
            assert set(text.split("\n")[1:-1]) - {NOISE} == {NEEDLE.search(text)[0]}


def test_the_wording_is_the_published_one(material, tokenizer):
    (one,) = prompts_of("niah_single_3", material, tokenizer, samples=1)
    (key,) = asked_of(one.text.prompt)
    assert one.text.prompt.startswith(
        "A special magic uuid is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the uuid afterwards.\n"
    )
    assert one.text.prompt.endswith(
        f"\nWhat is the special magic uuid for {key} mentioned in the provided text? "
        f"The special magic uuid for {key} mentioned in the provided text is"
    )
    (several,) = prompts_of("niah_multiquery", material, tokenizer, samples=1)
    first, second, third, fourth = asked_of(several.text.prompt)
    keys = f"{first}, {second}, {third}, and {fourth}"
    assert several.text.prompt.startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the numbers afterwards.\n"
    )
    assert several.text.prompt.endswith(
        f"\nWhat are all the special magic numbers for {keys} mentioned in the provided text? "
        f"The special magic numbers for {keys} mentioned in the provided text are"
    )


def test_depths_are_spread_over_the_whole_text(material, tokenizer):
    depths = []
    for prompt in prompts_of("niah_single_1", material, tokenizer, 2048, samples=60):
        lines = prompt.text.prompt.split("\n")[1:-1]
        depths.append(next(place for place, line in enumerate(lines) if line != NOISE) / (len(lines) - 1))
    assert min(depths) < 0.1
    assert max(depths) > 0.9
    assert sum(depths) / 60 == pytest.approx(0.5, abs=4 * (1 / 12 / 60) ** 0.5)  # four standard errors


def test_variables_are_handed_on_along_one_chain(material, tokenizer):
    for prompt in prompts_of("ruler_vt", material, tokenizer):
        example, asked = prompt.text.prompt.split("\n\n\n\n")
        for part, letters in ((example, 3), (asked, 5)):
            assert part.startswith(
                "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            )
            value, again = re.findall(r"assigned the value (\d{5}) in the text|assgined the value (\d{5}), they", part)
            values = {}
            for name, given in re.findall(r"VAR ([A-Z]+) = (?:VAR )?([A-Z]+|\d+)", part):
                values[name] = values.get(given, given)  # an assignment stands after those that it reads
            assert value[0] == again[1]
            assert set(values.values()) == {value[0]}
            assert len(values) == 5
            assert all(len(name) == letters for name in values)
            listed = part.partition("they are:")[2].split() if part is example else prompt.text.answers
            assert tuple(listed) == tuple(values)
        assert asked.endswith(
            f"\nQuestion: Find all variables that are assigned the value {value[0]} in the text above. Answer: "
            "According to the chain(s) of variable assignment in the text above, 5 variables are assgined the value "
            f"{value[0]}, they are:"
        )


@pytest.mark.parametrize(("length", "often", "rarely"), [(2048, 6, 1), (4096, 30, 3)])
def test_common_words_are_those_that_come_most_often(material, tokenizer, length, often, rarely):
    for prompt in prompts_of("ruler_cwe", material, tokenizer, length):
        example, asked = re.split(r"\n(?=Below)", prompt.text.prompt)
        for part in (example, asked):
            lead, listed, question = part.split("\n")
            assert lead == (
                "Below is a numbered list of words. In these words, some appear more often than others. Memorize the "
                "ones that appear most often."
            )
            assert question.startswith(
                "Question: What are the 10 most common words in the above list? Answer: The top 10 words that appear "
                "most often in the list are:"
            )
            entries = re.findall(r"(\d+)\. ([a-z]+)", listed)
            assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
            counts = Counter(word for _, word in entries)
            if part is asked:
                assert {counts[word] for word in prompt.text.answers} == {often}
                assert {count for word, count in counts.items() if word not in prompt.text.answers} == {rarely}
            else:
                said = question.partition("list are:")[2]
                assert re.findall(r"\d+\. ([a-z]+)", said) == [
                    word for word in re.findall(r"\d+\. ([a-z]+)", said) if counts[word] == max(counts.values())
                ]
                assert len(counts) == (40 if length == 4096 else 20)
        assert len(set(prompt.text.answers)) == 10


def test_frequent_words_follow_zipf(material, tokenizer):
    for prompt in prompts_of("ruler_fwe", material, tokenizer, 2048):
        found = re.fullmatch(
            r"Read the following coded text and track the frequency of each coded word\. Find the three most "
            r"frequently appeared coded words\. (.+)\nQuestion: Do not provide any explanation\. Please ignore the "
            r"dots '\.\.\.\.'\. What are the three most frequently appeared words in the above coded text\? Answer: "
            r"According to the coded text above, the three most frequently appeared words are:",
            prompt.text.prompt,
        )
        counts = Counter(found[1].split(" "))
        ranked = counts.most_common()
        assert ranked[0][0] == "..."
        assert tuple(word for word, _ in ranked[1:4]) == prompt.text.answers
        assert ranked[3][1] > ranked[4][1]
        # A share of 1 / (rank^2 zeta(2)), rounded down; the dots, a hundred of them or more, tell the size.
        for rank, (_, count) in enumerate(ranked[:5], 1):
            assert count == pytest.approx(ranked[0][1] / rank**2, abs=1.01)


def test_prompts_follow_the_seed(material, tokenizer):
    for name in RULER_TASKS:
        first = prompts_of(name, material, tokenizer, 1024, samples=2)
        assert first == prompts_of(name, material, tokenizer, 1024, samples=2)
        assert first[0] != first[1]
        other = prompts_of(name, material, tokenizer, 1024, samples=2, seed=1)
        assert first[0].text.answers != other[0].text.answers


@pytest.mark.parametrize("guess", [1, 40, 7000])
def test_the_largest_size_is_found(guess):
    rng = random.Random(guess)
    for _ in range(200):
        smallest = rng.randrange(1, 30)
        largest = rng.randrange(smallest, 40000)
        edge = rng.choice([smallest, largest, rng.randrange(smallest, largest + 1)])
        asked = []

        def fits(size, asked=asked, edge=edge):
            asked.append(size)
            return size <= edge

        found = largest_size(fits, smallest, largest, guess)
        assert found <= edge
        assert edge - found <= max(0, found // 128)
        assert len(asked) <= 40
        assert all(smallest < size <= largest for size in asked)


def test_the_search_ends_whatever_fits():
    rng = random.Random(0)
    for _ in range(100):
        seen = {}
        found = largest_size(lambda size, seen=seen: seen.setdefault(size, rng.random() < 0.5), 5, 30000, 300)
        assert found == 5 or seen[found]


class Odd:
    """A tokenizer that says other things of a text than the byte tokenizer does."""

    def __init__(self, encode=None, decode=None):
        self._inner = byte_tokenizer()
        self._encode, self._decode = encode, decode

    def __call__(self, text, **kwargs):
        ids = self._inner(text, **kwargs).input_ids
        return {"input_ids": self._encode(ids) if self._encode else ids}

    def decode(self, ids, **kwargs):
        text = self._inner.decode(ids)
        return self._decode(text) if self._decode else text


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_2", "ruler_vt", "ruler_cwe", "ruler_fwe"])
def test_a_tokenizer_that_counts_nothing_is_refused(material, name):
    with pytest.raises(ModelError, match=f"does not give back .* of a prompt of {name}"):
        make_prompts(name, material, Odd(encode=lambda ids: []), length=600, samples=1, seed=0, start=None)


def test_a_tokenizer_that_loses_digits_is_refused(material):
    lossy = Odd(decode=lambda text: re.sub(r"\d", "0", text))
    with pytest.raises(ModelError, match="needs a tokenizer that keeps words and digits"):
        make_prompts("niah_single_1", material, lossy, length=2048, samples=1, seed=0, start=None)


def test_too_little_text_is_refused():
    with pytest.raises(DataError, match="holds 1 sentences"):
        Material([Document("a", "One sentence.")])


def test_string_match_golden():
    assert string_match(" The BLUE fox, 1234567.", ["blue", "1234567", "dog"]) == pytest.approx(2 / 3)
    assert string_match("", ["a"]) == 0


def settings_of(**changed):
    return EvaluationSettings(**{"ruler_lengths": (1500, 2000), "niah_samples": 4, **changed})


@pytest.fixture
def writes(monkeypatch):
    """Has the model write what a function makes of a prompt's text."""

    def put(answer):
        def fake(loaded, writings, *, stop, batch_size, reporter, description):
            texts = [answer(loaded.tokenizer.decode(writing.tokens)) for writing in writings]
            return [list(loaded.tokenizer(text).input_ids) for text in texts]

        monkeypatch.setattr(ruler, "write_greedily", fake)

    return put


def measured(name, material, loaded, **settings):
    return measure_ruler(name, material, loaded, settings_of(**settings), batch_size=None, reporter=SilentReporter())


def looked_up(text):
    keys = asked_of(text)
    return " " + " and ".join(value for _, key, value in NEEDLE.findall(text) if key in keys)


def test_a_model_that_looks_up_has_all(material, tiny, writes):
    writes(looked_up)
    for name in ("niah_single_3", "niah_multivalue"):
        scores = measured(name, material, tiny)
        assert [(score.length, score.estimate.value, score.estimate.n) for score in scores] == [
            (1500, 1.0, 4),
            (2000, 1.0, 4),
        ]
        assert all(score.metric == "string_match" and score.higher_is_better for score in scores)
        assert scores[0].estimate.method == ("accuracy" if name == "niah_single_3" else "mean")


def test_a_part_of_the_answers_counts_as_that(material, tiny, writes):
    calls = []

    def one_of_four_every_other_time(text):
        calls.append(text)
        return looked_up(text) if len(calls) % 2 else looked_up(text)[:9]

    writes(one_of_four_every_other_time)
    (score,) = measured("niah_multivalue", material, tiny, ruler_lengths=(1500,))
    assert score.estimate.value == pytest.approx((1 + 1 + 1 / 4 + 1 / 4) / 4)


def test_a_row_ends_once_it_has_all_answers(material, tiny, monkeypatch):
    def fake(loaded, writings, **_):
        for writing in writings:
            answer = loaded.tokenizer(looked_up(loaded.tokenizer.decode(writing.tokens))).input_ids
            assert writing.limit == 128
            assert not writing.ends(answer[:-1])
            assert writing.ends(answer)
        return [[] for _ in writings]

    monkeypatch.setattr(ruler, "write_greedily", fake)
    (score,) = measured("niah_multiquery", material, tiny, ruler_lengths=(1500,))
    assert score.estimate.value == 0


def test_processes_share_the_prompts(material, tiny, writes):
    """Each fills the places of its prompts and leaves the others at zero; all of them summed are one process's."""
    right = re.compile(r"[02468] and")

    def now_and_then(text):
        found = looked_up(text)
        return found if right.search(found) else found[:9]

    writes(now_and_then)
    found = []

    @dataclass(frozen=True)
    class Half:
        rank: int
        size: int = 2

        def add(self, tensors):
            found.append(tensors[0].clone())

    for rank in range(2):
        measured("niah_multivalue", material, replace(tiny, processes=Half(rank)), ruler_lengths=(1500,), limit=7)
    assert [int((part > 0).sum()) for part in found] == [4, 3]
    (alone,) = measured("niah_multivalue", material, tiny, ruler_lengths=(1500,), limit=7)
    assert float((found[0] + found[1]).mean()) == pytest.approx(alone.estimate.value)
    assert 1 / 4 < alone.estimate.value < 1


def test_settings_are_stored(material, tiny, writes):
    writes(looked_up)
    (score,) = measured("niah_single_1", material, tiny, ruler_lengths=(900, 900), limit=2, bos="always", seed=4)
    wanted = {"samples": 2, "written": 128, "start_token": "<s>", "seed": 4, "bos": "always"}
    assert wanted.items() <= score.settings.items()
    assert {"data", "tokenizer", "form"} <= set(score.settings)


def test_a_length_without_room_is_named(material, tiny, writes):
    writes(lambda text: "")
    (score,) = measured("niah_multivalue", material, tiny, ruler_lengths=(300, 1500))
    assert score.length == 1500
    assert re.fullmatch(r"takes \d+ tokens at least: not measured at 300", score.notes[0])
    reporter = SilentReporter()
    assert (
        measure_ruler(
            "ruler_cwe", material, tiny, settings_of(ruler_lengths=(300,)), batch_size=None, reporter=reporter
        )
        == []
    )
    assert reporter.warnings[0].startswith("ruler_cwe takes ")


SMALL = EvaluationSettings(ruler_lengths=(600, 1200), limit=2)


@pytest.fixture(scope="module")
def evaluation(tiny_folder):
    return evaluate([("model", resolve_model(str(tiny_folder)))], ["niah_single_1", "niah_multikey_1"], SMALL)


def test_scores_stand_beside_others_and_are_checked(evaluation):
    rows = evaluation.rows()
    assert [(row.task, row.length) for row in rows] == [
        ("niah_single_1", 600),
        ("niah_single_1", 1200),
        ("niah_multikey_1", 1200),
    ]
    assert Evaluation.from_json(json.loads(json.dumps(evaluation.to_json(), allow_nan=False))) == evaluation
    found = failures(evaluation, [parse_check("niah_single_1.string_match < 0.5")])
    assert len(found) == 2
    assert "at 1200 is 0" in found[1]


def test_batches_change_nothing_and_nothing_is_measured_twice(evaluation, tiny, tiny_folder, monkeypatch):
    alone = evaluate_model(
        tiny.model, tiny.tokenizer, ["niah_single_1", "niah_multikey_1"], SMALL, options=EvaluationOptions(batch_size=1)
    )
    assert alone.models[0].scores == evaluation.models[0].scores
    monkeypatch.setattr("lapcli.families.loading.load_model", lambda *_args, **_more: pytest.fail("a model was loaded"))
    again = evaluate(
        [("model", resolve_model(str(tiny_folder)))], ["niah_single_1", "niah_multikey_1"], SMALL, earlier=evaluation
    )
    assert again.models[0].scores == evaluation.models[0].scores


def plan_of(tiny_folder, tasks, reporter=None, **settings):
    return plan_evaluation(
        [("model", resolve_model(str(tiny_folder)))],
        tasks,
        EvaluationSettings(**settings),
        EvaluationOptions(),
        device="cpu",
        dtype=torch.float32,
        kernel="auto",
        reporter=reporter,
    )


def test_lengths_without_room_are_found_before_a_model_is_loaded(tiny_folder):
    reporter = SilentReporter()
    plan = plan_of(tiny_folder, ["ruler"], reporter, ruler_lengths=(700, 2100))
    # In bytes: variable tracking takes 2211 at least, the list of words some 2000, its first prompt's exactly.
    assert [info.name for info in plan.missing("model")] == [name for name in RULER_TASKS if name != "ruler_vt"]
    said = {text.split()[0]: text for text in reporter.warnings}
    assert said["ruler_vt"] == "ruler_vt takes 2211 tokens at least: not measured at 700, 2100"
    assert said["ruler_cwe"].endswith("at 700")
    assert plan.remarks == tuple(reporter.warnings)
    with pytest.raises(UsageError, match="ruler_vt takes") as caught:
        plan_of(tiny_folder, ["ruler_vt"], ruler_lengths=(1200,))
    assert "--ruler-lengths" in str(caught.value)


def test_needles_are_left_out_as_rulers_tasks_are(tiny_folder):
    reporter = SilentReporter()
    plan = plan_of(tiny_folder, ["niah", "niah_noise"], reporter, niah_lengths=(64, 64, 400))
    assert [info.name for info in plan.missing("model")] == ["niah", "niah_noise"]
    assert [text.partition(" takes ")[0] for text in reporter.warnings] == ["niah", "niah_noise"]
    assert all(text.endswith(" tokens at least: not measured at 64") for text in reporter.warnings)
    assert plan.lengths == {"niah": (64, 64, 400), "niah_noise": (64, 64, 400)}
    plan = plan_of(tiny_folder, ["niah", "builtin"], niah_lengths=(64, 32))
    assert [info.name for info in plan.missing("model")] == ["builtin"]
    with pytest.raises(UsageError, match="niah takes") as caught:
        plan_of(tiny_folder, ["niah"], niah_lengths=(64, 32))
    assert caught.value.hint == "give longer --niah-lengths"
    with pytest.raises(UsageError, match=r"niah takes .*; ruler_vt takes") as caught:
        plan_of(tiny_folder, ["ruler_vt", "niah"], niah_lengths=(64,), ruler_lengths=(700,))
    assert caught.value.hint == "give longer --niah-lengths and --ruler-lengths"


def test_groups_have_the_lengths_of_their_members(tiny_folder):
    plan = plan_of(tiny_folder, ["ruler", "builtin"], ruler_lengths=(700, 2500))
    assert plan.lengths == dict.fromkeys(("ruler", *RULER_TASKS), (700, 2500))


def test_lengths_are_those_that_the_model_takes():
    def lengths(*configs, **settings):
        return resolve_ruler_lengths(EvaluationSettings(**settings), configs).ruler_lengths

    assert lengths({}) == (1024, 2048, 4096)
    assert lengths({"max_position_embeddings": 2048}, {"n_positions": 8192}) == (1024, 2048)
    assert lengths({"max_position_embeddings": 700}) == (700,)
    assert lengths({"max_position_embeddings": 700}, ruler_lengths=(32768,)) == (32768,)


def test_the_group_is_the_mean_at_the_lengths_that_all_were_measured_at():
    names = TASKS["ruler"].members
    assert set(names) == set(RULER_TASKS)
    assert [info.name for info in expand(parse_tasks(["ruler"]))] == list(names)
    scores = [
        Score(name, "string_match", True, mean([0.0, place / 10]), {}, length=length)
        for place, name in enumerate(names)
        for length in (1024, 2048)
        if (name, length) != ("ruler_cwe", 1024)
    ]
    (found,) = group_scores([TASKS["ruler"]], scores)
    assert (found.task, found.metric, found.length) == ("ruler", "mean", 2048)
    assert found.estimate.value == pytest.approx(sum(place / 20 for place in range(11)) / 11)
