import pytest

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
