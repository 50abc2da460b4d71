"""`lapcli train` as a user types it."""

import json

import pytest
import yaml

from lapcli.testing.models import byte_tokenizer, tiny_gated_deltanet

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
    assert "training" in err
    assert "trained: lapcli-train/trained\nnext: " in err
    code, out, err = lapcli("train", recipe, "--device", "cpu", "--seed", 5, "--json", "--quiet", "--run", "again")
    assert (code, err, json.loads(out)["worked"]) == (0, "", True)
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
    assert "AdamW" in err
    code, out, err = lapcli("train", recipe, "--device", "cpu", "--optimizer", "muon", "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["held_bytes"] < plan["held_bytes"]
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


@pytest.fixture
def base(recipe, tmp_path):
    """A model of 264 rows with a tokenizer of 260 tokens, and a recipe that trains it on."""
    folder, tokenizer = tiny_gated_deltanet(tmp_path / "base", vocab_size=264), byte_tokenizer()
    tokenizer.add_tokens(["<its>"])
    tokenizer.save_pretrained(folder)
    recipe.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), "from": str(folder), "model": None}))
    return folder


def named(tmp_path, *added):
    """A tokenizer of the bytes and what was added to them."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(added))
    tokenizer.save_pretrained(tmp_path / "named")
    return tmp_path / "named"


@pytest.mark.parametrize(
    ("added", "code", "said"),
    [
        (["<its>"], 0, None),
        ([], 0, "1 of the model's will not occur, from id 259 ('<its>') on"),
        (["<its>", "<more>"], 0, "1 of its tokens are new to the model, from id 260 ('<more>') on"),
        (["<other>"], 1, "id 259 is '<its>' to"),
        (["<its>", "b1", "b2", "b3", "b4", "b5"], 1, "has the id 264 ('b5'), but the model embeds 264 ids"),
    ],
    ids=["same", "smaller", "larger", "another", "too large"],
)
@pytest.mark.usefixtures("base")
def test_a_tokenizer_beside_from_is_compared_with_the_models_own(lapcli, recipe, tmp_path, added, code, said):
    job = ["train", recipe, "--tokenizer", named(tmp_path, *added), "--device", "cpu"]
    found, _out, err = lapcli(*job, "--dry-run")
    flat = " ".join(err.split())
    assert found == code, err
    assert ("the tokenizer is not that of" in flat) == (code == 0 and said is not None)
    assert said is None or said in flat
    if code:
        assert lapcli(*job)[0] == code
        assert not (tmp_path / "lapcli-train").exists()


def test_a_model_without_a_tokenizer_takes_the_one_that_is_named(lapcli, recipe, base, tmp_path):
    for file in (*base.glob("tokenizer*"), *base.glob("special*")):
        file.unlink()
    assert lapcli("train", recipe, "--device", "cpu", "--dry-run")[0] == 1
    code, _out, err = lapcli("train", recipe, "--device", "cpu", "--dry-run", "--tokenizer", named(tmp_path))
    assert code == 0
    assert "has no tokenizer of its own" in " ".join(err.split())


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
