"""`lapcli plan`: what a ratio means for a model, before any work and from headers alone."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lapcli.cli import options

if TYPE_CHECKING:
    from lapcli.stages.planning import Change, Plan

_SERVING = "How it is served"
_VERDICTS = ("lost", "takes it", "gained", "never took it", "not checked")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "plan",
        help="Say what a ratio means for a model: widths, bytes, sequences that fit, kernels that take it. Reads "
        "headers only.",
    )(run)


def run(
    model: options.Model = None,
    ratio: options.Ratio = None,
    keep: options.Keep = None,
    align: options.Align = None,
    memory: Annotated[
        str, typer.Option(help="Memory of one device, with its unit: 80GiB, 80GB.", rich_help_panel=_SERVING)
    ] = "80GiB",
    tp: Annotated[
        int, typer.Option("--tp", help="Tensor-parallel devices; they must divide the heads.", rich_help_panel=_SERVING)
    ] = 1,
    state_dtype: Annotated[
        str, typer.Option(help="What engines keep states in: fp32, bf16.", rich_help_panel=_SERVING)
    ] = "fp32",
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens whose KV cache each sequence of a hybrid holds. Default: 4096, or what the model takes.",
            rich_help_panel=_SERVING,
        ),
    ] = None,
    run_path: options.Run = options.DEFAULT_RUN,
    as_json: options.Json = False,
) -> None:
    """Print the plan; nothing is read but headers, and torch is not imported."""
    from lapcli.cli import context as beginning
    from lapcli.cli import display
    from lapcli.families.source import DEFAULT_MODEL
    from lapcli.stages.planning import plan_ratio
    from lapcli.stages.planning_source import headers_of

    record = beginning.run_directory(run_path).read_record() if model is None else None
    noted = {"name": model or DEFAULT_MODEL, "revision": None} if record is None else record["model"]
    if ratio is None and keep is None:
        ratio = options.DEFAULT_RATIO
    plan = plan_ratio(
        headers_of(noted["name"], noted.get("revision")),
        ratio=ratio,
        keep=keep,
        align=align,
        memory=memory,
        devices=tp,
        state_dtype=state_dtype,
        context=context,
    )
    if as_json:
        display.emit(plan.document())
        return
    _show(plan)


def _show(plan: "Plan") -> None:
    from lapcli.cli import display

    display.facts(f"{plan.model} ({plan.family})", _width_facts(plan))
    columns = ["layers", "", "key heads", "value heads", "K -> K'", "V", "state", "convolution"]
    rows = [
        [
            ranges(row.layers),
            f"{len(row.layers)} x",
            str(row.key_heads),
            str(row.value_heads),
            f"{row.key_width} -> {row.kept_width}",
            str(row.value_width),
            _change(row.state_bytes),
            _change(row.convolution_bytes),
        ]
        for row in plan.rows
    ]
    total = ["all", f"{sum(len(row.layers) for row in plan.rows)} x", "", "", "", ""]
    rows.append([*total, _change(plan.state_bytes), _change(plan.convolution_bytes)])
    display.table(f"bytes of one sequence, state in {plan.state_dtype}", columns, rows)
    display.facts("serving", _serving_facts(plan))
    if plan.kernels:
        _show_kernels(plan)
    else:
        display.closing(f"kernels: none were checked for the family {plan.family}")
    asked = f"--keep {plan.width.width}" if plan.width.asked is None else f"--ratio {plan.width.asked}"
    given = "" if plan.width.asked is None else f" --align {plan.width.align}"
    display.closing(f"next: lapcli prune {plan.model} {asked}{given}")


def _width_facts(plan: "Plan") -> dict[str, Any]:
    from lapcli.cli.display import size

    width = plan.width
    found: dict[str, Any] = {"kept width": str(width)}
    if plan.unaligned is not None and plan.unaligned != width.width:
        more = plan.alignment_bytes > 0
        found["alignment"] = (
            f"the ratio alone keeps {plan.unaligned}, a multiple of {width.align} is {width.width}: "
            f"{size(abs(plan.alignment_bytes))} of state a sequence "
            f"{'given up beyond what was asked for' if more else 'kept in excess of what was asked for'}"
        )
    if plan.pruned_before is not None:
        then = plan.pruned_before["key_width"]
        of = "" if then is None else f" with its {then} channels a head"
        found["pruned before"] = (
            f"from {plan.pruned_before['model']}{of}; the ratio is of the {width.original} that are there now"
        )
    found["weights"] = f"{_change(plan.weight_bytes)} ({plan.cut_tensors} tensors cut)"
    if plan.mtp is not None:
        found["MTP head"] = mtp_in_words(plan.mtp)
    return found


def mtp_in_words(mtp: str) -> str:
    """What becomes of a head that predicts further tokens, for a person."""
    return mtp + (" (it keeps a state of its own)" if mtp == "dropped" else "")


def _serving_facts(plan: "Plan") -> dict[str, Any]:
    from lapcli.cli.display import size

    place, found = plan.concurrency, {}
    devices = "one device" if place.devices == 1 else f"{place.devices} devices"
    found["memory"] = f"{size(place.memory)} on {devices}, nothing kept back for activations"
    cache = plan.cache
    if cache is not None and cache.bytes_per_token is None:
        found["KV cache"] = cache.note
    elif cache is not None and cache.bytes_per_token is not None:
        counted = f"{place.context} tokens counted" if place.context else "not counted (--context 0)"
        found["KV cache"] = f"{size(cache.bytes_per_token)} a token ({cache.note}); {counted}"
    found["a sequence"] = f"{_change(place.sequence_bytes)} in all"
    if place.ratio is None:
        found["sequences that fit"] = f"{place.before} -> {place.after}"
    else:
        found["sequences that fit"] = f"{place.before} -> {place.after} ({place.ratio:.2f}x)"
    if place.before == 0:
        found["sequences that fit"] += f"; the weights alone take {size(plan.weight_bytes.before)}"
    if place.devices > 1:
        heads = ", ".join(f"{key} key and {value} value heads" for key, value in plan.heads_per_device)
        found["a device holds"] = heads + (", the one group on each" if plan.replicated else "")
    return found


def _show_kernels(plan: "Plan") -> None:
    from lapcli.cli import display
    from lapcli.stages.kernel_table import READ

    ranked = sorted(plan.kernels, key=lambda row: _VERDICTS.index(row["verdict"]))
    notes = [row["note"] for row in ranked if row["note"] and row["verdict"] != "never took it"]
    numbers = {note: number for number, note in enumerate(dict.fromkeys(notes), 1)}

    def verdict(row: dict[str, Any]) -> str:
        return row["verdict"] + (f" [{numbers[row['note']]}]" if row["note"] in numbers else "")

    rows = [[row["kernel"], row["phase"], row["widths"] or "", verdict(row)] for row in ranked]
    display.table(
        f"kernels of {plan.operator}, by shape alone, from sources read on {READ}",
        ["kernel", "runs in", "takes", "with this width"],
        rows,
        text_columns=4,
    )
    for note, number in numbers.items():
        display.closing(f"  [{number}] {note}")


def ranges(numbers: Sequence[int]) -> str:
    """Layer numbers, consecutive ones as a range: 0-2, 4-6."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _change(change: "Change") -> str:
    from lapcli.cli.display import size

    return f"{size(change.before)} -> {size(change.after)}"
