"""From raw files to token streams: read, clean, train the tokenizer, tokenise; everything in worker processes.

Workers are forked before CUDA or a tokenizer's threads exist in this process, and again once there is a tokenizer.
"""

import hashlib
import json
import lzma
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import numpy as np

from demo_gdn.vocabulary import BOUNDARY, load_tokenizer_json, train_tokenizer
from lapcli.artifacts import digest_file
from lapcli.data.overlap import HeldOutIndex

FILES = {
    "books": "gutenberg_train.jsonl.xz",
    "techdocs": "techdocs.jsonl.xz",
    "openstax": "openstax_by.jsonl.xz",
    "wiki": "wiki_leads.jsonl.xz",
    "books_valid": "gutenberg_valid.jsonl.xz",
}
"""The files read from the data folder, by the name of their source."""
TRAINED = ("books", "techdocs", "openstax", "wiki", "builtin")
"""Sources that the model is trained on."""
MODERN = ("techdocs", "openstax", "wiki", "builtin")

_SHARD_CHARACTERS = 1_500_000
_WIKI_HELD_OUT_SHARE = 50


@dataclass
class Corpus:
    """Everything that the training needs from the raw files.

    Attributes:
        tokenizer_json: the trained tokenizer, serialised.
        streams: token streams (uint16), documents separated by the boundary token.
        haystack: texts that recall hides its needles in.
        haystack_heldout: the same for evaluation, by kind: validation books, held-out builtin.
        characters: characters behind each stream, for bits per byte.
        report: digests, counts and seconds for the log.
    """

    tokenizer_json: str
    streams: dict[str, np.ndarray]
    haystack: list[str]
    haystack_heldout: dict[str, list[str]]
    characters: dict[str, int]
    report: dict[str, Any] = field(default_factory=dict)


@dataclass
class Builtin:
    """The exported `builtin` corpus: both parts, and the Python that it documents."""

    train: list[str]
    heldout: list[str]
    python: str


def export_builtin(path: Path) -> str:
    """Write the `builtin` corpus of the running Python as JSONL, both parts; return one line about it."""
    from lapcli.data.builtin import load_builtin

    corpus = load_builtin()
    lines = [
        json.dumps({"python": corpus.python, "split": split, "name": document.name, "text": document.text})
        for split, documents in (("train", corpus.train), ("heldout", corpus.heldout))
        for document in documents
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"{path}: Python {corpus.python}, {len(corpus.train)} train and {len(corpus.heldout)} held-out texts"


def read_builtin(path: Path) -> Builtin:
    """Read what `export_builtin` wrote."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    parts = {split: [row["text"] for row in rows if row["split"] == split] for split in ("train", "heldout")}
    return Builtin(parts["train"], parts["heldout"], rows[0]["python"])


def build_corpus(
    data: Path,
    builtin_file: Path,
    *,
    vocab_size: int,
    workers: int,
    seed: int,
    limit: int | None,
    say: Callable[[str], None],
    tokenizer_json: str | None = None,
) -> Corpus:
    """Read, clean, and tokenise.

    Args:
        data: folder of the shared files.
        builtin_file: what `export_builtin` wrote.
        vocab_size: of the tokenizer.
        workers: processes.
        seed: chooses the texts of the tokenizer's sample and of the haystack.
        limit: characters to keep of each source, for quick trials; `None` keeps all.
        say: receives one line a step.
        tokenizer_json: a tokenizer to take; `None` trains one.
    """
    started = time.time()
    builtin = read_builtin(builtin_file)
    global _index
    _index = HeldOutIndex(builtin.heldout)
    fork = multiprocessing.get_context("fork")

    with fork.Pool(workers) as pool:
        pending = {name: pool.apply_async(_read, (name, data / file, limit)) for name, file in FILES.items()}
        texts: dict[str, list[str]] = {"builtin": builtin.train[: None if limit is None else 50]}
        for name, result in pending.items():
            texts[name] = result.get()
        texts["wiki_heldout"] = [text for text in texts["wiki"] if _is_wiki_held_out(text)]
        texts["wiki"] = [text for text in texts["wiki"] if not _is_wiki_held_out(text)]
        say(f"read {sum(map(len, texts['books'])) / 1e6:.0f} M characters of books, {time.time() - started:.1f} s")

        dropped: dict[str, int] = {}
        for name in TRAINED:
            texts[name], dropped[name] = _clean(pool, texts[name])
        say(f"dropped paragraphs that occur in held-out builtin: {dropped}, {time.time() - started:.1f} s")

        rng = random.Random(seed)
        sample = _sample(texts, rng, 24_000_000 if limit is None else limit)
        if tokenizer_json is None:
            tokenizer_json = pool.apply(train_tokenizer, (sample, vocab_size))
            characters = sum(map(len, sample)) / 1e6
            say(f"trained the tokenizer on {characters:.0f} M characters, {time.time() - started:.1f} s")

        texts["builtin_heldout"] = builtin.heldout
        streams = {name: _tokenise(pool, tokenizer_json, texts[name]) for name in texts}
    say(f"tokenised: { {name: len(stream) for name, stream in streams.items()} }, {time.time() - started:.1f} s")

    return Corpus(
        tokenizer_json=tokenizer_json,
        streams=streams,
        haystack=_haystack(texts, rng, 16_000_000 if limit is None else limit),
        haystack_heldout={
            "books": [text[20_000:220_000] for text in texts["books_valid"]],
            "builtin": builtin.heldout,
        },
        characters={name: sum(map(len, texts[name])) for name in texts},
        report={
            "sha256": {
                **{name: digest_file(data / file) for name, file in FILES.items()},
                "builtin": digest_file(builtin_file),
            },
            "builtin_python": builtin.python,
            "paragraphs_dropped_for_heldout_builtin": dropped,
            "tokens": {name: len(stream) for name, stream in streams.items()},
            "seconds": round(time.time() - started, 1),
        },
    )


_index: HeldOutIndex


def _read(name: str, path: Path, limit: int | None) -> list[str]:
    texts: list[str] = []
    total = 0
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            text = row["text"]
            if name == "wiki":
                # The heading that Wikipedia's own markup gives a page, as in WikiText.
                text = f"= {row['title']} =\n\n{text}"
            if limit is not None:
                text = text[: max(0, limit - total)]
            total += len(text)
            if text.strip():
                texts.append(text)
            if limit is not None and total >= limit:
                break
    return texts


def _is_wiki_held_out(text: str) -> bool:
    title = text.partition("\n")[0]
    return int.from_bytes(hashlib.sha256(title.encode()).digest()[:8], "big") % _WIKI_HELD_OUT_SHARE == 0


def _shards(texts: list[str]) -> Iterator[list[str]]:
    shard: list[str] = []
    size = 0
    for text in texts:
        shard.append(text)
        size += len(text)
        if size >= _SHARD_CHARACTERS:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard


def _clean_shard(texts: list[str]) -> tuple[list[str], int]:
    results = [_index.clean(text) for text in texts]
    return [result.text for result in results if result.text.strip()], sum(result.dropped for result in results)


def _clean(pool: Pool, texts: list[str]) -> tuple[list[str], int]:
    kept: list[str] = []
    dropped = 0
    for shard, count in pool.imap(_clean_shard, _shards(texts)):
        kept.extend(shard)
        dropped += count
    return kept, dropped


def _excerpts(texts: list[str], rng: random.Random, characters: int, length: int = 20_000) -> list[str]:
    """Stretches of at most `length` characters from random texts, `characters` together."""
    taken: list[str] = []
    weights = [len(text) for text in texts]
    while characters > 0:
        text = rng.choices(texts, weights)[0]
        start = rng.randrange(max(1, len(text) - length))
        taken.append(text[start : start + length])
        characters -= max(1, len(taken[-1]))
    return taken


def _sample(texts: dict[str, list[str]], rng: random.Random, characters: int) -> list[str]:
    """The tokenizer's sample: half of it books, half modern text."""
    shares = {"books": 0.5, "techdocs": 0.2, "openstax": 0.1, "wiki": 0.16, "builtin": 0.04}
    return [text for name, share in shares.items() for text in _excerpts(texts[name], rng, int(characters * share))]


def _haystack(texts: dict[str, list[str]], rng: random.Random, characters: int) -> list[str]:
    shares = {"books": 0.32, "techdocs": 0.24, "openstax": 0.06, "wiki": 0.1, "builtin": 0.28}
    return [text for name, share in shares.items() for text in _excerpts(texts[name], rng, int(characters * share))]


def _tokenise_shard(arguments: tuple[str, list[str]]) -> np.ndarray:
    tokenizer_json, texts = arguments
    tokenizer = load_tokenizer_json(tokenizer_json)
    boundary = tokenizer.token_to_id(BOUNDARY)
    parts: list[np.ndarray] = []
    for text in texts:
        parts.append(np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint16))
        parts.append(np.asarray([boundary], dtype=np.uint16))
    return np.concatenate(parts)


def _tokenise(pool: Pool, tokenizer_json: str, texts: list[str]) -> np.ndarray:
    boundary = np.asarray([load_tokenizer_json(tokenizer_json).token_to_id(BOUNDARY)], dtype=np.uint16)
    shards = pool.imap(_tokenise_shard, ((tokenizer_json, shard) for shard in _shards(texts)))
    return np.concatenate([boundary, *shards])
