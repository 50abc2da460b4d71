"""What the benchmarks of decode steps share: cases, bytes, compilation ahead, the gate, rows of results, a budget."""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lapkernels._triton import is_interpreted, triton_version
from lapkernels.decoding.configs import StepConfig
from lapkernels.testing_interpreter import quicken
from lapkernels.timing import copies, copy_bandwidth, free, measure

RATE = 4.3e12
"""Bytes a second that the floors of docs/performance.md are computed with: an H200's copy bandwidth, rounded up."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COMPUTE = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One measurement's shape.

    Attributes:
        layer: which layer, in a few words.
        key_heads: H (groups of Mamba-2).
        value_heads: HV (heads of Mamba-2).
        key_width: K (N of Mamba-2).
        value_width: V (P of Mamba-2).
        batch: rows.
        state: `fp32` or `bf16`.
    """

    layer: str
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    batch: int
    state: str

    @property
    def state_bytes(self) -> int:
        """Of all states of the batch, once."""
        numbers = self.batch * self.value_heads * self.key_width * self.value_width
        return numbers * DTYPES[self.state].itemsize

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width

    def moved(self, per_head: int, taps: int = 4) -> int:
        """Bytes that must move: states twice; inputs, gate and output once; the ring's old inputs and the new one.

        Args:
            per_head: numbers that each head gets from the projection beside q, k, v and the gate.
            taps: W.
        """
        inner = self.value_heads * self.value_width
        numbers = self.channels + 2 * inner + per_head * self.value_heads + taps * self.channels
        return 2 * self.state_bytes + COMPUTE.itemsize * (self.batch * numbers + taps * self.channels)

    def name(self) -> str:
        """In a table."""
        return f"{self.layer} K {self.key_width} V {self.value_width} batch {self.batch} {self.state}"


@dataclass
class Budget:
    """Seconds that a run may take."""

    seconds: float
    started: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.seconds - (time.perf_counter() - self.started)


class Rows:
    """Results: each is written to the file and printed as soon as it is there."""

    def __init__(self, output: Path | None):
        self.rows: list[dict[str, Any]] = []
        self.file = None if output is None else output.open("w", encoding="utf-8")

    def add(self, **row: Any) -> None:
        """Keep, write and print one result."""
        self.rows.append(row)
        if self.file is not None:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
        shown = [f"{row.get('case', ''):44s} {row.get('impl', ''):8s} {row.get('config', '')!s:34s}"]
        if "us" in row:
            shown.append(f"{row['us']:9.2f} us  floor {row['floor_us']:8.2f}  {row['ratio']:5.2f} of it")
            shown.append(f"(state alone {row['state_ratio']:.2f}, copy rate {row['copy_ratio']:.2f})")
        shown.append(row.get("note", ""))
        print(" ".join(shown), flush=True)

    def summary(self) -> None:
        """Print, for each case, the configuration that the table chooses, the best, and the others."""
        print("\ncase, floor us | table's choice: us, of floor | best: us, of floor, configuration | others: us")
        for case in dict.fromkeys(row["case"] for row in self.rows if "us" in row):
            rows = [row for row in self.rows if row.get("case") == case and "us" in row]
            ours = [row for row in rows if row["impl"] == "triton"]
            chosen = next((row for row in ours if row["chosen"]), None)
            best = min(ours, key=lambda row: row["us"], default=None)
            others = ", ".join(f"{row['impl']} {row['us']:.1f}" for row in rows if row["impl"] != "triton")
            parts = [f"{case:44s} {rows[0]['floor_us']:8.2f}"]
            parts.append("" if chosen is None else f"{chosen['us']:8.2f} {chosen['ratio']:.2f}")
            parts.append("" if best is None else f"{best['us']:8.2f} {best['ratio']:.2f} {best['config']}")
            print(" | ".join([*parts, others]))


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all step benchmarks have."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--output", type=Path, help="write each result as a JSON line to this file as it is made")
    found.add_argument("--budget", type=float, default=240.0, help="seconds after which nothing new is begun (240)")
    found.add_argument("--widths", type=_integers, help="key widths, comma-separated, instead of the default order")
    found.add_argument("--batches", type=_integers, help="batch sizes, comma-separated, instead of the default order")
    found.add_argument("--states", type=lambda text: text.split(","), help="state dtypes: fp32, bf16")
    found.add_argument("--layers", type=lambda text: text.split(","), help="layers, by the names that are printed")
    found.add_argument(
        "--configs",
        type=_configs,
        help="variants instead of the default grid, comma-separated: tile:warps:splits[:evict[:registers[:apart]]], "
        "the fields of StepConfig; none: 'no'",
    )
    found.add_argument("--repeats", type=int, default=100, help="replays that count, in each trial (100)")
    found.add_argument("--trials", type=int, default=3, help="independent trials, of whose medians the median (3)")
    found.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1), help="processes that compile ahead")
    found.add_argument("--no-baselines", action="store_true", help="our kernel alone")
    found.add_argument("--toy", action="store_true", help="one tiny case, for a test of this script")
    return found


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _configs(text: str) -> list[StepConfig]:
    if text == "no":
        return []
    configs = []
    for part in text.split(","):
        tile, warps, splits, *more = part.split(":")
        evict = more[0] if more else ""
        registers = int(more[1]) if len(more) > 1 and more[1] else None
        kind = more[2] if len(more) > 2 else ""
        if kind not in ("", "apart"):
            raise argparse.ArgumentTypeError(f"'{part}' says '{kind}' where apart or nothing is wanted")
        configs.append(StepConfig(int(tile), int(warps), int(splits), evict, registers, kind != ""))
    return configs


def _written(config: StepConfig) -> str:
    """As `_configs` reads it."""
    *parts, apart = config
    found = ["" if part is None else str(part) for part in parts] + ["apart"] * apart
    return ":".join(found)


def device_of_run() -> torch.device:
    """The GPU, or the CPU where kernels are interpreted; ends the program where neither will do."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if is_interpreted():
        quicken()
        return torch.device("cpu")
    sys.exit("no CUDA device; set TRITON_INTERPRET=1 and pass --toy to try the script on a CPU")


class Ahead:
    """Compiles kernels in processes of their own before they are launched here; what they make lies in triton's cache.

    Args:
        build: makes one launch of a case by a configuration, with operands on the CPU.
        workers: processes.
        device: for which; nothing is compiled ahead but for CUDA.
    """

    def __init__(self, build: Callable[[Case, StepConfig], None], workers: int, device: torch.device):
        self.build, self.pool = build, None
        self.jobs: dict[tuple[Any, ...], Future[None]] = {}
        if device.type == "cuda" and workers > 0 and not is_interpreted():
            major, minor = torch.cuda.get_device_capability(device)
            # Spawned: a CUDA context does not survive a fork. They are to see no GPU.
            self.pool = ProcessPoolExecutor(
                workers, multiprocessing.get_context("spawn"), _begin, (10 * major + minor,)
            )

    def ask(self, case: Case, config: StepConfig) -> None:
        """Begin to compile, unless that is under way."""
        key = _kernel_key(case, config)
        if self.pool is not None and key not in self.jobs:
            self.jobs[key] = self.pool.submit(self.build, case, config)

    def wait(self, case: Case, config: StepConfig) -> None:
        """Until it is compiled. What a worker could not compile is compiled, or fails, where it is launched."""
        job = self.jobs.get(_kernel_key(case, config))
        if job is not None:
            with suppress(Exception):
                job.result()

    def close(self) -> None:
        """Leave what has not begun."""
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)


def _kernel_key(case: Case, config: StepConfig) -> tuple[Any, ...]:
    """What the machine code depends on: not the batch."""
    return (case.layer, case.key_width, case.value_width, case.state, config)


def _begin(capability: int) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    from lapkernels.offline import compile_only

    compile_only(capability)


def run(
    arguments: argparse.Namespace,
    cases: list[Case],
    variants: Callable[[Case], list[StepConfig]],
    chosen: Callable[[Case, torch.device], StepConfig],
    build: Callable[[Case, StepConfig], None],
    gate: Callable[[Case, StepConfig, torch.device], None],
    calls: Callable[[Case, torch.device, int], Iterator[tuple[str, Callable[[StepConfig], list[Any]]]]],
    per_head: int = 2,
) -> int:
    """Check and time every case: the table's choice and the baselines of all cases first, then the variants.

    Args:
        arguments: of the command line.
        cases: the most telling first.
        variants: configurations of a case beside the table's choice.
        chosen: the table's choice.
        build: see `Ahead`.
        gate: asserts that a case's kernel is right, on a small batch.
        calls: for a case, device and number of copies: implementations by name, each of which gives, for a
            configuration, one call for each copy; `triton` is ours.
        per_head: numbers that each head gets from the projection beside its vectors.

    Returns:
        The exit code: 1 when something was wrong.
    """
    device = device_of_run()
    budget, rows = Budget(arguments.budget), Rows(arguments.output)
    graph = device.type == "cuda"
    rate = copy_bandwidth(device)
    place = torch.cuda.get_device_name(device) if graph else "CPU"
    version = ".".join(map(str, triton_version() or ()))
    rows.add(
        note=f"{place}, torch {torch.__version__}, triton {version}, copy {rate / 1e12:.3f} TB/s",
        device=place, torch=torch.__version__, triton=version, copy=rate,
    )  # fmt: skip
    ahead = Ahead(build, arguments.workers, device)
    wrong: set[tuple[Any, ...]] = set()
    right: set[tuple[Any, ...]] = set()

    def one(case: Case, impl: str, make: Any, config: StepConfig, is_chosen: bool) -> None:
        ours = impl == "triton"
        facts = {"case": case.name(), **vars(case), "impl": impl, "chosen": ours and is_chosen}
        facts["config"] = _written(config) if ours else ""
        key = _kernel_key(case, config)
        if ours and key in wrong:
            return
        try:
            if ours:
                ahead.wait(case, config)
                if key not in right:
                    gate(case, config, device)
                    right.add(key)
            found = measure(
                make(config), device, repeats=arguments.repeats, trials=arguments.trials, graph=graph,
                limit=max(1.0, min(6.0, budget.left)),
            )  # fmt: skip
        except Exception as error:  # one variant that cannot run must not end the others
            if ours:
                wrong.add(key)
            rows.add(**facts, note=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            return
        us, floor = found.seconds * 1e6, case.moved(per_head) / RATE * 1e6
        rows.add(
            **facts, us=us, spread=found.spread, bytes=case.moved(per_head), floor_us=floor, ratio=us / floor,
            state_ratio=us / (2 * case.state_bytes / RATE * 1e6), copy_ratio=us / (case.moved(per_head) / rate * 1e6),
        )  # fmt: skip

    for case in cases:
        ahead.ask(case, chosen(case, device))
    for case in cases:
        for config in variants(case):
            ahead.ask(case, config)
    for first in (True, False):
        for case in cases:
            grid = [chosen(case, device)] if first else [c for c in variants(case) if c != chosen(case, device)]
            if budget.left <= 0 or not grid:
                continue
            for impl, make in calls(case, device, copies(case.state_bytes, device)):
                for config in grid if first or impl == "triton" else ():
                    if budget.left > 0:
                        one(case, impl, make, config, first)
            free(device)
    ahead.close()
    rows.summary()
    if budget.left <= 0:
        print(f"stopped after {arguments.budget:.0f} s; --budget gives it longer")
    errors = [row for row in rows.rows if "AssertionError" in row.get("note", "")]
    return 1 if errors else 0
