from types import SimpleNamespace

import pytest
import torch

from lapcli.data.builtin import heldout_builtin_text
from lapcli.evaluation.ruler_texts import Material
from lapcli.evaluation.scoring import LoadedModel
from lapcli.families.loading import load_model, load_tokenizer, resolve_model
from lapcli.testing.models import byte_tokenizer, tiny_gated_deltanet


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return tiny_gated_deltanet(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_folder):
    source = resolve_model(str(tiny_folder))
    return LoadedModel(model=load_model(source), tokenizer=load_tokenizer(source), name="tiny")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_model("demo:gdn"))


@pytest.fixture(scope="module")
def material():
    return Material(heldout_builtin_text())


class ModelOfLogits:
    """A model whose logits are a function of the ids: enough of one for scoring."""

    def __init__(self, logits, vocab_size=259):
        self._logits = logits
        self.config = SimpleNamespace(vocab_size=vocab_size)
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.rows = []

    def forward(self, input_ids, use_cache):
        assert use_cache is False
        self.rows.append(len(input_ids))
        return SimpleNamespace(logits=self._logits(input_ids))

    __call__ = forward


@pytest.fixture
def model_of_logits():
    """Builds a `LoadedModel` from a function of ids `[B, T]` to logits `[B, T, 259]`."""
    return lambda logits: LoadedModel(model=ModelOfLogits(logits), tokenizer=byte_tokenizer(), name="made up")


@pytest.fixture
def uniform(model_of_logits):
    return model_of_logits(lambda ids: torch.zeros(*ids.shape, 259))
