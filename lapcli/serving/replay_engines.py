"""The engines of a replay: servers that are started for it, or whose costs are measured to simulate them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lapcli.errors import LapcliError, ModelError, UsageError
from lapcli.families.packed import longest_sequence
from lapcli.families.source import resolve_model
from lapcli.reporting import Reporter
from lapcli.serving.assembling import refuse_without_the_extra
from lapcli.serving.costs import StepCosts, measure_costs, read_costs
from lapcli.serving.memory import Needs
from lapcli.serving.modes import Conversion, Mode, Served, Wish, find_conversion, holds_conversion, read_conversion
from lapcli.serving.policy import Configuration
from lapcli.serving.settings import EngineSettings
from lapcli.serving.worker import planned, prepare, shortage_said

_LAST_LINES = 12
_ENDS_WITHIN = 90.0
"""Seconds after SIGTERM: as long as a server drains, and some."""


class Engines(NamedTuple):
    """What is started or simulated here, as it was typed.

    Attributes:
        model: of them.
        memory: bytes.
        max_length: tokens of a request.
        max_rows: requests together.
        max_waiting: requests that may wait.
        device: where.
        dtype: of weights.
        replicas: how many, of a simulation.
        require_fast: whether it is an error when no fast kernels run.
    """

    model: str | None
    memory: int | None
    max_length: int | None
    max_rows: int | None
    max_waiting: int
    device: str
    dtype: str
    replicas: int
    require_fast: bool = False

    def check(self, modes: list[Mode] | None, wish: Wish, *, simulated: bool, url: str | None) -> None:
        """Refuse what does not go together, before anything is read.

        Raises:
            UsageError: naming the option.
        """
        adaptive = modes is not None and any(mode.fraction is None for mode in modes)
        adapting = {"--max-ppl-increase": wish.max_ppl_increase, "--caps": wish.caps, "--offload": wish.offload or None}
        here = {"--model": self.model, "--memory": self.memory, "--max-length": self.max_length}
        here |= {"--max-rows": self.max_rows, "--require-fast": self.require_fast or None}
        for option, value in adapting.items():
            if value is not None and not adaptive:
                raise UsageError(f"{option} is for --modes with adaptive among them", f"drop {option}")
        if modes is None and not simulated:
            for option, value in here.items():
                if value is not None:
                    raise UsageError(
                        f"{option} is for engines that are started or simulated here, and --url names one that runs",
                        "pass --modes, to start servers, or --simulate",
                    )
        if modes is None or simulated:
            return
        if url is not None:
            raise UsageError(
                f"--modes starts servers of its own, and --url {url} names one that runs", "drop one of them"
            )
        if self.model is None:
            raise UsageError("--modes serves a conversion, and none is named", "pass --model DIR")
        if not holds_conversion(self.model):
            raise UsageError(
                f"--modes serves a conversion, and {self.model} is none",
                f"make one: lapcli convert {self.model} --to dsla --fraction 0.5 --output DIR; then pass --model DIR",
            )
        if self.replicas > 1:
            raise UsageError(f"--replicas {self.replicas} is for --simulate", "drop it")
        for mode in modes:
            self._find(mode, wish)

    def _find(self, mode: Mode, wish: Wish) -> Served | None:
        """What a server of a mode would serve; refused now is what it would refuse later."""
        adapts = mode.fraction is None
        return find_conversion(self.model, wish._replace(adapt=True) if adapts else Wish(fraction=mode.fraction))

    def planned(self, modes: list[Mode] | None, wish: Wish) -> dict[str, dict[str, Any]]:
        """What engines would have room for, by modes, and by shapes alone; of one that is measured without.

        Raises:
            ModelError: memory holds no request, or not as many as are wanted.
            UsageError: a mode cannot be had of the model.
        """
        if modes is None:
            return {"measured": planned(self._settings()[0])}
        found = {mode.name: self._find(mode, wish) for mode in modes}
        settings, _, _ = self._settings()
        return {
            name: planned(settings if served is None else replace(settings, **served.settings))
            for name, served in found.items()
        }

    def options(self, mode: Mode, wish: Wish) -> list[str]:
        """Of the server of a mode."""
        found = [*mode.options, "--device", self.device, "--dtype", self.dtype, "--max-waiting", str(self.max_waiting)]
        # All of a trace is one client's.
        found += ["--max-per-client", str(10**6)]
        for option, value in (("max-length", self.max_length), ("max-rows", self.max_rows)):
            found += [] if value is None else [f"--{option}", str(value)]
        found += [] if self.memory is None else ["--memory", f"{self.memory}B"]
        found += ["--require-fast"] if self.require_fast else []
        if mode.fraction is None:
            found += [] if wish.max_ppl_increase is None else ["--max-ppl-increase", wish.max_ppl_increase]
            found += [] if wish.caps is None else ["--caps", wish.caps]
            found += ["--offload"] if wish.offload else []
        return found

    def known_costs(self, file: Path) -> StepCosts | None:
        """Those of a file; `None` where there is none, and they can be measured.

        Raises:
            DataError: it holds something else.
            ModelError: there is no such model, or what measuring needs is missing.
            UsageError: they are another model's; or there is no file, and nothing to measure.
        """
        if file.exists():
            costs = read_costs(file)
            if self.model is not None:
                self._check_model(costs, file)
            return costs
        if self.model is None:
            raise UsageError(f"there is no {file}", "pass --model MODEL too, to measure its step costs here")
        if not file.parent.is_dir():
            raise UsageError(f"--simulate {file}: there is no folder {file.parent}")
        # Its HTTP server is measured as well.
        refuse_without_the_extra()
        # Says what is wrong with the model, or the machine.
        self.planned(None, Wish())
        return None

    def _check_model(self, costs: StepCosts, file: Path) -> None:
        """Refuse costs of another model, by whatever name either goes.

        Raises:
            UsageError: naming both.
        """
        assert self.model is not None
        found = self._conversion()
        digest = resolve_model(self.model).digest if found is None else found.digest
        if digest == costs.digest:
            return
        its = f"({costs.digest[:12]})" if costs.digest else "(which an earlier version of lapcli did not say more of)"
        raise UsageError(
            f"{file} holds the costs of {costs.model} {its}, not of {self.model} as it is now ({digest[:12]})",
            "delete that file, and they are measured anew; name another file to keep both; or leave out --model to "
            "simulate what was measured",
        )

    def _conversion(self) -> Conversion | None:
        """The conversion that is named, if it is one."""
        assert self.model is not None
        return read_conversion(Path(self.model)) if holds_conversion(self.model) else None

    def costs(self, file: Path, reporter: Reporter) -> StepCosts:
        """The step costs of a file, measured first where there is none."""
        found = self.known_costs(file)
        if found is not None:
            return found
        from lapcli.serving.front_costs import measure_front

        assert self.model is not None
        settings, digest, known = self._settings()
        with reporter.task(f"measuring the steps of {self.model}"):
            batch, facts = prepare(settings)
            with shortage_said(settings, "steps were measured"):
                costs = measure_costs(
                    batch,
                    model=self.model,
                    window=settings.max_length,
                    digest=digest,
                    known=known,
                    needs=Needs(**facts["needs"]),
                )
        with reporter.task("measuring what lies around an engine"):
            costs = replace(costs, front=measure_front(settings.model, settings.max_length))
        costs.write(file)
        reporter.notice(f"step costs are in {file}")
        return costs

    def _settings(self) -> tuple[EngineSettings, str, tuple[Configuration, ...]]:
        """Of an engine that is measured; the model's digest; and of a conversion all configurations."""
        from lapcli.machine import Machine
        from lapcli.runtime.engine import DEFAULT_LENGTH

        assert self.model is not None
        found = self._conversion()
        source = resolve_model(self.model if found is None else str(found.place.base))
        machine = Machine(self.device, self.dtype)
        machine.check(source.config)
        dtype = str(machine.torch_dtype(source.config)).removeprefix("torch.")
        window = self.max_length or min(longest_sequence(source.config) or DEFAULT_LENGTH, DEFAULT_LENGTH)
        converted: dict[str, Any] = {}
        if found is not None:
            # What lies between them is on a straight line.
            ends = sorted({0, found.configurations[-1].converted})
            converted = {"conversion": str(Path(self.model).resolve()), "configurations": ends}
        settings = EngineSettings(
            str(source.path) if found is not None else self.model,
            str(machine.torch_device()),
            dtype,
            max_length=window,
            max_rows=self.max_rows,
            memory=self.memory,
            require_fast=self.require_fast,
            **converted,
        )
        if found is None:
            return settings, source.digest, ()
        return settings, found.digest, found.configurations


@contextlib.contextmanager
def started(model: str, options: Sequence[str], log: Path | None = None) -> Generator[str]:
    """Run `lapcli serve` on a free port while the block lasts.

    Args:
        model: as the command line takes it.
        options: of `lapcli serve`.
        log: where its log lines go; they are dropped without.

    Yields:
        Its URL, once it is ready.

    Raises:
        LapcliError: it ended before it was.
    """
    command = [sys.executable, "-m", "lapcli", "serve", model, "--port", "0", "--json", "--quiet", *options]
    with ready_server(command, f"lapcli serve {model}", log) as url:
        yield url


@contextlib.contextmanager
def ready_server(command: Sequence[str], what: str, log: Path | None = None) -> Generator[str]:
    """Run a server that says its URL on stdout, as `lapcli serve --json` does, while the block lasts.

    Args:
        command: that starts it.
        what: it is, for what is said when it ends.
        log: where its log lines go; they are dropped without.

    Yields:
        Its URL, once it is ready.

    Raises:
        LapcliError: it ended before it was.
    """
    with tempfile.TemporaryFile() if log is None else log.open("w+b") as file, _server(command, file) as process:
        assert process.stdout is not None
        said = b""
        while not said.rstrip().endswith(b"}"):
            line = process.stdout.readline()
            if not line:
                code = process.wait()
                file.seek(0)
                raise _failed(what, code, file.read().decode(errors="replace"))
            said += line
        yield json.loads(said)["url"]


@contextlib.contextmanager
def _server(command: Sequence[str], log: Any) -> Generator["subprocess.Popen[bytes]"]:
    """A process that is gone when the block is left, or when this process is."""
    from lapcli.launching import end_with_the_parent

    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        # A terminal's Ctrl-C is for us; what is under way there has nobody to wait for it.
        start_new_session=True,
        preexec_fn=end_with_the_parent if sys.platform == "linux" else None,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        yield process
    finally:
        for _ in range(2):
            # Said twice it ends at once.
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        try:
            process.wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _failed(what: str, code: int, said: str) -> LapcliError:
    """What a server that did not begin died of, in its own words."""
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith("{")][-_LAST_LINES:]
    kind = UsageError if code == 2 else ModelError
    return kind(f"{what} ended with exit code {code}:\n" + "\n".join(lines))
