"""What a slice promises beside its logits: who reads which key head, how large the state is, what the index says."""

import json
import sys

import pytest
import torch
from safetensors import safe_open

from lapcli.artifacts import Lineage, write_artifact
from lapcli.cli.app import main
from lapcli.families.loading import load_model, resolve_model
from lapcli.families.registry import family_for
from lapcli.models import RecurrentCache
from lapcli.stages.slicing import plan_slicing, slice_model
from lapcli.testing.models import tiny_delta_net, tiny_gated_deltanet
from lapcli.testing.oracle import masked, relative_error

IDS = torch.randint(3, 259, (2, 40), generator=torch.Generator().manual_seed(1))
# fp64 through two layers; the oracle's bound for our own models.
EXACT = 1e-10


def layers_of(source):
    return family_for(source.config).layers(source.config)


def select(source, width, path):
    """A selection of other channels in every head."""
    generator = torch.Generator().manual_seed(0)
    kept = {
        layer.index: torch.stack(
            [torch.randperm(layer.key_width, generator=generator)[:width].sort().values for _ in range(layer.heads)]
        )
        for layer in layers_of(source)
    }
    lineage = Lineage("selection", source.describe(), "any", {"method": "by hand", "kept_width": width})
    return kept, write_artifact(path, lineage, {f"layers.{index}.kept": rows for index, rows in kept.items()})


@torch.no_grad()
def read_out(model):
    """What each value head of the first layer reads from its state, before the output norm: `[B, T, HV, V]`."""
    seen = []
    hook = model.mixers()[0].o_norm.register_forward_pre_hook(lambda _module, arguments: seen.append(arguments[0]))
    model(input_ids=IDS, use_cache=False)
    hook.remove()
    return seen[0]


def heads_that_change(model, side, head):
    """The value heads whose reading changes when one key head's queries or keys do."""

    def other(_module, _arguments, output):
        changed = [x.clone() for x in output]
        changed[side][:, :, head] = changed[side][:, :, head].flip(-1)
        return tuple(changed)

    before = read_out(model)
    hook = model.mixers()[0].tap.register_forward_hook(other)
    difference = (read_out(model) - before).abs().amax((0, 1, 3))
    hook.remove()
    return difference.nonzero().flatten().tolist()


@pytest.mark.parametrize("side", [0, 1], ids=["queries", "keys"])
@pytest.mark.parametrize(("heads", "value_heads"), [(2, 6), (3, 6), (2, 2)], ids=["HV=3H", "HV=2H", "HV=H"])
def test_value_head_j_reads_key_head_j_over_r(tmp_path, heads, value_heads, side):
    """`R = HV / H` value heads beside one another read one key head, in the base and in its slice."""
    sizes = {"num_heads": heads, "num_v_heads": value_heads, "head_dim": 16}
    base = resolve_model(str(tiny_gated_deltanet(tmp_path / "base", **sizes)))
    _kept, selection = select(base, 6, tmp_path / "selection.safetensors")
    slice_model(base, selection, tmp_path / "sliced")
    repeats = value_heads // heads
    for source in (base, resolve_model(str(tmp_path / "sliced"))):
        model = load_model(source, dtype=torch.float64)
        for head in range(heads):
            wanted = [j for j in range(value_heads) if j // repeats == head]
            assert heads_that_change(model, side, head) == wanted


@pytest.mark.parametrize(("heads", "value_heads"), [(2, 6), (3, 6)], ids=["HV=3H", "HV=2H"])
def test_value_heads_of_a_slice_read_their_own_key_heads_channels(tmp_path, heads, value_heads):
    """Each value head reads what it read with the dropped channels of key head `j // R` masked; no other head's."""
    sizes = {"num_heads": heads, "num_v_heads": value_heads, "head_dim": 16}
    base = resolve_model(str(tiny_gated_deltanet(tmp_path / "base", **sizes)))
    kept, selection = select(base, 6, tmp_path / "selection.safetensors")
    slice_model(base, selection, tmp_path / "sliced")
    found = read_out(load_model(resolve_model(str(tmp_path / "sliced")), dtype=torch.float64))
    whole, family = load_model(base, dtype=torch.float64), family_for(base.config)
    for j in range(value_heads):
        for head in range(heads):
            # Every key head is given the channels that one of them kept; only the readers of that one may agree.
            same = {index: rows[head].repeat(heads, 1) for index, rows in kept.items()}
            with masked(whole, family, layers_of(base), same):
                error = relative_error(found[:, :, j], read_out(whole)[:, :, j])
            assert error < EXACT if head == j // (value_heads // heads) else error > 1e-2, (j, head)


def held_bytes(model):
    """Bytes of the recurrent states that one sequence leaves, counted on the tensors and on their storage."""
    cache = RecurrentCache()
    with torch.no_grad():
        model(input_ids=IDS[:1], cache=cache, use_cache=True)
    states = [state.recurrent for state in cache.layers if state is not None]
    assert sum(x.untyped_storage().nbytes() for x in states) == sum(x.nbytes for x in states)
    return [x.nbytes for x in states]


def inspected(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lapcli", "inspect", str(path), "--json"])
    with pytest.raises(SystemExit) as done:
        main()
    assert not done.value.code
    return json.loads(capsys.readouterr().out)


WIDE = {
    "gated": (tiny_gated_deltanet, {"head_dim": 64, "expand_v": 2.0}, 2),
    "gated-gva": (tiny_gated_deltanet, {"head_dim": 64, "expand_v": 2.0, "num_v_heads": 4}, 4),
    "delta": (tiny_delta_net, {"expand_k": 2.0, "expand_v": 4.0}, 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", WIDE)
def test_state_bytes_are_those_of_the_tensors(tmp_path, monkeypatch, capsys, name, dtype):
    """Case 5: K 64 and V 128, and K' 24; what is announced, planned, inspected and held is one number."""
    builder, config, value_heads = WIDE[name]
    base = resolve_model(str(builder(tmp_path / "base", **config)))
    _kept, selection = select(base, 24, tmp_path / "selection.safetensors")
    plan = plan_slicing(base, selection)
    slice_model(base, selection, tmp_path / "sliced")
    for folder, width, planned in (("base", 64, plan.state_bytes_before), ("sliced", 24, plan.state_bytes_after)):
        wanted = value_heads * width * 128 * 4
        source = resolve_model(str(tmp_path / folder))
        assert held_bytes(load_model(source, dtype=dtype)) == [wanted, wanted]
        assert planned == 2 * wanted
        document = inspected(source.path, monkeypatch, capsys)
        assert [layer["state bytes"] for layer in document["layers"]] == [wanted, wanted]
        assert document["facts"]["state bytes of a sequence (fp32)"] == 2 * wanted


def in_shards(folder):
    """Bytes and entries of all tensors in a folder's shards, and the shard of each, read by safetensors itself."""
    total, parameters, places = 0, 0, {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as handle:
            for name in handle.offset_keys():
                tensor = handle.get_tensor(name)
                total += tensor.nbytes
                parameters += tensor.numel()
                assert places.setdefault(name, path.name) == path.name
    return total, parameters, places


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_index_of_a_sharded_slice_says_what_is_there(tmp_path, tied, dtype):
    """`total_size` and `total_parameters` are those of the tensors, and each tensor lies where the map says."""
    tiny_gated_deltanet(tmp_path / "fp32", tie_word_embeddings=tied)
    model = load_model(resolve_model(str(tmp_path / "fp32")), dtype=dtype)
    model.save_pretrained(tmp_path / "base", max_shard_size="40KB")
    base = resolve_model(str(tmp_path / "base"))
    _kept, selection = select(base, 11, tmp_path / "selection.safetensors")
    slice_model(base, selection, tmp_path / "sliced")
    sizes = []
    for folder in (tmp_path / "base", tmp_path / "sliced"):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        total, parameters, places = in_shards(folder)
        assert len(set(places.values())) > 2
        assert index["weight_map"] == places
        assert index["metadata"]["total_size"] == total
        assert index["metadata"]["total_parameters"] == parameters
        sizes.append(total)
    assert sizes[1] == plan_slicing(base, selection).bytes_after < sizes[0]


def test_grouped_values_are_those_of_repeated_key_heads(make_model, tokens):
    grouped = make_model("gated_deltanet", num_heads=16, num_v_heads=32, head_dim=4, expand_v=1.5)
    repeated = make_model("gated_deltanet", num_heads=32, num_v_heads=32, head_dim=4, expand_v=1.5)
    tensors = {
        name: tensor.unflatten(0, (16, 4)).repeat_interleave(2, 0).flatten(0, 1)
        if any(part in name for part in ("q_proj", "k_proj", "q_conv1d", "k_conv1d"))
        else tensor
        for name, tensor in grouped.state_dict().items()
    }
    repeated.load_state_dict(tensors)
    ids = tokens(2, 33)
    with torch.no_grad():
        wanted = repeated(ids).logits
        assert relative_error(grouped(ids).logits, wanted) < 1e-10
        head = grouped(ids[:, :20], use_cache=True)
        rest = grouped(ids[:, 20:], past_key_values=head.past_key_values, use_cache=True)
    assert relative_error(torch.cat([head.logits, rest.logits], 1), wanted) < 1e-10
