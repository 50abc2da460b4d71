"""What small models are trained on: running text, and synthetic recall in several densities."""

import json
import os
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from studies.commands import Commands

from lapcli.data.files import read_path
from lapcli.data.recall import Haystack, RecallMix, recall_documents

_SHARDS = 16
_CHARACTERS_PER_TOKEN = (2.3, 3.6)


class Recall(NamedTuple):
    """Recall documents of one kind.

    Attributes:
        mix: their layouts.
        lengths: their tokens, about, with weights.
    """

    mix: RecallMix
    lengths: Mapping[int, float]


RECALL = {
    "prompts": Recall(RecallMix(list=0.2, text=0.3, ruler=0.5, single=0.45), {256: 0.2, 512: 0.3, 1024: 0.5}),
    "lists": Recall(RecallMix(list=1.0, text=0.0, ruler=0.0, max_entries=10), {128: 0.3, 256: 0.7}),
    "drills": Recall(RecallMix(list=1.0, text=0.0, ruler=0.0, max_entries=3, asked=4), {200: 0.5, 400: 0.5}),
}
"""Long documents with few questions, as models are measured by; short lists, asked once; shorter ones, asked again and
again, in which most tokens are either a key or what was said of it."""
MIXTURES = {
    "prompts": {"text": 0.6, "builtin": 0.06, "prompts": 0.34},
    "half": {"text": 0.44, "builtin": 0.06, "lists": 0.3, "prompts": 0.2},
    "dense": {"text": 0.49, "builtin": 0.06, "drills": 0.25, "prompts": 0.2},
    "denser": {"text": 0.34, "builtin": 0.06, "drills": 0.4, "prompts": 0.2},
}
"""Shares of what is trained on."""
MIXTURE = "dense"
"""The mixture of the study."""
RECOVERED_ON = "prompts"
"""The mixture of recoveries, whose models recall already."""


def mixture(name: str, text: Path, recall: Mapping[str, Path]) -> str:
    """What is trained on, as `--data` takes it.

    Args:
        name: of the mixture.
        text: the running text.
        recall: the recall documents, by their kind.
    """
    places = {"text": text, "builtin": "builtin", **recall}
    return ",".join(f"{places[part]}:{share}" for part, share in MIXTURES[name].items())


def recall_corpora(
    study: Commands, names: Sequence[str], text: str, label: str = "recall"
) -> dict[str, dict[str, Path]]:
    """The recall documents of mixtures, made where they are not there: as many characters as the budget needs.

    Args:
        study: whose options name text and budget.
        names: of the mixtures.
        text: digest of `--text`.
        label: what files begin with. Trainings of another budget have files of their own, which must stay what a
            training began with.

    Returns:
        By the name of a mixture files by the kind of their documents.
    """
    study.work.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Path]] = {}
    missing: dict[Path, tuple[str, int]] = {}
    for name in names:
        for kind, share in MIXTURES[name].items():
            if kind in RECALL:
                path = study.work / f"{label}-{kind}-{share}.jsonl"
                found.setdefault(name, {})[kind] = path
                # Beside what is trained on once there is what is held out.
                characters = int(share * study.options.tokens * 3) + 1_000_000
                if not _is_there(path, [text, characters]):
                    missing[path] = kind, characters
    if missing:
        with ProcessPoolExecutor(min(len(missing) * _SHARDS, os.cpu_count() or 1)) as pool:
            shards = {
                path: [pool.submit(recall_shard, study.options.text, *what, shard) for shard in range(_SHARDS)]
                for path, what in missing.items()
            }
            for path, (_, characters) in missing.items():
                # What is cut short while it is written must not pass for what was there before.
                path.with_suffix(".json").unlink(missing_ok=True)
                path.write_text("".join(shard.result() for shard in shards[path]), encoding="utf-8")
                path.with_suffix(".json").write_text(json.dumps([text, characters]))
                study.say(f"{path}: {path.stat().st_size / 1e6:.0f} MB of recall documents")
    return found


def _is_there(path: Path, made_of: list[Any]) -> bool:
    size = path.with_suffix(".json")
    return path.is_file() and size.is_file() and json.loads(size.read_text()) == made_of


def recall_shard(text: Path, kind: str, characters: int, shard: int) -> str:
    """JSONL of recall documents that hide their needles in a slice of the corpus, `characters / 16` of them, about."""
    characters = -(-characters // _SHARDS)
    haystack = Haystack(
        (document.text[:20_000] for number, document in enumerate(read_path(text)) if number % _SHARDS == shard), 1500
    )
    mix, lengths = RECALL[kind]

    def size(chance: random.Random) -> int:
        tokens = chance.choices(list(lengths), list(lengths.values()))[0]
        return max(500, int(tokens * chance.uniform(*_CHARACTERS_PER_TOKEN)))

    lines: list[str] = []
    for document in recall_documents(haystack, seed=1000 + shard, size=size, mix=mix):
        lines.append(json.dumps({"text": document.text}) + "\n")
        characters -= len(document.text)
        if characters <= 0:
            break
    return "".join(lines)
