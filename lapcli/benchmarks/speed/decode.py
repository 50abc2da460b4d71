"""Decode steps of whole models: lapcli's runtime against the libraries, beside the bytes that must move."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lapcli.benchmarks.speed.configs import Subject, rows_that_fit
from lapcli.benchmarks.speed.kernel_times import kernel_times
from lapcli.benchmarks.speed.library import SHORT, LibraryDecode, generate_seconds, why_no_fla
from lapcli.benchmarks.speed.models import DISTINCT, STEPS, Model
from lapcli.benchmarks.speed.results import Cell, Results, Row
from lapcli.families.dual_state import has_states, set_kernel
from lapcli.linearising.plan import Shape
from lapcli.runtime.pages import PAGE, pages_of
from lapkernels.timing import (
    REPEATS,
    TRIALS,
    WARMUP,
    free,
    latencies,
    measure,
    out_of_memory,
    percentile,
    synchronize,
)

WAYS = ("lapcli", "fla graph", "fla", "library", "pytorch")
"""`lapcli`: the runtime's fused step; `fla` and `fla graph`: fla's model, eagerly and captured; `library`: the forward
pass of a model of transformers; `pytorch`: lapcli's model as it is, without the runtime."""
CAPTURED = ("lapcli", "fla graph")
PROMPT = 512
JUDGED_ROWS = 64
"""Rows that are compared before memory is filled with more."""


@dataclass(frozen=True)
class DecodeSettings:
    """How much is measured.

    Attributes:
        warmup: calls that do not count.
        repeats: calls that do.
        trials: how often both.
        limit: seconds for the trials of a cell, three times that for captured steps; slow ways are repeated less often.
        state_dtype: of lapcli's states.
        latency_tokens: of a latency cell.
        generated: new tokens of the shorter and the longer generation whose difference is a token's time.
        profile: whether to look into captured steps, kernel by kernel.
    """

    warmup: int = WARMUP
    repeats: int = REPEATS
    trials: int = TRIALS
    limit: float | None = 4.0
    state_dtype: torch.dtype = torch.float32
    latency_tokens: int = 2048
    generated: tuple[int, int] = (8, 40)
    profile: bool = False


Measured = Callable[["Cell", "Model", "Results", "DecodeSettings"], "Row"]


class Way(Protocol):
    """Something that decodes rows."""

    def start(self, prompts: Tensor) -> Tensor:
        """Run prompts `[B, P]`, and return the last logits `[B, vocabulary]`."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Take one token of each row in, and return logits."""
        ...

    def call(self, tokens: Tensor) -> Callable[[], Any]:
        """A step that can be repeated."""
        ...


class EngineDecode:
    """Lapcli's runtime.

    Args:
        model: the model; the prompts go through its own forward pass, chunk by chunk in PyTorch, since fla's kernels
            would be tuned for minutes first.
        rows: B.
        length: tokens that a row may have.
        state_dtype: of recurrent states.
        kernel: of the state's step; `reference` is the definition, which cannot be captured.
    """

    def __init__(self, model: Any, rows: int, length: int, state_dtype: torch.dtype, kernel: str = "auto"):
        from lapcli.runtime import Engine

        if hasattr(model, "set_kernel"):
            model.set_kernel("chunked")
        elif has_states(model.config.to_dict()):
            set_kernel(model, "chunked", model.device)
        graphs = False if kernel == "reference" else None
        self.engine = Engine(
            model, max_rows=rows, max_length=length, state_dtype=state_dtype, kernel=kernel, graphs=graphs
        )
        self.rows, self.slots, self.seen = rows, [], 0

    @property
    def detail(self) -> str:
        """What runs a step."""
        return str(self.engine.path)

    def start(self, prompts: Tensor) -> Tensor:
        """Prefill the rows that differ, and copy what they left to those that repeat them."""
        rows, length = prompts.shape
        alone = rows if self.engine.path.name == "eager" else min(rows, DISTINCT)
        done = self.engine.prefill_rows(prompts[:alone].tolist())
        self.slots = [found.slot for found in done]
        if rows > alone:
            self.slots += self.engine.occupy(rows - alone, length)
            for number in range(alone, rows):
                self.engine.copy(self.slots[number % alone], self.slots[number])
        self.seen = length
        logits = torch.stack([found.logits for found in done])
        return logits[torch.arange(rows, device=prompts.device) % alone]

    def step(self, tokens: Tensor) -> Tensor:
        """One step."""
        self.seen += 1
        return self.engine.step(tokens, self.slots)

    def call(self, tokens: Tensor) -> Callable[[], Any]:
        """A replay that chooses each row's likeliest token and goes on with it, as often as the rows' length allows."""
        self.engine.reserve(self.slots, self.engine.max_length)
        self.engine.step(tokens, self.slots)
        self.seen += 1

        def run() -> Any:
            self.seen += 1
            return self.engine.steps.run(self.rows, "greedy", longest=self.seen)

        return run


def step_floor(model: Model, batch: int, context: int, bandwidth: float, state_itemsize: int = 4) -> float:
    """Seconds that a step's bytes take: weights once, states in and out, keys and values of the softmax layers once."""
    subject = model.subject
    moved = model.weight_bytes() + 2 * batch * subject.state_bytes(state_itemsize)
    return (moved + batch * context * _key_value_bytes(model)) / bandwidth


def sequence_bytes(model: Model, context: int, state_itemsize: int = 4) -> dict[str, int]:
    """What one sequence of so many tokens keeps: `key_value_bytes`, and `state_bytes` with convolution inputs."""
    inputs = model.subject.convolution_bytes(torch.finfo(model.dtype).bits // 8)
    states = model.subject.state_bytes(state_itemsize) + inputs
    return {"key_value_bytes": context * _key_value_bytes(model), "state_bytes": states}


def _key_value_bytes(model: Model) -> int:
    """Of a token, in the softmax layers of a hybrid or a Transformer."""
    itemsize = torch.finfo(model.dtype).bits // 8
    if model.subject.share is not None:
        return Shape.of(model.subject.config).token_bytes(model.subject.attention_layers(), itemsize)
    config = model.ours.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ()
    layers = sum(kind in ("full_attention", "attention") for kind in kinds)
    if not layers:
        return 0
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return layers * 2 * heads * width * itemsize


class Models:
    """The models of a run, each made once and dropped when memory is short.

    Args:
        device: where.
        dtype: of weights and activations.
        seed: of the weights.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0):
        self.device, self.dtype, self.seed = device, dtype, seed
        self._held: dict[tuple[str, float], Model] = {}

    def get(self, subject: Subject) -> Model:
        """The model of a subject."""
        key = (subject.name, subject.ratio)
        if key not in self._held:
            self._held[key] = Model(subject, self.device, self.dtype, self.seed)
        return self._held[key]

    def only(self, subject: Subject) -> None:
        """Drop all others."""
        key = (subject.name, subject.ratio)
        self._held = {name: model for name, model in self._held.items() if name == key}
        free(self.device)


def cell_of(subject: Subject, what: str, way: str, batch: int, tokens: int, **others: Any) -> Cell:
    """The cell of a subject."""
    return Cell(
        what, subject.name, subject.ratio, way, batch, tokens,
        subject.key_heads, subject.value_heads, subject.key_width, subject.value_width, **others,
    )  # fmt: skip


def why_not_way(way: str, model: Model) -> str | None:
    """Why a way cannot decode a model here, or `None`."""
    if way in ("fla", "fla graph"):
        return why_no_fla(model.subject.config["model_type"], model.device)
    if way == "library" and model.is_own:
        return "lapcli and fla have this model, transformers has not"
    if way == "pytorch" and not model.is_own:
        return "transformers' model is `library`"
    return None


def make_way(way: str, model: Model, batch: int, length: int, settings: DecodeSettings) -> Way:
    """A way, ready to start.

    Args:
        way: its name.
        model: what it decodes.
        batch: rows.
        length: tokens that a row may have at the end.
        settings: how.
    """
    if way == "lapcli":
        return EngineDecode(model.ours, batch, length, settings.state_dtype)
    if way in ("fla", "fla graph"):
        return LibraryDecode(model.fla, piece=SHORT, graph=way == "fla graph")
    if model.is_own:
        model.ours.set_kernel("chunked")
    return LibraryDecode(model.ours)


def decode_benchmark(
    subjects: Sequence[Subject],
    batches: Sequence[int],
    results: Results,
    models: Models,
    *,
    contexts: Sequence[int] = (PROMPT,),
    ways: Sequence[str] = WAYS,
    latency: bool = True,
    generate: bool = True,
    settings: DecodeSettings | None = None,
) -> None:
    """Measure decode steps: for each context and batch all subjects, the given order first to last.

    Ways that a device lacks are said once. What is slow comes last: whole generations, then the latency of each token.

    Args:
        subjects: the base first, then what it is compared with.
        batches: rows, the most telling first.
        results: where rows go.
        models: makes the models.
        contexts: tokens that a row has seen.
        ways: which.
        latency: whether to time tokens one by one at the first batch and alone.
        generate: whether to time whole generations of one row.
        settings: how much is measured.
    """
    settings = settings or DecodeSettings()
    said: set[str] = set()

    def steps(some: Sequence[str]) -> None:
        for context in contexts:
            for batch in batches:
                for subject in subjects:
                    for way in (way for way in some if way in ways):
                        cell = cell_of(subject, "decode", way, batch, context, state_dtype=_state_name(way, settings))
                        _row(cell, subject, models, results, settings, said, _decode_row)

    def others(what: str, way: str, batch: int, tokens: int, measured: Measured) -> None:
        for subject in subjects:
            cell = cell_of(subject, what, way, batch, tokens, state_dtype=_state_name(way, settings))
            _row(cell, subject, models, results, settings, said, measured)

    steps(CAPTURED)
    if generate and "lapcli" in ways:
        others("generate", "lapcli", 1, SHORT, _generate_row)
    if generate and {"fla", "library"} & set(ways):
        others("generate", "library", 1, SHORT, _generate_row)
    steps(("fla", "library"))
    if latency and "lapcli" in ways:
        for batch in dict.fromkeys((batches[0], 1)):
            others("latency", "lapcli", batch, contexts[0], _latency_row)
    steps(("pytorch",))


def _state_name(way: str, settings: DecodeSettings) -> str:
    dtype = settings.state_dtype if way == "lapcli" else torch.float32
    return str(dtype).removeprefix("torch.")


def _row(
    cell: Cell,
    subject: Subject,
    models: Models,
    results: Results,
    settings: DecodeSettings,
    said: set[str],
    measured: Measured,
) -> None:
    """One row, whatever happens; memory is freed and tried once more when it is short."""
    if results.budget.left <= 0:
        results.add(Row(cell, "no time"))
        return
    unsound = [
        row
        for row in results.rows
        if row.status == "wrong"
        and (row.cell.model, row.cell.ratio, row.cell.way) == (cell.model, cell.ratio, cell.way)
    ]
    if cell.what != "decode" and unsound:
        results.add(Row(cell, "wrong", f"so were its decode steps: {unsound[0].detail}"))
        return
    try:
        model = models.get(subject)
        if cell.what == "decode" and (why := why_not_way(cell.way, model)) is not None:
            if cell.way not in said:
                said.add(cell.way)
                results.add(Row(cell, "not here", why))
            return
    except Exception as error:
        results.add(failed(cell, error))
        return
    results.add(attempt(cell, subject, models, lambda model: measured(cell, model, results, settings)))


def attempt(cell: Cell, subject: Subject, models: Models, measured: Callable[[Model], Row]) -> Row:
    """A row whatever happens; where memory is short, once more without all other models."""
    for last in (False, True):
        try:
            return measured(models.get(subject))
        except Exception as error:
            if last or not out_of_memory(error):
                return failed(cell, error)
        finally:
            free(models.device)
        # Here, where the error no longer holds what was computed.
        models.only(subject)
    raise AssertionError("unreachable")


def failed(cell: Cell, error: Exception) -> Row:
    """The row of a cell that could not be measured: one failure must not end the others."""
    if out_of_memory(error):
        return Row(cell, "out of memory")
    said = (str(error).strip().splitlines() or [""])[0]
    return Row(cell, "failed", f"{type(error).__name__}: {said}"[:300])


def _decode_row(cell: Cell, model: Model, results: Results, settings: DecodeSettings) -> Row:
    forget_peak(model.device)
    calls = settings.trials * (settings.warmup + settings.repeats + 8)
    way = make_way(cell.way, model, cell.batch, cell.tokens + STEPS + calls + 8, settings)
    plain = _plain(model, cell, settings)
    verdict = model.judge(way.start, way.step, cell.batch, cell.tokens, plain=plain)
    if not verdict.right:
        return Row(cell, "wrong", verdict.text, error_share=verdict.share)
    run = way.call(model.tokens(cell.batch, 1)[:, 0])
    timing = measure(
        run,
        model.device,
        warmup=settings.warmup,
        repeats=settings.repeats,
        trials=settings.trials,
        graph=cell.way == "fla graph",
        # A large step that is captured gets its hundred calls; what the CPU holds up is repeated less often.
        limit=settings.limit if settings.limit is None or cell.way not in CAPTURED else 3 * settings.limit,
    )
    if isinstance(way, EngineDecode):
        timing = replace(timing, graphed=way.engine.path.graph)
    floor = step_floor(model, cell.batch, cell.tokens, results.machine["copy_bytes"], _itemsize(cell.state_dtype))
    detail = way.detail if isinstance(way, EngineDecode) else ""
    looked = settings.profile and cell.way in CAPTURED
    return Row.timed(
        cell,
        timing,
        floor=floor,
        share=verdict.share,
        detail=detail,
        peak_bytes=most_held(model.device),
        more={
            "tokens_per_second": cell.batch / timing.seconds,
            **sequence_bytes(model, cell.tokens, _itemsize(cell.state_dtype)),
            **(_kernels(run, model.device) if looked else {}),
        },
    )


def _kernels(run: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Where a step's time goes; a profiler that fails does not take the time with it."""
    try:
        return {"kernels": [list(each) for each in kernel_times(run, device)]}
    except RuntimeError as error:
        return {"profiler": str(error)[:200]}


def _plain(model: Model, cell: Cell, settings: DecodeSettings) -> Tensor | None:
    """What states in half precision leave of the logits, by the definition of the step; `None` for states in fp32."""
    if cell.state_dtype == "float32":
        return None
    way = EngineDecode(model.ours, DISTINCT, cell.tokens + STEPS + 1, settings.state_dtype, kernel="reference")
    return model.logits(way.start, way.step, DISTINCT, cell.tokens)


def _itemsize(dtype: str) -> int:
    return torch.finfo(getattr(torch, dtype)).bits // 8


def forget_peak(device: torch.device) -> None:
    """Count a device's peak memory anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def most_held(device: torch.device) -> int | None:
    """What the device held at most since then, other models of the run included."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _generate_row(cell: Cell, model: Model, results: Results, settings: DecodeSettings) -> Row:
    """Tokens of whole generations, prompt and first tokens taken off."""

    def clock() -> float:
        synchronize(model.device)
        return time.perf_counter()

    prompt = model.tokens(cell.batch, cell.tokens)
    few, many = settings.generated
    if cell.way == "lapcli":
        found = _engine_generates(model, prompt, few, many, clock, settings)
    else:
        from_fla = model.is_own and why_no_fla(model.subject.config["model_type"], model.device) is None
        if model.is_own and not from_fla:
            model.ours.set_kernel("chunked")
        library = model.fla if from_fla else model.ours
        found = [generate_seconds(library, prompt, few, many, clock) for _ in range(settings.trials)]
    seconds = sorted(found)[len(found) // 2]
    if not seconds > 0:
        return Row(cell, "failed", "a longer generation took no longer than a shorter one: other work disturbs both")
    floor = step_floor(model, cell.batch, cell.tokens, results.machine["copy_bytes"], _itemsize(cell.state_dtype))
    source = (
        "" if cell.way == "lapcli" else f"{type(model.ours).__name__} of {'fla' if _by_fla(model) else 'this process'}"
    )
    return Row(
        cell,
        "measured",
        detail=source,
        seconds=seconds,
        trials=tuple(found),
        repeats=many - few,
        floor_seconds=floor,
        more={"tokens_per_second": cell.batch / seconds},
    )


def _by_fla(model: Model) -> bool:
    return model.is_own and why_no_fla(model.subject.config["model_type"], model.device) is None


def _engine_generates(
    model: Model, prompt: Tensor, few: int, many: int, clock: Callable[[], float], settings: DecodeSettings
) -> list[float]:
    from lapcli.runtime import GenerationSettings

    way = EngineDecode(model.ours, prompt.shape[0], prompt.shape[1] + 4 * many + 1, settings.state_dtype)

    def took(count: int) -> float:
        begun = clock()
        events = list(way.engine.generate(prompt.tolist(), GenerationSettings(max_new_tokens=count)))
        assert sum(len(event.tokens) for event in events) == count * prompt.shape[0]
        return clock() - begun

    # Kernels are compiled and graphs captured here.
    took(few)
    # A runtime's token is short: the same difference over more of them.
    return [(took(4 * many) - took(few)) / (4 * many - few) for _ in range(settings.trials)]


def _latency_row(cell: Cell, model: Model, results: Results, settings: DecodeSettings) -> Row:
    """Each token waited for, as a reader would."""
    length = cell.tokens + settings.latency_tokens + settings.warmup + 8
    way = EngineDecode(model.ours, cell.batch, length, settings.state_dtype)
    way.start(model.tokens(min(cell.batch, DISTINCT), cell.tokens).repeat(-(-cell.batch // DISTINCT), 1)[: cell.batch])
    run = way.call(model.tokens(cell.batch, 1)[:, 0])
    for _ in range(settings.warmup):
        run()
    found = latencies(run, settings.latency_tokens, model.device)
    floor = step_floor(model, cell.batch, cell.tokens, results.machine["copy_bytes"], _itemsize(cell.state_dtype))
    return Row(
        cell,
        "measured",
        seconds=percentile(found, 0.5),
        trials=(percentile(found, 0.5),),
        repeats=len(found),
        graphed=way.engine.path.graph,
        floor_seconds=floor,
        more={"p50": percentile(found, 0.5), "p99": percentile(found, 0.99), "max": max(found)},
    )


def memory_benchmark(
    subjects: Sequence[Subject],
    memory: float,
    results: Results,
    models: Models,
    *,
    context: int = PROMPT,
    most_rows: int | None = None,
    settings: DecodeSettings | None = None,
) -> None:
    """How many sequences fit into so much memory, and what they decode together.

    Sequences are counted as `plan` counts them, weights, states, convolution inputs, keys and values (these in whole
    pages); where a step then takes more than the memory, as many fewer as that is too much are tried once more.

    Args:
        subjects: the base and its pruned versions.
        memory: bytes that all of it may take.
        results: where rows go.
        models: makes the models.
        context: tokens that each sequence has seen.
        most_rows: never more than these; `None` for no bound.
        settings: how much is measured.
    """
    settings = settings or DecodeSettings()
    for subject in subjects:
        cell = cell_of(subject, "memory", "lapcli", 0, context, state_dtype=_state_name("lapcli", settings))
        if results.budget.left <= 0:
            results.add(Row(cell, "no time"))
            continue
        try:
            models.only(subject)
            results.add(_memory_row(cell, models.get(subject), memory, most_rows, results, settings))
        except Exception as error:
            results.add(failed(cell, error))
        finally:
            free(models.device)


def _memory_row(
    cell: Cell, model: Model, memory: float, most_rows: int | None, results: Results, settings: DecodeSettings
) -> Row:
    itemsize = _itemsize(cell.state_dtype)
    weights = sum(value.nbytes for value in {id(x): x for x in model.ours.parameters()}.values())
    # Keys and values take whole pages.
    each = sum(sequence_bytes(model, pages_of(cell.tokens) * PAGE, itemsize).values())
    fit = rows_that_fit(memory, weights, each)
    if fit < 1:
        return Row(replace(cell, batch=0), "out of memory", "not one sequence fits beside the weights")
    rows = fit if most_rows is None else min(fit, most_rows)
    few = min(rows, JUDGED_ROWS)
    way = EngineDecode(model.ours, few, cell.tokens + STEPS + 1, settings.state_dtype)
    verdict = model.judge(way.start, way.step, few, cell.tokens, plain=_plain(model, cell, settings))
    del way
    if not verdict.right:
        return Row(replace(cell, batch=few), "wrong", verdict.text, error_share=verdict.share)
    for _ in range(2):
        timing, peak = _at_rows(model, rows, cell.tokens, settings)
        if peak is None or peak <= memory:
            break
        rows -= max(1, int(-(-(peak - memory) // each)))
        if rows < 1:
            return Row(replace(cell, batch=0), "out of memory", "a step of one sequence takes more than the memory")
    floor = step_floor(model, rows, cell.tokens, results.machine["copy_bytes"], itemsize)
    over = "" if peak is None or peak <= memory else f"takes {peak - memory:.0f} bytes more than that"
    return Row.timed(
        replace(cell, batch=rows),
        timing,
        floor=floor,
        share=verdict.share,
        peak_bytes=peak,
        detail=over,
        more={
            "memory": memory,
            "fit": fit,
            "sequence_bytes": each,
            "weights": weights,
            "tokens_per_second": rows / timing.seconds,
        },
    )


def _at_rows(model: Model, rows: int, context: int, settings: DecodeSettings) -> tuple[Any, int | None]:
    """A step of so many rows, and what the device held at most."""
    free(model.device)
    forget_peak(model.device)
    calls = settings.trials * (settings.warmup + settings.repeats + 8)
    way = EngineDecode(model.ours, rows, context + calls + 8, settings.state_dtype)
    # Zero states: what a step costs does not depend on them, and the prompts would take longer than all else.
    way.slots = way.engine.occupy(rows, context)
    way.seen = context
    run = way.call(model.tokens(rows, 1)[:, 0])
    timing = measure(
        run, model.device, warmup=settings.warmup, repeats=settings.repeats, trials=settings.trials,
        limit=settings.limit,
    )  # fmt: skip
    found = replace(timing, graphed=way.engine.path.graph), most_held(model.device)
    del run, way
    free(model.device)
    return found
