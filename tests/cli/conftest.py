import sys

import pytest

from lapcli.cli.app import main


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(f"Line {i} says {i * i % 89} and little more than that." for i in range(300)))
    return path


@pytest.fixture
def lapcli(capsys, monkeypatch, tmp_path):
    """Run a command in an empty directory; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    # Wide enough that no path and no heading is broken, however long the temporary folder's name.
    monkeypatch.setenv("COLUMNS", "400")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["lapcli", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        return exit_.value.code or 0, out, err

    return run
