"""A full disk behind stdout, a narrow terminal, and what an interruption says."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lapcli.cli import display

ALONE = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_behind_stdout_is_one_clear_error():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lapcli", "list", "models", "--json"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=ALONE,
        )  # fmt: skip
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("bench", "decode", "--device", "cpu", "--config", "toy"), "is in the file of --output"),
        (("prune", "--samples", "4096"), "the same command goes on from there"),
    ],
    ids=["bench", "prune"],
)
def test_an_interruption_says_what_is_kept(tmp_path, command, said):
    # With the handlers of a command line that came as far as its command.
    program = (
        "import sys, time\nfrom lapcli.cli import bench, context\n"
        "def stop(*_a, **_k):\n    print('here', flush=True)\n    time.sleep(60)\n"
        "bench._speed = context.run_directory = stop\n"
        f"sys.argv = ['lapcli', *{command!r}]\nfrom lapcli.cli.app import main\nmain()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, env=ALONE, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert said in err


def drawn(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    display.table(
        "Sizes", ["layers", "state", "tokens a second", "weights of all layers"],
        [["first", "384.0 KiB", "123456", "12.6 MiB"], ["second", "", "7", "11.8 MiB"]], text_columns=1,
    )  # fmt: skip
    return capsys.readouterr().err


def test_a_narrow_terminal_gets_a_block_for_each_row(capsys, monkeypatch):
    lines = [line.strip() for line in drawn(capsys, monkeypatch, 24).splitlines()]
    assert lines == [
        "Sizes", "first", "state: 384.0 KiB", "tokens a second: 123456", "weights of all layers: 12.6 MiB",
        "second", "tokens a second: 7", "weights of all layers: 11.8 MiB",
    ]  # fmt: skip


def test_wherever_words_fit_it_is_a_table(capsys, monkeypatch):
    for width in (48, 80, 400):
        lines = drawn(capsys, monkeypatch, width).splitlines()
        assert any("first" in line and "384.0 KiB" in line and "123456" in line for line in lines), (width, lines)


def test_a_dry_run_says_nothing_of_what_there_is_not(capsys):
    display.would_do({"reads": "a run", "lengths": None, "checks": 0, "already": []}, False)
    err = capsys.readouterr().err
    assert "reads" in err
    assert "checks" in err
    assert "lengths" not in err
    assert "already" not in err
