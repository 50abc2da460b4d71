"""Processes for tests that stop, kill and repeat lapcli: forked from one that has done the imports.

A new interpreter takes seconds to import torch and transformers, more than most of what such tests let it do. Here a
server of `multiprocessing` imports them once, with one thread, and each process is a fork of it. Where the start of the
interpreter, its imports or what it leaves at its end are what is tested, `subprocess` is right.
"""

import io
import json
import multiprocessing
import multiprocessing.process
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

_IMPORTED = ("lapcli.cli.app", "lapcli.models", "lapcli.stages.calibration", "lapcli.stages.recovery")


class Forked:
    """A process of its own, which can be waited for and be sent signals as a `subprocess.Popen`.

    What it trains is compared with what it wrote as `reload_here` does.
    With a CUDA device in the machine it is a new interpreter: no fork could use what looked for one.

    Args:
        arguments: of `lapcli`; of `program`, where one is given.
        program: Python source that is run instead of `lapcli`, as `python -c` would.
        environment: all of it; the caller's if not given.
        threads: of torch's work.
    """

    def __init__(
        self, *arguments: object, program: str | None = None, environment: Mapping[str, str] | None = None,
        threads: int = 1,
    ) -> None:  # fmt: skip
        # Files, since nobody reads a pipe while the process works.
        self._open = ExitStack()
        self._files = [self._open.enter_context(file()) for file in (tempfile.TemporaryFile,) * 2]
        given = [str(each) for each in arguments]
        around = dict(os.environ if environment is None else environment)
        self._process = (_interpreter if _has_cuda() else _fork)(given, program, around, threads, self._files)

    @property
    def pid(self) -> int:
        """Its number."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, the negative number of the signal that ended it, or None while it runs."""
        return self.poll()

    def poll(self) -> int | None:
        """As `returncode`."""
        return self._process.poll() if isinstance(self._process, subprocess.Popen) else self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; gives all that it wrote to stdout and to stderr.

        Raises:
            subprocess.TimeoutExpired: it still runs after so many seconds; it is killed.
        """
        (self._process.wait if isinstance(self._process, subprocess.Popen) else self._process.join)(timeout)
        if self.poll() is None:
            self.kill()
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        said = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in self._files]
        return said[0], said[1]

    def __del__(self) -> None:
        """Close what it wrote to."""
        self._open.close()


def run_forked(
    *arguments: object, program: str | None = None, environment: Mapping[str, str] | None = None, threads: int = 1,
    timeout: float = 200.0,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """As `Forked`, to its end; gives what `subprocess.run` does.

    Raises:
        subprocess.TimeoutExpired: it still runs after `timeout` seconds; it is killed.
    """
    process = Forked(*arguments, program=program, environment=environment, threads=threads)
    out, err = process.communicate(timeout)
    assert process.returncode is not None
    return subprocess.CompletedProcess(list(map(str, arguments)), process.returncode, out, err)


def run_together(
    count: int, *arguments: object, program: str | None = None, timeout: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Several processes that find each other as under `torchrun`, each of one thread, to the end of all.

    Unlike `torchrun` it ends none of them because another has failed.

    Args:
        count: how many.
        arguments: of all, as `Forked` has them.
        program: as `Forked` has it.
        timeout: seconds for all.

    Returns:
        The first exit code that is not 0, and what they wrote, in the order of their ranks.

    Raises:
        subprocess.TimeoutExpired: one of them still runs after `timeout` seconds; all are killed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    running = [
        Forked(
            *arguments,
            program=program,
            environment={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]
    end = time.monotonic() + timeout
    try:
        said = [process.communicate(max(0.0, end - time.monotonic())) for process in running]
    finally:
        for process in running:
            process.kill()
    codes = [process.returncode or 0 for process in running]
    return subprocess.CompletedProcess(
        list(map(str, arguments)),
        next((code for code in codes if code), 0),
        "".join(out for out, _ in said),
        "".join(err for _, err in said),
    )


def launch_together(count: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`lapcli` by `lapcli.launching`, as `--gpus` does it, whose processes are `Forked`.

    Args:
        count: how many.
        arguments: of the command line.

    Returns:
        The exit code of the whole, and what the processes wrote, in the order of their ranks.
    """
    from lapcli import launching

    running: list[Forked] = []

    def start(command: Sequence[str], *, env: Mapping[str, str], **_options: object) -> Forked:
        interpreter, by_module, name, *rest = command
        assert (interpreter, by_module, name) == (sys.executable, "-m", "lapcli")
        running.append(Forked(*rest, environment=env))
        return running[-1]

    with mock.patch.object(launching, "subprocess", SimpleNamespace(Popen=start)):
        code = launching.launch([str(each) for each in arguments], count)
    said = [process.communicate(0.0) for process in running]
    return subprocess.CompletedProcess(
        list(map(str, arguments)), code, "".join(out for out, _ in said), "".join(err for _, err in said)
    )


class ForkedPopen:
    """Of a `subprocess.Popen` of `python -m MODULE ARGUMENTS` what lapcli's own code needs, in a fork as `Forked` is.

    For `subprocess_of_forks`. With a CUDA device in the machine it is a new interpreter.

    Args:
        command: the interpreter, `-m`, a module, and its arguments.
        stdin: `subprocess.PIPE` or `DEVNULL`.
        stdout: `subprocess.PIPE`.
        stderr: an open file.
        env: all of the environment.
        options: what a fork has no use for: it is in a session of the server of forks, and ends with that.
    """

    def __init__(
        self, command: Sequence[str], *, stdin: int, stdout: int, stderr: IO[bytes], env: Mapping[str, str],
        **options: Any,
    ) -> None:  # fmt: skip
        interpreter, by_module, module, *arguments = command
        assert (interpreter, by_module, stdout) == (sys.executable, "-m", subprocess.PIPE)
        self.stdin: IO[bytes] | None = None
        if _has_cuda():
            self._process: Any = subprocess.Popen(
                command, stdin=stdin, stdout=stdout, stderr=stderr, env=dict(env), **options
            )
            self.stdin, self.stdout = self._process.stdin, self._process.stdout
            return
        program = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
        with ExitStack() as theirs:
            if stdin == subprocess.PIPE:
                reader, writer = os.pipe()
                given = theirs.enter_context(open(reader, "rb"))
                self.stdin = os.fdopen(writer, "wb", 0)
            else:
                given = theirs.enter_context(open(os.devnull, "rb"))
            reader, writer = os.pipe()
            told = theirs.enter_context(open(writer, "wb"))
            self.stdout: IO[bytes] | None = os.fdopen(reader, "rb")
            self._process = _fork(arguments, program, dict(env), 1, (given, told, stderr))

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, the negative number of the signal that ended it, or None while it runs."""
        return self._process.poll() if isinstance(self._process, subprocess.Popen) else self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        if isinstance(self._process, subprocess.Popen):
            return self._process.wait(timeout)
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def subprocess_of_forks() -> SimpleNamespace:
    """What modules that start lapcli's own may have as `subprocess`, where what is started is tested elsewhere."""
    kept = {name: getattr(subprocess, name) for name in ("PIPE", "DEVNULL", "TimeoutExpired")}
    return SimpleNamespace(Popen=ForkedPopen, **kept)


def reload_here() -> SimpleNamespace:
    """What `lapcli.training.reload` may have as `subprocess`, so that it compares in this process.

    That a new interpreter can load the model is then not tested; its import takes longer than tiny models' training.
    """
    return SimpleNamespace(run=_compare_here)


def _compare_here(command: Sequence[str], *, input: str, **_options: object) -> subprocess.CompletedProcess[str]:
    from lapcli.training.reload import _compare

    try:
        return subprocess.CompletedProcess(command, 0, json.dumps(_compare(json.loads(input))), "")
    except Exception:
        return subprocess.CompletedProcess(command, 1, "", traceback.format_exc())


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _interpreter(
    arguments: list[str],
    program: str | None,
    environment: dict[str, str],
    threads: int,
    files: Sequence[IO[bytes]],
) -> subprocess.Popen[bytes]:
    what = ["-m", "lapcli"] if program is None else ["-c", program]
    around = {**environment, "OMP_NUM_THREADS": str(threads)}
    return subprocess.Popen([sys.executable, *what, *arguments], env=around, stdout=files[0], stderr=files[1])


def _fork(
    arguments: list[str],
    program: str | None,
    environment: dict[str, str],
    threads: int,
    files: Sequence[IO[bytes]],
) -> multiprocessing.process.BaseProcess:
    from multiprocessing.forkserver import ensure_running

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    # Read when OpenMP and OpenBLAS are loaded: threads of theirs would not outlive a fork.
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    around = {**environment, "OMP_NUM_THREADS": str(threads)}
    process = context.Process(
        target=_begin,
        args=(arguments, program, around, threads, _Files(*(file.fileno() for file in files)), Path.cwd()),
    )
    process.start()
    return process


class _Offspring:
    """Of the `subprocess.Popen` that `lapcli.launching` starts, what it needs: a fork of a process that is itself one.

    That the launcher starts new interpreters is what its own tests test.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], start_new_session: bool,
        preexec_fn: Callable[[], object] | None,
    ) -> None:  # fmt: skip
        interpreter, by_module, name, *arguments = command
        assert (interpreter, by_module, name) == (sys.executable, "-m", "lapcli")
        assert start_new_session
        self._process = multiprocessing.get_context("fork").Process(
            target=_begin_here, args=(arguments, dict(env), preexec_fn)
        )
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.pid is not None and self.poll() is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _begin_here(arguments: list[str], environment: dict[str, str], prepare: Callable[[], object] | None) -> None:
    """What lies between a fork and the program that `subprocess` would start."""
    os.setsid()
    if prepare is not None:
        prepare()
    # Handlers of the one that started it do not outlive an exec.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    import torch

    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = ["lapcli", *arguments]
    from lapcli.cli.app import main

    main()


class _Files:
    """Open files, which have other numbers where they arrive."""

    def __init__(self, *files: int) -> None:
        self.files = files

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd

        return _arrived, tuple(DupFd(file) for file in self.files)


def _arrived(*files: Any) -> _Files:
    return _Files(*(file.detach() for file in files))


def _begin(
    arguments: list[str], program: str | None, environment: dict[str, str], threads: int, files: _Files, folder: Path
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    for number, file in enumerate(files.files, 3 - len(files.files)):
        os.dup2(file, number)
        os.close(file)
    if len(files.files) == 3:
        # multiprocessing leaves a closed one.
        sys.stdin = os.fdopen(0, closefd=False)
    if environment.get("PYTHONUNBUFFERED") and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(write_through=True)
    import torch

    torch.set_num_threads(threads)
    from lapcli import launching
    from lapcli.training import reload

    reload.subprocess = reload_here()
    launching.subprocess = SimpleNamespace(Popen=_Offspring)
    sys.argv = ["-c" if program else "lapcli", *arguments]
    if program is None:
        from lapcli.cli.app import main

        main()
    else:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
