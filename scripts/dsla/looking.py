"""Attention by distance, numbers for pictures: the teacher's softmax weights, and what each state contributes."""

from pathlib import Path
from typing import Any

from studies.documents import read_object

from lapcli.errors import ArtifactError

EDGES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Where the bins of distances begin; a mean over a bin is one number."""


def look(conversion: Path, text: str, *, samples: int, length: int, device: str) -> list[dict[str, Any]]:
    """What each converted layer of a conversion reads, in the longest prefix that was written out as a model.

    Args:
        conversion: the directory.
        text: as `lapcli convert --data` takes it.
        samples: windows of text.
        length: tokens of each.
        device: where the models run, in fp32.

    Returns:
        By layer, in order of conversion: `layer`, `mixture`, and by name (`weight` of the teacher, `mixed`,
        `state 0`, ...) the means over the bins that begin at `edges`.

    Raises:
        ArtifactError: it is no conversion, or damaged, or no model was written.
        UsageError: there is no such device.
    """
    import torch

    from lapcli.data import token_blocks
    from lapcli.families.loading import load_model, load_tokenizer
    from lapcli.families.source import resolve_model
    from lapcli.linearising.distance import by_distance
    from lapcli.linearising.plan import Place, holds_conversion
    from lapcli.machine import Machine
    from lapcli.reporting import SilentReporter

    place, where = Place(conversion), Machine(device).torch_device()
    making = "make one with: lapcli convert MODEL --to dsla --output DIR"
    if not holds_conversion(conversion):
        raise ArtifactError(f"{conversion} is no conversion to states: there is no {place.base}", making)
    prefixes = read_object(place.summary, ("prefixes",), making)["prefixes"]
    written = {int(number): path for number, path in ((p.name.partition("-")[0], p) for p in _models(place.root))
               if number.isdigit()}  # fmt: skip
    if not written:
        raise ArtifactError(
            f"{conversion} has no model written out", f"lapcli convert --export FRACTION --output {conversion}"
        )
    number = max(written)
    base, made = resolve_model(str(place.base)), resolve_model(str(written[number]))
    ids = token_blocks(
        text, load_tokenizer(base), samples=samples, seq_len=length, seed=0, reporter=SilentReporter()
    ).ids
    teacher, student = (load_model(source, device=where, dtype=torch.float32).eval() for source in (base, made))
    edges = [edge for edge in EDGES if edge < length]
    found: list[dict[str, Any]] = []
    for prefix in prefixes[:number]:
        layer = prefix["layer"]
        parts = {**by_distance(teacher, layer, ids), **by_distance(student, layer, ids)}
        means = {
            name: [round(float(each.mean()), 8) for each in values.tensor_split(edges[1:])]
            for name, values in parts.items()
        }
        found.append({"layer": layer, "mixture": prefix["mixture"], "edges": edges, **means})
    return found


def _models(root: Path) -> list[Path]:
    """Where models were written out."""
    return sorted((root / "models").glob("*-of-*"))
