"""Starting a command anew in several processes of this machine, one for each GPU, without `torchrun`.

`torchrun` answers Ctrl-C by a second signal and, 30 seconds later, by a kill; a training step that is to be finished
and saved may take longer. Here every signal is passed on once, and the processes end when they are done.
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from lapcli.errors import LapcliError
from lapcli.parallel import LOG, LOST

_PR_SET_PDEATHSIG = 1
_GRACE = 60.0
"""Seconds in which the others may end by themselves when one process has failed."""


def launch(arguments: Sequence[str], count: int) -> int:
    """Run `lapcli ARGUMENTS` in `count` processes that find each other as under `torchrun`.

    SIGINT, SIGTERM and SIGHUP are passed on. A process that fails takes the others with it, which say nothing. What
    libraries print when that happens is kept in a temporary folder, and named where nobody else has said why.

    Args:
        arguments: of the command line.
        count: how many processes; the first leads.

    Returns:
        0 where all ended well, 130 after a signal, else the exit code of the first that did not end well.

    Raises:
        LapcliError: one of them was killed by a signal that did not pass through here, or they lost each other.
    """
    logs = Path(tempfile.mkdtemp(prefix="lapcli-processes-"))
    named = False
    try:
        return _launch(arguments, count, logs)
    except LapcliError:
        named = any(log.stat().st_size for log in logs.iterdir())
        raise
    finally:
        if not named:
            shutil.rmtree(logs, ignore_errors=True)


def _launch(arguments: Sequence[str], count: int, logs: Path) -> int:
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
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), LOG: str(_log(logs, rank))}
            # In a session of their own, so that Ctrl-C reaches them once.
            running.append(
                subprocess.Popen(
                    [sys.executable, "-m", "lapcli", *arguments],
                    env=environment,
                    start_new_session=True,
                    preexec_fn=end_with_the_parent if sys.platform == "linux" else None,
                )
            )
        rank, code = _outlast(running)
        if code and said:
            # Those that follow end as failed, and perhaps first.
            return 130
        if code < 0 or code == LOST:
            raise _why(rank, code, count, logs)
        # Whoever failed has said why.
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


def _outlast(running: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int]:
    """Wait for all; once one has failed, not for long: the caller kills those that are left.

    Returns:
        The rank of the process that failed first by itself, and how it ended; 0 where none failed.
    """
    first, since = (0, 0), 0.0
    while True:
        codes = [process.poll() for process in running]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed and first[1] in (0, LOST):
            since = since or time.monotonic()
            first = min(failed, key=lambda each: _follows(each[1]))
        if None not in codes or (first[1] and time.monotonic() - since > _GRACE):
            return first
        time.sleep(0.1)


def _follows(code: int) -> int:
    """Of processes that are found ended at one time, how likely one ended because of another."""
    if code == LOST:
        return 3
    # NCCL's watch over a process that is gone aborts those that are left.
    return 2 if code == -signal.SIGABRT else 0 if code < 0 else 1


def _why(rank: int, code: int, count: int, logs: Path) -> LapcliError:
    """What to say of a process that could not say it itself."""
    hints = ["the same command goes on from what was last saved"]
    if -code == signal.SIGKILL:
        hints.append("the system kills what asks for more memory than there is")
    if any(log.stat().st_size for log in logs.iterdir()):
        hints.append(f"what libraries said is in {logs}")
    if code < 0:
        said = f"process {rank} of {count} was killed (signal {-code}), so the others ended too"
    else:
        lines = _log(logs, rank).read_text(errors="replace").strip().splitlines()
        said = f"process {rank} of {count} no longer reaches the others: {(lines or ['it did not say why'])[-1]}"
    return LapcliError(said, "; ".join(hints))


def _log(logs: Path, rank: int) -> Path:
    return logs / f"process-{rank}.log"
