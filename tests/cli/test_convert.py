"""`lapcli convert`, and `lapcli recover --add-query-feedback`, which converts on the way."""

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lapcli.artifacts import Lineage, write_document
from lapcli.families.source import resolve_model
from lapcli.stages import recovery
from lapcli.stages.lineage import LINEAGE_FILE
from lapcli.testing.dual_state import converted_source
from lapcli.testing.models import tiny_delta_net, tiny_gated_deltanet
from lapcli.training.reload import Reloaded

# What was trained is freed before it is read again.
pytestmark = pytest.mark.usefixtures("older_objects_left_alone")

SMALL = (
    "--steps",
    "3",
    "--batch-size",
    "2",
    "--seq-len",
    "48",
    "--validation",
    "2",
    "--lora-rank",
    "4",
    "--lr",
    "1e-2",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_gated_deltanet(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"Line {i} says {i * i % 89}, and more. " * 3}) + "\n" for i in range(99))
    )
    return path


def test_convert(lapcli, base, tmp_path):
    output = tmp_path / "made"
    code, out, err = lapcli("convert", base, "--to", "qdelta", "--output", output, "--dry-run", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert plan["writes"] == str(output)
    assert not output.exists()
    code, out, err = lapcli("convert", base, "--to", "qdelta", "--output", output, "--json")
    assert code == 0, err
    made = json.loads(out)
    assert made["worked"]
    assert {key: made[key] for key in ("added_tensors", "added_parameters")} == {
        key: plan[key] for key in ("added_tensors", "added_parameters")
    }
    assert "the same function" in made["computes"]
    code, out, err = lapcli("convert", base, "--to", "qdelta", "--output", output)
    assert code == 0
    assert "nothing to do" in err
    assert out == ""
    code, out, err = lapcli("convert", base, "--to", "qdelta", "--output", output, "--dry-run", "--json")
    assert json.loads(out)["there_already"]


def test_a_dry_run_refuses_what_the_conversion_would(lapcli, base, tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    made = ("convert", base, "--to", "qdelta", "--output")
    assert lapcli(*made, "made", "--lambda-init", "0.1")[0] == 0
    for output, said in (
        ("foreign", "did not write it"),
        (base, "is, or holds, the model itself"),
        (base / "below", "lies in the directory of"),
        (base / ".." / base.name / "far" / "below", "lies in the directory of"),
        ("file", "did not write it"),
        ("file/below", "is no directory"),
        ("made", "lambda_init"),
    ):
        refused = [lapcli(*made, output, *more) for more in ((), ("--dry-run",))]
        assert [(code, said in err) for code, _out, err in refused] == [(1, True)] * 2
        assert refused[0] == refused[1]
    assert lapcli(*made, "made", "--overwrite", "--dry-run")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "--to is missing"),
        (("--to", "mamba"), 2, "'mamba' is not known"),
        (("--to", "qdelta"), 2, "--output is missing"),
        (("--to", "qdelta", "--output", "x", "--lambda-init", "1"), 2, "between 0 and 1"),
    ],
    ids=["nothing", "unknown", "nowhere", "all-feedback"],
)
def test_what_is_asked_wrongly(lapcli, base, tmp_path, monkeypatch, arguments, code, said):
    monkeypatch.chdir(tmp_path)
    found, _out, err = lapcli("convert", base, *arguments)
    assert found == code
    assert said in err
    assert not list(tmp_path.iterdir())


def test_a_pruned_model_gets_query_feedback_on_its_way_to_recovery(lapcli, base, text, tmp_path):
    run = tmp_path / "run"
    code, _out, err = lapcli("prune", base, "--data", text, "--samples", 4, "--seq-len", 64, "--run", run, "--quiet")
    assert code == 0, err
    before = sorted(path.name for path in run.iterdir())
    ask = ("recover", "--data", text, *SMALL, "--add-query-feedback", "--run", run)
    code, out, err = lapcli(*ask, "--dry-run", "--json")
    assert code == 0, err
    dry = json.loads(out)
    assert dry["converts"]["writes"] == str(run / "converted")
    assert dry["teacher"] == str(base)
    assert sorted(path.name for path in run.iterdir()) == before

    code, out, err = lapcli(*ask, "--json")
    assert code == 0, err
    made = json.loads(out)
    added = dry["converts"]["added_parameters"]
    code, out, _err = lapcli(*ask, "--dry-run", "--json")
    planned = json.loads(out)
    assert planned["finished"]
    assert "converts" not in planned
    assert planned["trained_parameters"] == dry["trained_parameters"] + added
    config = json.loads((Path(made["recovered"]) / "config.json").read_text())
    assert (config["model_type"], config["head_dim"], config["lamb_gain"]) == ("qdelta", 16, True)
    weights = load_file(Path(made["recovered"]) / "model.safetensors")
    moved = {name: tensor for name, tensor in weights.items() if "lamb" in name}
    assert len(moved) == 4
    assert 0 < made["contraction"]["mean"] < 2
    assert made["contraction"]["outside"] == 0
    assert "beta k.x" in (Path(made["recovered"]) / "README.md").read_text()
    assert '"contraction"' in (run / "recovery" / "curve.jsonl").read_text()
    # Gains first; the projections once those are not zero.
    assert all(tensor.abs().max() > 0 for tensor in moved.values())

    # Without it, it would be another recovery; and another feedback another conversion.
    plain = tuple(part for part in ask if part != "--add-query-feedback")
    for arguments, said in ((plain, "--restart"), ((*ask, "--lambda-init", "0.2"), "lambda_init"),
                            ((*plain, "--lambda-init", "0.2"), "--add-query-feedback")):  # fmt: skip
        code, _out, err = lapcli(*arguments)
        assert code in (1, 2)
        assert said in err
    code, _out, err = lapcli(*ask, "--model", run / "recovered")
    assert code == 1
    assert "Q-Delta already" in err


def test_a_recipe_adds_query_feedback_and_a_report_says_so(lapcli, base, text, tmp_path):
    recipe, run = tmp_path / "chain.yaml", tmp_path / "run"
    chain = {
        "model": str(base),
        "calibration": {"data": str(text), "samples": 4, "seq_len": 64},
        "selection": {"method": "l1", "ratio": 0.5},
        "recovery": {"data": str(text), "seq_len": 48, "steps": 2, "batch": 2, "validation": 1, "lr": 1e-2,
                     "rank": 4, "add_query_feedback": True},
        "evaluation": {"tasks": [f"text:{text}"], "limit": 1},
    }  # fmt: skip
    recipe.write_text(json.dumps(chain))
    code, _out, err = lapcli("run", recipe, "--run", run, "--dry-run")
    assert (code, run.exists()) == (0, False)
    assert "made a Q-Delta first" in err
    assert "converted/" in err
    code, out, err = lapcli("run", recipe, "--run", run, "--device", "cpu", "--json")
    assert code == 0, err
    made = json.loads(out)
    assert json.loads((run / "recovered" / "config.json").read_text())["model_type"] == "qdelta"
    code, _out, err = lapcli("report", run, "--quiet")
    assert code == 0, err
    page = (run / "report.md").read_text()
    assert "| query feedback |" in page
    assert "| after | added, from 0 |" in page
    assert "--add-query-feedback" in page
    # The same command, from the recipe or by hand, finds it there.
    code, out, err = lapcli("recover", "--recipe", recipe, "--run", run, "--dry-run", "--json")
    assert code == 0, err
    again = json.loads(out)
    assert again["finished"]
    assert made["recovery"]["step"] == again["steps"] == 2
    chain["recovery"]["lambda_init"] = 0.3
    recipe.write_text(json.dumps(chain))
    code, _out, err = lapcli("run", recipe, "--run", run, "--device", "cpu")
    assert code == 1
    assert "lambda_init: 0.3 wanted" in err
    chain["model"] = str(tiny_delta_net(tmp_path / "other"))
    recipe.write_text(json.dumps(chain))
    code, _out, err = lapcli("run", recipe, "--run", tmp_path / "none", "--dry-run")
    assert code == 1
    assert "becomes a Q-Delta is a gated_deltanet" in err


def test_a_recovery_that_is_refused_leaves_conversions_alone(lapcli, base, text, tmp_path, monkeypatch):
    """Neither made nor replaced; and one that came to nothing brings back what it had replaced."""
    # Not the subject, and seconds each time.
    monkeypatch.setattr(recovery, "check_reload", lambda *_arguments: Reloaded(0.0, 1.0, 1.0))
    run = tmp_path / "run"
    code, _out, err = lapcli("prune", base, "--data", text, "--samples", 4, "--seq-len", 64, "--run", run, "--quiet")
    assert code == 0, err
    ask = ("recover", *SMALL, "--add-query-feedback", "--run", run)
    (tmp_path / "short.txt").write_text("Too little.")
    for wrong in (("--data", "missing.jsonl"), ("--data", "short.txt"), ("--data", text, "--lora-target", "nothing")):
        assert lapcli(*ask, *wrong)[0] == 1
        assert not (run / "converted").exists()
    assert lapcli(*ask, "--data", text)[0] == 0

    def contents():
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}

    before = contents()
    anew = (*ask, "--restart", "--lambda-init", "0.3")
    assert lapcli(*anew, "--data", "missing.jsonl")[0] == 1
    assert contents() == before
    # Not known before it trains.
    code, _out, err = lapcli(*anew, "--data", text, "--lr", "1e30")
    assert code == 1
    assert "the earlier recovery is in its place again" in err
    assert contents() == before
    # Killed between the two.
    with monkeypatch.context() as patch:
        patch.setattr(recovery, "recover_into", _killed)
        with pytest.raises(RuntimeError):
            lapcli(*anew, "--data", text)
    assert (run / ".converted.before-restart").is_dir()
    code, _out, err = lapcli(*ask, "--data", text)
    assert code == 0
    assert "nothing to do" in err
    assert contents() == before
    # What conversion writes is the same again, so that a recovery of it goes on being one.
    (run / "converted" / "model.safetensors").unlink()
    code, _out, err = lapcli(*ask, "--data", text)
    assert code == 0, err
    assert "nothing to do" in err
    code, _out, err = lapcli(*anew, "--data", text)
    assert code == 0, err
    assert not list(run.glob(".*before-restart"))


def _killed(*_arguments, **_options):
    raise RuntimeError


def test_what_was_made_of_a_demo_is_pruned_on_small_text(lapcli, tmp_path):
    assert lapcli("convert", "demo:gdn", "--to", "qdelta", "--output", tmp_path / "q")[0] == 0
    code, out, _ = lapcli("prune", tmp_path / "q", "--ratio", "0.5", "--run", tmp_path / "run", "--dry-run", "--json")
    assert code == 0
    assert "builtin" in out
    assert "fineweb" not in out


def test_what_was_made_of_a_copy_of_a_demo_is_too(lapcli, tmp_path, monkeypatch):
    """A conversion keeps its teacher beside it, and its models say that they were made from that."""
    demo = resolve_model("demo:transformer")
    shutil.copytree(demo.path, tmp_path / "made" / "base")
    base = resolve_model("made/base")
    converted_source(base, tmp_path / "model", layers=(2,))
    lineage = Lineage("model", base.describe(), "dsla", {"stage": "linearising"})
    write_document(tmp_path / "model" / LINEAGE_FILE, lineage)
    for where in (tmp_path, tmp_path / "elsewhere"):
        where.mkdir(exist_ok=True)
        monkeypatch.chdir(where)
        code, out, err = lapcli("prune", tmp_path / "model", "--ratio", "0.5", "--dry-run")
        assert code == 0, err
        assert "65536 tokens of builtin" in err
        code, out, err = lapcli("analyze", "--model", tmp_path / "model", "--dry-run", "--json")
        assert code == 0, err
        assert json.loads(out)["text"] == "builtin"
    code, out, err = lapcli("convert", base.path, "--to", "dsla", "--output", "x", "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["steps_a_layer"] == 32
    # Other weights under the same config are another model.
    with (base.path / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    code, out, err = lapcli("convert", base.path, "--to", "dsla", "--output", "x", "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["steps_a_layer"] == 128
