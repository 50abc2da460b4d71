"""Does query feedback in the state's update raise recall? Small models of eight kinds, trained alike from several seeds
and measured; how many tokens of prompts a second each takes; and what it gives back to models that were cut: the
tables of docs/q-delta.md, from the commands a user would type.

python scripts/query_feedback_study.py prepare TEXTS text.jsonl.xz
python scripts/query_feedback_study.py throughput --work DIR --output runs.jsonl --gpus 1
python scripts/query_feedback_study.py pilot --work DIR --text text.jsonl.xz --output runs.jsonl --gpus 1 --workers 5
python scripts/query_feedback_study.py run --work DIR --text text.jsonl.xz --output runs.jsonl --gpus 1 --workers 8
python scripts/query_feedback_study.py recover --work DIR --text text.jsonl.xz --output runs.jsonl --gpus 1 --workers 8
python scripts/query_feedback_study.py write runs.jsonl docs/q-delta.md
python scripts/query_feedback_study.py ship runs.jsonl --work DIR --output lapcli/demo/qdelta

`prepare` writes one corpus from the folder of raw texts that `demo:gdn` was trained on, without the paragraphs that
occur in the held-out part of `builtin`, on which models are measured.

`throughput` runs `lapcli bench prefill` with the kinds' configs and random weights; the device should have nothing
else to do. `pilot` trains Gated DeltaNet alone on several mixtures of text and recall, so that the study is done on one
from which such a model learns to recall at all. `run` makes recall documents beside the text, and starts `lapcli train`
and `lapcli eval`.
`recover` cuts a model (`demo:gdn`, or a kind that `run` trained, of the seed at hand) and recovers the slice with and
without query feedback, at the same budget; the unpruned model trained alike is the control, and the models before
training are measured too. All processes are lapcli's, `--workers` at a time, spread over the GPUs.

A finished piece is one line that is added to `--output`; what is there, or in files named by `--known`, is not done
again, so that pieces made on different days add up. `--seconds` sets an end: trainings under way finish their step and
save, and the same command goes on from there while `DIR` is still there.

`write` puts the tables between the two marks in the page, or prints them where no page is named. `ship` makes of a
trained Q-Delta what may lie in `lapcli/demo`, where `demo:NAME` is found.

On two H200s, in three calls of at most 600 s, from the root of the repository. Needed there: the repository with the
lines of earlier days (docs/query-feedback.jsonl), and `build/text.jsonl.xz`, which `prepare` wrote elsewhere (about 25
MB). `build` must outlive a call, for trainings under way lie in it; `OUT` is where files are fetched from:

    S="python scripts/query_feedback_study.py"; R="--text build/text.jsonl.xz --gpus 2"
    W="--work build/study --output build/runs.jsonl --known docs/query-feedback.jsonl"
    (1) $S throughput $W --gpus 1 --seconds 120; $S run $W $R --workers 12 --seconds 420; cp build/runs.jsonl OUT
    (2) $S run $W $R --workers 12 --seconds 550; cp build/runs.jsonl OUT
    (3) $S run $W $R --workers 12 --seconds 150; $S recover $W $R --workers 14 --seconds 400; cp build/runs.jsonl OUT

Then `cat OUT/runs.jsonl >> docs/query-feedback.jsonl` (a line that is there twice counts once), and `write` of that.
What the third call leaves is done by the same commands another day, trainings under way from their beginning. Kinds
come in order of priority, the three seeds of one after another.

How long that takes was estimated before these kinds were timed on a GPU (docs/train.md): alone on an H200 a
recovery of `demo:gdn` runs at 142 k tokens/s by fla's kernels, at 220 k without a teacher (docs/benchmarks.md); 27
recoveries of 20 M tokens took 575 s on two H200s, 14 processes to a GPU, which is 0.94 M tokens/s with everything
around them. At 1.5 times that, as there is no teacher, 24 trainings of 50 M tokens take about 850 s, and more as far as
comba is slower than the gated delta rule: calls (1), (2) and the beginning of (3). `recover` by its defaults is 3
controls and 2 selectors x 2 ways x 3 seeds of 20 M tokens: 15 recoveries, about 320 s; of trained models (`--bases
gdn`) as many again. Twice the 4.6 GiB that 16 rows took are about 9 GiB a process with `--micro-batch 32`. fla tunes
its kernels at first use, in every process; where that takes too long, `throughput --first-config` shows what they do
without.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from query_feedback.corpora import MIXTURE, MIXTURES, RECOVERED_ON, mixture, recall_corpora, recall_shard
from query_feedback.lines import LINES, PILOT, TRAINING, key_of, read_lines
from query_feedback.recovering import Recoveries
from query_feedback.shipping import ship
from query_feedback.tables import BEGIN, END, put, write
from query_feedback.throughput import Throughput
from query_feedback.variants import (
    BASE,
    BATCH,
    FEEDBACK,
    LENGTHS,
    NEEDLES,
    OPTIMIZER,
    OPTIMIZERS,
    PROMPTS,
    RATE,
    TRAINED,
    TRAINED_LENGTH,
    VARIANTS,
)
from studies.arguments import alone, count, names_of, number, one_of, real, several
from studies.boundary import answer, data_files
from studies.commands import Commands
from studies.corpus import prepare as prepare_corpus
from studies.lines import add_line, machine

from lapcli.artifacts import digest_file
from lapcli.errors import DataError

__all__ = ["BEGIN", "END", "NEEDLES", "VARIANTS", "add_line", "prepare", "put", "read_lines", "recall_shard", "write"]

_FILES = {
    "gutenberg_train.jsonl.xz": 0.755,
    "techdocs.jsonl.xz": 0.13,
    "openstax_by.jsonl.xz": 0.04,
    "wiki_leads.jsonl.xz": 0.075,
}
"""Of the folder of raw texts, and their shares of the corpus: those of `demo:gdn` without `builtin`."""


def prepare(texts: Path, output: Path, characters: int, seed: int = 0) -> str:
    """Write the corpus of this study; one line about it. Arguments as for `studies.corpus.prepare`."""
    return prepare_corpus(texts, output, characters, _FILES, seed)


class Run(NamedTuple):
    """One training: a kind of model, a seed, a budget, what it is trained on and in what steps."""

    variant: str
    seed: int
    tokens: int
    text: str
    mixture: str
    batch: int
    optimizer: str
    lr: float


class Study(Commands):
    """The trainings under way.

    Args:
        options: of the command line.
        kind: of lines: `TRAINING`, or `PILOT` with a folder of its own for each.
    """

    def __init__(self, options: argparse.Namespace, kind: str = TRAINING):
        super().__init__(options)
        self.kind = kind

    def run(self) -> bool:
        """Everything that is not there yet; whether all of it is there now."""
        options, text = self.options, digest_of(self.options.text)
        there = {key_of(each) for each in LINES.there(options.output, options.known, self.kind)}
        wanted = [
            Run(name, seed, options.tokens, text, mixed, batch, optimizer, rate)
            for name in options.variants
            for seed in options.seeds
            for mixed in options.mixtures
            for batch in options.batches
            for optimizer in options.optimizers
            for rate in options.rates
        ]
        missing = [
            run for run in wanted
            if key_of({"kind": self.kind, **run._asdict(), "limit": options.limit, "dtype": options.dtype}) not in there
        ]  # fmt: skip
        self.say(f"{len(wanted)} runs wanted, {len(wanted) - len(missing)} of them there")
        if not missing:
            return True
        label = "recall" if self.kind == TRAINING else self.kind
        recall = recall_corpora(self, list(dict.fromkeys(run.mixture for run in missing)), text, label)
        return self.each(missing, lambda number, run: self._cell(number, run, recall[run.mixture]))

    def _cell(self, number: int, key: Run, recall: Mapping[str, Path]) -> bool:
        """Train and measure one; whether it was finished."""
        options = self.options
        name = f"{key.variant}-{key.seed}"
        if self.kind == PILOT:
            name = f"{self.kind}-{key.mixture}-{key.batch}-{key.optimizer}-{key.lr}"
        run, gpu = self.work / name, number % max(1, options.gpus)
        training = [
            "train", f"train/small-{key.variant}", "--seed", str(key.seed), "--tokens", str(key.tokens), "--data",
            mixture(key.mixture, options.text, recall), "--run", str(run), "--kernel", options.kernel,
            "--batch-tokens", str(key.batch), "--optimizer", key.optimizer, "--lr", str(key.lr), "--micro-batch",
            str(min(options.micro_batch, key.batch // TRAINED_LENGTH)), "--validation", str(options.validation),
            "--validate-every", str(options.validate_every), "--save-every", str(options.save_every),
            *(["--compile"] if options.compile else []),
        ]  # fmt: skip
        measuring = [
            "eval", "builtin", *NEEDLES, "--ruler-lengths", ",".join(map(str, options.lengths)), "--limit",
            str(options.limit), "--dtype", options.dtype, "--model", str(run / "trained"), "--run", str(run),
        ]  # fmt: skip
        try:
            seconds = [self.lapcli(gpu, *arguments) for arguments in (training, measuring)]
            if None in seconds:
                return False
            record = json.loads((run / "training" / "training.json").read_text())["record"]
            evaluation = json.loads((run / "evaluation.json").read_text())
        except (RuntimeError, OSError, KeyError, json.JSONDecodeError) as error:
            self.say(f"{name}: {error}")
            return False
        noted = ("step", "tokens", "before", "after", "stopped", "contraction", "digest")
        self.add(
            {
                "kind": self.kind,
                **key._asdict(),
                "machine": machine(),
                "commands": [f"lapcli {' '.join(arguments)}" for arguments in (training, measuring)],
                "seconds": {"train": record["seconds"], "eval": round(seconds[1] or 0.0, 1)},
                "limit": options.limit,
                "dtype": options.dtype,
                "training": {name: record.get(name) for name in noted},
                "rows": evaluation["rows"],
                "versions": evaluation["versions"],
            }
        )
        self.say(f"{name}: trained in {record['seconds']:.0f} s, measured in {seconds[1]:.0f} s")
        return True


def digest_of(path: Path) -> str:
    """SHA-256 of the corpus.

    Raises:
        DataError: it is not there.
    """
    try:
        return digest_file(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", "query_feedback_study.py prepare TEXTS FILE writes one") from error


_seeds = several(number, "0,1,2")
_sizes = several(count, "512,1024")
_rates = several(real, "0.001,0.003")


def _selectors(text: str) -> list[str]:
    from lapcli.selectors.registry import SELECTORS

    return names_of(SELECTORS)(text)


def main(arguments: Iterable[str] | None = None) -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("prepare", help="write the corpus")
    made.add_argument("texts", type=Path, help="folder with gutenberg_train.jsonl.xz and so on")
    made.add_argument("output", type=Path, help="JSONL, packed where its name ends in .xz")
    made.add_argument("--characters", type=count, default=80_000_000)
    _throughput(_pieces(commands, "throughput", "measure prompts that are not measured yet"))
    _pilot(_pieces(commands, "pilot", "train and measure Gated DeltaNet on several mixtures"))
    _run(_pieces(commands, "run", "train and measure what is not there yet"))
    _recover(_pieces(commands, "recover", "prune, recover and measure what is not there yet"))
    shown = commands.add_parser("write", help="make the tables")
    shown.add_argument(
        "files", type=Path, nargs="+", help="JSON lines of the others; a page to put the tables in comes last"
    )
    shipped = commands.add_parser("ship", help="make a folder of lapcli/demo of a trained model")
    shipped.add_argument("files", type=Path, nargs="+", help="JSON lines that hold its measurements")
    shipped.add_argument("--work", type=Path, required=True, help="of `run`")
    shipped.add_argument("--output", type=Path, required=True, help="the folder; demo:NAME goes by its name")
    shipped.add_argument("--variant", choices=FEEDBACK, default=FEEDBACK[0], help="a Q-Delta; the card is of one")
    shipped.add_argument("--seed", type=int, default=0)
    answer(parser, commands, _do, arguments)


def _do(options: argparse.Namespace) -> bool | None:
    """One command; of those that make lines whether everything is there."""
    if options.command == "prepare":
        sys.stdout.write(prepare(options.texts, options.output, options.characters))
    elif options.command == "throughput":
        return Throughput(options).run()
    elif options.command in ("pilot", "run"):
        return Study(options, {"pilot": PILOT, "run": TRAINING}[options.command]).run()
    elif options.command == "recover":
        study, text = Recoveries(options), digest_of(options.text)
        recall = recall_corpora(study, [RECOVERED_ON], text, "recovery")
        return study.run(text, recall[RECOVERED_ON])
    elif options.command == "ship":
        sys.stdout.write(ship(options.files, options.work, options.output, options.variant, options.seed, _FILES))
    else:
        files, page = data_files(options.files)
        tables = write(files)
        if page is None:
            sys.stdout.write(tables)
        else:
            put(tables, page)
    return None


def _pieces(commands: Any, name: str, said: str) -> argparse.ArgumentParser:
    """A command that makes lines."""
    parser = commands.add_parser(name, help=said)
    parser.add_argument(
        "--work", type=Path, required=True,
        help="work under way and models that were made; one for each mixture, optimizer, step and rate of `run`",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, help="JSON lines; one is added for each finished piece")
    parser.add_argument("--known", type=Path, action="append", default=[], help="more files whose lines count")
    parser.add_argument("--gpus", type=int, default=0, help="0: on the CPU")
    parser.add_argument("--seconds", type=float, default=None, help="then save and end")
    return parser


def _throughput(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variants", type=names_of(VARIANTS), default=list(VARIANTS), help="names with commas")
    parser.add_argument("--prompts", type=_sizes, default=list(PROMPTS), help="their tokens, with commas")
    parser.add_argument(
        "--batch", type=int, default=64, help="prompts side by side; few leave a GPU waiting for launches"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--first-config", action="store_true", help="as of `lapcli bench`")
    parser.set_defaults(workers=1)


def _training(parser: argparse.ArgumentParser, tokens: int) -> None:
    """What trainings of both kinds have in common."""
    parser.add_argument("--text", type=Path, required=True, help="what `prepare` wrote")
    parser.add_argument("--seeds", type=_seeds, default=[0, 1, 2], help="numbers with commas")
    parser.add_argument("--tokens", type=int, default=tokens, help="of each training")
    parser.add_argument("--limit", type=int, default=100, help="prompts of each task and length")
    parser.add_argument("--lengths", type=_sizes, default=list(LENGTHS), help="of prompts, in tokens, with commas")
    parser.add_argument("--kernel", default="auto", help="that trains")
    parser.add_argument("--dtype", default="float32", help="in which models are measured; bfloat16 takes kernels")
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--validation", type=int, default=64, help="sequences held out of each training")
    parser.add_argument("--workers", type=count, default=1, help="processes at a time, over all GPUs")


def _pilot(parser: argparse.ArgumentParser) -> None:
    _from_nothing(parser, 30_000_000)
    parser.add_argument("--mixtures", type=names_of(MIXTURES), default=list(MIXTURES), help="names with commas")
    parser.add_argument("--batches", type=_sizes, default=[8192, BATCH, 32_768], help="tokens of a step, with commas")
    parser.add_argument("--optimizers", type=names_of(OPTIMIZERS), default=[OPTIMIZER], help="names with commas")
    parser.add_argument("--rates", type=_rates, default=[RATE], help="largest learning rates, with commas")
    parser.set_defaults(variants=[BASE], seeds=[0])


def _run(parser: argparse.ArgumentParser) -> None:
    _from_nothing(parser, 50_000_000)
    parser.add_argument(
        "--variants", type=names_of(VARIANTS), default=list(VARIANTS), help="names with commas, by priority"
    )
    parser.add_argument("--mixture", dest="mixtures", type=one_of(MIXTURES), default=[MIXTURE], help="one name")
    parser.add_argument("--batch-tokens", dest="batches", type=alone(count), default=[BATCH])
    parser.add_argument("--optimizer", dest="optimizers", type=one_of(OPTIMIZERS), default=[OPTIMIZER], help="one name")
    parser.add_argument("--lr", dest="rates", type=alone(real), default=[RATE])


def _from_nothing(parser: argparse.ArgumentParser, tokens: int) -> None:
    """What trainings of random weights have in common."""
    _training(parser, tokens)
    parser.add_argument("--compile", action="store_true", help="train compiled blocks")
    parser.add_argument("--validate-every", type=int, default=250)
    parser.add_argument("--save-every", type=int, default=250)


def _recover(parser: argparse.ArgumentParser) -> None:
    _training(parser, 20_000_000)
    parser.add_argument(
        "--bases", type=lambda text: text.split(","), default=["demo:gdn"],
        help="models with commas: demo:NAME, or kinds that `run` trained in the same --work from the same seeds",
    )  # fmt: skip
    parser.add_argument("--methods", type=_selectors, default=["drrqr", "grad"], help="selectors")
    parser.add_argument("--ratio", default="0.5", help="removed fraction of the key width")
    parser.add_argument(
        "--arms", type=names_of(TRAINED), default=["control", "plain", "feedback"],
        help=f"what becomes of a model, with commas: {', '.join(TRAINED)}",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=64, help="sequences of a step")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--calibration", type=int, default=64, help="sequences of 1024 tokens of builtin")
    parser.add_argument("--validate-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=100)


if __name__ == "__main__":
    main()
