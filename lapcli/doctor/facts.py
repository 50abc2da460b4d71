"""What this machine and its packages are, as plain values: gathered once, judged by `findings`."""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "flash-linear-attention": "fla",
    "fla-core": "fla",
    "tilelang": "tilelang",
    "causal-conv1d": "causal_conv1d",
    "mamba-ssm": "mamba_ssm",
    "flash-qla": "flash_qla",
    "flashinfer-python": "flashinfer",
    "kernels": "kernels",
    "accelerate": "accelerate",
    "peft": "peft",
    "datasets": "datasets",
    "lm-eval": "lm_eval",
    "matplotlib": "matplotlib",
    "safetensors": "safetensors",
}
"""Distributions and the module that each is imported as."""

_COMPILED = ("causal-conv1d", "mamba-ssm")
"""Built against one release of torch, so that importing them tells whether they still fit."""


@dataclass(frozen=True)
class Gpu:
    """One CUDA device.

    Attributes:
        name: as CUDA gives it.
        capability: its compute capability, such as `(9, 0)`.
        memory: bytes.
        free: bytes that are free now.
        shared_memory: bytes of shared memory that one block may have.
        cache: bytes of its last cache.
        processors: streaming multiprocessors.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    free: int
    shared_memory: int
    cache: int
    processors: int


@dataclass(frozen=True)
class Facts:
    """This machine.

    Attributes:
        python: its version.
        system: operating system and architecture.
        cpus: cores that this process may use.
        versions: of the distributions in `PACKAGES` that are installed.
        pinned_triton: the release of triton that torch asks for; `None` for none.
        unusable: distributions that are installed and cannot be imported, with the error.
        torch_cuda: the CUDA release that torch was built with; `None` for a build without.
        torch_hip: likewise of ROCm.
        architectures: that torch has machine code for, such as `sm_90`.
        driver_cuda: the newest CUDA release that the driver knows, as `(13, 0)`; `None` without a driver.
        device_files: whether the operating system shows an NVIDIA GPU.
        cuda_error: why torch cannot use CUDA, where it says so.
        gpus: the devices that torch can use.
        environment: the variables that change what runs, as far as they are set.
        compiler: the C compiler that triton would call; `None` for none.
        cache_folder: where triton keeps what it compiled.
        cache_writable: whether it can.
        tilelang_compiles: whether fla finds the compiler that tilelang needs; `None` where tilelang or fla is missing.
    """

    python: str
    system: str
    cpus: int
    versions: dict[str, str]
    pinned_triton: str | None = None
    unusable: dict[str, str] = field(default_factory=dict)
    torch_cuda: str | None = None
    torch_hip: str | None = None
    architectures: tuple[str, ...] = ()
    driver_cuda: tuple[int, int] | None = None
    device_files: bool = False
    cuda_error: str | None = None
    gpus: tuple[Gpu, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    compiler: str | None = None
    cache_folder: str = ""
    cache_writable: bool = True
    tilelang_compiles: bool | None = None

    def version(self, distribution: str) -> tuple[int, ...] | None:
        """The leading numbers of a distribution's version; `None` where it is not installed."""
        from lapkernels._triton import parse_version

        text = self.versions.get(distribution)
        return None if text is None else parse_version(text)


VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "TRITON_INTERPRET",
    "TRITON_CACHE_DIR",
    "FLA_DISABLE_BACKEND_DISPATCH",
    "FLA_TILELANG",
    "FLA_CACHE_MODE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG",
    "HF_HUB_OFFLINE",
)
"""Environment variables that change which kernels run, or how fast."""


def gather() -> Facts:
    """Look at this machine. Imports torch, and packages that must fit it; runs no kernel."""
    import torch

    gpus, error = _gpus()
    versions = installed()
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path("~/.triton/cache").expanduser())
    return Facts(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cpus=_cpus(),
        versions=versions,
        pinned_triton=_pinned_triton(),
        unusable=_unusable(versions),
        torch_cuda=torch.version.cuda,
        torch_hip=torch.version.hip,
        architectures=tuple(torch.cuda.get_arch_list()) if gpus else (),
        driver_cuda=_driver(),
        device_files=Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists(),
        cuda_error=error,
        gpus=gpus,
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
        compiler=os.environ.get("CC") or next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None),
        cache_folder=str(folder),
        cache_writable=_writable(folder),
        tilelang_compiles=_tilelang_compiles(versions),
    )


def installed() -> dict[str, str]:
    """The versions of the distributions in `PACKAGES` that are there; asks their metadata, imports nothing."""
    found: dict[str, str] = {}
    for distribution, module in PACKAGES.items():
        with suppress(importlib.metadata.PackageNotFoundError):
            found[distribution] = importlib.metadata.version(distribution)
        if distribution not in found and distribution == "triton" and importlib.util.find_spec(module):
            # Builds of torch for some platforms bring it under another name.
            found[distribution] = importlib.import_module(module).__version__
    return found


def _pinned_triton() -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        for text in importlib.metadata.requires("torch") or ():
            if text.startswith("triton=="):
                return text.partition("==")[2].partition(";")[0].strip()
    return None


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _unusable(versions: dict[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for distribution in _COMPILED:
        if distribution in versions:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    importlib.import_module(PACKAGES[distribution])
            except Exception as error:
                found[distribution] = (str(error).strip().splitlines() or [repr(error)])[0]
    return found


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    import torch

    # Of a driver that is too old, torch tells in a warning.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        texts = [str(each.message).strip().splitlines()[0] for each in said]
        return (), next((text for text in texts if "CUDA" in text or "driver" in text), None)
    try:
        return tuple(_gpu(index) for index in range(torch.cuda.device_count())), None
    except RuntimeError as error:
        return (), str(error).strip().splitlines()[0]


def _gpu(index: int) -> Gpu:
    import torch

    properties: Any = torch.cuda.get_device_properties(index)
    return Gpu(
        name=properties.name,
        capability=(properties.major, properties.minor),
        memory=properties.total_memory,
        free=torch.cuda.mem_get_info(index)[0],
        shared_memory=getattr(properties, "shared_memory_per_block_optin", 0),
        cache=getattr(properties, "L2_cache_size", 0),
        processors=properties.multi_processor_count,
    )


def _driver() -> tuple[int, int] | None:
    """The CUDA release that the driver was made for, asked of the driver itself, which torch may not be able to use."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        version = ctypes.c_int(0)
        failed = library.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed or version.value <= 0 else (version.value // 1000, version.value % 1000 // 10)


def _writable(folder: Path) -> bool:
    """Whether a file can be made in a folder, or in the nearest one above it that exists."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _tilelang_compiles(versions: dict[str, str]) -> bool | None:
    if "tilelang" not in versions or not {"fla-core", "flash-linear-attention"} & set(versions):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fla.utils import has_usable_nvcc
    except ImportError:
        return True
    return bool(has_usable_nvcc())
