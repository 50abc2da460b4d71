import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lapcli.serving import logs
from lapcli.testing.models import tiny_gated_deltanet
from lapcli.testing.serving import local_server

SCRIPTED = (sys.executable, str(Path(__file__).with_name("scripted_engine.py")))


class CaughtAlone:
    """Standard error where pytest catches it. Between tests, and their phases, it does not, and a server runs on."""

    def write(self, text):
        if sys.stderr is not sys.__stderr__:
            sys.stderr.write(text)

    def flush(self):
        sys.stderr.flush()


@pytest.fixture(scope="session", autouse=True)
def _no_logs_among_pytests_lines(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("capture") != "no":
            patch.setattr(logs, "sys", SimpleNamespace(stderr=CaughtAlone()))
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny_gated_deltanet(tmp_path_factory.mktemp("serving") / "tiny", max_position_embeddings=512)


@pytest.fixture
def scripted(folder, monkeypatch):
    """Starts servers on the engine without a model; `rows`, `pace` (seconds a token), `memory` (bytes) are its."""

    def start(rows=2, pace=0.005, memory=0, steady=False, **arguments):
        monkeypatch.setattr("lapcli.serving.supervisor._PAUSE", 0.0)
        monkeypatch.setenv("SCRIPTED_ROWS", str(rows))
        monkeypatch.setenv("SCRIPTED_PACE", str(pace))
        monkeypatch.setenv("SCRIPTED_MEMORY", str(memory))
        monkeypatch.setenv("SCRIPTED_STEADY", "1" if steady else "")
        return local_server(folder, command=SCRIPTED, **{"max_length": 100, **arguments})

    return start
