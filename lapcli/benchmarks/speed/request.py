"""What somebody wants measured, and the measuring of it."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from lapcli.benchmarks.speed import chunk_operator, decode, mixer, prefill, step_operator
from lapcli.benchmarks.speed.chunk_operator import chunk_operator_benchmark
from lapcli.benchmarks.speed.configs import (
    SHARES,
    Subject,
    converted_subject,
    is_transformer,
    read_config,
    subject,
)
from lapcli.benchmarks.speed.decode import DecodeSettings, Models, decode_benchmark, memory_benchmark
from lapcli.benchmarks.speed.layers import LAYERS, Shape, shapes_of
from lapcli.benchmarks.speed.mixer import mixer_benchmark
from lapcli.benchmarks.speed.paper import paper_benchmark
from lapcli.benchmarks.speed.prefill import prefill_benchmark
from lapcli.benchmarks.speed.results import Results
from lapcli.benchmarks.speed.step_operator import step_operator_benchmark
from lapcli.errors import ModelError, UsageError

KINDS = ("decode", "prefill", "mixer", "operator", "paper")
PHASES = ("decode", "prefill")
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
QUICK = DecodeSettings(warmup=1, repeats=5, trials=2, limit=0.5, latency_tokens=8, generated=(2, 4))
"""Toy sizes: shows that it runs, measures nothing."""

_WAYS = {
    ("decode", "decode"): decode.WAYS,
    ("prefill", "prefill"): prefill.WAYS,
    ("mixer", "decode"): mixer.WAYS,
    ("mixer", "prefill"): mixer.WAYS,
    ("operator", "decode"): step_operator.WAYS,
    ("operator", "prefill"): chunk_operator.WAYS,
}


@dataclass(frozen=True)
class Request:
    """What is to be measured. An empty tuple takes the default of its kind.

    Attributes:
        kind: one of `KINDS`.
        configs: models, or layers of an operator.
        ratios: removed fractions, as typed.
        shares: converted fractions of a Transformer's layers, as typed.
        batches: rows, the most telling first.
        tokens: seen before a decode step; of a prompt.
        widths: key widths of an operator.
        phases: `decode`, `prefill`, of a mixer or an operator.
        ways: which.
        state_dtypes: of recurrent states.
        backward: whether an operator's gradients are measured too.
        memory: bytes that sequences may fill; `None` for no such cell.
        quick: toy sizes.
        settings: how much is measured.
    """

    kind: str
    configs: tuple[str, ...] = ()
    ratios: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    phases: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()
    state_dtypes: tuple[str, ...] = ()
    backward: bool = False
    memory: float | None = None
    quick: bool = False
    settings: DecodeSettings = field(default_factory=DecodeSettings)


@dataclass(frozen=True)
class Work:
    """A request with its defaults filled in, looked at before any work.

    Attributes:
        request: as it came.
        subjects: the models, by config, the base first.
        shapes: the layers of an operator.
        batches: rows.
        tokens: of rows.
        phases: of a mixer or an operator.
        ways: by phase.
        state_dtypes: of states.
    """

    request: Request
    subjects: tuple[tuple[Subject, ...], ...]
    shapes: tuple[Shape, ...]
    batches: tuple[int, ...]
    tokens: tuple[int, ...]
    phases: tuple[str, ...]
    ways: dict[str, tuple[str, ...]]
    state_dtypes: tuple[torch.dtype, ...]

    def facts(self) -> dict[str, Any]:
        """For a dry run."""
        return {
            "measures": self.request.kind,
            "models": [one.label for some in self.subjects for one in some] or None,
            "layers": [f"{shape.name}, K {shape.key_width}" for shape in self.shapes] or None,
            "phases": list(self.phases) or None,
            "batches": list(self.batches) or None,
            "tokens": list(self.tokens) or None,
            "ways": {phase: list(ways) for phase, ways in self.ways.items()} or None,
            "memory": self.request.memory,
        }


def plan(request: Request) -> Work:
    """Fill in defaults and refuse what cannot be.

    Raises:
        UsageError: a name, number or combination that makes no sense.
        ModelError: there is no such config, or one without states.
        FamilyError: the family is not known.
    """
    kind, quick = request.kind, request.quick
    if kind not in KINDS:
        raise UsageError(f"there is no benchmark {kind!r}; there is: {', '.join(KINDS)}")
    for name, values in (("--batch", request.batches), ("--tokens", request.tokens), ("--widths", request.widths)):
        if any(value < 1 for value in values):
            raise UsageError(f"{name} {', '.join(map(str, values))}: whole numbers from 1 on")
    if request.settings.profile and (kind != "decode" or request.memory is not None):
        raise UsageError("--profile is for `bench decode`", "drop it, or --memory")
    if request.memory is not None and kind != "decode":
        raise UsageError("--memory is for `bench decode`", "drop it, or measure decode")
    _refuse_unread(request)
    if request.backward and not (kind == "operator" and "prefill" in (request.phases or PHASES)):
        raise UsageError("--backward is for `bench operator` in prefill", "drop it, or pass --phase prefill")
    unknown = [name for name in request.state_dtypes if name not in STATE_DTYPES]
    if unknown:
        raise UsageError(f"--state-dtype {unknown[0]!r} is none of {', '.join(STATE_DTYPES)}")
    phases = {"decode": ("decode",), "prefill": ("prefill",), "paper": ()}.get(kind, request.phases or PHASES)
    wrong = [phase for phase in phases if phase not in PHASES]
    if wrong:
        raise UsageError(f"--phase {wrong[0]!r} is none of {', '.join(PHASES)}")
    ways = {phase: _ways(request.ways, _WAYS[kind, phase]) for phase in phases}
    if request.ways and not any(ways.values()):
        there = dict.fromkeys(way for phase in phases for way in _WAYS[kind, phase])
        raise UsageError(f"--ways {', '.join(request.ways)}: none of {', '.join(there)}")
    subjects: tuple[tuple[Subject, ...], ...] = ()
    shapes: tuple[Shape, ...] = ()
    if kind == "operator":
        names = request.configs or (("toy",) if quick else ("qwen3.5", "gdn"))
        missing = [name for name in names if name not in LAYERS]
        if missing:
            raise UsageError(f"--config {missing[0]!r} is no layer; there is: {', '.join(LAYERS)}")
        widths = request.widths or ((32, 16) if quick else ())
        shapes = tuple(shape for name in names for shape in shapes_of(name, widths or None))
        if not shapes:
            raise UsageError(f"--widths {', '.join(map(str, widths))}: all beyond the layers' own key widths")
    elif kind != "paper":
        names = request.configs or (("toy",) if quick else ("gdn",))
        subjects = tuple(tuple(_subjects(name, request)) for name in names)
    return Work(
        request,
        subjects,
        shapes,
        request.batches or _batches(kind, quick),
        request.tokens or _tokens(kind, quick),
        phases,
        ways,
        tuple(STATE_DTYPES[name] for name in request.state_dtypes or _states(kind)),
    )


def _refuse_unread(request: Request) -> None:
    """Refuse what would have no effect, rather than let somebody believe that it had."""
    kind, full = request.kind, request.memory is not None
    given = (
        ("--widths", request.widths, kind == "operator", "name removed fractions with --ratio"),
        ("--phase", request.phases, kind in ("mixer", "operator"), "drop it"),
        ("--ratio", request.ratios, kind != "operator", "name key widths with --widths"),
        ("--share", request.shares, kind in PHASES, "drop it"),
        ("--batch", request.batches, not full, "--memory says how many rows there are"),
        ("--ways", request.ways, not full, "--memory is measured of lapcli alone"),
        ("--state-dtype", request.state_dtypes, kind != "prefill", "a prompt's states are fp32"),
    )
    for name, values, read, hint in given:
        if values and not read:
            raise UsageError(f"{name} is not for `bench {kind}{' --memory' if full else ''}`", hint)
    for name, values, one in (
        ("--state-dtype", request.state_dtypes, kind != "operator"), ("--tokens", request.tokens, full)
    ):  # fmt: skip
        if one and len(values) > 1:
            said = ",".join(map(str, values))
            raise UsageError(f"{name} {said}: one at a time here", f"for example {name} {values[0]}")


def _subjects(name: str, request: Request) -> list[Subject]:
    called, config = read_config(name)
    if is_transformer(config):
        if request.kind not in PHASES:
            raise UsageError(f"{called} is a Transformer: `bench decode` and `bench prefill` measure it whole")
        if request.ratios:
            raise UsageError(
                f"--ratio is a fraction of the key width of states, and {called} is a Transformer",
                "name shares of its layers that are made states with --share",
            )
        shared = [converted_subject(called, config, share) for share in request.shares or SHARES]
        return list({one.layers: one for one in shared}.values())
    if request.shares:
        raise UsageError(f"--share is about Transformers, and {called} is none", "name removed fractions with --ratio")
    ratios = request.ratios or (("0", "0.5") if request.quick else ("0", "0.5", "0.75"))
    found = [subject(called, config, ratio) for ratio in ratios]
    return list({one.key_width: one for one in found}.values())


def _ways(asked: Sequence[str], there: Sequence[str]) -> tuple[str, ...]:
    return tuple(way for way in there if not asked or way in asked)


def _batches(kind: str, quick: bool) -> tuple[int, ...]:
    if quick:
        return (3, 1)
    return {"prefill": (8, 1), "mixer": (64, 1, 16, 256), "operator": (64, 256, 16, 1)}.get(kind, (64, 1, 16, 256))


def _tokens(kind: str, quick: bool) -> tuple[int, ...]:
    if quick:
        return (16,) if kind == "decode" else (70, 40)
    return {"prefill": (8192, 2048, 512, 1024, 4096), "mixer": (2048,), "operator": (8192, 2048)}.get(kind, (512,))


def _states(kind: str) -> tuple[str, ...]:
    return ("float32", "bfloat16") if kind == "operator" else ("float32",)


def run(
    work: Work,
    results: Results,
    device: torch.device,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    first_config: bool = False,
) -> None:
    """Measure it.

    Args:
        work: what.
        results: where rows go.
        device: where.
        dtype: of weights and activations.
        seed: of the weights.
        first_config: whether every Triton autotuner keeps its first configuration, instead of a search that takes
            minutes: fair to our kernels only where the others have nothing to search.
    """
    from dataclasses import replace

    from lapkernels._triton import first_configurations

    request = work.request
    settings = replace(QUICK, profile=request.settings.profile) if request.quick else request.settings
    settings = replace(settings, state_dtype=work.state_dtypes[0])
    models = Models(device, dtype, seed)
    with first_configurations() if first_config else nullcontext():
        if request.kind == "paper":
            paper_benchmark(results, models, quick=request.quick, settings=settings)
        elif request.kind == "decode":
            _decode(work, results, models, settings)
        elif request.kind == "prefill":
            for some in work.subjects:
                shapes = [(batch, tokens) for batch in work.batches for tokens in work.tokens]
                prefill_benchmark(some, shapes, results, models, ways=work.ways["prefill"], settings=settings)
        elif request.kind == "mixer":
            _mixer(work, results, device, dtype, settings)
        else:
            _operator(work, results, device, dtype, settings)


def _decode(work: Work, results: Results, models: Models, settings: DecodeSettings) -> None:
    for some in work.subjects:
        if work.request.memory is None:
            decode_benchmark(
                some, work.batches, results, models, contexts=work.tokens, ways=work.ways["decode"], settings=settings
            )
        else:
            memory_benchmark(
                some, work.request.memory, results, models, context=work.tokens[0],
                most_rows=64 if work.request.quick else None, settings=settings,
            )  # fmt: skip


def _mixer(work: Work, results: Results, device: torch.device, dtype: torch.dtype, settings: DecodeSettings) -> None:
    for phase in work.phases:
        # A prompt of a mixer is as many rows as the paper takes.
        batches = (
            (8, 16, 32) if phase == "prefill" and not work.request.batches and not work.request.quick else work.batches
        )
        shapes = [(batch, tokens) for batch in batches for tokens in work.tokens]
        for some in work.subjects:
            mixer_benchmark(
                some, shapes, results, device, dtype, decode=phase == "decode", ways=work.ways[phase], settings=settings
            )


def _operator(work: Work, results: Results, device: torch.device, dtype: torch.dtype, settings: DecodeSettings) -> None:
    if "decode" in work.phases:
        step_operator_benchmark(
            work.shapes, work.batches, results, device, dtype, state_dtypes=work.state_dtypes,
            ways=work.ways["decode"], settings=settings,
        )  # fmt: skip
    if "prefill" in work.phases:
        batches = work.batches if work.request.batches or work.request.quick else (8, 1)
        sizes = [(batch, tokens) for batch in batches for tokens in work.tokens]
        chunk_operator_benchmark(
            work.shapes, sizes, results, device, dtype, backward=(False, True) if work.request.backward else (False,),
            ways=work.ways["prefill"], settings=settings,
        )  # fmt: skip


def refuse_slow(work: Work, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse where the kernels that would be measured are no fast ones.

    Raises:
        ModelError: naming them.
    """
    from lapcli.doctor.diagnosis import uses

    phases = work.phases or PHASES
    slow = [use for use in uses(device, dtype) if not use.fast and use.work in phases]
    if slow:
        said = "; ".join(f"{use.work} would run the {use.name} kernel ({use.reason})" for use in slow)
        raise ModelError(
            f"--require-fast: {said}",
            "install 'lapcli[gpu]' on a machine with a CUDA device, or drop --require-fast",
        )
