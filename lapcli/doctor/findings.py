"""What is known to go wrong with such a machine and such packages. Rules only: nothing is run, nothing is imported.

Each rule states where it was learned: this project's own runs, or the source that is named.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from lapcli.doctor.facts import Facts

Level = Literal["wrong", "slow", "note"]
"""`wrong`: what will be used fails or errs; `slow`: it is right, and slower than it need be; `note`: neither."""

PYTHON, TORCH, TRITON, TRANSFORMERS, FLA, TILELANG = (3, 11), (2, 10), (3, 5), (5, 10), (0, 6), (0, 1, 15)
"""The oldest releases that lapcli supports."""
HOPPER, AMPERE = (9, 0), (8, 0)
FLA_WRONG_ON_HOPPER = ((3, 4), (3, 7, 1))
"""From this triton on, up to that one, fla's gated backward pass errs on Hopper (fla issue 640)."""
_MEMORY_IN_USE = 0.2
_SLOW_SHARE = 0.6

_NEEDED_BY = {
    "datasets": "hub data sets (`--data fineweb`) and lm-eval",
    "lm-eval": "`lapcli eval` on lm-eval's tasks",
    "peft": "`lapcli recover`",
    "matplotlib": "pictures of `analyze`, `recover`, `report` and `bench`",
}


@dataclass(frozen=True)
class Finding:
    """Something that a user should know.

    Attributes:
        level: how bad it is.
        what: the thing, what was found and what was wanted.
        remedy: what to do; empty where there is nothing to do.
    """

    level: Level
    what: str
    remedy: str = ""


def findings(facts: Facts) -> list[Finding]:
    """All that is known to go wrong here, the worst first."""
    found = [finding for rule in RULES for finding in rule(facts)]
    order = {"wrong": 0, "slow": 1, "note": 2}
    return sorted(found, key=lambda finding: order[finding.level])


def _too_old(facts: Facts) -> Iterator[Finding]:
    from lapkernels._triton import parse_version

    if parse_version(facts.python) < PYTHON:
        yield Finding("wrong", f"Python {facts.python}; lapcli needs 3.11 or newer", "make a newer environment")
    for name, oldest in (
        ("torch", TORCH), ("triton", TRITON), ("transformers", TRANSFORMERS), ("fla-core", FLA), ("tilelang", TILELANG),
    ):  # fmt: skip
        version = facts.version(name)
        if version is not None and version < oldest:
            wanted = ".".join(map(str, oldest))
            yield Finding(
                "wrong", f"{name} {facts.versions[name]}; lapcli needs {wanted}", f"pip install '{name}>={wanted}'"
            )


def _halves_of_fla(facts: Facts) -> Iterator[Finding]:
    core, whole = facts.versions.get("fla-core"), facts.versions.get("flash-linear-attention")
    if whole is not None and core != whole:
        yield Finding(
            "wrong",
            f"flash-linear-attention {whole} beside fla-core {core}: two halves of one package",
            f"pip install fla-core=={whole}",
        )


def _no_cuda(facts: Facts) -> Iterator[Finding]:
    if facts.gpus or not (facts.device_files or facts.driver_cuda):
        return
    built, driver = facts.torch_cuda, facts.driver_cuda
    hidden = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if built is None and facts.torch_hip is None:
        yield Finding(
            "slow",
            f"there is an NVIDIA GPU here, and torch {facts.versions.get('torch')} was built without CUDA",
            "install a CUDA build of torch (https://pytorch.org/get-started/locally)",
        )
    elif hidden is not None and hidden.strip() in ("", "-1"):
        yield Finding("note", f"CUDA_VISIBLE_DEVICES={hidden!r} hides the GPU", "unset it to use the GPU")
    elif driver is not None and built is not None and driver < tuple(map(int, built.split(".")[:2])):
        yield Finding(
            "wrong",
            f"the driver knows CUDA up to {driver[0]}.{driver[1]}, and torch was built with {built}",
            f"install a newer driver, or a build of torch for CUDA {driver[0]}.{driver[1]} or older",
        )
    else:
        said = facts.cuda_error or "it does not say why"
        yield Finding("wrong", f"there is an NVIDIA GPU here that torch cannot use: {said}", "look at `nvidia-smi`")


def _no_machine_code(facts: Facts) -> Iterator[Finding]:
    """A build of torch for newer GPUs only: the first kernel fails with "no kernel image is available"."""
    codes = [int(code.rpartition("_")[2].rstrip("abcdefgh")) for code in facts.architectures if code.startswith("sm_")]
    for gpu in facts.gpus:
        own = gpu.capability[0] * 10 + gpu.capability[1]
        # Machine code runs on later GPUs of its major version.
        if codes and not any(code <= own and code // 10 == own // 10 for code in codes):
            ahead = any(code.startswith("compute_") for code in facts.architectures) and own > max(codes)
            if not ahead:
                yield Finding(
                    "wrong",
                    f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}; this torch has code "
                    f"for {', '.join(facts.architectures)}",
                    "install a build of torch that names it",
                )


def _mixed_gpus(facts: Facts) -> Iterator[Finding]:
    names = sorted({gpu.name for gpu in facts.gpus})
    if len(names) > 1:
        yield Finding(
            "note",
            f"unlike GPUs: {', '.join(names)}; kernels were checked on the first",
            "check each with --device cuda:N",
        )


def _gpu_in_use(facts: Facts) -> Iterator[Finding]:
    for number, gpu in enumerate(facts.gpus):
        if gpu.free < (1 - _MEMORY_IN_USE) * gpu.memory:
            yield Finding(
                "note",
                f"cuda:{number} has {gpu.free / 2**30:.1f} of {gpu.memory / 2**30:.1f} GiB free: others use it, and "
                "its rates are theirs too",
                "look at `nvidia-smi`",
            )


def _triton(facts: Facts) -> Iterator[Finding]:
    if not facts.gpus:
        return
    if facts.version("triton") is None:
        yield Finding("slow", "triton is not installed: no fused kernel runs, nor fla's", "pip install triton")
        return
    if facts.compiler is None:
        yield Finding(
            "wrong", "triton builds its launchers with a C compiler, and there is none", "install gcc, or set CC"
        )
    if not facts.cache_writable:
        yield Finding(
            "wrong",
            f"triton keeps what it compiled in {facts.cache_folder}, which cannot be written",
            "set TRITON_CACHE_DIR to a folder that can",
        )
    if facts.environment.get("TRITON_INTERPRET") == "1":
        yield Finding(
            "wrong",
            "TRITON_INTERPRET=1: kernels are interpreted on the CPU, and products of bf16 there are wrong (triton "
            "issue 11584)",
            "unset TRITON_INTERPRET",
        )


def _fla_on_hopper(facts: Facts) -> Iterator[Finding]:
    version, fla = facts.version("triton"), facts.version("fla-core")
    hopper = any(gpu.capability == HOPPER for gpu in facts.gpus)
    first, mended = FLA_WRONG_ON_HOPPER
    if fla is None or version is None or not hopper or not first <= version < mended:
        return
    broken = f"fla's gated backward pass is wrong on Hopper with triton {facts.versions['triton']} (fla issue 640)"
    spared = (
        "lapcli trains by PyTorch's forms instead, which take longer; GLA, KDA, GDN-2 and DeltaProduct, which fla "
        "alone runs, cannot be trained"
    )
    mend = "pip install 'tilelang>=0.1.15', or 'triton>=3.7.1' with a torch that takes it"
    if "tilelang" not in facts.versions:
        yield Finding("slow", f"{broken}; {spared}", mend)
    elif facts.environment.get("FLA_TILELANG") == "0" or facts.environment.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        yield Finding(
            "slow",
            f"{broken}; tilelang would mend it, and is switched off",
            "unset FLA_TILELANG and FLA_DISABLE_BACKEND_DISPATCH",
        )
    elif facts.tilelang_compiles is False:
        yield Finding("slow", f"{broken}; tilelang would mend it, and finds no nvcc", "install the CUDA toolkit's nvcc")


def _fla_without_gpu(facts: Facts) -> Iterator[Finding]:
    """In transformers fla is bound at import, whatever the device; lapcli puts its PyTorch functions back."""
    if not facts.gpus and facts.version("fla-core") is not None:
        yield Finding(
            "note",
            "fla is installed and there is no GPU: transformers' own Qwen3-Next, Qwen3.5 and OLMo-Hybrid die with '0 "
            "active drivers' here. lapcli runs them all the same, on the PyTorch path; your scripts may not",
            "pip uninstall flash-linear-attention fla-core, where scripts of yours need these models",
        )


def _no_fla(facts: Facts) -> Iterator[Finding]:
    if facts.gpus and facts.version("fla-core") is None:
        yield Finding(
            "slow",
            "fla is not installed: prefill and training run PyTorch's chunked form, and GLA, KDA, GDN-2 and "
            "DeltaProduct do not run at all",
            "pip install 'lapcli[gpu]'",
        )


def _slow_stock_models(facts: Facts) -> Iterator[Finding]:
    missing = [name for name in ("causal-conv1d", "mamba-ssm") if name not in facts.versions]
    if facts.gpus and missing:
        yield Finding(
            "note",
            f"{' and '.join(missing)} not installed: transformers' Mamba-2 family runs PyTorch functions in prefill "
            "and training (lapcli's decode steps need neither)",
            f"pip install --no-build-isolation {' '.join(missing)}",
        )


def _unusable(facts: Facts) -> Iterator[Finding]:
    for name, error in facts.unusable.items():
        yield Finding(
            "wrong" if facts.gpus else "note",
            f"{name} {facts.versions.get(name)} cannot be imported: {error}",
            f"pip install --force-reinstall --no-build-isolation --no-deps {name}, or pip uninstall {name}",
        )


def _hub_kernels(facts: Facts) -> Iterator[Finding]:
    if "kernels" in facts.versions:
        yield Finding(
            "note",
            f"kernels {facts.versions['kernels']} is installed: transformers may fetch kernels from the hub when it "
            "builds a model",
            "set HF_HUB_OFFLINE=1 where there is no network",
        )


def _blocking(facts: Facts) -> Iterator[Finding]:
    if facts.gpus and facts.environment.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield Finding(
            "slow", "CUDA_LAUNCH_BLOCKING=1: the CPU waits for each kernel", "unset it, unless you look for a crash"
        )


def _torchs_own_triton(facts: Facts) -> Iterator[Finding]:
    found, pinned = facts.versions.get("triton"), facts.pinned_triton
    if found is not None and pinned is not None and pinned != found:
        yield Finding(
            "note",
            f"torch {facts.versions.get('torch')} was released with triton {pinned}, and {found} is installed: "
            "`torch.compile` may fail",
        )


def _old_gpu(facts: Facts) -> Iterator[Finding]:
    old = sorted({gpu.name for gpu in facts.gpus if gpu.capability < AMPERE})
    if old:
        yield Finding(
            "slow", f"{', '.join(old)} has no bf16 products, which `--dtype auto` takes", "pass --dtype float16"
        )


def _missing(facts: Facts) -> Iterator[Finding]:
    for name, use in _NEEDED_BY.items():
        if name not in facts.versions:
            yield Finding("note", f"{name} is not installed; it is needed by {use}", f"pip install {name}")


RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _too_old,
    _halves_of_fla,
    _no_cuda,
    _no_machine_code,
    _unusable,
    _triton,
    _fla_on_hopper,
    _no_fla,
    _old_gpu,
    _blocking,
    _fla_without_gpu,
    _slow_stock_models,
    _mixed_gpus,
    _gpu_in_use,
    _hub_kernels,
    _torchs_own_triton,
    _missing,
)
"""All rules."""


def rate_findings(name: str, bandwidth: float, products: float) -> list[Finding]:
    """What two measured rates say of a chip whose data sheet is known.

    Args:
        name: of the chip.
        bandwidth: bytes a second of a copy.
        products: floating-point operations a second of a bf16 product.
    """
    from lapcli.benchmarks.chips import NOMINAL_BANDWIDTH, NOMINAL_FLOPS

    found: list[Finding] = []
    for what, measured, sheet in (
        ("copies move", bandwidth, NOMINAL_BANDWIDTH.get(name)),
        ("products reach", products, NOMINAL_FLOPS.get(name)),
    ):
        if sheet is not None and measured < _SLOW_SHARE * sheet:
            found.append(
                Finding(
                    "slow",
                    f"{what} {measured / sheet:.0%} of the data sheet's rate: another process uses the GPU, or its "
                    "power or clocks are held down",
                    "look at `nvidia-smi -q -d PERFORMANCE,CLOCK`",
                )
            )
    return found
