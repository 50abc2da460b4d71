"""Starting a command anew in several processes of this machine, one for each GPU, without `torchrun`.

`torchrun` answers Ctrl-C by a second signal and, 30 seconds later, by a kill; a training step that is to be finished
and saved may take longer. Here every signal is passed on once, and the processes end when they are done.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

_GRACE = 60.0
"""Seconds in which the others may end by themselves when one process has failed."""


def launch(arguments: Sequence[str], count: int) -> int:
    """Run `lapcli ARGUMENTS` in `count` processes that find each other as under `torchrun`.

    SIGINT, SIGTERM and SIGHUP are passed on. A process that fails takes the others with it, which say nothing.

    Args:
        arguments: of the command line.
        count: how many processes; the first leads.

    Returns:
        0 where all ended well, else the exit code of the first that did not.
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

    def pass_on(number: int, _frame: FrameType | None) -> None:
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
                subprocess.Popen([sys.executable, "-m", "lapcli", *arguments], env=environment, start_new_session=True)
            )
        return _outlast(running)
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


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
