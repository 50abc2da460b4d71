"""What every command begins with: the model it means, and the settings that its options spell."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapcli.errors import ArtifactError, ModelError, UsageError

if TYPE_CHECKING:
    import torch

    from lapcli.artifacts import RunDirectory
    from lapcli.families.source import ModelSource
    from lapcli.machine import Machine
    from lapcli.recipe import CalibrationSettings, Model


def run_directory(path: Path) -> "RunDirectory":
    """The run directory of a command.

    Raises:
        ArtifactError: it is the directory of a conversion, which holds nothing else.
    """
    from lapcli.artifacts import RunDirectory, is_conversion, taken

    if is_conversion(path):
        raise taken(path, "name a directory of its own with --run")
    return RunDirectory(path)


def base_model(model: str | None, run: "RunDirectory") -> "ModelSource":
    """The model that was named; otherwise the run's, otherwise the shipped one.

    Raises:
        ArtifactError: the run's model has changed since.
        ModelError: there is no such model.
    """
    from lapcli.families.source import DEFAULT_MODEL, resolve_model

    record = run.read_record() if model is None else None
    if record is None:
        return resolve_model(model or DEFAULT_MODEL)
    noted = record["model"]
    source = resolve_model(noted["name"], noted.get("revision"))
    if source.digest != noted["digest"]:
        raise ArtifactError(
            f"{noted['name']} has changed since {run.path} was made "
            f"({noted['digest'][:12]} then, {source.digest[:12]} now)",
            "name the model and pass another --run DIR",
        )
    return source


def last_model(model: str | None, run: "RunDirectory") -> "ModelSource":
    """The model that was named, else the last one that the run made, else the shipped one.

    Raises:
        ArtifactError: the run's model has changed since.
        ModelError: there is no such model.
    """
    from lapcli.families.source import resolve_model

    if model is None:
        made = next((folder for folder in (run.recovered, run.sliced) if folder.is_dir()), None)
        if made is not None:
            return resolve_model(str(made))
    return base_model(model, run)


def prompt_kernel(kernel: str) -> str:
    """What of `--kernel` is for the prompts of a model that is decoded.

    Raises:
        UsageError: it is none.
    """
    from lapcli.runtime.engine import KERNELS, prefill_kernel

    if kernel not in KERNELS:
        raise UsageError(f"--kernel {kernel!r} is none of {', '.join(KERNELS)}")
    return prefill_kernel(kernel)


def refuse_steps(machine: "Machine", source: "ModelSource") -> None:
    """Refuse at once what would keep an engine from decoding a model as it is asked to, and no loading could mend.

    Raises:
        ModelError: a kernel cannot run here; or fast ones are required, and the steps would run on a CPU.
        UsageError: a device, dtype or kernel is none.
    """
    machine.check(source.config)
    if machine.require_fast and machine.torch_device().type == "cpu":
        raise ModelError(
            "--require-fast: the steps would run in PyTorch, on a CPU", "use a CUDA device, or drop --require-fast"
        )


def state_dtype(name: str) -> "torch.dtype":
    """The dtype of recurrent states that `--state-dtype` names.

    Raises:
        UsageError: it is none of those.
    """
    import torch

    known = {"float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
    if name not in known:
        raise UsageError(f"--state-dtype {name!r}: float32 or bfloat16")
    return known[name]


def named_models(model: str, baseline: str | None) -> "list[tuple[str, ModelSource]]":
    """Label and source of a model that was named, after those of what it is compared with, if anything.

    Raises:
        ModelError: there is no such model.
    """
    from lapcli.families.source import resolve_model

    named = {"base": baseline, "model": model}
    return [(label, resolve_model(name)) for label, name in named.items() if name is not None]


def refuse_within(output: Path | None, source: "ModelSource") -> None:
    """Refuse a directory that was named for a new model and lies in another's own: it would be taken for a part of it.

    A run directory may: whoever works in a model's directory has it there.

    Raises:
        ModelError: naming both.
    """
    if output is not None and source.path.resolve() in output.resolve().parents:
        raise ModelError(
            f"{output} lies in the directory of {source.name}; a model made from it needs another", "pass --output DIR"
        )


def loading(folder: Path) -> str:
    """A line for the end of what a command says of a model directory that transformers does not load by itself."""
    from lapcli.families.source import resolve_model

    remark = resolve_model(str(folder)).loading
    return "" if remark is None else f"\n{remark}"


def fitting_length(source: "ModelSource", wanted: int) -> int:
    """So many tokens of a sequence, or what the model was made for where that is less."""
    from lapcli.families.packed import longest_sequence

    longest = longest_sequence(source.config)
    return wanted if longest is None else min(wanted, longest)


def whole_numbers(option: str, text: str) -> list[int]:
    """What an option holds that takes several numbers with commas.

    Raises:
        UsageError: it holds something else.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        example = "seeds, for example 0,1,2" if option == "seed" else "for example 512,1024"
        raise UsageError(f"--{option} {text!r} is no list of whole numbers", example) from error


def from_command_line(model: "type[Model]", values: dict[str, Any], names: Mapping[str, str] | None = None) -> "Model":
    """Settings from options.

    Args:
        model: the settings.
        values: by the settings' names.
        names: of options that are called otherwise.

    Raises:
        UsageError: a value does not fit.
    """
    from lapcli.recipe import SettingsError, validate

    try:
        return validate(model, values, "option")
    except SettingsError as error:
        if len(error.fields) != 1:
            # Of several together, some of which may be no options; what is wrong says their names.
            raise UsageError(error.complaint.partition(" (found ")[0], error.hint) from error
        # Of a list the number of the item says nothing that its value does not.
        (field,) = error.fields
        field = field.partition(".")[0]
        option = (names or {}).get(field, field).replace("_", "-")
        raise UsageError(f"--{option}: {error.complaint}", error.hint) from error


def calibration_settings(
    source: "ModelSource",
    *,
    data: str | None,
    samples: int | None,
    seq_len: int | None,
    seed: int,
    rows: int | None = None,
    normalized: bool = False,
    exact: bool = False,
) -> "CalibrationSettings":
    """Calibration settings from options, with the model's defaults.

    Raises:
        UsageError: a value does not fit.
    """
    from lapcli.recipe import CalibrationSettings, default_calibration
    from lapcli.stages.lineage import made_of_a_demo

    given: dict[str, Any] = {"data": data, "samples": samples, "seq_len": seq_len}
    defaults = default_calibration(made_of_a_demo(source))
    defaults["seq_len"] = fitting_length(source, defaults["seq_len"])
    values = defaults | {key: value for key, value in given.items() if value is not None}
    values |= {"seed": seed, "rows": rows, "normalized": normalized, "exact": exact}
    return from_command_line(CalibrationSettings, values)
