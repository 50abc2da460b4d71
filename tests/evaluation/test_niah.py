import re

import pytest
import torch

from lapcli.data.builtin import heldout_builtin_text
from lapcli.data.documents import Document
from lapcli.data.recall import RULER_NOISE
from lapcli.errors import DataError, ModelError, UsageError
from lapcli.evaluation.decoding import Writing, write_greedily
from lapcli.evaluation.niah import Haystack, make_prompts, measure_niah, noise_documents
from lapcli.evaluation.scoring import Request, score
from lapcli.evaluation.settings import EvaluationSettings
from lapcli.reporting import SilentReporter
from lapcli.testing.models import byte_tokenizer

NEEDLE = re.compile(r"One of the special magic numbers for (\S+) is: (\d{7})\.")
PROSE = [
    Document(f"p{number}", f"Sentence {number} of the text tells of a {word} thing. It was {word}er than others!")
    for number, word in enumerate(["small", "great", "cold", "old", "quick", "slow", "long", "short"] * 5)
]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def builtin(tokenizer):
    return Haystack(heldout_builtin_text(), tokenizer)


def prompts_of(haystack, tokenizer, length, samples=7, seed=0, start=None):
    return make_prompts(haystack, tokenizer, length=length, samples=samples, seed=seed, start=start)


@pytest.mark.parametrize("start", [None, 1], ids=["no BOS", "BOS"])
@pytest.mark.parametrize("length", [400, 512, 1024, 2048])
def test_prompts_stay_within_their_length_and_hold_the_needle(builtin, tokenizer, length, start):
    prompts = prompts_of(builtin, tokenizer, length, start=start)
    for prompt in prompts:
        assert len(prompt.tokens) + len(prompt.answer) <= length
        text = tokenizer.decode(prompt.tokens, skip_special_tokens=True)
        assert NEEDLE.findall(text) == [(prompt.needle.key, prompt.needle.value)]
        assert text.count(prompt.needle.value) == 1
        assert text.startswith("A special magic number is hidden within the following text. Make sure to memorize it.")
        assert text.endswith(
            f"\nWhat is the special magic number for {prompt.needle.key} mentioned in the provided text? "
            f"The special magic number for {prompt.needle.key} mentioned in the provided text is"
        )
        assert tokenizer.decode(prompt.answer) == f" {prompt.needle.value}"
        assert (prompt.tokens[0] == 1) == (start == 1)
    # Running text fills what the needle leaves; sentences of the corpus are far shorter than these prompts.
    assert sum(len(prompt.tokens) for prompt in prompts) > 0.9 * length * len(prompts)


def test_noise_is_rulers_repeated_sentences_a_line_each(tokenizer):
    for prompt in prompts_of(Haystack(noise_documents(), tokenizer, "\n"), tokenizer, 1024):
        lines = tokenizer.decode(prompt.tokens).split("\n")[1:-1]
        noise = [line for line in lines if not NEEDLE.fullmatch(line)]
        assert len(noise) == len(lines) - 1
        first = RULER_NOISE.index(noise[0])
        # At the very end, sentences that no longer fit are passed over.
        sure = len(noise) - len(RULER_NOISE)
        assert noise[:sure] == [RULER_NOISE[(first + n) % len(RULER_NOISE)] for n in range(sure)]
        assert set(noise) == set(RULER_NOISE)


def test_depths_are_spread_evenly(tokenizer):
    prompts = prompts_of(Haystack(PROSE, tokenizer), tokenizer, 1024, samples=5)
    assert [prompt.depth for prompt in prompts] == [0, 0.25, 0.5, 0.75, 1]
    for prompt in prompts:
        body = tokenizer.decode(prompt.tokens).split("\n")[1]
        found = NEEDLE.search(body)
        assert found is not None
        before = found.start() / (len(body) - (found.end() - found.start()))
        # A place between sentences: half a sentence of about 50 characters in some 600 to either side.
        assert before == pytest.approx(prompt.depth, abs=0.08)


def test_one_prompt_hides_its_needle_in_the_middle(builtin, tokenizer):
    assert prompts_of(builtin, tokenizer, 512, samples=1)[0].depth == 0.5


def test_prompts_follow_the_seed(builtin, tokenizer):
    first = prompts_of(builtin, tokenizer, 512)
    assert first == prompts_of(builtin, tokenizer, 512)
    other = prompts_of(builtin, tokenizer, 512, seed=1)
    assert not {prompt.needle.value for prompt in first} & {prompt.needle.value for prompt in other}
    assert len({prompt.needle.value for prompt in first}) == len(first)


def test_a_length_without_room_is_refused(builtin, tokenizer):
    with pytest.raises(UsageError, match=r"more than the length 64"):
        prompts_of(builtin, tokenizer, 64)


def test_too_little_text_is_refused(tokenizer):
    with pytest.raises(DataError, match="holds 2 sentences"):
        Haystack(PROSE[:1], tokenizer)


def test_a_tokenizer_that_loses_digits_is_refused(tokenizer):
    class Lossy:
        def __call__(self, *args, **kwargs):
            return tokenizer(*args, **kwargs)

        def decode(self, ids, **kwargs):
            return re.sub(r"\d", "0", tokenizer.decode(ids, **kwargs))

    with pytest.raises(ModelError, match="does not give back the needle"):
        prompts_of(Haystack(PROSE, Lossy()), Lossy(), 512, samples=1)


def measure(loaded, documents=PROSE, **settings):
    return measure_niah(
        documents,
        loaded,
        EvaluationSettings(**{"niah_lengths": (400, 512), "niah_samples": 6, **settings}),
        batch_size=None,
        reporter=SilentReporter(),
    )


def copying(ids):
    """Logits of a model that finds the needle by reading, and copies it after the question."""
    tokenizer = byte_tokenizer()
    logits = torch.zeros(*ids.shape, 259)
    for row, tokens in enumerate(ids):
        text = tokenizer.decode(tokens)
        found = NEEDLE.search(text)
        assert found is not None
        answer = tokenizer(f" {found[2]}").input_ids
        begin = text.rindex("mentioned in the provided text is") + len("mentioned in the provided text is")
        place = len(tokenizer(text[:begin]).input_ids) - 1
        for step, token in enumerate(answer):
            if place + step < ids.shape[1]:
                logits[row, place + step, token] = 9.0
    return logits


def test_a_model_that_copies_recalls_all(model_of_logits):
    scores = measure(model_of_logits(copying))
    assert [score.length for score in scores] == [400, 512]
    assert [score.estimate.value for score in scores] == [1.0, 1.0]
    assert all(score.estimate.n == 6 and score.higher_is_better for score in scores)


def test_a_length_without_room_is_left_out_and_noted(model_of_logits):
    (found,) = measure(model_of_logits(copying), niah_lengths=(64, 400, 32))
    assert found.length == 400
    (note,) = found.notes
    assert re.fullmatch(r"takes \d+ tokens at least: not measured at 64, 32", note)
    assert measure(model_of_logits(copying), niah_lengths=(64,)) == []


def test_one_wrong_digit_is_a_miss(model_of_logits):
    def nearly(ids):
        logits = copying(ids)
        # A blank and five digits in, the sixth digit of every third row comes out as token 3.
        rows, places, _ = (logits == 9.0).nonzero(as_tuple=True)
        for row in range(0, len(ids), 3):
            place = places[rows == row][6]
            logits[row, place, 3] = 10.0
        return logits

    scores = measure(model_of_logits(nearly), niah_lengths=(400,))
    assert scores[0].estimate.value == pytest.approx(4 / 6)


def test_settings_are_stored(model_of_logits):
    (score,) = measure(model_of_logits(copying), niah_lengths=(400, 400), limit=3, bos="always", seed=4)
    assert score.settings["samples"] == 3
    assert score.settings["start_token"] == "<s>"
    assert score.settings["seed"] == 4
    assert score.estimate.n == 3


def test_forced_scores_are_those_of_greedy_decoding(tiny):
    """Half of the answers are what the model says, half differ in one token, so that both outcomes occur."""
    haystack = Haystack(PROSE, tiny.tokenizer)
    prompts = prompts_of(haystack, tiny.tokenizer, 420, samples=6)
    writings = [Writing(prompt.tokens, 8) for prompt in prompts]
    said = write_greedily(tiny, writings, batch_size=6, reporter=SilentReporter(), description="")
    for number, answer in enumerate(said):
        if number % 2:
            answer[number] = (answer[number] + 1) % 259

    forced = score(
        tiny,
        [Request(prompt.tokens + answer, 8) for prompt, answer in zip(prompts, said, strict=True)],
        batch_size=3,
        reporter=SilentReporter(),
        description="",
    )
    assert [answer.greedy for answer in forced] == [True, False] * 3


def generated(model, prompt, count):
    """The most probable token, one whole pass without a cache for each."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_scores_are_those_of_a_small_generate(tiny, monkeypatch):
    """Every other answer is made to be what the model says, in a haystack whose prompts are made a few at a time."""
    from lapcli.evaluation import niah

    haystack = Haystack(PROSE, tiny.tokenizer)
    whole = prompts_of(haystack, tiny.tokenizer, 420, samples=5)
    monkeypatch.setattr(niah, "_TOGETHER", 2)
    prompts = prompts_of(haystack, tiny.tokenizer, 420, samples=5)
    assert prompts == whole
    made = niah.make_prompts

    def known(*arguments, **options):
        return [
            prompt._replace(answer=generated(tiny.model, prompt.tokens, len(prompt.answer))) if number % 2 else prompt
            for number, prompt in enumerate(made(*arguments, **options))
        ]

    def share():
        (found,) = measure(tiny, niah_lengths=(420,), limit=5)
        return found.estimate.value

    right = [generated(tiny.model, prompt.tokens, len(prompt.answer)) == prompt.answer for prompt in prompts]
    assert share() == pytest.approx(sum(right) / 5)
    monkeypatch.setattr(niah, "make_prompts", known)
    assert share() == pytest.approx(sum(found or number % 2 for number, found in enumerate(right)) / 5)
