"""`lapcli analyze`: what it writes, says and refuses."""

import csv
import json
import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from lapcli.artifacts import Lineage, read_artifact, write_document
from lapcli.cli.analyze import _settings
from lapcli.families.source import resolve_model
from lapcli.stages.lineage import LINEAGE_FILE, made_of_a_demo
from lapcli.testing.dual_state import converted_source, tiny_source
from lapcli.testing.models import tiny_delta_net, tiny_gated_deltanet, tiny_qdelta
from lapcli.testing.stock_models import tiny_stock_model

SIZES = ["--samples", "3", "--seq-len", "48", "--stride", "8", "--skip", "16", "--device", "cpu"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_gated_deltanet(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def pruned(lapcli, tiny, text):
    """A run by drrqr, and another selection by l1 in `other/`."""
    job = [tiny, "--data", text, "--samples", "8", "--seq-len", "64", "--device", "cpu"]
    assert lapcli("prune", *job, "--ratio", "0.5")[0] == 0
    assert lapcli("calibrate", *job, "--run", "other")[0] == 0
    assert lapcli("select", "--method", "l1", "--ratio", "0.25", "--run", "other")[0] == 0


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_run_beside_its_base(lapcli, pruned, text, tmp_path, monkeypatch):
    arguments = ["analyze", "--data", text, *SIZES, "--compare", "other"]
    code, out, err = lapcli(*arguments, "--dry-run", "--json")
    assert code == 0, err
    # 4 positions of 3 samples, 2 layers of 2 heads, 2 models.
    assert json.loads(out)["states"] == 4 * 3 * 2 * 2 * 2
    folder = tmp_path / "lapcli-run" / "analysis"
    assert not folder.exists()

    code, out, err = lapcli(*arguments)
    assert code == 0, err
    assert out == ""
    assert "warning" not in err
    assert re.search(r"kappa\(S\) >= 1/sqrt\(u\) +48 +100.0000%", err)
    names = ["conditioning", "errors", "filters", "heads", "kappa", "overlap", "spectra", "utilisation"]
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        ElementTree.parse(folder / f"{name}.svg")

    artifact = read_artifact(folder / "analysis.safetensors", "analysis")
    assert artifact.tensor("positions").tolist() == [24, 32, 40, 48]
    tensors = artifact.tensors()
    rank = tensors["sliced.layers.1.effective_rank"]
    assert rank.shape == (3, 4, 2)
    # K is 16 of 32 now, V is 32.
    found = {(r["model"], r["layer"], r["head"], r["tokens"]): r for r in rows(folder / "utilisation.csv")}
    assert len(found) == 2 * 2 * 2 * 4
    mean = rank.double().mean(0)[1, 0].item()
    row = found["sliced", "1", "0", "32"]
    assert float(row["effective_rank"]) == pytest.approx(mean, rel=1e-9)
    assert float(row["utilisation"]) == pytest.approx(mean / 16, rel=1e-9)
    # Each head keeps 16 and 24 of 32 channels: at least 8 and at most 16 are in both.
    for row in rows(folder / "overlap.csv"):
        shared = int(row["shared"])
        assert 8 <= shared <= 16
        assert float(row["jaccard"]) == pytest.approx(shared / (40 - shared))
    sets = {row["channels"] for row in rows(folder / "conditioning.csv")}
    assert sets == {"all", "kept", "compared"}
    assert all(float(row["kappa"]) >= 1 for row in rows(folder / "conditioning.csv"))
    assert {(row["model"], row["layer"]) for row in rows(folder / "errors.csv")} == {("sliced", "0"), ("sliced", "1")}
    # The first mixer gets the base's inputs anyhow.
    first = rows(folder / "errors.csv")[0]
    assert first["own_inputs"] == first["base_inputs"] != "0.0"
    assert {row["lag"] for row in rows(folder / "filters.csv")} == {"0", "1", "2", "3"}

    # Pictures take most of the time, and have been looked at.
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = lapcli(*arguments, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert not document["worked"]
    assert document["models"]["sliced"]["pearson"] is not None
    assert len(document["conditioning"]) == 3

    code, out, err = lapcli("inspect", folder / "analysis.safetensors", "--json")
    assert code == 0, err
    assert json.loads(out)["facts"]["kind"] == "analysis"

    # Another stride is another analysis; without --compare its tables go.
    code, _out, err = lapcli("analyze", "--data", text, *SIZES, "--stride", "16")
    assert code == 1
    assert "stride: 16 wanted, 8 found" in err
    code, out, err = lapcli("analyze", "--data", text, *SIZES, "--stride", "16", "--overwrite", "--quiet")
    assert (code, out) == (0, ""), err
    assert not (folder / "overlap.csv").exists()
    assert not (folder / "overlap.png").exists()


def test_one_stock_model_alone(lapcli, text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    model = tiny_stock_model("mamba2", tmp_path / "mamba", n_groups=2)
    code, out, err = lapcli("analyze", "--model", model, "--data", text, *SIZES, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert list(document["models"]) == ["model"]
    assert "conditioning" not in document
    found = document["models"]["model"]
    assert 1 / 16 <= found["utilisation"] <= 1
    assert found["output_error"] is None
    assert all(bound["share"] in (1.0, None) for bound in found["bounds"].values())
    assert not (tmp_path / "lapcli-run" / "analysis" / "errors.csv").exists()
    assert "no pictures: pictures need matplotlib (pip install matplotlib)" in err
    assert not list((tmp_path / "lapcli-run" / "analysis").glob("*.png"))
    rank = read_artifact(tmp_path / "lapcli-run/analysis/analysis.safetensors").tensor("model.layers.0.effective_rank")
    assert rank.shape == (3, 4, 8)
    assert torch.all(rank >= 1)


def test_the_states_of_a_converted_transformer_and_of_what_was_pruned_of_it(lapcli, text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    converted_source(tiny_source("llama", tmp_path / "teacher"), tmp_path / "model", layers=(2, 0))
    job = ["--data", text, "--samples", "4", "--seq-len", "48", "--device", "cpu"]
    assert lapcli("prune", "model", *job, "--ratio", "0.5", "--run", "pruned")[0] == 0
    code, out, err = lapcli("analyze", "--data", text, *SIZES, "--run", "pruned", "--dry-run", "--json")
    assert code == 0, err
    # 4 positions of 3 samples, 2 layers of 2 key heads with 2 states each, 2 models.
    assert json.loads(out)["states"] == 4 * 3 * 2 * 4 * 2
    code, out, err = lapcli("analyze", "--data", text, *SIZES, "--run", "pruned", "--json")
    assert code == 0, err
    models = json.loads(out)["models"]
    folder = tmp_path / "pruned" / "analysis"
    tensors = read_artifact(folder / "analysis.safetensors").tensors()
    table = rows(folder / "states.csv")
    columns = [(row["model"], row["layer"], row["state"]) for row in table]
    assert columns == [(model, layer, state) for model in ("base", "sliced") for layer in "02" for state in "01"]
    for label, width in (("base", 8), ("sliced", 4)):
        ranks = torch.stack([tensors[f"{label}.layers.{index}.effective_rank"].double() for index in (0, 2)])
        kappas = torch.stack([tensors[f"{label}.layers.{index}.kappa"].double() for index in (0, 2)])
        assert ranks.shape == (2, 3, 4, 4)
        for state, found in enumerate(models[label]["states"]):
            # Value heads 0 and 1 are the two states of the first key head.
            mine = [state, state + 2]
            assert found["state"] == state
            assert found["effective_rank"] == pytest.approx(ranks[..., mine].mean().item(), rel=1e-9)
            assert found["utilisation"] == pytest.approx(ranks[..., mine].mean().item() / width, rel=1e-9)
            assert found["kappa_median"] == kappas[..., mine].flatten().median().item()
            of_second = next(row for row in table if list(row.values())[:3] == [label, "2", str(state)])
            assert float(of_second["effective_rank"]) == pytest.approx(ranks[1, ..., mine].mean().item(), rel=1e-9)
        assert all(bound["share"] in (1.0, None) for bound in models[label]["bounds"].values())
    code, _out, err = lapcli("analyze", "--data", text, *SIZES, "--run", "pruned")
    assert code == 0
    assert "states of each key head, by their number" in err


def test_refused_before_any_work(lapcli, pruned, tiny, text, tmp_path):
    data = ["--data", text, *SIZES]
    other = tiny_delta_net(tmp_path / "delta", num_heads=4)
    stranger = tiny_gated_deltanet(tmp_path / "stranger", seed=5)
    strange = [stranger, "--data", text, "--samples", "8", "--seq-len", "64", "--device", "cpu", "--run", "strange"]
    assert lapcli("prune", *strange, "--ratio", "0.5")[0] == 0
    (tmp_path / "empty").mkdir()
    for arguments, wanted in (
        (["--skip", "44"], (2, "skip + stride is 52, seq_len 48 pass --skip 0, or --seq-len 52 and more")),
        (["--stride", "64"], (2, "skip + stride is 80, seq_len 48 pass --skip 0 --stride 12, or --seq-len 80")),
        (["--compare", "empty"], (1, "--compare: there is no selection in empty")),
        (["--stride", "0"], (2, "--stride")),
        (["--samples", "0"], (2, "--samples")),
        (["--seq-len", "4096"], (1, "--seq-len 4096 is longer than the 2048 tokens")),
        (["--compare", "nowhere.safetensors"], (1, "there is no selection at nowhere.safetensors")),
        (["--compare", "lapcli-run/calibration.safetensors"], (1, "is a calibration, but a selection is wanted")),
        (["--compare", "strange/selection.safetensors"], (1, "was made for")),
        (["--model", tiny, "--baseline", other], (1, "cannot be compared with")),
        (["--model", tiny, "--compare", "other/selection.safetensors"], (2, "--compare")),
        (["--run", "fresh", "--compare", "other/selection.safetensors"], (1, "no selection in fresh")),
    ):
        code, out, err = lapcli("analyze", *data, *arguments)
        assert (code, out) == (wanted[0], ""), (arguments, err)
        assert wanted[1] in err.replace("\n", " "), arguments
    assert not (tmp_path / "lapcli-run" / "analysis").exists()
    assert not (tmp_path / "fresh").exists()


def test_query_feedback_is_followed_and_what_it_is_compared_with(lapcli, text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    tiny_gated_deltanet(tmp_path / "gated")
    tiny_qdelta(tmp_path / "qdelta", lamb_bias=-1.0)
    asked = ("analyze", "--model", "qdelta", "--baseline", "gated", "--data", text, *SIZES)
    code, out, err = lapcli(*asked, "--json")
    assert code == 0, err
    models = json.loads(out)["models"]
    found = {label: models[label]["stability"] for label in ("base", "model")}
    for told in found.values():
        assert 0 < told["p01"] < told["mean"] < told["p99"] < 1 + told["rho"]
        assert told["outside"] == 0
        assert told["rho"] < 1
        assert told["bound_share"] == 1
        assert -1 <= told["cosine"] <= 1
        assert told["drift"] <= told["value_drift"] + told["prediction_drift"]
    # 3 rows of 48 tokens, 2 layers, 2 heads.
    assert found["model"]["count"] == 3 * 48 * 2 * 2
    folder = tmp_path / "lapcli-run" / "analysis"
    table = rows(folder / "stability.csv")
    assert [(row["model"], row["layer"]) for row in table] == [(m, n) for m in ("base", "model") for n in "01"]
    artifact = read_artifact(folder / "analysis.safetensors")
    assert artifact.tensor("model.layers.1.contraction").shape == (3, 48, 2)
    mean = artifact.tensor("model.layers.1.contraction").double().mean().item()
    assert float(table[3]["mean"]) == pytest.approx(mean, rel=1e-6)
    # A model without feedback by itself is analysed as ever.
    code, out, err = lapcli("analyze", "--model", "gated", "--data", text, *SIZES, "--json", "--run", "other")
    assert code == 0, err
    assert "stability" not in json.loads(out)["models"]["model"]
    assert not (tmp_path / "other" / "analysis" / "stability.csv").exists()
    code, _out, err = lapcli(*asked)
    assert code == 0
    assert "stability" in err


def test_the_text_of_what_was_made_from_a_shipped_model(lapcli, tiny, tmp_path):
    slice_, child = (tiny_gated_deltanet(tmp_path / name) for name in ("slice", "child"))
    for folder, parent in ((slice_, "demo:gdn"), (child, str(slice_))):
        model = {"name": parent, "revision": None, "digest": "d" * 64}
        write_document(folder / LINEAGE_FILE, Lineage("model", model, "any", {"method": "l1"}))
    for model, data in ((slice_, "builtin"), (child, "builtin"), (tiny, "fineweb")):
        source = resolve_model(str(model))
        assert _settings(source, None, 1, 256, 32, 0, 0).data == data
        assert _settings(source, "recall", 1, 256, 32, 0, 0).data == "recall"
    # One that leads back to itself is no shipped model's.
    write_document(slice_ / LINEAGE_FILE, Lineage("model", {"name": str(child)}, "any", {"method": "l1"}))
    assert not made_of_a_demo(resolve_model(str(child)))
