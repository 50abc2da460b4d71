"""Starting a command anew in several processes of this machine, one for each GPU, without `torchrun`.

`torchrun` answers Ctrl-C by a second signal and, 30 seconds later, by a kill; a training step that is to be finished
and saved may take longer. Here every signal is passed on once, and the processes end when they are done.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from lapcli.errors import LapcliError

_PR_SET_PDEATHSIG = 1
_GRACE = 60.0
"""Seconds in which the others may end by themselves when one process has failed."""


def launch(arguments: Sequence[str], count: int) -> int:
    """Run `lapcli ARGUMENTS` in `count` processes that find each other as under `torchrun`.

    SIGINT, SIGTERM and SIGHUP are passed on. A process that fails takes the others with it, which say nothing.

    Args:
        arguments: of the command line.
        count: how many processes; the first leads.

    Returns:
        0 where all ended well, 130 after a signal, else the exit code of the first that did not end well.

    Raises:
        LapcliError: one of them was killed by a signal that did not pass through here.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        # As torchrun does: else every process takes all cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count))),
    }
    running: list[subprocess.Popen[bytes]] = []
    said: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        said.append(number)
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in handled}
    try:
        for rank in range(count):
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            # In a session of their own, so that Ctrl-C reaches them once.
            running.append(
                subprocess.Popen(
                    [sys.executable, "-m", "lapcli", *arguments],
                    env=environment,
                    start_new_session=True,
                    preexec_fn=end_with_the_parent if sys.platform == "linux" else None,
                )
            )
        code = _outlast(running)
        if code and said:
            # Those that follow end as failed, and perhaps first.
            return 130
        killed = [(rank, -process.returncode) for rank, process in enumerate(running) if (process.returncode or 0) < 0]
        if killed:
            rank, number = killed[0]
            raise LapcliError(
                f"process {rank} of {count} was killed (signal {number}), so the others ended too",
                "the same command goes on from the last checkpoint",
            )
        return code
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_the_parent() -> None:
    """Let the kernel send SIGTERM when the process that started this one is no more, however it ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _outlast(running: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all; once one has failed, not for long: the caller kills those that are left."""
    failed, since = 0, 0.0
    while True:
        codes = [process.poll() for process in running]
        bad = next((code for code in codes if code), 0)
        if bad and not failed:
            failed, since = bad, time.monotonic()
        if None not in codes:
            break
        if failed and time.monotonic() - since > _GRACE:
            return _code(failed)
        time.sleep(0.1)
    return _code(failed)


def _code(found: int) -> int:
    """An exit code; of a process that was killed by a signal, the one that a shell gives."""
    return 128 - found if found < 0 else found
