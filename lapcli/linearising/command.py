"""The command that goes on with a conversion, from what the conversion says of itself."""

import json
import shlex
from pathlib import Path
from typing import Any

from lapcli.artifacts import read_artifact
from lapcli.errors import LapcliError
from lapcli.families.packed import longest_sequence
from lapcli.families.source import DEMO_PREFIX, ModelSource, resolve_model
from lapcli.linearising.plan import Place, Shape
from lapcli.linearising.record import SENSITIVITY, stored
from lapcli.linearising.sensitivity import order_of
from lapcli.linearising.settings import (
    OPTIONS,
    DistillationSettings,
    LayerSettings,
    SensitivitySettings,
    default_linearising,
)
from lapcli.recipe import Settings
from lapcli.stages.lineage import made_of_a_demo

_UNSAID = "loss"
"""The order of layers where nobody says one."""
_FLAGS = {"fit": "--no-fit", "chained": "--independent"}
_NO_OPTIONS = ("warmup", "clip", "temperature")
"""What only recipes say of a training."""


class _Unsayable(Exception):
    """No options of `lapcli convert` come to these settings."""


def default_settings(source: ModelSource) -> dict[str, dict[str, Any]]:
    """What sensitivity and distillation of a model are where nobody says anything else."""
    defaults, longest = default_linearising(made_of_a_demo(source)), longest_sequence(source.config)
    for part in defaults.values():
        part["seq_len"] = part["seq_len"] if longest is None else min(part["seq_len"], longest)
    return defaults


def convert_command(root: Path | str, fraction: str | None = None) -> str:
    """The command that converts so much with the settings that a conversion was made with, as far as it says them.

    Args:
        root: the directory of the conversion; its teacher may be damaged.
        fraction: of the layers, as it is typed; `None` for what is converted already.
    """
    place = Place(Path(root))
    teacher, source = _teacher(place)
    if fraction is None:
        fraction = "F" if source is None else _share(place, source)
    end = f"--fraction {fraction} --output {shlex.quote(str(root))}"
    plain = f"lapcli convert {shlex.quote(teacher)} --to dsla {end}"
    if source is None:
        return plain
    try:
        options = _options(place, source)
    except _Unsayable:
        return f"lapcli convert --recipe FILE {end}, with the recipe that it was made by"
    except (LapcliError, KeyError, ValueError):
        # What does not say how it was made cannot be gone on with either.
        return plain
    return " ".join(("lapcli convert", shlex.quote(teacher), "--to dsla", *options, end))


def _teacher(place: Place) -> tuple[str, ModelSource | None]:
    """What to name as the teacher: a shipped model by its name, another where it lies in the conversion if it is whole
    there, else where it was.
    """
    found = next((artifact.lineage.model for artifact in _artifacts(place)), {})
    name = str(found.get("name", "MODEL"))
    tried = [name] if name.startswith(DEMO_PREFIX) else [str(place.base), name]
    for each in tried:
        try:
            if each != str(place.base) and not each.startswith(DEMO_PREFIX) and not Path(each).is_dir():
                continue
            source = resolve_model(each)
            if source.digest == found.get("digest"):
                return each, source
        except LapcliError:
            continue
    return name, None


def _share(place: Place, source: ModelSource) -> str:
    """What is converted, as a fraction that comes to so many layers; one where none is yet."""
    return f"{max(1, len(stored(place))) / Shape.of(source.config).layers:.4g}"


def _artifacts(place: Place) -> list[Any]:
    try:
        found = stored(place)
        return found or ([read_artifact(place.sensitivity, SENSITIVITY)] if place.sensitivity.is_file() else [])
    except LapcliError:
        return []


def _options(place: Place, source: ModelSource) -> list[str]:
    """The options that come to the settings of the conversion."""
    layers = stored(place)
    measured = read_artifact(place.sensitivity, SENSITIVITY) if place.sensitivity.is_file() else None
    defaults = default_settings(source)
    found: list[str] = []
    summary = json.loads(place.summary.read_text())["settings"] if place.summary.is_file() else None
    order = (
        _order([artifact.lineage.settings["layer"] for artifact in layers], measured)
        if summary is None
        else str(summary["order"])
    )
    if order != _UNSAID:
        found += ["--sensitivity", order]
    if summary is not None:
        found += _of_layers(LayerSettings.model_validate(summary["layer"]))
    elif measured is not None:
        found += _of_layers(LayerSettings.model_validate(measured.lineage.settings["layer"]))
    elif layers:
        dual_state = layers[0].lineage.settings["dual_state"]
        found += _of_layers(
            LayerSettings.model_validate({name: dual_state[name] for name in LayerSettings.model_fields})
        )
    pairs: list[tuple[Settings, Settings]] = []
    if measured is not None:
        told = {name: measured.lineage.settings[name] for name in SensitivitySettings.model_fields}
        wanted = SensitivitySettings.model_validate(told)
        pairs.append((wanted, SensitivitySettings.model_validate(defaults["sensitivity"])))
    if layers:
        wanted = DistillationSettings.model_validate(layers[0].lineage.settings["distillation"])
        pairs.append((wanted, DistillationSettings.model_validate(defaults["distillation"])))
    return found + _of_text_and_training(pairs)


def _order(layers: list[int], measured: Any) -> str:
    """What gives the order of the layers, of a conversion that was stopped before it said so."""
    if measured is None:
        return "first"
    tensors = measured.tensors()
    for name in sorted(tensors, key=lambda name: name in ("entropy", "outlier")):
        values = tensors[name]
        if order_of(values.mean(-1) if values.ndim == 2 else values)[: len(layers)] == layers:
            return name
    raise _Unsayable


def _of_layers(layer: LayerSettings) -> list[str]:
    found: list[str] = []
    for name, field in LayerSettings.model_fields.items():
        if getattr(layer, name) != field.default and not layer.idle(name):
            found += [f"--{name}", str(getattr(layer, name))]
    return found


def _of_text_and_training(pairs: list[tuple[Settings, Settings]]) -> list[str]:
    """Options of both parts together: one that both have says the same of both."""
    found: list[str] = []
    names = dict.fromkeys(name for wanted, _default in pairs for name in type(wanted).model_fields)
    for name in names:
        having = [(getattr(a, name), getattr(b, name)) for a, b in pairs if name in type(a).model_fields]
        if name == "lr_min":
            continue
        if all(wanted == default for wanted, default in having):
            continue
        values = {wanted for wanted, _default in having}
        if len(values) > 1 or name in _NO_OPTIONS:
            raise _Unsayable
        if name in _FLAGS:
            found.append(_FLAGS[name])
            continue
        (value,) = values
        found += [f"--{OPTIONS.get(name, name).replace('_', '-')}", shlex.quote(_typed(value))]
        if name == "lr":
            found += _last_rate(pairs, value / 10)
    if "--lr" not in found:
        found += _last_rate(pairs, None)
    return found


def _last_rate(pairs: list[tuple[Settings, Settings]], unsaid: float | None) -> list[str]:
    """`--lr-min`, unless it is what `--lr` alone comes to."""
    for wanted, default in pairs:
        if isinstance(wanted, DistillationSettings) and isinstance(default, DistillationSettings):
            return (
                []
                if wanted.lr_min == (default.lr_min if unsaid is None else unsaid)
                else ["--lr-min", _typed(wanted.lr_min)]
            )
    return []


def _typed(value: Any) -> str:
    """As it is typed, such that it is read as the very number."""
    return repr(value) if isinstance(value, float) else str(value)
