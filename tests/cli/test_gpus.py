"""`--gpus N` of calibrate, prune and eval: refused before anything starts, started once, not at all without work."""

import pytest

from lapcli.testing.models import tiny_gated_deltanet

SIZES = ["--samples", "4", "--seq-len", "64"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_gated_deltanet(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def commands(tiny, text):
    return {
        "calibrate": ["calibrate", tiny, "--data", text, *SIZES],
        "prune": ["prune", tiny, "--data", text, *SIZES],
        "eval": ["eval", f"text:{text}", "--model", tiny, "--limit", "2", "--max-length", "64"],
    }


@pytest.fixture
def launched(monkeypatch):
    """What was to be started, which does nothing and ends with 3."""
    asked = []

    def launch(arguments, count):
        asked.append((count, list(arguments)))
        return 3

    monkeypatch.setattr("lapcli.launching.launch", launch)
    return asked


@pytest.mark.parametrize("name", ["calibrate", "prune", "eval"])
def test_refused_before_anything_starts(lapcli, commands, launched, name, tmp_path):
    for options, wanted in (
        (["--gpus", "0"], "--gpus is 0; it should be at least 1"),
        (["--gpus", "3", "--device", "cuda:0"], "CUDA devices"),
        (["--gpus", "2", "--device", "meta"], "CUDA devices"),
        *([] if name == "eval" else [(["--gpus", "5", "--device", "cpu"], "so many processes cannot share 4 samples")]),
    ):
        code, out, err = lapcli(*commands[name], *options)
        assert (code, out) == (2, ""), (options, err)
        assert wanted in err, options
    assert not launched
    assert not (tmp_path / "lapcli-run").exists()


@pytest.mark.parametrize("name", ["calibrate", "prune", "eval"])
def test_started_as_it_was_asked_for_and_only_where_there_is_work(lapcli, commands, launched, name):
    command = [*map(str, commands[name]), "--device", "cpu"]
    assert lapcli(*command, "--gpus", "2", "--dry-run")[0] == 0
    assert not launched
    # The exit code is that of the processes.
    assert lapcli(*command, "--gpus", "2")[0] == 3
    assert launched == [(2, [*command, "--gpus", "2"])]
    code, _out, err = lapcli(*command, "--gpus", "1")
    assert code == 0, err
    code, _out, err = lapcli(*command, "--gpus", "2")
    assert code == 0, err
    assert "nothing to do" in err
    assert len(launched) == 1
