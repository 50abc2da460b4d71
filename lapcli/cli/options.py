"""Options that several commands share, written once."""

from pathlib import Path
from typing import Annotated

import typer

from lapcli.errors import UsageError

_METHOD = "What the numbers depend on"
_MACHINE = "This machine"
_OUTPUT = "Output"

Model = Annotated[
    str | None, typer.Argument(help="A directory, a hub id, or demo:NAME. Default: the run's, else demo:gdn.")
]
Run = Annotated[Path, typer.Option("--run", help="Run directory: inputs are found there, results left there.")]
Device = Annotated[
    str,
    typer.Option(
        help="auto, cpu, cuda, cuda:N; calibrate and prune: split, over all GPUs, then memory, then disk.",
        rich_help_panel=_MACHINE,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="auto (fp32 on a CPU, the checkpoint's on a GPU), float32, bfloat16, …", rich_help_panel=_MACHINE
    ),
]
Kernel = Annotated[
    str, typer.Option(help="Delta-rule kernel: auto, reference, chunked, triton, fla.", rich_help_panel=_MACHINE)
]
RequireFast = Annotated[
    bool, typer.Option("--require-fast", help="Fail when no fast kernel can run.", rich_help_panel=_MACHINE)
]
DecodeKernel = Annotated[
    str,
    typer.Option(
        help="auto; reference, triton: the step of the state; chunked, fla: the prompts.", rich_help_panel=_MACHINE
    ),
]
StateDtype = Annotated[
    str, typer.Option(help="Of recurrent states: float32, or bfloat16, half of it.", rich_help_panel=_MACHINE)
]
Gpus = Annotated[
    int | None,
    typer.Option(help="Processes to start, a GPU each (with --device cpu: on the CPU).", rich_help_panel=_MACHINE),
]
MicroBatch = Annotated[
    int | None,
    typer.Option(
        help="Sequences that a GPU computes at once. Default: about 8192 tokens.", rich_help_panel=_MACHINE, min=1
    ),
]
GradientCheckpointing = Annotated[
    bool,
    typer.Option(
        "--gradient-checkpointing",
        help="Compute blocks again in the backward pass instead of keeping their activations.",
        rich_help_panel=_MACHINE,
    ),
]
ValidateEvery = Annotated[int, typer.Option(help="Steps between two validations.", rich_help_panel=_MACHINE, min=1)]
SaveEvery = Annotated[int, typer.Option(help="Steps between two checkpoints.", rich_help_panel=_MACHINE, min=1)]
Trackers = Annotated[
    list[str] | None,
    typer.Option(help="Show the curve in tensorboard or wandb too.", rich_help_panel=_OUTPUT),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that a model brings along.", rich_help_panel=_MACHINE)
]
Compat = Annotated[
    str | None,
    typer.Option(
        help="Q-Delta: released, for what its released kernels compute (docs/q-delta.md). Default: as its config says.",
        rich_help_panel=_METHOD,
    ),
]


def _seed(value: int) -> int:
    from lapcli.recipe import SEEDS

    if not 0 <= value < SEEDS:
        raise UsageError(f"--seed {value}: a whole number from 0 to {SEEDS - 1}")
    return value


Seed = Annotated[int, typer.Option(help="Seed of every random choice.", rich_help_panel=_METHOD, callback=_seed)]
Json = Annotated[bool, typer.Option("--json", help="Result as JSON on stdout, alone.", rich_help_panel=_OUTPUT)]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Say what would be read, written and refused; do nothing.", rich_help_panel=_OUTPUT),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no notices.", rich_help_panel=_OUTPUT)]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace results of other settings.", rich_help_panel=_OUTPUT)
]

Baseline = Annotated[
    str | None, typer.Option(help="What it is compared with. Default: the run's base model, or none with --model.")
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Text: builtin, recall, a text/JSONL/parquet file or folder, a hub set (fineweb, wikitext, pg19, pile), "
        "or a mixture a:0.9,b:0.1. Default: builtin for demo models and what was made of them, fineweb otherwise.",
        rich_help_panel=_METHOD,
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(help="Token sequences. Default: 64 for demo models, 128 otherwise.", rich_help_panel=_METHOD),
]
SeqLen = Annotated[
    int | None,
    typer.Option(
        help="Tokens a sequence. Default: 1024 for demo models, 2048 otherwise, or what the model takes.",
        rich_help_panel=_METHOD,
    ),
]
Method = Annotated[
    str,
    typer.Option(help="Selector: drrqr, grad, s-wanda, l1, rand; experimental: pca.", rich_help_panel=_METHOD),
]
Ratio = Annotated[
    str | None,
    typer.Option(
        help="Fraction of the key width to remove, in (0, 1). Default: 0.5, unless --keep.", rich_help_panel=_METHOD
    ),
]
Keep = Annotated[int | None, typer.Option(help="Key width to keep, instead of --ratio.", rich_help_panel=_METHOD)]
ScoreFrom = Annotated[
    str,
    typer.Option(help="Decide from: both, key, query. The kept set always holds for both.", rich_help_panel=_METHOD),
]
Align = Annotated[
    int | None,
    typer.Option(
        help="Kept width is a multiple of this. Default: 16 for K >= 64, 8 for K >= 32, else 1.",
        rich_help_panel=_METHOD,
    ),
]
Tolerance = Annotated[
    float, typer.Option("--f", help="drrqr: no swap may gain more volume than this factor.", rich_help_panel=_METHOD)
]

DEFAULT_RUN = Path("lapcli-run")
DEFAULT_RATIO = "0.5"


def run_flag(path: Path) -> str:
    """What a suggested command needs to find the same run."""
    return "" if path == DEFAULT_RUN else f" --run {path}"


def check_sharding(sharding: str) -> None:
    """Refuse a `--sharding` that there is not."""
    if sharding not in ("none", "fsdp"):
        raise UsageError(f"--sharding {sharding!r} is none of none, fsdp")
