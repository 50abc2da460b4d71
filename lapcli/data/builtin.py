"""The `builtin` corpus: the documentation of the Python that runs, read from its own source files.

It holds the topics of `pydoc_data.topics` and every docstring of over 200 characters in the standard library's
Python sources. Sources are parsed, never imported, so that collecting them runs nobody's code. A tenth, chosen by
the hash of the document's name, is held out: the train part never contains a paragraph of it (see `overlap`).

The corpus depends on the Python version, and on nothing else: packages that distributions split off or leave out
are not read.
"""

import ast
import gc
import hashlib
import inspect
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from lapcli.data.documents import Document
from lapcli.data.overlap import HeldOutIndex
from lapcli.errors import DataError

MIN_DOCSTRING_CHARACTERS = 200
HELD_OUT_SHARE = 10

Split = Literal["train", "heldout"]

# Debian, Fedora and container images ship these apart from the rest, or not at all; `site-packages` is not ours.
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "test", "tests", "site-packages", "dist-packages", "lib-dynload"}
    | {"distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo", "venv", "pydoc_data"}
)
# Made when Python is built, and different on every machine.
_SKIPPED_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize")


class BuiltinCorpus(NamedTuple):
    """The corpus of one Python.

    Attributes:
        train: documents to train or calibrate on, by name.
        heldout: documents that are only ever evaluated on, by name.
        python: the version that they document, as `3.11.7`.
        dropped: paragraphs taken out of `train` because they occur in `heldout`.
    """

    train: tuple[Document, ...]
    heldout: tuple[Document, ...]
    python: str
    dropped: int


def is_held_out(name: str) -> bool:
    """Whether the document of that name belongs to the held-out tenth.

    Decided by SHA-256 of the name, so that a document stays where it is when others come or go.
    """
    base = name.partition("#")[0]
    return int.from_bytes(hashlib.sha256(base.encode()).digest()[:8], "big") % HELD_OUT_SHARE == 0


def load_builtin() -> BuiltinCorpus:
    """The corpus of the running Python; collected once a process (one to two seconds).

    Raises:
        DataError: this Python carries no standard-library sources.
    """
    return _load(sysconfig.get_path("stdlib"))


def builtin_train() -> list[Document]:
    """The train part of `builtin`, ordered by name, without any paragraph of the held-out part."""
    return list(load_builtin().train)


def heldout_builtin_text() -> list[Document]:
    """The held-out tenth of `builtin`, ordered by name."""
    return list(_split(sysconfig.get_path("stdlib"))[1])


def builtin_digest(split: Split) -> str:
    """SHA-256 over the names and texts of one part, hexadecimal."""
    corpus = load_builtin()
    return documents_digest(corpus.train if split == "train" else corpus.heldout)


def documents_digest(documents: tuple[Document, ...] | list[Document]) -> str:
    """SHA-256 over names and texts in order, each preceded by its length, hexadecimal."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.name, document.text):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


@cache
def _load(stdlib: str) -> BuiltinCorpus:
    train, heldout = _split(stdlib)
    index = HeldOutIndex(document.text for document in heldout)
    cleaned = [(document.name, index.clean(document.text)) for document in train]
    return BuiltinCorpus(
        train=tuple(Document(name, result.text) for name, result in cleaned if result.text.strip()),
        heldout=heldout,
        python=platform.python_version(),
        dropped=sum(result.dropped for _, result in cleaned),
    )


@cache
def _split(stdlib: str) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """The documents to train on, with all their paragraphs, and those that are held out."""
    root = Path(stdlib)
    with _no_collector():
        documents = sorted((*_topics(root), *_docstrings(root)), key=lambda document: document.name)
    if not documents:
        raise DataError(
            f"the builtin corpus is empty: {root} holds no standard-library sources with docstrings.",
            "Name another text with --data, or use a Python that was installed with its sources.",
        )
    train: list[Document] = []
    heldout: list[Document] = []
    seen: set[str] = set()
    for document in documents:
        # One docstring often serves several classes; a copy must not cross from one part to the other.
        if document.text in seen:
            continue
        seen.add(document.text)
        (heldout if is_held_out(document.name) else train).append(document)
    return tuple(train), tuple(heldout)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Syntax trees hold no cycles; a collector that looks for some among them takes nearly half of the time."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _topics(root: Path) -> Iterator[Document]:
    path = root / "pydoc_data" / "topics.py"
    if not path.is_file():
        return
    for node in _parse(path).body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Dict):
            for key, text in ast.literal_eval(value).items():
                if text.strip():
                    yield Document(f"pydoc_data.topics:{key}", text.strip("\n"))


def _docstrings(root: Path) -> Iterator[Document]:
    for path in sorted(_sources(root)):
        if path.name.startswith(_SKIPPED_FILES):
            continue
        module = ".".join(path.relative_to(root).parts).removesuffix(".py").removesuffix(".__init__")
        counts: dict[str, int] = {}
        for name, text in _docstrings_under(_parse(path), module):
            counts[name] = counts.get(name, 0) + 1
            yield Document(name if counts[name] == 1 else f"{name}#{counts[name]}", text)


def _sources(root: Path) -> Iterator[Path]:
    """Python's files; what is not looked into may be large."""
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in _SKIPPED_FOLDERS]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _docstrings_under(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        raw = ast.get_docstring(node, clean=False)
        text = inspect.cleandoc(raw).strip() if raw else ""
        if len(text) > MIN_DOCSTRING_CHARACTERS:
            yield name, text
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if named:
            yield from _docstrings_under(child, f"{name}.{child.name}")
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from _docstrings_under(child, name)


def _parse(path: Path) -> ast.Module:
    with warnings.catch_warnings():
        # Old modules hold escapes that newer Pythons warn about; they are not the reader's to mend.
        warnings.simplefilter("ignore")
        return ast.parse(path.read_bytes(), filename=str(path))
