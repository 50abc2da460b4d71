"""Checkpoints and configs that do not belong together are refused from headers alone, naming what is wrong."""

import json
import re
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file

from lapcli.artifacts import Lineage, RunDirectory, write_artifact
from lapcli.cli.inspect_ import describe
from lapcli.errors import ModelError
from lapcli.families import source as source_module
from lapcli.families.loading import load_model, load_tokenizer, resolve_model
from lapcli.recipe import CalibrationSettings, SelectionSettings
from lapcli.stages.pruning import plan_pruning
from lapcli.stages.slicing import plan_slicing
from lapcli.testing.models import tiny_delta_net, tiny_gated_deltanet, tiny_qdelta
from lapcli.testing.stock_models import tiny_stock_model

BUILDERS = {"gated": tiny_gated_deltanet, "delta": tiny_delta_net, "qdelta": tiny_qdelta}


ALL = list(BUILDERS)


def inspect(folder):
    describe(str(folder))


def plan(folder):
    calibration = CalibrationSettings(data="builtin", samples=4, seq_len=64)
    run = RunDirectory(folder.parent / "run")
    plan_pruning(resolve_model(str(folder)), calibration, SelectionSettings(ratio="0.5"), run)


def load(folder):
    load_model(resolve_model(str(folder)))


def cut(folder):
    source = resolve_model(str(folder))
    lineage = Lineage("selection", {"name": "another", "digest": "aa"}, "any", {})
    selection = write_artifact(folder.parent / "selection.safetensors", lineage, {"layers.0.kept": torch.zeros(1)})
    plan_slicing(source, selection)


ENTRANCES = (inspect, plan, load, cut)


def change_config(folder, **changes):
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def drop(name):
    return lambda weights: weights.pop(name)


def put(name, *shape):
    return lambda weights: weights.update({name: torch.zeros(shape)})


LAST = "model.layers.1.attn.k_proj.weight"
MISFITS = {
    "a-layer-more-in-config": (
        {"num_hidden_layers": 3},
        None,
        r"no tensor model\.layers\.2\.attn\..*num_hidden_layers = 3; the weights hold layers 0 to 1",
    ),
    "a-layer-fewer-in-config": (
        {"num_hidden_layers": 1},
        None,
        r"has a tensor model\.layers\.1\.attn.*num_hidden_layers = 1; the weights hold layers 0 to 1",
    ),
    "no-head": ({}, drop("lm_head.weight"), r"no tensor lm_head\.weight, but .*tie_word_embeddings = false"),
    "no-projection": ({}, drop(LAST), rf"no tensor {LAST}"),
    "misshapen": ({}, put(LAST, 64, 32), rf"{LAST} of .* \[64, 32\], but .*\[64 \(.*\), 64 \(hidden_size\)\]"),
    "heads": ({"num_heads": 4}, None, r"implies \["),
    "hidden-size": ({"hidden_size": 128}, None, r"embeddings\.weight .*\[259, 64\].*128 \(hidden_size\)"),
    "vocabulary": ({"vocab_size": 300}, None, r"\[259, 64\].*300 \(vocab_size\)"),
    "surplus": ({}, put("model.layers.0.attn.D", 2), r"has a tensor model\.layers\.0\.attn\.D, which"),
}


@pytest.mark.parametrize("builder", BUILDERS.values(), ids=BUILDERS)
@pytest.mark.parametrize(("config", "weights", "message"), MISFITS.values(), ids=MISFITS)
def test_misfits_are_refused_before_any_work(tmp_path, builder, config, weights, message):
    folder = builder(tmp_path / "m")
    change_config(folder, **config)
    if weights is not None:
        change_weights(folder, weights)
    for entrance in ENTRANCES:
        with pytest.raises(ModelError, match=message):
            entrance(folder)


CONFIGS = {
    "text-for-a-width": (ALL, {"hidden_size": "x"}, "hidden_size = 'x'; a whole number above 0 is wanted"),
    "no-width": (ALL, {"hidden_size": ...}, "no hidden_size; a whole number above 0"),
    "text-for-a-count": (ALL, {"num_hidden_layers": "2"}, "num_hidden_layers = '2'"),
    "no-heads": (ALL, {"num_heads": 0}, "num_heads = 0"),
    "negative-heads": (ALL, {"num_heads": -1}, "num_heads = -1"),
    "true-for-a-count": (ALL, {"num_heads": True}, "num_heads = True"),
    "text-for-a-switch": (ALL, {"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'; true or false"),
    "hybrid-in-words": (ALL, {"attn": "layer 1"}, "attn = 'layer 1'; null, or"),
    "infinite-factor": (ALL, {"expand_v": float("inf")}, "expand_v = inf; a number above 0"),
    "uneven-values": (ALL, {"expand_v": 0.71}, "expand_v = 0.71; a factor that makes"),
    "text-for-the-key-width": (["gated"], {"head_dim": "x"}, "head_dim = 'x'"),
    "uneven-value-heads": (["gated"], {"num_v_heads": 3}, "num_v_heads = 3; a multiple of num_heads = 2"),
    "no-value-heads": (["gated"], {"num_v_heads": 0}, "num_v_heads = 0"),
    "unknown-recurrence": (["qdelta"], {"compat": "paper"}, "compat = 'paper'; released or null"),
    "text-for-the-bias": (["qdelta"], {"lamb_bias": "0.9"}, "lamb_bias = '0.9'; a number"),
    "no-number-for-the-bias": (["qdelta"], {"lamb_bias": float("nan")}, "lamb_bias = nan; a number"),
    "no-eps": (ALL, {"norm_eps": None}, "norm_eps = None; a number above 0"),
    "text-for-another-switch": (ALL, {"allow_neg_eigval": "no"}, "allow_neg_eigval = 'no'; true or false"),
    "too-much-feedback": (["qdelta"], {"lamb_fixed": 1.5}, r"lamb_fixed = 1\.5; a number in \[0, 1\]"),
    "text-for-no-decay": (["qdelta"], {"use_decay": "no"}, "use_decay = 'no'; true or false"),
    "a-gain-that-is-not-there": (["qdelta"], {"lamb_gain": True}, r"no tensor model\.layers\.0\.attn\.lamb_gain"),
    "a-projection-too-many": (["qdelta"], {"lamb_fixed": 0.5}, r"has a tensor model\.layers\.0\.attn\.lamb_proj"),
    "uneven-keys": (["delta"], {"expand_k": 0.51}, "expand_k = 0.51; a factor that makes hidden_size = 64 a multiple"),
}


@pytest.mark.parametrize(
    ("builder", "config", "message"),
    [
        pytest.param(BUILDERS[name], config, message, id=f"{case}-{name}")
        for case, (names, config, message) in CONFIGS.items()
        for name in names
    ],
)
def test_a_bad_field_is_named_with_what_it_holds_and_should(tmp_path, builder, config, message):
    folder = builder(tmp_path / "m")
    change_config(folder, **config)
    for entrance in ENTRANCES:
        with pytest.raises(ModelError, match=message):
            entrance(folder)


def test_a_config_that_is_a_list_says_so(tmp_path):
    folder = tiny_delta_net(tmp_path / "m")
    (folder / "config.json").write_text("[1, 2]")
    with pytest.raises(ModelError, match=r"config\.json holds a JSON array; an object"):
        resolve_model(str(folder))


def test_an_index_without_its_map_says_so(tmp_path):
    folder = tiny_delta_net(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="has no weight_map"):
        plan(folder)


@pytest.mark.parametrize(
    "allowed",
    [
        pytest.param(lambda folder: change_config(folder, num_v_heads=None), id="null-means-absent"),
        pytest.param(lambda folder: change_config(folder, vocab_size=259, some_field=1), id="fields-of-others"),
        pytest.param(
            lambda folder: (
                change_config(folder, tie_word_embeddings=True),
                change_weights(folder, put("lm_head.weight", 259, 64)),
            ),
            id="tied-head-stored",
        ),
        pytest.param(
            lambda folder: (
                change_config(folder, attn={"layers": [1], "num_heads": 2}),
                change_weights(folder, lambda weights: [weights.pop(n) for n in list(weights) if "1.attn." in n]),
                change_weights(folder, put("model.layers.1.attn.q_proj.weight", 64, 64)),
            ),
            id="softmax-layer",
        ),
    ],
)
def test_what_fits_passes(tmp_path, allowed):
    folder = tiny_gated_deltanet(tmp_path / "m")
    allowed(folder)
    assert describe(str(folder))["layers"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(LAST), "no tensor"),
        (put(LAST, 64, 32), "shape"),
        (put("model.x", 2), "has a tensor"),
        (lambda weights: None, None),
    ],
    ids=["missing", "misshapen", "surplus", "nothing-wrong"],
)
def test_what_transformers_reports_is_refused_in_silence(tmp_path, monkeypatch, capfd, change, message):
    """The second line of defence, for families whose tensors are not declared."""
    monkeypatch.setattr(source_module, "refuse_misfit", lambda *_: None)
    folder = tiny_gated_deltanet(tmp_path / "m")
    change_weights(folder, change)
    capfd.readouterr()
    with nullcontext() if message is None else pytest.raises(ModelError, match=message):
        load(folder)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [("qwen3_next", "linear_key_head_dim", 16), ("mamba2", "n_groups", 1), ("qwen3_5", "linear_num_key_heads", 1)],
)
def test_widths_below_those_of_the_weights_are_refused(model_type, field, value, tmp_path):
    """Too few channels in the config would read as a smaller model; the convolution has them all."""
    more = {"n_groups": 2} if model_type == "mamba2" else {}
    folder = tiny_stock_model(model_type, tmp_path, **more)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ModelError, match=r"conv1d.weight of .* has \d+ channels, but config.json implies \d+"):
        assert resolve_model(str(folder)).headers


def test_an_index_that_does_not_say_where_tensors_lie_is_refused(tmp_path):
    folder = tiny_stock_model("mamba2", tmp_path, max_shard_size="60KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = list(index["weight_map"].values())
    name, shard = next((name, file) for name, file in index["weight_map"].items() if files.count(file) > 1)
    other = next(file for file in index["weight_map"].values() if file != shard)
    for wrong, words in (({name: other}, f"{name} is in {other}, but it is in {shard}"), ({}, f"{name} is in no file")):
        rest = {tensor: file for tensor, file in index["weight_map"].items() if tensor != name}
        path.write_text(json.dumps({**index, "weight_map": rest | wrong}))
        with pytest.raises(ModelError, match=re.escape(words)):
            assert resolve_model(str(folder)).headers


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    """transformers makes an empty one, and every text would be its end alone."""
    folder = tiny_stock_model("qwen3_next", tmp_path)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(resolve_model(str(folder)))
