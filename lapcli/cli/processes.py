"""What `--gpus` asks for, checked before anything is started; and the start."""

import sys


def check_processes(
    gpus: int | None,
    device: str,
    batch: int | None = None,
    *,
    option: str = "--batch-size",
    samples: int | None = None,
) -> None:
    """Refuse a number of processes that cannot be.

    Args:
        gpus: as asked for; `None` for one process.
        device: of the command.
        batch: sequences of a step, which each process takes as many of.
        option: that sets them.
        samples: sequences in all, of which each process takes one at least.

    Raises:
        UsageError: there are fewer devices, or they cannot share the sequences.
    """
    import torch

    from lapcli.errors import UsageError
    from lapcli.parallel import launched

    if gpus is None or launched():
        return
    if gpus < 1:
        raise UsageError(f"--gpus is {gpus}; it should be at least 1")
    if batch is not None and batch % gpus:
        raise UsageError(f"{option} {batch} cannot be shared by {gpus} processes", f"make it a multiple of {gpus}")
    if samples is not None and gpus > samples:
        raise UsageError(
            f"--gpus {gpus}: so many processes cannot share {samples} samples", f"--gpus {samples} at most"
        )
    count = torch.cuda.device_count()
    if device != "cpu" and gpus > count:
        raise UsageError(
            f"--gpus is {gpus}, but there are {count} CUDA devices here",
            f"pass --gpus {count}" if count else "leave --gpus out, or pass --device cpu too for processes on the CPU",
        )
    if gpus > 1 and device not in ("auto", "cuda", "cpu"):
        raise UsageError(f"--device {device}: each of {gpus} processes takes a GPU of its own", "leave --device out")


def in_several(gpus: int | None) -> bool:
    """Run this very command in so many processes, if there are to be several and this is not one of them.

    Returns:
        Whether they ran, and ended well.

    Raises:
        SystemExit: they did not end well; whichever failed has said why.
    """
    from lapcli.parallel import launched

    if gpus is None or gpus < 2 or launched():
        return False
    from lapcli.launching import launch

    code = launch(sys.argv[1:], gpus)
    if code:
        raise SystemExit(code)
    return True
