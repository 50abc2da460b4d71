"""A corpus out of a folder of raw texts."""

import json
import lzma
import random
from collections.abc import Mapping
from pathlib import Path


def prepare(texts: Path, output: Path, characters: int, shares: Mapping[str, float], seed: int = 0) -> str:
    """Write the corpus, without the paragraphs that occur in the held-out part of `builtin`; one line about it.

    Args:
        texts: the folder of raw texts.
        output: JSONL, packed where its name ends in `.xz`.
        characters: of the corpus, about; a source that has too few gives all.
        shares: of the folder's files.
        seed: of the choice and the order of documents.
    """
    from lapcli.data.builtin import heldout_builtin_text
    from lapcli.data.files import read_path
    from lapcli.data.overlap import HeldOutIndex

    index = HeldOutIndex(document.text for document in heldout_builtin_text())
    chance = random.Random(seed)
    kept: list[str] = []
    dropped = 0
    for name, share in shares.items():
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
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(lzma.compress(lines, preset=6) if output.suffix == ".xz" else lines)
    return (
        f"{output}: {len(kept)} texts, {sum(map(len, kept)) / 1e6:.1f} M characters, {dropped} held-out paragraphs "
        f"taken out, {output.stat().st_size / 1e6:.1f} MB\n"
    )
