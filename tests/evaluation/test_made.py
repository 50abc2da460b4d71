"""Prompts are made once for models with the same tokenizer, as long as they are not too many."""

from types import SimpleNamespace

import pytest

from lapcli.evaluation import made, niah, ruler
from lapcli.evaluation.made import Made
from lapcli.evaluation.run import evaluate
from lapcli.evaluation.settings import EvaluationSettings
from lapcli.families.loading import resolve_model
from lapcli.testing.models import tiny_gated_deltanet

SMALL = EvaluationSettings(ruler_lengths=(600,), niah_lengths=(400, 500), limit=2)


@pytest.fixture
def calls(monkeypatch):
    """What prompts were made of, in order."""
    found = []
    for module in (niah, ruler):
        make = module.make_prompts

        def counted(*args, make=make, **options):
            found.append(options["length"])
            return make(*args, **options)

        monkeypatch.setattr(module, "make_prompts", counted)
    return found


def test_two_models_are_asked_the_same_prompts(tmp_path, tiny_folder, calls):
    other = resolve_model(str(tiny_gated_deltanet(tmp_path, num_hidden_layers=1)))
    models = [("base", resolve_model(str(tiny_folder))), ("other", other)]
    together = evaluate(models, ["niah", "niah_single_1"], SMALL)
    assert calls == [400, 500, 600]
    for label, source in models:
        alone = evaluate([(label, source)], ["niah", "niah_single_1"], SMALL)
        (wanted,) = (model for model in together.models if model.label == label)
        assert alone.models[0].scores == wanted.scores
    assert calls == [400, 500, 600] * 3


def test_what_is_kept_goes_by_its_key_and_is_bounded(monkeypatch):
    monkeypatch.setattr(made, "_MOST_TOKENS", 10)

    def prompts(*sizes):
        return lambda: [SimpleNamespace(tokens=[0] * size) for size in sizes]

    kept = Made()
    first = kept.prompts("a", prompts(4, 3))
    assert kept.prompts("a", prompts(1)) is first
    assert len(kept.prompts("b", prompts(4))) == 1  # no room for it beside the first
    assert len(kept.prompts("b", prompts(4, 4))) == 2
    second = kept.prompts("c", prompts(3))
    assert kept.prompts("c", prompts(1, 1)) is second
    assert kept.prompts("d", lambda: "no room") == "no room"
    assert kept.prompts("d", prompts()) == []
    alone = Made(wanted=False)
    assert len(alone.prompts("a", prompts(1))) == 1
    assert len(alone.prompts("a", prompts(1, 1))) == 2
