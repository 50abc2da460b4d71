"""Set before torch is imported: spinning OpenMP threads make small LAPACK calls a hundred times slower on two cores."""

import gc
import os
import tempfile

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# What `lapcli doctor` found on this machine is none of a test's business, nor what tests find of the user's.
os.environ["LAPKERNELS_VERDICTS"] = f"{tempfile.gettempdir()}/lapkernels-tests-{os.getpid()}/verdicts.json"


def pytest_addoption(parser):
    parser.addoption(
        "--first-config",
        action="store_true",
        help="every Triton autotuner keeps its first configuration: fla's searches take minutes, and change no result",
    )


def pytest_configure(config):
    if config.getoption("--first-config"):
        from triton.runtime.autotuner import Autotuner

        begin = Autotuner.__init__

        def first(self, fn, arg_names, configs, *args, **kwargs):
            begin(self, fn, arg_names, list(configs)[:1], *args, **kwargs)

        Autotuner.__init__ = first


@pytest.fixture(scope="module")
def older_objects_left_alone():
    """Garbage is looked for among younger objects alone: after a long run of tests all of them take a second."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def quick_reload(older_objects_left_alone):
    """Trained models are compared with what was written without waiting for the imports of another process.

    Their memory is freed before, by a collection each time.
    """
    from lapcli.testing.processes import reload_here

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lapcli.training.reload.subprocess", reload_here())
        yield
