"""`lapcli train` as a user types it."""

import json

import pytest
import yaml

RECIPE = {
    "model": {
        "model_type": "gated_deltanet", "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 16,
        "expand_v": 1.0, "intermediate_size": 48, "tie_word_embeddings": True,
    },
    "seq_len": 64, "batch_tokens": 256, "steps": 4, "validation": 0, "lr": 0.01,
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "data": str(text)}))
    return path


def test_a_recipe_becomes_a_model_that_is_pruned_with_no_path_typed(lapcli, recipe):
    code, out, err = lapcli("train", recipe, "--device", "cpu", "--seed", 5, "--json")
    assert code == 0, err
    made = json.loads(out)
    assert (made["trained"], made["worked"], made["step"]) == ("lapcli-train/trained", True, 4)
    code, out, err = lapcli("train", recipe, "--device", "cpu", "--seed", 5)
    assert code == 0
    assert "nothing to do" in err
    code, _out, err = lapcli("train", recipe, "--device", "cpu", "--seed", 6)
    assert code == 1
    assert "seed: 6 wanted, 5 found" in err
    code, out, err = lapcli(
        "prune",
        "--run",
        "lapcli-train",
        "--method",
        "l1",
        "--keep",
        8,
        "--samples",
        2,
        "--seq-len",
        64,
        "--data",
        "builtin",
        "--json",
    )
    assert code == 0, err
    assert "lapcli-train/trained" in json.loads(lapcli("inspect", "lapcli-train", "--json")[1])["facts"]["base model"]


def test_a_dry_run_says_what_it_would_cost_and_leaves_nothing(lapcli, recipe, tmp_path):
    code, out, err = lapcli("train", recipe, "--device", "cpu", "--tokens", 1000, "--dry-run", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert (plan["dry_run"], plan["steps"], plan["tokens"]) == (True, 4, 1024)
    assert plan["parameters"] > 4096 * 32
    assert plan["state_bytes"] == 4 * 2 * 2 * 16 * 16
    assert plan["operations"] > 6 * 1024 * plan["parameters"]
    code, out, err = lapcli("train", recipe, "--device", "cpu", "--tokens", 1000, "--dry-run")
    assert code == 0
    assert not out
    assert all(word in err for word in ("4 steps of 4 x 64", "weights from seed 0", "floating-point", "moments"))
    assert not (tmp_path / "lapcli-train").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--compile"], 2, "documents: joined"),
        (["--dtype", "bfloat16"], 2, "on a CPU training is in float32"),
        (["--gpus", "3"], 2, "cannot be shared by 3 processes"),
        (["--sharding", "zero"], 2, "none of none, fsdp"),
        (["--batch-tokens", "100"], 1, "no multiple of seq_len 64"),
        (["--steps", "0"], 2, "--steps: Input should be greater than 0"),
        (["--lr", "nan"], 2, "--lr: Input should be a finite number"),
        (["--tokens", "5", "--steps", "5"], 2, "either --tokens or --steps"),
        (["--from", "./nowhere"], 1, "no directory"),
        (["--kernel", "fla"], 1, "cannot"),
        (["--data", "nowhere"], 1, "nowhere"),
    ],
)
def test_what_cannot_be_is_refused_at_once(lapcli, recipe, tmp_path, arguments, code, said):
    found, _out, err = lapcli("train", recipe, "--device", "cpu", *arguments)
    assert found == code
    assert said in err
    assert not (tmp_path / "lapcli-train").exists()


def test_the_commands_of_recipes_send_each_other_theirs(lapcli, recipe):
    code, _out, err = lapcli("run", recipe)
    assert code == 1
    assert "lapcli train" in err
    code, _out, err = lapcli("train", "demo/recovery")
    assert code == 1
    assert "lapcli sweep" in err
    code, _out, err = lapcli("train", "train/small-gnd")
    assert code == 1
    assert "lapcli list recipes" in err


def test_small_recipes_begin_where_nothing_else_is(lapcli):
    code, out, err = lapcli("train", "train/small-qdelta", "--device", "cpu", "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["model_type"] == "qdelta"
