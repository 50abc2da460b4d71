"""The builtin corpus: what is in it, how it is split, and that collecting it runs nobody's code."""

import gc
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lapcli.data import builtin
from lapcli.data.overlap import HeldOutIndex, paragraphs_of
from lapcli.errors import DataError


def test_holds_topics_and_long_docstrings():
    corpus = builtin.load_builtin()
    named = {document.name: document.text for document in (*corpus.train, *corpus.heldout)}
    assert sum(name.startswith("pydoc_data.topics:") for name in named) > 50
    assert "textwrap.TextWrapper" in named
    assert len(named) == len(corpus.train) + len(corpus.heldout), "names are unique"
    assert [d.name for d in corpus.train] == sorted(d.name for d in corpus.train)
    assert all(len(d.text) > builtin.MIN_DOCSTRING_CHARACTERS for d in corpus.heldout if ":" not in d.name)


def test_about_a_tenth_is_held_out_by_name():
    corpus = builtin.load_builtin()
    share = len(corpus.heldout) / (len(corpus.heldout) + len(corpus.train))
    # 1900 names fall independently: three standard deviations are 0.02.
    assert 0.08 < share < 0.125
    assert all(builtin.is_held_out(document.name) for document in corpus.heldout)
    assert not any(builtin.is_held_out(document.name) for document in corpus.train)


def test_split_is_fixed_by_sha256():
    assert [i for i in range(40) if builtin.is_held_out(f"name{i}")] == [0, 11, 34]
    assert builtin.is_held_out("a#2") == builtin.is_held_out("a")


def test_no_paragraph_of_the_held_out_part_is_in_train():
    corpus = builtin.load_builtin()
    held = HeldOutIndex(document.text for document in corpus.heldout)
    assert corpus.dropped > 0, "boilerplate is shared between docstrings, so that the filter has work"
    assert not [p for d in corpus.train for p in paragraphs_of(d.text) if held.occurs(p)]


def test_parts_have_digests_of_their_own():
    assert builtin.builtin_digest("train") != builtin.builtin_digest("heldout")
    assert len(builtin.builtin_digest("train")) == 64


def test_digest_tells_names_from_texts():
    assert builtin.documents_digest([builtin.Document("ab", "c")]) != builtin.documents_digest(
        [builtin.Document("a", "bc")]
    )


@pytest.fixture
def library(tmp_path: Path) -> Path:
    long = "word " * 50
    (tmp_path / "pkg" / "test").mkdir(parents=True)
    (tmp_path / "pkg" / "__init__.py").write_text(f'"""{long}of the package."""\nraise SystemExit("imported")\n')
    (tmp_path / "pkg" / "test" / "mod.py").write_text(f'"""{long}of a test."""\n')
    (tmp_path / "mod.py").write_text(
        textwrap.dedent(
            f"""
            class A:
                '''{long}of A.'''
                async def f(self):
                    '''short'''
                    def g(): '''{long}of g.'''
            if True:
                def twice(): '''{long}first.'''
            else:
                def twice(): '''{long}second.'''
            def copy(): '''{long}of A.'''
            """
        )
    )
    return tmp_path


def test_names_and_reach_on_a_library_of_known_content(library: Path):
    corpus = builtin._load(str(library))
    names = sorted(document.name for document in (*corpus.train, *corpus.heldout))
    assert names == ["mod.A", "mod.A.f.g", "mod.twice", "mod.twice#2", "pkg"]


def test_folders_that_are_skipped_are_not_looked_into(library: Path):
    """Packages that were installed are many times the library."""
    (library / "site-packages" / "deep").mkdir(parents=True)
    (library / "site-packages" / "deep" / "mod.py").write_text(f"TEXT = {'word ' * 50!r}")
    found = sorted(str(path.relative_to(library)) for path in builtin._sources(library))
    assert found == ["mod.py", "pkg/__init__.py"]


def test_the_collector_is_left_as_it_was(library: Path):
    assert gc.isenabled()
    builtin._split.__wrapped__(str(library))
    assert gc.isenabled()
    gc.disable()
    try:
        builtin._split.__wrapped__(str(library))
        assert not gc.isenabled()
    finally:
        gc.enable()
    (library / "broken.py").write_text("def :")
    with pytest.raises(SyntaxError):
        builtin._split.__wrapped__(str(library))
    assert gc.isenabled()


def test_the_held_out_part_alone_is_that_of_the_corpus():
    assert tuple(builtin.heldout_builtin_text()) == builtin.load_builtin().heldout


def test_no_sources_is_an_error(tmp_path: Path):
    with pytest.raises(DataError, match="no standard-library sources"):
        builtin._load(str(tmp_path))


def test_a_fresh_process_collects_the_same():
    code = "from lapcli.data.builtin import *; print(builtin_digest('train'), builtin_digest('heldout'))"
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
    )
    assert out.stdout.split() == [builtin.builtin_digest("train"), builtin.builtin_digest("heldout")]
