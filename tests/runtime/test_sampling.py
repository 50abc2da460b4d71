"""Choosing tokens: the distribution that is asked for, and a row's tokens by its own seed and position alone."""

import math

import pytest
import torch

from lapcli.errors import UsageError
from lapcli.runtime import sampling
from lapcli.runtime.sampling import Choices, choose, gumbel, mode_of
from lapcli.runtime.settings import GenerationSettings


def choices_of(rows, temperature=1.0, top_k=0, top_p=1.0, seeds=None):
    choices = Choices(rows, torch.device("cpu"))
    choices.temperature.fill_(temperature)
    choices.top_k.fill_(top_k)
    choices.top_p.fill_(top_p)
    choices.seed.copy_(torch.arange(rows) if seeds is None else torch.as_tensor(seeds))
    return choices


def counts(logits, draws=20_000, **settings):
    """How often each token comes, over as many rows as draws."""
    rows = logits.expand(draws, -1)
    mode = mode_of(settings.get("temperature", 1.0), settings.get("top_k", 0), settings.get("top_p", 1.0))
    chosen = choose(rows, torch.full((draws,), 17), choices_of(draws, **settings), mode)
    return torch.bincount(chosen, minlength=logits.shape[-1]) / draws


def agree(found, wanted, draws=20_000):
    """Within four standard errors of a frequency, which a seed that is fixed passes or never does."""
    return bool(((found - wanted).abs() <= 4 * (wanted * (1 - wanted) / draws).sqrt() + 1e-12).all())


def test_draws_have_the_distribution_of_the_logits():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, -4.0, 1.9])
    assert agree(counts(logits), logits.softmax(-1))
    assert agree(counts(logits, temperature=0.5), (logits / 0.5).softmax(-1))


def test_top_k_and_top_p_cut_where_they_should():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]).log()
    assert agree(counts(logits, top_k=2), torch.tensor([2, 1, 0, 0, 0]) / 3)
    # The first two have 0.75, so a third is needed for 0.8.
    assert agree(counts(logits, top_p=0.8), torch.tensor([4, 2, 1, 0, 0]) / 7)
    # Of the three that are left, the first has 4 / 7.
    assert agree(counts(logits, top_k=3, top_p=0.5), torch.tensor([1.0, 0, 0, 0, 0]))
    # More than there are, and all of them.
    assert agree(counts(logits, top_k=99), logits.softmax(-1))
    # Equal ones stay together.
    assert agree(counts(logits, top_k=4), logits.softmax(-1))


def test_the_likeliest_always_stays():
    logits = torch.tensor([[0.0, 0.1, 0.2]])
    assert choose(logits, torch.tensor([3]), choices_of(1, top_p=1e-9), "filtered").item() == 2
    assert choose(logits, torch.tensor([3]), choices_of(1, top_k=1), "filtered").item() == 2
    assert choose(logits, torch.tensor([3]), choices_of(1, temperature=1e-4), "draw").item() == 2


def test_rows_of_all_kinds_share_a_step():
    """In the mode that is enough for all, each row chooses what it would alone."""
    generator = torch.Generator().manual_seed(0)
    logits, positions = torch.randn(4, 50, generator=generator), torch.tensor([3, 1000, 7, 7])
    choices = choices_of(4, seeds=[5, 2**40 + 1, -3, 5])
    choices.temperature.copy_(torch.tensor([0.0, 1.0, 1.5, 0.7]))
    choices.top_k.copy_(torch.tensor([0, 0, 5, 0]))
    choices.top_p.copy_(torch.tensor([1.0, 1.0, 1.0, 0.6]))
    together = choose(logits, positions, choices, "filtered")
    for row, (temperature, top_k, top_p) in enumerate([(0.0, 0, 1.0), (1.0, 0, 1.0), (1.5, 5, 1.0), (0.7, 0, 0.6)]):
        alone = choices_of(1, temperature, top_k, top_p, seeds=[[5, 2**40 + 1, -3, 5][row]])
        chosen = choose(logits[row : row + 1], positions[row : row + 1], alone, mode_of(temperature, top_k, top_p))
        assert chosen.item() == together[row].item()


def test_noise_is_gumbel_and_differs_by_seed_position_and_token():
    noise = gumbel(torch.tensor([0, 1, 0, 2**33]), torch.tensor([5, 5, 6, 5]), 50_000)
    assert bool(noise.isfinite().all())
    # Mean gamma, variance pi^2 / 6; four standard errors of 50 000 draws.
    assert (noise.mean(dim=1) - 0.5772156649).abs().max() < 4 * math.pi / math.sqrt(6 * 50_000)
    assert (noise.var(dim=1) - math.pi**2 / 6).abs().max() < 4 * math.sqrt(4.4 * (math.pi**2 / 6) ** 2 / 50_000)
    correlations = torch.corrcoef(noise) - torch.eye(4)
    assert correlations.abs().max() < 4 / math.sqrt(50_000)
    steps = gumbel(torch.zeros(2000, dtype=torch.int64), torch.arange(2000), 3)
    assert torch.corrcoef(torch.stack([steps[:-1, 0], steps[1:, 0], steps[1:, 1]])).fill_diagonal_(0).abs().max() < 0.1


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_new_tokens": 0}, "max-new-tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top-k"),
        ({"top_p": 0.0}, "top-p"),
        ({"top_p": 1.5}, "top-p"),
        ({"stop": ("a", "")}, "stop"),
    ],
    ids=lambda value: str(value),
)
def test_settings_that_make_no_sense(fields, word):
    with pytest.raises(UsageError, match=f"--{word}"):
        GenerationSettings(**fields)


def test_many_rows_are_drawn_as_few_are(monkeypatch):
    """In parts, since drawing takes fifty bytes a score: the tokens are those of all together."""
    generator = torch.Generator().manual_seed(0)
    choices = Choices(7, torch.device("cpu"))
    choices.temperature.copy_(torch.tensor([0.0, 1.0, 0.7, 1.0, 2.0, 0.0, 1.0]))
    choices.top_k.copy_(torch.tensor([0, 3, 0, 0, 5, 0, 0]))
    choices.top_p.copy_(torch.tensor([1.0, 1.0, 0.5, 1.0, 0.9, 1.0, 1.0]))
    choices.seed.copy_(torch.arange(7))
    logits, positions = torch.randn(6, 50, generator=generator), torch.arange(6) + 9
    for mode in ("draw", "filtered"):
        whole = choose(logits, positions, choices, mode)
        for scores, together in ((50, 1), (100, 2), (249, 4), (300, 6)):
            monkeypatch.setattr(sampling, "SCORES", scores)
            assert sampling.rows_together(50) == together
            assert torch.equal(choose(logits, positions, choices, mode), whole)
        monkeypatch.undo()
    assert sampling.rows_together(10**9) == 1
