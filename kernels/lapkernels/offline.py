"""Compile kernels for a GPU that need not be there, and read what the machine code takes of it.

Registers, spills and shared memory decide whether a configuration can be launched and how many programs share a
multiprocessor; the assembler knows all of it without a device. A process that has called `compile_only` launches
nothing any more, so give it one of its own.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Resources(NamedTuple):
    """What one compiled kernel takes.

    Attributes:
        registers: of a thread.
        spilled: bytes of a thread that did not fit its registers.
        shared: bytes of shared memory of a program.
        warps: of a program.
    """

    registers: int
    spilled: int
    shared: int
    warps: int

    def programs(self, registers: int = 65536, shared: int = 228 * 1024) -> int:
        """How many programs a multiprocessor with so many registers and bytes can hold at once; Hopper's by default."""
        # Registers are given out by 256 a warp, and each program has 1 KiB of shared memory for the system.
        by_registers = registers // (self.warps * -(-self.registers * 32 // 256) * 256)
        return min(32, 64 // self.warps, by_registers, shared // (self.shared + 1024))


def compile_only(capability: int) -> list[Any]:
    """From now on, launching a triton kernel in this process compiles it, for the capability given, and does no more.

    What was compiled lies in triton's cache, where a process that launches the same kernel finds it. Operands may lie
    on the CPU.

    Args:
        capability: of the GPU, such as 90 for Hopper.

    Returns:
        A list to which every launch from now on appends its compiled kernel.

    Raises:
        RuntimeError: kernels are interpreted in this process.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from lapkernels._triton import is_interpreted, set_compiling_only

    if is_interpreted():
        raise RuntimeError("TRITON_INTERPRET=1: nothing is compiled where kernels are interpreted; unset it")

    class Absent:
        """A driver for a device that is not there."""

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    set_compiling_only(capability)
    driver.set_active(Absent())  # pyright: ignore[reportArgumentType] -- of a driver's methods, compiling asks for these
    compiled: list[Any] = []
    run: Any = JITFunction.run

    def compile_alone(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append(kernel)
        return kernel

    JITFunction.run = compile_alone
    return compiled


def resources(kernel: Any) -> Resources:
    """What a compiled kernel takes, by the tool that comes with triton.

    Raises:
        RuntimeError: the tool cannot read the kernel.
    """
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(kernel.asm["cubin"])
    try:
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=False)
    finally:
        os.unlink(file.name)
    found = {name: re.search(rf"{name}:(\d+)", done.stdout) for name in ("REG", "STACK")}
    if found["REG"] is None or found["STACK"] is None:
        raise RuntimeError(f"{tool.name} says nothing of registers: {done.stdout}{done.stderr}")
    return Resources(int(found["REG"][1]), int(found["STACK"][1]), kernel.metadata.shared, kernel.metadata.num_warps)
