"""`pca` from the command line: what keeps directions is shown, drawn and refused wherever channels are."""

import json

import pytest

from lapcli.testing.models import tiny_delta_net

SIZES = ["--samples", "3", "--seq-len", "48", "--device", "cpu"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_delta_net(tmp_path_factory.mktemp("model") / "tiny", head_shared_conv=True, qk_activation="identity")


def test_a_run(lapcli, tiny, text, tmp_path):
    job = [tiny, "--data", text, "--ratio", "0.5", *SIZES]
    code, out, err = lapcli("prune", *job, "--method", "pca", "--json")
    assert code == 0, err
    assert "warning: pca is experimental" in err
    assert json.loads(out)["kept_width"] == 16
    assert lapcli("prune", *job, "--method", "l1", "--run", "other")[0] == 0
    code, out, err = lapcli("prune", *job, "--method", "pca", "--json")
    assert (code, set(json.loads(out)["worked"].values())) == (0, {False}), err
    code, _out, err = lapcli("prune", *job, "--method", "drrqr")
    assert (code, "method: drrqr wanted, pca found" in err) == (1, True), err

    code, out, err = lapcli("inspect", "lapcli-run/selection.safetensors", "--json")
    assert code == 0, err
    (row, _other) = json.loads(out)["layers"]
    assert row.keys() == {"layer", "directions", "heads", "variance kept (least)"}
    assert row["directions"] == 16
    assert 0.5 < row["variance kept (least)"] < 1
    assert lapcli("inspect", "lapcli-run/selection.safetensors")[0] == 0

    analyze = ["analyze", "--data", text, *SIZES, "--stride", "8", "--skip", "16"]
    code, out, err = lapcli(*analyze, "--json")
    assert code == 0, err
    everything, kept = json.loads(out)["conditioning"]
    # The directions of largest variance keep the largest singular value; and no others are better conditioned.
    assert kept[1] == pytest.approx(everything[1], rel=1e-9)
    assert kept[2] < everything[2]
    assert not (tmp_path / "lapcli-run" / "analysis" / "filters.png").exists()
    for run, compare in (("lapcli-run", "other"), ("other", "lapcli-run")):
        code, _out, err = lapcli(*analyze, "--run", run, "--compare", f"{compare}/selection.safetensors")
        assert (code, "keeps directions and no channels" in err) == (1, True), err

    code, _out, err = lapcli("report", "lapcli-run")
    assert code == 0, err
    said = (tmp_path / "lapcli-run" / "report.md").read_text()
    assert "pca" in said
    assert "Conditioning of the joint key and query columns" in said


def test_a_sweep_beside_selectors_of_channels(lapcli, tiny, text):
    arguments = ["sweep", "--model", tiny, "--data", text, "--method", "pca,l1", "--ratio", "0.5", *SIZES]
    code, out, err = lapcli(*arguments, "--tasks", "builtin", "--limit", "1", "--dry-run", "--json")
    assert code == 0, err
    assert [name.split("-")[0] for name in json.loads(out)["cells_to_do"]] == ["pca", "l1"]


def test_the_list_says_that_it_is_experimental(lapcli):
    code, out, _err = lapcli("list", "selectors", "--json")
    (row,) = (row for row in json.loads(out) if row["selector"] == "pca")
    assert (code, row["keeps the channels"].startswith("experimental: ")) == (0, True)
