"""What a task was asked with, as one digest: under equal digests one model gives equal numbers.

With it an evaluation that was stopped goes on where it was, and one that is repeated does no work. Data is named by its
content where it is a file, and by names, sizes and times of its files where it is a folder; data of the hub is named by
the task alone.
"""

import hashlib
from pathlib import Path
from typing import Any

from lapcli.artifacts.digest import digest_document, digest_file
from lapcli.errors import DataError
from lapcli.evaluation.local_data import find_local
from lapcli.evaluation.settings import EvaluationOptions, EvaluationSettings
from lapcli.evaluation.tasks import TEXT_PREFIX, TaskInfo


def request_digest(
    info: TaskInfo,
    settings: EvaluationSettings,
    options: EvaluationOptions,
    max_length: int,
    versions: dict[str, str],
    tokenizer: str,
) -> str:
    """SHA-256 (hexadecimal) of everything that a task's numbers depend on, but the weights, their dtype and the kernel.

    Args:
        info: the task.
        settings: those that this kind of task reads enter.
        options: where its data is looked for.
        max_length: tokens of a window, as resolved.
        versions: of the programs that take part, and the kind of device.
        tokenizer: digest of the model's tokenizer.

    Raises:
        DataError: a file of text is missing.
    """
    asked: dict[str, Any] = {
        "task": info.name,
        "bos": settings.bos,
        "limit": settings.limit,
        "seed": settings.seed,
        "versions": versions,
        "tokenizer": tokenizer,
    }
    if info.kind == "perplexity":
        path = info.name.removeprefix(TEXT_PREFIX) if info.name.startswith(TEXT_PREFIX) else None
        data = None if path is None else _file(Path(path))
        asked |= {"max_length": max_length, "stride": settings.stride, "data": data}
    elif info.kind in ("niah", "ruler"):
        haystack = settings.niah_haystack
        asked |= {
            "lengths": settings.niah_lengths if info.kind == "niah" else settings.ruler_lengths,
            "samples": settings.niah_samples,
            "data": None if haystack is None else _file(haystack),
        }
    else:
        asked |= {"max_length": max_length, "data": _harness_data(info, options.task_data)}
    return digest_document(asked)


def _file(path: Path) -> str:
    if not path.is_file():
        raise DataError(f"{path} is no file")
    return digest_file(path)


def _harness_data(info: TaskInfo, folder: Path | None) -> str | None:
    if folder is None:
        return None
    local = find_local(info.harness_name or info.name, folder)
    if local is not None:
        path, task = local
        return digest_document([digest_file(file) for file in task.files(path)])
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        facts = path.stat()
        found.update(f"{path.relative_to(folder)}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return found.hexdigest()
