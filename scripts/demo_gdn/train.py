"""The training run: preparation, schedule by the clock, measures on the way, and everything that is stored."""

import json
import math
import os
import platform
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any

import numpy as np
import torch

from demo_gdn.architecture import GDN, Architecture
from demo_gdn.corpus import MODERN, TRAINED, Corpus, build_corpus
from demo_gdn.measure import Measurement, generated_recall
from demo_gdn.recall_rows import STAGES, RowMaker, rows_of_stage, single_needle_rows
from demo_gdn.sampling import RECALL_SHARE, STAGE_ENDS, TEXT_WEIGHTS, Region, Sampler, check_weights
from demo_gdn.step import Network, TrainStep, build_step
from demo_gdn.vocabulary import load_tokenizer_json, save_tokenizer

_BLOCK_STEPS = 50
_RESERVE_SECONDS = 25.0
_WARM_UP_STEPS = 150


@dataclass
class Settings:
    """What a run depends on.

    Attributes:
        data: folder of the shared files.
        builtin: exported `builtin` corpus.
        output: where the model goes.
        minutes: of the whole run, from its start to its end; the schedule follows the clock.
        steps: end after that many steps instead; `None` follows the clock.
        batch: rows of a step.
        length: tokens of a row.
        vocab_size: of the tokenizer.
        tokenizer: file of a tokenizer to take; `None` trains one.
        impl: one of those that the architecture has.
        modes: how a step may run, tried in order.
        answer_weight: weight of answer tokens in the loss.
        muon_rate: peak rate of the hidden matrices.
        adam_rate: peak rate of all else.
        decay_from: progress at which the rates begin to fall, linearly to zero.
        recall_rows: rows made for the first stage of the recall curriculum; `Stage.rows` times as many for the others.
        workers: processes.
        seed: of everything.
        tiny: a two-layer model on little text, to try the script out.
        limit: characters kept of each source; `None` keeps all.
    """

    data: Path
    builtin: Path
    output: Path
    minutes: float
    steps: int | None
    batch: int
    length: int
    vocab_size: int
    tokenizer: Path | None
    impl: str
    modes: tuple[str, ...]
    answer_weight: float
    muon_rate: float
    adam_rate: float
    decay_from: float
    recall_rows: int
    workers: int
    seed: int
    tiny: bool
    limit: int | None


class Clock:
    """Seconds since the run began, printed before every line."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._started

    def say(self, text: str) -> None:
        """Print a line with the time."""
        print(f"[{self.seconds():6.1f}s] {text}", flush=True)


def rate_factor(progress: float, step: int, decay_from: float) -> float:
    """Warm-up over the first steps, then level, then linear to zero at progress 1."""
    warm = min(1.0, (step + 1) / _WARM_UP_STEPS)
    falling = 1.0 if progress < decay_from else max(0.0, (1.0 - progress) / (1.0 - decay_from))
    return warm * falling


def train(settings: Settings, architecture: Architecture = GDN) -> Path:
    """Run everything; return the output folder."""
    clock = Clock()
    check_weights()
    settings.output.mkdir(parents=True, exist_ok=True)
    corpus = build_corpus(
        settings.data, settings.builtin, vocab_size=settings.vocab_size, workers=settings.workers,
        seed=settings.seed, limit=settings.limit, say=clock.say,
        tokenizer_json=None if settings.tokenizer is None else settings.tokenizer.read_text(encoding="utf-8"),
    )  # fmt: skip
    vocabulary = load_tokenizer_json(corpus.tokenizer_json).get_vocab_size()
    config = architecture.config(corpus.tokenizer_json, vocabulary, length=settings.length, tiny=settings.tiny)
    save_tokenizer(corpus.tokenizer_json, settings.output, config.max_position_embeddings)
    rows = RowMaker(corpus.tokenizer_json, corpus.haystack, corpus.streams["books"], settings.length, settings.workers)
    try:
        needles = rows.needles(
            corpus.haystack_heldout,
            (256,) if settings.tiny else (512, 1024, 2048),
            16 if settings.tiny else 200,
            settings.seed + 17,
        )
        rows.start(settings.recall_rows, settings.seed)
        clock.say("recall rows are being made")
        return _train(settings, architecture, corpus, rows, needles, config, clock)
    finally:
        rows.close()


def _train(
    settings: Settings,
    architecture: Architecture,
    corpus: Corpus,
    rows: RowMaker,
    needles: dict[str, AsyncResult[tuple[np.ndarray, float]]],
    config: Any,
    clock: Clock,
) -> Path:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    model = architecture.fresh(config, device, settings.seed)
    architecture.use(model, settings.impl)
    model.train()
    clock.say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters on {device}")

    row = settings.length + 1
    made = [rows_of_stage(stage, settings.recall_rows) for stage in range(len(STAGES))]
    pool, text, recall = _lay_out(corpus, made, row, device)
    step, mode = build_step(
        model,
        lambda: architecture.optimiser(
            model, device, muon_rate=settings.muon_rate, adam_rate=settings.adam_rate
        ),
        pool,
        batch=settings.batch, length=settings.length, answer_weight=settings.answer_weight,
        modes=settings.modes if device.type == "cuda" else ("eager",), say=clock.say,
        make_network=architecture.network,
    )  # fmt: skip
    for stage, region in enumerate(recall):
        block = torch.from_numpy(rows.stage(stage)).flatten()
        pool[region.start : region.start + region.length].copy_(block)
        clock.say(f"recall rows of stage {stage + 1} of {len(recall)} are in place")
    measurement = _measurement(settings, corpus, {name: job.get() for name, job in needles.items()}, device)
    rows.close()

    sampler = Sampler(text, recall, batch=settings.batch, length=settings.length, seed=settings.seed)
    run = _Run(settings, architecture, model, step, sampler, measurement, clock, device)
    run.train()
    return _finish(settings, architecture, corpus, model, run, mode, clock, device)


def _lay_out(
    corpus: Corpus, rows: list[int], row: int, device: torch.device
) -> tuple[torch.Tensor, dict[str, Region], list[Region]]:
    """One tensor of all training tokens: the text streams, then room for the recall rows of each stage."""
    text: dict[str, Region] = {}
    start = 0
    for name in TRAINED:
        text[name] = Region(start, len(corpus.streams[name]))
        start += len(corpus.streams[name])
    recall: list[Region] = []
    for count in rows:
        recall.append(Region(start, count * row))
        start += count * row
    pool = torch.zeros(start, dtype=torch.int16, device=device)
    for name, region in text.items():
        tokens = torch.from_numpy(corpus.streams[name].astype(np.int16))
        pool[region.start : region.start + region.length].copy_(tokens)
    return pool, text, recall


def _measurement(
    settings: Settings, corpus: Corpus, needles: dict[str, tuple[np.ndarray, float]], device: torch.device
) -> Measurement:
    for name, (made, mean) in needles.items():
        if mean < 0.85 * made.shape[1]:
            raise RuntimeError(f"prompts of {name} have only {mean:.0f} tokens on average")
    return Measurement(
        {name: corpus.streams[name] for name in ("books_valid", "builtin_heldout", "wiki_heldout")},
        {name: made for name, (made, _) in needles.items()},
        length=settings.length,
        device=device,
        most_tokens=4_000 if settings.tiny else 400_000,
    )


class _Run:
    """The loop, with what it learned on the way."""

    def __init__(
        self,
        settings: Settings,
        architecture: Architecture,
        model: Any,
        step: TrainStep,
        sampler: Sampler,
        measurement: Measurement,
        clock: Clock,
        device: torch.device,
    ):
        self._settings, self._model, self._step = settings, model, step
        self._architecture = architecture
        self._sampler, self._measurement, self._clock, self._device = sampler, measurement, clock, device
        self._good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self._slower = 1.0
        self.curve: list[dict[str, float]] = []
        self.measures: list[dict[str, float]] = []
        self.steps = 0
        self.seconds = 0.0

    @property
    def tokens(self) -> int:
        """Seen so far."""
        return self.steps * self._settings.batch * self._settings.length

    def train(self) -> None:
        """Train until the clock or the steps are used up."""
        began = self._clock.seconds()
        budget = max(5.0, self._settings.minutes * 60 - _RESERVE_SECONDS - began)
        self._clock.say(f"training for {budget:.0f} s" if self._settings.steps is None else "training")
        waypoints = [0.33, 0.66]
        seconds_per_step = 0.0
        while True:
            progress = self._progress(began, budget)
            if progress >= 1:
                break
            if waypoints and progress >= waypoints[0]:
                waypoints.pop(0)
                self._look(progress)
                continue
            started = time.perf_counter()
            steps = (
                _BLOCK_STEPS if self._settings.steps is None else min(_BLOCK_STEPS, self._settings.steps - self.steps)
            )
            ahead = seconds_per_step / budget if self._settings.steps is None else 1 / self._settings.steps
            self._block(steps, progress, ahead)
            seconds_per_step = (time.perf_counter() - started) / steps
            self.seconds += seconds_per_step * steps
        self._clock.say(f"{self.steps} steps, {self.tokens / 1e6:.0f} M tokens in {self.seconds:.0f} s")

    def _progress(self, began: float, budget: float) -> float:
        if self._settings.steps is not None:
            return self.steps / self._settings.steps
        return (self._clock.seconds() - began) / budget

    def _block(self, steps: int, progress: float, ahead: float) -> None:
        """Some steps without waiting for the device, then a look at their losses."""
        starts = np.stack([self._sampler.step(min(1.0, progress + i * ahead)) for i in range(steps)])
        resident = torch.from_numpy(starts).to(self._device)
        scale = self._step.optimiser.progress_scale
        began = time.perf_counter()
        for i in range(steps):
            factor = rate_factor(progress + i * ahead, self.steps + i, self._settings.decay_from)
            scale.fill_(self._slower * factor)
            self._step.starts.copy_(resident[i])
            self._step()
        text, texts, answer, answers, norm = self._step.sums.tolist()  # waits for the device
        elapsed = time.perf_counter() - began
        self._step.sums.zero_()
        self.steps += steps
        if not math.isfinite(text + answer + norm):
            self._slower /= 2
            self._clock.say(
                f"step {self.steps}: losses are no longer finite; back to the last good weights, half the rate"
            )
            self._model.load_state_dict(self._good)
            self._step.optimiser.reset()
            return
        point = {
            "step": self.steps,
            "seconds": round(self._clock.seconds(), 1),
            "text_loss": round(text / max(1, texts), 4),
            "answer_loss": round(answer / max(1, answers), 4),
            "grad_norm": round(norm, 3),
            "rate": round(float(scale), 4),
        }
        self.curve.append(point)
        if self.steps % 500 < steps:
            self._good = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        if (self.steps // _BLOCK_STEPS) % 2 == 0 or self._settings.tiny:
            speed = steps * self._settings.batch * self._settings.length / elapsed
            self._clock.say(
                f"step {self.steps:5d}  {100 * progress:5.1f} %  text {point['text_loss']:.3f}  "
                f"answers {point['answer_loss']:.3f}  norm {norm:.2f}  rate {point['rate']:.3f}  "
                f"{speed / 1e6:.2f} M tokens/s"
            )

    def _look(self, progress: float) -> None:
        """Measure, and store what there is in case the rest is cut off."""
        try:
            self.measure(f"at {100 * progress:.0f} %", self.network())
            self._architecture.save(self._model, self._settings.output)
        except Exception as error:
            self._clock.say(f"measuring failed and is passed over: {type(error).__name__}: {error}")

    def network(self) -> Network:
        """The model as it is, not compiled."""
        return self._architecture.network(self._model, compiled=False, device=self._device)

    def measure(self, when: str, network: Network) -> dict[str, float]:
        """Measure and say so."""
        self._model.eval()
        results = {name: round(value, 4) for name, value in self._measurement(network).items()}
        self._model.train()
        self.measures.append({"step": self.steps, **results})
        self._clock.say(f"{when}: " + ", ".join(f"{name} {value:.3f}" for name, value in results.items()))
        return results


def _finish(
    settings: Settings,
    architecture: Architecture,
    corpus: Corpus,
    model: Any,
    run: _Run,
    mode: str,
    clock: Clock,
    device: torch.device,
) -> Path:
    """Store the weights, then measure exactly what was stored, and write the log and the card."""
    architecture.save(model, settings.output)
    clock.say(f"stored in {settings.output}")
    model.load_state_dict({name: tensor.float().to(device) for name, tensor in architecture.stored(model).items()})
    final: dict[str, float] = {}
    generated: float | None = None
    try:
        final = run.measure("as stored", run.network())
        length = 256 if settings.tiny else 1024
        probe, _ = single_needle_rows(
            corpus.tokenizer_json,
            corpus.haystack_heldout["books"],
            length=length,
            count=16,
            noise=False,
            seed=settings.seed + 99,
        )
        model.eval()
        architecture.use(model, "chunked")
        generated = generated_recall(model, probe, 4 if settings.tiny else 16, device)
        clock.say(f"greedy generation answers {generated:.2f} of single-needle prompts of {length} tokens")
    except Exception as error:
        clock.say(f"measuring failed and is passed over: {type(error).__name__}: {error}")

    log = {
        "made_by": architecture.script,
        "python": platform.python_version(),
        "builtin_python": corpus.report["builtin_python"],
        "versions": {name: _version(name) for name in ("torch", "triton", "transformers", "tokenizers", "numpy")},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {os.cpu_count()} cores",
        "step_mode": mode,
        "settings": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(settings).items()
            if name not in ("data", "builtin", "output", "tokenizer")
        },
        "mixture": {
            "text_weights": TEXT_WEIGHTS,
            "recall_share_by_progress": RECALL_SHARE,
            "recall_stage_ends": STAGE_ENDS,
            "recall_stages": [
                {"lengths": stage.lengths, "rows": stage.rows, **stage.mix._asdict()} for stage in STAGES
            ],
        },
        "data": corpus.report,
        "steps": run.steps,
        "tokens": run.tokens,
        "training_seconds": round(run.seconds, 1),
        "wall_seconds": round(clock.seconds(), 1),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "measures": run.measures,
        "final": final,
        "generated_recall": generated,
        "curve": run.curve[:: max(1, len(run.curve) // 150)],
    }
    (settings.output / "training_log.json").write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    architecture.card(settings.output, log, model.config, modern=MODERN)
    size = sum(path.stat().st_size for path in settings.output.iterdir() if path.is_file())
    clock.say(f"done: {size / 1e6:.2f} MB in {settings.output}")
    return settings.output


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
