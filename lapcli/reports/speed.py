"""What `lapcli bench` measured, as sections of a report: of the report's own models, or of others."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapcli.errors import LapcliError
from lapcli.families.source import resolve_model
from lapcli.reports.document import Block, Items, Listing, Paragraph, Table, size

if TYPE_CHECKING:
    from lapcli.benchmarks.speed.results import Row

_NOT_SHAPES = frozenset(
    ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "auto_map")
)
"""Fields of a config that say nothing of what has to be computed."""
_MOST = 4
"""Batches that a cell names."""


@dataclass
class Bench:
    """A file of `lapcli bench`.

    Attributes:
        path: of it.
        command: as typed.
        machine: device, rates, versions, date.
        quick: whether sizes were toys.
        rows: what was measured.
        configs: of its models, by name and key width.
    """

    path: Path
    command: str
    machine: dict[str, Any]
    quick: bool
    rows: "list[Row]"
    configs: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)

    def rows_of(self, config: Mapping[str, Any] | None, what: str) -> "list[Row]":
        """What lapcli's own way measured of a model of this config; nothing of toys."""
        shape = None if config is None or self.quick else _shape(config)
        names = {name for name, found in self.configs.items() if _shape(found) == shape}
        return [
            row
            for row in self.rows
            if (row.cell.model, row.cell.key_width) in names
            and (row.cell.what, row.cell.way, row.status) == (what, "lapcli", "measured")
        ]


def read_benches(folders: Iterable[Path], given: Iterable[Path]) -> tuple[list[Bench], list[str]]:
    """The files that were named, and those that lie in folders.

    Args:
        folders: where to look for files `*.json` that `lapcli bench --output` wrote.
        given: files.

    Returns:
        The files, and what could not be read of those that were found.

    Raises:
        ArtifactError: a file that was named is none of `lapcli bench`, or damaged.
    """
    named = {path.resolve(): path for path in given}
    lying = sorted(path for folder in folders for path in folder.glob("*.json"))
    if not named and not lying:
        return [], []
    # Imports torch.
    from lapcli.benchmarks.speed.results import is_results, read_results

    found, problems = [_bench(path, *read_results([path])[0]) for path in named.values()], []
    for path in lying:
        if path.resolve() in named or not is_results(path):
            continue
        try:
            found.append(_bench(path, *read_results([path])[0]))
        except LapcliError as error:
            problems.append(error.message)
    return found, problems


def _bench(path: Path, document: dict[str, Any], rows: "list[Row]") -> Bench:
    configs = {
        (str(each.get("model")), each.get("key_width", 0)): each["config"]
        for each in document.get("subjects") or ()
        if isinstance(each.get("config"), dict)
    }
    machine = document.get("machine") or {}
    return Bench(path, str(document.get("command")), machine, bool(document.get("quick")), rows, configs)


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a config decides how long it takes; a field that is not set is as one that is not there."""
    return {
        name: _shape(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in _NOT_SHAPES and value is not None
    }


@dataclass(frozen=True)
class Gains:
    """What was measured of a model and its slice, in words; `None` where nothing was.

    Attributes:
        mixer: peak memory of a mixer.
        speed: of the whole model.
        sequences: how many fit into a memory.
    """

    mixer: str | None = None
    speed: str | None = None
    sequences: str | None = None


def gains(benches: Sequence[Bench], base: Mapping[str, Any] | None, sliced: Mapping[str, Any] | None) -> Gains:
    """Look for both models among what was measured.

    Args:
        benches: what was measured.
        base: the unpruned model's config.
        sliced: its slice's.
    """
    several = len({bench.machine.get("device") for bench in benches}) > 1
    pairs = {
        what: [
            (before, after, f", {bench.machine.get('device')}" if several else "")
            for bench in benches
            for before, after in _pairs(bench.rows_of(base, what), bench.rows_of(sliced, what))
        ]
        for what in ("decode", "prefill", "prefill mixer", "memory")
    }
    mixer = [
        f"{size(before.peak_bytes)} \N{RIGHTWARDS ARROW} {size(after.peak_bytes)} ({_at(before)}{where})"
        for before, after, where in pairs["prefill mixer"]
        if before.peak_bytes and after.peak_bytes
    ]
    speed = [
        f"{before.seconds / after.seconds:.2f}x ({'a step' if what == 'decode' else 'prompts'}, {_at(before)}{where})"
        for what in ("decode", "prefill")
        for before, after, where in pairs[what]
        if before.seconds and after.seconds
    ]
    sequences = [
        f"{before.more['fit']:,} \N{RIGHTWARDS ARROW} {after.more['fit']:,} in {size(before.more['memory'])}{where}"
        for before, after, where in pairs["memory"]
        if {"fit", "memory"} <= before.more.keys() & after.more.keys()
    ]
    return Gains(*("; ".join(dict.fromkeys(each[:_MOST])) or None for each in (mixer, speed, sequences)))


def _pairs(before: "Sequence[Row]", after: "Sequence[Row]") -> "list[tuple[Row, Row]]":
    def key(row: "Row") -> tuple[Any, ...]:
        cell = row.cell
        # As many sequences as fit are other ones for each model.
        batch = row.more.get("memory") if cell.what == "memory" else cell.batch
        return batch, cell.tokens, cell.state_dtype, cell.backward

    late = {key(row): row for row in after}
    return [(row, late[key(row)]) for row in before if key(row) in late]


def _at(row: "Row") -> str:
    return f"batch {row.cell.batch}, {row.cell.tokens} tokens"


def blocks(benches: Sequence[Bench], models: Iterable[Mapping[str, Any] | None]) -> list[Block]:
    """All that was measured, file by file, as `lapcli bench` shows it.

    Args:
        benches: the files.
        models: configs of the report's own models.
    """
    if not benches:
        return []
    from lapcli.benchmarks.speed.tables import notes, tables

    own = [_shape(config) for config in models if config is not None]
    made: list[Block] = []
    for bench in benches:
        strange = sorted({name for (name, _width), config in bench.configs.items() if _shape(config) not in own})
        unnamed = sorted({row.cell.model for row in bench.rows} - {name for name, _width in bench.configs})
        versions = bench.machine.get("versions") or {}
        on = f"on {bench.machine.get('device', 'a machine that is not noted')}, {bench.machine.get('date', 'undated')}"
        said = f"{bench.path.name}: measured {on}, with random weights"
        said += f", torch {versions['torch']}." if versions.get("torch") else "."
        if strange or unnamed:
            said += (
                f" Of other models or widths than this report's: {', '.join(dict.fromkeys([*strange, *unnamed]))}; "
                "their figures are in no column above."
            )
        if bench.quick:
            said += " Toy sizes (--quick): this shows that it runs, and says nothing of speed."
        made += [Paragraph(said), Listing((bench.command,))]
        for table in tables(bench.rows):
            rows = tuple(tuple(row) for row in table.rows)
            made.append(Table(table.title, tuple(table.columns), rows, text_columns=table.text_columns))
        noted = notes(bench.rows)
        if noted:
            made.append(Items(tuple(noted)))
    return made


def config_of(path: Path) -> dict[str, Any] | None:
    """The config in a model's directory, or `None`."""
    if not path.is_dir():
        return None
    try:
        return dict(resolve_model(str(path)).config)
    except LapcliError:
        return None
