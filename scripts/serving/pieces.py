"""The pieces of evidence: modes of serving a conversion, a model and its cut at one memory, many requests."""

import json
import math
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from studies.commands import Commands
from studies.lines import Line, machine

from lapcli.errors import LapcliError, ModelError, UsageError
from serving.drawn import DRAWN, draw
from serving.lines import ENDURANCE, FIXED, LINES, MODES, key_of

SCALES = tuple(2.0 ** (-step / 2) for step in range(-4, 16))
"""Of the trace's time, from slow to fast, among which one is chosen."""
LOADED = 2.5
"""Times the latency of an idle engine that unconverted serving has under the load that is chosen."""
CALM = 2.0
"""Times as slow as that load, where latencies do not multiply what step costs differ by."""
_COMMON = 40.0
"""Seconds that a piece may take beside its replay: servers begin."""


class Evidence(Commands):
    """Pieces of evidence, one after the other on one device, since they would measure one another.

    Args:
        options: of the command line.
    """

    def run(self) -> bool:
        """Everything that is wanted and not there yet, as long as there is time; whether all of it is there now.

        Raises:
            LapcliError: what is named is not there or makes no sense; found before anything is made.
        """
        options = self.options
        options.workers = 1
        self._check()
        self.there = {key_of(line) for line in LINES.there(options.output, options.known)}
        self.work.mkdir(parents=True, exist_ok=True)
        self.where = machine()
        return self.each(options.parts, self._part)

    def _check(self) -> None:
        """Look at what the parts will want, since each would find out by itself, after minutes of work."""
        from lapcli.benchmarks.speed.configs import CONFIGS
        from lapcli.families.source import resolve_model
        from lapcli.linearising.plan import holds_conversion
        from lapcli.serving.modes import parse_modes
        from lapcli.serving.replay_trace import read_trace
        from lapcli.stages.planning import memory_bytes

        options = self.options
        if {"modes", "near", "fixed"}.intersection(options.parts):
            read_trace(options.trace)
        if {"modes", "near"}.intersection(options.parts):
            parse_modes(",".join(options.modes))
            memory_bytes(options.memory)
            if options.model is None and options.shape not in CONFIGS:
                raise UsageError(f"--shape {options.shape!r} is none of {', '.join(CONFIGS)}")
            if options.model is not None and not holds_conversion(options.model):
                raise ModelError(
                    f"--model {options.model} is no conversion to states",
                    "make a conversion: lapcli convert MODEL --to dsla --output DIR; without --model, one is drawn",
                )
        if "fixed" in options.parts:
            memory_bytes(options.gdn_memory)
            resolve_model(options.gdn)

    @property
    def left(self) -> float:
        """Seconds until the end."""
        end = self.options.seconds
        return math.inf if end is None else end - (time.monotonic() - self.begun)

    def _part(self, _: int, part: str) -> bool:
        if part in ("modes", "near"):
            modes, slower = (self.options.modes, 1.0) if part == "modes" else (["never"], CALM)
            return self._tried(part, lambda: self._modes(modes, slower))
        return self._tried(part, self._fixed if part == "fixed" else self._endurance)

    def _tried(self, what: str, do: Callable[[], bool | None]) -> bool:
        """Whether something was finished; what fails is said and ends nothing else."""
        try:
            return bool(do())
        except (LapcliError, RuntimeError, OSError) as error:
            # A command's own words, or what stood in its way.
            self.say(f"{what}: {error}")
        except Exception:
            self.say(f"{what}: {traceback.format_exc()}")
        return False

    # The modes of a conversion.

    def _modes(self, modes: Sequence[str], slower: float) -> bool:
        """Each mode, simulated and served, under a load that costs measured here choose, so many times slower."""
        options, costs = self.options, self.work / "costs.json"
        model = options.model or draw(self.work / "drawn", shape=options.shape, **options.change)
        room = ["--memory", options.memory, "--max-length", str(options.max_length), "--dtype", options.dtype]
        limits = [] if options.max_ppl_increase is None else ["--max-ppl-increase", options.max_ppl_increase]
        limits += [] if options.caps is None else ["--caps", options.caps]
        if not costs.is_file():
            first = ["replay", str(options.trace), "--requests", "1", "--simulate", str(costs), "--model", str(model)]
            if self.lapcli(0, *first, *room) is None:
                return False
            self.say("step costs are measured")
        scale, requests = self._load(costs, slower)
        self.say(f"{requests} requests, in {scale:.3g} of the trace's time")
        common: Line = {
            "kind": MODES,
            "model": _name(Path(model)),
            "drawn": (Path(model) / DRAWN).is_file(),
            "machine": self.where,
            "dtype": options.dtype,
            "trace": options.trace.name,
            "requests": requests,
            "time_scale": scale,
            "length_scale": options.length_scale,
            "max_length": options.max_length,
            "memory": options.memory,
            "caps": options.caps or "default",
        }
        done = True
        for served in (False, True):
            for mode in modes:
                line = {**common, "mode": mode, "served": served}
                if key_of(line) in self.there:
                    continue
                if served and self.left < _COMMON + options.replay_seconds:
                    self.say(f"no time to serve {mode}")
                    done = False
                    continue
                how = "served" if served else "simulated"
                output = self.work / f"{how}-{mode.replace(':', '-')}.json"
                command = [
                    "replay", str(options.trace), "--model", str(model), "--modes", mode, "--requests", str(requests),
                    "--time-scale", f"{scale:.6g}", "--length-scale", str(options.length_scale), *room,
                    *(limits if mode == "adaptive" else []), "--output", str(output),
                    *([] if served else ["--simulate", str(costs)]),
                ]  # fmt: skip
                name = f"{mode}, {how}"
                done = self._tried(name, partial(self._mode, line, command, output, name)) and done
        return done

    def _mode(self, line: Line, command: Sequence[str], output: Path, name: str) -> bool:
        """One mode, served or simulated; whether it was finished."""
        seconds = self.lapcli(0, *command)
        if seconds is None:
            return False
        figures = json.loads(output.read_text())["modes"][line["mode"]]
        said = f"lapcli {' '.join(command)}"
        self.add({**line, "figures": figures, "command": said, "seconds": round(seconds, 1)})
        mean = (figures["normalised_seconds"] or {}).get("mean", math.nan)
        self.say(f"{name}: {1e3 * mean:.1f} ms a token")
        return True

    def _load(self, costs: Path, slower: float) -> tuple[float, int]:
        """A time scale at which unconverted serving is loaded by simulation, and requests for `--replay-seconds`."""
        scale = self._loaded(costs) * slower
        from lapcli.serving.replay_trace import read_trace

        return scale, _within(read_trace(self.options.trace), scale, self.options.replay_seconds)

    def _loaded(self, costs: Path) -> float:
        """The first time scale of a row at which it is."""
        from lapcli.serving.costs import read_costs
        from lapcli.serving.modes import Wish, parse_modes
        from lapcli.serving.replay_modes import simulate_mode
        from lapcli.serving.replay_trace import fit, make_sessions, read_trace, scaled
        from lapcli.stages.planning import memory_bytes

        options = self.options
        arrivals = read_trace(options.trace)
        if options.time_scale is not None:
            return options.time_scale
        found, (never,) = read_costs(costs), parse_modes("never")
        window = min(found.window, options.max_length)
        idle = None
        for scale in SCALES:
            requests = _within(arrivals, scale, options.replay_seconds)
            turns = make_sessions(scaled(arrivals[:requests], scale, options.length_scale), 3.0, 0)
            figures, _ = simulate_mode(
                never, fit(turns, window), replace(found, window=window), Wish(), memory=memory_bytes(options.memory)
            )
            mean = figures["normalised_seconds"]["mean"]
            idle = idle or mean
            if mean >= LOADED * idle:
                return scale
        return SCALES[-1]

    # A model and its cut at one memory.

    def _fixed(self) -> bool:
        """As many requests at once as memory holds, of a model and of the same with a cut key width."""
        options = self.options
        run = self.work / "cut"
        if not (run / "sliced" / "config.json").is_file():
            pruning = [
                "prune", options.gdn, "--method", options.method, "--ratio", options.ratio, "--samples", "16",
                "--run", str(run),
            ]  # fmt: skip
            if self.lapcli(0, *pruning) is None:
                return False
        done = True
        for name, model in ((options.gdn, options.gdn), (f"{options.gdn}, {options.ratio} cut", str(run / "sliced"))):
            line: Line = {
                "kind": FIXED,
                "model": name,
                "machine": self.where,
                "dtype": options.dtype,
                "trace": options.trace.name,
                "requests": options.burst,
                "length_scale": options.burst_length_scale,
                "max_length": options.burst_length,
                "memory": options.gdn_memory,
            }
            if key_of(line) in self.there:
                continue
            if self.left < _COMMON or self.over.is_set():
                self.say(f"no time for {name}")
                done = False
                continue
            done = self._tried(name, partial(self._model_at_memory, line, model)) and done
        return done

    def _model_at_memory(self, line: Line, model: str) -> bool:
        """One model with all rows that memory holds; whether it was finished."""
        options = self.options
        rows = rows_at_most(model, options.gdn_memory, options.dtype, options.burst_length, options.gpus)
        try:
            figures = self._burst(model, rows)
        except ModelError as error:
            # Where something can be measured, it may be fewer than was estimated; how many, is said.
            fewer = re.search(r"--max-rows to (\d+) ", str(error))
            if fewer is None:
                raise
            self.say(f"{line['model']}: {rows} rows were estimated, and {fewer[1]} are held")
            figures = self._burst(model, int(fewer[1]))
        if figures is None:
            return False
        self.add({**line, **figures})
        speed = figures["figures"]["tokens_per_second"]
        self.say(f"{line['model']}: {figures['rows']} at once, {speed:.0f} tokens/s")
        return True

    def _burst(self, model: str, rows: int) -> dict[str, Any] | None:
        """Serve a model with so many rows, and send everything at once."""
        import asyncio

        from lapcli.serving.replay_client import Client
        from lapcli.serving.replay_engines import started

        options = self.options
        serving = [
            "--memory", options.gdn_memory, "--max-length", str(options.burst_length), "--max-rows", str(rows),
            "--dtype", options.dtype, "--max-waiting", "100000", "--max-per-client", "100000",
            *([] if options.gpus else ["--device", "cpu"]),
        ]  # fmt: skip
        output = self.work / "burst.json"
        with started(model, serving, self.work / "burst.log") as url:
            command = [
                "replay", str(options.trace), "--url", url, "--requests", str(options.burst), "--turns", "0",
                "--time-scale", "0.0001", "--length-scale", str(options.burst_length_scale), "--output", str(output),
            ]  # fmt: skip
            if self.lapcli(0, *command) is None:
                return None
            metrics = asyncio.run(Client(url).metrics())
        document = json.loads(output.read_text())
        document.pop("each")
        return {
            "rows": rows,
            "figures": document,
            "peak_memory_bytes": metrics["lapcli_peak_memory_bytes"],
            "held": {name: value for name, value in metrics.items() if name.startswith("lapcli_held_bytes")},
            "command": f"lapcli serve {model} {' '.join(serving)}; lapcli {' '.join(command)}",
        }

    # Many requests.

    def _endurance(self) -> bool:
        """`serve_endurance.py` for the time that is left."""
        options = self.options
        line: Line = {"kind": ENDURANCE, "model": "a tiny Gated DeltaNet", "machine": self.where, "concurrency": 32}
        if key_of(line) in self.there:
            return True
        seconds = min(options.endurance_seconds, self.left - _COMMON)
        if seconds < 5:
            self.say("no time for many requests")
            return False
        script = Path(__file__).resolve().parents[1] / "serve_endurance.py"
        command = ["--requests", str(options.endurance), "--seconds", f"{seconds:.0f}"]
        made = subprocess.run(
            [sys.executable, str(script), *command], capture_output=True, text=True, timeout=seconds + 120, check=False
        )
        if made.returncode:
            raise RuntimeError(f"serve_endurance.py: {made.stderr[-500:]}")
        found = json.loads(made.stdout)["endurance"]
        self.add({**line, "figures": found, "command": f"python scripts/serve_endurance.py {' '.join(command)}"})
        self.say(f"{found['requests']} requests: {found['front']}, {found['engine']}")
        return True


def rows_at_most(model: str, memory: str, dtype: str, length: int, gpus: int) -> int:
    """The most rows that a server takes by this memory, whatever it would take by itself; by an estimate."""
    from lapcli.serving.settings import EngineSettings
    from lapcli.serving.worker import planned
    from lapcli.stages.planning import memory_bytes

    settings = EngineSettings(
        model, "cuda" if gpus else "cpu", dtype, max_length=length, memory=memory_bytes(memory), max_rows=1
    )
    low, high = planned(settings)["rows"], 4096
    while low < high:
        middle = (low + high + 1) // 2
        try:
            planned(replace(settings, max_rows=middle))
            low = middle
        except ModelError:
            high = middle - 1
    # What padding of projections takes is in no shape of a checkpoint.
    return max(1, low - 1 - low // 50)


def _within(arrivals: Any, scale: float, seconds: float) -> int:
    """How many requests come within so many seconds."""
    return max(8, sum(each.seconds * scale <= seconds for each in arrivals))


def _name(model: Path) -> str:
    """What a conversion is called in tables."""
    drawn = model / DRAWN
    if not drawn.is_file():
        return model.resolve().name
    told = json.loads(drawn.read_text())
    return f"{told['shape']}, drawn weights" + (f", {told['change']}" if told["change"] else "")
