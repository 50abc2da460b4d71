"""Pruned, then recovered with and without query feedback at the same budget: how much recall returns."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from studies.commands import Commands
from studies.lines import machine

from query_feedback.corpora import RECOVERED_ON, mixture
from query_feedback.lines import LINES, RECOVERY, key_of
from query_feedback.variants import NEEDLES, TRAINED

_RANDOM = "rand"


class Model(NamedTuple):
    """What is pruned: what a table calls it, where it lies, and what its weights are."""

    base: str
    path: str
    digest: str


class Cell(NamedTuple):
    """One model that is measured.

    Attributes:
        model: what it is made of.
        method: the selector; nothing where nothing is cut.
        arm: one of `UNTRAINED` and `TRAINED`.
        seed: of the training, and of what `rand` draws; of an untrained model that draws nothing, the base's own.
    """

    model: Model
    method: str
    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        parts = [self.model.base.replace(":", "_"), self.model.digest[:8], self.method, self.arm, str(self.seed)]
        return "-".join(part for part in parts if part)


class Recoveries(Commands):
    """Prunings, recoveries and measurements."""

    def run(self, text: str, recall: Mapping[str, Path]) -> bool:
        """Everything that is not there yet; whether all of it is there now.

        Args:
            text: digest of `--text`.
            recall: the recall documents, by their kind.
        """
        options = self.options
        there = {key_of(each) for each in LINES.there(options.output, options.known, RECOVERY)}
        wanted = list(self.cells())
        missing = [cell for cell in wanted if key_of(self._identity(cell, text)) not in there]
        self.say(f"{len(wanted)} models wanted, {len(missing)} to do")
        whole = len(set(options.seeds)) * len(options.bases) == self.found
        if not missing:
            return whole
        pruned = {cell.model: None for cell in missing if cell.method}
        with_gradients = "grad" in options.methods
        if not self.each(list(pruned), lambda number, model: self._calibrate(number, model, with_gradients)):
            return False
        done = self.each(missing, lambda number, cell: self._cell(number, cell, text, recall))
        return done and whole

    def cells(self) -> Iterator[Cell]:
        """All of them, those of one seed together, what is only measured first."""
        options = self.options
        models: dict[tuple[str, int], Model] = {}
        for base in options.bases:
            for seed in options.seeds:
                if (model := self._model(base, seed)) is not None:
                    models[base, seed] = model
        self.found = len(models)
        said: set[Cell] = set()
        for seed in options.seeds:
            for base in options.bases:
                if (base, seed) not in models:
                    continue
                model = models[base, seed]
                # One model for all seeds is measured once.
                own = seed if model.path != base else options.seeds[0]
                untrained = [Cell(model, "", "base", own)]
                untrained += [
                    Cell(model, method, "sliced", seed if method == _RANDOM else own) for method in options.methods
                ]
                for cell in untrained:
                    if cell not in said:
                        said.add(cell)
                        yield cell
                for arm in options.arms:
                    if "feedback" in arm and _has_feedback(model):
                        continue
                    for method in [""] if arm.startswith("control") else options.methods:
                        yield Cell(model, method, arm, seed)

    def _model(self, base: str, seed: int) -> Model | None:
        """A model by its name, or the one that `run` trained of that kind from that seed."""
        from lapcli.errors import LapcliError
        from lapcli.families.source import resolve_model

        path = base if ":" in base else str(self.work / f"{base}-{seed}" / "trained")
        try:
            return Model(base, path, resolve_model(path).digest)
        except LapcliError as error:
            self.say(f"{base}, seed {seed}: {error.message}")
            return None

    def _identity(self, cell: Cell, text: str) -> dict[str, Any]:
        """What a line is known by: what is only measured depends on nothing that trains."""
        trained = cell.arm in TRAINED
        return {
            "kind": RECOVERY, "base": cell.model.base, "digest": cell.model.digest, "method": cell.method,
            "ratio": self.options.ratio if cell.method else "0", "arm": cell.arm, "seed": cell.seed,
            "tokens": self.options.tokens if trained else 0, "text": text if trained else "",
            "limit": self.options.limit, "batch": self.options.batch if trained else 0,
            "length": self.options.seq_len if trained else 0, "lr": self.options.lr if trained else 0,
        }  # fmt: skip

    def _calibration(self, model: Model) -> Path:
        return self.work / "calibrations" / f"{model.base.replace(':', '_')}-{model.digest[:8]}"

    def _calibrate(self, number: int, model: Model, with_gradients: bool) -> bool:
        """Calibrate a model once for all that is cut out of it; whether it was finished."""
        run = self._calibration(model)
        command = [
            "calibrate", model.path, "--data", "builtin", "--samples", str(self.options.calibration), "--seq-len",
            "1024", "--kernel", "chunked", *(["--grad"] if with_gradients else []), "--run", str(run),
        ]  # fmt: skip
        try:
            return self.lapcli(number % max(1, self.options.gpus), *command) is not None
        except RuntimeError as error:
            self.say(str(error))
            return False

    def _cell(self, number: int, cell: Cell, text: str, recall: Mapping[str, Path]) -> bool:
        """Make and measure one; whether it was finished."""
        options = self.options
        run, gpu = self.work / "recoveries" / cell.name, number % max(1, options.gpus)
        commands: list[list[str]] = []
        seconds: dict[str, float] = {}

        def do(*arguments: str) -> bool:
            taken = self.lapcli(gpu, *arguments)
            if taken is None:
                return False
            commands.append(list(arguments))
            seconds[arguments[0]] = round(taken, 1)
            return True

        try:
            if cell.method and not self._prune(cell, run, do):
                return False
            if cell.arm in TRAINED and not do(*self._recovering(cell, run, recall)):
                return False
            made = {"base": Path(cell.model.path), "sliced": run / "sliced"}.get(
                cell.arm, run / ("control" if cell.arm.startswith("control") else "recovered")
            )
            where = cell.model.path if cell.arm == "base" else str(made)
            measuring = (
                "eval", "builtin", *NEEDLES, "--ruler-lengths", ",".join(map(str, options.lengths)), "--limit",
                str(options.limit), "--dtype", options.dtype, "--model", where, "--run", str(run),
            )  # fmt: skip
            if not do(*measuring):
                return False
            record = self._record(cell, run)
            evaluation = json.loads((run / "evaluation.json").read_text())
        except (RuntimeError, OSError, KeyError, json.JSONDecodeError) as error:
            self.say(f"{cell.name}: {error}")
            return False
        self.add(
            {
                **self._identity(cell, text),
                "machine": machine(),
                "commands": [f"lapcli {' '.join(arguments)}" for arguments in commands],
                "seconds": seconds,
                "recovery": record,
                "rows": evaluation["rows"],
                "versions": evaluation["versions"],
            }
        )
        self.say(f"{cell.name}: " + ", ".join(f"{name} {taken:.0f} s" for name, taken in seconds.items()))
        return True

    def _prune(self, cell: Cell, run: Path, do: Any) -> bool:
        run.mkdir(parents=True, exist_ok=True)
        calibration = self._calibration(cell.model) / "calibration.safetensors"
        if not (run / calibration.name).is_file():
            temporary = run / f".{calibration.name}"
            shutil.copyfile(calibration, temporary)
            temporary.rename(run / calibration.name)
        selecting = ("select", "--method", cell.method, "--ratio", self.options.ratio, "--seed",
                     str(cell.seed if cell.method == _RANDOM else 0), "--run", str(run))  # fmt: skip
        return do(*selecting) and do("slice", "--run", str(run))

    def _recovering(self, cell: Cell, run: Path, recall: Mapping[str, Path]) -> list[str]:
        options = self.options
        control = cell.arm.startswith("control")
        return [
            "recover", "--data", mixture(RECOVERED_ON, options.text, recall), "--steps",
            str(steps(options.tokens, options.batch, options.seq_len)), "--batch-size", str(options.batch),
            "--seq-len", str(options.seq_len), "--lr", str(options.lr), "--micro-batch", str(options.micro_batch),
            "--seed", str(cell.seed), "--validation", str(options.validation), "--validate-every",
            str(options.validate_every), "--save-every", str(options.save_every), "--kernel", options.kernel,
            "--run", str(run),
            *(["--control", "--model", cell.model.path, "--teacher", cell.model.path] if control else []),
            *(["--add-query-feedback"] if "feedback" in cell.arm else []),
        ]  # fmt: skip

    def _record(self, cell: Cell, run: Path) -> dict[str, Any] | None:
        if cell.arm not in TRAINED:
            return None
        folder = run / ("recovery-control" if cell.arm.startswith("control") else "recovery")
        record = json.loads((folder / "recovery.json").read_text())["record"]
        names = ("step", "tokens", "before", "after", "stopped", "seconds", "contraction")
        return {name: record.get(name) for name in names}


def steps(tokens: int, batch: int, length: int) -> int:
    """Steps of a budget, rounded up to whole ones."""
    return -(-tokens // (batch * length))


def _has_feedback(model: Model) -> bool:
    from lapcli.families.source import resolve_model

    return resolve_model(model.path).config.get("model_type") == "qdelta"
