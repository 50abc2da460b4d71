"""The study of conversions: which pieces it does, what it keeps of them, and the tables that it makes."""

import argparse
import json
import lzma
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import dsla_study as study  # noqa: E402
from dsla.arms import ARMS, BASE, TEACHER  # noqa: E402
from studies.commands import Commands  # noqa: E402

from lapcli.artifacts.atomic import atomic_file  # noqa: E402
from lapcli.cli.app import main  # noqa: E402
from lapcli.data.builtin import heldout_builtin_text  # noqa: E402
from lapcli.testing.dual_state import tiny_source  # noqa: E402

PAGE = f"# Page\n\nbefore\n\n{study.BEGIN}\nold\n{study.END}\n\nafter\n"


def scores(ppl, needles=0.5):
    found = [
        ("wikitext", "word_perplexity", None, ppl), ("wikitext", "bits_per_byte", None, 1.0),
        ("lambada", "perplexity", None, 2 * ppl), ("lambada", "acc", None, 0.25), ("zeroshot", "mean", None, 0.4),
        ("niah", "exact_match", 1024, needles), ("niah", "exact_match", 2048, needles / 2),
    ]  # fmt: skip
    return [{"task": t, "metric": m, "length": n, "values": {"model": {"value": v}}} for t, m, n, v in found]


def line(arm, fraction, seed, *, ppl=30.0, steps=128, **more):
    layers = [
        {"layer": layer, "before": 0.9, "after": 0.1, "kl": 0.01, "perplexity": ppl, "mixture": [0.6, 0.4]}
        for layer in (7, 3)
    ]
    made = {"kv_bytes_a_token": 1024, "state_bytes": 1 << 20, "perplexity": ppl, "layers": layers,
            "rank_correlations": {"entropy ~ loss": 0.5, "loss ~ outlier": None}}  # fmt: skip
    return {
        "kind": "dsla", "digest": "d" * 64, "arm": arm, "fraction": fraction, "seed": seed, "steps": steps, "batch": 8,
        "seq_len": 1024, "lr": 0.002, "text": "a" * 64, "model": "M", "limit": 100,
        "machine": "a machine", "date": "2026-11-30",
        "commands": ["lapcli convert X", "lapcli eval Y"], "conversion": made, "rows": scores(ppl), **more,
    }  # fmt: skip


def cells(table, *names):
    return [
        [cell.strip() for cell in row.split("|")[2:-1]]
        for row in table.splitlines()
        if row.startswith(f"| {names[0]} | " + (f"{names[1]} |" if len(names) > 1 else ""))
    ]


@pytest.fixture
def lines(tmp_path):
    """Three seeds of two ways; the single state's perplexities are 2 and 2 + seed worse."""
    path = tmp_path / "lines.jsonl"
    study.add_line(path, line(TEACHER, "0", 0, ppl=20.0, conversion={"kv_bytes_a_token": 2048, "state_bytes": 0}))
    for seed in range(3):
        study.add_line(path, line("loss", "0.25", seed, ppl=30.0 + seed))
        study.add_line(path, line("one", "0.25", seed, ppl=32.0 + 2 * seed))
    return path


def test_tables_hold_means_spreads_and_differences_by_seed(lines):
    table = study.write([lines])
    first, second, third = cells(table, ARMS["loss"][0], "25 %")[0], *cells(table, ARMS["one"][0], "25 %")
    assert first == ["25 %", "3", "31 ± 1", "31 ± 1", "62 ± 2", "25 ± 0", "40 ± 0", "50 ± 0", "25 ± 0"]
    assert second[:4] == ["25 %", "3", "34 ± 2", "34 ± 2"]
    # Seed by seed 2, 3 and 4 more.
    assert third == ["25 %", "3", "3 ± 1", "3 ± 1", "6 ± 2", "0 ± 0", "0 ± 0", "0 ± 0"]
    assert cells(table, "teacher", "0 %")[0][:4] == ["0 %", "1", "-", "20"]
    # Two KiB a token, against one and a MiB.
    assert cells(table, "teacher", "0 %")[1] == ["0 %", "2", "4", "8", "16", "32", "64"]
    assert cells(table, ARMS["loss"][0], "25 %")[1] == ["25 %", "2", "3", "5", "9", "17", "33"]
    assert cells(table, "7") == [["0.9000", "0.1000", "0.0100", "30.00", "0.600 0.400"]]
    assert cells(table, "entropy ~ loss") == [["0.500"]]
    assert "loss ~ outlier" not in table
    assert "1,048,576 tokens a layer" in table


def test_only_what_compares_shares_a_table_and_the_later_line_counts(lines):
    study.add_line(lines, line("loss", "0.25", 0, ppl=40.0))
    study.add_line(lines, line("loss", "0.25", 0, ppl=99.0, steps=32))
    table = study.write([lines])
    found = [row for row in cells(table, ARMS["loss"][0], "25 %") if len(row) == 9]
    assert [row[1:4] for row in found] == [["3", "34.33 ± 4.9", "34.33 ± 4.9"], ["1", "99", "99"]]


def test_tables_go_between_the_marks(lines, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    study.main(["write", str(lines), str(page)])
    text = page.read_text()
    assert text.startswith("# Page\n\nbefore\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert ARMS["one"][0] in text
    page.write_text("none")
    with pytest.raises(SystemExit, match="once each"):
        study.main(["write", str(lines), str(page)])
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(SystemExit, match="no lines"):
        study.main(["write", str(tmp_path / "empty.jsonl")])


def test_the_page_has_the_marks():
    text = (ROOT / "docs" / "dsla.md").read_text()
    assert text.count(study.BEGIN) == text.count(study.END) == 1


def test_every_way_is_what_convert_takes(tmp_path, monkeypatch, capsys):
    """By the command itself, without doing anything; ways differ in their settings."""
    teacher, seen = tiny_source("llama", tmp_path / "teacher").path, []
    for name, (_, options) in ARMS.items():
        job = ["convert", teacher, "--to", "dsla", "--output", tmp_path / name, "--data", "builtin", "--seq-len", "64"]
        job += [*options, "--dry-run", "--json", "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["lapcli", *map(str, job)])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        assert not exit_.value.code, err
        seen.append((json.loads(out)["order"], json.loads(out)["state_bytes"], options))
    assert len({options for *_, options in seen}) == len(ARMS)
    by_name = dict(zip(ARMS, seen, strict=True))
    assert by_name["wide"][1] == by_name[BASE][1] == 2 * by_name["one"][1]
    # The window's bytes are those of the states, or less by less than a token.
    token = 2 * 2 * 8 * 2
    assert 0 <= by_name[BASE][1] - by_name["window"][1] < token


@pytest.fixture
def faked(tmp_path, monkeypatch):
    """`lapcli` that writes what commands would leave, and says what was asked of it."""
    asked = []
    folder = tiny_source("llama", tmp_path / "teacher").path

    def lapcli(self, gpu, *arguments, group=""):
        asked.append(arguments)
        if len(asked) > faked_limit[0]:
            return None
        if "--export" in arguments:
            place = Path(arguments[arguments.index("--output") + 1])
            number = {"0.34": 1, "1": 3}[arguments[arguments.index("--export") + 1]]
            assert len(json.loads((place / "conversion.json").read_text())["prefixes"]) >= number
        elif arguments[0] == "convert":
            assert group == "convert"
            place = Path(arguments[arguments.index("--output") + 1])
            number = {"0.34": 1, "1": 3}[arguments[arguments.index("--fraction") + 1]]
            # As the command itself, which refuses a directory with anything else in it.
            assert not place.exists() or [each.name for each in place.iterdir()] == ["conversion.json"]
            place.mkdir(parents=True, exist_ok=True)
            prefixes = [
                {"layer": each, "alignment": {"before": 1.0, "after": 0.5}, "kl": 0.1, "perplexity": 9.0 + each,
                 "mixture": [0.5, 0.5], "tokens": 10, "seconds": 1.0, "kv_bytes_a_token": 10, "state_bytes": 20}
                for each in range(3)
            ]  # fmt: skip
            document = {
                "prefixes": prefixes[: min(number, faked_limit[1])],
                "teacher": {"perplexity": 8.0},
                "rank_correlations": {},
            }
            # Whole at once, as by the command: it is read while it is written.
            with atomic_file(place / "conversion.json") as temporary:
                temporary.write_text(json.dumps(document))
        else:
            place = Path(arguments[arguments.index("--run") + 1])
            place.mkdir(parents=True, exist_ok=True)
            (place / "evaluation.json").write_text(json.dumps({"rows": scores(10.0)}))
        return 1.0

    # Of commands that are answered, and of layers that a conversion leaves.
    faked_limit = [10**6, 3]
    monkeypatch.setattr(study.Study, "lapcli", lapcli)
    job = ["run", "--model", str(folder), "--work", str(tmp_path / "work"), "--arms", "loss,one", "--fractions"]
    job += ["1,0.34", "--limit", "3", "--output", str(tmp_path / "lines.jsonl")]
    return asked, faked_limit, job


def exit_code(job):
    with pytest.raises(SystemExit) as exit_:
        study.main(job)
    return exit_.value.code


def test_one_conversion_serves_all_fractions_and_what_is_there_is_not_done_again(faked, tmp_path):
    asked, limit, job = faked
    limit[0] = 4
    # The teacher, the conversion of the first way, its first fraction, and an end before its second is written.
    assert exit_code(job) == 1
    found = [json.loads(each) for each in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [(each["arm"], each["fraction"]) for each in found] == [("teacher", "0"), ("loss", "0.34")]
    assert found[1]["conversion"]["perplexity"] == 9.0
    assert found[1]["conversion"]["layers"][0]["after"] == 0.5
    assert found[1]["seconds"]["convert"] == 1.0
    assert [each.split()[1] for each in found[1]["commands"]] == ["convert", "convert", "eval"]
    assert "--export 0.34" in found[1]["commands"][1]
    limit[0] = 10**6
    asked.clear()
    assert exit_code(job) == 0
    measured = ["convert", "eval"]
    assert [arguments[0] for arguments in asked] == ["convert", *measured, "convert", *measured * 2]
    asked.clear()
    assert exit_code(job) == 0
    # Of another file's lines; another limit is another measurement.
    other = [*job[:-1], str(tmp_path / "other.jsonl"), "--known", str(tmp_path / "lines.jsonl")]
    assert exit_code(other) == 0
    assert not asked
    assert exit_code([*other, "--limit", "4", "--arms", "one", "--fractions", "1"]) == 0
    assert [arguments[0] for arguments in asked] == ["eval", "convert", *measured]
    assert len(cells(study.write([tmp_path / "lines.jsonl"]), ARMS["one"][0])) == 4


def test_what_is_converted_is_measured_while_the_rest_is_and_after_conversions_ended(faked, tmp_path, monkeypatch):
    """The conversion waits until its first prefix was measured, and is then ended for the sake of the measuring."""
    asked, limit, job = faked
    limit[1] = 1
    answer, one_is_measured = study.Study.lapcli, threading.Event()

    def lapcli(self, gpu, *arguments, group=""):
        seconds = answer(self, gpu, *arguments, group=group)
        if group == "convert":
            assert one_is_measured.wait(30)
            self.end("convert")
            return None
        if arguments[0] == "eval" and "loss-0" in str(arguments):
            one_is_measured.set()
        return seconds

    monkeypatch.setattr(study.Study, "lapcli", lapcli)
    assert exit_code([*job, "--arms", "loss"]) == 1
    found = [json.loads(each) for each in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [(each["arm"], each["fraction"]) for each in found] == [("teacher", "0"), ("loss", "0.34")]
    assert [arguments[0] for arguments in asked] == ["eval", "convert", "convert", "eval"]


def test_a_group_of_commands_ends_before_the_others(tmp_path):
    options = argparse.Namespace(work=tmp_path, output=None, known=[], gpus=0, workers=1, seconds=None)
    commands = Commands(options)
    commands.end("convert")
    assert commands.lapcli(0, "list", "models", group="convert") is None
    assert commands.lapcli(0, "report", "--help") is not None
    commands.end()
    assert commands.lapcli(0, "report", "--help") is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arms", "loss,three"], "'three' is none of loss, dual"),
        (["--fractions", "25"], "more than all"),
        (["--seeds", "x"], "'x' is no whole number"),
        (["--workers", "0"], "'0' is less than 1"),
        (["--tasks", "wikitxt"], "wikitxt"),
    ],
)
def test_what_makes_no_sense_is_refused(faked, capsys, arguments, said):
    assert exit_code([*faked[2], *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_corpus_leaves_out_what_models_are_measured_on(tmp_path):
    held_out = max((document.text for document in heldout_builtin_text()), key=len)
    for name, text in (("gutenberg_train.jsonl.xz", "A tale of old. " * 40), ("openstax_by.jsonl.xz", held_out)):
        (tmp_path / name).write_bytes(lzma.compress((json.dumps({"text": text}) + "\n").encode()))
    said = study.prepare(tmp_path, tmp_path / "text.jsonl", 100_000)
    kept = (tmp_path / "text.jsonl").read_text()
    assert "A tale of old." in kept
    assert "held-out paragraphs taken out" in said
    longest = max(held_out.split("\n\n"), key=len)
    assert json.dumps(longest)[1:-1] not in kept


def test_no_teacher_is_made_of_something_else_or_in_the_place_of_something(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF and no more")
    (tmp_path / "wheel.whl").write_bytes(b"PK")
    for name, output, said in (("wheel.whl", "out", "no GGUF file"), ("none", "out", "no GGUF file"),
                               ("model.gguf", ".", "is there already")):  # fmt: skip
        with pytest.raises(SystemExit, match=said):
            study.main(["teacher", str(tmp_path / name), str(tmp_path / output)])


@pytest.fixture
def made(tmp_path, capsys, monkeypatch):
    """Two layers of three, converted."""
    teacher = tiny_source("llama", tmp_path / "teacher").path
    job = ["convert", teacher, "--to", "dsla", "--output", tmp_path / "made", "--data", "builtin", "--seq-len", "64"]
    job += ["--fraction", "0.7", "--steps", "1", "--batch-size", "1", "--validation", "1", "--samples", "1", "--device"]
    monkeypatch.setattr(sys, "argv", ["lapcli", *map(str, [*job, "cpu", "--quiet"])])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert not exit_.value.code, capsys.readouterr().err
    return tmp_path / "made"


def test_what_was_changed_is_packed_and_the_model_made_again(made, tmp_path, capsys):
    model, file = made / "models" / "2-of-3", tmp_path / "changed.safetensors"
    study.main(["pack", str(model), str(file)])
    assert "2 layers" in capsys.readouterr().out
    assert file.stat().st_size < (model / "model.safetensors").stat().st_size / 2
    study.main(["unpack", str(tmp_path / "teacher"), str(file), str(tmp_path / "again")])
    first, again = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert (tmp_path / "again" / "config.json").read_bytes() == (model / "config.json").read_bytes()
    other = tiny_source("llama", tmp_path / "other", rms_norm_eps=1e-5).path
    with pytest.raises(SystemExit, match="is for the teacher"):
        study.main(["unpack", str(other), str(file), str(tmp_path / "third")])
    # As any file that this user makes.
    (tmp_path / "plain").touch()
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode
    teacher, third = str(tmp_path / "teacher"), tmp_path / "third"
    (tmp_path / "cut.safetensors").write_bytes(file.read_bytes()[:-9])
    (tmp_path / "tiny.yaml").write_text("model: 1\n")
    for packed, said in (
        ("cut.safetensors", "truncated or damaged"),
        ("tiny.yaml", "truncated or no safetensors file"),
        ("nosuch", "there is no"),
        (model / "model.safetensors", "none that `pack` wrote"),
    ):
        assert said in exit_code(["unpack", teacher, str(tmp_path / packed), str(third)])
        assert not third.exists()
    said = exit_code(["unpack", teacher, str(file), str(tmp_path / "again")])
    assert "again exists already" in said
    assert "--overwrite" not in said
    assert "is no directory" in exit_code(["unpack", str(tmp_path / "nosuch"), str(file), str(third)])


def test_only_what_a_conversion_wrote_is_packed_or_looked_at(tmp_path):
    model, nothing = tiny_source("llama", tmp_path / "teacher").path, tmp_path / "nosuch"
    output = tmp_path / "out"
    for command, said in (("pack", "has no dual_state"), ("look", "is no conversion")):
        assert said in exit_code([command, str(model), str(output)])
    assert "is no directory" in exit_code(["pack", str(nothing), str(output)])
    assert f"{nothing} is no conversion" in exit_code(["look", str(nothing), str(output)])
    half = tmp_path / "half"
    shutil.copytree(model, half / "base")
    assert "conversion.json cannot be read" in exit_code(["look", str(half), str(output)])
    (half / "conversion.json").write_text("{")
    assert "conversion.json is damaged" in exit_code(["look", str(half), str(output)])
    assert exit_code(["look", str(half), str(output), "--device", "abacus"]) == 2
    assert not output.exists()
    job = ["run", "--work", str(tmp_path / "work"), "--output", str(tmp_path / "lines.jsonl")]
    assert "nosuch is no directory" in exit_code([*job, "--model", str(nothing)])
    assert "cannot be opened" in exit_code(["prepare", str(nothing), str(output)])


def test_a_conversion_is_looked_at_layer_by_layer(made, tmp_path):
    arguments = ["look", made, tmp_path / "seen.jsonl", "--samples", "2", "--length", "40"]
    study.main([str(each) for each in arguments])
    found = [json.loads(each) for each in (tmp_path / "seen.jsonl").read_text().splitlines()]
    order = json.loads((made / "conversion.json").read_text())["order"]
    assert [each["layer"] for each in found] == order
    for each in found:
        assert each["edges"] == [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
        widths = [b - a for a, b in zip(each["edges"], [*each["edges"][1:], 40], strict=True)]
        # Of a softmax, the weights of all distances add up to 1.
        assert sum(w * x for w, x in zip(widths, each["weight"], strict=True)) == pytest.approx(1, abs=1e-6)
        assert all(min(each[name]) > 0 for name in ("mixed", "state 0", "state 1"))
    shutil.rmtree(made / "models")
    with pytest.raises(SystemExit, match="no model written out"):
        study.main([str(each) for each in arguments])


def test_distances_are_drawn_a_panel_a_layer_and_the_same_each_time(tmp_path):
    """Bins of 1, 3 and 4 tokens; a curve through places where the logarithm of a distance is defined."""
    layers = [
        {"layer": layer, "mixture": [share, 1 - share], "edges": [0, 1, 4], "weight": [0.5, 0.1, 0.05],
         "mixed": [4.0, 2.0, 1.0], "state 0": [2.0, 1.5, 1.0], "state 1": [2.0, 0.5, 0.01]}
        for layer, share in ((25, 0.25), (18, 0.75))
    ]  # fmt: skip
    (tmp_path / "seen.jsonl").write_text("".join(json.dumps(layer) + "\n" for layer in layers))
    for name in ("one.svg", "two.svg"):
        study.main(["draw", str(tmp_path / "seen.jsonl"), str(tmp_path / name), "--length", "8"])
    drawn = (tmp_path / "one.svg").read_text()
    assert drawn == (tmp_path / "two.svg").read_text()
    for words in ("layer 25", "layer 18", "history", "recency", "share of history in the mixture"):
        assert words in drawn
    three = tmp_path / "three.svg"
    (tmp_path / "x.jsonl").write_text('{"a":1}\n')
    (tmp_path / "cut.jsonl").write_text((ROOT / "docs" / "dsla.jsonl").read_text()[:3000])
    for name, said in (("nothing", "cannot be read"), ("x", "line 1: lacks layer"), ("cut", "no line of `look`")):
        found = exit_code(["draw", str(tmp_path / f"{name}.jsonl"), str(three)])
        assert said in found
        assert "dsla_study.py look" in found
    assert exit_code(["draw", str(tmp_path / "seen.jsonl"), str(three), "--length", "4"]) == 2
    assert exit_code(["draw", str(tmp_path / "seen.jsonl"), str(tmp_path / "o.foo")]) == 2
    assert not three.exists()
    assert not (tmp_path / "o.foo").exists()
