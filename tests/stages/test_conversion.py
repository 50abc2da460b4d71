"""A Gated DeltaNet as a Q-Delta: the same function to the bit, a gain that learns, and nothing lost on the way."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from lapcli.errors import ArtifactError, ModelError, UsageError
from lapcli.families.loading import load_model, load_tokenizer, resolve_model
from lapcli.reporting import SilentReporter
from lapcli.stages import conversion
from lapcli.stages.conversion import QDeltaSettings, convert_into, plan_conversion
from lapcli.stages.lineage import sliced_lineage
from lapcli.stages.recovery import teacher_of
from lapcli.testing.models import tiny_delta_net, tiny_gated_deltanet, tiny_qdelta
from lapcli.testing.oracle import relative_error
from lapcli.testing.slices import random_kept, sliced_by

IDS = torch.randint(3, 259, (2, 90), generator=torch.Generator().manual_seed(1))

MODELS = {
    "plain": {},
    "grouped values": {"num_v_heads": 4},
    "sharded, tied": {"max_shard_size": "60KB", "tie_word_embeddings": True},
    "no gate, negative eigenvalues": {"use_gate": False, "allow_neg_eigval": True},
}


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


def convert(source, output, lambda_init=None, **options):
    convert_into(plan_conversion(source, QDeltaSettings(lambda_init)), output, **options)
    return resolve_model(str(output))


def raw(source, name):
    header, entry = source.tensors[name]
    return header.path.read_bytes()[entry.start : entry.start + entry.nbytes]


@pytest.fixture
def base(tmp_path):
    return resolve_model(str(tiny_gated_deltanet(tmp_path / "base")))


@pytest.mark.parametrize("pruned", [False, True], ids=["whole", "pruned"])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_it_computes_the_same_to_the_bit_and_can_learn(tmp_path, config, pruned):
    source = resolve_model(str(tiny_gated_deltanet(tmp_path / "base", **config)))
    if pruned:
        source = sliced_by(source, random_kept(source, 11), tmp_path)
    made = convert(source, tmp_path / "made")
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(logits(load_model(made, dtype=dtype)), logits(load_model(source, dtype=dtype)))
    # Every tensor of the source is there, byte for byte, in the file that it was in.
    for name, (header, entry) in source.tensors.items():
        assert made.tensors[name][0].path.name == header.path.name
        assert (made.tensors[name][1].shape, made.tensors[name][1].dtype) == (entry.shape, entry.dtype)
        assert raw(made, name) == raw(source, name)
    layers = range(2)
    more = {f"model.layers.{n}.attn.{part}" for n in layers for part in ("lamb_proj.weight", "lamb_gain")}
    assert made.tensors.keys() - source.tensors.keys() == more
    if source.index is not None:
        assert made.index["metadata"]["total_size"] == sum(entry.nbytes for _h, entry in made.tensors.values())
    load_tokenizer(made)

    model = load_model(made)
    model(input_ids=IDS, labels=IDS).loss.backward()
    for mixer in model.mixers():
        assert mixer.lamb_gain.detach().abs().max() == 0
        assert mixer.lamb_gain.grad.abs().min() > 0


def test_a_plan_says_what_is_written(tmp_path, base):
    plan = plan_conversion(base, QDeltaSettings()).document()
    made = convert(base, tmp_path / "made")
    assert plan["bytes_before"] == sum(entry.nbytes for _h, entry in base.tensors.values())
    assert plan["bytes_after"] == sum(entry.nbytes for _h, entry in made.tensors.values())
    assert plan["added_parameters"] == 2 * (2 * 64 + 2)
    assert plan["added_tensors"] == len(made.tensors) - len(base.tensors)


def test_a_feedback_that_begins_elsewhere(tmp_path, base):
    made = convert(base, tmp_path / "made", 0.05)
    assert "lamb_gain" not in made.config
    model, seen = load_model(made), []
    for mixer in model.mixers():
        mixer.watch, mixer.watched = seen.append, True
    found = logits(model)
    for given in seen:
        torch.testing.assert_close(given.lamb, torch.full_like(given.lamb, 0.05), rtol=1e-6, atol=0)
    assert relative_error(found, logits(load_model(base))) > 1e-4
    for mixer in model.mixers():
        mixer.watched = False
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(mixer.lamb_proj.weight.grad.abs().max() > 0 for mixer in model.mixers())


@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, float("nan")])
def test_a_feedback_that_cannot_begin_so(value):
    with pytest.raises(UsageError, match="between 0 and 1"):
        QDeltaSettings(value)


def test_half_precision_whose_bytes_end_unevenly(tmp_path):
    """An odd number of bf16 values in front: fp32 after them would not be aligned, and libraries would not read it."""
    odd = {"num_heads": 1, "num_v_heads": 3, "head_dim": 5, "num_hidden_layers": 1}
    base = resolve_model(str(tiny_gated_deltanet(tmp_path / "base", **odd)))
    weights = {name: x.bfloat16() for name, x in load_file(base.path / "model.safetensors").items()}
    strength = "model.layers.0.attn.b_proj.weight"
    weights[strength] = weights[strength].float()
    save_file(weights, base.path / "model.safetensors", metadata={"format": "pt"})
    source = resolve_model(str(base.path))
    assert sum(entry.nbytes for _h, entry in source.tensors.values()) % 4 == 2
    made = convert(source, tmp_path / "made")
    for header in made.headers:
        first = min(entry.start for entry in header.tensors.values())
        for entry in header.tensors.values():
            size = {"F32": 4, "BF16": 2}[entry.dtype]
            assert (entry.start - first) % size == 0, entry.name
    assert torch.equal(logits(load_model(made)), logits(load_model(source)))


def test_the_teacher_of_a_converted_slice_is_the_unpruned_model(tmp_path, base):
    small = sliced_by(base, random_kept(base, 11), tmp_path)
    made = convert(small, tmp_path / "made")
    assert teacher_of(made).path == base.path
    whole = convert(base, tmp_path / "whole")
    assert teacher_of(whole).path == base.path
    lineage = sliced_lineage(made.path)
    assert lineage.settings["stage"] == "conversion"
    assert lineage.model["digest"] == small.digest


def test_it_is_made_once(tmp_path, base):
    made = convert(base, tmp_path / "made")
    written = made.shards[0].stat().st_mtime_ns
    plan, reporter = plan_conversion(base, QDeltaSettings()), SilentReporter()
    assert not convert_into(plan, made.path, reporter=reporter)
    assert made.shards[0].stat().st_mtime_ns == written
    (made.path / "tokenizer.json").unlink()
    assert convert_into(plan, made.path, reporter=reporter)
    assert "tokenizer.json" in reporter.warnings[0]
    with made.shards[0].open("r+b") as file:
        file.truncate(1000)
    assert convert_into(plan, made.path, reporter=reporter)
    assert "damaged" in reporter.warnings[1]
    assert torch.equal(logits(load_model(resolve_model(str(made.path)))), logits(load_model(base)))


def test_what_lies_there_is_not_lost(tmp_path, base):
    made = convert(base, tmp_path / "made")
    other = plan_conversion(base, QDeltaSettings(0.1))
    with pytest.raises(ArtifactError, match=r"lambda_init: 0\.1 wanted"):
        convert_into(other, made.path)
    assert convert_into(other, made.path, overwrite=True)
    (tmp_path / "mine").mkdir()
    for place in (tmp_path / "mine", base.path / "tokenizer.json"):
        with pytest.raises(ArtifactError, match="did not write it"):
            convert_into(other, place, overwrite=True)
    for place in (base.path, base.path.parent):
        with pytest.raises(ModelError, match="the model itself"):
            convert_into(other, place, overwrite=True)
    assert (tmp_path / "mine").is_dir()


def test_stopped_half_way_it_leaves_nothing(tmp_path, base, monkeypatch):
    def stop(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion.shutil, "copyfileobj", stop)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        convert(base, tmp_path / "made")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def changed(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


REFUSED = {
    "delta net": (tiny_delta_net, {}, "is a delta_net; what becomes"),
    "already": (tiny_qdelta, {}, "Q-Delta already"),
    "quantised": (tiny_gated_deltanet, {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    "hybrid": (tiny_gated_deltanet, {"attn": {"layers": [1], "num_heads": 2}}, "attn = "),
    "misfit": (tiny_gated_deltanet, {"num_hidden_layers": 3}, "num_hidden_layers = 3"),
}


@pytest.mark.parametrize(("builder", "fields", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_become_one_is_refused(tmp_path, builder, fields, message):
    folder = changed(builder(tmp_path / "m"), **fields)
    with pytest.raises(ModelError, match=message):
        plan_conversion(resolve_model(str(folder)), QDeltaSettings())


def test_code_of_the_base_is_not_said_to_be_its_own(tmp_path, base):
    folder = changed(shutil.copytree(base.path, tmp_path / "m"), auto_map={"AutoModelForCausalLM": "x.Y"})
    made = convert(resolve_model(str(folder)), tmp_path / "made")
    assert "auto_map" not in made.config
    assert made.config["architectures"] == ["QDeltaForCausalLM"]
