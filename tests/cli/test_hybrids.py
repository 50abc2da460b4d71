"""Commands on a hybrid with a head that predicts further tokens: what becomes of it, and which modules LoRA meets."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lapcli.testing.stock_models import tiny_stock_model

HEADS = {
    "passes through": {"mtp.fc.weight": (64, 128), "mtp.layers.0.self_attn.q_proj.weight": (128, 64)},
    "dropped": {"mtp.fc.weight": (64, 128), "mtp.layers.0.linear_attn.in_proj_qkv.weight": (224, 64)},
}


def with_head(folder, head):
    tiny_stock_model("qwen3_5", folder)
    path = folder / "model.safetensors"
    save_file({**load_file(path), **{name: torch.ones(shape) for name, shape in head.items()}}, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}))
    return folder


@pytest.mark.parametrize("fate", HEADS)
def test_plans_say_what_becomes_of_a_head(lapcli, tmp_path, fate):
    """Case 25, before anything is written."""
    model = with_head(tmp_path / "m", HEADS[fate])
    for command in (("plan",), ("prune", "--dry-run", "--data", "builtin", "--samples", "2", "--seq-len", "64")):
        code, _out, err = lapcli(*command, model, "--keep", "16")
        assert code == 0, err
        assert fate in next(line for line in err.splitlines() if "MTP head" in line)
        code, out, err = lapcli(*command, model, "--keep", "16", "--json")
        assert code == 0, err
        assert json.loads(out)["mtp"] == fate


def test_lora_targets_that_miss_a_hybrids_recurrent_layers(lapcli, tmp_path):
    """Case 11: the names that peft takes for other models match the softmax layer alone."""
    model = tiny_stock_model("qwen3_5", tmp_path / "m")
    text = ("--data", "builtin", "--samples", "2", "--seq-len", "64")
    code, _out, err = lapcli("prune", model, "--method", "l1", "--keep", "16", *text)
    assert code == 0, err
    asked = ("recover", "--steps", "2", "--lora-rank", "4", "--data", "builtin", "--seq-len", "64", "--dry-run")
    for names in (("--lora-target", "q_proj,v_proj"), ("--lora-target", "q_proj", "--lora-target", "v_proj")):
        code, _out, err = lapcli(*asked, *names)
        assert code == 1
        assert "the LoRA targets q_proj, v_proj match 0 of 3 recurrent layers" in err
        for layer in range(3):
            assert f"layer {layer} (model.layers.{layer}.linear_attn): none" in err
        assert "never trained: model.layers.3.self_attn.q_proj, model.layers.3.self_attn.v_proj" in err
    trained = []
    for names in ((), ("--lora-target", "in_proj_qkv"), ("--lora-target", "in_proj_qkv, out_proj")):
        code, out, err = lapcli(*asked, *names, "--json")
        assert code == 0, err
        document = json.loads(out)
        assert document["lora"].keys() == {"0", "1", "2"}
        trained.append(document["trained_parameters"])
    assert trained[0] == trained[1] < trained[2]
    assert document["lora"]["2"] == [f"model.layers.2.linear_attn.{name}" for name in ("in_proj_qkv", "out_proj")]
    _code, _out, err = lapcli(*asked, *names)
    assert "in_proj_qkv, out_proj in layers 0-2" in " ".join(err.split())
