"""Does query feedback in the state's update raise recall? Small models of eight kinds, trained alike from several seeds
and measured: the tables of docs/q-delta.md, from the commands a user would type.

python scripts/query_feedback_study.py prepare TEXTS text.jsonl.xz
python scripts/query_feedback_study.py run --work DIR --text text.jsonl.xz --output runs.jsonl --gpus 1 --workers 8
python scripts/query_feedback_study.py write runs.jsonl docs/q-delta.md

`prepare` writes one corpus from the folder of raw texts that `demo:gdn` was trained on, without the paragraphs that
occur in the held-out part of `builtin`, on which models are measured.

`run` makes a corpus of recall documents beside it, and starts `lapcli train` and `lapcli eval` in processes of their
own, `--workers` at a time, spread over the GPUs. A finished run is one line that is added to `--output`; what is there,
or in files named by `--known`, is not run again, so that runs made on different days add up. `--seconds` sets an end:
trainings under way finish their step and save, and the same command goes on from there.

`write` puts the tables between the two marks in the page, or prints them where no page is named.
"""

import argparse
import datetime
import hashlib
import json
import lzma
import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

VARIANTS = {
    "gdn": "Gated DeltaNet",
    "qdelta": "Q-Delta, lambda learned",
    "delta-net": "DeltaNet",
    "qdelta-no-decay": "Q-Delta without decay",
    "qdelta-0.2": "Q-Delta, lambda = 0.2",
    "qdelta-0.5": "Q-Delta, lambda = 0.5",
    "qdelta-0.8": "Q-Delta, lambda = 0.8",
    "qdelta-no-gate": "Q-Delta, lambda = 1 (no gate)",
}
"""The recipes `train/small-NAME`, in order of priority, and what they are called in a table."""
BASE = "gdn"
"""What differences are taken from."""
LENGTHS = (512, 1024, 2048, 4096)
TRAINED_LENGTH = 1024
NEEDLES = ("niah_single_1", "niah_single_2", "niah_single_3")
"""RULER's names of S-NIAH-1, -2 and -3."""
SHARES = {"text": 0.6, "builtin": 0.06, "recall": 0.34}
BEGIN, END = "<!-- query-feedback-study: begin -->", "<!-- query-feedback-study: end -->"
INTERRUPTED = 130

_FILES = {
    "gutenberg_train.jsonl.xz": 0.755,
    "techdocs.jsonl.xz": 0.13,
    "openstax_by.jsonl.xz": 0.04,
    "wiki_leads.jsonl.xz": 0.075,
}
"""Of the folder of raw texts, and their shares of the corpus: those of `demo:gdn` without `builtin`."""
_RECALL_SHARDS = 16
_RECALL_LENGTHS = {256: 0.2, 512: 0.3, 1024: 0.5}
"""Tokens of recall documents, with weights."""
_CHARACTERS_PER_TOKEN = (2.3, 3.6)


class Key(NamedTuple):
    """One run: a kind of model, a seed, a budget, and the text."""

    variant: str
    seed: int
    tokens: int
    text: str


class Study:
    """The runs under way.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.work: Path = options.work
        self.text = _digest(options.text)
        self.lock = threading.Lock()
        self.begun = time.monotonic()
        self.running: set[subprocess.Popen[str]] = set()
        self.over = threading.Event()

    def run(self) -> bool:
        """Everything that is not there yet; whether all of it is there now."""
        options = self.options
        self.work.mkdir(parents=True, exist_ok=True)
        there = {_key(each) for path in (options.output, *options.known) for each in read_lines(path)}
        wanted = [Key(name, seed, options.tokens, self.text) for name in options.variants for seed in options.seeds]
        missing = [key for key in wanted if key not in there]
        self._say(f"{len(wanted)} runs wanted, {len(wanted) - len(missing)} of them there")
        if not missing:
            return True
        recall = self._recall()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self.end())
        ending = threading.Timer(options.seconds, self.end) if options.seconds else None
        if ending is not None:
            ending.daemon = True
            ending.start()
        with ThreadPoolExecutor(options.workers) as pool:
            jobs = [pool.submit(self._cell, number, key, recall) for number, key in enumerate(missing)]
            done = sum(job.result() for job in jobs)
        self._say(f"{done} of {len(missing)} runs done")
        return done == len(missing)

    def end(self) -> None:
        """Let what runs save and end, and start nothing more."""
        self.over.set()
        with self.lock:
            for process in self.running:
                process.send_signal(signal.SIGTERM)

    def _recall(self) -> Path:
        """The corpus of recall documents, made where it is not there: as many characters as the budget needs."""
        path = self.work / "recall.jsonl"
        # Beside what is trained on once there is what is held out.
        characters = int(SHARES["recall"] * self.options.tokens * 3) + 1_000_000
        size = self.work / "recall.json"
        if size.is_file() and json.loads(size.read_text()) == [self.text, characters]:
            return path
        each = -(-characters // _RECALL_SHARDS)
        with ProcessPoolExecutor(min(_RECALL_SHARDS, os.cpu_count() or 1)) as pool:
            made = pool.map(
                recall_shard, [self.options.text] * _RECALL_SHARDS, range(_RECALL_SHARDS), [each] * _RECALL_SHARDS
            )
            path.write_text("".join(made), encoding="utf-8")
        size.write_text(json.dumps([self.text, characters]))
        self._say(f"{path}: {path.stat().st_size / 1e6:.0f} MB of recall documents")
        return path

    def _cell(self, number: int, key: Key, recall: Path) -> bool:
        """Train and measure one; whether it was finished."""
        options = self.options
        name = f"{key.variant}-{key.seed}"
        run, gpu = self.work / name, number % max(1, options.gpus)
        data = f"{options.text}:{SHARES['text']},builtin:{SHARES['builtin']},{recall}:{SHARES['recall']}"
        training = [
            "train", f"train/small-{key.variant}", "--seed", str(key.seed), "--tokens", str(key.tokens), "--data", data,
            "--run", str(run), "--kernel", options.kernel, "--micro-batch", str(options.micro_batch),
            "--validate-every", str(options.validate_every), "--save-every", str(options.save_every),
            *(["--compile"] if options.compile else []),
        ]  # fmt: skip
        # In fp32, whatever trained it.
        measuring = [
            "eval", "builtin", *NEEDLES, "--ruler-lengths", ",".join(map(str, options.lengths)), "--limit",
            str(options.limit), "--dtype", "float32", "--kernel", "chunked", "--model", str(run / "trained"),
            "--run", str(run),
        ]  # fmt: skip
        try:
            seconds = [self._lapcli(gpu, *arguments) for arguments in (training, measuring)]
            if None in seconds:
                return False
            record = json.loads((run / "training" / "training.json").read_text())["record"]
            evaluation = json.loads((run / "evaluation.json").read_text())
        except (RuntimeError, OSError, KeyError, json.JSONDecodeError) as error:
            self._say(f"{name}: {error}")
            return False
        line = {
            **key._asdict(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": machine(),
            "commands": [f"lapcli {' '.join(arguments)}" for arguments in (training, measuring)],
            "seconds": {"train": record["seconds"], "eval": round(seconds[1] or 0.0, 1)},
            "limit": options.limit,
            "training": {
                name: record[name] for name in ("step", "tokens", "before", "after", "stopped", "contraction")
            },
            "rows": evaluation["rows"],
            "versions": evaluation["versions"],
        }
        with self.lock:
            add_line(options.output, line)
        self._say(f"{name}: trained in {record['seconds']:.0f} s, measured in {seconds[1]:.0f} s")
        return True

    def _lapcli(self, gpu: int, *arguments: str) -> float | None:
        """Run a command on one GPU; the seconds it took, or `None` where it was interrupted, or never begun.

        Raises:
            RuntimeError: it failed.
        """
        place = {"CUDA_VISIBLE_DEVICES": str(gpu)} if self.options.gpus else {}
        begun = time.monotonic()
        with self.lock:
            if self.over.is_set():
                return None
            process = subprocess.Popen(
                [sys.executable, "-m", "lapcli", *arguments, *([] if self.options.gpus else ["--device", "cpu"])],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **place},
            )  # fmt: skip
            self.running.add(process)
        _, said = process.communicate()
        with self.lock:
            self.running.discard(process)
        if process.returncode == INTERRUPTED or (self.over.is_set() and process.returncode):
            return None
        if process.returncode:
            raise RuntimeError(f"lapcli {' '.join(arguments)}: exit code {process.returncode}: {said[-800:]}")
        return time.monotonic() - begun

    def _say(self, text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - self.begun:6.0f} s  {text}\n")
        sys.stderr.flush()


def prepare(texts: Path, output: Path, characters: int, seed: int = 0) -> str:
    """Write the corpus; one line about it.

    Args:
        texts: the folder of raw texts.
        output: JSONL, packed where its name ends in `.xz`.
        characters: of the corpus, about; a source that has too few gives all.
        seed: of the choice and the order of documents.
    """
    from lapcli.data.builtin import heldout_builtin_text
    from lapcli.data.files import read_path
    from lapcli.data.overlap import HeldOutIndex

    index = HeldOutIndex(document.text for document in heldout_builtin_text())
    chance = random.Random(seed)
    kept: list[str] = []
    dropped = 0
    for name, share in _FILES.items():
        found = [document.text for document in read_path(texts / name)]
        chance.shuffle(found)
        room = int(characters * share)
        for text in found:
            if room <= 0:
                break
            cleaned = index.clean(text[:room])
            dropped += cleaned.dropped
            if cleaned.text.strip():
                kept.append(cleaned.text)
                room -= len(cleaned.text)
    chance.shuffle(kept)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in kept).encode()
    output.write_bytes(lzma.compress(lines, preset=6) if output.suffix == ".xz" else lines)
    return (
        f"{output}: {len(kept)} texts, {sum(map(len, kept)) / 1e6:.1f} M characters, {dropped} held-out paragraphs "
        f"taken out, {output.stat().st_size / 1e6:.1f} MB\n"
    )


def recall_shard(text: Path, shard: int, characters: int) -> str:
    """JSONL of recall documents that hide their needles in a slice of the corpus, of about so many characters."""
    from lapcli.data.files import read_path
    from lapcli.data.recall import Haystack, RecallMix, recall_documents

    haystack = Haystack(
        (document.text[:20_000] for number, document in enumerate(read_path(text)) if number % _RECALL_SHARDS == shard),
        1500,
    )

    def size(chance: random.Random) -> int:
        tokens = chance.choices(list(_RECALL_LENGTHS), list(_RECALL_LENGTHS.values()))[0]
        return max(500, int(tokens * chance.uniform(*_CHARACTERS_PER_TOKEN)))

    mix = RecallMix(list=0.2, text=0.3, ruler=0.5, single=0.45)
    lines: list[str] = []
    for document in recall_documents(haystack, seed=1000 + shard, size=size, mix=mix):
        lines.append(json.dumps({"text": document.text}) + "\n")
        characters -= len(document.text)
        if characters <= 0:
            break
    return "".join(lines)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The runs in a file; a last line that was cut short is none."""
    if not path.is_file():
        return []
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def add_line(path: Path, line: dict[str, Any]) -> None:
    """Add a run to a file, after whatever a process that was killed left there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = not path.is_file() or not path.stat().st_size or path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("" if whole else "\n") + json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def machine() -> str:
    """Device, torch and Python."""
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.machine()
    return f"{device}, torch {torch.__version__}, Python {platform.python_version()}"


def write(files: Sequence[Path]) -> str:
    """The tables as Markdown: one for each budget, text and number of prompts, since only those compare."""
    found = {_key(each): each for path in files for each in read_lines(path)}
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for each in found.values():
        alike.setdefault((each["tokens"], each["text"], each["limit"]), []).append(each)
    if not alike:
        raise SystemExit(f"no runs in {', '.join(map(str, files))}")
    parts = [_tables(runs) for _, runs in sorted(alike.items(), key=lambda pair: -len(pair[1]))]
    return "\n\n".join(parts) + "\n"


def put(tables: str, page: Path) -> None:
    """Put tables between the marks of a page.

    Raises:
        SystemExit: it has no such marks.
    """
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise SystemExit(f"{page} needs the lines\n{BEGIN}\n{END}\nonce each, in this order, where the tables go")
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    page.write_text(f"{before}\n{tables}{after}", encoding="utf-8")


def _tables(runs: list[dict[str, Any]]) -> str:
    """Means and spreads, then differences from the base by seed."""
    by_variant = {
        name: sorted((each for each in runs if each["variant"] == name), key=lambda each: each["seed"])
        for name in VARIANTS
    }
    present = {name: each for name, each in by_variant.items() if each}
    example = runs[0]
    lengths = sorted({row["length"] for row in example["rows"] if row["task"] in NEEDLES})
    columns = [("builtin", None), *((task, length) for task in NEEDLES for length in lengths)]
    titles = ["seeds", "held-out training text", "builtin"]
    titles += [f"S-NIAH-{task[-1]} {length}" for task in NEEDLES for length in lengths]
    lines = ["| | " + " | ".join(titles) + " |", "| --- " * (len(titles) + 1) + "|"]
    for name, each in present.items():
        cells = [str(len(each)), _spread([_perplexity(run) for run in each], 2)]
        cells += [_spread([_value(run, *column) for run in each], 2 if column[1] is None else 3) for column in columns]
        lines.append(f"| {VARIANTS[name]} | " + " | ".join(cells) + " |")
    base = {run["seed"]: run for run in present.get(BASE, [])}
    paired = {
        name: [(run, base[run["seed"]]) for run in each if run["seed"] in base]
        for name, each in present.items()
        if name != BASE
    }
    if any(paired.values()):
        lines += [
            "",
            f"Differences from {VARIANTS[BASE]}, seed by seed (same text in the same order), mean ± standard error:",
            "",
        ]
        shown = ["seeds", "builtin", *(f"S-NIAH-{task[-1]}, {TRAINED_LENGTH} and shorter" for task in NEEDLES),
                 "… beyond"]  # fmt: skip
        lines += ["| | " + " | ".join(shown) + " |", "| --- " * (len(shown) + 1) + "|"]
        near, far = ([n for n in lengths if (n <= TRAINED_LENGTH) is inside] for inside in (True, False))
        groups = [[(task, n) for n in near] for task in NEEDLES] + [[(task, n) for task in NEEDLES for n in far]]
        for name, pairs in paired.items():
            if pairs:
                cells = [str(len(pairs)), _error([_gap(*pair, [("builtin", None)]) for pair in pairs], 2)]
                cells += [_error([_gap(*pair, group) for pair in pairs], 3) for group in groups]
                lines.append(f"| {VARIANTS[name]} | " + " | ".join(cells) + " |")
    dates, machines = sorted({run["date"] for run in runs}), sorted({run["machine"] for run in runs})
    said = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    lines += [
        "",
        f"{example['tokens']:,} tokens a run in rows of {TRAINED_LENGTH}, so that longer prompts are beyond what was "
        f"trained; {example['limit']} prompts a length; means ± standard deviations over seeds. {said}, "
        f"{'; '.join(machines)}. Text {example['text'][:12]}. For example:",
        "",
        *(f"    {command}" for command in example["commands"]),
    ]
    return "\n".join(lines)


def _perplexity(run: dict[str, Any]) -> float:
    from math import exp

    return exp(run["training"]["after"]["cross_entropy"])


def _value(run: dict[str, Any], task: str, length: int | None) -> float | None:
    """What a run scored; `None` where it was not measured, since a prompt of that length has no room for the task."""
    metric = "token_perplexity" if length is None else None
    found = [
        row["values"]["model"]["value"]
        for row in run["rows"]
        if row["task"] == task and row["length"] == length and metric in (None, row["metric"])
    ]
    if len(found) > 1:
        raise SystemExit(f"{run['variant']}, seed {run['seed']}: {len(found)} values of {task} at {length}")
    return found[0] if found else None


def _gap(one: dict[str, Any], other: dict[str, Any], group: Sequence[tuple[str, int | None]]) -> float | None:
    """The mean difference of two runs over some scores; `None` where both have none of them."""
    pairs = [(_value(one, *each), _value(other, *each)) for each in group]
    gaps = [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]
    return mean(gaps) if gaps else None


def _spread(found: Sequence[float | None], digits: int) -> str:
    values = [value for value in found if value is not None]
    if not values:
        return "not measured"
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def _error(found: Sequence[float | None], digits: int) -> str:
    values = [value for value in found if value is not None]
    if not values:
        return "not measured"
    error = f" ± {stdev(values) / sqrt(len(values)):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):+.{digits}f}{error}"


def _key(line: dict[str, Any]) -> Key:
    return Key(*(line[name] for name in Key._fields))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(VARIANTS)}")
    return names


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Iterable[str] | None = None) -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("prepare", help="write the corpus")
    made.add_argument("texts", type=Path, help="folder with gutenberg_train.jsonl.xz and so on")
    made.add_argument("output", type=Path, help="JSONL, packed where its name ends in .xz")
    made.add_argument("--characters", type=int, default=80_000_000)
    run = commands.add_parser("run", help="run what is not there yet")
    run.add_argument("--work", type=Path, required=True, help="trainings under way and models that were trained")
    run.add_argument("--text", type=Path, required=True, help="what `prepare` wrote")
    run.add_argument("--output", type=Path, required=True, help="JSON lines; one is added for each finished run")
    run.add_argument("--known", type=Path, action="append", default=[], help="more files whose runs are not repeated")
    run.add_argument("--variants", type=_names, default=list(VARIANTS), help="names with commas, in order of priority")
    run.add_argument("--seeds", type=_numbers, default=[0, 1, 2], help="numbers with commas")
    run.add_argument("--tokens", type=int, default=50_000_000, help="of each training")
    run.add_argument("--limit", type=int, default=100, help="prompts of each task and length")
    run.add_argument("--lengths", type=_numbers, default=list(LENGTHS), help="of prompts, in tokens, with commas")
    run.add_argument("--kernel", default="auto", help="that trains; `chunked` measures")
    run.add_argument("--compile", action="store_true", help="train compiled blocks")
    run.add_argument("--micro-batch", type=int, default=32)
    run.add_argument("--validate-every", type=int, default=250)
    run.add_argument("--save-every", type=int, default=250)
    run.add_argument("--gpus", type=int, default=0, help="0: on the CPU")
    run.add_argument("--workers", type=int, default=1, help="processes at a time, over all GPUs")
    run.add_argument("--seconds", type=float, default=None, help="then save and end")
    shown = commands.add_parser("write", help="make the tables")
    shown.add_argument(
        "files", type=Path, nargs="+", help="JSON lines of `run`; a page to put the tables in comes last"
    )
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.command == "prepare":
        sys.stdout.write(prepare(options.texts, options.output, options.characters))
    elif options.command == "run":
        sys.exit(0 if Study(options).run() else 1)
    else:
        page = options.files.pop() if options.files[-1].suffix == ".md" else None
        tables = write(options.files)
        if page is None:
            sys.stdout.write(tables)
        else:
            put(tables, page)


if __name__ == "__main__":
    main()
