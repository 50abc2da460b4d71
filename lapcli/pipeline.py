"""The stages in order: what each is called, which command runs it, what it takes and what it leaves.

The command line's help, the documentation's pages and the tests' folders follow these names.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        noun: its name in `lapcli/stages`, `docs/stages`, recipes and tests.
        verb: the command that runs it.
        consumes: what it takes.
        produces: what it leaves in the run directory.
        summary: one line for the help.
    """

    noun: str
    verb: str
    consumes: tuple[str, ...]
    produces: str
    summary: str


STAGES: tuple[Stage, ...] = (
    Stage(
        "calibration",
        "calibrate",
        ("a model", "text"),
        "calibration.safetensors",
        "Measure, on text, what the selectors need to know of each head's keys and queries.",
    ),
    Stage(
        "selection",
        "select",
        ("a calibration",),
        "selection.safetensors",
        "Choose the key/query channels that each head keeps.",
    ),
    Stage(
        "slicing",
        "slice",
        ("a model", "a selection"),
        "sliced/",
        "Cut the dropped channels out of the weights and write the smaller model.",
    ),
    Stage(
        "recovery",
        "recover",
        ("a sliced model", "its teacher", "text"),
        "recovered/",
        "Heal a pruned model by LoRA and distillation from the model it was pruned from.",
    ),
    Stage(
        "evaluation",
        "eval",
        ("models", "tasks"),
        "evaluation.json",
        "Measure models on tasks, side by side.",
    ),
)


def stage(verb: str) -> Stage:
    """The stage that a command runs."""
    return next(found for found in STAGES if found.verb == verb)
