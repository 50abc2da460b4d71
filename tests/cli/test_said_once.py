"""What a command says at the terminal once: which kernels run, and what became of an MTP head."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lapcli.testing.dual_state import converted_source, tiny_source
from lapcli.testing.models import tiny_gated_deltanet
from lapcli.testing.stock_models import tiny_stock_model

LIBRARY = "kernels: transformers' PyTorch functions"


def _tiny(model: str, folder: Path) -> Path:
    if model == "own":
        return tiny_gated_deltanet(folder / "m")
    if model == "dsla":
        return converted_source(tiny_source("llama", folder / "teacher"), folder / "m")[0].path
    return tiny_stock_model(model, folder / "m")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("own", "kernel: chunked"),
        ("qwen3_next", "kernels: transformers' PyTorch functions"),
        ("mamba2", "kernels: transformers' PyTorch functions"),
        ("dsla", "kernel: chunked (matrix products over chunks in PyTorch"),
    ],
)
@pytest.mark.parametrize("command", ["prune", "calibrate"])
def test_one_visible_line_says_which_path_runs(lapcli, text, tmp_path, command, model, said):
    """Own and stock models; and with --require-fast exit 1 and nothing written."""
    folder = _tiny(model, tmp_path)
    job = [command, folder, "--data", text, "--samples", "8", "--seq-len", "64", "--device", "cpu"]
    before = {file for file in tmp_path.rglob("*") if file.is_file()}
    code, out, err = lapcli(*job, "--require-fast")
    assert (code, out) == (1, "")
    assert "--require-fast" in err
    assert "would run" in err
    assert "Traceback" not in err
    assert {f for f in tmp_path.rglob("*") if f.is_file() and f.name != ".lock"} == before
    code, out, err = lapcli(*job)
    assert code == 0, err
    assert sum(said in line for line in err.splitlines()) == 1, err
    assert sum("kernel:" in line or "kernels:" in line for line in err.splitlines()) == 1, err
    code, out, err = lapcli(*job, "--json") if command == "prune" else (0, "", "")
    assert "kernel" not in out.split("{")[0]


@pytest.mark.parametrize(
    ("head", "told"),
    [("mixer.q_proj", "passes through"), ("mixer.in_proj", "dropped (it keeps a state of its own)")],
)
def test_plan_and_prune_say_what_became_of_the_head(lapcli, text, tmp_path, head, told):
    """Case 25: a hybrid whose layers are a pattern of letters, with an MTP head (ModelOpt 2061)."""
    import json

    folder = tiny_stock_model("nemotron_h", tmp_path / "m")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("layers_block_type", None), config.pop("layer_types", None)
    config |= {
        "hybrid_override_pattern": "M*EM-", "num_hidden_layers": 5,
        "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "M" if "in_proj" in head else "*E",
    }  # fmt: skip
    path.write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors[f"mtp.layers.0.{head}.weight"] = torch.full((64, 64), 0.5)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    code, _out, err = lapcli("plan", folder, "--ratio", "0.5")
    assert code == 0, err
    assert told in " ".join(err.split()), err
    code, out, err = lapcli("plan", folder, "--ratio", "0.5", "--json")
    assert json.loads(out)["mtp"] == told.split(" (")[0]
    code, out, err = lapcli(
        "prune", folder, "--data", text, "--samples", "8", "--seq-len", "64", "--device", "cpu", "--ratio", "0.5"
    )
    assert code == 0, err
    assert ("MTP head" in err) == told.startswith("dropped"), err
    code, out, err = lapcli("plan", "lapcli-run/sliced", "--ratio", "0.5", "--json")
    assert json.loads(out)["mtp"] == (None if told.startswith("dropped") else "passes through")


@pytest.mark.parametrize(("model", "said"), [("own", "kernel: chunked"), ("qwen3_next", LIBRARY)])
@pytest.mark.parametrize("command", ["eval", "analyze"])
def test_what_measures_models_says_it_too(lapcli, text, tmp_path, command, model, said):
    folder = tiny_gated_deltanet(tmp_path / "m") if model == "own" else tiny_stock_model(model, tmp_path / "m")
    job = [
        command,
        *([f"text:{text}"] if command == "eval" else ["--data", text]),
        "--model",
        folder,
        "--device",
        "cpu",
    ]
    if command == "eval":
        job += ["--max-length", "64", "--limit", "1"]
    else:
        job += ["--samples", "4", "--seq-len", "64", "--skip", "16"]
    code, out, err = lapcli(*job, "--require-fast")
    assert (code, out) == (1, "")
    assert "--require-fast" in err
    assert not (tmp_path / "lapcli-run" / "evaluation.json").exists()
    code, _out, err = lapcli(*job)
    assert code == 0, err
    assert sum(said in line for line in err.splitlines()) == 1, err
