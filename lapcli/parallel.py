"""The processes of one command under `torchrun`: who leads, who takes which share, how sums meet, how all end together.

One process leads: it alone reads, decides, writes and speaks. The others compute their shares and are silent. Tensors
and words go over gloo, on the CPU, whatever the devices. Nothing here imports torch before it is needed.
"""

import contextlib
import functools
import os
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec

from lapcli.errors import LapcliError

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = timedelta(minutes=30)
"""How long a process waits for the others' shares."""

LOST = 75
"""Exit code of a process that ends because it no longer hears another one, and says nothing: its launcher does."""

LOG = "LAPCLI_PROCESS_LOG"
"""The environment's name for the file in which one of several processes keeps what is not for the user's eyes."""

_DONE, _SEEN, _FAILED = "lapcli/done", "lapcli/seen", "lapcli/failed"
_FAREWELL = 20.0
"""Seconds that the leader waits for those who have not yet seen that it is done."""
_SETTLING = 0.1
"""Seconds in which gloo's threads let go of what they were given, for which they want the interpreter's lock.

Whoever ends the group before that, as a wrapped model that is let go does, holds the lock and waits for them for ever.
"""

Arguments = ParamSpec("Arguments")


class ProcessLost(LapcliError):
    """Another process of this run ended, or does not answer."""


def launched() -> bool:
    """Whether torchrun started this process as one of several."""
    # LOCAL_RANK is torchrun's own; cluster schedulers set the others for whole machines.
    return "LOCAL_RANK" in os.environ and "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def local_rank() -> int:
    """The number of this process on its machine; 0 where there is only one."""
    return int(os.environ["LOCAL_RANK"]) if launched() else 0


def local_size() -> int:
    """How many processes share this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if launched() else 1


@dataclass(frozen=True)
class Processes:
    """This process among all that run the command.

    Attributes:
        rank: its number; 0 leads.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def leader(self) -> bool:
        """Whether this one reads, decides, writes and speaks."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """The part of `count` things that is this process's: neighbours, as many as any other's or one more."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def tell(self, value: Any) -> Any:
        """What the leader passes, on every process.

        Raises:
            ProcessLost: another process ended.
        """
        if self.size == 1:
            return value
        import torch.distributed as dist

        words = [value]
        with _together():
            dist.broadcast_object_list(words, src=0)
        return words[0]

    def hand_out(self, tensors: "Iterable[Tensor]") -> None:
        """Put the leader's values in place of each tensor (on the CPU, of the same shapes everywhere).

        Raises:
            ProcessLost: another process ended.
        """
        self._with_all("broadcast", tensors, src=0)

    def add(self, tensors: "Iterable[Tensor]") -> None:
        """Put the sum over all processes in place of each tensor (on the CPU, of the same shapes everywhere).

        Raises:
            ProcessLost: another process ended.
        """
        self._with_all("all_reduce", tensors)

    def _with_all(self, operation: str, tensors: "Iterable[Tensor]", **options: Any) -> None:
        """Run a collective of `torch.distributed` on each tensor, in place; nothing where there is one process."""
        if self.size == 1:
            return
        import torch.distributed as dist

        with _together():
            for tensor in tensors:
                getattr(dist, operation)(tensor, **options)

    def collect(self, tensor: "Tensor") -> "list[Tensor]":
        """A tensor (on the CPU, of the same shape everywhere) of every process, in order.

        Raises:
            ProcessLost: another process ended.
        """
        if self.size == 1:
            return [tensor]
        import torch
        import torch.distributed as dist

        found = [torch.empty_like(tensor) for _ in range(self.size)]
        with _together():
            dist.all_gather(found, tensor.contiguous())
        return found

    def wait(self) -> None:
        """Go on when all have come here.

        Raises:
            ProcessLost: another process ended.
        """
        if self.size == 1:
            return
        import torch.distributed as dist

        with _together():
            dist.barrier()


ALONE = Processes()


def processes() -> Processes:
    """This process's place in a command under `jointly`."""
    if not launched():
        return ALONE
    import torch.distributed as dist

    return Processes(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else ALONE


def jointly(command: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Let a command run in all processes that torchrun started, or as ever where it started none.

    The followers' output goes nowhere. Whichever process fails first says why and the others end without a word, all
    with a code that is not 0; a follower ends well when the leader has. Where `lapcli.launching` started them, what
    libraries print beside Python goes to a log, and so does the end of a process that only lost another.
    """

    @functools.wraps(command)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        if not launched():
            command(*args, **kwargs)
            return
        if LOG in os.environ:
            _keep_in(os.environ[LOG])
        with _group() as store:
            _run_one_of_several(functools.partial(command, *args, **kwargs), processes(), store)

    return run


def _run_one_of_several(command: Callable[[], None], mine: Processes, store: Any) -> None:
    with contextlib.ExitStack() as silence:
        if not mine.leader:
            nowhere = silence.enter_context(open(os.devnull, "w"))
            silence.enter_context(contextlib.redirect_stdout(nowhere))
            silence.enter_context(contextlib.redirect_stderr(nowhere))
        try:
            command()
            if mine.leader:
                store.set(_DONE, "1")
                _let_see(store, mine.size - 1)
            else:
                _outlast(store)
        except BaseException as error:
            lost = _is_a_loss(error)
            first = _first_to_fail(store, mine)
            if LOG in os.environ and not isinstance(error, SystemExit):
                os.write(2, traceback.format_exc().encode())
            if not first or (lost and LOG in os.environ):
                raise SystemExit(LOST if lost else _exit_code(error)) from None
            if lost and not isinstance(error, ProcessLost):
                raise _lost(error) from error
            raise


def _keep_in(path: str) -> None:
    """Let what is written past Python (by gloo, NCCL, CUDA) go to a file, and Python's words where they went."""
    sys.stderr.flush()
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 2)
    os.close(file)


def _exit_code(error: BaseException) -> int:
    """What a process ends with whose error is not the one that is told."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    # An interruption is no `Exception`.
    return getattr(error, "exit_code", None) or (1 if isinstance(error, Exception) else 130)


def _is_a_loss(error: BaseException) -> bool:
    """Whether an error says no more than that another process is gone."""
    if isinstance(error, LapcliError):
        return isinstance(error, ProcessLost)
    import torch.distributed as dist

    # gloo's errors in a backward pass have no type of their own.
    raised_by_a_transport = isinstance(error, RuntimeError) and "/gloo/" in str(error)
    return raised_by_a_transport or isinstance(error, dist.DistError)


def _lost(error: BaseException) -> ProcessLost:
    first = (str(error).splitlines() or [repr(error)])[0].partition(". This is typically")[0]
    return ProcessLost(
        f"another process of this run ended or does not answer ({first})",
        "look for its message above; the same command with as many processes goes on from there",
    )


def _outlast(store: Any) -> None:
    """Return when the leader is done, however long that takes: it may be writing a large model."""
    while not store.check([_DONE]):
        if store.check([_FAILED]):
            # A launcher looks for who failed by itself, whose exit code it passes on.
            raise SystemExit(LOST if LOG in os.environ else 1)
        time.sleep(0.1)
    with contextlib.suppress(RuntimeError):
        store.add(_SEEN, 1)


def _let_see(store: Any, followers: int) -> None:
    """Wait until the followers know that all is done: where torchrun has no store, the leader's goes with it."""
    end = time.monotonic() + _FAREWELL
    with contextlib.suppress(RuntimeError):
        while store.add(_SEEN, 0) < followers and time.monotonic() < end:
            time.sleep(0.01)


def _first_to_fail(store: Any, mine: Processes) -> bool:
    try:
        return store.add(_FAILED, 1) == 1
    except RuntimeError:
        # The store went away with its owner, and has spoken or been killed; the leader at least is heard.
        return mine.leader


@contextlib.contextmanager
def _group() -> Generator[Any]:
    import torch.distributed as dist

    with _together():
        dist.init_process_group("gloo", timeout=PATIENCE)
    # All begin together: nobody looks into the run directory while another already works there.
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=20))
    try:
        yield store
    finally:
        time.sleep(_SETTLING)
        dist.destroy_process_group()


@contextlib.contextmanager
def _together() -> Generator[None]:
    """Say in plain words that a collective failed."""
    try:
        yield
    except RuntimeError as error:
        raise _lost(error) from error
