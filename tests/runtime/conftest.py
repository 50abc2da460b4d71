import pytest
import torch

import lapcli.runtime.layers
from lapcli.families.loading import load_model, load_tokenizer, resolve_model
from lapcli.runtime import Engine
from lapcli.testing.models import tiny_gated_deltanet


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny_gated_deltanet(tmp_path_factory.mktemp("runtime") / "gdn")


@pytest.fixture(scope="session")
def source(folder):
    return resolve_model(str(folder))


@pytest.fixture(scope="session")
def reference(source):
    return load_model(source)


@pytest.fixture(scope="session")
def tokenizer(source):
    return load_tokenizer(source)


@pytest.fixture
def engine(source):
    return Engine(load_model(source), max_rows=4)


@pytest.fixture
def few_products(monkeypatch):
    """Whether the sum was left to the reader, of each product of few rows; those that leave it do so in three parts.

    Gate and up, activated, are "gated".
    """
    calls = []
    plain, gated = lapcli.runtime.layers.few_linear, lapcli.runtime.layers.few_swiglu

    def product(x, weight, bias=None, *, scale=1.0, apart=False, ready=False):
        calls.append(apart)
        assert ready
        if not apart:
            return plain(x, weight, bias, scale=scale)
        parts = zip(x.chunk(3, 1), weight.chunk(3, 1), (bias, None, None), strict=True)
        return torch.cat([plain(a, b.contiguous(), c, scale=scale, apart=True) for a, b, c in parts])

    def activated(x, weight, bias=None, *, ready=False):
        calls.append("gated")
        assert ready
        return gated(x, weight, bias)

    monkeypatch.setattr(lapcli.runtime.layers, "few_linear", product)
    monkeypatch.setattr(lapcli.runtime.layers, "few_swiglu", activated)
    return calls
