"""Local copies of task data under `--task-data DIR`, so that tasks run without a network.

For `wikitext` the first of these that exists is read (each also with `.xz`, `.gz` or `.bz2` after it), relative to DIR:

- `wikitext-2/wiki.test.raw`, `wikitext-2-raw/wiki.test.raw`, `wiki.test.raw`: the raw release; pages are cut at their
  headings as in the hub's `EleutherAI/wikitext_document_level`;
- `wikitext.jsonl`, `eval/wikitext.jsonl`: one page a line in the field `page`.

For `lambada`: `eval/lambada_test.jsonl`, `lambada_test.jsonl`, one passage a line in the field `text`.

For `arc_easy`, `arc_challenge`, `hellaswag`, `piqa`, `winogrande`, `boolq`, `openbookqa` and `squad`: files of others
that `lapcli.evaluation.reshaped` puts back into the hub's columns, at the places in `LOCAL_TASKS`, in `eval` or in DIR.
Where such a file no longer says something that the hub's data set says, the scores carry a note of it.

For every lm-eval task, these two as well: `DIR/OWNER/NAME` or `DIR/NAME`, a copy of the hub's data set repository of
that name (what `hf download OWNER/NAME --repo-type dataset --local-dir ...` makes).
"""

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapcli.data.documents import Document
from lapcli.errors import DataError
from lapcli.evaluation import reshaped

_OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
_HEADING = re.compile(r"= (?!= ).* =")


def _nothing_lacks(documents: Sequence[dict[str, Any]]) -> None:
    return None


@dataclass(frozen=True)
class LocalTask:
    """How a task's data may lie on disk.

    Attributes:
        paths: relative to the data folder, in order of preference, without a compression suffix.
        read: a file to the documents that lm-eval's definition expects.
        split: the split that the documents are.
        beside: names of a second file in the same folder, of which the first that exists is read too.
        note: what the copy lacks of the hub's data set, from the documents; `None`: nothing.
    """

    paths: tuple[str, ...]
    read: Callable[[Path], list[dict[str, Any]]]
    split: str = "test"
    beside: tuple[str, ...] = ()
    note: Callable[[Sequence[dict[str, Any]]], str | None] = _nothing_lacks

    def files(self, path: Path) -> list[Path]:
        """The files that reading `path` reads."""
        second = _beside(path, self.beside)
        return [path] if second is None else [path, second]


def find_local(name: str, folder: Path) -> tuple[Path, LocalTask] | None:
    """The local file of an lm-eval task, if there is one.

    Args:
        name: lm-eval's name of the task.
        folder: the data folder.
    """
    task = LOCAL_TASKS.get(name)
    for relative in task.paths if task else ():
        for suffix in ("", *_OPENERS):
            path = folder / f"{relative}{suffix}"
            if task is not None and path.is_file():
                return path, task
    return None


def find_hub_copy(data_set: str, folder: Path) -> Path | None:
    """The local copy of a hub data set, if there is one."""
    candidates = (folder / data_set, folder / data_set.rpartition("/")[2])
    return next((path for path in candidates if data_set and path.is_dir() and any(path.iterdir())), None)


def describe_layouts(name: str, data_set: str | None) -> str:
    """Where `--task-data` looks for a task's data, in one line."""
    task = LOCAL_TASKS.get(name)
    places = [*(task.paths if task else ()), *([data_set] if data_set else ())]
    return ", ".join(f"DIR/{place}" for place in places)


def read_documents(path: Path) -> list[Document]:
    """The texts of a `.txt` file (one document) or a `.jsonl` file (one a line, field `text`), maybe compressed.

    Raises:
        DataError: the file is not UTF-8 text, a line is no JSON or lacks the field, or there is no text.
    """
    if _plain_suffix(path) == ".jsonl":
        found = [Document(f"{path.name}:{row}", record["text"]) for row, record in _records(path, "text")]
    else:
        found = [Document(path.name, _read(path))]
    found = [document for document in found if document.text.strip()]
    if not found:
        raise DataError(f"{path} holds no text")
    return found


def wikitext_pages(text: str) -> list[str]:
    """The pages of a raw WikiText file, each from its heading (` = Title = `) to the line before the next.

    What precedes the first heading is a page too, unless it is blank. Lower headings begin with `= = `. These are the
    pages of the hub's `EleutherAI/wikitext_document_level`, line breaks and blanks included.
    """
    pages: list[list[str]] = [[]]
    for line in text.split("\n"):
        if _HEADING.fullmatch(line.strip()):
            pages.append([])
        pages[-1].append(line)
    return [page for page in ("\n".join(lines) for lines in pages) if page.strip()]


def _wikitext(path: Path) -> list[dict[str, Any]]:
    if _plain_suffix(path) == ".jsonl":
        return [{"page": record["page"]} for _, record in _records(path, "page")]
    pages = [{"page": page} for page in wikitext_pages(_read(path))]
    if not pages:
        raise DataError(f"{path} holds no page")
    return pages


def _lambada(path: Path) -> list[dict[str, Any]]:
    passages = [{"text": record["text"]} for _, record in _records(path, "text")]
    bare = next((row for row, passage in enumerate(passages, 1) if " " not in passage["text"].strip()), None)
    if bare is not None:
        raise DataError(f"{path}, line {bare}: a passage of one word has no last word to guess")
    return passages


def _places(name: str) -> tuple[str, ...]:
    return f"eval/{name}", name


def _each(path: Path, reshape: Callable[[dict[str, Any]], dict[str, Any]]) -> list[dict[str, Any]]:
    """The documents of a file with one record a line."""
    return [_reshaped(path, row, reshape, record) for row, record in _objects(path)]


def _reshaped(path: Path, row: int, reshape: Callable[..., dict[str, Any]], *parts: Any) -> dict[str, Any]:
    try:
        return reshape(*parts)
    except reshaped.Misshapen as error:
        raise DataError(f"{path}, line {row}: {error}") from error


def _reader(reshape: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], list[dict[str, Any]]]:
    return lambda path: _each(path, reshape)


_PIQA_LABELS = ("piqa_valid_labels.lst", "valid-labels.lst")


def _piqa(path: Path) -> list[dict[str, Any]]:
    beside = _beside(path, _PIQA_LABELS)
    if beside is None:
        raise DataError(f"{path} has no labels beside it", f"put {' or '.join(_PIQA_LABELS)} there")
    labels = _read(beside).split()
    problems = list(_objects(path))
    if len(labels) != len(problems):
        raise DataError(f"{path} has {len(problems)} problems and {beside} {len(labels)} labels")
    pairs = zip(problems, labels, strict=True)
    return [_reshaped(path, row, reshaped.piqa, record, label) for (row, record), label in pairs]


_SQUAD_ANSWERABLE = 5928
"""Questions with an answer in the whole development set of SQuAD 2.0."""


def _squad(path: Path) -> list[dict[str, Any]]:
    try:
        document = json.loads(_read(path))
        found = list(reshaped.squad(document))
    except (json.JSONDecodeError, reshaped.Misshapen) as error:
        raise DataError(f"{path}: {error}") from error
    if not found:
        raise DataError(f"{path} holds no question with an answer")
    return found


def _squad_note(documents: Sequence[dict[str, Any]]) -> str:
    part = (
        f"{len(documents)} of the {_SQUAD_ANSWERABLE} questions with an answer of SQuAD 2.0's development set"
        if len(documents) < _SQUAD_ANSWERABLE
        else f"{len(documents)} questions of SQuAD's development set"
    )
    return (
        f"{part}, asked in the words of lm-eval's squadv2: the hub's data set for this task words them as unfinished "
        "sentences, which the copy does not have"
    )


def _constant(text: str) -> Callable[[Sequence[dict[str, Any]]], str | None]:
    return lambda documents: text


_ARC_NOTE = _constant("the copy has four choices at most: questions of five have lost a wrong one")


LOCAL_TASKS: dict[str, LocalTask] = {
    "wikitext": LocalTask(
        paths=(
            "wikitext-2/wiki.test.raw",
            "wikitext-2-raw/wiki.test.raw",
            "wiki.test.raw",
            "wikitext.jsonl",
            "eval/wikitext.jsonl",
        ),
        read=_wikitext,
    ),
    "lambada_openai": LocalTask(paths=_places("lambada_test.jsonl"), read=_lambada),
    "arc_easy": LocalTask(paths=_places("arc_easy.jsonl"), read=_reader(reshaped.arc), note=_ARC_NOTE),
    "arc_challenge": LocalTask(paths=_places("arc_challenge.jsonl"), read=_reader(reshaped.arc), note=_ARC_NOTE),
    "hellaswag": LocalTask(
        paths=_places("hellaswag_val.jsonl"),
        read=_reader(reshaped.hellaswag),
        split="validation",
        note=_constant(
            "the copy does not say where ctx_b begins, which is capitalised; the last sentence end is taken"
        ),
    ),
    "piqa": LocalTask(
        paths=(*_places("piqa_valid_official.jsonl"), "piqa/valid.jsonl"),
        read=_piqa,
        split="validation",
        beside=_PIQA_LABELS,
    ),
    "winogrande": LocalTask(
        paths=_places("winogrande_val.jsonl"), read=_reader(reshaped.winogrande), split="validation"
    ),
    "boolq": LocalTask(
        paths=_places("boolq_val.jsonl"),
        read=_reader(reshaped.boolq),
        split="validation",
        note=_constant("the copy lacks the titles before the passages, which the hub's data set has"),
    ),
    "openbookqa": LocalTask(paths=_places("openbook_qa.jsonl"), read=_reader(reshaped.openbookqa)),
    "squad_completion": LocalTask(
        paths=(*_places("squad_v2_dev_half.json"), "squad/dev-v2.0.json", "dev-v2.0.json"),
        read=_squad,
        split="validation",
        note=_squad_note,
    ),
}


def _plain_suffix(path: Path) -> str:
    return (Path(path.stem) if path.suffix in _OPENERS else path).suffix


def _open(path: Path) -> Any:
    return _OPENERS.get(path.suffix, open)(path, "rb")


def _read(path: Path) -> str:
    try:
        with _open(path) as handle:
            return handle.read().decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _beside(path: Path, names: Sequence[str]) -> Path | None:
    return next((file for file in (path.with_name(name) for name in names) if file.is_file()), None)


def _records(path: Path, field: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of a file's lines with their line numbers, each with a text in that field."""
    for row, record in _objects(path):
        if not isinstance(record.get(field), str):
            raise DataError(f"{path}, line {row}: no text in the field {field!r} (there is: {', '.join(record)})")
        yield row, record


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of a file's lines with their line numbers."""
    found = False
    for row, line in enumerate(_read(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {row}: no JSON ({error.msg})") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {row}: no JSON object (there is: {type(record).__name__})")
        found = True
        yield row, record
    if not found:
        raise DataError(f"{path} holds no line")
