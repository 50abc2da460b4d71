"""What all studies share: lines that none is lost of, arguments, and errors that are a message and no traceback."""

import argparse
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import dsla_study  # noqa: E402
import query_feedback_study  # noqa: E402
import recovery_study  # noqa: E402
import serving_study  # noqa: E402
from studies import arguments, boundary  # noqa: E402
from studies.lines import Lines, add_line  # noqa: E402

from lapcli.errors import DataError, UsageError  # noqa: E402

LINES = Lines({"one": ("a", "b"), "two": ("c",)}, "a_study.py run", unsaid="one")
WHOLE = [{"a": 1, "b": 2}, {"kind": "two", "c": 3}, {"kind": "one", "a": "\u2028", "b": None}]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "lines.jsonl"
    for line in WHOLE:
        add_line(path, line)
    return path


def test_lines_come_back_in_order_or_those_of_a_kind(file):
    assert LINES.read([file]) == LINES.there(file) == WHOLE
    assert LINES.read([file, file], "two") == [WHOLE[1]] * 2
    file.write_text("\n" + file.read_text().replace("\n", "\n\n"))
    assert LINES.read([file]) == WHOLE


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        ('{"kind": "two", "broken', "line 2: no JSON"),
        ("[1]", "line 2: a list, not an object"),
        ('{"a": 1}', "line 2: lacks b"),
        ('{"kind": "three"}', "line 2: is of kind 'three', not 'one' or 'two'"),
        ('{"kind": ["one"], "a": 1, "b": 1}', "line 2: is of kind"),
    ],
    ids=["cut", "list", "fields", "kind", "kind of kind"],
)
def test_a_damaged_line_is_an_error_for_tables_and_named_by_runs(file, capsys, damaged, said):
    rows = file.read_text().splitlines()
    file.write_text("\n".join([rows[0], damaged, *rows[2:]]) + "\n")
    with pytest.raises(DataError) as error:
        LINES.read([file], "one")
    assert f"{file}, {said}" in error.value.message
    assert "a_study.py run" in error.value.hint
    assert not capsys.readouterr().err
    assert LINES.there(file) == [WHOLE[0], WHOLE[2]]
    assert f"warning: {file}, {said}" in capsys.readouterr().err


def test_an_end_that_was_cut_off_is_named_and_the_next_line_takes_its_place(file, capsys):
    text = file.read_bytes()
    for cut in (b'{"a": 1, "b', b'{"a": "\xc3', b"\0" * 9):
        file.write_bytes(text + cut)
        for read in (lambda: LINES.read([file]), lambda: LINES.there(file)):
            assert read() == WHOLE
            assert f"warning: {file}, line 4: cut off while it was written" in capsys.readouterr().err
        add_line(file, WHOLE[0])
        assert file.read_bytes() == text + text.splitlines(keepends=True)[0]
        assert LINES.read([file]) == [*WHOLE, WHOLE[0]]
    # A line that lacks its end alone is one.
    file.write_bytes(text.rstrip())
    assert LINES.read([file]) == WHOLE
    add_line(file, WHOLE[0])
    assert LINES.read([file]) == [*WHOLE, WHOLE[0]]
    file.write_bytes(b'{"nothing else')
    add_line(file, WHOLE[0])
    assert LINES.read([file]) == WHOLE[:1]
    assert not capsys.readouterr().err


def test_a_file_that_is_read_must_be_there_and_one_that_is_written_need_not(file, tmp_path):
    nothing = tmp_path / "nothing.jsonl"
    assert LINES.there(nothing, [file]) == WHOLE
    for read in (lambda: LINES.read([file, nothing]), lambda: LINES.there(file, [nothing])):
        with pytest.raises(DataError, match=r"nothing\.jsonl cannot be read: No such file"):
            read()
    with pytest.raises(DataError, match="Is a directory"):
        LINES.there(tmp_path)


def test_many_damaged_lines_are_counted(file):
    with file.open("a") as out:
        out.write("[]\n" * 20)
    with pytest.raises(DataError, match=r"line 4: a list, not an object \(and so on: line 5, 6, 7, 8 and 15 more\)"):
        LINES.read([file])


def answered(do, *words):
    parser = argparse.ArgumentParser(prog="a_study.py")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("do").add_argument("--known", help="--steps is not this one's")
    boundary.answer(parser, commands, do, ["do", *words])


def raising(error):
    def do(_options):
        raise error

    return do


def test_errors_are_messages_and_codes(capsys):
    with pytest.raises(SystemExit) as ended:
        answered(raising(DataError("it is not there", "make it")))
    # Python writes it to stderr and ends with code 1.
    assert ended.value.code == "error: it is not there\nmake it"
    with pytest.raises(SystemExit) as ended:
        answered(raising(UsageError("not both", "name one")))
    assert (ended.value.code, capsys.readouterr().err) == (2, "error: not both\nname one\n")
    with pytest.raises(SystemExit, match="error: /some/file: Permission denied"):
        answered(raising(PermissionError(13, "Permission denied", "/some/file")))
    # Defects keep their traceback.
    for defect in (KeyError("x"), OSError("of no file")):
        with pytest.raises(type(defect)):
            answered(raising(defect))
    assert answered(lambda _: None) is None
    for finished in (True, False):
        with pytest.raises(SystemExit) as ended:
            answered(lambda _, finished=finished: finished)
        assert ended.value.code == int(not finished)


def test_what_lapcli_suggests_says_which_options_the_study_lacks():
    with pytest.raises(SystemExit) as ended:
        answered(raising(DataError("there", "pass --overwrite, --steps or --known")))
    assert ended.value.code.endswith("(a_study.py do has no --overwrite and no --steps)")


def test_arguments_say_what_was_found_and_what_is_wanted():
    for read, text, said in (
        (arguments.several(arguments.number, "0,1,2"), "1,x", "'x' is no whole number; values .* such as 0,1,2"),
        (arguments.several(arguments.real, "0.1"), "", "'' is no number"),
        (arguments.alone(arguments.count), "0", "'0' is less than 1"),
        (arguments.json_object, "[1]", "is no object"),
        (arguments.json_object, "{", "is no JSON"),
        (arguments.ending(".svg"), "o.foo", r"ends in \.foo, and \.svg"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=said):
            read(text)
    assert arguments.several(arguments.number, "0")("-1,2") == [-1, 2]
    assert arguments.ending(".svg")("a/b.SVG") == Path("a/b.SVG")


STUDIES = {
    "dsla": (dsla_study, ROOT / "docs" / "dsla.jsonl"),
    "query": (query_feedback_study, ROOT / "docs" / "query-feedback.jsonl"),
    "serving": (serving_study, None),
}


@pytest.mark.parametrize("name", STUDIES)
def test_no_study_writes_a_page_without_what_it_could_not_read(name, tmp_path, capsys):
    study, own = STUDIES[name]
    page = tmp_path / "page.md"
    page.write_text(text := f"{study.BEGIN}\nold\n{study.END}\n")
    files = {"x": '{"a":1}\n', "y": "[1]\n", "cut": (ROOT / "docs" / "dsla.jsonl").read_text()[:3000]}
    for label, content in files.items():
        (tmp_path / f"{label}.jsonl").write_text(content)
    (tmp_path / "damaged.jsonl").write_text('{"kind": "run", "broken\n' + "[]\n")
    foreign = next(path for other, (_, path) in STUDIES.items() if other != name and path is not None)
    wrong = [tmp_path / f"{label}.jsonl" for label in (*files, "damaged", "missing")] + [foreign]
    for path in wrong:
        for given in ([path], *([[own, path]] if own is not None and path.stem != "cut" else [])):
            with pytest.raises(SystemExit) as ended:
                study.main(["write", *map(str, given), str(page)])
            assert path.name in str(ended.value.code)
            assert page.read_text() == text
    with pytest.raises(SystemExit) as ended:
        study.main(["write", str(page)])
    assert ended.value.code == 2
    assert "name the JSON lines before" in capsys.readouterr().err
    if own is not None:
        # What was published is whole.
        study.main(["write", str(own), str(page)])
        assert "old" not in page.read_text()


def test_the_study_of_recoveries_names_what_it_cannot_read(tmp_path, monkeypatch):
    for name, text, said in (
        ("missing.json", None, "cannot be read: No such file"),
        ("damaged.json", '{"a": {', "is damaged or no JSON"),
        ("list.json", "[1]", "holds no object"),
        ("other.json", '{"a": {"rows": []}}', "a is no cell of the study: it lacks recovery, command, machine"),
        ("empty.json", "{}", "none of 0 cells measured the base"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(sys, "argv", ["recovery_study.py", "write", str(tmp_path / name)])
        with pytest.raises(SystemExit, match=f"{name}.*{said}"):
            recovery_study.main()
