"""`lapcli convert --to dsla`: dry run, a conversion, going on, `--export`, and what is asked wrongly."""

import json
import re
import shlex
from dataclasses import replace

import pytest
import torch

from lapcli.artifacts import read_artifact, write_artifact
from lapcli.families.remote import lapcli_dual_state
from lapcli.families.source import resolve_model
from lapcli.linearising.kept import keep_teacher
from lapcli.linearising.record import layer_lineage, sensitivity_lineage, summarise
from lapcli.reporting import SilentReporter
from lapcli.stages import linearising as stage
from lapcli.testing.dual_state import tiny_conversion, tiny_source
from lapcli.testing.models import tiny_gated_deltanet

SMALL = ("--steps", "2", "--batch-size", "2", "--seq-len", "48", "--validation", "2", "--samples", "2")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return tiny_source("llama", tmp_path_factory.mktemp("model") / "teacher").path


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"Line {i} says {i * i % 89}, and more. " * 3}) + "\n" for i in range(99))
    )
    return path


def test_convert_and_export(lapcli, teacher, text, tmp_path):
    root = tmp_path / "made"
    command = ("convert", teacher, "--to", "dsla", "--fraction", "0.34", "--data", text, *SMALL, "--output", root)
    code, out, err = lapcli(*command, "--dry-run", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert (plan["layers"], plan["converts"], plan["tokens_a_layer"]) == (3, 1, 2 * 2 * 48)
    # Keys and values of two heads of 8 in bf16, of three layers; two fp32 states of 8 x 8 a head.
    assert plan["kv_bytes_a_token"] == {"before": 192, "after": 128}
    assert plan["state_bytes"] == 1024
    assert not root.exists()

    code, out, err = lapcli(*command, "--json", "--task", f"text:{text}", "--limit", "2")
    assert code == 0, err
    made = json.loads(out)
    assert made["worked"]
    assert "keeping " in err
    assert f"converted: {root}" in err
    assert "each row is a working model" not in err
    assert made["converted"] == str(root / "models" / "1-of-3")
    assert {each["metric"] for each in made["prefixes"][0]["tasks"]} >= {"token_perplexity"}
    assert resolve_model(made["converted"]).config["dual_state"]["layers"] == made["order"]

    code, out, err = lapcli(*command)
    assert code == 0
    assert "nothing to do" in err
    assert "trust_remote_code" in err
    assert "each row is a working model" in err
    assert out == ""

    code, out, err = lapcli(
        "convert", "--export", "0.34", "--output", root, "--export-to", tmp_path / "model", "--json", "--quiet"
    )
    assert (code, err) == (0, "")
    assert json.loads(out) == {"converted": str(tmp_path / "model"), "layers": 1, "worked": True}
    thesis = tmp_path / "mine" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.touch()
    for place, said in (
        (thesis.parent, "did not write it"),
        (root, "is, holds or lies in"),
        (root / "base" / "x", "lies"),
    ):
        for more in ((), ("--dry-run",)):
            code, _out, err = lapcli(
                "convert", "--export", "0.34", "--output", root, "--export-to", place, "--overwrite", *more
            )
            assert code == 1
            assert said in err
    code, _out, err = lapcli(
        "convert", root / "base", "--to", "dsla", "--data", text, *SMALL, "--output", root, "--overwrite"
    )
    assert code == 1
    assert "which --overwrite would remove" in " ".join(err.split())
    assert thesis.is_file()
    assert resolve_model(str(root / "base")).digest == resolve_model(str(teacher)).digest
    code, _out, err = lapcli("convert", "--export", "1", "--output", root)
    assert code == 1
    assert "holds 1 converted layers of 3, and 3 are asked for" in err
    code, _out, err = lapcli("inspect", tmp_path / "model")
    assert code == 0, err
    code, out, err = lapcli("inspect", root, "--json")
    assert code == 0, err
    held = json.loads(out)
    assert (held["kind"], held["facts"]["converted"]) == ("conversion", "1 of 3 layers")
    assert held["facts"]["models written"] == "1-of-3"
    assert held["facts"]["what they became"]["states"] == 2
    assert [row["layer"] for row in held["layers"]] == made["order"]
    assert held["layers"][0]["perplexity"] == made["prefixes"][0]["perplexity"]
    code, out, err = lapcli("inspect", root)
    assert code == 0, err
    assert "layers in the order of their conversion" in out + err
    assert "sinks" not in held["facts"]["what they became"]

    # What is suggested goes on from what is there: the settings are its own.
    code, _out, err = lapcli("convert", "--export", "0.67", "--output", root)
    assert code == 1
    first = (root / "prefixes").glob("*")
    before = {path: path.read_bytes() for path in first}
    code, out, err = lapcli(*suggested(err), "--json")
    assert code == 0, err
    assert json.loads(out)["order"][:1] == made["order"]
    assert json.loads(out)["converted"] == str(root / "models" / "2-of-3")
    assert {path: path.read_bytes() for path in before} == before
    assert lapcli("convert", "--export", "0.67", "--output", root)[0] == 0


def suggested(err):
    """The arguments of the command that an error ends with."""
    (command,) = re.findall(r"lapcli (convert [^;\n]*)", err)
    return shlex.split(command)


class Stopped(Exception):
    """Nothing is trained in this test."""


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--lr", "0.01"),
        ("--lr", "0.01", "--lr-min", "0.002"),
        ("--lr-min", "1e-5", "--steps", "3"),
        ("--seq-len", "48", "--seed", "3"),
        ("--window", "8", "--sinks", "2", "--sensitivity", "first"),
        ("--window", "equal", "--states", "3"),
        ("--states", "3", "--start", "random", "--no-fit", "--independent"),
        ("--align-loss", "kl", "--kl-weight", "0.5", "--rows", "all", "--batch-size", "2", "--sensitivity", "entropy"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("summarised", [True, False], ids=["ended", "stopped"])
def test_the_command_that_goes_on_has_the_conversion_s_settings(
    lapcli, teacher, text, tmp_path, monkeypatch, options, summarised
):
    root = tmp_path / "its place"

    def convert(plan, **_options):
        keep_teacher(plan, SilentReporter())
        found = None
        if plan.settings.order != "first":
            tensors = {name: torch.tensor([3.0, 2.0, 1.0]) for name in {"entropy", plan.settings.order}}
            found = write_artifact(plan.place.sensitivity, sensitivity_lineage(plan), tensors)
        layer = 0 if found is None else 2
        record = {"number": 1, "layer": layer, "cross_entropy": 2.0, "teacher_cross_entropy": 1.0}
        lineage = replace(layer_lineage(plan, 1, layer, []), record=record)
        made = write_artifact(plan.place.prefix(1, layer), lineage, {"x": torch.zeros(1)})
        if summarised:
            summarise(plan, [made], found)
        raise Stopped

    monkeypatch.setattr(stage, "linearise_into", convert)
    with pytest.raises(Stopped):
        lapcli("convert", teacher, "--to", "dsla", "--data", text, *options, "--output", root, "--fraction", "0.3")
    code, _out, err = lapcli("convert", "--export", "1", "--output", root)
    assert code == 1
    assert "holds 1 converted layers of 3, and 3 are asked for" in err
    code, out, err = lapcli(*suggested(err), "--dry-run", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert (plan["converted_already"], plan["converts"]) == (1, 3)
    assert bool(plan["measured_already"]) == (plan["order"] != "first")
    # What only a recipe says cannot be said by options.
    path = next((root / "prefixes").iterdir())
    artifact = read_artifact(path)
    distillation = {**artifact.lineage.settings["distillation"], "warmup": 0.3}
    lineage = replace(artifact.lineage, settings={**artifact.lineage.settings, "distillation": distillation})
    tensors = artifact.tensors()
    path.unlink()
    write_artifact(path, lineage, tensors)
    assert (
        "lapcli convert --recipe FILE --fraction 1 --output" in lapcli("convert", "--export", "1", "--output", root)[2]
    )


def test_a_damaged_teacher_is_made_again_from_where_it_came(lapcli, teacher, text, tmp_path):
    root = tmp_path / "made"
    job = ("convert", teacher, "--to", "dsla", "--fraction", "0.34", "--data", text, *SMALL, "--output", root)
    assert lapcli(*job)[0] == 0
    weights, whole = root / "base" / "model.safetensors", resolve_model(str(teacher)).digest

    def lost():
        weights.unlink()

    def changed():
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.unlink()  # it may be the teacher's own file, by another name
        weights.write_bytes(content)

    def short():
        content = weights.read_bytes()[:-8]
        weights.unlink()
        weights.write_bytes(content)

    readers = (
        ("convert", "--export", "0.34", "--output", root, "--export-to", "out"),
        ("convert", "--export", "0.34", "--output", root, "--export-to", "out", "--dry-run"),
        ("serve", root, "--dry-run"),
        ("inspect", root),
    )
    for damage, told in ((lost, readers), (short, readers), (changed, readers[:2]), (lambda: None, ())):
        damage()
        commands = set()
        for reader in told:
            code, _out, err = lapcli(*reader)
            assert code == 1, reader
            assert "have it made again from where it came" in err
            commands.add(tuple(suggested(err)))
        for command in commands or {job}:
            code, _out, err = lapcli(*command, "--dry-run")
            assert code == 0, err
            code, _out, err = lapcli(*command)
            assert code == 0, err
            assert ("base is damaged; it is made again from" in err) == bool(told)
        assert len(commands) == bool(told)
        assert resolve_model(str(root / "base")).digest == whole
    # Another model is no mending.
    other = tiny_source("llama", tmp_path / "other", seed=3).path
    lost()
    for more in ((), ("--dry-run",)):
        code, _out, err = lapcli("convert", other, *job[2:], *more)
        assert code == 1
        assert f"is not {other}, which is to be converted there" in " ".join(err.split())


def test_a_conversion_to_windows_is_served_one_by_one(lapcli, tmp_path):
    root = tiny_conversion(tmp_path / "made", order=(2, 0), window=8)
    for wish in ((), ("--max-ppl-increase", "300%"), ("--fraction", "0.67")):
        code, _out, err = lapcli("serve", root, *wish, "--dry-run")
        assert code == 2
        assert "attend to a window with sinks, a control: there is no mixing them with attention" in err
    export, one, none = re.findall(r"lapcli ((?:convert|serve) [^;\n]*)", err)
    for command in (export, f"{one} --dry-run", f"{none} --dry-run"):
        code, _out, err = lapcli(*shlex.split(command))
        assert code == 0, err
    assert "0-of-3" in err
    code, out, err = lapcli("inspect", root, "--json")
    assert code == 0, err
    assert json.loads(out)["facts"]["what they became"] == {"window": 8, "sinks": 4}


def test_what_lapcli_made_is_called_by_its_name(lapcli, teacher, tmp_path):
    tiny_conversion(tmp_path / "whole", order=(2, 0))
    tiny_gated_deltanet(tmp_path / "gated")
    assert lapcli("convert", "gated", "--to", "qdelta", "--output", "q")[0] == 0
    assert lapcli("convert", "--export", "0.34", "--output", "whole", "--export-to", "one")[0] == 0
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    conversion = "whole is there: a whole conversion to dsla, with 2 converted layers"
    for arguments, said in (
        (("convert", "gated", "--to", "qdelta", "--output", "whole"), conversion),
        (("convert", "gated", "--to", "qdelta", "--output", "one"), "one is there: a model of a conversion to dsla"),
        (("convert", "gated", "--to", "qdelta", "--output", "run"), "run is there: a run directory"),
        (("convert", teacher, "--to", "dsla", "--output", "q"), "q is there: a model that was converted to qdelta"),
        (("convert", teacher, "--to", "dsla", "--output", "run"), "run is there: a run directory"),
        (("convert", "--export", "0.34", "--output", "whole", "--export-to", "q"), "q is there: a model that was conv"),
        (("prune", "one", "--run", "whole"), conversion),
        (("recover", "--run", "whole"), conversion),
        (("train", "train/small-gdn", "--run", "whole"), conversion),
        (("sweep", "--run", "whole"), conversion),
    ):
        before = sorted(path for path in tmp_path.rglob("*"))
        for more in ((), ("--overwrite",)) if arguments[0] in ("convert", "prune") else ((),):
            for dry in ((), ("--dry-run",)):
                code, _out, err = lapcli(*arguments, *more, *dry)
                assert code == 1
                assert said in err
                assert "remove" not in err
        assert sorted(path for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--to", "dsla"), "--output is missing"),
        (("--to", "dsla", "--output", "x", "--fraction", "25"), "did you mean 0.25, or 25%?"),
        (("--to", "dsla", "--output", "x", "--sensitivity", "entropie"), "--sensitivity 'entropie' is none of"),
        (("--to", "dsla", "--output", "x", "--states", "0"), "--states"),
        (("--to", "dsla", "--output", "x", "--align-loss", "l1"), "--align-loss"),
        (
            ("--to", "dsla", "--output", "x", "--window", "wide"),
            "--window 'wide': 'equal' or one whole number is wanted",
        ),
        (
            ("--to", "dsla", "--output", "x", "--window", "512,1024"),
            "one whole number is wanted for example --window 512",
        ),
        (("--to", "dsla", "--output", "x", "--window", "8", "--states", "4"), "--states is about layers with states"),
        (("--to", "dsla", "--output", "x", "--window", "8", "--width", "1"), "--width is about layers with states"),
        (("--to", "dsla", "--output", "x", "--window", "equal", "--start", "random"), "--start is about layers with"),
        (("--to", "dsla", "--output", "x", "--window", "8", "--penalty", "1"), "--penalty is about layers with states"),
        (("--to", "dsla", "--output", "x", "--window", "8", "--kernel", "chunked"), "--kernel is about layers with"),
        (("--to", "dsla", "--output", "x", "--sinks", "8"), "--sinks is about --window, which was not given"),
        (("--to", "dsla", "--output", "x", "--window", "0"), "--window"),
        (("--to", "dsla", "--output", "x", "--lambda-init", "0.5"), "--lambda-init is about --to qdelta"),
        (("--to", "qdelta", "--output", "x", "--steps", "5"), "--steps is about --to dsla"),
        (("--to", "qdelta", "--output", "x", "--no-fit"), "--no-fit is about --to dsla"),
        (("--to", "qdelta", "--output", "x", "--kernel", "chunked"), "--kernel is about --to dsla"),
        (("--to", "qdelta", "--output", "x", "--no-cuda-graphs"), "--no-cuda-graphs is about --to dsla"),
        (("--to", "qdelta", "--output", "x", "--require-fast"), "--require-fast is about --to dsla"),
        (("--to", "dsla", "--output", "x", "--export", "0.5"), "a model beside --export"),
        (("--to", "dsla", "--output", "x", "--export-to", "y"), "--export-to without --export"),
        (("--to", "dsla", "--output", "x", "--seq-len", "4096"), "longer than the 512 tokens"),
        (("--to", "dsla", "--output", "x", "--align-weight", "0", "--kl-weight", "0"), "nothing says what to learn"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_asked_wrongly(lapcli, teacher, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    code, _out, err = lapcli("convert", teacher, *arguments)
    assert code in (1, 2)
    assert said in " ".join(err.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--overwrite", "--dry-run")], ids=" ".join)
def test_a_conversion_lies_outside_of_its_model(lapcli, teacher, more):
    before = sorted(path.name for path in teacher.iterdir())
    for output, said in ((teacher / "sub", "lies in the directory of"), (teacher, "which no conversion writes")):
        code, _out, err = lapcli("convert", teacher, "--to", "dsla", "--output", output, *more)
        assert code == 1
        assert said in " ".join(err.split())
    assert sorted(path.name for path in teacher.iterdir()) == before


@pytest.mark.parametrize("kernel", ["reference", "chunked"])
def test_the_kernel_that_is_named_runs_in_every_new_layer(lapcli, teacher, text, tmp_path, monkeypatch, kernel):
    operator, asked = lapcli_dual_state._operator, []

    def heard(*arguments, **options):
        asked.append(options["impl"])
        return operator(*arguments, **options)

    monkeypatch.setattr(lapcli_dual_state, "_operator", heard)
    # By their loss, layers are replaced before any is trained, too.
    code, _out, err = lapcli(
        "convert", teacher, "--to", "dsla", "--fraction", "0.34", "--sensitivity", "loss", "--data", text, *SMALL,
        "--output", tmp_path / "made", "--kernel", kernel, "--device", "cpu",
    )  # fmt: skip
    assert code == 0, err
    assert len(asked) > 3
    assert set(asked) == {kernel}
    assert sum(f"kernel: {kernel} (asked for by name) in new layers" in line for line in err.splitlines()) == 1


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--kernel", "fla"), "--kernel fla cannot run here: "),
        (("--kernel", "triton"), "--kernel triton: layers with gated states have auto, reference, chunked, fla"),
        (("--require-fast",), "--require-fast: the chunked kernel would run"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_a_kernel_that_cannot_run_is_refused_before_any_work(lapcli, teacher, tmp_path, option, said):
    job = ("convert", teacher, "--to", "dsla", "--output", tmp_path / "x", *option, "--device", "cpu")
    for more in ((), ("--dry-run",)):
        found, _out, err = lapcli(*job, *more)
        assert found == 1
        assert said in " ".join(err.split())
    assert not (tmp_path / "x").exists()


def test_other_models_are_refused(lapcli, tmp_path):
    code, _out, err = lapcli("convert", "demo:gdn", "--to", "dsla", "--output", tmp_path / "x")
    assert code == 1
    assert "no attention that can become dual-state" in " ".join(err.split())
    assert not (tmp_path / "x").exists()
