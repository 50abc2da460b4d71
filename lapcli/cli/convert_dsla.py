"""The part of `lapcli convert` that makes a Transformer's attention layers states (`--to dsla`)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lapcli.linearising.recipe import ConversionRecipe
    from lapcli.linearising.settings import LayerSettings, LinearisingSettings

DEFAULT_TEACHER = "demo:transformer"
DEFAULT_FRACTION = "0.25"

_LAYER = ("states", "start", "width", "window", "sinks")
_TEXT = ("samples", "rows")
_BOTH = ("data", "seq_len", "seed")


def to_dsla(
    model: str | None,
    fraction: str | None,
    output: Path,
    given: dict[str, Any],
    *,
    recipe: Path | None = None,
    tasks: list[str] | None,
    limit: int | None,
    micro_batch: int | None,
    device: str,
    dtype: str,
    kernel: str = "auto",
    cuda_graphs: bool = True,
    require_fast: bool = False,
    overwrite: bool,
    as_json: bool,
    dry_run: bool,
    quiet: bool,
) -> None:
    """Convert layers, or go on with it; write the model of the fraction.

    Args:
        model: the teacher.
        fraction: of its layers.
        output: the directory of the conversion.
        given: settings by the names that the options have in `LinearisingSettings`; `None` for those left out.
        recipe: file or name of one; what options say goes first.
        tasks: on which each new prefix is measured.
        limit: items of each.
        micro_batch: sequences that are computed at once.
        device: where it runs.
        dtype: of frozen weights.
        kernel: of the new layers.
        cuda_graphs: whether training steps are CUDA graphs on a GPU.
        require_fast: whether it is an error when no fast one of them runs.
        overwrite: whether an earlier conversion gives way.
        as_json: whether the result goes to stdout.
        dry_run: whether to do nothing.
        quiet: whether to say nothing.
    """
    from lapcli.cli import context, display
    from lapcli.errors import UsageError
    from lapcli.families.dual_state import kernel_choice
    from lapcli.families.source import resolve_model
    from lapcli.linearising.recipe import read_conversion
    from lapcli.machine import Machine
    from lapcli.shipped import find_recipe
    from lapcli.stages.linearising import linearise_into, plan_linearising

    base = None if recipe is None else read_conversion(find_recipe(recipe))
    source = resolve_model(model or (DEFAULT_TEACHER if base is None else base.model))
    context.refuse_within(output, source)
    machine = Machine(device, dtype, kernel, require_fast)
    choice = kernel_choice(kernel, machine.torch_device(), machine.torch_dtype(source.config), needs_gradient=True)
    settings = _settings(source, given, base)
    if settings.layer.window is None:
        machine.refuse_slow(choice.name, choice.reason)
    elif kernel != "auto":
        raise UsageError(
            f"--kernel is about layers with states, and --window {settings.layer.window} makes layers without",
            "leave out --kernel or --window",
        )
    share = fraction or (DEFAULT_FRACTION if base is None else base.fraction)
    if base is not None:
        tasks, limit = base.tasks if tasks is None else tasks, base.limit if limit is None else limit
    plan = plan_linearising(source, settings, share, output, overwrite=overwrite, tasks=tasks or ())
    if dry_run:
        display.would_do(plan.document(), as_json)
        return
    reporter = display.DisplayReporter(quiet)
    if settings.layer.window is None and plan.done < plan.number:
        reporter.notice(f"kernel: {choice.name} ({choice.reason}) in new layers, on {machine.torch_device()}")
    result = linearise_into(
        plan, machine=machine, micro_batch=micro_batch, tasks=tasks or [], limit=limit, cuda_graphs=cuda_graphs,
        reporter=reporter,
    )  # fmt: skip
    if as_json:
        display.emit(result.document())
    elif not quiet:
        _show(result.document())
    done = "converted" if result.worked else "nothing to do, it is there already"
    display.closing(
        f"{done}: {result.output}{context.loading(result.output)}\n"
        f"next: lapcli eval builtin niah --model {result.output} --baseline {plan.place.base}, "
        f"or lapcli convert --export 0.125 --output {output}",
        quiet=quiet,
    )


def export(fraction: str, output: Path, destination: Path | None, *, overwrite: bool, as_json: bool, dry_run: bool,
           quiet: bool) -> None:  # fmt: skip
    """Write the model of a fraction that was converted before.

    Args:
        fraction: of the layers.
        output: the directory of the conversion.
        destination: of the model; by default in that directory.
        overwrite: whether something else there gives way.
        as_json: whether the result goes to stdout.
        dry_run: whether to do nothing.
        quiet: whether to say nothing.
    """
    from lapcli.cli import context, display
    from lapcli.stages.linearising import check_export, default_export, export_prefix, number_of, prefix_of

    number = number_of(output, fraction)
    place = destination or default_export(output, number)
    check_export(output, place, overwrite=overwrite)
    prefix_of(output, number)
    if dry_run:
        display.would_do({"layers": number, "reads": str(output), "writes": str(place)}, as_json)
        return
    worked = export_prefix(output, number, place, overwrite=overwrite, reporter=display.DisplayReporter(quiet))
    if as_json:
        display.emit({"converted": str(place), "layers": number, "worked": worked})
    done = "written" if worked else "nothing to do, it is there already"
    display.closing(f"{done}: {place}, {number} layers converted{context.loading(place)}", quiet=quiet)


def _settings(source: Any, given: dict[str, Any], base: "ConversionRecipe | None" = None) -> "LinearisingSettings":
    """The settings that options spell, with those of a recipe, or the model's defaults."""
    from lapcli.cli import context
    from lapcli.errors import UsageError
    from lapcli.linearising.command import default_settings
    from lapcli.linearising.settings import (
        OPTIONS,
        DistillationSettings,
        LayerSettings,
        LinearisingSettings,
        SensitivitySettings,
        check_order,
    )

    chosen = {name: value for name, value in given.items() if value is not None}
    order = chosen.pop("order", "loss" if base is None else base.order)
    try:
        check_order(order)
    except ValueError as error:
        raise UsageError(f"--sensitivity {error}") from error
    if "window" in chosen and chosen["window"] != "equal":
        try:
            chosen["window"] = int(chosen["window"])
        except ValueError as error:
            said = f"--window {chosen['window']!r}: 'equal' or one whole number is wanted"
            raise UsageError(said, "for example --window 512") from error
    if "lr" in chosen and "lr_min" not in chosen:
        chosen["lr_min"] = chosen["lr"] / 10
    if base is None:
        defaults = default_settings(source)
    else:
        defaults = {name: getattr(base, name).document() for name in ("sensitivity", "distillation")}
    shared = {name: chosen.pop(name) for name in _BOTH if name in chosen}
    layer = {name: chosen.pop(name) for name in _LAYER if name in chosen}
    text = {name: chosen.pop(name) for name in _TEXT if name in chosen}
    of_layers = context.from_command_line(
        LayerSettings, {**({} if base is None else base.layer.document()), **layer}, OPTIONS
    )
    _refuse_idle(of_layers, {*layer, *({"penalty"} & chosen.keys())})
    return LinearisingSettings(
        layer=of_layers,
        order=order,
        sensitivity=context.from_command_line(
            SensitivitySettings, {**defaults["sensitivity"], **shared, **text}, OPTIONS
        ),
        distillation=context.from_command_line(
            DistillationSettings, {**defaults["distillation"], **shared, **chosen}, OPTIONS
        ),
    )


def _refuse_idle(layer: "LayerSettings", given: set[str]) -> None:
    """Refuse options that would have no say."""
    from lapcli.errors import UsageError

    for name in sorted(given):
        if name == "sinks" and layer.idle(name):
            raise UsageError("--sinks is about --window, which was not given", "give both or neither")
        if layer.idle(name) or (name == "penalty" and layer.window is not None):
            raise UsageError(
                f"--{name} is about layers with states, and --window {layer.window} makes layers without",
                f"leave out --{name} or --window",
            )


def _show(found: dict[str, Any]) -> None:
    from lapcli.cli import display

    teacher = found["teacher"]
    rows = [["teacher", "", "", "", f"{teacher['perplexity']:.3f}", display.size(teacher["kv_bytes_a_token"]), ""]]
    rows += [
        [
            str(each["layer"]),
            f"{each['alignment']['before']:.4f}",
            f"{each['alignment']['after']:.4f}",
            f"{each['kl']:.4f}",
            f"{each['perplexity']:.3f}",
            display.size(each["kv_bytes_a_token"]),
            display.size(each["state_bytes"]),
        ]
        for each in found["prefixes"]
    ]
    display.table(
        "layers in the order of their conversion; each row is a working model",
        ["layer", "alignment before", "after", "KL", "perplexity", "KV a token", "states"],
        rows,
    )
    if found["rank_correlations"]:
        said = {
            name: "undefined: one of them is the same for all layers" if value is None else f"{value:.3f}"
            for name, value in found["rank_correlations"].items()
        }
        display.facts("rank correlations of the layers' measures", said)
