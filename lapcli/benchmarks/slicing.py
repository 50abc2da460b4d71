"""What slicing a checkpoint takes, against copying it: seconds, and memory in a process of its own."""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapcli.errors import LapcliError, UsageError
from lapcli.reporting import Reporter, SilentReporter

# A layer of hidden size 2048 with 8 heads of K = V = 256, in bf16.
_CONFIG = {"hidden_size": 2048, "num_heads": 8, "head_dim": 256, "expand_v": 1.0, "intermediate_size": 5632}
_SMALL = {"hidden_size": 128, "num_heads": 2, "head_dim": 64, "expand_v": 1.0, "intermediate_size": 256}
# The peak of resident memory is set back first: at exec it begins with the parent's.
_SLICE = """
import json, re, sys, time
from pathlib import Path
import torch
from lapcli.artifacts import read_artifact
from lapcli.families.source import resolve_model
from lapcli.stages.slicing import slice_model
def memory(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
source, selection = resolve_model(sys.argv[1]), read_artifact(Path(sys.argv[2]), "selection")
started = time.perf_counter()
source.digest
digested = time.perf_counter()
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
slice_model(source, selection, Path(sys.argv[3]))
finished = time.perf_counter()
peak = memory("VmHWM")
print(json.dumps({"digest": digested - started, "slice": finished - digested, "memory": peak - before}))
"""


@dataclass(frozen=True)
class SlicingRow:
    """Slicing and copying one checkpoint, in turn, from a warm page cache.

    Attributes:
        bytes_before: of the weights.
        bytes_after: of the sliced ones.
        shards: files that hold them.
        shard_bytes: the largest of them.
        runs: of each; medians are given.
        slice_seconds: from the resolved model to the directory under its final name, synced to the disk.
        digest_seconds: naming the checkpoint by its content, before.
        copy_seconds: `cp -r`, which leaves syncing to the system.
        copy_synced_seconds: `cp -r` and `sync` of what it wrote.
        memory_bytes: what the slicing process's resident memory peaked at above what it had before; pages of the
            files that it maps count too.
    """

    bytes_before: int
    bytes_after: int
    shards: int
    shard_bytes: int
    runs: int
    slice_seconds: float
    digest_seconds: float
    copy_seconds: float
    copy_synced_seconds: float
    memory_bytes: int

    @property
    def ratio(self) -> float:
        """Seconds of slicing over those of a synced copy."""
        return self.slice_seconds / self.copy_synced_seconds


def slicing_benchmark(
    gib: float = 4.0,
    *,
    small: bool = False,
    runs: int = 3,
    folder: Path | None = None,
    reporter: Reporter | None = None,
) -> SlicingRow:
    """Make a Gated DeltaNet checkpoint of about that size, slice it to half its key width, and copy it.

    Args:
        gib: size of the weights; three times as much is needed on the disk.
        small: narrow layers, for a trial.
        runs: of each.
        folder: where; a temporary one when absent.
        reporter: told of the progress.

    Raises:
        UsageError: the system is not Linux, whose way to tell peaks of memory is used.
        LapcliError: a child process fails.
    """
    if not sys.platform.startswith("linux"):
        raise UsageError("the benchmark of slicing needs Linux")
    reporter = reporter or SilentReporter()
    with tempfile.TemporaryDirectory(dir=folder) as place:
        root = Path(place)
        model, selection = root / "model", root / "selection.safetensors"
        with reporter.task("slicing against copying", total=1 + 2 * runs, unit="steps") as task:
            _make_model(model, gib, _SMALL if small else _CONFIG)
            _make_selection(model, selection)
            task.advance(1)
            slices: list[dict[str, float]] = []
            copies: list[tuple[float, float]] = []
            after = 0
            for _run in range(runs):
                copies.append(_copy(model, root / "copy"))
                task.advance(1)
                slices.append(_slice(model, selection, root / "sliced"))
                after = sum(shard.stat().st_size for shard in (root / "sliced").glob("*.safetensors"))
                shutil.rmtree(root / "sliced")
                task.advance(1)
        sizes = [shard.stat().st_size for shard in model.glob("*.safetensors")]
        return SlicingRow(
            bytes_before=sum(sizes),
            bytes_after=after,
            shards=len(sizes),
            shard_bytes=max(sizes),
            runs=runs,
            slice_seconds=statistics.median(run["slice"] for run in slices),
            digest_seconds=statistics.median(run["digest"] for run in slices),
            copy_seconds=statistics.median(plain for plain, _synced in copies),
            copy_synced_seconds=statistics.median(synced for _plain, synced in copies),
            memory_bytes=int(max(run["memory"] for run in slices)),
        )


def _make_model(folder: Path, gib: float, sizes: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import save_file

    from lapcli.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    def named(layers: int) -> dict[str, torch.Size]:
        config = GatedDeltaNetConfig(**sizes, num_hidden_layers=layers, vocab_size=32000, dtype=torch.bfloat16)
        with torch.device("meta"):
            model = GatedDeltaNetForCausalLM(config)
        folder.mkdir(exist_ok=True)
        config.save_pretrained(folder)
        return {name: tensor.shape for name, tensor in model.state_dict().items()}

    def weight(shapes: dict[str, torch.Size]) -> int:
        return sum(2 * shape.numel() for shape in shapes.values())

    one, two = weight(named(1)), weight(named(2))
    shapes = named(max(1, round((gib * 2**30 - one) / (two - one)) + 1))
    total = weight(shapes)
    noise = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)

    def filled(shape: torch.Size) -> torch.Tensor:
        return noise.repeat(-(-shape.numel() // len(noise)))[: shape.numel()].view(shape).clone()

    shards = list(_shards(shapes, max(total // 8, 1)))
    files = {}
    for number, names in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({tensor: filled(shapes[tensor]) for tensor in names}, folder / name, {"format": "pt"})
        files |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _shards(shapes: dict[str, Any], most: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        if names and size + 2 * shape.numel() > most:
            yield names
            names, size = [], 0
        names.append(name)
        size += 2 * shape.numel()
    yield names


def _make_selection(model: Path, path: Path) -> None:
    """Random channels: which ones is nothing to the time."""
    import torch

    from lapcli.artifacts import Lineage, write_artifact
    from lapcli.families.registry import family_for
    from lapcli.families.source import resolve_model

    source = resolve_model(str(model))
    layers = family_for(source.config).layers(source.config)
    chance = torch.Generator().manual_seed(0)
    kept = layers[0].key_width // 2
    tensors = {
        f"layers.{layer.index}.kept": torch.stack(
            [torch.randperm(layer.key_width, generator=chance)[:kept].sort().values for _head in range(layer.heads)]
        )
        for layer in layers
    }
    lineage = Lineage("selection", source.describe(), "gated_deltanet", {"method": "rand", "kept_width": kept})
    write_artifact(path, lineage, tensors)


def _copy(model: Path, target: Path) -> tuple[float, float]:
    started = time.perf_counter()
    _call(["cp", "-r", str(model), str(target)])
    copied = time.perf_counter()
    _call(["sync", *map(str, target.iterdir())])
    synced = time.perf_counter()
    shutil.rmtree(target)
    return copied - started, synced - started


def _slice(model: Path, selection: Path, target: Path) -> dict[str, float]:
    return json.loads(_call([sys.executable, "-c", _SLICE, str(model), str(selection), str(target)]))


def _call(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LapcliError(f"`{' '.join(command[:2])}` failed: {done.stderr.strip()[-500:]}")
    return done.stdout
