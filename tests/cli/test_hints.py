"""What errors suggest is what the command can do: what it shares with others is looked through for others' options."""

import ast
import sys
from pathlib import Path

import pytest

import lapcli
from lapcli.cli import app as application
from lapcli.cli.hints import foreign_options, own_hint
from lapcli.errors import LapcliError

ROOT = Path(lapcli.__file__).parent
KNOWN = application.command_options()
REACHED_BY = {
    "linearising": ("convert",),
    "stages/linearising.py": ("convert",),
    "stages/dual_state_writing.py": ("convert",),
    "artifacts/run.py": ("convert", "prune"),
    "artifacts/atomic.py": ("convert", "prune"),
    "training/stream.py": ("convert", "recover"),
    "data": ("convert", "calibrate"),
    "serving": ("serve", "replay"),
    "runtime/configurations.py": ("serve", "replay"),
    "runtime/engine.py": ("serve",),
    **dict.fromkeys(
        (f"serving/{name}.py" for name in ("server", "keys", "assembling", "texts", "settings")), ("serve",)
    ),
    **{
        f"serving/{name}.py": ("replay",)
        for name in ("replay_engines", "replay_modes", "replay_trace", "replay_client", "costs", "simulation")
    },
}
"""Which commands come to the errors of a module, or a package."""


def commands_of(path):
    name = path.relative_to(ROOT).as_posix()
    return REACHED_BY.get(name) or REACHED_BY.get(name.partition("/")[0]) or ()


def text(node):
    """A string as far as it is written down, with MODEL for what is put in."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(part.value if isinstance(part, ast.Constant) else "MODEL" for part in parts)


def hints(tree):
    """All strings behind an error's message, and those of constants that are hints."""
    nodes = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and str(getattr(node.func, "id", "")).endswith("Error"):
            nodes += [*node.args[1:], *(keyword.value for keyword in node.keywords if keyword.arg == "hint")]
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id.lower()
            nodes += [node.value] if "hint" in name or "mend" in name else []
    for node in nodes:
        inside = {id(part) for each in ast.walk(node) if isinstance(each, ast.JoinedStr) for part in each.values}
        for each in ast.walk(node):
            is_text = isinstance(each, ast.JoinedStr) or (
                isinstance(each, ast.Constant) and isinstance(each.value, str)
            )
            if is_text and id(each) not in inside:
                yield each.lineno, text(each)


def test_errors_suggest_options_that_there_are():
    wrong, seen = [], 0
    for path in sorted(ROOT.rglob("*.py")):
        for command in commands_of(path):
            for line, hint in hints(ast.parse(path.read_text())):
                seen += "--" in hint
                foreign = foreign_options(hint, command, KNOWN)
                if foreign:
                    wrong.append(f"{path.relative_to(ROOT)}:{line}: lapcli {command} has no {foreign}: {hint}")
    assert not wrong, "\n".join(wrong)
    assert seen > 40
    assert all((ROOT / name).exists() for name in REACHED_BY)


@pytest.mark.parametrize(
    ("hint", "foreign"),
    [
        ("name another place with --run or --output", ["--run"]),
        ("lapcli prune --run DIR; or pass --ratio", ["--ratio"]),
        ("`lapcli serve --port 1`, or --port 2, or --port 3", ["--port"]),
        ("make one: lapcli convert MODEL --to dsla --run DIR", ["--run"]),
        ("pass --nproc-per-node 2 to torchrun", []),
        ("drop --fraction", []),
    ],
)
def test_options_of_other_commands(hint, foreign):
    assert foreign_options(hint, "convert", KNOWN) == foreign


def test_hints_of_what_commands_share_say_what_this_one_lacks(monkeypatch, capsys):
    assert own_hint("pass --trust-remote-code", "serve", KNOWN) == "pass --trust-remote-code"
    assert own_hint("pass --x", "no-such-command", KNOWN) == "pass --x"
    assert own_hint(None, "serve", KNOWN) is None

    def failing():
        raise LapcliError("it is wrong", "pass --restart, --trust-remote-code or --run DIR")

    monkeypatch.setattr(application, "app", failing)
    monkeypatch.setattr(application, "command_options", lambda: KNOWN)
    monkeypatch.setattr(sys, "argv", ["lapcli", "replay", "trace.csv"])
    with pytest.raises(SystemExit):
        application.main()
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith("or --run DIR (lapcli replay has no --restart, --trust-remote-code or --run)")
