"""`lapcli inspect`: what a model, an artifact, a run directory or a conversion is, from its headers alone."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lapcli.cli import options
from lapcli.errors import ArtifactError, FamilyError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "inspect", help="Say what a model, an artifact, a run or a conversion is: widths, state bytes, lineage."
    )(run)


def run(
    path: Annotated[
        str,
        typer.Argument(
            help="A model (directory, hub id, demo:NAME), an artifact, a run directory, or one of convert --to dsla."
        ),
    ],
    as_json: options.Json = False,
) -> None:
    """Look at headers and configs only; no weights are read and torch is not imported."""
    from lapcli.cli import display

    document = describe(path)
    if as_json:
        display.emit(document)
        return
    display.facts(document["title"], document["facts"])
    rows = document.get("layers") or []
    if rows:
        columns = list(rows[0])
        shown = [[_layer_cell(column, row[column]) for column in columns] for row in rows]
        of_conversion = document["kind"] == "conversion"
        display.table("layers in the order of their conversion" if of_conversion else "stateful layers", columns, shown)


def describe(path: str) -> dict[str, Any]:
    """What lies at a path, JSON-able: `title`, `facts`, and for models and selections one row a layer.

    Raises:
        ArtifactError: there is nothing that lapcli knows.
        ModelError: it looks like a model and is none.
    """
    from lapcli.linearising.plan import holds_conversion

    place = Path(path)
    if place.is_file():
        return _describe_artifact(place)
    if holds_conversion(place):
        return _describe_conversion(place)
    if place.is_dir() and not (place / "config.json").is_file() and not (place / "adapter_config.json").is_file():
        return _describe_run(place)
    return _describe_model(path)


def _layer_cell(column: str, value: Any) -> str:
    from lapcli.cli.display import size

    if column.endswith("bytes"):
        return size(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _describe_model(name: str) -> dict[str, Any]:
    from lapcli.families.dual_state import TEACHERS
    from lapcli.families.registry import family_for
    from lapcli.families.source import resolve_model
    from lapcli.stages.lineage import sliced_lineage

    source = resolve_model(name)
    entries = [entry for _header, entry in source.tensors.values()]
    facts: dict[str, Any] = {
        "directory": str(source.path),
        "model_type": source.config.get("model_type"),
        "parameters": sum(_count(entry.shape) for entry in entries),
        "weight bytes": sum(entry.nbytes for entry in entries),
        "dtypes": sorted({entry.dtype for entry in entries}),
        "digest": source.digest,
    }
    lineage = sliced_lineage(source.path)
    if lineage is not None:
        facts["made from"] = f"{lineage.model.get('name')} ({str(lineage.model.get('digest'))[:12]})"
        facts["made by"] = ", ".join(f"{key} {value}" for key, value in lineage.settings.items())
    try:
        layers = family_for(source.config).layers(source.config)
    except FamilyError as error:
        layers = ()
        if source.config.get("model_type") in TEACHERS:
            facts["state"] = "none: its layers are attention, and keep keys and values of every token"
            facts["next"] = f"lapcli convert {name} --to dsla --output DIR, which gives some of them states"
        else:
            facts["state"] = error.message
    if layers:
        facts["state bytes of a sequence (fp32)"] = sum(layer.state_bytes() for layer in layers)
    return {
        "title": name,
        "kind": "model",
        "facts": facts,
        "layers": [
            {
                "layer": layer.index,
                "key heads": layer.heads,
                "value heads": layer.value_heads,
                "K": layer.key_width,
                "V": layer.value_width,
                "state bytes": layer.state_bytes(),
            }
            for layer in layers
        ],
    }


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def _describe_artifact(path: Path) -> dict[str, Any]:
    from lapcli.artifacts import read_artifact

    artifact = read_artifact(path)
    lineage = artifact.lineage
    facts: dict[str, Any] = {
        "kind": lineage.kind,
        "base model": f"{lineage.model.get('name')} ({str(lineage.model.get('digest'))[:12]})",
        "family": lineage.family,
        "settings": lineage.settings,
        "parents": {kind: digest[:12] for kind, digest in lineage.parents.items()},
        "tensors": len(artifact.names),
    }
    layers = lineage.record.get("layers", [])
    facts |= {key: value for key, value in lineage.record.items() if key != "layers"}
    return {"title": str(path), "kind": lineage.kind, "facts": facts, "layers": layers}


def _describe_conversion(path: Path) -> dict[str, Any]:
    """A directory of `lapcli convert --to dsla`: which prefixes are working models, and what became of each."""
    import math

    from lapcli.artifacts import read_artifact
    from lapcli.linearising.kept import kept_teacher
    from lapcli.linearising.plan import Place, Shape
    from lapcli.linearising.settings import LayerSettings

    place = Place(path)
    base = kept_teacher(place)
    shape = Shape.of(base.config)
    facts: dict[str, Any] = {
        "teacher": f"{base.config.get('model_type')} ({base.digest[:12]}), {shape.layers} layers of {shape.heads} key "
        f"heads of {shape.head_width}",
        "KV bytes of a token (bf16)": shape.token_bytes(shape.layers),
    }
    if place.sensitivity.is_file():
        lineage = read_artifact(place.sensitivity, "sensitivity").lineage
        facts["measured of the layers"] = ", ".join(sorted(read_artifact(place.sensitivity).names))
        facts["rank correlations"] = {
            name: None if value is None else round(value, 3)
            for name, value in lineage.record.get("rank_correlations", {}).items()
        }
    rows: list[dict[str, Any]] = []
    settings: dict[str, Any] = {}
    for file in sorted(place.prefixes.glob("*.safetensors")):
        lineage = read_artifact(file, "dual-state layer").lineage
        record, settings = lineage.record, lineage.settings
        rows.append(
            {
                "layer": settings["layer"],
                "alignment before": record["alignment"]["before"],
                "alignment after": record["alignment"]["after"],
                "KL": record["kl"],
                "perplexity": math.exp(record["cross_entropy"]),
                "mixture": " ".join(f"{share:.2f}" for share in record["mixture"] or ()),
                "tokens": record["tokens"],
            }
        )
    facts["converted"] = f"{len(rows)} of {shape.layers} layers"
    if rows:
        became = settings["dual_state"]
        layer = LayerSettings.model_construct(window=became["window"])
        said = {
            name: value
            for name, value in became.items()
            if name != "layers" and value is not None and not layer.idle(name)
        }
        facts["what they became"] = said
        facts["trained by"] = {
            name: settings["distillation"][name] for name in ("data", "seq_len", "steps", "batch", "lr", "chained")
        }
    unfinished = [
        folder.name
        for folder in (sorted((path / "training").iterdir()) if (path / "training").is_dir() else [])
        if not (place.prefixes / f"{folder.name}.safetensors").is_file()
    ]
    if unfinished:
        facts["under way"] = ", ".join(unfinished)
    models = sorted(each.parent.name for each in (path / "models").glob("*/config.json"))
    facts["models written"] = ", ".join(models) or "none; lapcli convert --export FRACTION writes one"
    return {"title": str(path), "kind": "conversion", "facts": facts, "layers": rows}


def _describe_run(path: Path) -> dict[str, Any]:
    from lapcli.artifacts import RunDirectory

    run_directory = RunDirectory(path)
    record = run_directory.read_record()
    if record is None:
        raise ArtifactError(
            f"{path} is neither a model (no config.json) nor a run directory (no run.json)",
            "name a model, an artifact or a run directory",
        )
    facts: dict[str, Any] = {"base model": record["model"].get("name")}
    for name in ("calibration", "selection", "sliced", "recovered", "evaluation"):
        place: Path = getattr(run_directory, name)
        facts[name] = str(place) if place.exists() else "not there"
    facts["commands"] = len(record["commands"])
    return {"title": str(path), "kind": "run", "facts": facts}
